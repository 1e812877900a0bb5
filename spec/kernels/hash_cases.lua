--- What the specs of hashes share: bits as tables, planes, and comparing hashes with
-- those of the double-precision reference. A bit whose projection is within 1e-4 of the
-- plane may be either: f32 sums of up to 256 products near 1, of means of 64 keys.
local ffi = require "ffi"
local kv = require "kvlab"
local reference = require "spec.reference.hash"

local M = { NEAR = 1e-4 }

--- The hashes of a u64 tensor as its words: uint64_t[count].
function M.words(hashes)
  local n = tonumber(hashes.count)
  local words = ffi.new("uint64_t[?]", math.max(n, 1))
  kv.check(kv.C.kvl_tensor_read(hashes, words, 8 * n))
  return words, n
end

--- `bits` bits of a hash that begins at word `at`, as a table of 0 and 1.
function M.bits(words, at, bits)
  local out = {}
  for b = 0, bits - 1 do
    local word = words[at + math.floor(b / 64)]
    out[b + 1] = tonumber(bit.band(bit.rshift(word, b % 64), 1))
  end
  return out
end

--- Raise unless every word of two u64 tensors is the same.
function M.equal(got, want, what)
  local a, n = M.words(got)
  local b, m = M.words(want)
  assert(n == m, "they have other sizes")
  for i = 0, n - 1 do
    if a[i] ~= b[i] then
      error(("%s: word %d of %d is %s, expected %s"):format(what, i, n, bit.tohex(a[i]),
        bit.tohex(b[i])), 2)
    end
  end
end

--- Check the hash at word `at` against the vector x[x_at + 1 ...]; returns how many
-- bits were too near to their plane to tell.
function M.check(words, at, x, x_at, planes, bits, dim, what)
  local got = M.bits(words, at, math.ceil(bits / 64) * 64)
  local projections, near = reference.projections(x, x_at, planes, bits, dim), 0
  for b = 1, #got do
    local p = projections[b] or -1 -- bits past the last are 0
    if math.abs(p) <= M.NEAR then near = near + 1
    elseif got[b] ~= (p > 0 and 1 or 0) then
      error(("%s: bit %d is %d where the projection is %g"):format(what, b - 1, got[b],
        p), 2)
    end
  end
  return near
end

--- Random hashes: u64 [...] whose `bits` lowest are random and the others 0; few: with
-- few different ones, so that distances tie.
function M.random(dev, shape, bits, rng, few)
  local count = 1
  for _, size in ipairs(shape) do count = count * size end
  local flat = {}
  for i = 1, count do
    local word = ffi.cast("uint64_t", 0)
    for part = 0, 3 do
      local piece = few and rng(2) * 255 or rng(65536)
      word = bit.bor(word, bit.lshift(ffi.cast("uint64_t", piece), 16 * part))
    end
    flat[i] = bits == 32 and bit.band(word, 0xFFFFFFFFULL) or word
  end
  return kv.from(dev, "u64", shape, flat)
end

return M
