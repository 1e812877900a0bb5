--- Exact: bytes are copied.
local kv = require "kvlab"
local link_bytes = require "spec.kernels.link_bytes"
local support = require "spec.support"

local SRC, DST, N = 7, 12, 4     -- blocks on either side, entries a row
local SEQS = 2

--- from and to, flat [SEQS, lanes, N]: about one entry in six is -1 or out of range, on
-- either side or on both. In a lane no two entries go to one block.
local function moves(c)
  local rng, from, to = support.rng(c.seed), {}, {}
  for lane = 0, c.lanes - 1 do
    local free = support.distinct(rng, SEQS * N, DST)
    for seq = 0, SEQS - 1 do
      for i = 1, N do
        local at = (seq * c.lanes + lane) * N + i
        from[at], to[at] = rng(SRC), free[seq * N + i]
        if rng(6) == 0 then from[at] = rng(2) == 0 and -1 or SRC end
        if rng(6) == 0 then to[at] = rng(2) == 0 and -1 or DST end
      end
    end
  end
  return from, to
end

--- dst, and how many bytes the op says it moved.
local function move(dev, c)
  local from, to = moves(c)
  local row = { 2, c.kv_heads, c.block_size, c.head_dim }
  local function memory(pinned, blocks, values)
    local open = pinned and kv.pinned or kv.tensor
    local t = open(dev, c.dtype, { blocks, unpack(row) })
    return values and t:copy_(values) or t:fill_(7)
  end
  local values = support.randn(kv.device "cpu", c.dtype, { SRC, unpack(row) }, c.seed)
  local src = memory(c.pinned == "src" or c.pinned == "both", SRC, values)
  local dst = memory(c.pinned == "dst" or c.pinned == "both", DST)
  local moved = kv.full(dev, "i64", { 1 }, 1000)
  local shape = { SEQS, c.lanes, N }
  kv.check(kv.C.kvl_move_blocks(src, kv.from(dev, "i32", shape, from), dst,
    kv.from(dev, "i32", shape, to), nil, not c.uncounted and moved or nil))
  return dst, moved:item() - 1000, support.numbers(values), from, to
end

local function expected(c, src, from, to)
  local half = c.kv_heads * c.block_size * c.head_dim
  local run, bytes = half / c.lanes, 0     -- elements moved in one go
  local dst = support.filled(DST * 2 * half, 7)
  for i = 1, #from do
    local lane = math.floor((i - 1) / N) % c.lanes
    if from[i] >= 0 and from[i] < SRC and to[i] >= 0 and to[i] < DST then
      for h = 0, 1 do
        local a = (from[i] * 2 + h) * half + lane * run
        local b = (to[i] * 2 + h) * half + lane * run
        for d = 1, run do dst[b + d] = src[a + d] end
        bytes = bytes + run * kv.C.kvl_dtype_bytes(kv.C["KVL_DTYPE_" .. c.dtype:upper()])
      end
    end
  end
  return dst, bytes
end

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
  for _, s in ipairs { { 1, 1, 8 }, { 2, 16, 64 }, { 3, 17, 80 }, { 8, 5, 24 },
                       { 4, 64, 128 } } do
    for _, lanes in ipairs { 1, s[1] } do
      for _, pinned in ipairs { "src", "dst", "both", "neither" } do
        cases[#cases + 1] = { dtype = dtype, kv_heads = s[1], block_size = s[2],
          head_dim = dtype == "f8e4m3" and 2 * s[3] or s[3], lanes = lanes,
          pinned = pinned, seed = #cases + 1, uncounted = #cases % 5 == 4 }
      end
    end
  end
end

describe("moving blocks", function()
  support.it_on_cpu("copies blocks or KV heads and counts the bytes", function(dev)
    for i, c in ipairs(support.sample_for_isa(cases)) do
      local dst, moved, src, from, to = move(dev, c)
      local want, bytes = expected(c, src, from, to)
      support.equal(dst, want, ("dst of case %d"):format(i))
      assert.equal(c.uncounted and 0 or bytes, moved)
    end
  end)

  support.it_on_cpu("tells the link what crosses it, and which way", function(dev)
    for _, lanes in ipairs { 1, 2 } do
      local shape = { 9, 2, 2, 4, 8 }
      local here, there = kv.zeros(dev, "bf16", shape), kv.pinned(dev, "bf16", shape)
      there:fill_(0)
      local list = { 3, 1, -1, 0, 2, 9 }
      if lanes == 2 then for i = 1, 6 do list[6 + i] = list[i] end end
      local index = kv.from(dev, "i32", { 2, lanes, 3 }, list)
      local bytes = 4 * 2 * 2 * 4 * 8 * 2
      local function crossed(src, dst)
        return { link_bytes(dev, function()
          kv.check(kv.C.kvl_move_blocks(src, index, dst, index, nil, nil))
        end) }
      end
      assert.same({ bytes, 0 }, crossed(there, here))
      assert.same({ 0, bytes }, crossed(here, there))
      assert.same({ 0, 0 }, crossed(here, here:clone()))
      assert.same({ 0, 0 }, crossed(there, kv.pinned(dev, "bf16", shape)))
    end
  end)

  support.each_device(function(dev)
    it("does nothing for an empty list", function()
      local before = support.randn(dev, "f32", { 3, 2, 1, 4, 8 }, 3)
      local dst, none = before:clone(), kv.tensor(dev, "i32", { 2, 1, 0 })
      kv.check(kv.C.kvl_move_blocks(before, none, dst, none, nil, nil))
      support.equal(dst, before, "dst")
    end)
  end)
end)

describe("moving blocks on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases) do
      local dst, moved = move(cuda, c)
      local want, bytes = move(cpu, c)
      support.equal(dst, want, ("dst of case %d"):format(i))
      assert.equal(bytes, moved)
    end
  end)
end)
