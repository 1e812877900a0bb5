local statistics = require "kvlab.experiment.statistics"

describe("statistics", function()
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
end)
