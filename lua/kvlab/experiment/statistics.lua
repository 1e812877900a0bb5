--- The mean of a sample and how well it is known: Student's t interval.
local options = require "kvlab.options"

local M = {}

local FREEDOM = options.within(1, 1000000) -- the series has half as many terms
local LEVEL = { "a number above 0 and below 1", function(x)
  return type(x) == "number" and x > 0 and x < 1
end }
local NUMBERS = options.list_of(options.number, 1)
local VALUES = options.list_of({ "a number or NaN", function(x)
  return type(x) == "number"
end }, 1)

--- P(|T| < t) of Student's t with `freedom` degrees of freedom, a whole number, by the
-- finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4; theta is
-- atan(t / sqrt(freedom)).
local function probability_within(theta, freedom)
  local cos2, is_odd = math.cos(theta) ^ 2, freedom % 2 == 1
  local term = is_odd and math.cos(theta) or 1
  local sum = 0
  for k = is_odd and 3 or 2, freedom, 2 do
    sum = sum + term
    term = term * cos2 * (k - 1) / k
  end
  if is_odd then return 2 / math.pi * (theta + math.sin(theta) * sum) end
  return math.sin(theta) * sum
end

--- Returns how many standard errors the interval around a sample's mean must reach to
-- each side, so that it holds the true mean with probability `level`: t(4, 0.95) = 2.776.
---@param freedom integer  the sample's size minus one
---@param level number     above 0, below 1
---@return number
function M.t(freedom, level)
  options.argument("t", "freedom", freedom, FREEDOM)
  options.argument("t", "level", level, LEVEL)
  local low, high = 0, math.pi / 2
  for _ = 1, 60 do -- bisection: the angle is exact to one unit in the last place
    local middle = (low + high) / 2
    local is_below = probability_within(middle, freedom) < level
    low, high = is_below and middle or low, is_below and high or middle
  end
  return math.sqrt(freedom) * math.tan((low + high) / 2)
end

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

--- Returns the median of some numbers; of an even count, the lower of the two in the
-- middle. Sorts the list.
---@param list number[]
---@return number
function M.median(list)
  options.argument("median", "list", list, NUMBERS)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

return M
