--- Block summaries: a small amount of data per block, made from K, with which policies
-- score. There is one entry for every physical block, so sequences that share a block
-- share its summary.
local arguments = require "kvlab.arguments"
local by_page = require "kvlab.tensor.by_page"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Summary
local Summary = {}
Summary.__index = Summary

---@class kvlab.Keys
local Keys = {}
Keys.__index = Keys

local function new(kind, shape, dtype, dims, values)
  local memory, layers = by_page.new(by_page.open, shape, dtype, dims)
  return setmetatable({ update_op = kind, shape = shape, layers = layers,
    memory = memory, values = values, dtype = dtype }, Summary)
end

--- Elementwise min and max of K: [layers, blocks, 2, kv_heads, head_dim] in the cache's
-- dtype. They are elements of K, so nothing is rounded.
---@param shape table  as policy.init gets it
---@return kvlab.Summary
function M.minmax(shape)
  return new(C.kvl_block_minmax, shape, shape.dtype,
    { 2, shape.kv_heads, shape.head_dim }, 2 * shape.head_dim)
end

--- Mean of K: f32 [layers, blocks, kv_heads, head_dim].
---@return kvlab.Summary
function M.mean(shape)
  return new(C.kvl_block_mean, shape, "f32",
    { shape.kv_heads, shape.head_dim }, shape.head_dim)
end

--- For each row of keys k [rows, n, head_dim]: the mean of the `count` keys that are
-- farthest from the mean of the row's first tokens[row] keys, among these (of all, if
-- they are fewer): f32 [rows, head_dim].
local function mean_of_far(k, tokens, count)
  local rows, n, dim, dev = k:size(0), k:size(1), k:size(2), k.device
  local none = tensor.full(dev, "i32", { rows, n }, -1)
  local place = tensor.arange(dev, "i32", rows * n):reshape { rows, n }
  place = tensor.arange(dev, "i32", n):lt(tokens):where(place, none)
  -- zeros where there is no token, because the memory there may hold anything
  local flat = k:reshape { rows * n, dim }:gather_rows(place:reshape { rows * n })
  local keys, taken = flat:reshape { rows, n, dim }, tokens:minimum(count):cast "f32"
  local from_mean = keys - (keys:sum(1) / tokens:cast "f32"):reshape { rows, 1, dim }
  local distance = (from_mean * from_mean):sum(2)
  distance = place:ge(0):where(distance, none:cast "f32")
  local _, index = distance:topk(math.min(count, n))
  local chosen = place:gather(index) -- -1 if there are fewer tokens
  return flat:gather_rows(chosen:reshape { rows * index:size(1) })
    :reshape { rows, index:size(1), dim }:sum(1) / taken
end

--- The entries of an event's layer.
local function layer_of(self, ev)
  return options.entry("update", "ev.layer", self.layers, ev.layer)
end

--- The keys of an event's blocks: [n, kv_heads, block_size, head_dim], a new tensor.
local function keys_of(shape, ev, dtype)
  local k = tensor.tensor(shape.device, dtype, { ev.blocks:size(0), shape.kv_heads,
    shape.block_size, shape.head_dim })
  local format = shape.format
  check(C.kvl_read_blocks(ev.k, format and format:of(ev.layer), ev.k_blocks, k, nil))
  return k
end

local Representatives = setmetatable({}, Summary)
Representatives.__index = Representatives

--- For each block, the mean of the `count` keys that are farthest from the mean of all
-- its keys (of fewer keys, if the block is open and has fewer): f32 [layers, blocks,
-- kv_heads, head_dim].
---@param shape table
---@param count integer
---@return kvlab.Summary
function M.representatives(shape, count)
  local self = setmetatable(M.mean(shape), Representatives)
  self.count = count
  return self
end

function Representatives:update(ev)
  tensor.scope(function()
    local s, n = self.shape, ev.blocks:size(0)
    local rows = n * s.kv_heads
    local k = keys_of(s, ev, "f32"):reshape { rows, s.block_size, s.head_dim }
    local tokens = ev.num_tokens:reshape { n, 1 }
      + tensor.zeros(s.device, "i32", { 1, s.kv_heads })
    local means = mean_of_far(k, tokens:reshape { rows, 1 }, self.count)
    layer_of(self, ev):scatter_rows_(ev.blocks,
      means:reshape { n, s.kv_heads, s.head_dim })
  end)
end

--- A copy of the keys, kept on the device: [layers, blocks * kv_heads, block_size *
-- head_dim] in the cache's dtype, half of the KV memory. For policies that read every key
-- while KV lies in host memory.
---@return kvlab.Keys
function M.keys(shape)
  local s = shape
  local head = tensor.arange(s.device, "i32", s.kv_heads)
  local width = s.block_size * s.head_dim
  local memory, pages = by_page.new(by_page.open, s, s.dtype, { s.kv_heads, width })
  local layers = {}
  for layer, page in pairs(pages) do
    layers[layer] = page:reshape { s.blocks * s.kv_heads, width }
  end
  return setmetatable({ shape = s, layers = layers, memory = memory,
    head_across = head:reshape { 1, s.kv_heads },
  }, Keys)
end

--- Copies the K of an offload event's blocks.
function Keys:update(ev)
  tensor.scope(function()
    local heads, n = self.shape.kv_heads, ev.blocks:size(0)
    local rows = (ev.blocks:reshape { n, 1 } * heads + self.head_across)
      :reshape { n * heads }
    layer_of(self, ev):scatter_rows_(rows, keys_of(self.shape, ev, self.shape.dtype)
      :reshape { n * heads, self.layers[0]:size(1) })
  end)
end

--- The rows of the first n blocks of sequence `seq` of a step in [blocks * kv_heads, …]:
-- i32 [kv_heads * n].
local function rows_of(shape, ctx, layer, seq, n)
  if ctx.use_layer then ctx:use_layer(layer) end
  local heads = tensor.arange(shape.device, "i32", shape.kv_heads)
  local rows = ctx.tables:index(seq):narrow(0, n):reshape { 1, n } * shape.kv_heads
    + heads:reshape { shape.kv_heads, 1 }
  return rows:reshape { shape.kv_heads * n }
end

--- Counts the entries of n blocks of one layer.
local function count_gathered(self, ctx, n)
  if ctx.reads then ctx.reads:add(n * by_page.bytes(self.memory)) end
end

--- The keys of the first n blocks of sequence `seq` of a step: a new tensor [kv_heads, n
-- * block_size, head_dim] in the cache's dtype. Keys of an f8e4m3 cache stay in its
-- units.
function Keys:gather(ctx, layer, seq, n)
  local s = self.shape
  count_gathered(self, ctx, n)
  return options.entry("gather", "layer", self.layers, layer)
    :gather_rows(rows_of(s, ctx, layer, seq, n))
    :reshape { s.kv_heads, n * s.block_size, s.head_dim }
end

--- The entries of the first n blocks of sequence `seq` of a step: a new tensor [kv_heads,
-- n, head_dim]. For summaries that hold means.
function Summary:gather(ctx, layer, seq, n)
  local s = self.shape
  count_gathered(self, ctx, n)
  return options.entry("gather", "layer", self.layers, layer)
    :reshape { s.blocks * s.kv_heads, s.head_dim }
    :gather_rows(rows_of(s, ctx, layer, seq, n)):reshape { s.kv_heads, n, s.head_dim }
end

--- Computes the summaries of an offload event's blocks again from their K.
function Summary:update(ev)
  local format = self.shape.format
  check(self.update_op(ev.k, format and format:of(ev.layer), ev.k_blocks, ev.num_tokens,
    ev.blocks, layer_of(self, ev)))
end

--- The entries of one layer, by physical block.
function Summary:layer(layer) return self.layers[layer] end

--- Bytes of the entry of one block and KV head, which scoring reads.
function Summary:bytes_block()
  return self.values * C.kvl_dtype_bytes(library.dtypes[self.dtype])
end

local SHAPE = { shape = objects.shape }
arguments.functions(M, "summary", { minmax = SHAPE, mean = SHAPE, keys = SHAPE,
  representatives = { shape = objects.shape, count = options.count } })

local METHODS = { update = { ev = objects.event },
  gather = { ctx = objects.context, layer = options.whole, seq = options.whole,
             n = options.whole } }
arguments.methods(Summary, "a summary", METHODS)
arguments.methods(Keys, "keys", METHODS)
arguments.methods(Representatives, "a summary", { update = METHODS.update })

return M
