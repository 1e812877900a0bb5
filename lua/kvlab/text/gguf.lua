--- Writes what the metadata of a GGUF file says of its tokenizer in the form of a
-- tokenizer.json, which kvlab.text.hf reads.
--
-- Byte-level BPE (tokenizer.ggml.model "gpt2") has merges; tokenizer.ggml.pre names the
-- rules by which it cuts text into words, which are in this file. BPE as SentencePiece
-- has it ("llama") has scores.
local fields = require "kvlab.text.fields"
local is_number = require("kvlab.number").is_number
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local split = require "kvlab.text.split"

local M = {}

local KEY = "tokenizer.ggml."

-- ORDER llama_token_type of llama.cpp
local UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

-- ---- how text is cut ------------------------------------------------------------------

local function cut(expression)
  return { type = "Split", pattern = { Regex = expression }, behavior = "Isolated" }
end

local CONTRACTIONS = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)]]
local LLAMA3 = CONTRACTIONS .. [[|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}]]
  .. [[| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]]
local QWEN2 = LLAMA3:gsub("{1,3}", "")
local DIGITS = { type = "Digits", individual_digits = true }

-- What DeepSeek-V3 splits by after digits and CJK characters.
local DEEPSEEK3 = [[[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+]]
  .. [[|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+]]
  .. [[|\s+(?!\S)|\s+]]

-- Letters before and after the place at which "fooBar" is cut.
local UPPER = [=[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]]=]
local LOWER = [=[[\p{Ll}\p{Lm}\p{Lo}\p{M}]]=]
local BEFORE = [=[[^\r\n\p{L}\p{N}]?]=]
local REST = [[| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]]

--- Cuts words before capitals; `last` may end a word, `digits` is a number.
local function capitals(last, digits)
  return BEFORE .. UPPER .. "*" .. LOWER .. "+" .. last .. "|" .. BEFORE .. UPPER .. "+"
    .. LOWER .. "*" .. last .. "|" .. digits .. REST
end

--- Rules of a name; nfc: the text is composed first.
local PRE = {
  ["gpt-2"] = { cut(split.GPT2) },
  ["llama-bpe"] = { cut(LLAMA3), ignore_merges = true, bos = true },
  qwen2 = { cut(QWEN2), nfc = true },
  smollm = { DIGITS, cut(split.GPT2) },
  tekken = { cut(capitals("", [[\p{N}]])), ignore_merges = true, bos = true },
  ["gpt-4o"] = { cut(capitals(CONTRACTIONS .. "?", [[\p{N}{1,3}]])) },
  ["deepseek-v3"] = { cut [[\p{N}{1,3}]], cut "[一-龥぀-ゟ゠-ヿ]+", cut(DEEPSEEK3),
                      bos = true },
}
-- Names of the same rules.
local SAME = { ["phi-2"] = "gpt-2", llama3 = "llama-bpe", ["llama-v3"] = "llama-bpe",
               starcoder = "smollm" }
for name, other in pairs(SAME) do PRE[name] = PRE[other] end

M.NAMES = sorted.keys(PRE)

-- ---- fields ---------------------------------------------------------------------------

local function get(metadata, name, kind)
  return fields.get(metadata, "", KEY .. name, kind)
end

local function get_or(metadata, name, kind, default)
  return fields.get_or(metadata, "", KEY .. name, kind, default)
end

local STRINGS = { "a list of strings", function(x)
  if type(x) ~= "table" or #x == 0 then return false end
  for i = 1, #x do if type(x[i]) ~= "string" then return false end end
  return true
end }

local function numbers_of(count)
  return { ("a list of %d numbers, one a token"):format(count), function(x)
    if type(x) ~= "table" or #x ~= count then return false end
    for i = 1, count do
      if not is_number(x[i]) then return false end
    end
    return true
  end }
end

--- The tokens, their ids, and the added tokens, which are found as they are written.
local function read_tokens(metadata)
  local tokens = get(metadata, "tokens", STRINGS)
  local kinds = get_or(metadata, "token_type", numbers_of(#tokens), {})
  local vocabulary, added = {}, {}
  for i, token in ipairs(tokens) do
    local id, kind = i - 1, kinds[i]
    if vocabulary[token] then
      fields.fail(("%stokens[%d]"):format(KEY, id), ("is %q, which is token %d already")
        :format(token, vocabulary[token]))
    end
    vocabulary[token] = id
    if kind == CONTROL or kind == USER_DEFINED or kind == UNKNOWN then
      added[#added + 1] = { id = id, content = token, special = kind ~= USER_DEFINED,
                            normalized = false }
    end
  end
  return tokens, vocabulary, added
end

--- { SpecialToken } and { Sequence }: the tokens around a text, and the text.
local function post_processor(metadata, adds_bos, adds_eos)
  local single, specials = { { Sequence = { id = "A" } } }, {}
  local function add(side, at)
    local name = side .. "_token_id"
    local id = get(metadata, name, options.whole)
    table.insert(single, at, { SpecialToken = { id = side } })
    specials[side] = { ids = { id } }
  end
  if get_or(metadata, "add_bos_token", options.boolean, adds_bos) then add("bos", 1) end
  if get_or(metadata, "add_eos_token", options.boolean, adds_eos) then
    add("eos", #single + 1)
  end
  return { type = "TemplateProcessing", single = single, special_tokens = specials }
end

-- ---- the two kinds --------------------------------------------------------------------

local READ = {}

function READ.gpt2(metadata)
  local name = get(metadata, "pre", options.one_of(unpack(M.NAMES)))
  local pre = PRE[name]
  local _, vocabulary, added = read_tokens(metadata)
  local rules = { unpack(pre) }
  rules[#rules + 1] = { type = "ByteLevel", add_prefix_space = false, use_regex = false }
  return {
    normalizer = pre.nfc and { type = "NFC" } or nil,
    pre_tokenizer = { type = "Sequence", pretokenizers = rules },
    decoder = { type = "ByteLevel" }, added_tokens = added,
    post_processor = post_processor(metadata, pre.bos or false, false),
    model = { type = "BPE", vocab = vocabulary, ignore_merges = pre.ignore_merges,
              merges = get(metadata, "merges", STRINGS) },
  }
end

function READ.llama(metadata)
  local tokens, vocabulary, added = read_tokens(metadata)
  local scores, of_id = get(metadata, "scores", numbers_of(#tokens)), {}
  for i = 1, #tokens do of_id[i - 1] = scores[i] end
  fields.must_be(metadata, "", KEY .. "remove_extra_whitespaces", false)
  local unk = tokens[get_or(metadata, "unknown_token_id", options.whole, 0) + 1]
  local decoders = { { type = "Replace", pattern = { String = "▁" }, content = " " },
                     { type = "ByteFallback" }, { type = "Fuse" } }
  local normalizers = { { type = "Replace", pattern = { String = " " }, content = "▁" } }
  if get_or(metadata, "add_space_prefix", options.boolean, true) then
    table.insert(normalizers, 1, { type = "Prepend", prepend = "▁" })
    decoders[4] = { type = "Strip", content = " ", start = 1, stop = 0 }
  end
  return {
    normalizer = { type = "Sequence", normalizers = normalizers }, added_tokens = added,
    decoder = { type = "Sequence", decoders = decoders },
    post_processor = post_processor(metadata, true, false),
    model = { type = "BPE", vocab = vocabulary, merges = {}, unk_token = unk,
              fuse_unk = true, byte_fallback = true },
  }, of_id
end

--- Reads a tokenizer from GGUF metadata. Returns what its tokenizer.json would say.
---@param metadata table<string, any>  of kv.gguf: "tokenizer.ggml.model", …
---@return table
---@return table<integer, number>|nil scores  of each token, where there are no merges
function M.read(metadata)
  local kind = get(metadata, "model", options.one_of("gpt2", "llama"))
  return READ[kind](metadata)
end

--- The fields with the ids of special tokens, by kvlab's names of these tokens.
M.SPECIAL_IDS = {
  bos = KEY .. "bos_token_id", eos = KEY .. "eos_token_id", eot = KEY .. "eot_token_id",
  unk = KEY .. "unknown_token_id", pad = KEY .. "padding_token_id",
}

return M
