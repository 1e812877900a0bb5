--- Reads the `pre_tokenizer` of a tokenizer.json: rules that cut a text, and changes to
-- the text before it is cut.
local fields = require "kvlab.text.fields"
local normalizer = require "kvlab.text.normalizer"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local split = require "kvlab.text.split"

local M = {}

---@class kvlab.text.Splitter
---@field rules kvlab.text.Rule[]
---@field is_bytes boolean       pieces are encoded as bytes, in the letters of ByteLevel
---@field space string|nil       what stands for a space: "▁"
---@field prefix string|nil      put in front of a text that does not begin with it
---@field prefix_first boolean   … only of what begins the whole text

local BEHAVIOR = options.one_of("Isolated", "Removed", "Contiguous", "MergedWithPrevious",
  "MergedWithNext")
local SCHEME = options.one_of("always", "first", "never")

local READ = {}

local function add(self, where, expression, behavior, invert)
  if self.is_bytes then fields.fail(where, "comes after ByteLevel, which is the last") end
  table.insert(self.rules, split.rule(where, expression, behavior, invert))
end

function READ.Sequence(self, def, where)
  fields.only(def, where, { type = true, pretokenizers = true })
  for i, one in ipairs(fields.list(def, where, "pretokenizers")) do
    M.read(self, one, fields.join(where .. ".pretokenizers", i))
  end
end

function READ.Split(self, def, where)
  fields.only(def, where, { type = true, pattern = true, behavior = true, invert = true })
  local expression, at = normalizer.pattern(def, where)
  add(self, at, expression, fields.get(def, where, "behavior", BEHAVIOR),
    fields.get_or(def, where, "invert", options.boolean, false))
end

function READ.Digits(self, def, where)
  fields.only(def, where, { type = true, individual_digits = true })
  local one = fields.get_or(def, where, "individual_digits", options.boolean, false)
  add(self, where, one and "\\p{N}" or "\\p{N}+", "Isolated")
end

function READ.WhitespaceSplit(self, def, where)
  fields.only(def, where, { type = true })
  add(self, where, "\\s", "Removed")
end

function READ.CharDelimiterSplit(self, def, where)
  fields.only(def, where, { type = true, delimiter = true })
  local delimiter = fields.get(def, where, "delimiter", options.string)
  add(self, where .. ".delimiter", split.literal(delimiter), "Removed")
end

--- Raises unless nothing has been cut yet, because changes to the text must come first.
local function must_be_first(self, where)
  if #self.rules > 0 or self.prefix or self.space then
    fields.fail(where, "comes after another one, expected it to be the first")
  end
end

function READ.ByteLevel(self, def, where)
  fields.only(def, where, { type = true, add_prefix_space = true, trim_offsets = true,
                            use_regex = true })
  if fields.get_or(def, where, "add_prefix_space", options.boolean, true) then
    must_be_first(self, where .. ".add_prefix_space")
    self.prefix = " "
  end
  if fields.get_or(def, where, "use_regex", options.boolean, true) then
    add(self, where, split.GPT2, "Isolated")
  end
  self.is_bytes = true
end

--- When a space is prepended: the field's value, or that of the field of older files.
function M.scheme(def, where)
  local prefixes = fields.get_or(def, where, "add_prefix_space", options.boolean, true)
  return fields.get_or(def, where, "prepend_scheme", SCHEME, prefixes and "always"
    or "never")
end

M.METASPACE = { type = true, replacement = true, prepend_scheme = true, split = true,
                add_prefix_space = true, str_rep = true }

function READ.Metaspace(self, def, where)
  fields.only(def, where, M.METASPACE)
  must_be_first(self, where)
  self.space = fields.get(def, where, "replacement", options.string)
  local scheme = M.scheme(def, where)
  if scheme ~= "never" then
    self.prefix, self.prefix_first = self.space, scheme == "first"
  end
  if fields.get_or(def, where, "split", options.boolean, true) then
    add(self, where .. ".replacement", split.literal(self.space), "MergedWithNext")
  end
end

local KINDS = options.one_of(unpack(sorted.keys(READ)))

--- Adds what one entry says.
---@param self kvlab.text.Splitter
function M.read(self, def, where)
  fields.expect(where, def, options.table)
  READ[fields.get(def, where, "type", KINDS)](self, def, where)
end

--- The splitter of a file; without a definition, a text is one piece.
---@param def table|nil
---@param where string
---@return kvlab.text.Splitter
function M.of(def, where)
  local self = { rules = {}, is_bytes = false, prefix_first = false }
  if def ~= nil then M.read(self, def, where) end
  return self
end

return M
