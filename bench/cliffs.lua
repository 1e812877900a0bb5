--- Cliffs: shapes that take much longer than the shapes beside them. Each walk varies
-- what a user may vary, beside what was tuned: head_dim, heads on a KV head, block size,
-- prompts, new tokens, sequences, context, features, formats, hooks, lists, latents,
-- top-k, scores and appends. bench/lib/walk.lua says which points are compared, and when
-- a point is a cliff. `kvlab bench cliffs` runs all walks and `kvlab bench C1` one of
-- them; `kvlab bench` without names runs none.
--
-- The work of attention is bytes and flops, as bench/lib/attention.lua counts them. The
-- work of scores is the bytes of summaries or keys, and 2 flops for each of their numbers
-- and each query head. The work of top-k is the bytes of its rows, and the work of an
-- append the bytes that it reads and writes. On the CPU contexts are shorter; see
-- Bench:shrunk.
local attention = require "bench.lib.attention"
local hooked = require "bench.lib.hooked"
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local C, KV_HEADS, BLOCK = kv.C, paged.KV_HEADS, paged.BLOCK
local DIMS = { "head_dim", 40, 64, 72, 80, 96, 112, 128, 160, 192, 256 }
local HEADS = { "heads", 1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 65, 96, 128 }
local FORMATS = { "format", "bf16", "f8e4m3", "int8" }

--- An axis of the numbers from `first` to `last` by `step`.
local function range(name, first, last, step)
  local axis = { name }
  for value = first, last, step do axis[#axis + 1] = value end
  return axis
end

-- ---- attention ------------------------------------------------------------------------

-- The names of axes -> their names in bench/lib/attention.lua.
local FIELDS = { head_dim = "dim", block_size = "block", new_tokens = "chunk",
                 format = "dtype", sequences = "seqs", context = "len", rows = "seqs",
                 k = "listed" }

--- Attention at a point. base: the values that no axis gives.
local function attend(base)
  return function(b, at)
    local o = {}
    for name, value in pairs(base) do o[name] = value end
    for name, value in pairs(at) do o[FIELDS[name] or name] = value end
    if at.prompt then o.chunk, o.len = at.prompt, at.prompt end
    if at.per_kv_head then o.heads = o.per_kv_head * (o.kv_heads or KV_HEADS) end
    if at.features then
      o.alibi = at.features:find "ALiBi" and true or nil
      o.soft_cap = at.features:find "cap" and 50 or 0
      o.window = at.features:find "window" and math.floor(o.len * 7 / 8) or 0
    end
    return attention.work(b, o)
  end
end

--- f8e4m3 and int8 have head_dims of whole vectors of 16.
local function no_such_dim(at)
  return at.format ~= "bf16" and (at.head_dim or 16) % 16 > 0
end

--- Decode with ALiBi as a policy's bias, or without any, checked with the op's own.
local function hook(o)
  return function(b, at)
    local slope = kv.expr.const("f32", "slopes", "kv_head", "head")
    local has_bias, kv_heads = at.hook == "bias", o.kv_heads or KV_HEADS
    local heads, dim = at.heads or kv_heads * at.per_kv_head, o.dim or at.head_dim
    local bias = slope * (kv.expr.position - kv.expr.query_position)
    local r = hooked.prepare(b, { seqs = o.seqs, len = o.len, dim = dim, heads = heads,
      kv_heads = kv_heads, value_dim = o.value_dim, block = o.block,
      def = has_bias and { bias = bias } })
    return { bytes = r.bytes,
      flops = 2 * (dim + (o.value_dim or dim)) * heads * o.seqs * o.len,
      run = function() hooked.attend(r) end,
      check = function()
        hooked.attend(r)
        local want = kv.ops.paged_attention { q = r.q, cache = r.memory,
          tables = r.ctx.tables, lens = r.ctx.lens, format = r.ctx.format:of(0),
          alibi = has_bias and r.p.slopes:reshape { heads } or nil }
        paged.expect("the result with a hook", r.out, want:cast "f32", 0.02)
      end }
  end
end

-- ---- top-k ----------------------------------------------------------------------------

local function topk(k)
  return function(b, at)
    local rows, n, dev = at.rows, at.length, b.device
    local x = kv.randn(dev, "f32", { rows, n }, { seed = 1 })
    local which = C.KVL_TOPK_LARGEST + C.KVL_TOPK_BY_INDEX
    local wanted = math.min(at.k or k, n)
    local indices = kv.full(dev, "i32", { rows, wanted }, -1)
    local function run() kv.check(C.kvl_topk(x, which, nil, indices)) end
    return { run = run, bytes = 4 * rows * (n + wanted), check = function()
      run()
      if b.kind == "cpu" then return end -- whose own result this is checked with
      local last = x:narrow(rows - 1, 1):to "cpu"
      local want, got = kv.tensor("cpu", "i32", { 1, wanted }), indices:to "cpu"
      kv.check(C.kvl_topk(last, which, nil, want))
      local off = got:narrow(rows - 1, 1):ne(want):cast("f32"):sum():item()
      assert(off == 0, "the top-k differs from the CPU's")
    end }
  end
end

-- ---- scores ---------------------------------------------------------------------------

-- How many vectors each op reads of a block and KV head, and the op.
local SCORES = {
  ["min/max"] = { 2, function(...) kv.check(C.kvl_score_minmax(...)) end },
  ["mean"] = { 1, function(...) kv.check(C.kvl_score_mean(...)) end },
  ["max q.k"] = { BLOCK, function(q, cache, tables, lens, _, group, scores)
    kv.check(C.kvl_score_max_qk(q, cache, nil, tables, lens, group, scores))
  end },
}

local function score(op, seqs, len)
  local parts, run_op = unpack(SCORES[op])
  return function(b, at)
    local dev, dim, lens, w = b.device, paged.DIM, {}, {}
    for s = 1, seqs do lens[s] = len end
    local tables, blocks = paged.random_tables(dev, lens)
    local shape = parts == 1 and { blocks, KV_HEADS, dim }
      or { blocks, 2, KV_HEADS, dim }
    if op == "max q.k" then table.insert(shape, 4, BLOCK) end
    local keys = kv.randn(dev, "bf16", shape, { seed = 1 })
    local heads = at.per_kv_head * KV_HEADS
    local q = kv.randn(dev, at.q, { seqs, heads, dim }, { seed = 2 })
    local lens_there = kv.from(dev, "i32", { seqs }, lens)
    local function scores_of(x)
      local scores = kv.full(dev, "f32", { seqs, KV_HEADS, len / BLOCK }, 0 / 0)
      run_op(x, keys, tables, lens_there, BLOCK, C.KVL_GROUP_MAX, scores)
      return scores
    end
    w.scores = scores_of(q)
    local function run()
      run_op(q, keys, tables, lens_there, BLOCK, C.KVL_GROUP_MAX, w.scores)
    end
    local numbers = blocks * parts * KV_HEADS * dim
    return { run = run, bytes = 2 * numbers, flops = 2 * numbers * at.per_kv_head,
      check = function()
        local one = scores_of(q:cast(at.q == "f32" and "bf16" or "f32"))
        paged.expect("scores by another dtype of q", w.scores, one, 0.02)
      end }
  end
end

-- ---- appends --------------------------------------------------------------------------

--- Some tokens at random places of a cache; rope_append rotates q and k, too.
local function append(tokens)
  return function(b, at)
    local dev, n, dim = b.device, at.tokens or tokens, at.head_dim or paged.DIM
    local blocks = math.ceil(n / BLOCK) + 1
    local format = kv.format { codec = at.format, kv_heads = KV_HEADS, head_dim = dim,
      block_size = BLOCK }
    local dtype = at.format == "f8e4m3" and "bf16" or at.format
    local has_rope = at.op == "rope_append"
    local packed = at.format == "int8"
    local memory = packed and kv.zeros(dev, "u8", { blocks,
        tonumber(C.kvl_format_bytes_page(format)) })
      or kv.zeros(dev, at.format, { blocks, 2, KV_HEADS, BLOCK, dim })
    local function rows(heads, seed)
      return kv.randn(dev, packed and "bf16" or dtype, { n, heads, dim }, { seed = seed })
    end
    local q, k, v = rows(paged.HEADS, 1), rows(KV_HEADS, 2), rows(KV_HEADS, 3)
    local _, order = kv.rand("cpu", "f32", { 1, blocks * BLOCK }, { seed = 4 }):sort()
    local places = order:reshape({ -1 }):narrow(0, n):cast("i64"):to(dev)
    local positions = kv.arange(dev, "i32", n)
    local turns = kv.rand(dev, "f32", { dim / 2 }, { seed = 5 })
    local function run()
      if not has_rope then return kv.ops.append_kv(k, v, places, memory, format) end
      kv.ops.rope_append(q, k, v, positions, turns, places, memory, format)
    end
    local bytes = k:bytes() * 2 + memory:bytes() * n / (blocks * BLOCK)
    return { run = run, bytes = bytes + (has_rope and 2 * q:bytes() or 0) }
  end
end

-- ---- the walks ------------------------------------------------------------------------

return function(b)
  local function length(n) return math.max(BLOCK, b:shrunk(n)) end
  local function lengths(name, ...)
    local axis, before = { name }, nil
    for _, n in ipairs { ... } do
      if length(n) ~= before then axis[#axis + 1] = length(n) end
      before = length(n)
    end
    return axis
  end
  local function walk(id, name, axes, make, skip)
    b:walk { id = id, name = name, axes = axes, make = make, skip = skip }
  end

  local chunk, middle = length(2048), length(10240)
  walk("C1", "prefill by head_dim", { range("head_dim", 40, 256, 8) },
    attend { chunk = chunk, len = middle })
  walk("C2", "few new tokens by head_dim", { DIMS, { "new_tokens", 1, 2, 4, 8, 16, 32 } },
    attend { len = length(32768) })
  walk("C3", "query heads on a KV head", { { "new_tokens", 1, 4 },
    { "per_kv_head", 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128 } },
    attend { seqs = 4, len = length(8192) })
  walk("C4", "block sizes", { { "new_tokens", 1, 4, chunk },
    { "block_size", 1, 2, 8, 16, 32, 64, 128, 256 } }, attend { len = length(32768) })
  walk("C5", "new tokens by format", { FORMATS,
    { "new_tokens", 1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 128 } },
    attend { len = length(65536) })
  walk("C6", "sequences", { { "new_tokens", 1, 4 },
    { "sequences", 1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64 } },
    attend { len = length(4096) })
  walk("C7", "context", { { "new_tokens", 1, 4 },
    lengths("context", 4096, 8192, 16384, 32768, 65536, 131072) }, attend {})
  walk("C8", "features by format", { FORMATS, { "new_tokens", 1, 4, length(2048) },
    { "features", "none", "window", "cap", "ALiBi", "window+cap", "window+ALiBi",
      "cap+ALiBi", "window+cap+ALiBi" } }, attend { seqs = 4, len = length(8192) })
  walk("C9", "hooks in decode", { { "hook", "none", "bias" },
    { "head_dim", 64, 72, 128, 256 }, { "per_kv_head", 4, 16, 17, 32, 64 } },
    hook { seqs = 4, len = length(4096) })
  walk("C10", "lists of tokens by rows", { FORMATS, { "rows", 1, 4, 16, 17, 64 },
    lengths("k", 512, 2048, 8192) }, attend { len = length(131072) })
  walk("C11", "lists of tokens by head_dim", { FORMATS, DIMS },
    attend { seqs = 16, listed = length(2048), len = length(131072) }, no_such_dim)
  local latent = { kv_heads = 1, dim = 576, value_dim = 512, block = 64, seqs = 16,
                   len = math.max(64, length(8192)) }
  walk("C12", "latents", { HEADS, { "new_tokens", 1, 2 } }, attend(latent))
  walk("C13", "lists of latents", { HEADS, lengths("k", 512, 2048) }, attend(latent))

  walk("C14", "top-k by rows and length", { { "rows", 1, 8, 16, 17, 64, 66 },
    lengths("length", 8192, 16384, 32768, 65536, 131072, 524288, 2097152, 4194304) },
    topk(length(2048)))
  walk("C15", "top-k by k", { { "rows", 1, 16, 64 }, lengths("length", 16384, 131072),
    lengths("k", 256, 1024, 2048, 4096, 8192) }, topk())

  local groups = { "per_kv_head", 1, 2, 4, 8, 16, 32, 64, 96, 128 }
  for i, op in ipairs { "min/max", "mean", "max q.k" } do
    local len = length(op == "max q.k" and 4096 or 32768)
    walk("C" .. 15 + i, "scores by " .. op, { { "q", "bf16", "f32" }, groups },
      score(op, 16, len))
  end
  local ops = { "op", "append_kv", "rope_append", apart = true }
  walk("C19", "appends by head_dim", { FORMATS, ops, DIMS }, append(length(4096)),
    no_such_dim)
  walk("C20", "appends by tokens", { FORMATS, ops,
    { "tokens", 1, 2, 4, 8, 16, 17, 64, 256, 1024, 4096 } }, append())
  walk("C21", "prompts", { { "head_dim", 64, 128, 256 }, { "per_kv_head", 1, 4 },
    lengths("prompt", 128, 256, 512, 1024, 2048, 4096) }, attend {})
  walk("C22", "hooks over latents", { { "hook", "none", "bias" },
    { "heads", 1, 8, 16, 17, 32, 33, 64, 128 } }, hook(latent))
end
