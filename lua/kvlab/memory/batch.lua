--- A batch holds what the kernels need to know about the sequences of one step. It is
-- packed in pinned memory and sent with one asynchronous copy. ARRAYS states the layout
-- once: offsets, views and the size of the buffers all follow from it.
local arguments = require "kvlab.arguments"
local bit = require "bit"
local cuts = require "kvlab.memory.cuts"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local sequence = require "kvlab.memory.sequence"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local argument, fail = options.argument, options.fail
local M = {}

--- The sequences of one step as the kernels see them. A batch is made once and refilled
-- every step. Its tensors are views of one buffer, which one copy fills; they are valid
-- until the next append.
---@class kvlab.Batch
---@field seqs kvlab.Sequence[]
---@field count integer           sequences
---@field counts integer[]        new tokens of each sequence
---@field tokens_count integer    new tokens of all sequences
---@field max_len integer         the longest sequence, new tokens included
---@field tokens kvlab.Tensor     i32 [tokens_count]   token ids, where given
---@field positions kvlab.Tensor  i32 [tokens_count]
---@field places kvlab.Tensor      i64 [tokens_count]   place of each new token in memory
---@field tables kvlab.Tensor     i32 [count, width]
---@field lens kvlab.Tensor       i32 [count]
---@field starts kvlab.Tensor     i32 [count + 1]
---@field last kvlab.Tensor       i32 [count]          row of each sequence's newest token
---@field owners kvlab.Tensor     i32 [tokens_count]   the sequence of each new token
---@field tree kvlab.Tensor|nil   u64 [tokens_count, words]   of a draft tree: which of
--                                the newest keys a token sees, see kvl_attention.tree
---@field blocks kvlab.Tensor     i32 [touched]        physical blocks that got tokens
---@field block_tokens kvlab.Tensor i32 [touched]     valid tokens in each of them
---@field open_max integer        the most blocks of one sequence that got tokens
---@field open_limit integer      the most that a sequence with as many tokens can touch
---@field pads integer[]          of each sequence, how often its last touched block is
--                                listed once more, see append
---@field replaces boolean        see append
---@field turns integer           blocks that this step began or filled, or that were open
--                                after a truncation
---@field placement table         what the cache's memory tier knows of the step
---@field cuts kvlab.Cuts|nil      of tables by layer or head: the step as kernels see it.
--                                The batch then has no places, tables and touched blocks
local Batch = {}
Batch.__index = Batch

local ALIGN = 16 -- i32 entries: every view starts at 64 bytes
local TREE_WORDS = 2 -- at most: a draft tree has up to 128 tokens
local UPLOADS = 4 -- the most host buffers on their way to the device
local MOST_VIEWS = 16 -- sizes of steps whose views are kept

-- ---- the layout -----------------------------------------------------------------------

-- An array by its name and its dims, each a number or the name of a size of the step:
-- tokens, count (sequences), edges (count + 1), width (of the tables), touched (blocks
-- that get tokens), copies (blocks that stop being shared), words (of a row of a draft
-- tree, 0 without one). i32 unless it is wide, then i64 or the dtype that `wide` names.
-- The order is that of memory.
local FIRST = { { "places", "tokens", wide = true } } -- found before the sizes are known
local SECOND = {
  { "tables", "count", "width" }, { "lens", "count" }, { "starts", "edges" },
  { "last", "count" }, { "positions", "tokens" }, { "tokens", "tokens" },
  { "owners", "tokens" }, { "tree", "tokens", "words", wide = "u64" },
  { "blocks", "touched" }, { "block_tokens", "touched" },
}
-- Only some steps have these arrays. They come last, because a graph must find the other
-- arrays where they were.
local LAST = { { "copy_from", "copies" }, { "copy_to", "copies" } }

--- The arrays of a batch. Between its own arrays are those of the memory tier, whose
-- views go to batch.placement. With tables by layer or head, the arrays of batch.cuts
-- replace some of its own. `like`: a view of another array's memory.
local function arrays_of(tier, has_cuts)
  local list = {}
  local function add(arrays, owner)
    for _, array in ipairs(arrays) do
      if not (has_cuts and not owner and cuts.REPLACED[array[1]]) then
        array.owner = owner
        list[#list + 1] = array
      end
    end
  end
  if has_cuts then add(cuts.FIRST, "cuts") end
  add(FIRST)
  add(SECOND)
  if has_cuts then add(cuts.SECOND, "cuts") end
  add(tier.ARRAYS, "placement")
  add(LAST)
  return list
end

--- The number of i32 entries that an array takes, with the padding up to the start of the
-- next array.
local function entries(array, sizes)
  local n = array.wide and 2 or 1
  for i = 2, #array do n = n * (sizes[array[i]] or array[i]) end
  return math.ceil(n / ALIGN) * ALIGN
end

--- Writes to `layout` where each array starts, for a step of these sizes. Returns the
-- total size.
local function lay_out(arrays, sizes, layout)
  local at = 0
  for i = 1, #arrays do
    local array = arrays[i]
    if array.like then
      layout[array[1]] = layout[array.like]
    else
      layout[array[1]] = at
      at = at + entries(array, sizes)
    end
  end
  return at
end

--- The largest number of blocks that a step can write to: a sequence's tokens may begin
-- and end inside a block.
---@param seqs integer
---@param tokens integer
---@param block_size integer
function M.most_touched(seqs, tokens, block_size)
  return seqs + math.ceil(tokens / block_size)
    + math.min(seqs, math.max(0, tokens - seqs))
end

--- The most blocks that `count` new tokens of a sequence can lie in.
function M.touched_limit(count, block_size)
  return count == 0 and 0 or math.floor((count + block_size - 2) / block_size) + 1
end

-- ---- making one -----------------------------------------------------------------------

local LIMIT = options.within(1, 2 ^ 24) -- of sequences and tokens of a step
local OPTIONS = {
  max_seqs = LIMIT, max_tokens = LIMIT, max_blocks = options.count,
  fixed_width = options.boolean,
}

local function fill_sizes(self, s, count, tokens, width, touched, copies, words)
  s.words = words
  s.count, s.edges, s.tokens = count, count + 1, tokens
  s.width, s.touched, s.copies = width, touched, copies
  if self.cuts then self.cuts:fill_sizes(s) end
  return s
end

--- A reusable batch of a cache; see Cache:batch.
---@param cache kvlab.Cache
---@param limits table
---@return kvlab.Batch
function M.new(cache, limits)
  limits = options.check("batch", limits, OPTIONS, 3)
  local seqs, tokens = limits.max_seqs or 16, limits.max_tokens or 512
  local width = math.min(limits.max_blocks or cache.blocks, cache.blocks)
  local all_cuts = cache.cut_layers * cache.cut_heads
  cache.tier:expect_limits(seqs, tokens)
  local self = setmetatable({
    cache = cache, max_seqs = seqs, max_tokens = tokens, max_blocks = width,
    fixed_width = (limits.fixed_width or cache.tables ~= "one") and width or nil,
    host_counts = ffi.new("int32_t[?]", seqs),
    host_copies = ffi.new("int32_t[?]", 2 * seqs * all_cuts),
    handles = ffi.new("kvl_sequence *[?]", seqs),
    arrays = arrays_of(cache.tier, cache.tables ~= "one"), placement = {}, sizes = {},
    layout = {}, uploads = {}, upload = 0, pads = {}, views = {}, views_kept = 0,
  }, Batch)
  self.cuts = cache.tables ~= "one" and cuts.new(self, seqs, width) or nil
  local most = fill_sizes(self, {}, seqs, tokens, width,
    M.most_touched(seqs, tokens, cache.block_size), seqs * all_cuts, TREE_WORDS)
  self.room = lay_out(self.arrays, most, {})
  self.device_ints = tensor.tensor(cache.device, "i32", { self.room })
  for i = 0, UPLOADS - 1 do
    local memory = tensor.pinned(cache.device, "i32", { self.room })
    self.uploads[i] = { memory = memory, ints = ffi.cast("int32_t *", memory.ptr),
                        sent = cache.device:open_event() }
  end
  return self
end

-- ---- filling it -----------------------------------------------------------------------

--- The next host buffer, as soon as its last contents are on the device.
local function next_upload(self)
  self.upload = (self.upload + 1) % UPLOADS
  local upload = self.uploads[self.upload]
  upload.sent:sync()
  self.host_ints, self.host_places = upload.ints, ffi.cast("int64_t *", upload.ints)
  return upload
end

--- Sends the host buffer to the device, as far as the step has filled it.
local function send(self, upload)
  check(C.kvl_copy(self.sent[self.upload], self.sent.to))
  upload.sent:record(self.cache.device:stream())
end

local appends = 0 -- so far; a sequence keeps the number of the last one that listed it

--- The C handle of sequence i of an append, and its count, both checked.
local function take_sequence(self, i, seq, count)
  if not sequence.is_sequence(seq) then
    fail(("append: sequence %d is %s, expected a sequence"):format(i, options.shown(seq)))
  end
  if seq.cache ~= self.cache then
    fail(("append: sequence %d belongs to another cache"):format(i))
  end
  if seq.last_append == appends then
    fail(("append: sequence %d is listed twice, expected once"):format(i))
  end
  seq.last_append = appends
  if type(count) ~= "number" or count < 0 or count % 1 ~= 0 then
    fail(("append: count %d is %s, expected a whole number >= 0"):format(i,
      options.shown(count)))
  end
  return sequence.handle(seq), count
end

--- Checks the arguments and fills handles and counts. Returns the sum of counts.
local function take_counts(self, seqs, counts, tokens, replaces)
  argument("append", "seqs", seqs, options.table)
  argument("append", "counts", counts, options.table)
  local n, total = #seqs, 0
  if #counts ~= n then
    fail(("append: %d counts, expected one for each of %d sequences"):format(#counts, n))
  end
  if n > self.max_seqs then
    fail(("append: %d sequences, expected at most max_seqs = %d"):format(n,
      self.max_seqs))
  end
  appends = appends + 1
  for i = 1, n do
    local handle, count = take_sequence(self, i, seqs[i], counts[i])
    local blocks = C.kvl_sequence_grown(handle, count, replaces and 1 or 0)
    if blocks > self.max_blocks then
      fail(("append: sequence %d would have %d blocks, expected at most max_blocks = %d")
        :format(i, blocks, self.max_blocks))
    end
    self.handles[i - 1], self.host_counts[i - 1] = handle, count
    total = total + count
  end
  if total > self.max_tokens then
    fail(("append: %d tokens, expected at most max_tokens = %d"):format(total,
      self.max_tokens))
  end
  if tokens == nil then return total end
  argument("append", "tokens", tokens, options.table)
  if #tokens ~= total then
    fail(("append: %d tokens, expected %d, as many as counts add up to"):format(#tokens,
      total))
  end
  for i = 1, total do
    local token = tokens[i]
    if type(token) ~= "number" or token % 1 ~= 0 or math.abs(token) >= 2 ^ 31 then
      fail(("append: token %d is %s, expected a whole number below 2^31"):format(i,
        options.shown(token)))
    end
  end
  return total
end

--- Raises unless parents[row + t] is 0 ... t - 1 for token t of each sequence.
local function check_parents(counts, total, parents)
  argument("append", "parents", parents, options.table)
  if #parents ~= total then
    fail(("append: parents has %d entries, expected %d, one for each token"):format(
      #parents, total))
  end
  local row = 0
  for i = 1, #counts do
    if counts[i] > 64 * TREE_WORDS then
      fail(("append: the tree of sequence %d has %d tokens, expected at most %d"):format(
        i, counts[i], 64 * TREE_WORDS))
    end
    for t = 1, counts[i] do
      local parent = parents[row + t]
      if type(parent) ~= "number" or parent % 1 ~= 0 or parent < 0 or parent >= t then
        fail(("append: the parent of token %d of sequence %d is %s, expected 0 ... %d")
          :format(t, i, options.shown(parent), t - 1))
      end
    end
    row = row + counts[i]
  end
end

local function view_of(self, array)
  local s, dims, count = self.sizes, {}, 1
  for i = 2, #array do
    dims[i - 1] = s[array[i]] or array[i]
    count = count * dims[i - 1]
  end
  local at = self.layout[array[1]]
  if array[1] == "tree" and count == 0 then return nil end
  if array.wide then
    local dtype = array.wide == true and "i64" or array.wide
    return tensor.wrap(self.cache.device, dtype, dims,
      ffi.cast("int32_t *", self.device_ints.ptr) + at)
  end
  return self.device_ints:narrow(at, count):reshape(dims)
end

--- Views for steps of the present sizes: of each array, and of what is sent.
local function new_views(self)
  local sent = { to = self.device_ints:narrow(0, self.entries) }
  for i = 0, UPLOADS - 1 do
    sent[i] = self.uploads[i].memory:narrow(0, self.entries)
  end
  local views = { sent = sent }
  for i, array in ipairs(self.arrays) do views[i] = view_of(self, array) or false end
  return views
end

--- Takes the views for steps of the present sizes. Steps of a few sizes take turns, such
-- as those that make drafts and verify them, so their views are kept.
local function take_views(self)
  local s = self.sizes
  local key = ("%d %d %d %d %d %d"):format(s.count, s.tokens, s.width, s.touched,
    s.copies, s.words)
  local views = self.views[key]
  if not views then
    if self.views_kept == MOST_VIEWS then self.views, self.views_kept = {}, 0 end
    views = tensor.lasting(new_views, self)
    self.views[key], self.views_kept = views, self.views_kept + 1
  end
  for i, array in ipairs(self.arrays) do
    local owner = array.owner and self[array.owner] or self
    owner[array[1]] = views[i] or nil
  end
  self.sent, self.width, self.touched = views.sent, s.width, s.touched
  if self.cuts then tensor.lasting(self.cuts.split, self.cuts) end
  self.tokens_count = s.tokens -- set last, because it says that everything is there
end

--- The number of blocks of a sequence that its newest `count` tokens lie in.
local function touched_blocks(length, count, block_size)
  if count == 0 then return 0, 0 end
  local first = math.floor((length - count) / block_size)
  return first, math.floor((length - 1) / block_size) - first + 1
end

local tree_bits = ffi.new("uint64_t[?]", TREE_WORDS)

--- Writes the rows of a sequence's draft tree, and the positions of its tokens in the
-- text. parents[row + t]: which of its own new tokens token t follows, 0 for none.
local function fill_tree(self, parents, row, count, before)
  local o, p, words = self.layout, self.host_ints, self.sizes.words
  local tree = ffi.cast("uint64_t *", p + o.tree)
  for t = 1, count do
    local parent = parents[row + t]
    p[o.positions + row + t - 1] = parent == 0 and before
      or p[o.positions + row + parent - 1] + 1
    for w = 0, words - 1 do -- the context; of the new tokens none
      local hidden = math.min(math.max(count - 64 * w, 0), 64)
      tree_bits[w] = hidden == 64 and 0 or bit.lshift(bit.bnot(0ULL), hidden)
    end
    local at = t
    while at > 0 do
      local back = count - at
      local w = math.floor(back / 64)
      tree_bits[w] = bit.bor(tree_bits[w], bit.lshift(1ULL, back % 64))
      at = parents[row + at]
    end
    for w = 0, words - 1 do tree[(row + t - 1) * words + w] = tree_bits[w] end
  end
end

local function fill_host(self, counts, tokens, copies, parents)
  local o, p, size = self.layout, self.host_ints, self.cache.block_size
  local row, touched, width = 0, 0, self.sizes.width
  for i = 0, self.count - 1 do
    local handle, count = self.handles[i], counts[i + 1]
    local length = C.kvl_sequence_length(handle)
    p[o.lens + i], p[o.starts + i] = length, row
    for t = 0, count - 1 do
      p[o.positions + row + t] = length - count + t
      p[o.tokens + row + t] = tokens and tokens[row + t + 1] or 0
      p[o.owners + row + t] = i
    end
    if parents then fill_tree(self, parents, row, count, length - count) end
    row = row + count
    p[o.last + i] = row - 1
    local table_row, first, n = p, 0, 0
    if not self.cuts then
      table_row = p + o.tables + i * width
      C.kvl_sequence_table(handle, 0, table_row, width)
      first, n = touched_blocks(length, count, size)
    end
    for b = first, first + n - 1 do
      p[o.blocks + touched] = table_row[b]
      p[o.block_tokens + touched] = math.min(size, length - b * size)
      touched = touched + 1
    end
    for _ = 1, self.pads[i + 1] do
      p[o.blocks + touched] = p[o.blocks + touched - 1]
      p[o.block_tokens + touched] = p[o.block_tokens + touched - 1]
      touched = touched + 1
    end
  end
  p[o.starts + self.count] = row
  for i = 0, copies - 1 do
    p[o.copy_from + i] = self.host_copies[2 * i]
    p[o.copy_to + i] = self.host_copies[2 * i + 1]
  end
end

--- Takes the sizes of the step from its sequences, which are already lengthened. If the
-- previous step had the same sizes, its layout and views are used again.
local function measure(self, seqs, counts, total, copies, words, is_padded)
  local widest, touched, max_len, open_max, turns, open_limit = 1, 0, 0, 1, 0, 1
  local size = self.cache.block_size
  for i = 1, self.count do
    local length = C.kvl_sequence_length(self.handles[i - 1])
    local _, n = touched_blocks(length, counts[i], size)
    local limit = M.touched_limit(counts[i], size)
    if self.cuts and C.kvl_sequence_held(self.handles[i - 1], -1) ~= length then
      n = limit -- where they lie differs from table to table
    end
    turns = turns + math.ceil(length / size) - math.ceil((length - counts[i]) / size)
      + math.floor(length / size) - math.floor((length - counts[i]) / size)
      + (n > 0 and seqs[i].cut_at == length - counts[i] and 1 or 0)
    self.pads[i] = is_padded and not self.cuts and limit - n or 0
    open_limit = math.max(open_limit, limit)
    touched = touched + (self.cuts and limit or n + self.pads[i])
    max_len = math.max(max_len, length)
    open_max = math.max(open_max, n)
    widest = math.max(widest, C.kvl_sequence_blocks(self.handles[i - 1]))
  end
  local width = self.fixed_width
    or math.min(math.ceil(widest / 64) * 64, self.max_blocks)
  self.max_len, self.open_max, self.turns = max_len, open_max, turns
  self.open_limit = open_limit
  local s = self.sizes
  if self.tokens_count and s.count == self.count and s.tokens == total
    and s.width == width and s.touched == touched and s.copies == copies
    and s.words == words then return end
  self.tokens_count = nil -- until the views are there, for this step or a later one
  fill_sizes(self, s, self.count, total, width, touched, copies, words)
  self.entries = lay_out(self.arrays, s, self.layout)
  assert(self.entries <= self.room)
end

--- Lengthens the sequences and records this in the journal. No interrupt can come between
-- the two.
local function lengthen(self, seqs, counts, replaces)
  C.kvl_interrupt_hold(1)
  local copies = C.kvl_sequences_append(self.handles, self.host_counts, #seqs,
    replaces and 1 or 0, self.host_places, self.host_copies)
  if copies >= 0 then
    self.cache.journal:appended(seqs, counts, self.host_copies, copies)
  end
  C.kvl_interrupt_hold(-1)
  return check(copies)
end

--- The words of a row of the tree in which the longest sequence's tokens fit.
local function words_of(counts, parents)
  if not parents then return 0 end
  local most = 1
  for i = 1, #counts do most = math.max(most, counts[i]) end
  return math.ceil(most / 64)
end

local function append(self, seqs, counts, total, tokens, parents, is_padded, replaces)
  local upload = next_upload(self)
  local copies = lengthen(self, seqs, counts, replaces)
  self.seqs, self.count, self.counts = seqs, #seqs, counts
  self.replaces = replaces or false
  measure(self, seqs, counts, total, copies, words_of(counts, parents), is_padded)
  fill_host(self, counts, tokens, copies, parents)
  if self.cuts then self.cuts:fill(counts) end
  self.cache.tier:place(self)
  if not self.tokens_count then take_views(self) end
  send(self, upload)
  if self.cuts then self.cuts:send() end
  if copies > 0 then self.cache:copy_blocks(self.copy_from, self.copy_to) end
end

--- Lengthens sequence i by counts[i] tokens, for all of the sequences or none. It then
-- puts what the kernels need on the device, and copies the blocks that are no longer
-- shared. If any of this fails, the sequences are as they were before.
---@param seqs kvlab.Sequence[]  of the batch's cache, each once
---@param counts integer[]       one for each of them
---@param tokens? integer[]  token ids, sequence after sequence
---@param parents? integer[]  makes the new tokens of each sequence a draft tree: for each
--                            token, in the same order, which of its sequence's new tokens
--                            it follows, 0 for none: then it follows the text so far. A
--                            parent comes before its children. At most 128 tokens
---@param is_padded? boolean  lists as many touched blocks as tokens of these counts can
--                            lie in, some of them twice, so that the arrays have the same
--                            sizes wherever the tokens begin in their blocks
---@param replaces? boolean   where a policy evicts tokens, and a sequence holds as many
--                            as it may, its new token takes another one's place: in
--                            decode steps. Else sequences hold all of their new tokens
--                            (false)
function Batch:append(seqs, counts, tokens, parents, is_padded, replaces)
  local total = take_counts(self, seqs, counts, tokens, replaces)
  if parents ~= nil then
    check_parents(counts, total, parents)
    if self.cache.cut_heads > 1 then
      fail "append: a draft tree does not go with tables by head, expected no parents"
    end
  end
  self.cache:transaction(append, self, seqs, counts, total, tokens, parents,
    is_padded, replaces)
  return self
end

arguments.methods(Batch, "a batch", {})

return M
