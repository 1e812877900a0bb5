--- What counts as a number. For Lua's `type`, NaN and the infinities are numbers. But
-- every comparison with NaN is false, so NaN slips through checks that other numbers
-- fail.
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

--- The number that a text writes in decimal digits, such as "-0.5" or "1e-3"; nil for
-- another text. Lua's tonumber takes "0x10", "inf" and "nan", too.
---@param text string
---@return number|nil
function M.of_text(text) return not text:find "[^%d.eE+-]" and tonumber(text) or nil end

return M
