--- Cases of the specs of an index-K cache's ops, and caches that hold them.
local kv = require "kvlab"
local support = require "spec.support"

local M = {}

local BLOCKS = 5
M.BLOCKS = BLOCKS

M.cases = {}
for i, dtype in ipairs { "f32", "f16", "bf16" } do
  for j, s in ipairs { { 0, 32, 16 }, { 1, 64, 1 }, { 4, 128, 1 }, { 13, 32, 7 },
                       { 60, 64, 17 }, { 300, 128, 64 } } do
    M.cases[#M.cases + 1] = { dtype = dtype, n = s[1], dim = s[2], block_size = s[3],
                          seed = 10 * i + j }
  end
end

--- Tokens at random places, some of which are none: places, k.
M.inputs = support.latest(function(c)
  local rng = support.rng(c.seed)
  local places = support.distinct(rng, c.n, BLOCKS * c.block_size)
  for i = 3, c.n, 3 do places[i] = -1 end
  if c.n > 1 then places[2] = BLOCKS * c.block_size + 1 end
  local k = support.randn(kv.device "cpu", c.dtype, { c.n, c.dim }, c.seed)
  return { places = places, k = k }
end)

--- A cache with a case's tokens, all its other bytes poisoned, and their places.
function M.append(dev, c)
  local i = M.inputs(c)
  local cache = support.poisoned(dev, "u8", { BLOCKS, c.block_size * (c.dim + 4) })
  local places = kv.from(dev, "i64", { c.n }, i.places)
  kv.check(kv.C.kvl_index_append(i.k:to(dev), places, 0, 0, cache))
  return cache, places
end

return M
