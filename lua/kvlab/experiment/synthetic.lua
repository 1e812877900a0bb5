--- Runs the attention of a whole model without its weights: random queries, keys and
-- values go through every layer, over contexts of any length. The time and bytes of a
-- step do not depend on the numbers, so the offload experiments and benches time this.
--
--   local s = kv.synthetic { shape = "llama-8b", context = 32768, block_size = 16,
--                             decode_policy = kv.policy "quest", offload = {} }
--   local seq = s:sequence(32000)     -- its tokens are random and already in the cache
--   s:decode { seq }                  -- one token, all layers
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local attention_of = require("kvlab.policy.attention").attention
local device_of = require("kvlab.tensor.device").device
local formats = require "kvlab.memory.formats"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local new_cache = require("kvlab.memory.cache").cache
local options = require "kvlab.options"
local objects = require "kvlab.memory.objects"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local tensor = require "kvlab.tensor.arithmetic"
local OFFLOAD = require("kvlab.memory.host_tier").OFFLOAD

local C, check = library.C, library.check

local M = {}

-- Numbers for seeds.derive, one for each thing that is drawn; layers and steps are added
-- to them.
local QUERIES, KEYS, LAYERS, TURNS = 1, 2, 1000, 1000000
local FILL_TOKENS = 65536 -- are filled in at once

M.SHAPES = {
  ["llama-8b"] = { layers = 32, heads = 32, kv_heads = 8, head_dim = 128 },
  small = { layers = 4, heads = 8, kv_heads = 2, head_dim = 64 },
  -- DeepSeek-V3: absorbed queries over latents, whose first 512 numbers are the value
  ["deepseek-v3"] = { layers = 61, heads = 128, kv_heads = 1, head_dim = 576,
                      value_dim = 512 },
}

---@class kvlab.Synthetic
---@field cache kvlab.Cache
---@field attention kvlab.Attention
---@field batch kvlab.Batch
local Synthetic = {}
Synthetic.__index = Synthetic

--- The kind of the name of a shape.
M.SHAPE = options.one_of(unpack(sorted.keys(M.SHAPES)))

local a_policy = options.like("a policy", "select_blocks", "compute_decode")
local OPTIONS = {
  device = kinds.device, shape = options.required(M.SHAPE),
  layers = options.count, context = options.required(options.count),
  block_size = options.count, max_seqs = options.count, chunk = options.count,
  dtype = kinds.dtype, format = options.one_of(unpack(formats.NAMES)),
  seed = options.any_whole, prefill_policy = a_policy, decode_policy = a_policy,
  decode_through = options.one_of("ring", "hot"), max_blocks = options.count,
  tables = options.one_of("one", "layer", "head"),
  offload = OFFLOAD, fixed_width = options.boolean,
}

--- Returns the default shape of experiments: small on the CPU, otherwise llama-8b.
function M.default_shape(dev)
  options.argument("synthetic.default_shape", "dev", dev, kinds.device)
  return device_of(dev):is_cpu() and "small" or "llama-8b"
end

--- Makes a cache, attention, and random queries, keys and values of a shape.
---@param o table  shape (a name of M.SHAPES); context: how many tokens all sequences may
--                 have together; device, layers (the shape's), block_size (16),
--                 max_seqs (1), chunk (1: decode only), dtype (bf16) of q, k and v,
--                 format (dtype) of the cache's pages, seed (0),
--                 prefill_policy, decode_policy, decode_through, max_blocks, offload
--                 (nil: resident), tables ("one"), fixed_width (false)
---@return kvlab.Synthetic
local function new(o)
  options.check("synthetic", o, OPTIONS)
  local shape = M.SHAPES[o.shape]
  local dev, size = device_of(o.device), o.block_size or 16
  local self = setmetatable({ device = dev, shape = shape, seed = o.seed or 0,
    layers = o.layers or shape.layers, max_seqs = o.max_seqs or 1 }, Synthetic)
  local tokens = math.max(o.chunk or 1, self.max_seqs)
  local blocks = math.ceil(o.context / size) + self.max_seqs
  local offload = o.offload and { max_seqs = self.max_seqs, max_tokens = tokens }
  for key, value in pairs(o.offload or {}) do offload[key] = value end
  self.chunk = tokens
  self.cache = new_cache { device = dev, format = o.format or o.dtype,
    layers = self.layers, blocks = blocks, block_size = size, kv_heads = shape.kv_heads,
    head_dim = shape.head_dim, value_dim = shape.value_dim, offload = offload,
    tables = o.tables }
  self.attention = attention_of { cache = self.cache, heads = shape.heads,
    max_seqs = self.max_seqs, max_blocks = o.max_blocks,
    prefill_policy = o.prefill_policy, decode_policy = o.decode_policy,
    decode_through = o.decode_through }
  self.batch = self.cache:batch { max_seqs = self.max_seqs, max_tokens = tokens,
    max_blocks = o.max_blocks, fixed_width = o.fixed_width }
  local dtype = o.dtype or "bf16"
  local function random(heads, what)
    return tensor.randn(dev, dtype, { tokens, heads, shape.head_dim },
      { seed = seeds.derive(self.seed, what) })
  end
  self.q, self.k = random(shape.heads, QUERIES), random(shape.kv_heads, KEYS)
  self.out = tensor.tensor(dev, dtype,
    { tokens, shape.heads, shape.value_dim or shape.head_dim })
  self.rows = {}
  return self
end

--- Fills one layer of the cache with random numbers.
local function fill(self, layer)
  local cache, memory = self.cache, self.cache:layer(layer)
  local seed = seeds.derive(self.seed, LAYERS + layer)
  if memory:type() == cache.dtype then
    return check(C.kvl_random(memory, C.KVL_RANDOM_NORMAL, 0, 1, seed, 0))
  end
  local each = math.max(1, math.floor(FILL_TOKENS / cache.block_size)) * cache.block_size
  for first = 0, cache.blocks * cache.block_size - 1, each do
    tensor.scope(function()
      local n = math.min(each, cache.blocks * cache.block_size - first)
      local rows = tensor.randn(self.device, cache.dtype,
        { 2, n, cache.kv_heads, cache.head_dim }, { seed = seed + first })
      cache.format:append(layer, rows:index(0),
        not cache.format.is_shared and rows:index(1) or nil,
        tensor.arange(self.device, "i64", n, first), memory)
    end)
  end
end

--- Makes a sequence of `length` random tokens without computing a step. The first call
-- fills every block of the cache with random numbers. The policies then see the blocks
-- of the sequence, as they would after a prefill.
---@return kvlab.Sequence
function Synthetic:sequence(length)
  if not self.is_filled then
    self.is_filled = true
    for layer = 0, self.layers - 1 do fill(self, layer) end
  end
  local seq = self.cache:sequence()
  local before = seq:length()
  while before < length do -- adds entries to the block table; computes nothing
    local n = math.min(self.chunk, length - before)
    self.batch:append({ seq }, { n })
    before = before + n
  end
  self.attention:adopt { seq }
  return seq
end

--- Returns views of the first n rows of q, k and out.
local function rows_of(self, n)
  local rows = self.rows[n]
  if not rows then
    rows = { self.q:narrow(0, n), self.k:narrow(0, n), self.out:narrow(0, n) }
    self.rows[n] = rows
  end
  return rows
end

--- Runs one layer of the step that self.batch describes.
function Synthetic:layer_of_step(layer)
  local rows = rows_of(self, self.batch.tokens_count)
  self.attention:forward(layer, rows[1], rows[2],
    not self.shape.value_dim and rows[2] or nil, rows[3])
end

--- Runs all layers of the step that self.batch describes.
function Synthetic:layers_of_step()
  for layer = 0, self.layers - 1 do self:layer_of_step(layer) end
end

--- Prefills `length` more tokens of a sequence in chunks.
---@param seq kvlab.Sequence
---@param length integer
---@param ends_prompt? boolean  these are the last ones of its prompt (false)
function Synthetic:prefill(seq, length, ends_prompt)
  local left = length
  while left > 0 do
    local n = math.min(self.chunk, left)
    self.batch:append({ seq }, { n })
    self.attention:begin(self.batch, true, ends_prompt and n == left and { true } or nil)
    self:layers_of_step()
    left = left - n
  end
end

--- Appends one token to each sequence and begins the step; layers_of_step does the rest.
function Synthetic:begin_decode(seqs)
  local counts = {}
  for i = 1, #seqs do counts[i] = 1 end
  self.batch:append(seqs, counts, nil, nil, nil, self.attention.evictor ~= nil)
  self.attention:begin(self.batch, false)
end

--- Decodes one token of each sequence.
function Synthetic:decode(seqs)
  self:begin_decode(seqs)
  self:layers_of_step()
end

--- Rotates the queries by an angle in radians, because the queries of a text drift from
-- step to step: q = cos(a) q + sin(a) noise preserves their norm. `step` picks the noise.
function Synthetic:turn(angle, step)
  tensor.scope(function()
    local noise = tensor.randn(self.device, "f32", self.q:dims(),
      { seed = seeds.derive(self.seed, TURNS + step) })
    self.q:copy_((self.q:cast "f32" * math.cos(angle) + noise * math.sin(angle))
      :cast(self.q:type()))
  end)
end

--- Returns the microseconds that fn() takes on the device, by events on its stream.
function Synthetic:time(fn)
  self.events = self.events or { self.device:open_event(), self.device:open_event() }
  local from, to, stream = self.events[1], self.events[2], self.device:stream()
  from:record(stream)
  fn()
  to:record(stream)
  return from:elapsed_us(to)
end

--- Frees the KV memory and the tensors of this object.
function Synthetic:close()
  self.device:sync()
  self.cache:close()
  for _, t in ipairs { self.q, self.k, self.out } do t:free() end
end

arguments.methods(Synthetic, "a synthetic model", {
  sequence = { length = options.whole }, layer_of_step = { layer = options.whole },
  prefill = { seq = objects.sequence, length = options.whole,
              ends_prompt = options.optional(options.boolean) },
  begin_decode = { seqs = objects.sequences }, decode = { seqs = objects.sequences },
  turn = { angle = options.number, step = options.whole },
  time = { fn = options.callable },
})

return constructor(M, new)
