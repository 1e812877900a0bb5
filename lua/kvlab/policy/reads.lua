--- Counts the bytes that decode steps read, the tokens that they hold, and the bytes that
-- they move. The bytes read are the K and V that attention reads, in all branches of a
-- policy's dataflow, and what policies read to select. kvlab's own objects count
-- themselves when they are read: summaries, hashes, landmarks, compressed KV, tallies,
-- expressions and keys. A policy adds what it reads of tensors of its own (own_bytes). So
-- a policy can add to the count, but leave nothing out of it.
--
-- Bytes that two kernels read count twice, with one exception: if all keys (or values)
-- were read to score the blocks of a layer, attention does not count those of the
-- selected blocks again. Numbers that a step makes itself, such as scores, are not
-- counted, and neither is the block that it has just written and that is summarised
-- again. An open block counts as a whole block.
--
-- The reads of policies are counted in every decode step, without waiting for the device.
-- The reads of attention are counted only while an observer is attached, because the host
-- has to read the selections for that.
--
-- What is held and moved is also counted in the observed steps. The held tokens are those
-- of the sequences' tables, in each layer and KV head, including the step's new tokens.
-- The moved bytes are those that cross the link or are copied (Cache:stats) from
-- Attention:begin to the end of the last layer, and the K and V in host memory that
-- scores read. A prompt's eviction and the copies that a fork needs are not included,
-- because they come before a step. The denominator of all three shares is what dense
-- attention reads and holds in the same steps: K and V of the whole texts.
--
-- Steps of drafts are counted only if has_drafts is set: they add to what a policy reads
-- for an answer, but not to the steps that dense attention would take for it.
local M = {}

---@class kvlab.Reads
---@field scored number      bytes that policies have read
---@field scored_all number  bytes of K and V that dense attention reads in the same steps
---@field steps integer      these steps, over sequences
---@field attended number      bytes that observed attention has read
---@field attended_all number  bytes that dense attention reads in the same steps
---@field observed integer     these steps, over sequences
---@field blocks number      of K and V that observed attention has read, over KV heads
---@field blocks_all number  that dense attention reads in the same steps
---@field blocks_layer number  of them, in the present layer
---@field rows integer       sequences and KV heads of the observed layers
---@field held number        tokens that the observed steps held, over layers and KV heads
---@field texts number       that dense attention holds in the same steps
---@field moved number       bytes that the observed steps moved
---@field crossed number     bytes of the present layer that were read in host memory
---@field before table|nil   the cache's stats when the observed step began
---@field has_drafts boolean  steps of drafts are counted, too
local Reads = {}
Reads.__index = Reads

--- Counters for an attention.
---@param shape table  see policy.lua
---@param cache kvlab.Cache
---@return kvlab.Reads
function M.new(shape, cache)
  return setmetatable({ shape = shape, cache = cache,
    page = shape.block_size * cache:bytes_token(), held = 0, texts = 0, moved = 0,
    scored = 0, scored_all = 0, steps = 0, attended = 0, attended_all = 0, observed = 0,
    blocks = 0, blocks_all = 0, blocks_layer = 0, rows = 0,
    crossed = 0, of_layer = 0, has_drafts = false,
    has_keys = false, has_values = false, owned = {} }, Reads)
end

--- The blocks of the texts of a step's sequences, summed over KV heads; dense attention
-- would read them if nothing were evicted.
local function blocks_of_text(self, ctx)
  local blocks, seqs = 0, ctx.sequences
  for i = 1, #seqs do blocks = blocks + math.ceil(seqs[i]:length() / ctx.block_size) end
  return blocks * self.shape.kv_heads
end

--- The blocks that sequence i of a step holds.
local function blocks_held(ctx, i)
  if ctx.batch and ctx.batch.use_layer then
    return math.ceil(ctx:held(ctx.layer, i - 1) / ctx.block_size)
  end
  return ctx.sequences[i]:blocks()
end

--- The blocks that the step's sequences hold, summed over KV heads; only of sequences
-- that select now.
local function blocks_of(self, ctx)
  local blocks, asked = 0, ctx.asked
  for i = 1, #ctx.sequences do
    if not asked or asked[i] then blocks = blocks + blocks_held(ctx, i) end
  end
  return blocks * self.shape.kv_heads
end

-- ---- a step ---------------------------------------------------------------------------

--- Drops what was counted since a layer ended. A step begins with this: if a graph
-- replayed the step before, its layers never ended, and no observer saw them.
function Reads:forget()
  self.of_layer, self.blocks_layer, self.has_keys, self.has_values = 0, 0, false, false
  self.crossed = 0
  for p in pairs(self.owned) do self.owned[p] = nil end
end

--- Begins an observed step, before anything is moved for it.
function Reads:begin_observed() self.before = self.cache:stats() end

--- Counts what a layer of an observed step holds; ends the count of what the step moved.
local function end_observed(self, ctx)
  local seqs, by_layer = ctx.sequences, ctx.batch and ctx.batch.use_layer
  for i = 1, #seqs do
    local length = seqs[i]:length()
    self.texts = self.texts + length
    self.held = self.held + (by_layer and ctx:held(ctx.layer, i - 1) or length)
  end
  self.moved = self.moved + self.crossed
  if self.before and ctx.layer == self.shape.layers - 1 then
    self.moved = self.moved + self.cache:stats(self.before).bytes_moved
    self.before = nil
  end
end

--- Ends a layer: what was counted since the end of the previous layer belongs to it.
---@param is_observed boolean  an observer was attached
function Reads:end_layer(ctx, is_observed)
  local all = blocks_of_text(self, ctx)
  local cuts = ctx.batch and ctx.batch.cuts -- where each head may be a sequence
  local steps = ctx.layer == 0 and ctx.seqs / (cuts and cuts.heads or 1) or 0
  self.scored, self.steps = self.scored + self.of_layer, self.steps + steps
  self.scored_all = self.scored_all + all * self.page
  if is_observed then
    local keys = self.cache.format.key_share
    local share = 1 - (self.has_keys and keys or 0)
      - (self.has_values and 1 - keys or 0)
    self.attended = self.attended + self.blocks_layer * self.page * share
    self.attended_all = self.attended_all + all * self.page
    self.blocks = self.blocks + self.blocks_layer
    self.blocks_all = self.blocks_all + all
    self.observed = self.observed + steps
    self.rows = self.rows + ctx.seqs * self.shape.kv_heads
    end_observed(self, ctx)
  end
  self:forget()
end

-- ---- what policies read ---------------------------------------------------------------

--- Counts bytes.
function Reads:add(bytes) self.of_layer = self.of_layer + bytes end

--- Counts `bytes` for each block and KV head of a step's sequences.
function Reads:each_block(ctx, bytes) self:add(bytes * blocks_of(self, ctx)) end

--- Counts the entries of all blocks of a step's sequences.
---@param entries kvlab.Tensor  [blocks, …]: of one layer, by physical block
function Reads:entries(ctx, entries)
  self:each_block(ctx, entries:bytes() / (entries:size(0) * self.shape.kv_heads))
end

--- Counts a share of all blocks of a step's sequences, keys or values, that a kernel
-- reads where the cache has them. If that is host memory, they cross the link.
function Reads:share(ctx, share)
  local bytes = self.page * share * blocks_of(self, ctx)
  self:add(bytes)
  if not self.cache.tier.is_resident then self.crossed = self.crossed + bytes end
end

--- Counts the keys of all blocks of a step's sequences, which the layer's blocks are
-- scored by.
function Reads:keys(ctx)
  self:share(ctx, self.cache.format.key_share)
  self.has_keys = true
end

--- Counts the values of all blocks of a step's sequences.
function Reads:values(ctx)
  self:share(ctx, 1 - self.cache.format.key_share)
  self.has_values = true
end

--- Counts the bytes of its own tensors that a policy declares (own_bytes), once a layer.
function Reads:own(p, ctx)
  if self.owned[p] then return end
  self.owned[p] = true
  local bytes = p.own_bytes
  if type(bytes) == "function" then bytes = bytes(p, self.shape, ctx.layer) end
  self:each_block(ctx, bytes)
end

-- ---- what attention reads -------------------------------------------------------------

--- Counts the blocks that a selection names; nil: every block.
---@param ctx kvlab.Context
---@param selection? kvlab.Tensor  i32 [seqs, kv_heads or 1, n]
---@return number blocks  over KV heads
function Reads:selected(ctx, selection)
  local blocks = 0
  if selection then
    local list, each = selection:list(), selection:size(1) * selection:size(2)
    for i = 1, #ctx.sequences do
      local there = blocks_held(ctx, i)
      for at = (i - 1) * each + 1, i * each do
        blocks = blocks + (list[at] >= 0 and list[at] < there and 1 or 0)
      end
    end
    blocks = blocks * self.shape.kv_heads / selection:size(1)
  else
    blocks = blocks_of(self, ctx)
  end
  self.blocks_layer = self.blocks_layer + blocks
  return blocks
end

--- Counts the tokens that a list names, as parts of blocks.
---@param listed kvlab.Tensor  i32 [rows, kv_heads or 1, n]
function Reads:listed(ctx, listed)
  local tokens, heads = 0, listed:size(1)
  for _, token in ipairs(listed:list()) do tokens = tokens + (token >= 0 and 1 or 0) end
  self.blocks_layer = self.blocks_layer
    + tokens / ctx.block_size * self.shape.kv_heads / heads
end

-- ---- results --------------------------------------------------------------------------

--- Means over everything counted: blocks_read (per KV head and layer) and blocks_share;
-- bytes_read (per token, all layers and KV heads) and bytes_share, of what dense
-- attention reads; held_share, of the tokens that dense attention holds; moved_share, of
-- the bytes that dense attention reads.
function Reads:metrics()
  return {
    blocks_read = self.blocks / self.rows, blocks_share = self.blocks / self.blocks_all,
    bytes_read = self.attended / self.observed + self.scored / self.steps,
    bytes_share = self.attended / self.attended_all + self.scored / self.scored_all,
    held_share = self.held / self.texts, moved_share = self.moved / self.attended_all,
  }
end

return M
