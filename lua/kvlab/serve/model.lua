--- A model with its tokenizer and an engine, ready to answer: `kv.model`.
--
--   m = kv.model "smollm2"
--   m:generate("The capital of France is", { policy = "quest", ratio = 0.1 }).text
--   m:tokens "Hello"
--   m:chat()
--   :plot m:selection_map("Once upon a time …", { policy = "quest", ratio = 0.1 })
local arguments = require "kvlab.arguments"
local chat = require "kvlab.serve.chat"
local generate = require "kvlab.serve.generate"
local kinds = require "kvlab.tensor.kinds"
local named = require "kvlab.named"
local options = require "kvlab.options"
local policies = require "kvlab.policy.policy"
local record = require "kvlab.observe.record"
local sorted = require "kvlab.sorted"

local M = {}

---@class kvlab.Model
---@field name string
---@field model table         of a family, see lua/models/engine.lua
---@field tokenizer kvlab.text.Tokenizer
---@field engine table        its memory and attention
local Model = {}
Model.__index = Model

local OPEN = {
  device = kinds.device, dtype = options.one_of("f32", "f16", "bf16"),
  engine = options.table,
}

--- Opens a model with its tokenizer.
---@param name string  a folder of Hugging Face, a file that ends with .gguf, or what
--                     ./kvlab get fetched, such as "smollm2"
---@param o? table     device (--device's), dtype of weights and activations (bf16),
--                     engine: options of model:engine (lua/models/engine.lua)
---@return kvlab.Model
function M.model(name, o)
  o = options.check("model", o, OPEN)
  local opener = named.open("models", "file of models", "open", 2)
  local model, tokenizer = opener.open(name, { device = o.device, dtype = o.dtype })
  local engine = model:engine(o.engine)
  return setmetatable({ name = name, model = model, tokenizer = tokenizer,
    engine = engine, own_attention = engine.attention, engine_options = o.engine or {},
    own_tables = engine.cache.tables }, Model)
end

-- ---- policies -------------------------------------------------------------------------

--- Opens an engine with the options of the last one, and with these tables.
local function open_engine(self, tables)
  local o = {}
  for name, value in pairs(self.engine_options) do o[name] = value end
  for _, name in ipairs { "policy", "prefill_policy", "draft_policy" } do
    o[name] = o[name] and policies.again(o[name]) -- the other engine has this one
  end
  o.tables = tables
  self.engine = self.model:engine(o)
  self.own_attention = self.engine.attention
end

--- The engine for calls with a policy. A policy that evicts needs tables by head; other
-- policies get the tables that the options ask for. If the present engine has other
-- tables, a new engine is opened, and the memory of the old one is freed once it is no
-- longer used.
---@param policy? kvlab.Policy  (the engine's)
---@return table engine
function Model:engine_for(policy)
  local wanted = self.own_tables
  if policy and policy.evict and not self.engine_options.tables and wanted == "one" then
    wanted = "head"
  end
  local before = self.engine.cache.tables
  if wanted == before then return self.engine end
  self.engine, self.own_attention = nil, nil
  for _ = 1, 2 do collectgarbage() end -- memory is freed in the cycle after finalizers
  local ok, why = pcall(open_engine, self, wanted)
  if not ok then
    open_engine(self, before)
    error(why, 0)
  end
  return self.engine
end

-- Options of every policy that selects.
local OF_POLICIES = { ratio = true, tokens = true, blocks = true, min_blocks = true,
                      sink = true, recent = true }

--- Options of kv.generate, and those of the policy that they name.
local function parted(what, given, known)
  local own, rest = {}, {}
  for name, value in pairs(given) do
    if known[name] then own[name] = value
    elseif name ~= "policy" then rest[name] = value end
  end
  if type(given.policy) == "string" then return own, policies(given.policy, rest) end
  local name = next(rest)
  if name then
    local names = sorted.keys(known)
    names[#names + 1] = "policy"
    if given.policy or not OF_POLICIES[name] then options.refuse(what, name, names) end
    options.fail(("%s: %s is no option without a policy; an option of a policy stands "
      .. "beside policy = NAME"):format(what, options.shown(name)))
  end
  return own, given.policy
end

local POLICY = options.optional(options.either({ "a policy's name", options.string[2] },
  options.like("a policy, as kv.policy makes them", "compute_decode")))

--- Options of kv.generate with the tokenizer; the engine decodes with the policy.
local function prepare(self, what, o, known)
  o = o or {}
  if type(o) ~= "table" then options.check(what, o, known) end -- which raises
  options.argument(what, "policy", o.policy, POLICY)
  local own, policy = parted(what, o, known)
  options.check(what, own, known)
  local engine = self:engine_for(policy)
  local now = engine.attention
  if policy and policy ~= now.decode_policy then engine:use_policy(policy)
  elseif not policy and now ~= self.own_attention then -- changes cost recorded graphs
    engine:use_attention(self.own_attention)
  end
  own.tokenizer = own.tokenizer or self.tokenizer
  return own
end

-- ---- what it does ---------------------------------------------------------------------

--- Answers prompts.
---@param prompts string|table  see kv.generate
---@param o? table  options of kv.generate; and policy: what decodes, a policy or the name
--                  of one, whose options may stand beside it (the engine's)
---@return kvlab.Answer|kvlab.Answer[]
function Model:generate(prompts, o)
  local own = prepare(self, "generate", o, generate.KNOWN) -- it may open another engine
  return generate.generate(self.engine, prompts, own)
end

--- A conversation on the terminal: reads a line, writes the answer as it comes, and so on
-- until Ctrl-D. Ctrl-C ends an answer.
---@param o? table  as for generate; and system: the system prompt; variables: what else
--                  the chat template reads, as for tokenizer:chat; read(): returns the
--                  next line, or nil at the end (what is typed)
function Model:chat(o)
  local own = prepare(self, "chat", o, chat.KNOWN)
  chat.run(self.engine, self.tokenizer, own)
end

-- ---- maps -----------------------------------------------------------------------------

local LETTERS = 12 -- of a name

--- The text of some tokens in one short line.
local function name_of(self, ids)
  local text = self.tokenizer:decode(ids, { special = true }):gsub("%s+", " ")
  local letters = {}
  for letter in text:gmatch "[%z\1-\127\194-\244][\128-\191]*" do
    letters[#letters + 1] = letter
  end
  if #letters <= LETTERS then return text end
  return table.concat(letters, "", 1, LETTERS - 1) .. "…"
end

--- The view of a map of an answer: a step is named by the token that it decodes, a block
-- by its first words.
local function view_of(self, prompt, answer, view)
  local all, steps, blocks, size = {}, {}, {}, self.engine.cache.block_size
  for i, id in ipairs(prompt) do all[i] = id end
  for i = 1, #answer.ids - 1 do -- no step reads the last one
    all[#all + 1], steps[i] = answer.ids[i], name_of(self, { answer.ids[i] })
  end
  for first = 1, #all, size do
    blocks[#blocks + 1] = name_of(self,
      { unpack(all, first, math.min(first + size - 1, #all)) })
  end
  return { layers = view.layers, heads = view.heads, title = view.title,
           step_names = steps, block_names = blocks }
end

local VIEW = { layers = options.list_of(options.whole, 1),
               heads = options.list_of(options.whole, 1), title = options.string }
local MAP = {}
for _, known in ipairs { VIEW, generate.KNOWN } do
  for name, kind in pairs(known) do MAP[name] = kind end
end
MAP.draft = nil -- every token has a step of its own

--- Answers a prompt and draws which blocks each step of the answer read: a row for each
-- token, a column for each block, named by their text. `:plot` shows it.
---@param prompt string|integer[]
---@param o? table  as for generate; and layers, heads (lists of numbers from 0; some of
--                  them) and title
---@return kvlab.heat_map map
---@return kvlab.Answer answer
function Model:selection_map(prompt, o)
  local own, view = prepare(self, "selection_map", o, MAP), {}
  for name in pairs(VIEW) do view[name], own[name] = own[name], nil end
  if self.engine.attention.evictor then
    options.fail(("selection_map: policy %s evicts tokens, so what it reads are no "
      .. "blocks of the text, expected one that evicts none"):format(
      self.engine.attention.decode_policy.name))
  end
  local ids = type(prompt) == "string" and self.tokenizer:encode(prompt) or prompt
  local watched = record(self.engine.attention)
  local ok, answer = pcall(generate.generate, self.engine, ids, own)
  watched:detach()
  if not ok then error(answer, 0) end
  return watched:selection_map(view_of(self, ids, answer, view)), answer
end

-- ---- tokens ---------------------------------------------------------------------------

---@class kvlab.Tokens  a list of { id =, text = }, printed one a line

local Tokens = {}

function Tokens:__tostring()
  local lines = {}
  for i, one in ipairs(self) do
    lines[i] = ("%7d  %q"):format(one.id, one.text):gsub("\\\n", "\\n")
  end
  return table.concat(lines, "\n")
end

--- The tokens of a text.
---@param text string
---@return kvlab.Tokens  a list of { id =, text = }
function Model:tokens(text)
  local list = {}
  for i, id in ipairs(self.tokenizer:encode(text)) do
    list[i] = { id = id, text = self.tokenizer:bytes_of(id) }
  end
  return setmetatable(list, Tokens)
end

M.model = arguments.of("model", M.model, { name = options.string })
arguments.methods(Model, "a model of kv.model", {
  engine_for = { policy = options.optional(options.like(
    "a policy, as kv.policy makes them", "compute_decode")) },
  tokens = { text = options.string },
  selection_map = { prompt = options.either({ "a text", options.string[2] },
    options.list_of(options.whole, 1)) },
})

return M
