--- The mean of a sample and how well it is known, as 95 % confidence intervals.
--
--   interval(values)            Student's t: of measured numbers
--   share(values, trials?)      of shares of right answers, 0 ... 1
--   difference(values, trials?) of what such shares differ by, pair by pair, -1 ... 1
--   median_interval(values)     of the median, of times for example
--
-- A value is one independent sample: a text, or a seed. Student's t takes the spread of
-- the sample for the true spread, which is wrong for 0/1 scores. At a rate of 0.1, eight
-- texts have no right answer in 43 of 100 samples; t then has no width, so its interval
-- holds the rate in only 57 of 100 samples.
--
-- `share` is Clopper and Pearson's interval, which is exact: it holds the true rate of n
-- independent 0/1 scores in at least 95 of 100 samples, whatever the rate is (Biometrika
-- 26, 1934; Wilson's is narrower, but holds a rate of 0.02 in 85 of 100 samples of
-- eight). Each value may itself be the share of several trials, such as 128 questions a
-- seed, which are easy or hard together. Then the number of trials is the one that would
-- give the spread of the values, mean (1 - mean) / (variance of the mean), reduced
-- because few values say little about their spread (Korn and Graubard, Survey Methodology
-- 24, 1998). It is at least one for each value, since no number in 0 ... 1 varies more
-- than a 0/1 score, and at most all trials (Parker et al., Vital and Health Statistics 2
-- (175), 2017). If all values are equal, it is the number of all trials, or one for each
-- value if that number is unknown.
--
-- `difference` joins two intervals: of how much more one side has, and of how much more
-- the other has. The two are shares that exclude each other (Newcombe, Statistics in
-- Medicine 17, 1998, method 10, with the intervals of `share`; Zou and Donner, ibid. 27,
-- 2008).
--
-- docs/experiments.md says how often these intervals hold the truth in simulations.
local ffi = require "ffi"
local is_finite = require("kvlab.number").is_finite
local options = require "kvlab.options"

ffi.cdef "double lgamma(double x);"

local M = {}

local FREEDOM = options.within(1, 1000000)
local LEVEL = { "a number above 0 and below 1", function(x)
  return is_finite(x) and x > 0 and x < 1
end }
local NUMBERS = options.list_of(options.number, 1)
local VALUES = options.list_of({ "a number or NaN", function(x)
  return type(x) == "number"
end }, 1)
local function values_within(low)
  return options.list_of({ ("%d ... 1, or NaN"):format(low), function(x)
    return type(x) == "number" and not (x < low or x > 1)
  end }, 1)
end
local SHARES, DIFFERENCES = values_within(0), values_within(-1)
local TRIALS = options.optional(options.count)

-- ---- distributions --------------------------------------------------------------------

--- The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's
-- method; it converges fast for x below (a + 1) / (a + b + 2).
local function beta_fraction(x, a, b)
  local c, d = 1, 1 / (1 - (a + b) * x / (a + 1))
  local fraction = d
  for m = 1, 10000 do
    local even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
    d, c = 1 / (1 + even * d), 1 + even / c
    fraction = fraction * d * c
    local odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
    d, c = 1 / (1 + odd * d), 1 + odd / c
    fraction = fraction * d * c
    if math.abs(d * c - 1) < 1e-15 then break end
  end
  return fraction
end

--- P(X < x) of the beta distribution with parameters a and b, x in 0 ... 1.
local function beta(x, a, b)
  if x <= 0 or x >= 1 then return x <= 0 and 0 or 1 end
  local C = ffi.C
  local front = math.exp(C.lgamma(a + b) - C.lgamma(a) - C.lgamma(b) + a * math.log(x)
    + b * math.log(1 - x))
  if x < (a + 1) / (a + b + 2) then return front * beta_fraction(x, a, b) / a end
  return 1 - front * beta_fraction(1 - x, b, a) / b
end

--- The x in 0 ... 1 where a rising function reaches `level`.
local function solve(fn, level)
  local low, high = 0, 1
  for _ = 1, 60 do -- bisection
    local middle = (low + high) / 2
    local is_below = fn(middle) < level
    low, high = is_below and middle or low, is_below and high or middle
  end
  return (low + high) / 2
end

--- Returns how many standard errors the interval around a sample's mean must reach to
-- each side, so that it holds the true mean with probability `level`: t(4, 0.95) = 2.776.
---@param freedom integer  the sample's size minus one
---@param level number     above 0, below 1
---@return number
function M.t(freedom, level)
  options.argument("t", "freedom", freedom, FREEDOM)
  options.argument("t", "level", level, LEVEL)
  -- P(|T| > t) is P(X < cos^2), where t = sqrt(freedom) * tan
  local angle = solve(function(share)
    return 1 - beta(math.cos(share * math.pi / 2) ^ 2, freedom / 2, 0.5)
  end, level) * math.pi / 2
  return math.sqrt(freedom) * math.tan(angle)
end

--- Clopper and Pearson's interval of `right` of n trials; neither need be whole.
local function exact(right, n)
  local low, high = 0, 1
  if right > 0 then
    low = solve(function(x) return beta(x, right, n - right + 1) end, 0.025)
  end
  if right < n then
    high = solve(function(x) return beta(x, right + 1, n - right) end, 0.975)
  end
  return low, high
end

-- ---- intervals ------------------------------------------------------------------------

--- Returns the mean, the limits of its 95 % confidence interval and the standard
-- deviation; for a sample of one value, only the mean.
---@param values number[]  at least one
---@return number mean, number|nil low, number|nil high, number|nil deviation
function M.interval(values)
  options.argument("interval", "values", values, VALUES)
  local n, mean, squares = #values, 0, 0
  for i, value in ipairs(values) do -- Welford: the mean of equal values is exact
    local from_old = value - mean
    mean = mean + from_old / i
    squares = squares + from_old * (value - mean)
  end
  if n == 1 then return mean end
  local deviation = math.sqrt(squares / (n - 1))
  local half = M.t(n - 1, 0.95) * deviation / math.sqrt(n)
  return mean, mean - half, mean + half, deviation
end

local NORMAL = 1.959963984540054 -- t of a very large sample

--- Returns the mean of shares of right answers, and the limits of its 95 % confidence
-- interval; for one value, or if one is NaN, only the mean.
---@param values number[]   0 ... 1, each an independent sample: 0 or 1 for one answer
---@param trials? integer   how many 0/1 trials each value is the share of, if they are as
--                          many for each
---@return number mean, number|nil low, number|nil high
function M.share(values, trials)
  options.argument("share", "values", values, SHARES)
  options.argument("share", "trials", trials, TRIALS)
  local n, mean, _, _, deviation = #values, M.interval(values)
  if not deviation or not is_finite(deviation) then return mean end
  local most, alike = trials and n * trials or math.huge, trials and n * trials or n
  if deviation > 0 then
    alike = mean * (1 - mean) * n / deviation ^ 2 * (NORMAL / M.t(n - 1, 0.95)) ^ 2
  end
  local count = math.max(n, math.min(most, alike))
  return mean, exact(mean * count, count)
end

--- Returns the mean of differences of two shares, and the limits of its 95 % confidence
-- interval; for one value, or if one is NaN, only the mean.
---@param values number[]   -1 ... 1: of two scores of the same text, say
---@param trials? integer    as for `share`
---@return number mean, number|nil low, number|nil high
function M.difference(values, trials)
  options.argument("difference", "values", values, DIFFERENCES)
  options.argument("difference", "trials", trials, TRIALS)
  local ups, downs = {}, {}
  for i, value in ipairs(values) do
    ups[i], downs[i] = math.max(value, 0), math.max(-value, 0)
    if value ~= value then ups[i], downs[i] = value, value end
  end
  local up, up_low, up_high = M.share(ups, trials)
  local down, down_low, down_high = M.share(downs, trials)
  local mean = up - down
  if not up_low then return mean end
  -- a pair adds to one share only, so the two shares are negatively correlated
  local together = up * down > 0 and math.sqrt(up * down / ((1 - up) * (1 - down))) or 0
  local function reach(a, b) return math.sqrt(a * a + b * b + 2 * together * a * b) end
  return mean, math.max(-1, mean - reach(up - up_low, down_high - down)),
    math.min(1, mean + reach(up_high - up, down - down_low))
end

--- Returns the median of some numbers; if their count is even, the lower of the two in
-- the middle. Sorts the list.
---@param list number[]
---@return number
function M.median(list)
  options.argument("median", "list", list, NUMBERS)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

--- Returns the median of some numbers, and the limits of its 95 % confidence interval:
-- the two numbers of the list between which the true median lies in at least 95 of 100
-- samples, whatever their distribution is. For fewer than six numbers, only the median.
---@param list number[]  independent samples, such as the times of repeats
---@return number median, number|nil low, number|nil high
function M.median_interval(list)
  options.argument("median_interval", "list", list, NUMBERS)
  local values, n, C = {}, #list, ffi.C
  for i, value in ipairs(list) do values[i] = value end
  local median = M.median(values)
  -- the count of numbers below the true median is binomial, as with n tosses of a coin
  local rank, below = -1, 0
  repeat
    rank = rank + 1
    below = below + math.exp(C.lgamma(n + 1) - C.lgamma(rank + 1) - C.lgamma(n - rank + 1)
      - n * math.log(2))
  until below > 0.025
  if rank == 0 then return median end
  return median, values[rank], values[n + 1 - rank]
end

return M
