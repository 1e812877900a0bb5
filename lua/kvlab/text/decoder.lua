--- Turns tokens into text: the `decoder` of a tokenizer.json.
local fields = require "kvlab.text.fields"
local letters = require "kvlab.text.letters"
local normalizer = require "kvlab.text.normalizer"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local splitter = require "kvlab.text.splitter"

local M = {}

---@class kvlab.text.Decoder
---@field is_bytes boolean      tokens are written in the letters of ByteLevel
---@field has_fallback boolean  <0x0A> is a byte
---@field replaces string[][]   Lua patterns and what stands for them
---@field drops string|nil      is removed from the first token: "▁"
---@field strip string|nil      a character that is removed at the beginning of a text
---@field strip_most integer    … so many times at most
local Decoder = {}
Decoder.__index = Decoder

local READ = {}

function READ.Sequence(self, def, where)
  fields.only(def, where, { type = true, decoders = true })
  for i, one in ipairs(fields.list(def, where, "decoders")) do
    M.read(self, one, fields.join(where .. ".decoders", i))
  end
end

function READ.ByteLevel(self, def, where)
  fields.only(def, where, { type = true, add_prefix_space = true, trim_offsets = true,
                            use_regex = true })
  self.is_bytes = true
end

function READ.ByteFallback(self, def, where)
  fields.only(def, where, { type = true })
  self.has_fallback = true
end

function READ.Fuse(self, def, where)
  fields.only(def, where, { type = true })
  self.is_fused = true
end

local function replace(self, from, to)
  table.insert(self.replaces, { (from:gsub("%W", "%%%0")), (to:gsub("%%", "%%%%")) })
end

function READ.Replace(self, def, where)
  fields.only(def, where, { type = true, pattern = true, content = true })
  local _, at, literal = normalizer.pattern(def, where)
  if not literal or literal == "" then fields.fail(at, "is not supported here") end
  replace(self, literal, fields.get(def, where, "content", options.string))
end

function READ.Metaspace(self, def, where)
  fields.only(def, where, splitter.METASPACE)
  local space = fields.get(def, where, "replacement", options.string)
  replace(self, space, " ")
  if splitter.scheme(def, where) ~= "never" then self.drops = " " end
end

function READ.Strip(self, def, where)
  fields.only(def, where, { type = true, content = true, start = true, stop = true })
  fields.must_be(def, where, "stop", 0)
  if not self.is_fused then fields.fail(where, "comes before Fuse, expected it after") end
  self.strip = fields.get(def, where, "content", options.string)
  self.strip_most = fields.get(def, where, "start", options.whole)
end

local KINDS = options.one_of(unpack(sorted.keys(READ)))

function M.read(self, def, where)
  fields.expect(where, def, options.table)
  READ[fields.get(def, where, "type", KINDS)](self, def, where)
end

--- The decoder of a file.
---@param def table
---@param where string
---@return kvlab.text.Decoder
function M.of(def, where)
  local self = setmetatable({ is_bytes = false, has_fallback = false, replaces = {},
                              strip_most = 0 }, Decoder)
  M.read(self, def, where)
  return self
end

--- The bytes that a token stands for.
---@param token string
---@return string
function Decoder:bytes(token)
  if self.is_bytes then return letters.read(token) end
  local hex = self.has_fallback and token:match "^<0x(%x%x)>$"
  if hex then return string.char(tonumber(hex, 16)) end
  for i = 1, #self.replaces do
    token = token:gsub(self.replaces[i][1], self.replaces[i][2])
  end
  return token
end

--- The bytes of the first token of a text, changed as the decoder does at its start.
---@param bytes string
---@return string
function Decoder:first(bytes)
  return self.drops and (bytes:gsub(self.drops, "")) or bytes
end

return M
