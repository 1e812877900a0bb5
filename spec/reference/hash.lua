--- Hashes by random planes and what is chosen by them, in double precision over flat Lua
-- arrays; a hash is a table of its bits, 0 or 1, so that nothing is packed here.
local reference = require "spec.reference.attention"

local M = {}

--- The projections planes[b] . x of one vector: planes flat [bits, dim], x[at + 1 ...].
function M.projections(x, at, planes, bits, dim)
  local out = {}
  for b = 0, bits - 1 do
    local sum = 0
    for d = 1, dim do sum = sum + x[at + d] * planes[b * dim + d] end
    out[b + 1] = sum
  end
  return out
end

--- Mean of n vectors of `dim` numbers that begin at `at`, flat.
function M.mean(x, at, n, dim)
  local out = {}
  for d = 1, dim do
    local sum = 0
    for i = 0, n - 1 do sum = sum + x[at + i * dim + d] end
    out[d] = n > 0 and sum / n or 0
  end
  return out
end

--- In how many bits two hashes differ, of which a is a table of bits and b too.
function M.distance(a, b)
  local n = 0
  for i = 1, #a do n = n + (a[i] ~= b[i] and 1 or 0) end
  return n
end

--- Scores of the blocks of sequence s for KV head g: minus the least distance over a
-- block's valid tokens (a.is_token), or its only hash's. a.hash_of(block, g, token) gives
-- the bits of a stored hash.
function M.scores(a, s, g, q)
  local n, scores = math.ceil(a.lens[s + 1] / a.block_size), {}
  for b = 0, n - 1 do
    local block = a.tables[s * a.max_blocks + b + 1]
    local tokens = a.is_token and math.min(a.block_size, a.lens[s + 1] - b * a.block_size)
      or 1
    local least = math.huge
    if block >= 0 and block < a.blocks then
      for t = 0, tokens - 1 do
        least = math.min(least, M.distance(q, a.hash_of(block, g, t)))
      end
    end
    scores[b + 1] = -least
  end
  return scores
end

--- The better of two lists of scores, block by block.
function M.best(a, b)
  local out = {}
  for i = 1, #a do out[i] = math.max(a[i], b[i]) end
  return out
end

M.select = reference.select

return M
