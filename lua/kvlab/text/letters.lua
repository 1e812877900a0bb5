--- The letters of ByteLevel: how GPT-2 and its successors write the 256 bytes in their
-- vocabularies. Visible characters of Latin-1 stand for themselves; the other bytes, in
-- their order, are the characters from U+0100 on, so that a space is "Ġ".
local unicode = require "kvlab.text.unicode"

local M = { of_byte = {}, to_byte = {} }

local more = 0x100
for byte = 0, 255 do
  local is_visible = byte >= 0x21 and byte <= 0x7E or byte >= 0xA1 and byte ~= 0xAD
  local letter = unicode.encode(is_visible and byte or more)
  if not is_visible then more = more + 1 end
  M.of_byte[string.char(byte)], M.to_byte[letter] = letter, string.char(byte)
end

--- A text of bytes in letters.
---@param bytes string
---@return string
function M.written(bytes) return (bytes:gsub(".", M.of_byte)) end

--- The bytes that a token of letters stands for. A token that has other characters, as
-- added tokens may, stands for itself.
---@param token string
---@return string
function M.read(token)
  local parts = {}
  for letter in unicode.characters(token) do
    local byte = M.to_byte[letter]
    if not byte then return token end
    parts[#parts + 1] = byte
  end
  return table.concat(parts)
end

return M
