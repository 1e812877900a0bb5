--- What counts as a number. To Lua's `type`, NaN and the infinities do. But NaN compares
-- false with everything, so it slips through every comparison that keeps the rest.
local M = {}

--- Whether a value is a number, perhaps an infinite one, and not NaN.
---@param x any
---@return boolean
function M.is_number(x) return type(x) == "number" and x == x end

--- Whether a value is a number, and neither NaN nor infinite. Only such metrics are
-- compared, drawn and averaged; another is missing, and tables show it as it is.
---@param x any
---@return boolean
function M.is_finite(x) return type(x) == "number" and x - x == 0 end

return M
