-- Tolerance: the words are exact. Uniform numbers take two roundings (1.2e-7 of the
-- larger end). Normals: logarithm, root and sine in f32, radius up to 6.7: 3e-6 absolute.
-- Between instruction sets and between devices: the same bits.
local kv = require "kvlab"
local S = require "spec.support"
local philox = require "spec.reference.philox"

local cpu = kv.device "cpu"

local function random(dev, kind, dtype, n, a, b, seed, offset)
  local t = S.poisoned(dev, dtype, { n })
  kv.check(kv.C.kvl_random(t, kv.C["KVL_RANDOM_" .. kind], a, b, seed, offset))
  return t
end

-- Words come out of INTEGER with the widest range: floor(w * (2^32 - 1) / 2^32) is w - 1.
local function words(dev, seed, offset, n)
  local list = random(dev, "INTEGER", "i64", n, 0, 4294967295, seed, offset):list()
  for i, x in ipairs(list) do list[i] = x + 1 end
  return list
end

local function phi(x) -- the normal distribution function: Abramowitz and Stegun 7.1.26
  local t = 1 / (1 + 0.3275911 * math.abs(x) / math.sqrt(2))
  local p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027
    + t * 1.061405429))))
  local erf = 1 - p * math.exp(-x * x / 2)
  return 0.5 * (1 + (x < 0 and -erf or erf))
end

-- sqrt(n) times the largest distance of the empirical distribution from `cdf`.
local function kolmogorov_smirnov(values, cdf)
  table.sort(values)
  local most, n = 0, #values
  for i, x in ipairs(values) do
    local f = cdf(x)
    most = math.max(most, i / n - f, f - (i - 1) / n)
  end
  return most * math.sqrt(n)
end

describe("random", function()
  it("has a reference that gives Random123's known answers", function()
    local ones, pi = 0xffffffff, { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 }
    assert.are.same({ 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 },
      philox.block({ 0, 0, 0, 0 }, { 0, 0 }))
    assert.are.same({ 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd },
      philox.block({ ones, ones, ones, ones }, { ones, ones }))
    assert.are.same({ 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 },
      philox.block(pi, { 0xa4093822, 0x299f31d0 }))
  end)

  S.it_on_cpu("starts with the known answer of counter 0 and key 0", function(dev)
    assert.are.same({ 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 },
      words(dev, 0, 0, 4))
  end)

  for _, c in ipairs { { 0, 0 }, { 42, 3 }, { 2 ^ 40 + 7, 2 ^ 34 + 1 }, { 1, 2 ^ 45 } } do
    local seed, offset = c[1], c[2]
    local text = ("makes the words of seed %.0f from %.0f"):format(seed, offset)
    S.it_on_cpu(text, function(dev)
      assert.are.same(philox.words(seed, offset, 700), words(dev, seed, offset, 700))
    end)
  end

  for _, offset in ipairs { 0, 1, 2, 3, 4, 257 } do
    S.it_on_cpu("gives the same numbers from offset " .. offset, function(dev)
      S.close(random(dev, "NORMAL", "f32", 301, -1, 2.5, 7, offset),
        philox.normals(7, offset, 301, -1, 2.5), 2.5 * 3e-6)
      S.close(random(dev, "UNIFORM", "f32", 301, -3, 2, 7, offset),
        philox.uniform(7, offset, 301, -3, 2), 3 * 1.2e-7)
      S.equal(random(dev, "INTEGER", "i32", 301, -5, 100, 7, offset),
        philox.integers(7, offset, 301, -5, 100))
    end)
  end

  S.it_on_cpu("does not depend on where a tensor is cut", function(dev)
    local whole = random(dev, "NORMAL", "f32", 70001, 0, 1, 9, 5):list()
    local rest = random(dev, "NORMAL", "f32", 70001 - 33334, 0, 1, 9, 5 + 33334):list()
    for i, x in ipairs(rest) do assert.are.equal(whole[33334 + i], x) end
  end)

  S.it_on_cpu("gives the bits of every other instruction set", function(dev)
    local here, mine = S.isa(), {}
    local cases = { { "NORMAL", "f32" }, { "NORMAL", "f16" }, { "NORMAL", "bf16" },
                    { "UNIFORM", "f32" }, { "INTEGER", "i64" } }
    for i, c in ipairs(cases) do
      mine[i] = random(dev, c[1], c[2], 20011, 0, 3, 11, 2):list()
    end
    for _, other in ipairs(S.isas()) do
      kv.check(kv.C.kvl_cpu_use_isa(other))
      for i, c in ipairs(cases) do
        S.equal(random(dev, c[1], c[2], 20011, 0, 3, 11, 2), mine[i], c[1] .. " " .. c[2])
      end
    end
    kv.check(kv.C.kvl_cpu_use_isa(here))
  end)

  S.it_on_cpu("is normal: moments, tails and the whole distribution", function(dev)
    local n, sums, tail = 200000, { 0, 0, 0, 0 }, 0
    local values = random(dev, "NORMAL", "f32", n, 0, 1, 123, 0):list()
    for _, x in ipairs(values) do
      for p = 1, 4 do sums[p] = sums[p] + x ^ p / n end
      if math.abs(x) > 3 then tail = tail + 1 end
    end
    local sigma = 1 / math.sqrt(n)   -- bounds at about 4 deviations
    assert.is_true(math.abs(sums[1]) < 4 * sigma)
    assert.is_true(math.abs(sums[2] - 1) < 4 * math.sqrt(2) * sigma)
    assert.is_true(math.abs(sums[3]) < 4 * math.sqrt(15) * sigma)
    assert.is_true(math.abs(sums[4] - 3) < 4 * math.sqrt(96) * sigma)
    assert.is_true(math.abs(tail - 0.0026998 * n) < 4 * math.sqrt(0.0027 * n))
    assert.is_true(kolmogorov_smirnov(values, phi) < 1.95)   -- 1 in 1000
  end)

  S.it_on_cpu("is uniform in (0, 1]", function(dev)
    local values = random(dev, "UNIFORM", "f32", 200000, 0, 1, 5, 0):list()
    for _, x in ipairs(values) do assert(x > 0 and x <= 1) end
    assert.is_true(kolmogorov_smirnov(values, function(x) return x end) < 1.95)
  end)

  for _, c in ipairs { { "NORMAL", "f32" }, { "NORMAL", "f16" }, { "NORMAL", "bf16" },
                       { "UNIFORM", "f32" }, { "UNIFORM", "bf16" }, { "INTEGER", "i32" },
                       { "INTEGER", "i64" } } do
    S.it_on_gpu(("makes the CPU's bits: %s %s"):format(c[1], c[2]), function(cuda)
      for _, offset in ipairs { 0, 3, 2 ^ 34 + 1 } do
        S.equal(random(cuda, c[1], c[2], 100003, -2, 9, 77, offset),
          random(cpu, c[1], c[2], 100003, -2, 9, 77, offset))
      end
    end)
  end

  it("refuses dtypes that do not fit and empty ranges", function()
    S.refuses(function() random(cpu, "NORMAL", "i32", 4, 0, 1, 0, 0) end, "random",
      "t is i32 [4]", "f32")
    S.refuses(function() random(cpu, "INTEGER", "f32", 4, 0, 9, 0, 0) end, "t is f32 [4]",
      "i32")
    S.refuses(function() random(cpu, "INTEGER", "i32", 4, 5, 5, 0, 0) end, "[5, 5)")
  end)
end)
