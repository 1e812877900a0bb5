--- Captures: the inputs that the attention layers of a real model got for a text, as
-- tools/capture_hf.py writes them (docs/capture.md). The last tokens can be decoded again
-- under any policy. No weights are needed: queries, keys and values are the model's own.
--
--   local capture = kv.capture "FOLDER"
--   local replay = capture:replay { decode = 64, block_size = 16 }
--   local probe, model_error = replay:run(kv.policy "quest", kv.probe)
--
-- Every layer gets the queries that it got in the model, whatever earlier layers return
-- now, so errors do not add up over layers.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local attention_of = require("kvlab.policy.attention").attention
local device_of = require("kvlab.tensor.device").device
local json = require "kvlab.json"
local kinds = require "kvlab.tensor.kinds"
local new_cache = require("kvlab.memory.cache").cache
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local safetensors = require "kvlab.tensor.safetensors"
local sources = require "kvlab.sources"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

local FORMAT = "kvlab capture 1"
local DTYPES = { float32 = "f32", float16 = "f16", bfloat16 = "bf16" }
local CHUNK = 512 -- tokens of a prefill step

---@class kvlab.Capture
---@field folder string
---@field model string      the model's name as it was given to the tool
---@field layers integer[]  the numbers that the captured layers have in the model
---@field tokens integer
---@field heads integer
---@field kv_heads integer
---@field head_dim integer
---@field scale number      of q . k
---@field dtype string
local Capture = {}
Capture.__index = Capture

--- Opens a capture. Raises when the folder holds none, or one that cannot be read.
---@param folder string
---@return kvlab.Capture
local function open(folder)
  local path = folder .. "/manifest.json"
  local text = sources.read(path)
  if not text then error(("capture: there is no %s"):format(path), 0) end
  local ok, m = pcall(json.decode, text)
  if not ok or type(m) ~= "table" or m.format ~= FORMAT then
    error(("capture: %s is %s, expected a manifest of format \"%s\""):format(path,
      ok and type(m) == "table" and "of format " .. tostring(m.format)
        or "no JSON object", FORMAT), 0)
  end
  local self = setmetatable({ folder = folder, model = m.model, layers = m.layers,
    tokens = m.tokens, heads = m.heads, kv_heads = m.kv_heads, head_dim = m.head_dim,
    scale = m.scale, dtype = DTYPES[m.dtype] }, Capture)
  if not self.dtype then
    error(("capture: %s: dtype is %s, expected float32, float16 or bfloat16"):format(path,
      tostring(m.dtype)), 0)
  end
  return self
end

--- The tensors of the i-th captured layer (from 1): q and out [tokens, heads, head_dim],
-- k and v [tokens, kv_heads, head_dim].
---@return {q: kvlab.Tensor, k: kvlab.Tensor, v: kvlab.Tensor, out: kvlab.Tensor}
function Capture:layer(i, device)
  local number = self.layers[i] or options.fail(
    ("layer: i is %s, expected 1 ... %d"):format(options.shown(i), #self.layers))
  local file = safetensors(("%s/layer_%03d.safetensors"):format(self.folder, number))
  local layer = {}
  for name, heads in pairs { q = self.heads, out = self.heads, k = self.kv_heads,
                             v = self.kv_heads } do
    layer[name] = file:read(name, device, nil, { self.tokens, heads, self.head_dim })
  end
  file:close()
  return layer
end

-- ---- replay ---------------------------------------------------------------------------

---@class kvlab.Replay
---@field capture kvlab.Capture
---@field cache kvlab.Cache
---@field batch kvlab.Batch
---@field prompt integer  tokens in the cache before the first decoded one
---@field by_head table|nil  a cache with tables by head and its batch, for policies that
--                           evict tokens
local Replay = {}
Replay.__index = Replay

--- Prefills chunk by chunk until `seq` has the prompt; calls begin(is_last) for each
-- chunk and fn(layer, first, n) for each of its layers.
local function prefill(self, batch, seq, begin, fn)
  for first = 0, self.prompt - 1, CHUNK do
    local n = math.min(CHUNK, self.prompt - first)
    batch:append({ seq }, { n })
    begin(first + n == self.prompt)
    for layer = 0, #self.layers - 1 do fn(self, layer, first, n) end
  end
end

--- Writes the prompt's K and V, without attention.
local function write_prompt(self, layer, first, n)
  local t = self.layers[layer + 1]
  ops.append_kv(t.k:narrow(first, n), t.v:narrow(first, n), self.batch.places,
    self.cache:layer(layer))
end

--- A cache for the prompt and what is decoded, twice, and its batch.
local function open_memory(self, tables)
  local capture, blocks = self.capture, self.max_blocks
  local cache = new_cache { device = self.out.device, format = capture.dtype,
    layers = #self.layers, blocks = 2 * blocks + 2, block_size = self.block_size,
    kv_heads = capture.kv_heads, head_dim = capture.head_dim, tables = tables }
  return cache, cache:batch { max_seqs = 1, max_tokens = CHUNK, max_blocks = blocks }
end

--- Makes a cache in which the last `decode` tokens of the text can be decoded again.
---@param o? {decode?: integer, block_size?: integer, device?: string}  defaults: decode
---  32, or all tokens after the first if there are fewer; block_size 16; --device's
---@return kvlab.Replay
function Capture:replay(o)
  o = options.check("replay", o, { decode = options.within(1, self.tokens - 1),
    block_size = options.count, device = kinds.device })
  local decode, size = o.decode or math.min(32, self.tokens - 1), o.block_size or 16
  local device, blocks = device_of(o.device), math.ceil(self.tokens / size)
  local replay = setmetatable({ capture = self, layers = {}, max_blocks = blocks,
    block_size = size, prompt = self.tokens - decode }, Replay)
  for i = 1, #self.layers do replay.layers[i] = self:layer(i, device) end
  replay.out = tensor.tensor(device, self.dtype, { 1, self.heads, self.head_dim })
  replay.cache, replay.batch = open_memory(replay, "one")
  replay.base = replay.cache:sequence()
  prefill(replay, replay.batch, replay.base, function() end, write_prompt)
  return replay
end

--- A sequence with the prompt, for an attention that was just made: a fork of the written
-- prompt, or, for policies that watch the prompt's queries or evict tokens, a prefilled
-- one.
local function open_sequence(self, attention, batch)
  local policy = attention.decode_policy
  if not (policy.watches_prompt or policy.evict) then
    attention:adopt { self.base }
    return self.base:fork()
  end
  local seq = attention.cache:sequence()
  attention:request_begin(seq)
  prefill(self, batch, seq, function(is_last)
    attention:begin(batch, true, is_last and { true } or nil)
  end, function(_, layer, first, n)
    local t = self.layers[layer + 1]
    attention:forward(layer, t.q:narrow(first, n), t.k:narrow(first, n),
      t.v:narrow(first, n))
  end)
  return seq
end

local function row_norms(x) return x:mul(x):sum(2):sqrt() end

--- The sum over heads of |out - want| / |want|.
local function distance(out, want)
  want = want:cast "f32"
  return (row_norms(out:cast "f32" - want) / row_norms(want)):sum():item()
end

--- The cache and the batch for a policy.
local function memory_of(self, policy)
  if not policy.evict then return self.cache, self.batch end
  if not self.by_head then
    local cache, batch = tensor.lasting(open_memory, self, "head")
    self.by_head = { cache = cache, batch = batch }
  end
  return self.by_head.cache, self.by_head.batch
end

--- Decodes the last tokens under a policy. One that evicts tokens of the prompt holds its
-- budget for each layer and KV head.
---@param policy table
---@param observe? fun(attention: kvlab.Attention): table  such as kv.probe
---@return table|nil observer
---@return number model_error  mean relative distance of a head's output from the model's
--                             output; for full attention it is the rounding error
function Replay:run(policy, observe)
  local capture = self.capture
  local cache, batch = memory_of(self, policy)
  local attention = attention_of { cache = cache, heads = capture.heads,
    scale = capture.scale, decode_policy = policy, max_seqs = 1,
    max_blocks = self.max_blocks }
  local seq, sum = open_sequence(self, attention, batch), 0
  local observer = observe and observe(attention)
  for at = self.prompt, capture.tokens - 1 do
    batch:append({ seq }, { 1 }, nil, nil, nil, policy.evict ~= nil)
    attention:begin(batch, false)
    for layer, t in ipairs(self.layers) do
      attention:forward(layer - 1, t.q:narrow(at, 1), t.k:narrow(at, 1),
        t.v:narrow(at, 1), self.out)
      sum = sum + tensor.scope(distance, self.out, t.out:narrow(at, 1))
    end
  end
  attention:request_finished(seq)
  seq:close()
  local outputs = (capture.tokens - self.prompt) * #self.layers * capture.heads
  return observer, sum / outputs
end

function Replay:close()
  self.cache:close()
  if self.by_head then self.by_head.cache:close() end
  for _, layer in ipairs(self.layers) do
    for _, t in pairs(layer) do t:free() end
  end
end

arguments.methods(Capture, "a capture", {
  layer = { device = options.optional(kinds.device) },
})
arguments.methods(Replay, "a replay", {
  run = { policy = objects.policy, observe = options.optional(options.callable) },
})

return constructor(M, arguments.of("capture", open, { folder = options.string }))
