--- Text of tokens that come one by one. Only complete text is returned: bytes that may
-- still become a character are held back, and so is text that may become a stop string.
local arguments = require "kvlab.arguments"
local options = require "kvlab.options"
local rest = require("kvlab.slices").rest
local unicode = require "kvlab.text.unicode"

local M = {}

local IDS_PART = 2 ^ 12 -- between two rests

-- ---- stop strings ---------------------------------------------------------------------

--- What stop strings may be.
M.STOPS = options.list_of({ "a string of UTF-8 with a character or more", function(x)
  return type(x) == "string" and x ~= "" and unicode.repaired(x) == x
end })

---@class kvlab.text.Stops
---@field list string[]
---@field held string     the end of the text that may be the beginning of a stop string
---@field found string|nil  the stop string that ended the text
local Stops = {}
Stops.__index = Stops

--- Looks for strings in a text that comes in parts.
---@param list string[]
---@return kvlab.text.Stops
function M.stops(list) return setmetatable({ list = list, held = "" }, Stops) end

--- How many bytes at the end of a text are the beginning of a stop string.
local function held_bytes(text, list)
  local most = 0
  for i = 1, #list do
    local stop = list[i]
    for n = math.min(#stop - 1, #text), most + 1, -1 do
      if text:sub(-n) == stop:sub(1, n) then
        most = n
        break
      end
    end
  end
  return most
end

--- Adds text. If it contains several stop strings, the one that begins first ends it; if
-- several begin there, the longest.
---@param text string
---@return string text  what can be given out; nothing once a stop string was found
function Stops:push(text)
  if self.found then return "" end
  text = self.held .. text
  local first, found
  for _, stop in ipairs(self.list) do
    local at = text:find(stop, 1, true)
    if at and (not first or at < first or at == first and #stop > #found) then
      first, found = at, stop
    end
  end
  if first then
    self.found, self.held = found, ""
    return text:sub(1, first - 1)
  end
  local n = held_bytes(text, self.list)
  self.held = n > 0 and text:sub(-n) or ""
  return n > 0 and text:sub(1, -n - 1) or text
end

--- Returns the text that was held back, because no more text comes.
---@return string
function Stops:finish()
  local text = self.held
  self.held = ""
  return text
end

-- ---- tokens ---------------------------------------------------------------------------

---@class kvlab.text.Stream
---@field stopped string|nil   the stop string that was found
---@field tokenizer kvlab.text.Tokenizer
local Stream = {}
Stream.__index = Stream

---@param tokenizer kvlab.text.Tokenizer
---@param special boolean   whether special tokens are written
---@param stop? string[]
---@return kvlab.text.Stream
function M.new(tokenizer, special, stop)
  return setmetatable({
    tokenizer = tokenizer, special = special, held = "", is_first = true,
    strips = tokenizer.decoder.strip_most, stops = stop and M.stops(stop),
  }, Stream)
end

--- The bytes of a token, which may depend on whether it is the first of the text.
local function bytes_of(self, id)
  local tokenizer = self.tokenizer
  local bytes = tokenizer:bytes_of(id)
  if tokenizer.specials[id] and not self.special then return "" end
  local decoder = tokenizer.decoder
  if self.is_first then
    bytes, self.is_first = decoder:first(bytes), false
  end
  while self.strips > 0 and bytes ~= "" do
    if bytes:sub(1, #decoder.strip) ~= decoder.strip then
      self.strips = 0
    else
      bytes, self.strips = bytes:sub(#decoder.strip + 1), self.strips - 1
    end
  end
  return bytes
end

local function given_out(self, text)
  if not self.stops then return text end
  text = self.stops:push(text)
  self.stopped = self.stops.found
  return text
end

--- Adds a token. Returns the text that is complete with it, which may be empty.
---@param id integer
---@return string text
function Stream:push(id)
  if self.stopped then return "" end
  local bytes = bytes_of(self, id)
  if bytes == "" then return "" end
  local text
  text, self.held = unicode.split_valid(self.held .. bytes)
  return given_out(self, text)
end

--- The text that was held back, when no more tokens come: U+FFFD for a part of a
-- character.
---@return string text
function Stream:finish()
  if self.stopped then return "" end
  local text = self.held == "" and "" or unicode.REPLACEMENT
  self.held = ""
  text = given_out(self, text)
  return self.stops and not self.stopped and text .. self.stops:finish() or text
end

--- All text of a list of tokens, as bytes that need not be UTF-8.
---@param self kvlab.text.Stream
---@param ids integer[]
---@return string
function M.bytes(self, ids)
  local parts = {}
  for i = 1, #ids do
    parts[i] = bytes_of(self, ids[i])
    if i % IDS_PART == 0 then rest() end
  end
  return table.concat(parts)
end

arguments.methods(Stream, "a stream of a tokenizer", { push = { id = options.whole } })
arguments.methods(Stops, "stop strings", { push = { text = options.string } })

return M
