--- How many bytes of a text one token may stand for, so that a text that is too long for
-- a model is known by its bytes alone. Where a file drops or joins text (white space that
-- is stripped, unknown characters in a row), there is no such number.
local json = require "kvlab.json"

local M = {}

-- The most bytes that a normal form can turn into one byte: a character of the result (a
-- byte or more) comes from 4 characters at most (of 4 bytes at most), since no character
-- of Unicode has a longer canonical decomposition.
local NORMAL_FORMS = { NFC = 16, NFD = 16, NFKC = 16, NFKD = 16 }

local function list_of(def, field)
  return type(def[field]) == "table" and def[field] or {}
end

--- The largest factor by which a normalizer may shorten a text.
local function of_normalizer(def)
  if type(def) ~= "table" then return 1 end
  if NORMAL_FORMS[def.type] then return NORMAL_FORMS[def.type] end
  if def.type == "Prepend" then return 1 end
  if def.type == "Sequence" then
    local all = 1
    for _, one in ipairs(list_of(def, "normalizers")) do
      all = all * of_normalizer(one)
    end
    return all
  end
  local from = def.type == "Replace" and type(def.pattern) == "table"
    and def.pattern.String
  return type(from) == "string" and #def.content >= #from and 1 or math.huge
end

--- How many bytes of a piece a token may stand for.
---@param o table  the fields of a kvlab.text.BPE
---@param longest integer  bytes of the longest token
function M.of_pieces(o, longest)
  local is_known = o.has_all
  if o.bytes then
    is_known = true
    for byte = 0, 255 do is_known = is_known and o.bytes[byte] >= 0 end
  end
  return (is_known or o.unk and not o.fuses_unk) and longest or math.huge
end

--- How many bytes of a text a token may stand for.
---@param self kvlab.text.Tokenizer
---@param file table  its tokenizer.json, which has been read
function M.of_text(self, file)
  for _, rule in ipairs(self.splitter.rules) do
    if rule.behavior == "Removed" then return math.huge end
  end
  local longest = self.bpe.bytes_most
  local added = file.added_tokens
  for _, token in ipairs(added ~= json.null and added or {}) do
    if token.lstrip or token.rstrip then return math.huge end
    longest = math.max(longest, #token.content)
  end
  return longest * of_normalizer(file.normalizer)
end

return M
