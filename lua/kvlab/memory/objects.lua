--- The kinds of arguments that are objects of kvlab, for kvlab.arguments: caches,
-- sequences, steps and what policies get. An object is known by a method and the fields
-- that its users need, and each check is a few comparisons.
local kinds = require "kvlab.tensor.kinds"
local options = require "kvlab.options"
local sequence = require "kvlab.memory.sequence"

local M = {}

local is_sequence, is_tensor = sequence.is_sequence, kinds.tensor[2]
local is_device = kinds.device[2]

local function has(x, method)
  return type(x) == "table" and type(x[method]) == "function"
end

--- An object that policies and tallies keep state for.
M.sequence = { "a sequence", function(x)
  return type(x) == "table" and type(x.state) == "table"
end }

--- A real sequence of a cache, not a view that looks like one.
M.own_sequence = { "a sequence", is_sequence }

M.sequences = { "a list of sequences", function(x)
  if type(x) ~= "table" then return false end
  for i = 1, #x do if not is_sequence(x[i]) then return false end end
  return true
end }

M.cache = { "a cache", function(x)
  return has(x, "batch") and x.tier ~= nil and x.kv_heads ~= nil
end }

--- A batch whose step has begun.
M.batch = { "a batch that was appended to", function(x)
  return has(x, "append") and x.placement ~= nil and x.tokens_count ~= nil
end }

--- A batch while it is appended to: its tensors are not made yet.
M.filled_batch = { M.batch[1], function(x)
  return has(x, "append") and x.placement ~= nil and x.seqs ~= nil
    and x.host_ints ~= nil
end }

M.attention = { "an attention", function(x)
  return has(x, "forward") and x.context ~= nil and x.shape ~= nil
end }

--- A context, once an attention has begun a step.
M.context = { "a context of an attention's step", function(x)
  return has(x, "new_scores") and type(x.sequences) == "table"
end }

--- The same after the first layer has begun.
M.layer_context = { "a context of an attention's layer", function(x)
  return has(x, "new_scores") and x.lens ~= nil and x.sequences ~= nil
    and type(x.layer) == "number" and is_tensor(x.query)
end }

--- What policy.init gets.
M.shape = { "a shape as policy.init gets it", function(x)
  return type(x) == "table" and is_device(x.device) and type(x.layers) == "number"
    and type(x.blocks) == "number" and type(x.block_size) == "number"
    and type(x.kv_heads) == "number" and type(x.head_dim) == "number"
    and (x.heads == nil or type(x.heads) == "number")
    and (x.cut_heads == nil or type(x.cut_heads) == "number")
    and (x.keepers == nil or type(x.keepers) == "table")
    and (x.scale == nil or type(x.scale) == "number")
end }

--- The same with query heads.
M.heads_shape = { M.shape[1], function(x)
  return M.shape[2](x) and type(x.heads) == "number"
end }

--- The same for what is kept for each sequence.
M.sequence_shape = { M.shape[1], function(x)
  return type(x) == "table" and is_device(x.device) and type(x.layers) == "number"
    and type(x.kv_heads) == "number" and type(x.max_blocks) == "number"
end }

--- What a policy's offload hooks get.
M.event = { "an offload event", function(x)
  return type(x) == "table" and type(x.layer) == "number" and is_tensor(x.k)
    and is_tensor(x.blocks) and is_tensor(x.k_blocks) and is_tensor(x.num_tokens)
end }

M.policy = options.like("a policy, as kv.policy makes them", "name", "options", "files",
  "min_blocks")

--- The key of a table entry: anything but nil and NaN.
M.key = { "a key, such as a string or a number", function(x)
  return x ~= nil and x == x
end }

M.blocks = options.list_of(options.whole)

return M
