--- Splits long prefixes into chunks: says which tokens of every sequence a chunk holds
-- and where they lie. Prefill can then attend to a prefix of any length with the memory
-- of one chunk: it attends to each chunk, and merges the results by their log-sum-exp.
--
--   local chunks = kv.prefix_chunks { tables = tables, lens = { 300000, 120 },
--     block_size = 64 }
--   index:gather(layer, chunks[1].places)      tokens starts … starts + lens - 1 of each
--   local out, lse = chunks:attend { q = q, starts = starts, cache = cache }
--
-- The sequences share a chunk's capacity equally, in whole blocks. A sequence that has
-- ended has no tokens in later chunks. All chunks lie on the device.
--
-- Source  SGLang's chunked prefix cache (where a share need not be whole blocks)
local arguments = require "kvlab.arguments"
local library = require "kvlab.library"
local kinds = require "kvlab.tensor.kinds"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.PrefixChunk
---@field tokens integer       tokens of all sequences in this chunk
---@field starts kvlab.Tensor  i32 [sequences]: the first token of each sequence
---@field lens kvlab.Tensor    i32 [sequences]: how many tokens of each
---@field ends kvlab.Tensor    i32 [sequences]: sums of lens, where each ends in places
---@field places kvlab.Tensor   i64 [tokens]: one sequence after the other
---@field tables kvlab.Tensor  i32 [sequences, blocks]: the blocks of this chunk

---@class kvlab.PrefixChunks  a list of kvlab.PrefixChunk
---@field length integer      the most tokens that a sequence has in a chunk
local PrefixChunks = {}
PrefixChunks.__index = PrefixChunks

local OPTIONS = {
  tables = options.required(kinds.tensor), block_size = options.required(options.count),
  lens = options.required(options.list_of(options.whole)), capacity = options.count,
}

--- Checks the options and returns the most tokens that a sequence has in a chunk.
local function check_options(o)
  options.check("prefix_chunks", o, OPTIONS, 3)
  local capacity, size, seqs = o.capacity or 128 * 1024, o.block_size, o.tables:size(0)
  local function expect(is_right, fmt, ...)
    if not is_right then error("prefix_chunks: " .. fmt:format(...), 4) end
  end
  expect(#o.lens == seqs, "lens is %d lengths, expected %d lengths", #o.lens, seqs)
  expect(capacity >= seqs * size, "capacity is %d, expected a block of %d for each of %d "
    .. "sequences", capacity, size, seqs)
  for i, len in ipairs(o.lens) do
    expect(len <= o.tables:size(1) * size, "length %d is %d, expected 0 ... %d", i, len,
      o.tables:size(1) * size)
  end
  return math.floor(capacity / math.max(seqs, 1) / size) * size
end

--- starts, lens and ends of chunk number c as one list, and the number of its tokens.
local function windows_of(lens, c, length)
  local list, n, total = {}, #lens, 0
  for s, len in ipairs(lens) do
    local here = math.max(0, math.min(len - c * length, length))
    total = total + here
    list[s], list[n + s], list[2 * n + s] = c * length, here, total
  end
  return list, total
end

--- Makes the chunks of prefixes of these lengths.
---@param o table  tables i32 [sequences, width], lens (a Lua list of lengths),
--                 block_size, capacity: tokens of a chunk (131072)
---@return kvlab.PrefixChunks
function M.prefix_chunks(o)
  local length = check_options(o)
  local dev, size, longest = o.tables.device, o.block_size, 0
  local self = setmetatable({ length = length, lens = o.lens }, PrefixChunks)
  for _, len in ipairs(o.lens) do longest = math.max(longest, len) end
  local n, blocks = #o.lens, math.min(length / size, o.tables:size(1))
  local columns = {} -- the columns of a chunk's blocks in tables, for each sequence
  for i = 0, n * blocks - 1 do columns[i + 1] = i % blocks end
  columns = tensor.from(dev, "i32", { n, blocks }, columns)
  for c = 0, math.ceil(longest / length) - 1 do
    local list, total = windows_of(o.lens, c, length)
    local windows = tensor.from(dev, "i32", { 3, n }, list)
    local chunk = { tokens = total, starts = windows:index(0), lens = windows:index(1),
                    ends = windows:index(2),
                    places = tensor.tensor(dev, "i64", { total }),
                    tables = tensor.tensor(dev, "i32", { n, blocks }) }
    ops.ragged_places(o.tables, size, chunk.starts, chunk.ends, chunk.places)
    check(C.kvl_gather(o.tables, columns, chunk.tables)) -- past a table: 0, never read
    check(C.kvl_binary_scalar(C.KVL_BINARY_ADD, columns, blocks, columns))
    self[c + 1] = chunk
  end
  return self
end

local needed = options.required(kinds.tensor)
local ATTEND = { q = needed, cache = needed, starts = kinds.tensor,
                 scale = options.number, soft_cap = options.not_negative,
                 format = kinds.format }

--- Attention of every query over the whole prefix of its sequence, chunk by chunk.
-- Returns out f32 [tokens, heads, head_dim] and lse f32 [tokens, heads], which can be
-- merged with attention over what follows the prefix (as prev_out, prev_lse).
---@param a table  q [tokens, heads, head_dim], starts i32 [sequences + 1] (nil: one query
--                 for each sequence), cache; optional: scale, soft_cap, format (of cache)
---@return kvlab.Tensor out
---@return kvlab.Tensor lse
function PrefixChunks:attend(a)
  options.check("prefix_chunks", a, ATTEND)
  local q, dims = a.q, a.q:dims()
  local out = tensor.zeros(q.device, "f32", dims)
  dims[3] = nil
  local lse = tensor.full(q.device, "f32", dims, -math.huge)
  local before = tensor.tensor(q.device, "f32", dims)
  for i = 1, #self do
    lse, before = before, lse
    ops.step.paged_attention { q = q, starts = a.starts, cache = a.cache, scale = a.scale,
      soft_cap = a.soft_cap, format = a.format, causal = false,
      tables = self[i].tables, lens = self[i].lens, prev_out = out, prev_lse = before,
      out = out, lse = lse }
  end
  before:free()
  return out, lse
end

arguments.methods(PrefixChunks, "prefix chunks", {})

return M
