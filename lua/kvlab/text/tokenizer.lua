--- Text to token ids and back: `kv.tokenizer`, for the files of models.
--
--   local t = kv.tokenizer "folder"           of Hugging Face: has a tokenizer.json
--   local ids = t:encode "The capital of France is"
--   print(t:decode(ids))
--   local text, prompt = t:chat({ { role = "user", content = "Hello" } },
--                               { add_generation_prompt = true })
--
-- It knows byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and BPE as SentencePiece has it
-- (Llama 2, Mistral, Gemma). If a file asks for something that is not supported here,
-- loading it is an error. So no text gets other tokens than the model was trained with.
local arguments = require "kvlab.arguments"
local bpe = require "kvlab.text.bpe"
local chat = require "kvlab.text.chat"
local ffi = require "ffi"
local downloads = require "kvlab.downloads"
local fields = require "kvlab.text.fields"
local files = require "kvlab.files"
local gguf = require "kvlab.text.gguf"
local hf = require "kvlab.text.hf"
local json = require "kvlab.json"
local options = require "kvlab.options"
local rest = require("kvlab.slices").rest
local sources = require "kvlab.sources"
local space = require "kvlab.text.space"
local split = require "kvlab.text.split"
local stream = require "kvlab.text.stream"
local unicode = require "kvlab.text.unicode"

local M = {}

local BYTES_MOST = 2 ^ 27 -- of a text: positions are 28 bits in the heap of merges

---@class kvlab.text.Tokenizer
---@field size integer        one more than the highest id
---@field bos integer|nil     the token that begins a text, of those that the file names
---@field eos integer|nil     … that ends it
---@field unk integer|nil
---@field pad integer|nil
---@field eot integer|nil     the end of a turn in a chat
---@field specials table<integer, boolean>  ids of special tokens
---@field template string|nil the chat template of the files, unless a chat names another
---@field templates table<string, string>  all that the files have, by their names
---@field special_texts table<string, string>  special tokens, as templates name them:
--                                             "bos_token", "eos_token", …
---@field bytes_most number   of a text that one token may stand for; math.huge if there
--                            is no bound
local Tokenizer = {}
Tokenizer.__index = Tokenizer

-- ---- reading files --------------------------------------------------------------------

local function read_json(path)
  local text = sources.read(path)
  if not text then return nil end
  local ok, value = pcall(json.decode, text)
  if not ok then
    error(path .. ": " .. tostring(value):gsub("^.-json%.decode: ", ""), 0)
  end
  if type(value) ~= "table" then error(path .. ": is no JSON object", 0) end
  return value
end

--- Builds a tokenizer from a file; problems get the file's name in front.
local function build(path, fn, ...)
  local ok, problem = pcall(fn, ...)
  if ok then return end
  if not fields.is_problem(problem) then error(problem, 0) end
  error(("%s: %s"):format(path, tostring(problem)), 0)
end

--- The special tokens of tokenizer_config.json, as templates name them ("bos_token").
-- Each is a string, or an object with its content.
local function read_specials(self, config)
  for _, from in ipairs { config, fields.object_or_nil(config, "",
    "extra_special_tokens") or {} } do
    for name, token in pairs(from) do
      if type(token) == "table" then token = token.content end
      if type(token) == "string" and tostring(name):find "_token$" then
        self.special_texts[name] = token
      end
    end
  end
  for _, name in ipairs { "bos", "eos", "unk", "pad" } do
    self[name] = self.ids[self.special_texts[name .. "_token"]]
  end
end

local TEMPLATES = { "a string, or a list of named ones", function(x)
  if x == nil or type(x) == "string" then return true end
  for _, entry in ipairs(type(x) == "table" and x or { false }) do
    if type(entry) ~= "table" or type(entry.name) ~= "string"
      or type(entry.template) ~= "string" then return false end
  end
  return true
end }

--- The chat templates of tokenizer_config.json: one, or several with names.
local function read_templates(self, config)
  local given = fields.get(config, "", "chat_template", TEMPLATES)
  if type(given) ~= "table" then given = { { name = "default", template = given } } end
  for _, entry in ipairs(given) do self.templates[entry.name] = entry.template end
end

--- The templates in files of their own, which replace all others.
local function read_template_files(self, folder)
  local own = { default = sources.read(folder .. "/chat_template.jinja") }
  local more = folder .. "/additional_chat_templates"
  for _, name in ipairs(files.real(more) and files.list(more) or {}) do
    local key = name:match "^(.*)%.jinja$"
    if key then own[key] = sources.read(more .. "/" .. name) end
  end
  if next(own) then self.templates = own end
  self.template = self.templates.default
end

--- Turns the tokens before or after a text on or off, if a file says so.
local function set_around(self, config, name, side)
  local adds = fields.get_or(config, "", "add_" .. name .. "_token", options.boolean)
  if adds == false then self[side] = {} end
  if adds and #self[side] == 0 then
    if not self[name] then
      fields.fail(("add_%s_token"):format(name), ("is true, but %s_token is none"):format(
        name))
    end
    self[side] = { self[name] }
  end
end

local function read_config(self, config)
  read_specials(self, config)
  read_templates(self, config)
  set_around(self, config, "bos", "before")
  set_around(self, config, "eos", "after")
end

local function read_metadata(self, metadata)
  for name, field in pairs(gguf.SPECIAL_IDS) do
    local id = fields.get_or(metadata, "", field, options.whole)
    if id and not self.texts[id] then
      fields.fail(field, ("is %d, expected 0 ... %d"):format(id, self.size - 1))
    end
    self[name] = id
    self.special_texts[name .. "_token"] = id and self.texts[id]
  end
  for key, source in pairs(metadata) do -- tokenizer.chat_template, and ….tool_use
    local name = key == "tokenizer.chat_template" and "default"
      or tostring(key):match "^tokenizer%.chat_template%.(.+)$"
    if name then self.templates[name] = fields.expect(key, source, options.string) end
  end
  self.template = self.templates.default
end

local function of_metadata(self, metadata)
  self.name = "GGUF metadata"
  build(self.name, function()
    hf.build(self, gguf.read(metadata))
    read_metadata(self, metadata)
  end)
end

--- A hint for a path that may have been meant for something else.
local function hint_of(source)
  if source:find "%.gguf$" then
    return "; that of a GGUF file is kv.tokenizer(kv.gguf(path).metadata)"
  end
  return downloads.CATALOGUE[source] and ("; that of a model is kv.model(%q).tokenizer")
    :format(source) or ""
end

local function of_files(self, source)
  local folder, path = source:match "^(.*)/[^/]*$" or ".", source
  local file = not source:find "%.json$" and read_json(source .. "/tokenizer.json")
  if file then folder, path = source, source .. "/tokenizer.json"
  else file = read_json(source)
  end
  if not file then
    error(("%s is no tokenizer.json and no folder with one%s"):format(source,
      hint_of(source)), 0)
  end
  self.name = path
  build(path, hf.build, self, file)
  local config = read_json(folder .. "/tokenizer_config.json")
  if config then build(folder .. "/tokenizer_config.json", read_config, self, config) end
  read_template_files(self, folder)
end

local SOURCE = options.either({ "a path", function(x) return type(x) == "string" end },
  { "a table of GGUF metadata", function(x) return type(x) == "table" end })

--- Opens a tokenizer.
---@param source string|table  a folder of Hugging Face with a tokenizer.json (and a
--                             tokenizer_config.json and chat_template.jinja, if it has
--                             them), the path of a tokenizer.json, or the metadata of a
--                             GGUF file
---@return kvlab.text.Tokenizer
function M.tokenizer(source)
  options.argument("tokenizer", "source", source, SOURCE)
  local self = setmetatable({ raw_bytes = {}, spaces = {}, templates = {},
                              special_texts = {} }, Tokenizer)
  local ok, problem = pcall(type(source) == "table" and of_metadata or of_files, self,
    source)
  if not ok then options.fail("tokenizer: " .. tostring(problem)) end
  return self
end

-- ---- encoding -------------------------------------------------------------------------

local BYTES_PART = 2 ^ 16 -- of a text whose spaces are replaced, between two rests

--- The text with another string in place of its spaces. The text may be cut anywhere for
-- this, because a space is one byte.
local function with_spaces(text, content)
  if #text <= BYTES_PART then return (text:gsub(" ", content)) end
  local parts = {}
  for from = 1, #text, BYTES_PART do
    parts[#parts + 1] = text:sub(from, from + BYTES_PART - 1):gsub(" ", content)
    rest()
  end
  return table.concat(parts)
end

--- Appends the tokens of a text without added tokens to those of a work space.
local function encode_piece(self, w, text, is_first)
  if text == "" then return end
  local cuts = self.splitter
  if cuts.space then text = with_spaces(text, cuts.space) end
  local prefix = cuts.prefix
  if prefix and (is_first or not cuts.prefix_first)
    and text:sub(1, #prefix) ~= prefix then text = prefix .. text end
  local base = ffi.cast("const uint8_t *", text)
  local from, to = w.ends, w.others
  from:clear()
  from:push(0)
  from:push(#text)
  for i = 1, #cuts.rules do
    to:clear()
    split.cut(cuts.rules[i], base, from, to, w.parts)
    from, to = to, from
  end
  self.bpe:encode(w, base, from)
end

--- Calls fn(self, w, text, is_first, special) for each text between the tokens that a
-- finder finds, and appends these tokens.
local function around_added(self, w, finder, text, is_first, special, fn)
  local from = 1
  while true do
    local token, first, last = finder:next(text, from, special)
    if not token then break end
    if first > from then
      fn(self, w, text:sub(from, first - 1), is_first and from == 1, special)
    end
    w.out:push(token.id)
    from = last + 1
    if w.out.count > w.most then error(bpe.TOO_MANY, 0) end
    rest()
  end
  if from <= #text then
    fn(self, w, from == 1 and text or text:sub(from), is_first and from == 1, special)
  end
end

local function encode_normalized(self, w, text, is_first, special)
  around_added(self, w, self.normal, self.normalize(text), is_first, special ~= false,
    encode_piece)
end

local ENCODE = { special = options.boolean, bos = options.boolean, eos = options.boolean,
                 most = options.whole }

--- The tokens at one end of a text: as the file says, unless the call asks for them or
-- leaves them out.
local function around(self, asked, name, listed)
  if asked == nil then return listed end
  if not asked then return {} end
  if #listed > 0 then return listed end
  if not self[name] then
    options.fail(("encode: %s is true, but %s names no such token"):format(name,
      self.name))
  end
  return { self[name] }
end

local IDS_PART = 2 ^ 16 -- between two rests

local function list_of(out)
  local ids, at = {}, out.at
  for from = 1, out.count, IDS_PART do
    for i = from, math.min(from + IDS_PART - 1, out.count) do ids[i] = at[i - 1] end
    rest()
  end
  return ids
end

local function encode_into(self, w, text, special, before, after)
  for i = 1, #before do w.out:push(before[i]) end
  around_added(self, w, self.raw, text, true, special, encode_normalized)
  for i = 1, #after do w.out:push(after[i]) end
  if w.out.count > w.most then error(bpe.TOO_MANY, 0) end
  return list_of(w.out)
end

--- The ids of a valid text; nil if they are more than `most`. special: whether special
-- tokens are found, or the ranges of the text in which they are not.
local function encode_valid(self, text, special, before, after, most)
  most = most or math.huge
  if #text / self.bytes_most > most then return nil end
  local w = table.remove(self.spaces) or space.new()
  w.most = most
  local ok, ids = pcall(encode_into, self, w, text, special, before, after)
  w:clear()
  table.insert(self.spaces, w)
  if ok then return ids end
  if ids ~= bpe.TOO_MANY then error(ids, 0) end
end

--- The token ids of a text. Bytes that are not UTF-8 count as U+FFFD, one for each
-- mistake.
---@param text string
---@param o? table  special: special tokens, such as <|im_start|>, are found in the text
--                  (false: text of users cannot begin a turn of a chat); bos, eos:
--                  whether tokens that begin and end a text are added (as the file says);
--                  most: returns nil where there are more ids than this, which for a long
--                  text takes no longer than to make so many
---@return integer[]|nil ids
function Tokenizer:encode(text, o)
  o = options.check("encode", o, ENCODE)
  if #text > BYTES_MOST then
    options.fail(("encode: text is %d bytes, expected %d or fewer"):format(#text,
      BYTES_MOST))
  end
  local before = around(self, o.bos, "bos", self.before)
  local after = around(self, o.eos, "eos", self.after)
  return encode_valid(self, unicode.repaired(text), o.special or false, before, after,
    o.most)
end

-- ---- decoding -------------------------------------------------------------------------

--- The bytes that a token stands for, which may be a part of a character.
---@param id integer
---@return string
function Tokenizer:bytes_of(id)
  local bytes = self.raw_bytes[id]
  if bytes then return bytes end
  local text = self.texts[id]
  if not text then
    options.fail(("token id %s is none of %s, expected 0 ... %d"):format(tostring(id),
      self.name, self.size - 1))
  end
  bytes = self.decoder:bytes(text)
  self.raw_bytes[id] = bytes
  return bytes
end

local DECODE = { special = options.boolean, bytes = options.boolean }

--- The text of token ids.
---@param ids integer[]
---@param o? table  special: special tokens are written, too (false); bytes: returns the
--                  bytes as they are (false: U+FFFD stands for what is not UTF-8)
---@return string
function Tokenizer:decode(ids, o)
  o = options.check("decode", o, DECODE)
  local bytes = stream.bytes(stream.new(self, o.special or false), ids)
  return o.bytes and bytes or unicode.repaired(bytes)
end

local STREAM = { special = options.boolean, stop = stream.STOPS }

--- Decodes tokens that come one by one: `stream:push(id)` returns the text that is
-- complete, `stream:finish()` what is left. Together they are what `decode` returns.
---@param o? table  special: special tokens are written, too (false); stop: strings that
--                  end the text. Nothing of the first stop string, or after it, is
--                  returned, and `stream.stopped` is that string
---@return kvlab.text.Stream
function Tokenizer:stream(o)
  o = options.check("stream", o, STREAM)
  return stream.new(self, o.special or false, o.stop)
end

-- ---- tokens ---------------------------------------------------------------------------

--- The id of a token as the file writes it; nil if there is none.
---@param token string  "<|im_end|>", "Ġthe"
---@return integer|nil
function Tokenizer:id_of(token) return self.ids[token] end

--- The token of an id as the file writes it; nil if there is none.
---@param id integer
---@return string|nil
function Tokenizer:token_of(id) return self.texts[id] end

local CHAT = { most = options.whole }
for name, kind in pairs(chat.KNOWN) do CHAT[name] = kind end

--- A chat as the model was trained to read it, by the template of its file. Names of
-- special tokens in the messages, and in all else that is given, are ordinary text.
---@param messages table[]|string  { role = "user", content = … }, …, or their JSON text
---@param o? table  add_generation_prompt: the text ends where the assistant's answer
--                  begins (false); tools, documents: lists of tables, or JSON text, which
--                  keeps the order of keys; variables: what else the template reads, such
--                  as { enable_thinking = false }; template: the name of one, where the
--                  files have several ("tool_use" with tools, else "default"); most: as
--                  for encode
---@return string text
---@return integer[]|nil ids
function Tokenizer:chat(messages, o)
  o = options.check("chat", o, CHAT)
  local text, ranges = chat.render(self, messages, o)
  return text, encode_valid(self, text, ranges, {}, {}, o.most)
end

arguments.methods(Tokenizer, "a tokenizer", {
  encode = { text = options.string }, id_of = { token = options.string },
  token_of = { id = options.whole }, bytes_of = { id = options.whole },
  decode = { ids = options.list_of(options.whole) },
  chat = { messages = chat.LIST },
})

return M
