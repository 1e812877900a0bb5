--- Moves things apart that would be drawn over each other, as little as possible.
local M = {}

--- Spreads positions along a line: they keep their order, and no two are nearer than
-- `gap`. Positions that have to move are spread evenly around their former mean.
---@param places number[]  ascending
---@param gap number
---@return number[]
function M.spread(places, gap)
  local groups, spread = {}, {}
  for _, place in ipairs(places) do
    local group = { sum = place, n = 1 }
    local before = groups[#groups]
    while before and group.sum / group.n - before.sum / before.n
        < gap * (group.n + before.n) / 2 do
      group = { sum = group.sum + before.sum, n = group.n + before.n }
      groups[#groups] = nil
      before = groups[#groups]
    end
    groups[#groups + 1] = group
  end
  for _, group in ipairs(groups) do
    for i = 1, group.n do
      spread[#spread + 1] = group.sum / group.n + (i - (group.n + 1) / 2) * gap
    end
  end
  return spread
end

local function overlap(a, b, gap)
  return math.abs(a.at - b.at) < gap - 1e-9 and a.low <= b.high and b.low <= a.high
end

--- The bars that overlap `bar`, directly or by way of others, and itself.
local function connected(bars, bar, gap, seen)
  local list, i = { bar }, 1
  seen[bar] = true
  while list[i] do
    for _, other in ipairs(bars) do
      if not seen[other] and overlap(list[i], other, gap) then
        seen[other], list[#list + 1] = true, other
      end
    end
    i = i + 1
  end
  return list
end

---@class kvlab.dodge.bar
---@field at number    its place along the axis; M.bars changes it
---@field low number   its ends across the axis
---@field high number

--- Moves bars along the axis until no two that overlap are nearer than `gap`. Bars at the
-- same position keep the order of the list. Bars that overlap no other stay.
---@param bars kvlab.dodge.bar[]
---@param gap number
function M.bars(bars, gap)
  local rank, has_moved, rounds = {}, true, 0
  for i, bar in ipairs(bars) do rank[bar] = i end
  while has_moved and rounds < 20 do -- a moved bar may meet others
    has_moved, rounds = false, rounds + 1
    local seen = {}
    for _, bar in ipairs(bars) do
      local list, places = seen[bar] and {} or connected(bars, bar, gap, seen), {}
      table.sort(list, function(a, b)
        if a.at ~= b.at then return a.at < b.at end
        return rank[a] < rank[b]
      end)
      for i, one in ipairs(list) do places[i] = one.at end
      for i, place in ipairs(M.spread(places, gap)) do
        has_moved = has_moved or math.abs(place - list[i].at) > 1e-9
        list[i].at = place
      end
    end
  end
end

return M
