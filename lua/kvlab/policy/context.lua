--- A step of an attention, and its present layer. It is passed down to policies,
-- their hooks and the readers of memory tiers. The state of a step is here and not in the
-- attention. Every step sets all of it anew, so a step that failed leaves nothing behind.
--
-- Scores, marks and selections come from pools of the context. A caller gets a tensor
-- that nobody else gets until the attention of the layer is over; then the tensor goes
-- back to its pool by itself. A policy may combine as many as it likes, and a step with
-- the same shapes as the one before allocates nothing.
local arguments = require "kvlab.arguments"
local budgets = require "kvlab.policy.budget"
local ffi = require "ffi"
local check = require "kvlab.policy.check"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local policy = require "kvlab.policy.policy"
local tensor = require "kvlab.tensor.arithmetic"

local argument = options.argument
local M = {}

---@class kvlab.Context
---@field layer integer
---@field layers integer
---@field query kvlab.Tensor       [tokens, heads, head_dim]; one token a sequence in
--                                 decode; see rows.lua for a decode step of several
---@field is_prefill boolean
---@field step integer             steps of this attention so far; all layers agree
---@field shape_number integer     of the shape, seqs and width; what is made for a shape
--                                 is kept under it, because graphs may read it
---@field block_size integer
---@field total_kv_len integer     tokens of the longest sequence
---@field sequences kvlab.Sequence[]
---@field seqs integer             number of sequences
---@field width integer            columns of tables and scores: the blocks of the longest
--                                 sequence, rounded up
---@field tables kvlab.Tensor      i32 [seqs, width]   physical blocks, -1 past the last
---@field lens kvlab.Tensor        i32 [seqs]
---@field starts kvlab.Tensor|nil  i32 [seqs + 1], prefill
---@field tree kvlab.Tensor|nil    u64 [seqs, words], of the rows of a draft tree
---@field cache kvlab.Tensor       this layer's KV memory
---@field device kvlab.Device
---@field batch kvlab.Batch        the step's batch: counts of new tokens and more
---@field policy table             that selects in this step
---@field ends_prompts boolean[]|nil  see Attention:begin
---@field event table              what offload hooks get
---@field phase string             prefill, decode or draft
---@field is_rows boolean          a decode step of several tokens, or one that makes a
--                                 token of a draft, see rows.lua
---@field dense kvlab.Context|nil  what dense attention has in its place, if is_rows
---@field alibi kvlab.Tensor|nil   f32 [heads], the slopes of the attention
---@field window integer|nil       how many tokens a query of this layer sees; 0, nil: all
---@field soft_cap number|nil      of the attention's scores
---@field checks_scores boolean    this step, scores that are all NaN are refused
---@field has_checked table        phases in which a step's scores have been checked
---@field reads kvlab.Reads|nil    counts what a decode step reads while it is observed
---@field index table|nil          what the model's indexer made, see Attention:forward
---@field variant string|nil       which launches a policy makes in this step, where they
--                                 are not always the same; each has its own graphs
---@field asked boolean[]|nil      which rows select now; nil: all. The others have the
--                                 length 0 in lens
local Context = {}
Context.__index = Context

-- ---- pools ----------------------------------------------------------------------------

--- A pool. buffers: memory for the largest step, one buffer for each tensor that was ever
-- taken at the same time; views: views of the buffers for the present shape, by place and
-- by size; shapes: the views of each shape so far, which graphs of its steps may read.
local function new_pool() return { taken = 0, buffers = {}, views = {}, shapes = {} } end

local function give_back(pools)
  for _, pool in pairs(pools) do pool.taken = 0 end
end

local function use_views(pools, shape_number)
  for _, pool in pairs(pools) do
    pool.shapes[shape_number] = pool.shapes[shape_number] or {}
    pool.views = pool.shapes[shape_number]
  end
end

local function new_score_buffer(self, heads, seqs)
  return tensor.tensor(self.device, "f32", { seqs * heads * self.max_blocks })
end

local function new_score_view(self, buffer, heads)
  local view = buffer:narrow(0, self.seqs * heads * self.width)
    :reshape { self.seqs, heads, self.width }
  return { tensor = view, matrix = view:reshape { self.seqs * heads, self.width },
           shared = heads == 1 and view:reshape { self.seqs, self.width } or nil }
end

local function take_scores(self, heads)
  heads = heads or self.kv_heads
  local pool = self.scores[heads]
  if not pool then
    error(("scores are for %s heads, expected 1 or kv_heads = %d"):format(
      tostring(heads), self.kv_heads), 3)
  end
  local place = pool.taken + 1
  pool.taken = place
  local view = pool.views[place]
  if view then return view end
  local buffer = pool.buffers[place]
  if not buffer or buffer.count < self.seqs * heads * self.max_blocks then
    buffer = tensor.lasting(new_score_buffer, self, heads,
      math.max(self.max_seqs, self.seqs))
    pool.buffers[place] = buffer -- the views of a smaller buffer keep that buffer
  end
  view = tensor.lasting(new_score_view, self, buffer, heads)
  pool.views[place] = view
  return view
end

--- A tensor for scores that belongs to the caller until the attention of the layer is
-- over: f32 [seqs, heads, width]. Its contents are undefined.
---@param heads? integer  kv_heads, or 1: the same scores for all heads
---@return kvlab.Tensor
function Context:new_scores(heads) return take_scores(self, heads).tensor end

local function new_selection_buffers(self, heads, seqs)
  return { blocks = tensor.tensor(self.device, "i32", { seqs * heads * self.max_blocks }),
           counts = tensor.tensor(self.device, "i32", { seqs * heads }) }
end

local function new_selection_view(self, buffers, heads, n)
  local flat = buffers.blocks:narrow(0, self.seqs * heads * n)
  return {
    selection = flat:reshape { self.seqs, heads, n },
    counts = buffers.counts:narrow(0, self.seqs * heads):reshape { self.seqs, heads },
    matrix = flat:reshape { self.seqs * heads, n },
  }
end

--- A selection of at most `n` blocks for `heads` heads, with its counts.
local function take_selection(self, heads, n)
  local pool = self.selections[heads]
  local place = pool.taken + 1
  pool.taken = place
  pool.views[place] = pool.views[place] or {}
  local view = pool.views[place][n]
  if not view then
    local buffers = pool.buffers[place]
    if not buffers or buffers.counts.count < self.seqs * heads then
      buffers = tensor.lasting(new_selection_buffers, self, heads,
        math.max(self.max_seqs, self.seqs))
      pool.buffers[place] = buffers
    end
    view = tensor.lasting(new_selection_view, self, buffers, heads, n)
    pool.views[place][n] = view
  end
  return view
end

--- The view of a selection that was taken for this layer. Raises for any other tensor.
local function view_of(self, selection)
  local heads, n = tonumber(selection.sizes[1]), tonumber(selection.sizes[2])
  local pool = self.selections[heads]
  for place = 1, pool and pool.taken or 0 do
    local view = pool.views[place][n]
    if view and view.selection.ptr == selection.ptr then return view end
  end
  error("mark: expected a selection that this context made for the present layer", 3)
end

-- ---- a step ---------------------------------------------------------------------------

---@param shape table   see policy.lua
---@param limits table  max_seqs, max_blocks, format of the cache; alibi, soft_cap, window
--                      or windows of layers, see Attention
function M.new(shape, limits)
  return setmetatable({
    device = shape.device, is_cpu = shape.device:is_cpu(),
    default_stream = shape.device:default_stream(),
    max_seqs = limits.max_seqs, max_blocks = limits.max_blocks,
    layers = shape.layers, block_size = shape.block_size, kv_heads = shape.kv_heads,
    heads = shape.heads, scale = shape.scale, format = limits.format,
    step = 0, shape_number = 0, shapes = 0, shape_numbers = {}, ramps = {},
    alibi = limits.alibi, soft_cap = limits.soft_cap, window = limits.window,
    windows = limits.windows, event = {}, has_checked = {},
    chunk_budget = ffi.new "kvl_budget", few_budget = ffi.new "kvl_budget",
    scores = { [1] = new_pool(), [shape.kv_heads] = new_pool() },
    selections = { [1] = new_pool(), [shape.kv_heads] = new_pool() },
  }, Context)
end

--- The number of a step's shape (seqs and width). Shapes are numbered from 1, in the
-- order in which they first occur.
local function number_of(self, seqs, width)
  local key = seqs * 2 ^ 32 + width
  local number = self.shape_numbers[key]
  if not number then
    self.shapes = self.shapes + 1
    number = self.shapes
    self.shape_numbers[key] = number
  end
  return number
end

--- Sets the context to a new step: of a batch, or of the rows of a batch.
---@param batch kvlab.Batch|kvlab.Rows
---@param starts kvlab.Tensor|nil  i32 [seqs + 1], where a sequence has several queries
function Context:begin(batch, is_prefill, starts)
  local ev = self.event
  self.step = self.step + 1
  self.variant, self.asked = nil, nil
  self.is_prefill, self.sequences, self.batch = is_prefill, batch.seqs, batch
  self.tables, self.lens, self.starts = batch.tables, batch.lens, starts
  self.tree, self.opens = batch.tree, batch.opens
  self.total_kv_len = batch.max_len
  ev.blocks, ev.num_tokens, ev.turns = batch.blocks, batch.block_tokens, batch.turns
  if self.seqs ~= batch.count or self.width ~= batch.width then
    self.seqs, self.width = nil, nil -- in case it stops on the way
    self.shape_number = number_of(self, batch.count, batch.width)
    use_views(self.scores, self.shape_number)
    use_views(self.selections, self.shape_number)
    self.seqs, self.width = batch.count, batch.width
  end
end

--- Sets layer, tables and lens to those of a layer. A step does so in each layer; call it
-- in step_begin to work on several layers there.
function Context:use_layer(layer)
  local step = self.batch
  self.layer = layer
  if not step.use_layer then return end
  step:use_layer(layer)
  self.tables, self.lens = step.tables, step.lens
end

--- Sets the context to a layer of the step. The tensors of the previous layer go back to
-- their pools.
---@param layer integer
---@param query kvlab.Tensor
---@param memory kvlab.Tensor  the layer's KV memory
function Context:begin_layer(layer, query, memory)
  self.query, self.cache = query, memory
  if self.windows then
    self.window = options.entry("begin_layer", "layer", self.windows, layer)
  end
  self:use_layer(layer)
  give_back(self.scores)
  give_back(self.selections)
  if self.dense then self.dense:begin_layer(layer, query, memory) end
end

local function query_of(self, what)
  return self.query or options.fail(what .. ": no layer has begun, so there is no query")
end

--- The mean of scores over the KV heads, for one selection that all heads share: f32
-- [seqs, 1, width]. The tensor belongs to the caller until the layer's attention is over.
function Context:mean_over_heads(scores) return self:shared_by("mean", scores, 1) end

--- Reduces dim `dim` of a tensor whose other dims are seqs and width, to scores that all
-- heads share: f32 [seqs, 1, width]. The tensor belongs to the caller until the layer's
-- attention is over.
---@param reduction string  mean, max, min, sum
function Context:shared_by(reduction, values, dim)
  local view = take_scores(self, 1)
  values[reduction](values, dim, view.shared)
  return view.tensor
end

--- q . mean(K) of each block for the newest token of each sequence, the mean over all
-- heads: f32 [seqs, 1, width]. The tensor belongs to the caller until the layer's
-- attention is over. In a prefill chunk, the intermediate results are new tensors.
---@param means kvlab.Summary
function Context:score_means(means)
  local q = query_of(self, "score_means")
  if self.is_prefill then
    q = q:reshape { q:size(0), q:size(1) * q:size(2) }:gather_rows(self.batch.last)
      :reshape { self.seqs, q:size(1), q:size(2) }
  end
  return self:mean_over_heads(ops.score_mean(q, means, self, "mean"))
end

--- Turns scores of blocks into estimates of their attention, in place: a softmax over
-- each row of scale * scores, with the scale of the attention.
---@param scores kvlab.Tensor  f32 [seqs, kv_heads, width]: q . k, -inf past the last
--                             block
function Context:weights(scores)
  local unit = self.format:scales(self.layer)
  if unit then scores:mul(unit:reshape { 1, self.kv_heads, 1 }, scores) end
  return scores:softmax(self.scale, scores)
end

--- Where score (seq, head, block) is among [seqs, width, heads].
local function by_head(self)
  local dev, heads, width = self.device, self.heads, self.width
  local blocks = tensor.arange(dev, "i32", width):reshape { 1, width }
  local rows = tensor.arange(dev, "i32", self.seqs * heads)
  local seqs = rows / heads
  local first = seqs * (width * heads) + rows - seqs * heads
  return (first:reshape { self.seqs * heads, 1 } + blocks * heads)
    :reshape { 1, self.seqs * heads * width }
end

local function masses(self, into)
  local dev, q, seqs, width = self.device, self.query, self.seqs, self.width
  local heads, dim, rows = self.heads, q:size(2), seqs * width
  -- every block as a sequence of its own: the log-sum-exp of its logits
  local starts = tensor.arange(dev, "i32", width):mul(self.block_size)
  local tokens = (self.lens:reshape { seqs, 1 } - starts:reshape { 1, width })
    :maximum(0):minimum(self.block_size):reshape { rows }
  local lse = tensor.tensor(dev, "f32", { rows, heads })
  ops.step.paged_attention { cache = self.cache, lens = tokens, lse = lse,
    q = q:reshape { seqs, heads * dim }
      :gather_rows(tensor.arange(dev, "i32", rows) / width):reshape { rows, heads, dim },
    tables = self.tables:reshape { rows, 1 }, scale = self.scale,
    soft_cap = self.soft_cap, format = self.format:of(self.layer) }
  lse:reshape { 1, rows * heads }:gather(by_head(self)):reshape { seqs * heads, width }
    :softmax(1):reshape { seqs * self.kv_heads, heads / self.kv_heads, width }
    :mean(1, into:reshape { seqs * self.kv_heads, width })
end

--- The exact share of the attention that lies in each block, in decode: the log-sum-exp
-- of the block's logits under each query head, a softmax of these over the blocks, and
-- the mean over a group's heads. f32 [seqs, kv_heads, width]; the tensor belongs to the
-- caller until the layer's attention is over. It knows no ALiBi and no window. It attends
-- to each block by itself, so it reads all of K and V.
function Context:masses()
  query_of(self, "masses")
  if self.reads then
    self.reads:keys(self)
    self.reads:values(self)
  end
  local scores = self:new_scores()
  tensor.scope(masses, self, scores)
  return scores
end

local function make_ramps(self)
  local dev, seqs = self.device, self.seqs
  local floats = tensor.tensor(dev, "f32", { seqs })
  return { columns = tensor.arange(dev, "f32", self.width),
           blocks = tensor.tensor(dev, "i32", { seqs }),
           floats = floats, steps = floats:reshape { seqs, 1, 1 },
           ramp = tensor.tensor(dev, "f32", { seqs, 1, self.width }) }
end

--- How many tokens sequence i (from 0) holds in a layer: all of its text, unless some
-- were evicted.
function Context:held(layer, i)
  local seq = self.sequences[i + 1]
    or options.fail(("held: i is %d, expected 0 ... %d"):format(i, #self.sequences - 1))
  if self.is_rows or not self.batch.use_layer then return seq:length() end
  return (seq.head and seq.base or seq):held(layer, seq.head or 0)
end

--- Whether the new token of this decode step replaces a token that sequence i (from 0)
-- holds in a layer: where a policy evicts, a sequence that holds as many tokens as it may
-- replaces one.
---@return boolean
function Context:makes_way(layer, i)
  local step = self.batch
  if self.is_prefill or not step.use_layer then return false end
  return step.host_places[layer * step.tokens_count + i] == -1
end

--- The position in the text of each token that is held, where a policy evicts: f32 [seqs,
-- 1, width * block_size]. The same tensor in each call.
function Context:positions()
  local held = self.held_positions
    or options.fail "positions: no policy of this attention evicts"
  return held:load(self)
end

--- Numbers that rise from `low` for the first block of each sequence to `high` for its
-- last: f32 [seqs, 1, width]. The tensor belongs to the caller until the layer's
-- attention is over.
function Context:ramp(low, high)
  local r = self.ramps[self.shape_number] or tensor.lasting(make_ramps, self)
  self.ramps[self.shape_number] = r
  local layer = self.batch.use_layer and self.layer or 0
  if r.step ~= self.step or r.layer ~= layer then -- the ramp from 0 to 1, made once
    r.step, r.layer = self.step, layer
    self.lens:sub(1, r.blocks):div(self.block_size, r.blocks) -- number of blocks - 1
    r.blocks:maximum(1, r.blocks):cast("f32", r.floats)
    r.columns:div(r.steps, r.ramp)
  end
  local ramp = self:new_scores(1)
  return r.ramp:mul(high - low, ramp):add(low, ramp)
end

--- The limits of KV heads, [1, kv_heads], repeated for the rows of a step in which each
-- head is a sequence of its own.
local function limits_of_rows(self, limits)
  local heads = self.batch.cuts and self.batch.cuts.heads or 1
  if not limits or heads == 1 then return limits end
  local seqs = self.batch.cuts.count / heads
  local rows = limits:expand({ seqs, heads }):reshape { seqs * heads, 1 }
  return self.is_rows and rows:gather_rows(self.batch.owners) or rows
end

--- The budget of this step and layer, with the limits of its heads and what divides it
-- among them. A prefill chunk always selects the blocks in which it lies, because a token
-- sees itself. A row of a decode step of several tokens always selects its own block,
-- because the summary of this block also covers later rows, which may be taken back.
local function step_budget(self, what, budget)
  argument(what, "budget", budget, budgets.kind)
  local of_layer, limits, split = budgets.of_layer(budget, self.layer)
  limits = limits_of_rows(self, limits)
  if self.is_prefill or self.is_rows then
    ffi.copy(self.chunk_budget, of_layer, ffi.sizeof(of_layer))
    self.chunk_budget.recent = math.max(of_layer.recent,
      self.is_prefill and self.batch.open_max or 1)
    of_layer = self.chunk_budget
  end
  return of_layer, limits, self.kv_heads > 1 and split or nil
end

--- Selects for each list, at most n blocks.
local function select_lists(self, scores, budget, limits, n)
  local lists = limits and self.kv_heads or tonumber(scores.sizes[1])
  local view = take_selection(self, lists, n)
  return ops.select(scores, self.lens, self.block_size, budget, view.selection,
    view.counts, limits)
end

--- How many blocks all heads together may select, at most the width of a step.
local function width_of_all(self, budget)
  return math.min(self.kv_heads * policy.budget_blocks(budget, self.width), self.width)
end

local function divide(self, scores, budget, limits, split)
  local dims = { self.seqs, self.kv_heads, self.width }
  if tonumber(scores.sizes[1]) == 1 then scores = scores:expand(dims) end
  local _, even = select_lists(self, self:new_scores():fill_(0), budget, limits,
    policy.budget_blocks(budget, self.width))
  local total = check.totals(self, even)
  limits = split:heads(self, scores, even, budget)
  check.limits(self, limits, total, split.name)
  return limits
end

--- Selects by the budgets that a split gives each head. Tensors that the split makes are
-- freed, except those that it keeps.
local function select_divided(self, scores, budget, limits, split)
  limits = divide(self, scores, budget, limits, split)
  return select_lists(self, scores, budget, limits, width_of_all(self, budget))
end

local function select_within(self, scores, budget, limits, split)
  check.scores(self, scores, budget)
  if not split then
    return select_lists(self, scores, budget, limits,
      policy.budget_blocks(budget, self.width))
  end
  return tensor.scope(select_divided, self, scores,
    ffi.new("kvl_budget", budget), limits, split) -- the split may select in between
end

--- Selects sink, recent and the best scores within a budget. The selection and its counts
-- belong to the caller until the attention of the layer is over.
---@param scores kvlab.Tensor  f32 [seqs, kv_heads or 1, width]; -inf: the block is not
--                             eligible, and is selected only as a sink or a recent block
---@param budget kvlab.Budget  a policy's self.budget. If it differs among heads, each
--                             head gets a list of its own, also by scores that all
--                             share
---@param limits? kvlab.Tensor  [seqs or 1, kv_heads]: how much each list may have in
--                              place
--                             of the budget's own, f32 ratios or i32 blocks; min_blocks,
--                             sink and recent hold. No list gets more than all together
--                             would by the budget
function Context:select(scores, budget, limits)
  if limits == nil then
    return select_within(self, scores, step_budget(self, "select", budget))
  end
  local of_layer = step_budget(self, "select", budget)
  check.scores(self, scores, of_layer)
  return select_lists(self, scores, of_layer, limits, width_of_all(self, of_layer))
end

--- The selection that the next decode step would make by these scores, with at most
-- `most` blocks. If `most` is less than the budget of the longest sequence, the budgets
-- of shorter sequences shrink in the same proportion. A split of the budget among heads
-- is ignored.
function Context:expect(scores, budget, most)
  argument("expect", "scores", scores, kinds.tensor)
  argument("expect", "budget", budget, budgets.kind)
  argument("expect", "most", most, options.whole)
  local few = self.few_budget
  local of_layer, limits = budgets.of_layer(budget, self.layer)
  limits = limits_of_rows(self, limits)
  local n = policy.budget_blocks(of_layer, math.ceil(self.total_kv_len / self.block_size))
  if n <= most then return (select_within(self, scores, of_layer, limits)) end
  budget = of_layer
  ffi.copy(few, budget, ffi.sizeof(budget))
  few.ratio = budget.ratio * most / n
  few.blocks = math.min(budget.blocks, most)
  few.min_blocks = math.min(budget.min_blocks, most)
  return (select_within(self, scores, few, limits))
end

--- 1 where a selection that this context made for the layer contains a block, else 0: f32
-- [seqs, heads, width]. The tensor belongs to the caller until the layer's attention is
-- over.
function Context:mark(selection)
  local view = view_of(self, selection)
  view.ones = view.ones
    or tensor.lasting(tensor.ones, self.device, "f32", view.matrix:dims())
  local marks = take_scores(self, tonumber(selection.sizes[1]))
  marks.tensor:fill_(0)
  marks.matrix:scatter_(view.matrix, view.ones)
  return marks.tensor
end

--- Shortens a selection that Context:select made to the fewest blocks whose weights reach
-- the share `mass` of all weights (top-p), in place. Sink and recent stay selected.
---@param weights kvlab.Tensor  f32 [seqs, kv_heads or 1, width]
function Context:trim(weights, mass, budget, selection, counts)
  argument("trim", "mass", mass, options.number)
  budget = step_budget(self, "trim", budget)
  check.scores(self, weights, budget, "weights")
  return ops.trim_selection(weights, self.lens, self.block_size, mass, budget, selection,
    counts)
end

--- Selects sink, recent and the blocks whose hashes are nearest to the query's, in one
-- launch: returns selection and counts.
---@param hashes kvlab.Hashes
---@param budget kvlab.Budget  a policy's self.budget
---@param is_shared? boolean   one list for all KV heads, by the nearest of their hashes.
--                             If the budget differs among heads, each has a list of its
--                             own, and scores are written
function Context:select_nearest(hashes, budget, is_shared)
  local of_layer, limits, split = step_budget(self, "select_nearest", budget)
  if split or is_shared and limits then
    local scores = hashes:score(self, is_shared and 1 or nil)
    return select_within(self, scores, of_layer, limits, split)
  end
  local n = policy.budget_blocks(of_layer, self.width)
  local view = take_selection(self, is_shared and 1 or self.kv_heads, n)
  return ops.select_hamming(self.query, hashes, self, of_layer, view.selection,
    view.counts, limits)
end

--- The new tokens of each of the context's sequences.
local function counts_of(self)
  local counts = self.batch.counts
  if #self.sequences > 0 and not counts[#self.sequences] then
    options.fail "the step of this context is over: its batch has other sequences"
  end
  return counts
end

--- Scores of a prefill chunk. fn(seq, first, count, n) returns the scores of the n blocks
-- of a sequence that come before the chunk, f32 [kv_heads, n]; the sequence's queries are
-- rows first ... first + count - 1 of ctx.query. The blocks of the chunk itself are
-- always selected.
function Context:score_sequences(fn)
  local dev, first, scores = self.device, 0, self:new_scores()
  local counts = counts_of(self)
  tensor.scope(function()
    local columns = tensor.zeros(dev, "i32", { self.kv_heads, 1 })
      + tensor.arange(dev, "i32", self.width)
    for i = 1, #self.sequences do
      local count = counts[i]
      local n = math.floor((self:held(self.layer, i - 1) - count) / self.block_size)
      if n > 0 and count > 0 then -- columns past n are out of range and give zeros
        argument("score_sequences", "what fn returns", fn(i - 1, first, count, n),
          kinds.tensor):gather(columns, scores:index(i - 1))
      end
      first = first + count
    end
  end)
  return scores
end

--- Calls fn(owner, ctx, seq, i, first, count) for every sequence of a prefill step. i
-- counts from 0; the sequence's queries are rows first ... first + count - 1 of
-- ctx.query. The tensors that fn makes are freed.
function Context:each_sequence(fn, owner)
  local first, counts = 0, counts_of(self)
  for i, seq in ipairs(self.sequences) do
    local count = counts[i]
    if count > 0 then tensor.scope(fn, owner, self, seq, i - 1, first, count) end
    first = first + count
  end
end

--- The queries in rows first ... first + count - 1 of `query`, by KV head: f32 [kv_heads,
-- heads / kv_heads * count, head_dim], with the rows of a group's first head first. They
-- can be multiplied with keys in the units of the layer's cache. A new tensor.
function Context:group_queries(query, layer, first, count)
  local dev, heads, dim = query.device, self.heads, query:size(2)
  local rows = tensor.arange(dev, "i32", heads):reshape { heads, 1 }
    + tensor.arange(dev, "i32", count, first * heads, heads)
  local grouped = query:reshape { query:size(0) * heads, dim }
    :gather_rows(rows:reshape { heads * count }):cast "f32"
    :reshape { self.kv_heads, heads / self.kv_heads * count, dim }
  local unit = self.format:scales(layer)
  return unit and grouped * unit:reshape { self.kv_heads, 1, 1 } or grouped
end

local function join_newest(query, old, left, first, new)
  local all = tensor.tensor(query.device, query:type(),
    { left + new, query:size(1), query:size(2) })
  if left > 0 then all:narrow(0, left):copy_(old:narrow(old:size(0) - left, left)) end
  all:narrow(left, new):copy_(query:narrow(first, new))
  return all
end

--- The last `most` queries of `old` (nil: none) followed by rows first ... first + count
-- - 1 of ctx.query: a new tensor that outlives scopes.
function Context:newest_queries(old, first, count, most)
  local new = math.min(count, most)
  local left = old and math.min(old:size(0), most - new) or 0
  return tensor.lasting(join_newest, self.query, old, left, first + count - new, new)
end

--- 0 where row r sees column c, else -inf: f32 [rows, columns]. Row r sees the columns
-- before (start + r) / per, rounded down. A new tensor.
function Context:causal_bias(rows, columns, start, per)
  local dev = self.device
  local seen = (tensor.arange(dev, "i32", rows, start) / per):reshape { rows, 1 }
  local zeros = tensor.zeros(dev, "f32", { rows, columns })
  return tensor.arange(dev, "i32", columns):lt(seen):where(zeros, zeros - math.huge)
end

-- Less than any number of a row by this is no row.
local NO_ROW = -2 ^ 30

local function keys_of(self, layer, i, length)
  local dim = self.batch.cache.head_dim
  local dev, heads, size = self.device, self.kv_heads, self.block_size
  local blocks = math.ceil(length / size)
  local columns, rows = blocks * size, heads * blocks * size
  local keys = tensor.tensor(dev, "f32", { rows, dim })
  ops.read_blocks(self.batch.cache:layer(layer), self.tables:index(i):narrow(0, blocks),
    keys:reshape { blocks, heads, size, dim }, nil, self.format:of(layer))
  local token = tensor.arange(dev, "i32", columns)
  local row = token / size * ((heads - 1) * size) + token -- of the first head
  row = token:lt(length):where(row, NO_ROW)
    + tensor.arange(dev, "i32", heads, 0, size):reshape { heads, 1 }
  return keys:gather_rows(row:reshape { rows }):reshape { heads, columns, dim }
end

local function attention_weights(self, queries, layer, i, length)
  self:use_layer(layer)
  local dev, count, cap = self.device, queries:size(0), self.soft_cap or 0
  local window = self.windows and self.windows[layer] or self.window or 0
  local keys = keys_of(self, layer, i, length)
  local columns, unit = keys:size(1), cap > 0 and cap or 1
  local scores = self:group_queries(queries, layer, 0, count):matmul_t(keys)
  scores:mul(self.scale / unit, scores)
  if cap > 0 then scores:tanh(scores):mul(cap, scores) end
  local apart = tensor.arange(dev, "i32", columns) -- of indices, and so of positions
    - tensor.arange(dev, "i32", count, length - count):reshape { count, 1 }
  local bias = apart:le(0):where(0, -math.huge)
  if window > 0 then bias = bias + apart:gt(-window):where(0, -math.huge) end
  local of_heads = scores:reshape { self.heads, count, columns }
  if self.alibi then
    local slopes = self.alibi:reshape { self.heads, 1, 1 }
    of_heads:add(slopes * apart:cast("f32"):reshape { 1, count, columns }, of_heads)
  end
  of_heads:add(bias, of_heads)
  return scores:softmax(1, scores)
end

--- The keys of the first `length` tokens that sequence i (from 0) holds in a layer, from
-- where the cache has them: f32 [kv_heads, columns, head_dim], with zeros from `length`
-- to the end of the last block. A new tensor.
function Context:keys(layer, i, length)
  local held = self:held(layer, i)
  if length > held then
    options.fail(("keys: length is %d, expected at most the %d that are held"):format(
      length, held))
  end
  self:use_layer(layer)
  return tensor.scope(keys_of, self, layer, i, length)
end

--- The share of their attention that queries of a sequence pay to each of its tokens,
-- exactly, as dense attention has it: with its causal mask, window, soft cap and ALiBi,
-- and without the bias, mask and log_weight of a policy. f32 [kv_heads, heads / kv_heads
-- * count, columns], with the rows of a group's first head first. A column is a token;
-- those from `length` to the end of the last block are 0. The sum, the mean or the
-- maximum over dim 1 is a number for each KV head and token. A new tensor, of 128 MiB for
-- 32 queries of 32 heads over 32768 tokens. It reads the layer's keys where the cache has
-- them. If that is host memory, the keys cross the link, and the step cannot be a
-- prefill, because its keys have not all arrived there.
---@param queries kvlab.Tensor  [count, heads, head_dim]: of the tokens before length, as
--                              newest_queries keeps them
---@param layer integer
---@param i integer       the sequence is number i of the step's, from 0
---@param length integer  tokens that the newest of the queries sees, itself included
---@return kvlab.Tensor
function Context:attention_weights(queries, layer, i, length)
  local seq, cache = self.sequences[i + 1], self.batch.cache
  local count = tonumber(queries.sizes[0])
  local function expect(is_right, what, ...)
    if not is_right then options.fail(("attention_weights: " .. what):format(...)) end
  end
  expect(seq, "i is %d, expected 0 ... %d", i, #self.sequences - 1)
  expect(queries.ndim == 3 and count > 0 and tonumber(queries.sizes[1]) == self.heads
    and tonumber(queries.sizes[2]) == cache.head_dim,
    "queries is [%s], expected [count, heads=%d, head_dim=%d]",
    table.concat(queries:dims(), ", "), self.heads, cache.head_dim)
  local held = self:held(layer, i)
  expect(length >= count and length <= held, "length is %d, expected %d, the number of "
    .. "queries, to %d, the tokens that the sequence holds", length, count, held)
  expect(not self.is_prefill or cache.tier.is_resident, "keys are in host memory, "
    .. "expected a decode step, before which all of them have arrived there")
  local bytes = math.ceil(length / self.block_size) * self.format:bytes_page()
    * self.format.key_share
  cache.tier:count_read(bytes)
  if self.reads then self.reads:add(bytes) end
  return tensor.scope(attention_weights, self, queries, layer, i, length)
end

--- The worth of tokens at the end of prompts, for a policy's evict. fn(owner, ctx, i)
-- returns the worth of the tokens that sequence i (from 0) holds in the layer, f32
-- [kv_heads, n]. Sequences whose prompt is not over have zeros. f32 [seqs, kv_heads,
-- width * block_size], a new tensor.
function Context:worth_after_prompts(fn, owner)
  local n, heads, ends = self.width * self.block_size, self.kv_heads, self.ends_prompts
  if not ends then
    options.fail "worth_after_prompts: no prompt ends in this step, expected one or more"
  end
  local worth = tensor.zeros(self.device, "f32", { self.seqs, heads, n })
  tensor.scope(function()
    local columns = tensor.arange(self.device, "i32", n):expand { heads, n }
    for i = 0, self.seqs - 1 do
      if ends[i + 1] then -- columns past its own are out of range: zeros
        argument("worth_after_prompts", "what fn returns", fn(owner, self, i),
          kinds.tensor):gather(columns, worth:index(i))
      end
    end
  end)
  return worth
end

--- A selection of every block, for callers that need a selection.
function Context:everything()
  return (self:select(self:new_scores(1):fill_(0), policy.everything))
end

--- Runs fn(row, n, seq) with a host row float[width] for every sequence and KV head, then
-- copies the rows to the device as scores. For policies that score in plain Lua. On a GPU
-- this costs a copy, and everything that fn reads from the device costs a
-- synchronisation.
function Context:score_on_host(fn)
  local width, heads = self.width, self.kv_heads
  local n = self.seqs * heads * width
  if not self.host_scores or self.host_scores.n < n then
    self.host_scores = { n = n, rows = ffi.new("float[?]", n) }
  end
  local rows = self.host_scores.rows
  for s = 0, self.seqs - 1 do
    local blocks = self.sequences[s + 1]:blocks()
    for head = 0, heads - 1 do fn(rows + (s * heads + head) * width, blocks, s, head) end
  end
  local scores = self:new_scores()
  library.check(library.C.kvl_tensor_write(scores, rows, 4 * n))
  return scores
end

local SCORES = { scores = kinds.tensor }
arguments.methods(Context, "a context", {
  begin = { batch = objects.batch, starts = kinds.tensor_or_nil },
  begin_layer = { layer = options.whole, query = kinds.tensor_or_nil,
                  memory = kinds.tensor_or_nil },
  mean_over_heads = SCORES, weights = SCORES,
  held = { layer = options.whole, i = options.whole },
  makes_way = { layer = options.whole, i = options.whole },
  shared_by = { reduction = options.one_of("mean", "max", "min", "sum"),
                values = kinds.tensor, dim = options.integer },
  ramp = { low = options.number, high = options.number },
  mark = { selection = kinds.tensor },
  score_sequences = { fn = options.callable },
  worth_after_prompts = { fn = options.callable },
  each_sequence = { fn = options.callable },
  group_queries = { query = kinds.tensor, layer = options.whole, first = options.whole,
                    count = options.whole },
  newest_queries = { old = kinds.tensor_or_nil, first = options.whole,
                     count = options.whole, most = options.whole },
  causal_bias = { rows = options.whole, columns = options.whole, start = options.number,
                  per = options.positive },
  keys = { layer = options.whole, i = options.whole, length = options.count },
  attention_weights = { queries = kinds.tensor, layer = options.whole,
                        i = options.whole, length = options.whole },
  score_on_host = { fn = options.callable },
})

return M
