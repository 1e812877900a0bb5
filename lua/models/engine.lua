--- A model with memory: a KV cache, attention with its policies, and the buffers of a
-- step. An engine prefills prompts in chunks, decodes, and records decode steps in
-- graphs. It knows no family of models: the model computes its layers.
--
--   local engine = model:engine { policy = kv.policy "quest", blocks = 2048 }
--   local seq = engine:sequence()
--   local logits = engine:prefill(seq, { 1, 5, 7 })      of the last token, [1, vocab]
--   logits = engine:decode({ seq }, { 9 })
--   logits = engine:verify({ seq }, { 3 }, { 9, 4, 7 })  of each of them, [3, vocab]
--   engine:take_back { 2 }                               9 stays, 4 and 7 never were
--
-- With a draft_policy, the engine makes drafts by itself:
--
--   local ids = engine:draft({ seq }, { 3 }, { 9 })      3 tokens that may follow 9
--   logits = engine:verify({ seq }, { 4 }, { 9, 0, 0, 0 }, nil, { 3 })
--
-- A call happens or it does not: when prefill or decode raises, because a policy fails,
-- no block is free or Ctrl-C came, the sequences are as they were before the call, so the
-- same call can be made again.
--
-- To add a model family, write one file like lua/models/llama.lua; the smallest one is in
-- spec/models/engine_spec.lua. Its models have these fields and functions:
--
--   engine = engine.new           this file's, so that `model:engine { … }` works
--   device, dtype                 where it computes, and the dtype of its activations
--   config                        layers, heads, kv_heads and head_dim: the shape of its
--                                 attention; value_dim, if values are the first numbers
--                                 of their keys; hidden: numbers of a token's state;
--                                 vocab
--   attention_options             options of kv.attention that the family needs, such as
--                                 inv_freq, scale or alibi; may be left out
--   buffers(self)                 a table: how many numbers each activation has for one
--                                 token. The engine makes a buffer [tokens, numbers] of
--                                 each, for its largest step
--   views(self, buffers, n)       a table of views of those buffers for a step of n
--                                 tokens. The engine asks once for each n; the functions
--                                 below get the table as s
--   embed(self, tokens, s)        looks up the states of token ids, i32 [n]
--   forward_layer(self, i, s, attention)
--                                 computes layer i, counted from 0. It calls
--                                 attention:forward(i, q, k, v, out) once
--   states(self, s)               returns the states after the last layer as logits wants
--                                 them, with the final norm applied: [n, hidden]
--   logits(self, states, out)     writes the logits of some rows of states to `out`, f32
--                                 [rows, vocab]
--
-- embed, forward_layer, states and logits run at every step and may be recorded in a
-- graph: they allocate nothing and never wait for the device.
local arguments = require "kvlab.arguments"
local drafted_tokens = require "models.drafted"
local formats = require "kvlab.memory.formats"
local kv = require "kvlab"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local sampler = require "kvlab.serve.sampler"
local OFFLOAD = require("kvlab.memory.host_tier").OFFLOAD

local C = kv.C
local M = {}

---@class models.Engine
---@field model table               of a family, see the head of this file
---@field cache kvlab.Cache
---@field attention kvlab.Attention
---@field chunk integer             most tokens of a prefill step
---@field max_seqs integer          most sequences of a step
---@field max_blocks integer|nil    most blocks of a sequence
local Engine = {}
Engine.__index = Engine

-- ---- making one -----------------------------------------------------------------------

local POLICY = options.like("a policy, as kv.policy makes them", "options",
  "compute_decode")
local OPTIONS = {
  policy = POLICY, prefill_policy = POLICY, draft_policy = POLICY,
  draft_reuse = options.boolean, blocks = options.count, block_size = options.count,
  max_seqs = options.count, chunk = options.count, max_blocks = options.count,
  offload = OFFLOAD, graph = options.boolean, expand = options.boolean,
  format = options.one_of(unpack(formats.NAMES)),
  tables = options.one_of("one", "layer", "head"),
}
local SIZES = { "layers", "heads", "kv_heads", "head_dim", "hidden", "vocab" }
local FUNCTIONS = { "buffers", "views", "embed", "forward_layer", "states", "logits" }

--- Raises unless a model has what the head of this file asks for.
local function check_model(model)
  for _, name in ipairs(SIZES) do
    local size = type(model.config) == "table" and model.config[name]
    if not options.count[2](size) then
      error(("engine: config.%s of the model %s"):format(name,
        options.problem(size or nil, options.count)), 3)
    end
  end
  for _, name in ipairs(FUNCTIONS) do
    if type(model[name]) ~= "function" then
      error(("engine: %s of the model is %s, expected a function"):format(name,
        options.shown(model[name])), 3)
    end
  end
end

--- A table with the entries of `given` over those of `defaults`.
local function merged(defaults, given)
  local all = {}
  for name, value in pairs(defaults) do all[name] = value end
  for name, value in pairs(given or {}) do all[name] = value end
  return all
end

local function new_attention(self, policy, prefill_policy, draft_policy, reuse)
  return kv.attention(merged({
    cache = self.cache, heads = self.model.config.heads, max_seqs = self.max_seqs,
    max_blocks = self.max_blocks, decode_policy = policy, prefill_policy = prefill_policy,
    draft_policy = draft_policy, draft_reuse = reuse, expand = self.expand,
  }, self.model.attention_options))
end

--- Memory and policies to run a model with. Families offer it as `model:engine { … }`.
---@param model table
---@param o? table  policy: selects in decode (full), prefill_policy: in prefill (full),
--                  draft_policy: in the steps that make drafts (none), draft_reuse: in
--                  the first of these alone (false);
--                  blocks of the cache (1024), block_size in tokens (16), max_seqs: most
--                  sequences of a step (16), chunk: most tokens of a prefill step (512),
--                  max_blocks of one sequence (all), format of the cache (the model's
--                  dtype), tables: kv.cache's ("head" for a policy that evicts, else
--                  "one"), offload: keeps KV in host memory, with these options of
--                  kv.cache's offload, graph: records decode steps once and replays them
--                  (false), expand: kv.attention's, for models with latents
---@return models.Engine
function M.new(model, o)
  o = options.check("engine", o, OPTIONS)
  check_model(model)
  if o.policy and o.policy.evict and o.offload then
    options.fail(("engine: offload is given, and policy %s evicts tokens, expected KV on "
      .. "the device"):format(o.policy.name))
  end
  local c, device, dtype = model.config, model.device, model.dtype
  local self = setmetatable({
    model = model, chunk = o.chunk or 512, max_seqs = o.max_seqs or 16,
    max_blocks = o.max_blocks, uses_graphs = o.graph, expand = o.expand, views = {},
    buffers = {}, logit_views = {}, ones = {},
  }, Engine)
  self.drafted = drafted_tokens.new(device, self.max_seqs)
  local rows = math.max(self.chunk, self.max_seqs)
  self.cache = kv.cache {
    device = device, format = o.format or dtype, layers = c.layers,
    blocks = o.blocks or 1024, block_size = o.block_size or 16, kv_heads = c.kv_heads,
    tables = o.tables or o.policy and o.policy.evict and "head" or nil,
    head_dim = c.head_dim, value_dim = c.value_dim, offload = o.offload
      and merged({ max_seqs = self.max_seqs, max_tokens = rows }, o.offload) or nil,
  }
  self:use_attention(new_attention(self, o.policy, o.prefill_policy, o.draft_policy,
    o.draft_reuse))
  self.batch = self.cache:batch {
    max_seqs = self.max_seqs, max_tokens = rows, max_blocks = o.max_blocks,
    fixed_width = o.graph,
  }
  for name, size in pairs(model:buffers()) do
    self.buffers[name] = kv.tensor(device, dtype, { rows, size })
  end
  self.last = kv.tensor(device, dtype, { self.max_seqs, c.hidden })
  self.logits = kv.tensor(device, "f32", { self.max_seqs, c.vocab })
  return self
end

--- Decodes with another policy from now on, and prefills densely. The policy is shown the
-- sequences that are in the cache.
---@param policy table
---@param seqs? kvlab.Sequence[]
function Engine:use_policy(policy, seqs)
  local attention = new_attention(self, policy)
  if seqs then attention:adopt(seqs) end
  self:use_attention(attention)
end

--- Goes back to an attention that this engine had before. Its policies know nothing about
-- sequences that were begun since.
---@param attention kvlab.Attention
function Engine:use_attention(attention)
  self.attention = attention
  self.graphs = attention.graphs or {} -- recorded with this attention
  attention.graphs = self.graphs
end

--- An attention over this engine's cache that decodes with another policy, and prefills
-- densely: for use_attention, and for the requests of a server that name it.
---@param policy table
---@param draft_policy? kvlab.Policy  that makes drafts
---@param reuse? boolean  one selection for all tokens of a draft
---@return kvlab.Attention
function Engine:attention_of(policy, draft_policy, reuse)
  return new_attention(self, policy, nil, draft_policy, reuse)
end

--- An attention that decodes and prefills as another one does, with policies of the same
-- options, and makes drafts with `policy`. It is made when it is first asked for. A
-- recorded step belongs to its attention, so equal drafts should have equal keys.
---@param attention kvlab.Attention
---@param policy table  not attached; its options are used
---@param key any       of the same value for each draft by this policy and these options
---@param reuse? boolean  one selection for all tokens of a draft
---@return kvlab.Attention
function Engine:drafting(attention, policy, key, reuse)
  local base = attention.base or attention
  key = reuse and ("reusing %s"):format(tostring(key)) or key
  base.drafting = base.drafting or {}
  local made = base.drafting[key]
  if not made then
    local prefill, decode = base.prefill_policy, base.decode_policy
    local new_prefill = kv.policy.again(prefill)
    local new_decode = decode == prefill and new_prefill or kv.policy.again(decode)
    made = new_attention(self, new_decode, new_prefill, kv.policy.again(policy), reuse)
    made.base, base.drafting[key] = base, made
  end
  return made
end

-- ---- sequences ------------------------------------------------------------------------

--- An empty sequence.
---@return kvlab.Sequence
function Engine:sequence()
  local seq = self.cache:sequence()
  local ok, why = pcall(self.attention.request_begin, self.attention, seq)
  if ok then return seq end
  seq:close()
  error(why, 0)
end

--- Ends a sequence: the policies drop what they store for it, and its blocks are given
-- back.
function Engine:finish(seq)
  local ok, why = pcall(self.attention.request_finished, self.attention, seq)
  seq:close()
  if not ok then error(why, 0) end
end

-- ---- a step ---------------------------------------------------------------------------

local function check_tokens(self, tokens)
  if type(tokens) ~= "table" or #tokens == 0 then
    error(("tokens is %s, expected a table of token ids"):format(
      type(tokens) == "table" and "empty" or type(tokens)), 3)
  end
  local vocab = self.model.config.vocab
  for i = 1, #tokens do
    local id = tokens[i]
    if type(id) ~= "number" or id < 0 or id >= vocab or id % 1 ~= 0 then
      error(("token %d is %s, expected 0 ... %d"):format(
        i - 1, tostring(id), vocab - 1), 3)
    end
  end
end

local function end_step(self, ok, ...)
  self.step = nil
  C.kvl_interrupt_hold(-1)
  if ok then return ... end
  error((...), 0)
end

--- Runs fn(self, ...) as the step `name`, which happens whole or not at all.
local function run_step(self, name, fn, ...)
  if self.step then
    options.fail(("%s: the engine is in the middle of %s, expected it to have ended")
      :format(name, self.step))
  end
  C.kvl_interrupt_hold(1)
  self.step = name
  local cache = self.cache
  return end_step(self, protected.pcall(cache.transaction, cache, fn, self, ...))
end

--- Runs the tokens of the batch through every layer: their states, [tokens, hidden].
local function forward(self)
  local model, n = self.model, self.batch.tokens_count
  local s = self.views[n]
  if not s then
    s = kv.lasting(model.views, model, self.buffers, n)
    self.views[n] = s
  end
  model:embed(self.batch.tokens, s)
  for i = 0, model.config.layers - 1 do model:forward_layer(i, s, self.attention) end
  return model:states(s)
end

--- Logits of `count` rows of states: f32 [count, vocab], valid until the next step.
local function to_logits(self, states, count)
  local out = self.logit_views[count]
  if not out then
    if count > self.logits:size(0) then -- graphs may write to the views of the old one
      self.logits = kv.lasting(kv.tensor, self.model.device, "f32",
        { math.min(2 * count, self.batch.max_tokens), self.model.config.vocab })
    end
    out = kv.lasting(self.logits.narrow, self.logits, 0, count)
    self.logit_views[count] = out
  end
  self.model:logits(states, out)
  return out
end

-- ---- prefill --------------------------------------------------------------------------

--- One step of prompts: counts[i] of `tokens` (at most self.chunk) for sequence i.
local function prefill_step(self, seqs, counts, tokens, ends_prompts)
  self.batch:append(seqs, counts, tokens)
  self.attention:begin(self.batch, true, ends_prompts)
  return forward(self)
end

local function prefill(self, seq, tokens, each, goes_on)
  local states, n
  for first = 1, #tokens, self.chunk do
    local chunk = {}
    for i = first, math.min(first + self.chunk - 1, #tokens) do
      chunk[#chunk + 1] = tokens[i]
    end
    n = #chunk
    local ends_prompts = first + n > #tokens and not goes_on and { true } or nil
    states = prefill_step(self, { seq }, { n }, chunk, ends_prompts)
    if each then each(states) end
  end
  return to_logits(self, states:narrow(n - 1, 1), 1)
end

--- Puts a prompt (or its continuation) into a sequence, chunk by chunk. If a chunk fails,
-- none of them happened.
---@param seq kvlab.Sequence
---@param tokens integer[]
---@param each? fun(states: kvlab.Tensor)  sees each chunk's states [n, hidden]
---@param goes_on? boolean  more of the prompt follows, so nothing is evicted yet (false)
---@return kvlab.Tensor logits  of the last token, f32 [1, vocab], valid until the next
--                              step
function Engine:prefill(seq, tokens, each, goes_on)
  check_tokens(self, tokens)
  return run_step(self, "prefill", prefill, seq, tokens, each, goes_on)
end

local function prefill_batch(self, seqs, counts, tokens, ends_prompts, each)
  local states = prefill_step(self, seqs, counts, tokens, ends_prompts)
  if each then each(states) end
  local last = states:gather_rows(self.batch.last, self.last:narrow(0, #seqs))
  return to_logits(self, last, #seqs)
end

--- A chunk of each of several prompts in one step.
---@param seqs kvlab.Sequence[]
---@param counts integer[]  tokens of each, together at most engine.chunk
---@param tokens integer[]  sequence after sequence
---@param ends_prompts? boolean[]  whose chunk is the last: decode steps follow
---@param each? fun(states: kvlab.Tensor)  sees the states of all tokens [n, hidden]
---@return kvlab.Tensor logits  of each one's last token, f32 [#seqs, vocab], valid until
--                              the next step
function Engine:prefill_batch(seqs, counts, tokens, ends_prompts, each)
  check_tokens(self, tokens)
  return run_step(self, "prefill_batch", prefill_batch, seqs, counts, tokens,
    ends_prompts, each)
end

--- Logits of every token of a prompt, f32 [#tokens, vocab]; a new tensor.
function Engine:prefill_all(seq, tokens)
  check_tokens(self, tokens)
  local logits = kv.tensor(self.model.device, "f32", { #tokens, self.model.config.vocab })
  local row = 0
  self:prefill(seq, tokens, function(states)
    local n = states:size(0)
    self.model:logits(states, logits:narrow(row, n))
    row = row + n
  end)
  return logits
end

-- ---- decode ---------------------------------------------------------------------------

--- The layers and logits of a decode step of `count` tokens.
local function compute_decode(self, count)
  return to_logits(self, forward(self), count)
end

--- The key under which the graph of a step is stored. For steps of one token a sequence:
-- the number of sequences, and which launches a policy makes. For drafts: every number by
-- which the host decides what to launch. The offset of the tokens in their blocks is no
-- such number, because verify pads the lists of blocks.
local function graph_key(self)
  local batch, variant = self.batch, self.attention.context.variant
  if batch.tokens_count == batch.count and not batch.tree then
    return variant and ("%d, %s"):format(batch.count, variant) or batch.count
  end
  local key = ("%d tokens of %d, %d blocks, at most %d, %d words, %s"):format(
    batch.tokens_count, batch.count, batch.touched, batch.open_limit,
    batch.tree and batch.tree:size(1) or 0, variant or "all")
  if not self.attention.shape.has_tally then return key end
  -- a tally adds up the rows of each sequence
  return key .. ": " .. table.concat(batch.counts, " ", 1, batch.count)
end

--- Records a decode step, with the journal's entries of the work in it.
local function record_decode(self, count, key, compute)
  local journal, entries = self.cache.journal, {}
  C.kvl_interrupt_hold(1)
  journal.recording = entries
  local ok, graph = protected.pcall(kv.graph, function() compute(self, count) end,
    self.model.device)
  journal.recording = nil
  C.kvl_interrupt_hold(-1)
  if not ok then error(graph, 0) end
  self.cache.graphs[graph] = true
  local recorded = { graph = graph, entries = entries,
                     growths = self.attention.shape.growths }
  self.graphs[key] = recorded
  return recorded
end

--- Runs a recorded step. An interrupt waits until the journal has what the step changed.
local function replay(self, recorded)
  recorded.graph:replay()
  self.cache.journal:replayed(recorded.entries)
end

--- The same from a graph. The first step of a shape is launched from here, which makes
-- its buffers; the second one is recorded, and from then on replayed.
---@param compute fun(self, count): kvlab.Tensor  launches the step
local function replay_decode(self, count, key, compute)
  local recorded = self.graphs[key]
  if recorded and recorded.growths ~= self.attention.shape.growths then
    recorded = false -- a tally has other memory now
  end
  if recorded == nil then
    local logits = compute(self, count)
    self.graphs[key] = false
    return logits
  end
  recorded = recorded or record_decode(self, count, key, compute)
  if not self.cache.journal:may_replay(recorded.entries) then
    return compute(self, count)
  end
  C.kvl_interrupt_hold(1)
  local ok, why = pcall(replay, self, recorded)
  C.kvl_interrupt_hold(-1)
  if not ok then error(why, 0) end
  return self.logit_views[count]
end

--- Whether steps are replayed from graphs; an observer would not see replayed steps.
local function replays(self) return self.uses_graphs and not self.attention.probe end

--- The layers and logits of the step that has begun, from a graph if the engine has them.
local function run_decode(self)
  local count = self.batch.tokens_count
  if replays(self) then
    return replay_decode(self, count, graph_key(self), compute_decode)
  end
  return compute_decode(self, count)
end

--- A list of `count` ones.
local function ones_for(self, count)
  local ones = self.ones
  for i = 1, math.max(count, #ones) do ones[i] = i <= count and 1 or nil end
  return ones
end

local function decode(self, seqs, tokens, on_device)
  self.batch:append(seqs, ones_for(self, #seqs), not on_device and tokens or nil, nil,
    nil, self.attention.evictor ~= nil)
  if on_device then self.batch.tokens:copy_(tokens) end
  self.attention:begin(self.batch, false)
  return run_decode(self)
end

--- One token for each sequence.
---@param seqs kvlab.Sequence[]
---@param tokens integer[]|kvlab.Tensor  ids; an i32 [#seqs] on the device stays there
---@return kvlab.Tensor logits  f32 [#seqs, vocab], valid until the next step
function Engine:decode(seqs, tokens)
  local on_device = kv.is_tensor(tokens)
  if not on_device then check_tokens(self, tokens) end
  return run_step(self, "decode", decode, seqs, tokens, on_device)
end

-- ---- drafts ---------------------------------------------------------------------------

--- The layers and logits of a draft's step, whose tokens are on the device.
local function compute_drafted(self, n)
  self.batch.tokens:copy_(self.drafted:step(n).tokens)
  return compute_decode(self, n)
end

--- The same, with the choice of the likeliest tokens.
local function compute_likeliest(self, n)
  local logits = compute_drafted(self, n)
  self.drafted:take_likeliest(logits, n)
  return logits
end

--- The sequences that get a token in step `at` of a draft, and the index of each of them
-- in the previous step; nil: all sequences of the previous step.
local function part_of_step(seqs, counts, at)
  local part, rows, previous = {}, nil, 0
  for i = 1, #seqs do
    local was_there = counts[i] >= at - 1
    if was_there then previous = previous + 1 end
    if counts[i] >= at then
      part[#part + 1] = seqs[i]
      rows = rows or {}
      rows[#part] = previous - 1
    end
  end
  return part, #part < previous and rows or nil
end

--- Cuts sequences that a draft made longer back to the length that they had.
local function cut(seqs, lengths)
  for i, seq in ipairs(seqs) do seq:truncate(lengths[i]) end
end

--- Computes step `at` of a draft, which has begun, for n sequences.
local function run_drafted(self, n, at, choose)
  local compute = choose and compute_drafted or compute_likeliest
  local attention, drafted = self.attention, self.drafted
  local logits
  if replays(self) and not attention.draft_policy.eager then
    local key = ("draft of %d, %s, %s, in %d blocks, %d steps"):format(n,
      choose and "chosen" or "likeliest",
      attention.reuse_role or attention.context.variant or "each selects",
      attention.draft_rows.open_limit, drafted.ids:size(0))
    logits = replay_decode(self, n, key, compute)
  else
    logits = compute(self, n)
  end
  if not choose then return end
  choose(logits, at, drafted:row(at, n))
  drafted:step(n).tokens:copy_(drafted:row(at, n))
end

local function draft(self, seqs, counts, tokens, choose)
  local most, lengths, previous = math.max(unpack(counts)), {}, nil
  local drafted = self.drafted
  drafted:begin(most)
  for i, seq in ipairs(seqs) do lengths[i] = seq:length() end
  for at = 1, most do
    local part, rows = part_of_step(seqs, counts, at)
    local n = #part
    self.batch:append(part, ones_for(self, n), at == 1 and tokens or nil)
    if at == 1 then drafted:step(n).tokens:copy_(self.batch.tokens) end
    if rows then kv.scope(drafted.keep_rows, drafted, previous, rows) end
    self.attention:begin(self.batch, false, nil, at, most)
    run_drafted(self, n, at, choose)
    previous = n
  end
  cut(seqs, lengths)
  return drafted.ids:narrow(0, most)
end

--- Makes drafts: each has a sequence's newest token, and the tokens that may follow it.
-- They are made by steps of one token in which the attention's draft policy selects. The
-- steps run on the sequences, and nothing waits for the device. Afterwards the sequences
-- have the length that they had. The next step should verify these sequences with
-- `drafted`, which computes K and V of the tokens again; if it does not, the draft leaves
-- nothing behind.
---@param seqs kvlab.Sequence[]
---@param counts integer[]   tokens of the draft of each, one or more
---@param tokens integer[]   the newest token of each
---@param choose? fun(logits: kvlab.Tensor, step: integer, ids: kvlab.Tensor)  writes the
--                           tokens of a step to ids i32 [n], of the sequences that have
--                           at least `step` tokens; logits: f32 [n, vocab]. nil: the
--                           likeliest, whose choice a recorded step contains
---@return kvlab.Tensor drafted  i32 [most of counts, max_seqs]: step by step, the ids of
--                           those sequences; valid until the next draft
function Engine:draft(seqs, counts, tokens, choose)
  check_tokens(self, tokens)
  if #counts ~= #seqs or #tokens ~= #seqs then
    options.fail(("draft: %d counts and %d tokens, expected one for each of %d sequences")
      :format(#counts, #tokens, #seqs))
  end
  for i = 1, #counts do
    if not options.count[2](counts[i]) then
      options.fail(("draft: count %d %s"):format(i,
        options.problem(counts[i], options.count)))
    end
  end
  if not self.attention.draft_policy then
    options.fail "draft: the attention has no draft_policy, expected one"
  end
  return run_step(self, "draft", draft, seqs, counts, tokens, choose)
end

local function verify(self, seqs, counts, tokens, parents, drafted)
  self.batch:append(seqs, counts, tokens, parents, self.uses_graphs)
  if drafted then
    kv.scope(self.drafted.put, self.drafted, counts, drafted, self.batch.tokens)
  end
  self.attention:begin(self.batch, false, nil, drafted and 0 or nil)
  return run_decode(self)
end

--- A decode step of several tokens a sequence: the newest token of each, and a draft of
-- those that may follow it. The logits of a token are those that decode would return
-- after it; docs/policies.md lists the exceptions. take_back then drops the wrong tokens
-- of the draft.
---@param seqs kvlab.Sequence[]
---@param counts integer[]   tokens of each, one or more; together at most engine.chunk,
--                           or max_seqs if that is more
---@param tokens integer[]   sequence after sequence
---@param parents? integer[] makes the tokens of each sequence a tree, see Batch:append
---@param drafted? integer[] how many tokens of each the draft before this step made: they
--                           follow its first token, and replace what `tokens` has there
---@return kvlab.Tensor logits  of every token, f32 [#tokens, vocab], valid until the next
--                              step
function Engine:verify(seqs, counts, tokens, parents, drafted)
  check_tokens(self, tokens)
  return run_step(self, "verify", verify, seqs, counts, tokens, parents, drafted)
end

--- Takes back the newest counts[i] tokens of sequence i of the last step, which verify
-- computed. Sequences and policies are then as if the step had not had these tokens.
---@param counts integer[]
function Engine:take_back(counts) self.attention:take_back(counts) end

--- Greedy continuation: `n` token ids after a prefill or decode that returned `logits`.
-- They are all in the sequence but the last, which no step has computed yet.
--
-- Every token is a step of its own, so an error in one step does not affect earlier ones:
-- the sequence and `ids` are then what they were when that step began. The last id is
-- again the one that is not in the sequence, so this continues:
--
--   logits = engine:decode({ seq }, { ids[#ids] })
--   engine:generate(seq, logits, n - #ids, ids)
---@param seq kvlab.Sequence
---@param logits kvlab.Tensor  f32 [1, vocab]
---@param n integer
---@param ids? integer[]       the list that the ids are added to (a new one)
---@return integer[] ids
function Engine:generate(seq, logits, n, ids)
  ids = ids or {}
  for i = 1, n do
    ids[#ids + 1] = sampler.expect_likeliest(logits)[1]
    if i < n then logits = self:decode({ seq }, { ids[#ids] }) end
  end
  return ids
end

M.new = arguments.of("engine", M.new, { model = options.table })
local SEQ, EACH = objects.own_sequence, options.optional(options.callable)
arguments.methods(Engine, "an engine", {
  use_policy = { policy = objects.policy, seqs = options.optional(objects.sequences) },
  use_attention = { attention = objects.attention },
  finish = { seq = SEQ }, prefill = { seq = SEQ, each = EACH },
  prefill_all = { seq = SEQ }, decode = { seqs = objects.sequences },
  prefill_batch = { seqs = objects.sequences, counts = options.table,
                    ends_prompts = options.optional(options.table), each = EACH },
  verify = { seqs = objects.sequences, counts = options.table,
             parents = options.optional(options.table),
             drafted = options.optional(options.table) },
  draft = { seqs = objects.sequences, counts = options.table, tokens = options.table,
            choose = options.optional(options.fn) },
  drafting = { attention = objects.attention, policy = objects.policy },
  take_back = { counts = options.table },
  generate = { seq = SEQ, logits = { "a tensor", kv.is_tensor }, n = options.whole,
               ids = options.optional(options.list_of(options.whole)) },
})

return M
