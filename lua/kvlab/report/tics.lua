--- The numbers along an axis: where they stand and how they are written.
local M = {}

---@class kvlab.tic
---@field [1] number  where it stands
---@field [2] string  how it is written

--- Keeps every `stride`th tic, except tics that would touch the previous one. The second
-- result says whether all of them were kept.
local function thin(list, share, letters, stride)
  local kept, taken, is_whole = {}, -math.huge, true
  for i = 1, #list, stride do
    local middle, half = share(list[i][1]) * letters, (#list[i][2] + 1) / 2
    if middle - half >= taken then
      kept[#kept + 1] = list[i]
      taken = middle + half
    else
      is_whole = false
    end
  end
  return kept, is_whole
end

--- Keeps as many of the tics as have room side by side.
---@param list kvlab.tic[]    ascending
---@param share fun(x: number): number  where on the axis x stands, from 0 to 1
---@param letters number      the length of the axis, in letters
---@param wants_steps? boolean  keep every second, third, … tic, in equal steps
---@return kvlab.tic[]
function M.fit(list, share, letters, wants_steps)
  local stride = 1
  local kept, is_whole = thin(list, share, letters, stride)
  while wants_steps and not is_whole do
    stride = stride + 1
    kept, is_whole = thin(list, share, letters, stride)
  end
  return kept
end

--- Writes 0.25, 1200, 250k, 1.5G: short enough for an axis, with enough digits to tell x
-- from x + step. The unit suits `largest`, so that all tics of an axis can have the same
-- unit.
local function short_number(x, step, largest)
  local digits = x ~= 0 and math.ceil(math.log10(math.abs(x) / step)) + 1 or 1
  local suffix = ""
  for _, unit in ipairs { { 1e12, "T" }, { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } } do
    if largest >= math.max(unit[1], 1e4) and step >= unit[1] / 100 and x ~= 0 then
      x, suffix = x / unit[1], unit[2]
      break
    end
  end
  return ("%." .. math.max(digits, 4) .. "g"):format(x) .. suffix
end

--- Powers of ten between low and high. In a short range, also 2 and 5 times a power.
local function powers(low, high)
  local list = {}
  local factors = high / low < 300 and { 1, 2, 5 } or { 1 }
  for power = math.floor(math.log10(low)), math.ceil(math.log10(high)) do
    for _, factor in ipairs(factors) do
      local x = factor * 10 ^ power
      -- 1k beside 10k, and 1000 where no tic has a unit
      local largest = high >= 1e4 and x >= 1e3 and math.max(x, 1e4) or x
      if x >= low and x <= high then
        list[#list + 1] = { x, short_number(x, x, largest) }
      end
    end
  end
  return list
end

--- Tics from low to high, about `count` of them: the multiples of one step, which is 1, 2
-- or 5 times a power of ten.
local function multiples(low, high, count)
  local list, largest = {}, math.max(math.abs(low), math.abs(high))
  local rough = (high - low) / count
  local base = 10 ^ math.floor(math.log10(rough))
  local step = base * (rough / base < 1.5 and 1 or rough / base < 3.5 and 2
    or rough / base < 7.5 and 5 or 10)
  for i = math.ceil(low / step), math.floor(high / step) do
    local x = i == 0 and 0 or i * step -- not -0
    list[#list + 1] = { x, short_number(x, step, largest) }
  end
  return list
end

--- Round numbers from low to high. high must be greater than low, and on a logarithmic
-- axis low must be above 0. A logarithmic axis with room for fewer than three tics gets
-- the tics of a linear axis.
---@param low number
---@param high number
---@param is_log? boolean
---@param count? integer  about how many, on a linear axis (5)
---@return kvlab.tic[]
function M.round(low, high, is_log, count)
  local list = is_log and powers(low, high) or {}
  return #list >= 3 and list or multiples(low, high, count or 5)
end

return M
