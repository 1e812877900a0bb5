local coverage = require "spec.lua.experiment.coverage"
local statistics = require "kvlab.experiment.statistics"

describe("statistics #release", function()
  -- Quantiles as tables print them (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
  local known = {
    { 1, 0.95, 12.706 }, { 2, 0.95, 4.303 }, { 3, 0.95, 3.182 }, { 4, 0.95, 2.776 },
    { 9, 0.95, 2.262 }, { 10, 0.95, 2.228 }, { 30, 0.95, 2.042 }, { 99, 0.95, 1.984 },
    { 100, 0.95, 1.984 }, { 1, 0.8, 3.078 }, { 5, 0.99, 4.032 }, { 6, 0.998, 5.208 },
  }

  it("has Student's t as it is tabulated", function()
    for _, case in ipairs(known) do
      local t = statistics.t(case[1], case[2])
      assert.is_true(math.abs(t - case[3]) < 6e-4, ("%d %g: %.6f"):format(case[1],
        case[2], t))
    end
  end)

  it("has t in closed form for one and two degrees of freedom", function()
    for _, level in ipairs { 0.1, 0.5, 0.9, 0.95, 0.999 } do
      local one = math.tan(math.pi * level / 2)
      local two = math.sqrt(2 * level ^ 2 / (1 - level ^ 2))
      assert.is_true(math.abs(statistics.t(1, level) / one - 1) < 1e-9)
      assert.is_true(math.abs(statistics.t(2, level) / two - 1) < 1e-9)
    end
  end)

  it("comes near the normal distribution in large samples", function()
    assert.is_true(math.abs(statistics.t(100000, 0.95) - 1.959964) < 5e-5)
  end)

  it("puts an interval around a mean", function()
    -- mean 5, deviation 2.138, so 5 +- 2.3646 * 2.138 / sqrt(8)
    local mean, low, high, deviation = statistics.interval { 2, 4, 4, 4, 5, 5, 7, 9 }
    assert.equal(5, mean)
    assert.is_true(math.abs(deviation - math.sqrt(32 / 7)) < 1e-12)
    assert.is_true(math.abs(high - 6.787494) < 1e-5, high)
    assert.is_true(math.abs(low + high - 10) < 1e-12)
  end)

  it("knows nothing about the spread of one value, and everything about equal ones",
    function()
      assert.same({ 3 }, { statistics.interval { 3 } })
      assert.same({ 0.1, 0.1, 0.1, 0 }, { statistics.interval { 0.1, 0.1, 0.1 } })
      local mean, low = statistics.interval { 1, 0 / 0 }
      assert.is_true(mean ~= mean and low ~= low)
    end)

  it("puts an interval of two of its numbers around a median", function()
    -- the ranks that tables of the sign test give
    for n, ranks in pairs { [6] = { 1, 6 }, [10] = { 2, 9 }, [31] = { 10, 22 },
                            [100] = { 40, 61 }, [5000] = { 2431, 2570 } } do
      local list = {}
      for i = 1, n do list[i] = n + 1 - i end
      local median, low, high = statistics.median_interval(list)
      assert.same({ math.ceil(n / 2), ranks[1], ranks[2] }, { median, low, high })
      assert.equal(n, list[1]) -- the list stays as it was
    end
    assert.same({ 3 }, { statistics.median_interval { 1, 5, 3, 4, 2 } })
  end)

  it("covers the true mean in 95 of 100 samples", function()
    math.randomseed(1)
    local inside, samples = 0, 4000
    for _ = 1, samples do
      local values = {}
      for i = 1, 5 do -- a normal variate by Box and Muller
        values[i] = math.sqrt(-2 * math.log(1 - math.random()))
          * math.cos(2 * math.pi * math.random())
      end
      local _, low, high = statistics.interval(values)
      if low <= 0 and 0 <= high then inside = inside + 1 end
    end
    assert.is_true(math.abs(inside / samples - 0.95) < 0.015, inside / samples)
  end)

  describe("of shares", function()
    -- R's binom.test and SciPy's beta quantiles give these.
    it("is Clopper and Pearson's interval where scores are 0 or 1", function()
      local cases = { { 0, 8, 0, 0.36941664755 }, { 1, 8, 0.00315972353, 0.52650967088 },
                      { 8, 8, 0.63058335245, 1 } }
      for _, case in ipairs(cases) do
        local values = {}
        for i = 1, case[2] do values[i] = i <= case[1] and 1 or 0 end
        for _, trials in ipairs { false, 1 } do
          local mean, low, high = statistics.share(values, trials or nil)
          assert.is_true(math.abs(mean - case[1] / case[2]) < 1e-15)
          assert.is_true(math.abs(low - case[3]) < 1e-9, low)
          assert.is_true(math.abs(high - case[4]) < 1e-9, high)
        end
      end
    end)

    --- P(right) of n independent scores.
    local function binomial(n, right, p)
      local term = (1 - p) ^ n
      for i = 1, right do term = term * (n - i + 1) / i * p / (1 - p) end
      return term
    end

    it("holds a rate of 0/1 scores in at least 95 of 100 samples, exactly", function()
      for _, n in ipairs { 2, 5, 8, 16, 64 } do
        local low, high = {}, {}
        for right = 0, n do
          local values = {}
          for i = 1, n do values[i] = i <= right and 1 or 0 end
          local _
          _, low[right], high[right] = statistics.share(values)
          assert.is_true(high[right] - low[right] > 0.05)
        end
        for _, p in ipairs { 0.001, 0.02, 0.1, 0.3, 0.5, 0.9, 0.99 } do
          local inside = 0
          for right = 0, n do
            if low[right] <= p and p <= high[right] then
              inside = inside + binomial(n, right, p)
            end
          end
          assert.is_true(inside >= 0.95, ("n = %d, p = %g: %.4f"):format(n, p, inside))
        end
      end
    end)

    it("holds a mean over seeds whose questions are easy or hard together", function()
      for _, same in ipairs { 0, 0.3 } do
        for _, p in ipairs { 0.02, 0.1, 0.5, 0.99 } do
          local inside, flat = coverage.of(function(values)
            return statistics.share(values, 128)
          end, coverage.seeds(5, p, 8, 16, same), p, 1000)
          assert.is_true(inside >= 0.93 and flat == 0, ("same = %g, p = %g: %.3f"):format(
            same, p, inside))
        end
      end
    end)

    it("holds a mean of scores that are shares of a few answers", function()
      for _, n in ipairs { 5, 8, 64 } do
        for _, p in ipairs { 0.02, 0.1, 0.5, 0.9 } do
          local inside, flat = coverage.of(statistics.share,
            coverage.seeds(n, p, 1, 5, 0.5), p, 500)
          assert.is_true(inside >= 0.92 and flat == 0, ("n = %d, p = %g: %.3f"):format(n,
            p, inside))
        end
      end
    end)

    it("holds the difference of two policies on the same texts", function()
      local cases = { { 0.02, 0.02 }, { 0.1, 0 }, { 0.1, 0.1 }, { 0.3, 0.05 },
                      { 0.5, 0.2 }, { 0.5, 0 } }
      for _, n in ipairs { 5, 8, 16, 64 } do
        for _, case in ipairs(cases) do
          local p, q = case[1], case[2]
          local inside, flat = coverage.of(statistics.difference,
            coverage.pairs_of_texts(n, p, q), p - q, 500)
          assert.is_true(inside >= 0.94 and flat == 0, ("n = %d, %g, %g: %.3f"):format(n,
            p, q, inside))
        end
      end
    end)

    it("turns with its sides, and is that of the values' mean", function()
      local values = { 1, -1, 0, 0.5, 0, 0.25, 0, -0.5, 1, 0 }
      local turned = {}
      for i, value in ipairs(values) do turned[i] = -value end
      local mean, low, high = statistics.difference(values)
      local other, other_low, other_high = statistics.difference(turned)
      assert.is_true(math.abs(mean - 0.125) < 1e-15 and mean == -other)
      assert.same({ low, high }, { -other_high, -other_low })
    end)

    it("knows nothing of one value, or beside one that is missing", function()
      for _, fn in ipairs { statistics.share, statistics.difference } do
        assert.same({ 1 }, { fn { 1 } })
        local mean, low = fn { 1, 0 / 0 }
        assert.is_true(mean ~= mean and low == nil)
      end
      assert.error_matches(function() statistics.share { 0.5, 1.5 } end, "0 ... 1")
      assert.error_matches(function() statistics.difference { -2 } end, "-1 ... 1")
      assert.error_matches(function() statistics.share({ 0, 1 }, 0) end, "trials is 0")
    end)
  end)
end)
