--- Philox4x32-10 and the numbers made from its words, in 64-bit integers and doubles.
-- Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
-- 2011.
local ffi = require "ffi"
local bit = require "bit"
local round = require("spec.reference.math").round

local M = {}

local function u64(x) return ffi.cast("uint64_t", x) end
local LOW = u64(0xFFFFFFFF)

local function xor(a, b, c) return bit.bxor(bit.bxor(a, b), c) end

--- Four words for a counter of four words and a key of two.
function M.block(counter, key)
  local c = { u64(counter[1]), u64(counter[2]), u64(counter[3]), u64(counter[4]) }
  local k0, k1 = u64(key[1]), u64(key[2])
  for _ = 1, 10 do
    local p0, p1 = u64(0xD2511F53) * c[1], u64(0xCD9E8D57) * c[3]
    c = { xor(bit.rshift(p1, 32), c[2], k0), bit.band(p1, LOW),
          xor(bit.rshift(p0, 32), c[4], k1), bit.band(p0, LOW) }
    k0 = bit.band(k0 + u64(0x9E3779B9), LOW)
    k1 = bit.band(k1 + u64(0xBB67AE85), LOW)
  end
  return { tonumber(c[1]), tonumber(c[2]), tonumber(c[3]), tonumber(c[4]) }
end

--- Words [offset, offset + n) of a seed's sequence; seed and offset below 2^53.
function M.words(seed, offset, n)
  local out, block, at = {}, nil, nil
  local key = { seed % 2 ^ 32, math.floor(seed / 2 ^ 32) }
  for i = offset, offset + n - 1 do
    local g = math.floor(i / 4)
    if g ~= at then
      at, block = g, M.block({ g % 2 ^ 32, math.floor(g / 2 ^ 32), 0, 0 }, key)
    end
    out[#out + 1] = block[i % 4 + 1]
  end
  return out
end

-- (0, 1]; in f32 on purpose, since next to 1 its logarithm depends on the rounding.
local function unit(word)
  return round("f32", round("f32", word) * 2 ^ -32 + 2 ^ -33)
end

function M.uniform(seed, offset, n, low, high)
  local out = M.words(seed, offset, n)
  for i = 1, n do out[i] = low + (high - low) * unit(out[i]) end
  return out
end

function M.integers(seed, offset, n, low, high)
  local out = M.words(seed, offset, n)
  for i = 1, n do
    out[i] = low + tonumber(bit.rshift(u64(out[i]) * u64(high - low), 32))
  end
  return out
end

--- Box and Muller: words 2p and 2p + 1 make elements 2p (sine) and 2p + 1 (cosine).
function M.normals(seed, offset, n, mean, deviation)
  local first = offset - offset % 2
  local words, out = M.words(seed, first, n + 2), {}
  for i = offset, offset + n - 1 do
    local pair = i - i % 2 - first
    local radius = math.sqrt(-2 * math.log(unit(words[pair + 1])))
    local turn = 2 * math.pi * unit(words[pair + 2])
    local wave = i % 2 == 0 and math.sin or math.cos
    out[#out + 1] = mean + deviation * radius * wave(turn)
  end
  return out
end

return M
