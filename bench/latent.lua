--- Attention over latents (MLA, absorbed): all heads share bf16 keys of 576 numbers,
-- whose first 512 numbers are the value; blocks of 64, random tables. Dense decode with
-- many heads (M5) and few (M6), and lists of 2048 random tokens: in decode with 128 heads
-- (M1) and others (M2), and for rows of a prompt (M3). The attention of a prefill, with
-- the products by which latents are expanded, or queries and results absorbed (M7).
-- Limit: with up to 32 heads every key once, at the read bandwidth of the same run; with
-- more, and in a prefill, the GEMM of the same run. Targets: times of FlashMLA on an
-- H200, 2026-11-23, and shares of them. FlashMLA's lists read f8 keys. Cases with -f8
-- have pages of f8_latent, 656 bytes a token.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local DIM, VALUE, BLOCK, FILL = 576, 512, 64, 65536
local ENDS, CODECS = { "", "-f8" }, { ["-f8"] = "f8_latent" } -- the suffix of an id
local SCALE = 1 / math.sqrt(192) -- DeepSeek's: of the keys before they are absorbed

--- Checks one row of q: all of its heads over the tokens that it sees.
local function check_row(w, row, seq, seen)
  kv.scope(function()
    local width = w.tables:size(1)
    local keys = kv.tensor(w.q.device, "f32", { width, 1, BLOCK, DIM })
    kv.ops.read_blocks(w.cache, w.tables:index(seq), keys, nil, w.format)
    keys = keys:reshape({ -1, DIM }):narrow(0, seen)
    if w.listed then
      keys = keys:gather_rows(w.listed:reshape({ w.q:size(0), -1 }):index(row))
    end
    local scores = w.q:index(row):cast("f32"):matmul_t(keys) * SCALE
    local want = scores:softmax():matmul(keys) -- the first numbers of keys are values
    want = want:transpose(0, 1):narrow(0, VALUE):transpose(0, 1)
    paged.expect("attention over latents", w.out:index(row), want, 0.02)
  end)
end

--- Random pages of f8_latent: their memory.
local function packed_memory(dev, blocks, format)
  local memory = kv.tensor(dev, "u8", { blocks,
    tonumber(kv.C.kvl_format_bytes_page(format)) })
  for first = 0, blocks * BLOCK - 1, FILL do
    kv.scope(function()
      local n = math.min(FILL, blocks * BLOCK - first)
      local rows = kv.randn(dev, "bf16", { n, 1, DIM }, { seed = first })
      kv.ops.append_kv(rows, nil, kv.arange(dev, "i64", n, first), memory, format)
    end)
  end
  return memory
end

--- Sequences of `len` tokens whose newest `news` are rows of q, with so many heads.
---@param k? integer  listed tokens of a row; all are attended to unless given
---@param codec? string  of the pages (bf16)
local function latents(seqs, len, news, heads, k, codec)
  return function(b)
    local dev, lens, w = b.device, {}, { scale = SCALE }
    for i = 1, seqs do lens[i] = len end
    local tables, blocks = paged.random_tables(dev, lens, BLOCK)
    w.format = kv.format { codec = codec or "bf16", kv_heads = 1, block_size = BLOCK,
                           head_dim = DIM, value_dim = VALUE }
    w.tables, w.lens = tables, kv.from(dev, "i32", { seqs }, lens)
    w.cache = codec and packed_memory(dev, blocks, w.format)
      or kv.randn(dev, "bf16", { blocks, 1, BLOCK, DIM }, { seed = 1 })
    w.q = kv.randn(dev, "bf16", { seqs * news, heads, DIM }, { seed = 2 })
    w.out = kv.full(dev, "bf16", { seqs * news, heads, VALUE }, 0 / 0)
    if news > 1 then w.starts = kv.arange(dev, "i32", seqs + 1) * news end
    local seen = (len - (news - 1) / 2) * news * seqs -- pairs of a token and a key
    if k then
      w.listed = kv.randint(dev, "i32", { seqs * news, 1, k }, { seed = 3, low = 0,
        high = len - news + 1 })
      seen = k * news * seqs
    end
    local function run() kv.ops.step.paged_attention(w) end
    local keys = k and news == 1 and k or len
    local bytes_token = tonumber(kv.C.kvl_format_bytes_page(w.format)) / BLOCK
    return { run = run, bytes = seqs * keys * bytes_token,
      flops = 2 * (DIM + VALUE) * heads * seen,
      limit = heads <= 32 and news == 1 and "R" or "T",
      check = function()
        run()
        check_row(w, 0, 0, len - news + 1)
        check_row(w, seqs * news - 1, seqs - 1, len)
      end }
  end
end

--- The attention of `count` new tokens behind `before` others. nope, v_dim: numbers of a
-- head's key without the rotated ones, and of its value.
local function prefill(heads, nope, v_dim, before, count, expand)
  return function(b)
    local dev, dtype = b.device, b.kind == "cpu" and "f32" or "bf16"
    local blocks, rotated = math.ceil((before + count) / BLOCK), DIM - VALUE
    local cache = kv.cache { device = dev, format = dtype, layers = 1, blocks = blocks,
      block_size = BLOCK, kv_heads = 1, head_dim = DIM, value_dim = VALUE }
    local function random(seed, ...)
      return kv.randn(dev, "f32", { ... }, { seed = seed, std = 0.2 }):cast(dtype)
    end
    local matrices = { keys = random(1, heads, nope, VALUE),
                       values = random(2, heads, v_dim, VALUE) }
    local q, k = random(3, count, heads, nope + rotated), random(4, count, 1, DIM)
    local seq = cache:sequence()
    local batch = cache:batch { max_tokens = math.max(before, count),
                                max_blocks = blocks }
    if before > 0 then
      batch:append({ seq }, { before })
      kv.ops.append_kv(random(5, before, 1, DIM), nil, batch.places, cache:layer(0),
        cache.format:of(0))
    end
    batch:append({ seq }, { count })
    local function run_with(does_expand)
      local attention = kv.attention { cache = cache, heads = heads, max_blocks = blocks,
        scale = SCALE, expand = does_expand }
      attention:begin(batch, true)
      assert(attention:expands(matrices) == does_expand)
      local out = kv.full(dev, dtype, { count, heads, v_dim }, 0 / 0)
      if does_expand then
        return function() attention:forward(0, q, k, nil, out, nil, matrices) end, out
      end
      local plain = q:narrow(0, nope, 2):transpose(0, 1)
      local absorbed = kv.tensor(dev, dtype, { count, heads, DIM })
      kv.check(kv.C.kvl_put_part(q:narrow(nope, rotated, 2), 2, VALUE, absorbed))
      local by_head, sums = kv.tensor(dev, dtype, { heads, count, VALUE }),
        kv.tensor(dev, dtype, { count, heads, VALUE })
      local values = kv.tensor(dev, dtype, { heads, count, v_dim })
      return function()
        plain:matmul(matrices.keys, by_head):transpose(0, 1, sums)
        kv.check(kv.C.kvl_put_part(sums, 2, 0, absorbed))
        attention:forward(0, absorbed, k, nil, sums):transpose(0, 1, by_head)
        by_head:matmul_t(matrices.values, values):transpose(0, 1, out)
      end, out
    end
    local run, out = run_with(expand)
    local pairs_seen, dim = count * (before + (count + 1) / 2), nope + rotated
    local flops = expand and 2 * dim * (pairs_seen + (before + count) * DIM)
      or pairs_seen * (DIM + VALUE) + count * VALUE * (nope + v_dim)
    return { run = run, flops = 2 * heads * flops, limit = "T", check = function()
      run()
      local other, want = run_with(not expand)
      other()
      paged.expect("attention in the other form", out, want:cast "f32", 0.02)
    end }
  end
end

return function(b)
  local function length(n) return math.max(BLOCK, b:shrunk(n)) end
  local function dense(id, seqs, len, heads, us, news)
    len = length(len)
    for _, suffix in ipairs(ENDS) do
      b:case { id = id .. suffix, target = { us = us },
        name = ("latents, %d heads, %d x %d%s"):format(heads, seqs, len,
          news and (", %d tokens"):format(news) or ""),
        setup = latents(seqs, len, news or 1, heads, nil, CODECS[suffix]) }
    end
  end
  dense("M5", 128, 4096, 128, 240)
  dense("M5", 1, 32768, 128, 48.5)
  dense("M5", 16, 32768, 128, 231)
  dense("M5", 64, 4096, 128, 217, 2)
  dense("M6", 1, 32768, 16, 23)
  dense("M6", 16, 32768, 16, 142)
  dense("M6", 128, 4096, 16, 142)
  local k, len = math.min(2048, b:shrunk(16384)), length(32768)
  for _, row in ipairs { { "M1", 1, 128, 18.4 }, { "M1", 16, 128, 36.5 },
                         { "M1", 64, 128, 84.7 }, { "M1", 128, 128, 165 },
                         { "M2", 8, 8 }, { "M2", 8, 16, 12 }, { "M2", 8, 64 } } do
    for _, suffix in ipairs(ENDS) do
      b:case { id = row[1] .. suffix, target = row[4] and { us = row[4] },
        name = ("latents, %d heads, %d listed for %d rows of decode"):format(row[3], k,
          row[2]),
        setup = latents(row[2], len, 1, row[3], k, CODECS[suffix]) }
    end
  end
  local rows = b:shrunk(2048)
  for _, suffix in ipairs(ENDS) do
    b:case { id = "M3" .. suffix, target = { tflop_s = 600 },
      name = ("latents, 128 heads, %d listed for %d rows of a prompt"):format(k, rows),
      setup = latents(1, len, rows, 128, k, CODECS[suffix]) }
  end
  for _, shape in ipairs { { "GLM-4.7-Flash", 20, 192, 256 }, { "DeepSeek-V3", 128, 128,
                                                                128 } } do
    for _, before in ipairs { 0, 28672 } do
      for _, expand in ipairs { false, true } do
        local count, behind = length(4096), before > 0 and length(before) or 0
        b:case { id = "M7",
          name = ("latents of %s, prefill of %d behind %d, %s"):format(shape[1], count,
            behind, expand and "expanded" or "absorbed"),
          setup = prefill(shape[2], shape[3], shape[4], behind, count, expand) }
      end
    end
  end
end
