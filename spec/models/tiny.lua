--- A family of models that differs from Llama in every part: its layers are attention
-- alone, between two norms, with ALiBi in place of rope. Small enough for specs that run
-- thousands of steps.
local engine = require "models.engine"
local kv = require "kvlab"

local M = {}

local Tiny = { engine = engine.new }
M.Tiny = Tiny
Tiny.__index = Tiny

local function matrix(dev, rows, columns, seed)
  return kv.randn(dev, "f32", { rows, columns }, { seed = seed, std = columns ^ -0.5 })
end

--- A model of this family with random weights, on a device.
function M.tiny(dev)
  local c = { layers = 2, heads = 4, kv_heads = 2, head_dim = 16, hidden = 32,
              vocab = 97 }
  local self = setmetatable({ device = dev, dtype = "f32", config = c, layers = {} },
    Tiny)
  self.embedding = kv.randn(dev, "f32", { c.vocab, c.hidden }, { seed = 1 })
  for i = 0, c.layers - 1 do
    self.layers[i] = {
      q = matrix(dev, 64, 32, 10 * i + 2), k = matrix(dev, 32, 32, 10 * i + 3),
      v = matrix(dev, 32, 32, 10 * i + 4), o = matrix(dev, 32, 64, 10 * i + 5),
      before = kv.rand(dev, "f32", { 32 }, { seed = 10 * i + 6 }) + 0.5,
      after = kv.rand(dev, "f32", { 32 }, { seed = 10 * i + 7 }) + 0.5,
    }
  end
  self.attention_options = { alibi = kv.from(dev, "f32", { 0.5, 0.25, 0.125, 0.0625 }) }
  return self
end

--- The same without ALiBi, and with larger queries and a larger part of attention in its
-- states: its next token depends on what it attends to.
function M.attentive(dev)
  local self = M.tiny(dev)
  self.attention_options = {}
  for i = 0, self.config.layers - 1 do
    self.layers[i].after:mul(4, self.layers[i].after)
    self.layers[i].q:mul(4, self.layers[i].q)
  end
  return self
end

function Tiny.buffers() return { x = 32, h = 32, q = 64, k = 32, v = 32, out = 64 } end

function Tiny:views(buffers, n)
  self.asked = self.asked or {}
  self.asked[n] = (self.asked[n] or 0) + 1
  local s = { n = n }
  for name, buffer in pairs(buffers) do s[name] = buffer:narrow(0, n) end
  s.q3, s.out3 = s.q:reshape { n, 4, 16 }, s.out:reshape { n, 4, 16 }
  s.k3, s.v3 = s.k:reshape { n, 2, 16 }, s.v:reshape { n, 2, 16 }
  return s
end

function Tiny:embed(tokens, s) self.embedding:gather_rows(tokens, s.x) end

function Tiny:forward_layer(i, s, attention)
  local w = self.layers[i]
  kv.ops.rmsnorm(s.x, w.before, 1e-5, s.h)
  s.h:matmul_t(w.q, s.q)
  s.h:matmul_t(w.k, s.k)
  s.h:matmul_t(w.v, s.v)
  attention:forward(i, s.q3, s.k3, s.v3, s.out3)
  s.out:matmul_t(w.o, s.h)
  kv.ops.rmsnorm(s.h, w.after, 1e-5, s.h)
  s.x:add(s.h, s.x)
end

-- The same with latents: keys of 24 numbers, the first 16 of which are values, shared by
-- all heads; and an indexer of 2 heads of 32.
local Latent = setmetatable({}, { __index = Tiny })
Latent.__index = Latent

local SIZES = { q = 96, k = 24, iq = 64, ik = 32, iw = 2 }

function M.latent(dev)
  local self = setmetatable(M.tiny(dev), Latent)
  self.config = { layers = 2, heads = 4, kv_heads = 1, head_dim = 24, value_dim = 16,
                  hidden = 32, vocab = 97 }
  local seed = 50
  for i = 0, 1 do
    for name, size in pairs(SIZES) do
      self.layers[i][name] = matrix(dev, size, 32, seed + size + 7 * i)
    end
  end
  self.attention_options.index = { heads = 2, dim = 32 }
  return self
end

function Latent.buffers()
  local sizes = { x = 32, h = 32, out = 64 }
  for name, size in pairs(SIZES) do sizes[name] = size end
  return sizes
end

function Latent.views(_, buffers, n)
  local s = { n = n }
  for name, buffer in pairs(buffers) do s[name] = buffer:narrow(0, n) end
  s.q3, s.k3 = s.q:reshape { n, 4, 24 }, s.k:reshape { n, 1, 24 }
  s.out3 = s.out:reshape { n, 4, 16 }
  s.index = { q = s.iq:reshape { n, 2, 32 }, k = s.ik, weights = s.iw }
  return s
end

function Latent:forward_layer(i, s, attention)
  local w = self.layers[i]
  kv.ops.rmsnorm(s.x, w.before, 1e-5, s.h)
  for name in pairs(SIZES) do s.h:matmul_t(w[name], s[name]) end
  attention:forward(i, s.q3, s.k3, nil, s.out3, s.index)
  s.out:matmul_t(w.o, s.h)
  kv.ops.rmsnorm(s.h, w.after, 1e-5, s.h)
  s.x:add(s.h, s.x)
end

function Tiny.states(_, s) return s.x end

function Tiny:logits(states, out) states:matmul_t(self.embedding, out) end

return M
