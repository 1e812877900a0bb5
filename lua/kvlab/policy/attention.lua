--- Attention over a paged cache with a policy. This is the only file in which policies
-- meet kernels. One call per layer appends K and V, tells the policies, lets the policy
-- of the phase select, and attends over the selection. KV may lie on the device, or in
-- host memory behind a ring or a hot cache; the cache takes care of that, and a policy is
-- written in the same way for all of them.
--
--   local quest = kv.policy("quest", { ratio = 0.1 })
--   local attention = kv.attention { cache = cache, heads = 8, decode_policy = quest }
--   attention:begin(batch, false)              once a step, after batch:append
--   attention:forward(layer, q, k, v, out)     once a layer
--   attention:take_back({ 2 })                 drops its newest 2 tokens (rows.lua)
--
-- A draft policy makes drafts (speculative decoding). Its steps are begun with
-- attention:begin(batch, false, nil, i), of which i counts from 1, and run on the
-- sequences themselves. Afterwards the sequences are cut to the length that they had, and
-- a decode step of several tokens verifies the draft: it writes K and V again, as the
-- decode policy's attention makes them. A draft policy sees prompts as the others do, its
-- own steps, which the others do not see, and the K that decode steps write.
local arguments = require "kvlab.arguments"
local C = require("kvlab.library").C
local check = require "kvlab.policy.check"
local kernel_hook = require "kvlab.kernel.run.hook"
local context = require "kvlab.policy.context"
local draft_steps = require "kvlab.policy.draft_steps"
local evictor = require "kvlab.policy.evictor"
local expansion = require "kvlab.policy.expansion"
local kept_selections = require "kvlab.policy.kept"
local kinds = require "kvlab.tensor.kinds"
local ops = require "kvlab.tensor.ops"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local policy = require "kvlab.policy.policy"
local reuse = require "kvlab.policy.reuse"
local rows = require "kvlab.memory.rows"
local touched_limit = require("kvlab.memory.batch").touched_limit
local tensor = require "kvlab.tensor.tensor"
local told = require "kvlab.policy.told"

local M = {}

---@class kvlab.Index  what an indexer of a model makes of new tokens. The logit of a
--                    token for a query is the sum over heads of weight * relu(q . k)
---@field q kvlab.Tensor        [tokens, heads, dim]
---@field k kvlab.Tensor        [tokens, dim]
---@field weights kvlab.Tensor  f32 [tokens, heads]
---@field scale? number         of all weights (1)

---@class kvlab.Attention
---@field cache kvlab.Cache
---@field prefill_policy table
---@field decode_policy table
---@field draft_policy table|nil   makes drafts
---@field context kvlab.Context  the step that began last
---@field hooks table|nil  attention_begin(ctx), attention_finished(ctx): see each layer
--                         of each step, next to the policies' hooks
---@field probe table|nil  the observer: its observe(attention, ctx, selection, counts,
--                         listed, out) is called after each layer
---@field reads kvlab.Reads|nil  counts what decode steps read; a probe sets it
---@field reads_index boolean|nil  a policy reads what the model's indexer makes
local Attention = {}
Attention.__index = Attention
told.add(Attention)

--- The policy of a phase: the given one, which must declare that phase; else `default` if
-- it declares the phase; else full.
local function phase_policy(o, phase, default)
  local p = o[phase .. "_policy"]
  if not p then return default and default[phase] and default or policy "full" end
  if not p[phase] then
    options.fail(("policy %s does not select in %s, as %s_policy it would have to")
      :format(p.name, phase, phase))
  end
  return p
end

local each_policy = told.each_policy

local A_POLICY = options.like("a policy", "name", "options")
local OPTIONS = {
  cache = options.required(options.like("a kv.cache", "kv_heads", "tier")),
  heads = options.required(options.count), prefill_policy = A_POLICY,
  decode_policy = A_POLICY, draft_policy = A_POLICY, scale = options.number,
  alibi = kinds.tensor,
  inv_freq = options.either(kinds.tensor, options.list_of(kinds.tensor, 1)),
  window = options.either(options.whole, options.list_of(options.whole, 1)),
  soft_cap = options.not_negative,
  max_seqs = options.count, max_blocks = options.count,
  index = options.nested { heads = options.required(options.count),
                           dim = options.required(options.count) },
  decode_through = options.one_of("ring", "hot"), draft_reuse = options.boolean,
  expand = options.boolean,
}

-- The journal's entry for what a step may change.
local Step = {}
Step.__index = Step

function Step.forget() end
function Step:undo()
  self.tier:undone()
  self.drafts.is_verified = false
end

--- An option's values for every layer, from 0; nil where it is not given.
local function of_layers(name, value, layers, is_wanted)
  if value == nil or not is_wanted then return nil end
  local list = {}
  if type(value) == "table" and #value ~= layers then
    error(("attention: %s has %d entries, expected one for each of %d layers"):format(
      name, #value, layers), 3)
  end
  for i = 1, layers do list[i - 1] = type(value) == "table" and value[i] or value end
  return list
end

--- For layers with a window of their own, budgets of the newest blocks that hold it.
local function budgets_of(windows, block_size)
  local budgets = {}
  for layer, window in pairs(windows or {}) do
    budgets[layer] = policy.recent(math.ceil((window - 1) / block_size) + 1)
  end
  return budgets
end

--- Attends over a selection, with a policy's hook or without one. emitters: the hooks of
-- the policies that emit in a prefill, or nil.
local function over_checked(self, selection, ctx, out, lse, hook, emitters)
  local reader = ctx.is_prefill and self.prefill_reader or self.decode_reader
  if not selection and not hook then ctx = ctx.dense or ctx end
  local counter = self.probe and ctx.reads
  if counter then
    local blocks = counter:selected(ctx, selection)
    if hook then counter:add(blocks * hook:bytes_block()) end
  end
  if emitters then
    return kernel_hook.attend_in_prefill(hook, emitters, self, reader, selection, ctx,
      out, lse)
  elseif hook and not ctx.is_prefill then
    return hook:attend(self, reader, selection, ctx, out, lse)
  end
  return reader:attend(self, selection, ctx, out, lse, hook)
end

local function over(self, selection, ctx, out, lse, hook, emitters)
  if selection then check.selection(ctx, selection) end
  return over_checked(self, selection, ctx, out, lse, hook, emitters)
end

--- The attention of such a layer, which no policy selects for and no hook changes. If KV
-- is on the device, the kernel itself reads only the window. If KV is elsewhere, or bytes
-- are counted, the window's blocks are selected.
local function attend_window(p, self, ctx, out)
  for _, hook in ipairs(ctx.is_prefill and self.emitters or { p.hook }) do
    hook:emit_nothing(ctx)
  end
  if ctx.is_prefill or self.cache.tier.is_resident and not self.probe then
    return over(self, nil, ctx, out)
  end
  local selection, counts = ctx:select(ctx:new_scores(1):fill_(0),
    self.window_budgets[ctx.layer])
  return over(self, selection, ctx, out), selection, counts
end

--- Attention over `cache` for `heads` query heads.
---@param o table  cache, heads; prefill_policy, decode_policy (full), draft_policy
--                 (none), scale (1 / sqrt(head_dim)), alibi (f32 [heads] slopes),
--                 inv_freq (f32 [pairs], or a list with one for each layer; forward then
--                 takes q and k unrotated, see ops.rope_append), window: how many tokens
--                 a query sees, itself included (0: all), or a list with one for each
--                 layer: then a layer with a window reads all of it, and policies
--                 select in the others; soft_cap of the scores (0: none), max_seqs (16),
--                 max_blocks of a sequence (all blocks of the cache); index: heads and
--                 dim of the model's indexer, if it has one (none), see forward;
--                 decode_through: "hot" or "ring", for a cache that has both ("hot");
--                 draft_reuse: the draft policy selects in the first step of a draft
--                 alone, and the other steps read the same blocks, and the newest ones
--                 (false); expand: whether dense prefills over latents expand them, see
--                 expands (where it takes less time)
---@return kvlab.Attention
function M.attention(o)
  o = options.check("attention", o, OPTIONS)
  local cache = o.cache
  if o.heads % cache.kv_heads ~= 0 then
    error(("attention: heads is %s, expected a multiple of kv_heads = %d"):format(
      tostring(o.heads), cache.kv_heads), 2)
  end
  local self = setmetatable({ cache = cache,
    windows = of_layers("window", o.window, cache.layers, type(o.window) == "table"),
    inv_freqs = of_layers("inv_freq", o.inv_freq, cache.layers, true) }, Attention)
  self.window_budgets = budgets_of(self.windows, cache.block_size)
  self.prefill_policy = phase_policy(o, "prefill")
  self.decode_policy = phase_policy(o, "decode", self.prefill_policy)
  self.draft_policy = o.draft_policy and draft_steps.expect_policy(o.draft_policy)
  if o.draft_reuse then
    if not self.draft_policy then
      options.fail "attention: draft_reuse is true, expected false without a draft_policy"
    end
    reuse.expect_policy(self.draft_policy)
    self.reuse = reuse.new()
  end
  for _, phase in ipairs { "prefill", "decode" } do
    if self.draft_policy and self.draft_policy == self[phase .. "_policy"] then
      options.fail(("attention: draft_policy is the %s_policy, expected a policy of its "
        .. "own"):format(phase))
    end
  end
  if self.draft_policy and self.draft_policy.evict then
    options.fail(("attention: draft_policy is %s, which evicts tokens, expected one that "
      .. "selects"):format(self.draft_policy.name))
  end
  if self.draft_policy then self.draft_policy.drafts = true end -- what it is for
  if cache.cut_heads > 1 and o.alibi then
    options.fail "attention: slopes of heads (alibi) do not go with tables by head"
  end
  self.shape = {
    device = cache.device, layers = cache.layers, blocks = cache.pages,
    rows = (o.max_seqs or 16) * cache.cut_heads, growths = 0,
    heads = o.heads / cache.cut_heads, block_size = cache.block_size,
    kv_heads = cache.kv_heads / cache.cut_heads, head_dim = cache.head_dim,
    value_dim = cache.value_dim,
    cut_heads = cache.cut_heads, memory_layers = cache.layers / cache.cut_layers,
    token_tallies = {}, followers = cache.followers,
    index = o.index, windows = self.windows,
    dtype = cache.dtype, format = cache.format, journal = cache.journal,
    scale = o.scale or 1 / math.sqrt(cache.head_dim),
    max_blocks = math.min(o.max_blocks or cache.blocks, cache.blocks),
  }
  self.keepers, self.drafters, self.emitting = {}, {}, {}
  each_policy(self, function(p)
    self.shape.keepers = p == self.draft_policy and self.drafters or self.keepers
    policy.attach(p, self.shape)
    kept_selections.attach(p, self.shape)
    policy.add_with_nested(p, self.shape.keepers)
    self.emitting[#self.emitting + 1] = p.hook
    self.reads_index = self.reads_index or p.reads_index
  end)
  self.evictor = evictor.new(self, o)
  self.emitters, self.watchers = kernel_hook.emitters(self.prefill_policy,
    self.decode_policy, self.draft_policy)
  local limits = { max_seqs = (o.max_seqs or 16) * cache.cut_heads, alibi = o.alibi,
    max_blocks = self.shape.max_blocks, format = cache.format, soft_cap = o.soft_cap,
    window = not self.windows and o.window or nil, windows = self.windows }
  self.context = context.new(self.shape, limits)
  self.dense_context = context.new(self.shape, limits)
  self.rows, self.scratches = rows.new(cache.device), {}
  self.expansion = expansion.new(self, o)
  self.drafts = draft_steps.new(cache.journal, self.drafters)
  self.draft_rows = self.draft_policy and rows.new(cache.device)
  self.step = {}
  self.step_entry = setmetatable({ tier = cache.tier, drafts = self.drafts }, Step)
  self.prefill_reader, self.decode_reader = cache.tier:readers(self, o.decode_through, 2)
  return self
end

--- Notes what policies keep for the sequences of a step that begins.
local function note_step(self, journal, seqs)
  journal:note(self.step_entry)
  for i = 1, #seqs do
    for k = 1, #self.keepers do journal:keeps(seqs[i], self.keepers[k]) end
    for k = 1, #self.drafters do journal:keeps(seqs[i], self.drafters[k]) end
  end
end

-- ---- a step ---------------------------------------------------------------------------

--- Raises for a step that this attention cannot compute.
local function check_step(self, batch, is_prefill)
  for i = 1, is_prefill and 0 or batch.count do
    if batch.counts[i] < 1 then
      options.fail(("begin: sequence %d has no new token, expected one or more in a "
        .. "decode step"):format(i))
    end
  end
  if not batch.tree then return end
  local ctx, hook = self.context, self.decode_policy.hook
  local lacks = is_prefill and "a prefill step" or ctx.alibi and "ALiBi"
    or (self.windows or (ctx.window or 0) > 0) and "a window"
    or hook and next(hook.emits) and not self.cache.device:is_cpu()
      and "what a policy emits, on a GPU,"
    or self.decode_policy.reuse_steps > 1 and "a policy with reuse_steps"
  if lacks then options.fail("begin: the batch has a draft tree, which " .. lacks
    .. " does not go with") end
end

--- Raises for tables that are wider than the attention's scores and selections.
local function check_width(self, batch)
  local most = self.shape.max_blocks
  if batch.width > most then
    options.fail(("begin: the batch's tables have %d columns, expected at most the "
      .. "attention's max_blocks = %d: make the batch with max_blocks = %d, too"):format(
      batch.width, most, most))
  end
end

--- Raises for sequences from which another attention has already evicted tokens.
local function check_evicted(self, batch)
  for i = 1, batch.cuts and batch.count or 0 do
    local seq = batch.seqs[i]
    if seq.evictor and seq.evictor ~= self.evictor then
      if C.kvl_sequence_held(seq.handle, -1) ~= seq:length() then
        options.fail(("begin: policy %s has evicted tokens of sequence %d, expected an "
          .. "attention with the same policy"):format(seq.evictor.policy.name, i))
      end
      seq.evictor = nil -- it does not see this step's tokens
    end
  end
  if batch.replaces and not self.evictor then
    options.fail "begin: the batch was appended to with replaces, but no policy evicts"
  end
end

--- The counter of a step's reads; nil if they are not counted.
local function counter_of(self, is_prefill, is_draft)
  local reads = not is_prefill and self.reads or nil
  return reads and (not is_draft or reads.has_drafts) and reads or nil
end

--- Sets the context to a step of `batch` or, in a decode step of several tokens a
-- sequence, to the rows of the step. Dense attention then has a context of its own, in
-- which the rows of a sequence together read the sequence once.
local function begin_context(self, batch, is_prefill, draft, most)
  local ctx, dense = self.context, nil
  local is_draft = draft ~= nil
  local p = is_prefill and self.prefill_policy or is_draft and self.draft_policy
    or self.decode_policy
  local reads = counter_of(self, is_prefill, is_draft)
  ctx.is_rows, ctx.is_draft = false, false -- until the rows are there
  local is_rows = is_draft or not is_prefill and (batch.tokens_count ~= batch.count
    or batch.tree ~= nil)
  if not is_draft then self.cache.journal:begin(self.step, is_rows) end
  if is_draft then
    ctx:begin(self.draft_rows:begin(batch, draft - 1,
      touched_limit(most or draft, self.cache.block_size)), false)
  elseif is_rows then
    dense = self.dense_context
    dense:begin(batch, false, batch.starts)
    dense.policy, dense.reads = p, reads
    ctx:begin(self.rows:begin(batch), false, self.rows.row_starts)
    dense.step = ctx.step
  else
    ctx:begin(batch, is_prefill, is_prefill and batch.starts or nil)
  end
  ctx.policy, ctx.reads, ctx.dense, ctx.is_rows = p, reads, dense, is_rows
  ctx.is_draft, ctx.phase = is_draft, is_prefill and "prefill" or is_draft and "draft"
    or "decode"
  ctx.checks_scores = self.probe ~= nil or not ctx.has_checked[ctx.phase]
  if reads then reads:forget() end
  return ctx
end

--- Starts a step, after `batch` was appended to. is_prefill: the new tokens of each
-- sequence are a chunk of its prompt. Otherwise they are decoded: one for each sequence,
-- or several, such as a draft that the step verifies; rows.lua says what a policy sees of
-- these. ends_prompts: for each sequence, whether this chunk is the last of its prompt,
-- so that decode follows; nil when no prompt ends.
---@param batch kvlab.Batch
---@param is_prefill boolean
---@param ends_prompts? boolean[]
---@param draft? integer  it is this step of a draft, counted from 1: of one token for
--                        each sequence, and the draft policy selects. 0: it verifies the
--                        draft. Nothing stays of a draft that no step verifies
---@param most? integer  tokens that the longest draft will have (those so far)
function Attention:begin(batch, is_prefill, ends_prompts, draft, most)
  if batch.cache ~= self.cache then
    error("begin: batch belongs to another cache", 2)
  end
  check_step(self, batch, is_prefill)
  check_width(self, batch)
  check_evicted(self, batch)
  batch = batch.cuts or batch
  if draft and draft > 0 and not self.draft_policy then
    options.fail "begin: a step of a draft, but the attention has no draft_policy"
  end
  local journal, drafts = self.cache.journal, self.drafts
  local is_draft = draft ~= nil and draft > 0
  if draft == 1 or draft == nil or drafts.is_verified then drafts:finish() end
  if is_draft then
    drafts:begin(draft, batch.seqs, self.step_entry)
  else
    if journal.is_open then note_step(self, journal, batch.seqs) end
    drafts:verify()
  end
  each_policy(self, policy.note_use)
  if self.probe and counter_of(self, is_prefill, is_draft) then
    self.reads:begin_observed()
  end
  self.cache.tier:begin(batch, is_prefill)
  local ctx = begin_context(self, batch, is_prefill, is_draft and draft or nil, most)
  self.reuse_role = self.reuse and is_draft
    and self.reuse:role(draft, ctx, self.draft_rows.open_limit) or nil
  ctx.ends_prompts = self:each_head(ends_prompts)
  self.expansion:begin(is_prefill and not self.probe and not self.hooks and batch or nil)
  if self.evictor then self.evictor:begin(ctx, batch) end
  if ctx.policy.step_begin then ctx.policy:step_begin(ctx) end
  for i = 1, is_prefill and #self.watchers or 0 do
    local watcher = self.watchers[i]
    if watcher.step_begin then watcher:step_begin(ctx) end
  end
  if ctx.is_rows then (is_draft and self.draft_rows or self.rows):lengthen() end
end

--- Takes back the newest counts[i] tokens of sequence i of the step; where tables are by
-- head, each KV head counts as a sequence.
local function take_back(self, counts)
  local batch, kept = self.rows.batch, {}
  self.cache.journal:take_back(self.step, self.rows.first, self.rows.own, counts)
  for i = 1, self.drafts.count > 0 and batch.count or 0 do
    kept[batch.seqs[i]] = self.rows.own[i] - counts[i]
  end
  self.drafts:take_back(kept)
  for i = 1, batch.count do
    local seq, taken = batch.seqs[i], counts[i]
    if taken > 0 then
      if (seq.head or 0) == 0 then
        local whole = seq.head and seq.base or seq
        whole:truncate(whole:length() - taken)
      end
      for _, p in ipairs(self.keepers) do
        if p.take_back then p:take_back(seq, taken) end
      end
    end
  end
end

--- A value for each sequence or, where tables are by head, for each head of each
-- sequence.
---@param values table|nil
function Attention:each_head(values)
  local heads = self.cache.cut_heads
  if not values or heads == 1 then return values end
  local list = {}
  for i = 1, #values * heads do list[i] = values[math.ceil(i / heads)] end
  return list
end

--- Takes back tokens of the decode step that this attention computed last, such as those
-- of a draft that were wrong: the newest counts[i] of sequence i of its batch. Sequences,
-- and what policies keep for them, are then as if the step had not had these tokens, and
-- as if the draft policy had not made them. The
-- step must have had several tokens for a sequence, and all of its layers must be over.
-- A sequence may give back all of its tokens.
---@param counts integer[]
function Attention:take_back(counts)
  local step = self.rows
  local batch = step.batch
  if not self.context.is_rows or self.context.is_draft then
    options.fail "take_back: the last step was none that decoded several tokens"
  end
  counts = self:each_head(counts)
  local problem = step:check_taken("take_back", counts)
  if problem then options.fail(problem) end
  if self.shape.has_tally and not self.step.is_known then
    options.fail("take_back: a policy has a tally, and a graph that no engine recorded "
      .. "computed the step, expected forward or an engine's graph")
  end
  for i = 1, batch.count do
    local length, at_end = batch.seqs[i]:length(), step:length(i)
    if length ~= at_end then
      options.fail(("take_back: sequence %d has %d tokens, expected %d, as at the end of "
        .. "the step"):format(i, length, at_end))
    end
  end
  self.context.is_rows = false
  C.kvl_interrupt_hold(1) -- Ctrl-C waits until all are taken back
  local ok, why = pcall(take_back, self, counts)
  C.kvl_interrupt_hold(-1)
  if not ok then error(why, 0) end
end

--- Calls a hook of the policies that see a step. Only the draft policy sees a draft's
-- step. Of decode steps, it sees nothing but the K that they write.
---@param is_for_draft? boolean  of a step that makes no draft, the draft policy sees it
local function call_hook(self, hook, argument, is_for_draft)
  local first, second, third = self.prefill_policy, self.decode_policy, self.draft_policy
  local is_draft = self.context.is_draft
  if not is_draft and first[hook] then first[hook](first, argument) end
  if not is_draft and second ~= first and second[hook] then
    second[hook](second, argument)
  end
  if third and (is_draft or is_for_draft) and third[hook] then
    third[hook](third, argument)
  end
end

--- Starts to bring the blocks that the decode policy expects a coming step to select.
local function bring_ahead(self, ctx)
  local p, ends = self.decode_policy, ctx.ends_prompts
  if not p.predict or ctx.is_prefill and not ends then return end
  local expected = p:predict(ctx)
  if not expected then return end
  self.decode_reader:bring_ahead(expected, ctx, ctx.is_prefill and ends or nil)
end

--- The attention of a step of a draft whose tokens share a selection.
local function attend_reusing(p, self, ctx, out)
  return self.reuse[self.reuse_role](self.reuse, p, self, ctx, out)
end

--- Whether the step that has begun expands latents. Then forward takes the layer's
-- matrices, queries that were not multiplied with them, and an `out` for values that
-- were. expansion.lua says when this is possible, and when it takes less time.
---@param matrices kvlab.LatentMatrices  of a layer
---@return boolean
function Attention:expands(matrices) return self.expansion:takes(matrices) end

--- Raises unless q has the heads that the attention was opened with.
local function check_query(self, q)
  local heads, dim = self.shape.heads * self.shape.cut_heads, self.shape.head_dim
  if q.ndim == 3 and q:size(1) == heads and q:size(2) == dim then return end
  options.fail(("forward: q is [%s], expected [tokens, %d, %d]: its heads and head_dim")
    :format(table.concat(q:dims(), ", "), heads, dim))
end

--- Gives the policies what the model's indexer made of the new tokens. With inv_freq, the
-- first numbers of its queries and keys are rotated, in place.
---@param step table  of which positions and places are: a batch, its cuts or its rows
local function take_index(self, ctx, layer, index, step)
  local ev, inv_freq = ctx.event, self.inv_freqs and self.inv_freqs[layer]
  if type(index) ~= "table" or not tensor.is_tensor(index.q)
    or not tensor.is_tensor(index.k) or not tensor.is_tensor(index.weights) then
    options.fail(("forward: index is %s, expected q, k and weights of the model's "
      .. "indexer, which a policy reads"):format(options.shown(index)))
  end
  if inv_freq then
    ops.rope(index.q, step.positions, inv_freq)
    ops.rope(index.k:reshape { index.k:size(0), 1, index.k:size(1) }, step.positions,
      inv_freq)
  end
  ctx.index, ev.index, ev.places = index, index, step.places
end

--- Appends k, v [tokens, kv_heads, head_dim] and attends with q [tokens, heads,
-- head_dim]. With inv_freq, q is rotated in place, and k may be. v is nil if values are
-- the first numbers of their keys.
--
-- index is what the model's indexer made of the new tokens. It is needed while
-- self.reads_index is true, and is ignored otherwise. With inv_freq, its q and k are
-- rotated in place. matrices are those of a layer whose latents are to be expanded.
---@param index? kvlab.Index
---@param matrices? kvlab.LatentMatrices  if expands said so; then q is [tokens, heads,
--                    numbers of an expanded key], and out [tokens, heads, numbers of an
--                    expanded value], which must be given
---@return kvlab.Tensor out  [tokens, heads, head_dim], or value_dim in place of it
function Attention:forward(layer, q, k, v, out, index, matrices)
  local ctx = self.context
  local ev, p, cuts = ctx.event, ctx.policy, ctx.batch and ctx.batch.cuts
  if not p then options.fail "forward: no step has begun, expected begin before" end
  local inv_freq = self.inv_freqs and self.inv_freqs[layer]
  if matrices then
    self.expansion:check(q, matrices, out)
    if inv_freq then self.expansion:rotate(q, k, inv_freq) end
    inv_freq = nil
  else
    check_query(self, q)
  end
  ev.layer = layer
  local wanted = out
  if cuts then
    cuts:use_layer(layer)
    q, k, v = cuts:enter(q), cuts:enter(k), v and cuts:enter(v)
    out = cuts:room(q, out)
    if self.evictor then
      self.evictor:place(ctx, cuts, layer, q, self.cache:layer(layer))
    end
    ev.blocks, ev.num_tokens = cuts.blocks, cuts.block_tokens
  end
  ev.k, ev.k_blocks = self.cache.tier:append(layer, q, k, v, cuts or ctx.batch,
    inv_freq)
  if self.reads_index then take_index(self, ctx, layer, index, cuts or ctx.batch) end
  -- A step that reads a draft's selection again calls no policy; the step that verifies
  -- the draft calls the hook. But if only some sequences continue the draft, they select.
  if self.reuse_role ~= "again" or ctx.seqs > 1 then
    call_hook(self, ctx.is_prefill and "on_prefill_offload" or "on_decode_offload", ev,
      true)
  end
  self.cache.tier:appended(layer)
  ctx:begin_layer(layer, q, self.cache:layer(layer))
  local hooks = self.hooks
  if hooks and hooks.attention_begin then hooks.attention_begin(ctx) end
  call_hook(self, "attention_begin", ctx, ctx.is_prefill)
  local is_recorded = C.kvl_device_is_recording(self.cache.device) == 1
  local step = ctx.is_draft and self.drafts:last() or self.step
  step.is_known = not is_recorded
  if p.eager and is_recorded then
    error(("policy %s decides at each step what to launch and cannot be recorded in a "
      .. "graph"):format(p.name), 2)
  end
  local compute = ctx.is_prefill and p.compute_prefill or p.compute_decode
  if self.windows and ctx.window > 0 then compute = attend_window end
  if self.reuse_role and compute ~= attend_window then compute = attend_reusing end
  for i = 1, #self.emitting do self.emitting[i]:forget() end
  local selection, counts, tokens
  if matrices then
    self.expansion:attend(layer, q, matrices, out)
  else
    out, selection, counts, tokens = compute(p, self, ctx, out)
  end
  if ctx.reads and p.own_bytes and not p.kept and compute ~= attend_window then
    ctx.reads:own(p, ctx)
  end
  if self.probe and not ctx.is_draft then
    self.probe:observe(self, ctx, selection, counts, tokens, out)
  end
  call_hook(self, "attention_finished", ctx, ctx.is_prefill)
  if hooks and hooks.attention_finished then hooks.attention_finished(ctx) end
  if self.decode_reader.bring_ahead and not ctx.is_rows then bring_ahead(self, ctx) end
  if ctx.reads then ctx.reads:end_layer(ctx, self.probe ~= nil) end
  if self.evictor and not ctx.is_prefill then
    self.evictor:end_decode(ctx)
  elseif self.evictor and ctx.ends_prompts then
    self.evictor:end_prompt(ctx)
  end
  return cuts and cuts:leave(out, wanted) or out
end

--- Attention of ctx.query over a selection (nil: every block), written to `out`, and its
-- log-sum-exp to `lse` if given. For policies that override compute. Raises for a
-- selection that is not in range, ascending and without duplicates (see check.lua).
function Attention:over(selection, ctx, out, lse)
  return over(self, selection, ctx, out, lse, ctx.policy.hook,
    ctx.is_prefill and self.emitters or nil)
end

--- The same over lists that may name blocks past a sequence's last one; these are not
-- read.
function Attention:over_list(list, ctx, out) return over_checked(self, list, ctx, out) end

--- The same attention, read straight from the cache's memory, wherever it lies, without
-- changing anything, and without the policy's bias, mask and log_weight. A probe compares
-- with it. It is slow through a link, and the KV of a prefill chunk may not have reached
-- the host tier yet.
---@param listed? kvlab.Tensor  tokens instead of a selection, as for over_tokens
function Attention:direct(selection, ctx, out, lse, listed)
  return self:attend_part(ctx, nil, ctx.cache, selection, nil, out, lse, nil, nil, nil,
    listed)
end

--- The part of `over` whose blocks a memory tier's reader has in `memory`, with the hook
-- that the reader was given. The other arguments are those of attend_slots.
---@param hook kvlab.Hook|nil
---@param listed kvlab.Tensor|nil  tokens, instead of a selection
function Attention:attend_part(ctx, hook, memory, selection, slots, out, lse, prev,
                               prev_lse, is_past, listed)
  local q, format, one, scores = ctx.query, self.cache.format:of(ctx.layer), nil, nil
  if hook then one, scores = hook:prepare(ctx, listed ~= nil) end
  if not kernel_hook.is_in_lua(one) then
    return ops.step.attend(ctx, q, memory, format, selection, slots, out, lse, prev,
      prev_lse, is_past, one, scores, listed)
  end
  return kernel_hook.attend_in_lua({ q = q, cache = memory, tables = ctx.tables,
    lens = ctx.lens, starts = ctx.starts, tree = ctx.tree, selection = selection,
    listed = listed, slots = slots, format = format, lse = lse, prev_out = prev,
    prev_lse = prev_lse, scale = ctx.scale, alibi = ctx.alibi, window = ctx.window,
    soft_cap = ctx.soft_cap,
    causal = not is_past, hook = one, scores = scores }, out or tensor.open_like(q))
end

--- Attention of ctx.query over the selected blocks as they lie in `memory`: block i of
-- the selection is at slots[i]; without slots it is where ctx.tables says. If prev and
-- prev_lse are given, their attention over other keys is merged with the result. is_past:
-- no key is later than any query.
function Attention:attend_slots(ctx, memory, selection, slots, out, lse, prev, prev_lse,
                                is_past)
  if ctx.reads and self.probe then ctx.reads:selected(ctx, selection) end
  return self:attend_part(ctx, nil, memory, selection, slots, out, lse, prev, prev_lse,
    is_past)
end

--- Attention of ctx.query over listed tokens. There is one list for each row of q, or one
-- for each row and KV head. It has the indices of tokens in the row's sequence, in any
-- order. An entry of -1, and a token that the row may not see, adds nothing. KV has to be
-- on the device or, in decode, in host memory behind a hot cache of tokens (hot_tokens).
---@param listed kvlab.Tensor  i32 [rows, kv_heads or 1, n]
function Attention:over_tokens(listed, ctx, out, lse)
  local hook, hot = ctx.policy.hook, not ctx.is_prefill and self.decode_reader
  hot = hot and hot.by_token and hot
  local lacks = not hot and not self.cache.tier.is_resident
      and "KV in host memory, but in decode behind a hot cache of tokens (hot_tokens)"
    or hot and hook and "a policy's bias, mask, log_weight or emit with KV in host memory"
    or ctx.is_prefill and self.emitters and "what a policy emits in a prefill"
  if lacks then
    error(("attention over tokens does not know %s; select blocks"):format(lacks), 2)
  end
  check.listed(ctx, listed)
  if self.probe and ctx.reads then ctx.reads:listed(ctx, listed) end
  if hot then return hot:attend_listed(self, listed, ctx, out, lse) end
  if hook and not ctx.is_prefill then
    return hook:attend_listed(self, ctx, listed, out, lse)
  end
  return self:attend_part(ctx, hook, ctx.cache, nil, nil, out, lse, nil, nil, nil, listed)
end

local function new_scratch(self, tokens)
  local shape, dev = self.shape, self.shape.device
  return { tensor.tensor(dev, "f32", { tokens, shape.heads, self.cache.value_dim }),
           tensor.tensor(dev, "f32", { tokens, shape.heads }),
           tensor.tensor(dev, "f32", { tokens, shape.heads }) }
end

--- Buffers for a part of a step's result: out f32 [tokens, heads, head_dim] and two lse
-- f32 [tokens, heads]. The readers of memory tiers share them, as only one reader runs at
-- a time.
function Attention:scratch(ctx)
  local tokens = tonumber(ctx.query.sizes[0])
  local s = self.scratches[tokens]
  if not s then
    s = tensor.lasting(new_scratch, self, tokens)
    self.scratches[tokens] = s
  end
  return s[1], s[2], s[3]
end

local some = kinds.tensor_or_nil
local DIRECT = { selection = some, ctx = objects.layer_context, out = some, lse = some,
                 listed = some }
local A_HOOK = options.optional(options.like("a policy's hook", "prepare", "owner"))
arguments.methods(Attention, "an attention", {
  take_back = { counts = options.table },
  begin = { batch = objects.batch, ends_prompts = options.optional(options.table),
            draft = options.optional(options.whole),
            most = options.optional(options.count) },
  forward = { layer = options.whole, q = kinds.tensor, k = kinds.tensor, v = some,
              out = some },
  over = { ctx = objects.layer_context, out = some, lse = some }, direct = DIRECT,
  attend_slots = { ctx = objects.layer_context, memory = kinds.tensor, selection = some,
                   slots = some, out = some, lse = some, prev = some, prev_lse = some },
  attend_part = { ctx = objects.layer_context, hook = A_HOOK, memory = kinds.tensor,
                  selection = some, slots = some, out = some, lse = some, prev = some,
                  prev_lse = some, listed = some },
  over_tokens = { listed = kinds.tensor, ctx = objects.layer_context, out = some,
                  lse = some },
  over_list = { list = kinds.tensor, ctx = objects.layer_context, out = some },
  scratch = { ctx = objects.layer_context },
})

return M
