--- Nothing from Lua crashes the process: every public function gets arguments of every
-- kind, at random, and either works or raises. The ops of the host tier and the hot cache
-- get calls that are nearly right, straight through the C API.
local ffi = require "ffi"
local kv = require "kvlab"
local methods = require("kvlab.tensor.tensor").methods
local support = require "spec.support"

local C, raises = kv.C, support.raises
local CALLS, NEAR_CALLS = 20000, 1000
local DTYPES = { "f32", "f16", "bf16", "i32", "i64", "u8", "u64", "f8e4m3" }
local MAKERS = { "tensor", "full", "zeros", "ones", "arange", "randn", "rand", "randint",
                 "from", "pinned", "cache", "attention", "graph" }

--- Everything public that takes arguments, in a fixed order; not data(), which hands
-- out a raw pointer.
local function functions()
  local list = {}
  local function add(prefix, t)
    for name, fn in pairs(t) do
      if name ~= "data" then list[#list + 1] = { name = prefix .. name, fn = fn } end
    end
  end
  add("tensor:", methods)
  add("ops.", kv.ops)
  add("vllm.", kv.vllm)
  for _, name in ipairs(MAKERS) do list[#list + 1] = { name = name, fn = kv[name] } end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

local function any_value(rng, dev)
  local function tensor()
    local dims = {}
    for i = 1, rng(4) do dims[i] = rng(5) end
    return kv.zeros(dev, DTYPES[1 + rng(#DTYPES)], dims)
  end
  local kinds = {
    function() return nil end, function() return rng(10) - 5 end,
    function() return "x" end,
    function() return {} end, function() return { rng(3), rng(3) } end,
    function() return 0 / 0 end, function() return true end, function() return dev end,
    function() return 2 ^ 40 end, function() return DTYPES[1 + rng(#DTYPES)] end,
    tensor, tensor, tensor,
    function()
      local closed = tensor()
      closed:free()
      return closed
    end,
  }
  return kinds[1 + rng(#kinds)]()
end

describe("misuse", function()
  it("raises or works, whatever the arguments are", function()
    local list, rng, dev = functions(), support.rng(7), kv.device "cpu"
    local worked, raised = 0, 0
    for _ = 1, CALLS do
      local args = {}
      for i = 1, 6 do args[i] = any_value(rng, dev) end
      local ok = pcall(list[1 + rng(#list)].fn, unpack(args, 1, 6))
      if ok then worked = worked + 1 else raised = raised + 1 end
    end
    assert.is_true(worked > 100 and raised > 100)
    assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
  end)
end)

-- ---- options of an offload engine -----------------------------------------------------

support.each_device(function(dev)
  describe("misuse of offload on " .. dev:name(), function()
    local function open(offload, dtype)
      return kv.cache { device = dev, format = dtype or "f32", layers = 2, blocks = 8,
        block_size = 4, kv_heads = 2, head_dim = 8, offload = offload }
    end

    it("has words for options that make no sense, and keeps no memory", function()
      collectgarbage()
      collectgarbage()
      local before = dev:stats()
      for words, o in pairs {
        ["slots is 0, expected a whole number from 1 to 32"] = { slots = 0 },
        ["slots is 33, expected a whole number from 1 to 32"] = { slots = 33 },
        ["slots is -1, expected a whole number"] = { slots = -1 },
        ["slots is 2.5, expected a whole number"] = { slots = 2.5 },
        ['slots is "many", expected a whole number'] = { slots = "many" },
        ["hot_slots is nan, expected a whole number"] = { hot_slots = 0 / 0 },
        ["hot_overlap is 1, expected true or false"] = { hot_overlap = 1 },
        ['"slot" is no option, did you mean slots'] = { slot = 4 },
        ["no memory on " .. dev:name()] = { slot_blocks = 2 ^ 31 - 1 },
        ["no memory"] = { hot_slots = 2 ^ 31 - 1, slot_blocks = 1 },
        ["slot_blocks is 2147483648, expected a whole number >= 0, and below 2^31"] =
          { slot_blocks = 2 ^ 31 },
        ["expected"] = { slot_blocks = 1e300 },
        ["max_seqs is 0, expected a whole number >= 1"] = { max_seqs = 0 },
      } do
        raises(words, open, o)
      end
      raises('format is "i32", expected one of f32, f16, bf16, f8e4m3, int8', open,
        { slot_blocks = 1 }, "i32")
      collectgarbage()
      collectgarbage()
      assert.equal(before.bytes_live, dev:stats().bytes_live)
      assert.equal(before.bytes_pinned, dev:stats().bytes_pinned)
      open({ slot_blocks = 1, max_seqs = 1, hot_slots = 1 }):close()
    end)

    it("has words for what an engine has no room for", function()
      local cache = open { slot_blocks = 1, max_seqs = 2, max_tokens = 8, hot_slots = 1 }
      raises("max_seqs = 2 and max_tokens = 8", cache.batch, cache, {})
      raises('decode_through is "device", expected one of ring, hot', kv.attention,
        { cache = cache, heads = 2, decode_through = "device" })
      local batch, seq = cache:batch { max_seqs = 1, max_tokens = 8 }, cache:sequence()
      local attention = kv.attention { cache = cache, heads = 2, max_seqs = 1 }
      local function step(tokens, is_prefill)
        local q = kv.zeros(dev, "f32", { tokens, 2, 8 })
        batch:append({ seq }, { tokens })
        attention:begin(batch, is_prefill)
        for layer = 0, 1 do attention:forward(layer, q, q, q) end
      end
      step(8, true)
      raises("the hot cache has 1 slots for a KV head", step, 1, false)
      seq:close()
      cache:close()
    end)
  end)
end)

-- ---- calls that are nearly right ------------------------------------------------------

local FLOATS = { "f32", "f16", "bf16" }
local SIZES = { 0, 1, 2, 3, 5 }
local HOT = { "memory", "slot_of", "block_of", "order", "priority", "counters",
              "ahead", "uses", "age" }
local RESOLVE = { "selection", "tables", "slots", "miss_from", "miss_to", "hit_logical",
                  "hit_slots", "miss_logical", "miss_slots" }

--- Draws sizes and tensors of them for one call.
local function new_maker(rng, dev)
  local m = { dtype = FLOATS[1 + rng(3)] }
  local block_size, head_dim = ({ 1, 2, 16 })[1 + rng(3)], ({ 8, 24 })[1 + rng(2)]
  m.kv_heads, m.block_size, m.head_dim = SIZES[1 + rng(5)], block_size, head_dim

  function m.size() return SIZES[1 + rng(5)] end
  function m.maybe(value) return rng(2) == 0 and value or nil end
  function m.x() return 16 / kv.dtype_bytes(m.dtype) end
  function m.lanes() return rng(2) == 0 and 1 or m.kv_heads end

  --- Whole numbers, some of them out of every range.
  function m.ints(low, dtype, ...)
    local dims, values, count = { ... }, {}, 1
    for _, size in ipairs(dims) do count = count * size end
    for i = 1, count do
      values[i] = rng(20) == 0 and 2 ^ 31 - 1 or low + rng(10)
    end
    return kv.from(dev, dtype, dims, values)
  end
  function m.i32(...) return m.ints(-3, "i32", ...) end

  --- Rows of q that sequences own: right, for nothing checks them.
  function m.starts(seqs, tokens)
    local starts = { 0 }
    for i = 2, seqs do starts[i] = starts[i - 1] + rng(tokens - starts[i - 1] + 1) end
    starts[seqs + 1] = tokens
    return kv.from(dev, "i32", starts)
  end

  function m.rows(dtype, ...) return kv.full(dev, dtype, { ... }, 1) end
  function m.blocks(count)
    local make = rng(2) == 0 and kv.tensor or kv.pinned
    return make(dev, m.dtype, { count, 2, m.kv_heads, block_size, head_dim }):fill_(1)
  end

  --- The tensors of a kvl_hot: what it knows of its slots may be wrong.
  function m.hot(slots, blocks)
    return { memory = m.blocks(slots), slot_of = m.ints(-1, "i32", m.kv_heads, blocks),
             block_of = m.i32(m.kv_heads, slots), order = m.i32(m.kv_heads, slots),
             priority = m.maybe(m.rows("f32", m.kv_heads, blocks)),
             counters = m.rows("i64", 5),
             ahead = m.maybe(m.i32(m.kv_heads, slots)),
             uses = m.maybe(m.rows("f32", m.kv_heads, blocks)),
             age = m.maybe(m.rows("f32", m.kv_heads, blocks)) }
  end
  return m
end

local function fill(struct, names, tensors)
  for _, name in ipairs(names) do struct[name] = tensors[name] end
  return struct
end

local function hot_of(tensors) return fill(ffi.new "kvl_hot", HOT, tensors) end

--- Each gives tensors by name, and a function that makes the call with them.
local NEAR = {
  move_blocks = function(m)
    local seqs, lanes, n = m.size(), m.lanes(), m.size()
    return { src = m.blocks(m.size()), from = m.i32(seqs, lanes, n),
             dst = m.blocks(m.size()), to = m.i32(seqs, lanes, n),
             moved = m.maybe(m.rows("i64", 1)) },
      function(t) return C.kvl_move_blocks(t.src, t.from, t.dst, t.to, nil, t.moved) end
  end,

  cut_selection = function(m)
    local seqs, heads, n = m.size(), m.size(), m.size()
    local passes, n_open = m.size(), m.size()
    local selection = m.maybe(m.i32(seqs, heads, m.size()))
    if not selection then heads = 1 end
    local size = m.maybe(m.block_size) or m.size() - 1
    return { selection = selection, tables = m.i32(seqs, m.size()), lens = m.i32(seqs),
             opens = m.i32(seqs, 2), logical = m.i32(passes, seqs, heads, n),
             physical = m.i32(passes, seqs, heads, n),
             open_logical = m.i32(seqs, heads, n_open),
             open_slots = m.i32(seqs, heads, n_open) },
      function(t)
        local names = { "selection", "tables", "lens", "opens", "logical", "physical",
                        "open_logical", "open_slots" }
        local call = fill(ffi.new "kvl_cut", names, t)
        call.block_size = size
        return C.kvl_cut_selection(call)
      end
  end,

  hot_resolve = function(m)
    local seqs, n = m.size(), m.size()
    local t = m.hot(m.maybe(m.size()) or seqs * n + 1, m.size())
    t.selection, t.tables = m.i32(seqs, m.lanes(), n), m.i32(seqs, m.size())
    t.slots = m.i32(seqs, m.kv_heads, n)
    t.miss_from = m.i32(1, m.kv_heads, seqs * n)
    t.miss_to = m.i32(1, m.kv_heads, seqs * n)
    if m.maybe(true) then
      for i = 6, 9 do t[RESOLVE[i]] = m.i32(seqs, m.kv_heads, n) end
    end
    return t, function(u)
      return C.kvl_hot_resolve(hot_of(u), fill(ffi.new "kvl_resolve", RESOLVE, u))
    end
  end,

  hot_append = function(m)
    local tokens, dtype = m.size(), m.maybe "f32" or m.dtype
    local t = m.hot(m.size(), m.size())
    t.k = m.rows(dtype, tokens, m.kv_heads, m.head_dim)
    t.v = m.rows(dtype, tokens, m.kv_heads, m.head_dim)
    t.places, t.cache = m.ints(-3, "i64", tokens), m.blocks(t.slot_of:size(1))
    if m.maybe(true) then
      t.buffer, t.buffer_places = m.blocks(m.size()), m.ints(-3, "i64", tokens)
    end
    return t, function(u)
      return C.kvl_hot_append(hot_of(u), u.k, u.v, u.places, u.cache, u.buffer_places,
        u.buffer)
    end
  end,

  scatter_scores = function(m)
    local seqs, width = m.size(), m.size()
    return { scores = m.rows("f32", seqs, m.lanes(), width), tables = m.i32(seqs, width),
             out = m.rows("f32", m.kv_heads, m.size()) },
      function(t) return C.kvl_scatter_scores(t.scores, t.tables, t.out) end
  end,

  rope_append = function(m)
    local tokens, dtype = m.size(), m.maybe "f32" or m.dtype
    return { q = m.rows(dtype, tokens, m.size(), m.head_dim),
             k = m.rows(dtype, tokens, m.kv_heads, m.head_dim),
             v = m.rows(dtype, tokens, m.kv_heads, m.head_dim),
             positions = m.i32(tokens), inv_freq = m.rows("f32", m.size()),
             places = m.ints(-3, "i64", tokens), cache = m.blocks(m.size()) },
      function(t)
        return C.kvl_rope_append(t.q, t.k, t.v, t.positions, t.inv_freq, t.places,
          t.cache, nil)
      end
  end,

  hot_drop = function(m)
    local t = m.hot(m.size(), m.size())
    t.blocks = m.i32(m.size())
    return t, function(u) return C.kvl_hot_drop(hot_of(u), u.blocks) end
  end,

  vllm_append = function(m)
    local tokens, dtype, dim, x = m.size(), m.maybe "f32" or m.dtype, 32, m.x()
    return { k = m.rows(dtype, tokens, m.kv_heads, dim),
             v = m.rows(dtype, tokens, m.kv_heads, dim),
             places = m.ints(-3, "i64", tokens),
             keys = m.rows(m.dtype, 2, m.kv_heads, dim / x, 8, x),
             values = m.rows(m.dtype, 2, m.kv_heads, dim, 8) },
      function(t)
        return C.kvl_vllm_append(t.k, t.v, t.places, t.keys, t.values, nil, nil)
      end
  end,

  vllm_attention = function(m)
    local seqs, heads, dim, x = m.size(), m.kv_heads * m.size(), 32, m.x()
    local blocks, version = m.size(), ({ 0, 1, 2 })[m.size() % 3 + 1]
    return { q = m.rows(m.dtype, seqs, heads, dim), tables = m.i32(seqs, m.size()),
             key_cache = m.rows(m.dtype, blocks, m.kv_heads, dim / x, 8, x),
             value_cache = m.rows(m.dtype, blocks, m.kv_heads, dim, 8),
             lens = m.i32(seqs), alibi = m.maybe(m.rows("f32", heads)),
             out = m.rows(m.dtype, seqs, heads, dim) },
      function(t)
        local call = ffi.new "kvl_vllm"
        for name, tensor in pairs(t) do call[name] = tensor end
        call.scale, call.version = 1, version
        return C.kvl_vllm_attention(call)
      end
  end,

  paged_attention = function(m)
    local seqs, heads, dtype = m.size(), m.kv_heads * m.size(), m.maybe "f32" or m.dtype
    local is_prefill, tokens, most = seqs > 0 and m.maybe(true), seqs, m.size()
    if is_prefill then tokens = m.size() end
    local t = { q = m.rows(dtype, tokens, heads, m.head_dim), cache = m.blocks(m.size()),
                tables = m.i32(seqs, m.size()), lens = m.i32(seqs),
                starts = is_prefill and m.starts(seqs, tokens) or nil,
                selection = m.maybe(m.i32(seqs, m.lanes(), most)),
                out = m.rows(dtype, tokens, heads, m.head_dim),
                lse = m.maybe(m.rows("f32", tokens, heads)) }
    if t.selection then t.slots = m.maybe(m.i32(seqs, m.lanes(), most)) end
    if m.maybe(true) then
      t.prev_out = m.rows("f32", tokens, heads, m.head_dim)
      t.prev_lse = m.rows("f32", tokens, heads)
    end
    return t, function(u)
      local call = ffi.new "kvl_attention"
      for name, tensor in pairs(u) do call[name] = tensor end
      call.scale = 1
      return C.kvl_paged_attention(call)
    end
  end,
}

--- One tensor less, or a closed one, or one of another dtype or shape.
local function spoil(rng, dev, tensors)
  local names = {}
  for name in pairs(tensors) do names[#names + 1] = name end
  table.sort(names)
  local name = names[1 + rng(#names)]
  local t, kind = tensors[name], rng(5)
  local dims = t:dims()
  if kind == 0 then
    tensors[name] = nil
  elseif kind == 1 then
    tensors[name] = t:clone()
    tensors[name]:free()
  elseif kind == 2 then
    tensors[name] = kv.zeros(dev, DTYPES[1 + rng(#DTYPES)], dims)
  else
    local i = 1 + rng(#dims)
    if kind == 3 then dims[i] = dims[i] + 1 else table.remove(dims, i) end
    tensors[name] = kv.zeros(dev, t:type(), dims)
  end
end

support.each_device(function(dev)
  describe("misuse of the ops of the host tier on " .. dev:name(), function()
    for name, near in pairs(NEAR) do
      it("fails or works: " .. name, function()
        local rng, worked, failed = support.rng(11), 0, 0
        for _ = 1, NEAR_CALLS do
          local tensors, call = near(new_maker(rng, dev))
          if rng(3) == 0 then spoil(rng, dev, tensors) end
          if call(tensors) >= 0 then worked = worked + 1 else failed = failed + 1 end
        end
        dev:sync()
        assert.is_true(worked > NEAR_CALLS / 4 and failed > NEAR_CALLS / 10,
          ("%d worked, %d failed"):format(worked, failed))
        assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
      end)
    end
  end)
end)
