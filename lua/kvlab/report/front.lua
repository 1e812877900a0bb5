--- The Pareto front of points with a cost and a worth: the points that no other point
-- beats. A point beats another if it costs no more and is worth no less, and is better in
-- one of the two. So equal points are all on the front or all off it; among points of the
-- same worth, only the cheapest can be on it.
local is_finite = require("kvlab.number").is_finite

local M = {}

---@class kvlab.front.point
---@field x number     the cost
---@field y number     the worth
---@field note? string why the point takes part in no comparison

--- Returns the points on the front, by rising cost, equal ones in their order. Points
-- with a note, and those whose x or y is not a finite number, take no part.
---@generic P: kvlab.front.point
---@param points P[]
---@return P[]
function M.of(points)
  local sorted, place = {}, {}
  for i, point in ipairs(points) do
    if is_finite(point.x) and is_finite(point.y) and not point.note then
      sorted[#sorted + 1], place[point] = point, i
    end
  end
  table.sort(sorted, function(a, b)
    if a.x ~= b.x then return a.x < b.x end
    if a.y ~= b.y then return a.y > b.y end
    return place[a] < place[b]
  end)
  local front = {}
  for _, point in ipairs(sorted) do
    local last = front[#front]
    if not last or point.y > last.y or point.y == last.y and point.x == last.x then
      front[#front + 1] = point
    end
  end
  return front
end

return M
