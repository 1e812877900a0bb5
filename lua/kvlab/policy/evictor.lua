--- Eviction for good: a policy gives the worth of each token that is held, and the
-- runtime drops the tokens of lowest worth and gives their memory back.
--
--   evict(self, ctx)    f32 [seqs, kv_heads, width * block_size]: the worth of each token
--                       of the layer; higher stays longer. -inf and NaN count as lowest.
--                       Or a tally by token, whose numbers they are
--
-- The budget of the policy says how many tokens each layer and KV head may hold; a ratio
-- is a share of the prompt. The sink and recent blocks of the text always stay. With
-- prompt_only or the option keep_decoded, the budget covers only the prompt, and all
-- decoded tokens stay, too.
--
-- After a prompt, every layer and head keeps the best tokens within its budget, in their
-- order. They are copied to fresh pages, and the old pages become free when the step is
-- over. While a sequence decodes and a layer and head is full, the new token takes the
-- place of the token of lowest worth: no token moves, the host does not wait, and graphs
-- can record this. The replaced token is kept until the step is over, so a failed step
-- changes nothing.
--
-- A token keeps its position in the text, which `ctx:positions()` gives. Its index then
-- says nothing about its age any more. The cache needs tables by layer or by head. Tables
-- by layer hold the same tokens for all heads, which then have one worth, the mean over
-- the heads.
local budgets = require "kvlab.policy.budget"
local check_policy = require "kvlab.policy.check"
local context = require "kvlab.policy.context"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local ops = require "kvlab.tensor.ops"
local policies = require "kvlab.policy.policy"
local protected = require "kvlab.protected"
local tally = require "kvlab.policy.tally"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local NO_CAP = 2 ^ 31 - 1 -- of the tokens that are held

--- The longest text, in tokens, whose positions f32 tells apart.
M.LONGEST = 2 ^ 24

-- Worths are limited to this range; tokens that must stay get a larger number.
local LOWEST, HIGHEST = -3e38, 3e38

---@class kvlab.Evictor
---@field policy kvlab.Policy  that evicts
---@field positions kvlab.Tally  by token: its position in the text
local Evictor = {}
Evictor.__index = Evictor

local function has_window(window)
  for _, x in ipairs(type(window) == "table" and window or { window }) do
    if x > 0 then return true end
  end
  return false
end

--- Says which policy of the same method selects blocks; "" if there is none.
local function namesake(name)
  for _, other in ipairs(policies.names "decode") do
    if other == name .. "_blocks" then
      return ("; %s selects blocks and evicts nothing"):format(other)
    end
  end
  return ""
end

--- Raises for what does not work with eviction.
local function check_attention(attention, o, cache, p)
  local lacks = attention.reads_index and "a policy that reads the model's index keys"
    or cache.tables == "one" and 'tables = "one"; expected "layer" or "head"'
    or o.draft_policy and "drafts"
    or o.alibi and "ALiBi" or has_window(o.window) and "a window"
    or cache.tables == "layer" and p.split and p.split.heads
      and "tables by layer, whose heads hold the same, and a split among heads"
    or cache.tables == "layer" and budgets.differs(p.budget)
      and "tables by layer, whose heads hold the same, and a budget of each head"
  if lacks then
    options.fail(("attention: policy %s evicts tokens, which does not go with %s%s")
      :format(p.name, lacks, namesake(p.name)))
  end
end

--- Raises for a budget that leaves no token to choose beside sink and recent.
local function check_budget(p, cache)
  local amount = p.blocks or p.tokens
  for _, x in ipairs(type(amount) == "number" and { amount }
    or type(amount) == "table" and amount or amount and amount:list() or {}) do
    local blocks = p.blocks and x or math.ceil(x / cache.block_size)
    if math.max(blocks, p.min_blocks) <= p.sink + p.recent then
      options.fail(("policy %s: a budget of %s%d block%s, expected more than sink + "
        .. "recent = %d blocks"):format(p.name, p.blocks and "" or x .. " tokens is ",
        blocks, blocks == 1 and "" or "s", p.sink + p.recent))
    end
  end
end

--- The evictor of an attention; nil if its decode policy evicts nothing.
---@param attention kvlab.Attention
---@param o table  its options
---@return kvlab.Evictor|nil
function M.new(attention, o)
  local p, cache = attention.decode_policy, attention.cache
  if not p.evict then return nil end
  p = p.holder or p
  check_attention(attention, o, cache, p)
  check_budget(p, cache)
  return setmetatable({ policy = p, cache = cache, attention = attention,
    positions = tally.tally(attention.shape, 1, 0, "token"),
    tallies = attention.shape.token_tallies, free = {}, token_contexts = {}, kept = {},
    limits = {}, keeps_decoded = p.prompt_only or p.keep_decoded,
    heads = cache.cut_heads, layers = cache.layers }, Evictor)
end

-- ---- budgets --------------------------------------------------------------------------

--- The kvl_budget of a layer, of the head that may hold most.
local function budget_of(self, layer)
  return (budgets.of_layer(self.policy.budget, layer))
end

--- What each head of a layer may hold, where heads differ: from 0, ratios or blocks.
local function limits_of(self, layer)
  local _, limits = budgets.of_layer(self.policy.budget, layer)
  if not limits then return nil end
  local list = self.limits[layer]
  if not list then
    list = {}
    for i, x in ipairs(limits:list()) do list[i - 1] = x end
    list.is_ratio = limits:type() == "f32"
    self.limits[layer] = list
  end
  return list
end

--- How many tokens a layer and head may hold of a text of `length` tokens: whole blocks.
local function cap_of(self, layer, head, length)
  local size, budget = self.cache.block_size, budget_of(self, layer)
  local limits = limits_of(self, layer)
  local ratio, blocks = budget.ratio, budget.blocks
  if limits then
    ratio = limits.is_ratio and limits[head] or -1
    blocks = limits.is_ratio and 0 or limits[head]
  end
  if ratio >= 1 then return NO_CAP end
  if ratio >= 0 then
    blocks = math.ceil(ratio * math.ceil(length / size) - 1e-6) -- as a budget rounds
  end
  return math.max(blocks, budget.min_blocks, budget.sink + budget.recent + 1) * size
end

--- How many tokens a layer and KV head may hold after a prompt that ends a text of
-- `length` tokens, before a split divides it among heads.
Evictor.cap = cap_of

--- Whether a split divides what the heads of a layer may hold, by their scores.
function Evictor:is_divided()
  return self.policy.split ~= nil and self.policy.split.heads ~= nil
end

-- ---- what a step changes --------------------------------------------------------------

--- The journal's entry of a decode step: for every layer, which places its new tokens
-- took, and the tokens that were there before.
local Replaced = {}
Replaced.__index = Replaced

local function new_replaced(self, rows)
  local cache, dev, layers = self.cache, self.cache.device, self.layers
  local pages = math.ceil(rows / cache.block_size)
  local entry = setmetatable({ evictor = self, rows = rows, by_layer = {} }, Replaced)
  entry.firsts = tensor.tensor(dev, "i32", { rows, 1 })
  entry.own = tensor.arange(dev, "i32", rows):cast "i64"
  local memory = tensor.zeros(dev, cache.format.memory,
    { layers, pages, unpack(cache.format.dims) })
  for layer = 0, layers - 1 do
    local one = { memory = memory:index(layer),
      index = tensor.tensor(dev, "i32", { rows }),
      replaced = tensor.tensor(dev, "f32", { rows }),
      places = tensor.tensor(dev, "i64", { rows }),
      blocks = tensor.tensor(dev, "i32", { rows }),
      block_tokens = tensor.tensor(dev, "i32", { rows }) }
    one.index_rows = one.index:reshape { rows, 1 }
    one.cells, one.replaced_row = tensor.tensor(dev, "i32", { rows, 1 }),
      one.replaced:reshape { 1, rows }
    one.cells_row = one.cells:reshape { 1, rows }
    one.of_heads = { one.index_rows }
    for _, t in ipairs(self.tallies) do
      if not one.of_heads[t.heads] then
        one.of_heads[t.heads] = tensor.tensor(dev, "i32", { rows * t.heads, 1 })
      end
    end
    entry.by_layer[layer] = one
  end
  return entry
end

--- The entry of the step that has begun. In a recorded step, the replays write to it.
local function new_entry(self, rows)
  local journal = self.cache.journal
  local is_recorded = C.kvl_device_is_recording(self.cache.device) == 1
  local free = self.free[rows] or {}
  self.free[rows] = free
  local entry = not is_recorded and table.remove(free)
    or tensor.lasting(new_replaced, self, rows)
  entry.is_recorded, entry.layers, entry.pool = is_recorded, 0, free
  entry.is_free = false
  entry.firsts:copy_(self.positions.views.firsts)
  if is_recorded then
    if journal.recording then table.insert(journal.recording, entry) end
  elseif journal.is_open then
    journal:note(entry)
  end
  return entry
end

function Replaced:replayed()
  self.layers = self.evictor.layers
  self.evictor.cache:count_copied(self.rows * self.layers)
end

function Replaced:forget()
  if self.is_recorded then return end
  self.is_free = true
  table.insert(self.pool, self)
end

function Replaced:undo()
  local evictor, cache = self.evictor, self.evictor.cache
  for layer = 0, self.layers - 1 do
    local one = self.by_layer[layer]
    check(C.kvl_copy_tokens(one.memory, self.own, cache:layer(layer), one.places,
      cache.format:of(layer)))
    cache:count_copied(self.rows)
    self.firsts:add(one.index_rows, one.cells)
    evictor.positions.layers[layer]:scatter_(one.cells_row, one.replaced_row)
  end
end

--- The journal's entry of the end of a prompt: what the sequence held before.
local Kept = {}
Kept.__index = Kept

local out_sequence = ffi.new "kvl_sequence *[1]"

--- Brings the tables of a sequence to what it keeps, and notes what it held.
local function keep(self, seq, kept, caps)
  C.kvl_interrupt_hold(1)
  local status = C.kvl_sequence_keep(seq.handle, kept, caps, out_sequence)
  local entry
  if status >= 0 then
    entry = setmetatable({ seq = seq,
      handle = ffi.gc(out_sequence[0], C.kvl_sequence_close) }, Kept)
    if self.cache.journal.depth > 0 then self.cache.journal:note(entry) end
  end
  C.kvl_interrupt_hold(-1)
  check(status)
  return entry
end

function Kept:forget() protected.close(self, "handle", C.kvl_sequence_close) end

function Kept:undo()
  if self.seq.handle then check(C.kvl_sequence_restore(self.seq.handle, self.handle)) end
end

-- ---- decode ---------------------------------------------------------------------------

local call = ffi.new "kvl_replacement"

--- The worth of the tokens of a context's layer, as evict gives it: f32 [rows, n]. If a
-- tally has the worth and `in_place` is set: the tally's f32 [1, cells], and where each
-- row begins in it.
local function worth_of(self, ctx, in_place)
  local worth = self.policy:evict(ctx)
  local name = self.policy.name
  if worth == nil then return nil end
  if tally.is_by_token(worth) then
    if in_place and worth.heads == 1 then return worth:memory_of(ctx) end
    worth = worth:load(ctx)
  end
  if not tensor.is_tensor(worth) or worth:type() ~= "f32" or worth.ndim ~= 3
    or worth:size(0) ~= ctx.seqs or worth:size(2) ~= ctx.width * ctx.block_size
    or (worth:size(1) ~= 1 and worth:size(1) ~= ctx.kv_heads) then
    options.fail(("policy %s: evict returns %s, expected f32 [%d, %d or 1, %d]: "
      .. "sequences, KV heads, tokens; or a tally by token"):format(name,
      options.shown(worth), ctx.seqs, ctx.kv_heads, ctx.width * ctx.block_size))
  end
  if worth:size(1) > 1 then worth = worth:mean(1) end
  return worth:reshape { ctx.seqs, worth:size(worth.ndim - 1) }
end

--- Raises for sequences whose tokens this evictor has not placed, and registers new
-- sequences.
local function take_sequences(self, batch, is_prefill)
  for i, seq in ipairs(batch.batch.seqs) do
    local length = seq:length()
    if not is_prefill and length <= batch.batch.counts[i] then
      options.fail(("begin: sequence %d begins with a decode step, expected a prompt, as "
        .. "its end says what policy %s may hold"):format(i, self.policy.name))
    end
    if seq.evictor ~= self and length > batch.batch.counts[i] then
      options.fail(("begin: sequence %d has %d tokens that policy %s has not seen, "
        .. "expected a prompt that it saw from its first token"):format(i,
        length - batch.batch.counts[i], self.policy.name))
    elseif length > M.LONGEST then
      options.fail(("begin: sequence %d has %d tokens, expected at most %d where tokens "
        .. "are evicted"):format(i, length, M.LONGEST))
    end
    seq.evictor = self
  end
end

--- Begins a step.
function Evictor:begin(ctx, batch)
  local last = self.entry -- of a step that no journal noted
  if last and not last.is_recorded and not last.is_noted and not last.is_free then
    last:forget()
  end
  self.entry, ctx.new_tokens, ctx.held_positions = nil, nil, self.positions
  if ctx.is_rows then
    options.fail(("begin: policy %s evicts, expected one token of each sequence in a "
      .. "decode step"):format(self.policy.name))
  end
  if batch.batch.replaces == ctx.is_prefill then
    options.fail(("begin: the batch was appended to with replaces = %s, expected %s in a "
      .. "%s step of policy %s, which evicts"):format(batch.batch.replaces,
      not ctx.is_prefill, ctx.is_prefill and "prefill" or "decode", self.policy.name))
  end
  if ctx.ends_prompts and #ctx.ends_prompts ~= batch.count then
    options.fail(("begin: ends_prompts has %d entries, expected %d, one for each "
      .. "sequence"):format(#ctx.ends_prompts / self.heads, batch.batch.count))
  end
  take_sequences(self, batch, ctx.is_prefill)
  for _, one in ipairs(self.tallies) do one:begin(ctx) end
end

--- Finds the places of the new tokens, and saves the tokens that are there.
local function replace(self, ctx, cuts, one, worth, worth_firsts)
  local size = self.cache.block_size
  local budget = budget_of(self, ctx.layer)
  call.scores, call.score_firsts = worth, worth_firsts
  call.positions = self.positions.layers[ctx.layer]
  call.firsts, call.tables = self.entry.firsts, cuts.tables
  call.lens, call.now, call.wanted = cuts.lens, cuts.positions, cuts.places
  call.index, call.replaced, call.places = one.index, one.replaced, one.places
  call.blocks, call.block_tokens = one.blocks, one.block_tokens
  call.cache, call.saved = self.cache:layer(ctx.layer), one.memory
  call.format = self.cache.format:of(ctx.layer)
  call.block_size, call.sink, call.recent = size, budget.sink * size, budget.recent * size
  check(C.kvl_replace(call))
  if not self.entry.is_recorded then self.cache:count_copied(ctx.seqs) end
  self.entry.layers = ctx.layer + 1
end

--- Finds the places of a decode step's new tokens in a layer, and makes them the batch's
-- places.
local function make_room(self, ctx, cuts, layer)
  self.entry = self.entry or new_entry(self, ctx.seqs)
  local entry = self.entry
  local one = entry.by_layer[layer]
  ctx.new_tokens = nil -- they are not there yet
  local worth, worth_firsts
  if not self.keeps_decoded then worth, worth_firsts = worth_of(self, ctx, true) end
  C.kvl_interrupt_hold(1) -- what is noted as done is done
  local ok, why = pcall(replace, self, ctx, cuts, one, worth, worth_firsts)
  C.kvl_interrupt_hold(-1)
  if not ok then error(why, 0) end
  for heads, rows in pairs(one.of_heads) do
    if heads > 1 then
      one.index_rows:expand({ ctx.seqs, heads }, rows:reshape { ctx.seqs, heads })
    end
  end
  cuts.places, cuts.blocks, cuts.block_tokens = one.places, one.blocks, one.block_tokens
  ctx.new_tokens = one
end

--- Ends a layer of a decode step.
function Evictor:end_decode(ctx)
  for _, one in ipairs(self.tallies) do
    if one ~= self.positions then one:admit(ctx) end
  end
end

-- ---- after a prompt -------------------------------------------------------------------

--- The index in a tally of each new token of a prompt's step, in a layer: i32 [1, tokens
-- * heads].
local function cells_of(one, cuts)
  local heads, n, rows = one.heads, cuts.tokens_count, cuts.count
  local lens = cuts.lens:reshape { rows, 1 }:expand { rows, heads }
  local last = one.views.firsts:add(lens:reshape { rows * heads, 1 }):sub(1)
  local which = (cuts.owners:reshape { n, 1 } * heads):add(
    tensor.arange(last.device, "i32", heads):reshape { 1, heads })
  return last:gather_rows(which:reshape { n * heads }):reshape { n, heads }
    :sub(cuts.behind:reshape { n, 1 }):reshape { 1, n * heads }
end

--- Writes the numbers of a prompt's new tokens to tallies by token, in a layer: their
-- positions, or the initial number.
local function note_new(self, cuts, layer)
  for _, one in ipairs(self.tallies) do
    local cells = cells_of(one, cuts)
    local numbers = one == self.positions
      and cuts.positions:cast "f32":reshape { 1, cuts.tokens_count }
      or tensor.full(cells.device, "f32", cells:dims(), one.initial)
    one.layers[layer]:scatter_(cells, numbers)
  end
end

--- Finds the places of the new tokens of a step, in a layer. Called before the tokens are
-- written.
function Evictor:place(ctx, cuts, layer, q, memory)
  ctx:begin_layer(layer, q, memory)
  if ctx.is_prefill then return tensor.scope(note_new, self, cuts, layer) end
  make_room(self, ctx, cuts, layer)
end

--- The worth of the tokens that the heads of a sequence hold in a layer, ready to be
-- compared: f32 [heads, n]. Tokens that must stay have the highest.
local function compared(self, ctx, worth, first, layer, length)
  local heads, size, budget = self.heads, self.cache.block_size, budget_of(self, layer)
  local positions = self.positions:load(ctx):reshape { ctx.seqs, -1 }:narrow(first, heads)
  local own = worth and worth:narrow(first, heads) or positions
  own = own:ge(LOWEST):where(own, LOWEST):minimum(HIGHEST)
  return positions:lt(budget.sink * size):where(math.huge,
    positions:ge(length - budget.recent * size):where(math.huge, own))
end

local function no_append() error "these tokens are no batch to append to" end

--- Divides the budget of a layer among its heads, by the tokens that they hold. The split
-- gets a context of one sequence whose blocks are tokens.
local function divide(self, ctx, own, layer, caps, held)
  local heads, n, dev = self.heads, own:size(1), own.device
  local tokens = self.token_contexts[n]
  if not tokens then
    local shape = { device = dev, layers = self.layers, blocks = n, block_size = 1,
      heads = heads, kv_heads = heads, head_dim = self.cache.head_dim, scale = 1 }
    tokens = tensor.lasting(context.new, shape, { max_seqs = 1, max_blocks = n,
      format = self.cache.format })
    self.token_contexts[n] = tokens
  end
  local most, even = 0, {}
  for head = 0, heads - 1 do
    most = math.max(most, held[head])
    even[head + 1] = math.min(caps[head], held[head])
  end
  tokens:begin({ append = no_append, placement = {}, tokens_count = 1, seqs = {},
    count = 1, width = n, max_len = most,
    lens = tensor.from(dev, "i32", { 1 }, { most }) }, false)
  tokens:begin_layer(layer, nil, nil)
  tokens.policy = self.policy
  local index = tensor.arange(dev, "i32", n):reshape { 1, n }
  local lens = ctx.lens:narrow(ctx.first, heads):reshape { heads, 1 }
  local scores = index:lt(lens):where(own, -math.huge):reshape { 1, heads, n }
  local _, _, split = budgets.of_layer(self.policy.budget, layer)
  local undivided = tensor.from(dev, "i32", { 1, heads }, even)
  local total = check_policy.totals(tokens, undivided)
  local limits = split:heads(tokens, scores, undivided,
    ffi.new("kvl_budget", -1, math.max(unpack(even)), 0, 0, 0))
  check_policy.limits(tokens, limits, total, split.name)
  local budget, given = budget_of(self, layer), limits:list()
  local least = math.max(budget.min_blocks, budget.sink + budget.recent)
    * self.cache.block_size + 1
  for head = 0, heads - 1 do
    caps[head] = math.max(least, math.min(given[head + 1], held[head]))
  end
end

--- The tokens that the heads of a sequence keep in a layer: i32 [heads, most], ascending.
-- caps, by head from 0: how many; a split of the budget changes them, and waits for the
-- device.
local function select(self, ctx, worth, first, caps, held, layer, length)
  local heads = self.heads
  local own = compared(self, ctx, worth, first, layer, length)
  local _, _, split = budgets.of_layer(self.policy.budget, layer)
  if split and split.heads then
    ctx.first = first
    divide(self, ctx, own, layer, caps, held)
  end
  local most = 0
  for head = 0, heads - 1 do most = math.max(most, caps[head]) end
  most = math.min(most, own:size(1))
  local kept = tensor.tensor(own.device, "i32", { heads, 1, most })
  for head = 0, heads - 1 do
    ops.select(own:narrow(head, 1):reshape { 1, 1, own:size(1) },
      ctx.lens:narrow(first + head, 1), 1,
      ffi.new("kvl_budget", -1, caps[head], 0, 0, 0), kept:narrow(head, 1))
  end
  return kept:reshape { heads, most }
end

--- Chooses which tokens of a layer are kept, for the sequences whose prompt ends.
local function choose(self, ctx)
  local ends, batch = ctx.ends_prompts, ctx.batch.batch
  local worth
  for i = 1, batch.count do
    local seq, first = batch.seqs[i], (i - 1) * self.heads
    if ends[first + 1] then
      local length, caps, held, is_over = seq:length(), {}, {}, false
      for head = 0, self.heads - 1 do
        caps[head] = cap_of(self, ctx.layer, head, length)
        held[head] = seq:held(ctx.layer, head)
        is_over = is_over or held[head] > caps[head]
      end
      local kept = false
      if is_over then
        if worth == nil then worth = worth_of(self, ctx) or false end
        kept = tensor.lasting(tensor.scope, select, self, ctx, worth, first, caps, held,
          ctx.layer, length)
      end
      self.kept[i] = self.kept[i] or {}
      self.kept[i][ctx.layer] = { list = kept, caps = caps }
    end
  end
end

--- The places of listed tokens in tables: i64 [rows * n], -1 for none.
local function places_of(self, listed, tables)
  return ops.transform_indices { indices = listed, tables = tables,
    block_size = self.cache.block_size }:cast("i64"):reshape { listed.count }
end

--- The present tables of the heads of a sequence, in a layer.
local function new_tables(self, seq, layer)
  local width, list = math.max(1, seq:blocks()), {}
  local row = ffi.new("int32_t[?]", width)
  for head = 0, self.heads - 1 do
    check(C.kvl_sequence_table(seq.handle, layer * self.heads + head, row, width))
    for b = 0, width - 1 do list[#list + 1] = row[b] end
  end
  return tensor.from(self.cache.device, "i32", { self.heads, width }, list)
end

--- Shows the policies the K of the pages that hold the kept tokens.
local function show(self, seq, layer)
  local blocks, tokens, size = {}, {}, self.cache.block_size
  for head = 0, self.heads - 1 do
    local held = seq:held(layer, head)
    for b, block in ipairs(seq:table(layer, head)) do
      blocks[#blocks + 1], tokens[#tokens + 1] = block,
        math.min(size, held - (b - 1) * size)
    end
  end
  self.attention:show_layer(layer, blocks, tokens)
end

--- Shows the policies the pages of a fork, which are copies.
function Evictor:forked(seq)
  for layer = 0, self.layers - 1 do show(self, seq, layer) end
end

--- Moves the kept tokens of a layer to the sequence's present pages.
local function compact(self, ctx, seq, layer, first, kept)
  local tables = ctx.batch.by_layer[layer].tables:narrow(first, self.heads)
  local from = places_of(self, kept, tables)
  local n = kept:size(1)
  local index = tensor.arange(kept.device, "i32", n):reshape { 1, n }
  index = kept:ge(0):where(index:expand(kept:dims()), -1)
  local memory = self.cache:layer(layer)
  check(C.kvl_copy_tokens(memory, from, memory, places_of(self, index,
    new_tables(self, seq, layer)), self.cache.format:of(layer)))
  for head = 0, self.heads - 1 do
    self.cache:count_copied(math.min(seq:held(layer, head), n))
  end
  for _, one in ipairs(self.tallies) do
    for head = 0, self.heads - 1 do
      local view = seq:heads()[head + 1]
      one:keep(view, layer, kept:narrow(head, 1))
    end
  end
  show(self, seq, layer)
end

--- Moves the kept tokens of a sequence in all layers. of[layer]: the list that `select`
-- returned, or false.
local function compact_all(self, ctx, seq, first, of)
  for layer = 0, self.layers - 1 do
    local list = of[layer].list
    if list then compact(self, ctx, seq, layer, first, list) end
  end
end

--- Evicts the tokens that a sequence does not keep. of[layer].caps: by head.
local function evict(self, ctx, seq, first, of)
  local cuts, heads = self.layers * self.heads, self.heads
  local kept, caps = ffi.new("int32_t[?]", cuts), ffi.new("int32_t[?]", cuts)
  for c = 0, cuts - 1 do
    local layer, head = math.floor(c / heads), c % heads
    caps[c] = of[layer].caps[head]
    kept[c] = math.min(seq:held(layer, head), caps[c])
    if self.keeps_decoded then caps[c] = NO_CAP end
  end
  local entry = keep(self, seq, kept, caps)
  if entry.is_noted then return compact_all(self, ctx, seq, first, of) end
  -- no transaction will undo it
  local ok, why = pcall(compact_all, self, ctx, seq, first, of)
  if not ok then entry:undo() end
  entry:forget()
  if not ok then error(why, 0) end
end

--- Evicts the tokens that are not kept, for the sequences whose prompt ends.
local function finish(self, ctx)
  local ends, batch = ctx.ends_prompts, ctx.batch.batch
  for i = 1, batch.count do
    local first = (i - 1) * self.heads
    if ends[first + 1] then
      tensor.scope(evict, self, ctx, batch.seqs[i], first, self.kept[i])
    end
  end
end

--- Ends a layer of a step in which prompts end. After the last layer, the tokens that are
-- not kept are gone.
function Evictor:end_prompt(ctx)
  if ctx.layer == 0 then self.kept = {} end
  choose(self, ctx)
  if ctx.layer == self.layers - 1 then finish(self, ctx) end
end

return M
