--- Builds a tokenizer from the contents of a tokenizer.json (kvlab.text.gguf writes the
-- same from the metadata of a GGUF file).
local bpe = require "kvlab.text.bpe"
local added = require "kvlab.text.added"
local bounds = require "kvlab.text.bounds"
local decoder = require "kvlab.text.decoder"
local ffi = require "ffi"
local fields = require "kvlab.text.fields"
local json = require "kvlab.json"
local letters = require "kvlab.text.letters"
local normalizer = require "kvlab.text.normalizer"
local options = require "kvlab.options"
local pairs_of = require "kvlab.text.pairs"
local split = require "kvlab.text.split"
local splitter = require "kvlab.text.splitter"
local unicode = require "kvlab.text.unicode"

local M = {}

local ID = options.within(0, pairs_of.LIMIT - 1)

-- ---- vocabulary and merges ------------------------------------------------------------

--- texts: id -> token; ids: token -> id.
local function read_vocabulary(model)
  local vocabulary, texts, ids = fields.object(model, "model", "vocab"), {}, {}
  for token, id in pairs(vocabulary) do
    local where = ("model.vocab[%q]"):format(tostring(token))
    fields.expect(where, id, ID)
    fields.expect(where, token, options.string)
    if texts[id] then
      local a, b = token, texts[id]
      if b < a then a, b = b, a end
      fields.fail("model.vocab", ("has the id %d twice, for %q and %q"):format(id, a, b))
    end
    texts[id], ids[token] = token, id
  end
  return texts, ids
end

--- The two tokens of a merge.
local function read_merge(merge, where)
  if type(merge) == "string" then
    local left, right = merge:match "^([^ ]+) ([^ ]+)$"
    if left then return left, right end
  elseif type(merge) == "table" and #merge == 2 and type(merge[1]) == "string"
    and type(merge[2]) == "string" then
    return merge[1], merge[2]
  end
  return fields.fail(where, ("is %s, expected two tokens"):format(options.shown(merge)))
end

local function id_in_merge(ids, token, where)
  return ids[token]
    or fields.fail(where, ("has the token %q, which is not in model.vocab"):format(token))
end

--- The merges as pairs, and a list { left, right, … } of their ids.
local function read_merges(model, ids)
  local list = fields.list(model, "model", "merges")
  local merges, parts = pairs_of.new(#list), {}
  for i, merge in ipairs(list) do
    local where = fields.join("model.merges", i)
    local left, right = read_merge(merge, where)
    local a, b = id_in_merge(ids, left, where), id_in_merge(ids, right, where)
    merges:set(a, b, i, id_in_merge(ids, left .. right, where))
    parts[i * 2 - 1], parts[i * 2] = a, b
  end
  return merges, parts
end

--- Merges of a vocabulary with scores, as SentencePiece has it: all ways to join two
-- tokens into a third; tokens of higher scores come first, and equal ones from left to
-- right.
local function merges_of_scores(scores, texts, ids)
  local order = {}
  for id in pairs(texts) do order[#order + 1] = id end
  table.sort(order, function(a, b)
    if scores[a] ~= scores[b] then return scores[a] > scores[b] end
    return a < b
  end)
  local list, parts, rank, last = {}, {}, 0, nil
  for _, id in ipairs(order) do
    local token = texts[id]
    if scores[id] ~= last then rank, last = rank + 1, scores[id] end
    for at = 2, ids[token] == id and #token or 0 do
      local a, b = ids[token:sub(1, at - 1)], ids[token:sub(at)]
      if a and b then
        list[#list + 1] = { a, b, rank, id }
        parts[#parts + 1], parts[#parts + 2] = a, b
      end
    end
  end
  local merges = pairs_of.new(#list)
  for _, merge in ipairs(list) do merges:set(unpack(merge)) end
  return merges, parts
end

-- ---- symbols --------------------------------------------------------------------------

--- The tokens <0x00> … <0xFF>, -1 where there is none; whether all are there.
local function fallback_of(ids)
  local tokens, has_all = ffi.new "int32_t[256]", true
  for byte = 0, 255 do
    tokens[byte] = ids[("<0x%02X>"):format(byte)] or -1
    has_all = has_all and tokens[byte] >= 0
  end
  return tokens, has_all
end

local function bytes_of(ids)
  local tokens = ffi.new "int32_t[256]"
  for byte = 0, 255 do tokens[byte] = ids[letters.of_byte[string.char(byte)]] or -1 end
  return tokens
end

local function characters_of(ids)
  local tokens = {}
  for token, id in pairs(ids) do
    if token ~= "" then
      local n, state = unicode.character(token, 1)
      if n == #token and state == "whole" then tokens[unicode.code(token)] = id end
    end
  end
  return tokens
end

--- A rule that cuts before each run of `space`, which shortens pieces and changes no
-- token; nil if some merge joins a symbol with a following space.
local function rule_of_spaces(space, o, texts, parts)
  if not o.ids[space] or o.fallback and not o.has_all then return nil end
  local bytes = {}
  for byte = 0, o.fallback and 255 or -1 do bytes[o.fallback[byte]] = true end
  for i = 1, #parts, 2 do
    local a, b = parts[i], parts[i + 1]
    local is_odd = bytes[a] or bytes[b] or a == o.unk or b == o.unk
    local begins = texts[b]:sub(1, #space) == space
    if is_odd or begins and texts[a]:sub(-#space) ~= space then return nil end
  end
  return split.rule("model", ("%s+[^%s]*|[^%s]+"):format(space, space, space), "Isolated")
end

-- ---- added tokens ---------------------------------------------------------------------

local ADDED = { id = true, content = true, single_word = true, lstrip = true,
                rstrip = true, normalized = true, special = true }

local function read_added(file, texts, ids, normalize)
  local raw, normal, specials, in_list = {}, {}, {}, {}
  local list = fields.list_or_none(file, "", "added_tokens")
  for i, def in ipairs(list) do
    local where = fields.join("added_tokens", i)
    fields.expect(where, def, options.table)
    fields.only(def, where, ADDED)
    local token = { id = fields.get(def, where, "id", ID),
                    content = fields.get(def, where, "content", options.string) }
    for _, name in ipairs { "single_word", "lstrip", "rstrip", "special" } do
      token[name] = fields.get_or(def, where, name, options.boolean, false)
    end
    local known = ids[token.content]
    if known and known ~= token.id then
      fields.fail(where .. ".id", ("is %d, but model.vocab has %q as %d"):format(token.id,
        token.content, known))
    end
    if texts[token.id] and texts[token.id] ~= token.content then
      fields.fail(where .. ".id", ("is %d, which is the token %q already"):format(
        token.id, texts[token.id]))
    end
    texts[token.id], in_list[token.content] = token.content, token.id
    if token.special then specials[token.id] = true end
    if fields.get_or(def, where, "normalized", options.boolean, not token.special) then
      token.content = normalize(token.content)
      normal[#normal + 1] = token
    else
      raw[#raw + 1] = token
    end
  end
  for content, id in pairs(in_list) do ids[content] = id end
  return added.finder(raw), added.finder(normal), specials
end

-- ---- tokens around a text -------------------------------------------------------------

local function template_ids(def, where, name)
  local specials = fields.object(def, where, "special_tokens")
  local entry = fields.object(specials, where .. ".special_tokens", name)
  local at = fields.join(where .. ".special_tokens", name)
  local list = fields.list(entry, at, "ids")
  for i, id in ipairs(list) do fields.expect(fields.join(at .. ".ids", i), id, ID) end
  return list
end

local POST = {}

function POST.ByteLevel() end

function POST.Sequence(self, def, where)
  for i, one in ipairs(fields.list(def, where, "processors")) do
    M.read_post(self, one, fields.join(where .. ".processors", i))
  end
end

function POST.TemplateProcessing(self, def, where)
  local list, side = fields.list(def, where, "single"), self.before
  for i, item in ipairs(list) do
    local at = fields.join(where .. ".single", i)
    fields.expect(at, item, options.table)
    if type(item.SpecialToken) == "table" then
      local name = fields.get(item.SpecialToken, at .. ".SpecialToken", "id",
        options.string)
      for _, id in ipairs(template_ids(def, where, name)) do side[#side + 1] = id end
    elseif type(item.Sequence) == "table" and side == self.before then
      fields.must_be(item.Sequence, at .. ".Sequence", "id", "A")
      side = self.after
    else
      fields.fail(at, "is none of SpecialToken and one Sequence")
    end
  end
  if side ~= self.after then fields.fail(where .. ".single", "has no Sequence") end
end

local POSTS = options.one_of("ByteLevel", "Sequence", "TemplateProcessing")

function M.read_post(self, def, where)
  fields.expect(where, def, options.table)
  POST[fields.get(def, where, "type", POSTS)](self, def, where)
end

-- ---- all of it ------------------------------------------------------------------------

local FILE = { version = true, truncation = true, padding = true, added_tokens = true,
               normalizer = true, pre_tokenizer = true, post_processor = true,
               decoder = true, model = true }
local MODEL = { type = true, dropout = true, unk_token = true, fuse_unk = true,
                continuing_subword_prefix = true, end_of_word_suffix = true,
                byte_fallback = true, ignore_merges = true, vocab = true, merges = true }

local function check_model(model)
  fields.only(model, "model", MODEL)
  -- Before version 0.8 of `tokenizers`, a model had no type.
  fields.must_be(model, "model", "type", "BPE")
  for _, name in ipairs { "continuing_subword_prefix", "end_of_word_suffix" } do
    fields.must_be(model, "model", name, "")
  end
  fields.must_be(model, "model", "dropout", 0)
end

local function unknown_token(model, ids)
  local unk = fields.get_or(model, "model", "unk_token", options.string)
  if not unk then return nil end
  return ids[unk] or fields.fail("model.unk_token",
    ("is %q, which is not in model.vocab"):format(unk))
end

local function whole_of(model, ids, is_bytes)
  if not fields.get_or(model, "model", "ignore_merges", options.boolean, false) then
    return nil
  end
  if not is_bytes then return ids end
  return setmetatable({}, { __index = function(_, piece)
    return ids[letters.written(piece)]
  end })
end

--- Reads the model: what encodes pieces. Adds a rule to the splitter if that helps.
local function read_model(self, model, scores)
  check_model(model)
  local texts, ids = read_vocabulary(model)
  local cuts = self.splitter
  local merges, parts
  if scores then merges, parts = merges_of_scores(scores, texts, ids)
  else merges, parts = read_merges(model, ids)
  end
  local o = { merges = merges, ids = ids, unk = unknown_token(model, ids),
    fuses_unk = fields.get_or(model, "model", "fuse_unk", options.boolean, false),
    whole = whole_of(model, ids, cuts.is_bytes) }
  if cuts.is_bytes then
    o.bytes = bytes_of(ids)
  else
    o.characters = characters_of(ids)
    if fields.get_or(model, "model", "byte_fallback", options.boolean, false) then
      o.fallback, o.has_all = fallback_of(ids)
    end
    local is_cut = cuts.space and #cuts.rules > 0
    local rule = not is_cut and not o.whole and rule_of_spaces("▁", o, texts, parts)
    if rule then table.insert(cuts.rules, rule) end
  end
  o.longest = 0
  for _, text in pairs(texts) do o.longest = math.max(o.longest, #text) end
  o.bytes_most = bounds.of_pieces(o, o.longest)
  self.bpe, self.texts = bpe.new(o), texts
  -- The vocabulary without added tokens is the encoder's; the whole one, the user's.
  self.ids = setmetatable({}, { __index = ids })
end

local function null_as_nil(x) if x ~= json.null then return x end end

--- Sets up a tokenizer as a tokenizer.json describes it.
---@param self table   of kvlab.text.tokenizer
---@param file table   a tokenizer.json
---@param scores? table<integer, number>  of each token, in place of merges
function M.build(self, file, scores)
  fields.expect("the file", file, options.table)
  fields.only(file, "", FILE)
  local model = fields.object(file, "", "model")
  self.normalize = normalizer.of(null_as_nil(file.normalizer), "normalizer")
  self.splitter = splitter.of(null_as_nil(file.pre_tokenizer), "pre_tokenizer")
  self.decoder = decoder.of(fields.object(file, "", "decoder"), "decoder")
  read_model(self, model, scores)
  self.raw, self.normal, self.specials = read_added(file, self.texts, self.ids,
    self.normalize)
  self.bytes_most = bounds.of_text(self, file)
  self.before, self.after = {}, {}
  if null_as_nil(file.post_processor) then
    M.read_post(self, file.post_processor, "post_processor")
  end
  local size = 0
  for id in pairs(self.texts) do size = math.max(size, id + 1) end
  self.size = size
end

return M
