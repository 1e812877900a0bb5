--- The goldens of tools/tokenizer_goldens.py: texts, and the number and the CRC-32 of the
-- ids that they are encoded to.
local bit = require "bit"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"

local M = {}

--- Set to a folder with larger goldens: those are compared, and the counts printed.
M.other_folder = os.getenv "KVLAB_TOKENIZER_GOLDENS"
M.folder = M.other_folder or kv.paths.root .. "/spec/data/tokenizers"

function M.read(name)
  return json.decode(files.read(M.folder .. "/" .. name .. ".json"))
end

-- ---- CRC-32 ---------------------------------------------------------------------------

local CRC = {}
for i = 0, 255 do
  local x = i
  for _ = 1, 8 do
    x = bit.bxor(bit.rshift(x, 1), bit.band(x, 1) == 1 and bit.tobit(0xEDB88320) or 0)
  end
  CRC[i] = x
end

local function add(crc, byte)
  return bit.bxor(bit.rshift(crc, 8), CRC[bit.band(bit.bxor(crc, byte), 255)])
end

function M.crc_of_ids(ids)
  local crc = -1
  for i = 1, #ids do
    for shift = 0, 24, 8 do crc = add(crc, bit.band(bit.rshift(ids[i], shift), 255)) end
  end
  return bit.bnot(crc) % 2 ^ 32
end

function M.crc_of_text(text)
  local crc = -1
  for i = 1, #text do crc = add(crc, text:byte(i)) end
  return bit.bnot(crc) % 2 ^ 32
end

-- ---- texts ----------------------------------------------------------------------------

--- The texts, some of which are not UTF-8.
---@return string[]
function M.texts()
  local list = {}
  for i, entry in ipairs(M.read("goldens").texts) do
    list[i] = type(entry) == "string" and entry or entry.hex:gsub("%x%x", function(x)
      return string.char(tonumber(x, 16))
    end)
  end
  return list
end

--- Raises unless a tokenizer encodes and decodes the texts as tokenizers does, at once
-- and token by token.
---@param t kvlab.text.Tokenizer
---@param texts string[]
---@param rows integer[][]  ids of the text, of the text with its special tokens, and what
--                          those are decoded to
---@return integer count    of ids
function M.compare(t, texts, rows)
  local count = 0
  for i, text in ipairs(texts) do
    local row, what = rows[i], ("text %d, %q"):format(i, text)
    local plain = t:encode(text)
    local special = t:encode(text, { special = true, bos = false, eos = false })
    if #plain ~= row[1] or M.crc_of_ids(plain) ~= row[2] then
      error(("%s: %d ids, expected %d of other values"):format(what, #plain, row[1]))
    end
    if #special ~= row[3] or M.crc_of_ids(special) ~= row[4] then
      error(("%s, special: %d ids, expected %d of other values"):format(what, #special,
        row[3]))
    end
    local decoded = t:decode(special)
    -- Where bytes that are no character come from a fallback, tokenizers writes more
    -- U+FFFD than a stream could.
    if not (t.decoder.has_fallback and decoded:find "\239\191\189")
      and M.crc_of_text(decoded) ~= row[5] then
      error(("%s is decoded to %q"):format(what, decoded))
    end
    local stream, parts = t:stream(), {}
    for k = 1, #special do parts[k] = stream:push(special[k]) end
    if table.concat(parts) .. stream:finish() ~= decoded then
      error(("%s is another text in a stream"):format(what))
    end
    count = count + #plain + #special
  end
  return count
end

function M.report(name, count)
  if M.other_folder then print(("%-24s %9d ids, 0 differ"):format(name, count)) end
end

return M
