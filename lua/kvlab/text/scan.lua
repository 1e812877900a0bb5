--- Looks for bytes of a set in texts of any length: in slices (kvlab.slices), and ten
-- times as fast as a Lua pattern.
local ffi = require "ffi"
local rest = require("kvlab.slices").rest

local M = {}

local BYTES_PART = 2 ^ 18 -- between two rests

--- A set: the bytes that a Lua pattern matches.
---@param pattern string  "[\128-\255]"
---@return ffi.cdata*     uint8_t[256]
function M.set(pattern)
  local set = ffi.new "uint8_t[256]"
  for byte = 0, 255 do set[byte] = string.char(byte):find(pattern) and 1 or 0 end
  return set
end

local function find_part(set, base, from, to)
  for i = from, to - 1 do if set[base[i]] ~= 0 then return i end end
  return -1
end

--- Where the first byte of a set stands, from `from` on.
---@param set ffi.cdata*  of M.set
---@param text string
---@param from integer    from 1
---@return integer|nil at  from 1; nil if there is none
function M.find(set, text, from)
  local base, length = ffi.cast("const uint8_t *", text), #text
  for first = from - 1, length - 1, BYTES_PART do
    local at = find_part(set, base, first, math.min(first + BYTES_PART, length))
    if at >= 0 then return at + 1 end
    rest()
  end
  return nil
end

return M
