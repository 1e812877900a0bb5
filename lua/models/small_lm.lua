--- A language model of one attention layer over a paged cache, small enough to read in
-- full: an embedding, q k v o projections with bias, and a softmax over the vocabulary.
-- The weights are random.
-- Source  SimpleLM of "Dive into Paged Attention" (jamesnulliu, 2024). There prefill and
--         decode have separate weights, so decoding does not continue what was prefilled.
--         Here they share the weights, and the two together equal one pass
local arguments = require "kvlab.arguments"
local kinds = require "kvlab.tensor.kinds"
local kv = require "kvlab"
local options = require "kvlab.options"
local seeds = require "kvlab.seeds"

local M = {}

---@class models.SmallLM
local LM = {}
LM.__index = LM

--- nn.Linear's initialisation: uniform in +-1/sqrt(inputs).
local function linear(dev, outputs, inputs, seed)
  local bound = 1 / math.sqrt(inputs)
  local o = { seed = seed, low = -bound, high = bound }
  local weight = kv.rand(dev, "f32", { outputs, inputs }, o)
  o.seed = seeds.derive(seed, 1)
  return { weight = weight, bias = kv.rand(dev, "f32", { outputs }, o) }
end

local function apply(layer, x) return x:matmul_t(layer.weight) + layer.bias end

local OPTIONS = {
  device = kinds.device,
  vocab_size = options.required(options.count),
  embed_dim = options.required(options.count),
  num_heads = options.required(options.count), seed = options.any_integer,
  block_size = options.count, blocks = options.count,
}

--- A model with random weights and an empty sequence.
---@param o table  vocab_size, embed_dim (a multiple of num_heads), num_heads; device
--                 (--device's), seed (0), block_size (16), blocks (16)
---@return models.SmallLM
function M.new(o)
  o = options.check("small_lm.new", o, OPTIONS)
  if o.embed_dim % o.num_heads ~= 0 then
    error(("small_lm.new: embed_dim is %d, expected a multiple of num_heads = %d"):format(
      o.embed_dim, o.num_heads), 2)
  end
  local dev, dim, seed = kv.device(o.device), o.embed_dim, o.seed or 0
  local self = setmetatable({ device = dev, heads = o.num_heads,
                              head_dim = dim / o.num_heads }, LM)
  self.embedding = kv.randn(dev, "f32", { o.vocab_size, dim }, { seed = seed })
  for i, name in ipairs { "q", "k", "v", "o" } do
    self[name] = linear(dev, dim, dim, seeds.derive(seed, i))
  end
  self.to_vocab = linear(dev, o.vocab_size, dim, seeds.derive(seed, 5))
  self.cache = kv.cache {
    device = dev, format = "f32", layers = 1, blocks = o.blocks or 16,
    block_size = o.block_size or 16, kv_heads = self.heads, head_dim = self.head_dim,
  }
  self.attention = kv.attention { cache = self.cache, heads = self.heads }
  self.batch = self.cache:batch()
  self.sequence = self.cache:sequence()
  return self
end

--- Reads tokens (a prompt, or one decoded token) and returns the probabilities of the
-- next token, f32 [vocab_size].
---@param tokens integer[]
function LM:forward(tokens)
  local n = #tokens
  self.batch:append({ self.sequence }, { n }, tokens)
  self.attention:begin(self.batch, n > 1)
  local x = self.embedding:gather_rows(self.batch.tokens)
  local function heads(layer)
    return apply(layer, x):reshape { n, self.heads, self.head_dim }
  end
  local out = self.attention:forward(0, heads(self.q), heads(self.k), heads(self.v))
  local states = apply(self.o, out:reshape { n, -1 })
  return apply(self.to_vocab, states:narrow(n - 1, 1)):softmax():index(0)
end

--- The cached K and V in the order of their tokens, f32 [tokens, embed_dim] each.
function LM:cached()
  local size, length = self.cache.block_size, self.sequence:length()
  local blocks = kv.from(self.device, "i32", self.sequence:table())
  local n = blocks:size(0)
  local k = kv.tensor(self.device, "f32", { n, self.heads, size, self.head_dim })
  local v = kv.tensor(self.device, "f32", k:dims())
  kv.ops.read_blocks(self.cache:layer(0), blocks, k, v)
  local function by_token(x)
    return x:transpose(1, 2):reshape { n * size, self.heads * self.head_dim }
      :narrow(0, length):clone()
  end
  return by_token(k), by_token(v)
end

arguments.methods(LM, "a language model", {
  forward = { tokens = options.list_of(options.whole, 1) },
})

return M
