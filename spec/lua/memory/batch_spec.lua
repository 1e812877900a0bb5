--- The layout of a batch: what it has room for, and that its arrays do not overlap.
local batch = require "kvlab.memory.batch"
local ffi = require "ffi"
local kv = require "kvlab"

local function open(block_size, offload)
  return kv.cache { device = "cpu", format = "f32", layers = 1, blocks = 64,
    block_size = block_size, kv_heads = 1, head_dim = 8, offload = offload }
end

--- Sizes of the arrays that a step has, by name; the dtypes' bytes included.
local function arrays(b)
  local list = {}
  for _, owner in ipairs { b, b.placement } do
    for name, value in pairs(owner) do
      if kv.is_tensor(value) and name ~= "device_ints" then
        local at = tonumber(ffi.cast("intptr_t", value.ptr)
          - ffi.cast("intptr_t", b.device_ints.ptr))
        list[#list + 1] = { name = name, from = at, to = at + value:bytes() }
      end
    end
  end
  table.sort(list, function(x, y)
    return x.from < y.from or x.from == y.from and x.to < y.to
  end)
  return list
end

describe("batch", function()
  it("has room for the most blocks that a step can write to", function()
    local draw = math.random
    math.randomseed(7)
    for _ = 1, 2000 do
      local size, seqs = draw(1, 9), draw(1, 6)
      local tokens, touched = 0, 0
      for _ = 1, seqs do
        local before, count = draw(0, 40), draw(0, 30)
        tokens = tokens + count
        if count > 0 then
          touched = touched + math.floor((before + count - 1) / size)
            - math.floor(before / size) + 1
        end
      end
      assert.is_true(touched <= batch.most_touched(seqs, tokens, size))
    end
  end)

  for name, offload in pairs { resident = false,
      ring = { max_seqs = 5, max_tokens = 40, slot_blocks = 2, slots = 2 } } do
    it("keeps its arrays apart and inside its memory, " .. name, function()
      math.randomseed(11)
      local cache = open(3, offload)
      local b = cache:batch { max_seqs = 5, max_tokens = 40 }
      for _ = 1, 60 do
        local seqs, counts, left = {}, {}, 40
        for i = 1, math.random(1, 5) do
          seqs[i] = cache:sequence()
          counts[i] = math.random(0, math.min(left, 12))
          left = left - counts[i]
        end
        b:append(seqs, counts)
        local last, total = nil, b.room * 4
        for _, array in ipairs(arrays(b)) do
          assert.is_true(array.from >= 0 and array.to <= total, array.name)
          local is_view = array.name:find "3$" -- of another array's memory
          if last and not is_view then
            assert.is_true(array.from >= last.to,
              last.name .. " runs into " .. array.name)
          end
          if not is_view then last = array end
        end
        for _, seq in ipairs(seqs) do seq:close() end
      end
      cache:close()
    end)
  end

  it("fits its memory at its largest, and says when a step is larger", function()
    local cache = open(2)
    local b = cache:batch { max_seqs = 3, max_tokens = 9 }
    local seqs = { cache:sequence(), cache:sequence(), cache:sequence() }
    b:append(seqs, { 1, 1, 1 })
    b:append(seqs, { 2, 2, 2 }) -- each begins and ends inside a block
    assert.same({ 6, 2 }, { b.touched, b.open_max })
    assert.error_matches(function() b:append(seqs, { 4, 4, 2 }) end,
      "10 tokens, expected at most max_tokens = 9")
    cache:close()
  end)
end)
