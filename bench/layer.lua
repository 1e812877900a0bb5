--- A sparse decode step of one layer (P19): append, summarise, score, select, attend,
-- with Quest over KV on the device. Several layers with memory of their own are recorded
-- in a graph and replayed, so a layer's bytes are not in the L2, and its kernels start as
-- in a step of a model. The time and the bytes are a layer's. Limit: a plain read of as
-- many bytes: the summaries of all blocks, and K and V of those that are selected.
local kv = require "kvlab"

local LAYERS, BLOCK, REPLAYS = 8, 16, 31

--- Bytes of a layer for `seqs` sequences: each block's min and max, and the K and V that
-- the policy selects, as the step itself counts them.
local function bytes_of(s, seqs)
  local probe = kv.probe(s.attention)
  s:decode(seqs)
  probe:detach()
  return #seqs * probe:metrics().bytes_read / s.layers
end

local function layer(o)
  return function(b)
    local context = b:shrunk(o.context)
    local s = kv.synthetic { device = b.device, shape = "llama-8b", layers = LAYERS,
      context = o.seqs * (context + BLOCK), max_seqs = o.seqs, block_size = BLOCK,
      max_blocks = context / BLOCK + 1, fixed_width = true,
      decode_policy = kv.policy("quest", { ratio = o.ratio, sink = 1, recent = 2 }) }
    local seqs, times = {}, {}
    for i = 1, o.seqs do seqs[i] = s:sequence(context) end
    local function begin()
      for _, seq in ipairs(seqs) do seq:truncate(context) end
      s:begin_decode(seqs)
    end
    local bytes = bytes_of(s, seqs)
    begin()
    s:layers_of_step() -- makes the buffers
    begin()
    local graph = kv.graph(function() s:layers_of_step() end, b.device)
    for i = 1, b.quick and 3 or REPLAYS do
      begin()
      b.device:sync()
      times[i] = s:time(function() graph:replay() end) / LAYERS
    end
    s:close()
    return { us = kv.statistics.median(times), bytes = bytes }
  end
end

return function(b)
  for _, o in ipairs {
    { seqs = 1, context = 32768, ratio = 0.1, us = 19 },
    { seqs = 1, context = 131072, ratio = 0.05, us = 29 },
    { seqs = 16, context = 32768, ratio = 0.1, us = 95 },
  } do
    b:case { id = "P19", setup = layer(o),
      target = b.kind == "cuda" and { us = o.us } or nil,
      name = ("a layer's step with Quest, %d x %d, %d%%"):format(o.seqs,
        b:shrunk(o.context), o.ratio * 100) }
  end
end
