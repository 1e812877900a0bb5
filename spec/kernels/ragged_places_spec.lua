--- Exact.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"

local function case(seqs, width, block_size, n, seed)
  local rng, c = S.rng(seed), { tables = {}, width = width, block_size = block_size,
                                starts = {}, ends = {}, n = n }
  for i = 1, seqs * width do c.tables[i] = rng(15) == 0 and -1 or rng(1000) end
  local at = 0
  for s = 1, seqs do
    c.starts[s] = rng(width * block_size)
    at = at + (rng(4) == 0 and 0 or rng(2 * n / seqs))
    c.ends[s] = at
  end
  return c
end

local cases = {
  case(1, 1, 1, 1, 1), case(3, 5, 16, 100, 2), case(4, 40, 64, 3000, 3),
  case(1, 9, 7, 0, 4), case(2, 0, 16, 9, 5), case(70, 3, 16, 4000, 6),
}
cases[#cases + 1] = { tables = {}, width = 2, block_size = 4, starts = {}, ends = {},
                      n = 5 }

local function run(dev, c, dtype)
  local out = S.poisoned(dev, dtype, { c.n })
  kv.check(kv.C.kvl_ragged_places(kv.from(dev, "i32", { #c.starts, c.width }, c.tables),
    c.block_size, kv.from(dev, "i32", { #c.starts }, c.starts),
    kv.from(dev, "i32", { #c.ends }, c.ends), out))
  return out
end

describe("ragged_places", function()
  for _, dtype in ipairs { "i32", "i64" } do
    S.it_on_cpu("names the places of stretches, in " .. dtype, function(dev)
      for _, c in ipairs(cases) do
        S.equal(run(dev, c, dtype), reference.ragged_places(c.tables, c.width,
          c.block_size, c.starts, c.ends, c.n))
      end
    end)

    S.it_on_gpu("agrees with the CPU in " .. dtype, function(cuda)
      for _, c in ipairs(cases) do S.equal(run(cuda, c, dtype), run(cpu, c, dtype)) end
    end)
  end
end)
