--- What a policy sees of one layer of one step, and the buffers it writes to. One context
-- lives as long as its attention and is refilled, so that a step allocates nothing.
local library = require "kvlab.library"
local ops = require "kvlab.ops"
local policy = require "kvlab.policy"
local tensor = require "kvlab.tensor"

local M = {}

---@class kvlab.Context
---@field layer integer
---@field layers integer
---@field query ffi.cdata*       [tokens, heads, head_dim]; one token a sequence in decode
---@field is_prefill boolean
---@field step integer           steps of this attention so far; the same for every layer
---@field block_size integer
---@field total_kv_len integer   tokens of the longest sequence
---@field sequences kvlab.Sequence[]
---@field seqs integer           sequences
---@field width integer          columns of tables and scores: blocks of the longest
--                               sequence, rounded up
---@field tables ffi.cdata*      i32 [seqs, width]   physical blocks, -1 past the last
---@field lens ffi.cdata*        i32 [seqs]
---@field starts ffi.cdata*|nil  i32 [seqs + 1], prefill
---@field cache ffi.cdata*       this layer's KV memory
---@field scores ffi.cdata*      f32 [seqs, kv_heads, width], to be written by score
---@field scores_shared ffi.cdata*  f32 [seqs, 1, width], the same for all heads
local Context = {}
Context.__index = Context

---@param shape table   see policy.lua
---@param limits table  max_seqs, max_blocks
function M.new(shape, limits)
  local size = limits.max_seqs * shape.kv_heads * limits.max_blocks
  return setmetatable({
    layers = shape.layers, block_size = shape.block_size, kv_heads = shape.kv_heads,
    step = 0,
    score_buffer = tensor.tensor(shape.device, "f32", { size }),
    selection_buffer = tensor.tensor(shape.device, "i32", { size }),
    counts_buffer = tensor.tensor(shape.device, "i32",
      { limits.max_seqs * shape.kv_heads }),
    selections = {},
  }, Context)
end

local function score_view(self, heads)
  return self.score_buffer:narrow(0, self.seqs * heads * self.width)
    :reshape { self.seqs, heads, self.width }
end

--- Point the context at a new step.
function Context:begin(batch, is_prefill)
  self.step = self.step + 1
  self.is_prefill, self.sequences = is_prefill, batch.seqs
  self.tables, self.lens = batch.tables, batch.lens
  self.starts = is_prefill and batch.starts or nil
  self.total_kv_len = batch.max_len
  if self.seqs ~= batch.count or self.width ~= batch.width then
    self.seqs, self.width = batch.count, batch.width
    self.scores, self.scores_shared = score_view(self, self.kv_heads), score_view(self, 1)
    self.selections = {}
  end
end

--- Views for a selection of at most `n` blocks for `heads` heads.
local function selection_views(self, heads, n)
  local key = heads * 2 ^ 32 + n
  local views = self.selections[key]
  if not views then
    views = {
      self.selection_buffer:narrow(0, self.seqs * heads * n)
        :reshape { self.seqs, heads, n },
      self.counts_buffer:narrow(0, self.seqs * heads):reshape { self.seqs, heads },
    }
    self.selections[key] = views
  end
  return views[1], views[2]
end

--- Sink, recent and the best scores within a budget: selection and counts.
---@param scores ffi.cdata*  f32 [seqs, kv_heads or 1, width]
---@param budget ffi.cdata*  kvl_budget
function Context:select(scores, budget)
  local n = policy.budget_blocks(budget, self.width)
  local selection, counts = selection_views(self, tonumber(scores.shape[1]), n)
  return ops.select(scores, self.lens, self.block_size, budget, selection, counts)
end

--- Run fn(row, n, seq) with a host row float[width] for every sequence and KV head, then
-- put the rows on the device as scores. For policies that score in plain Lua: on a GPU
-- this costs a copy, and whatever fn reads from the device costs a synchronisation.
function Context:score_on_host(fn)
  local width, heads = self.width, self.kv_heads
  local n = self.seqs * heads * width
  if not self.host_scores or self.host_scores.n < n then
    self.host_scores = { n = n, rows = require("ffi").new("float[?]", n) }
  end
  local rows = self.host_scores.rows
  for s = 0, self.seqs - 1 do
    local blocks = self.sequences[s + 1]:blocks()
    for head = 0, heads - 1 do fn(rows + (s * heads + head) * width, blocks, s, head) end
  end
  library.check(library.C.kvl_tensor_write(self.scores, rows, 4 * n))
  return self.scores
end

return M
