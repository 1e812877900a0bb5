--- Gemma 2 and the text model of Gemma 3: local layers that see a window, and global ones
-- that see everything. Norms stand before and after each half of a layer and multiply by
-- 1 + weight. Gemma 2 caps the scores of attention and the logits; Gemma 3 has a norm on
-- each head, and rotates in its local layers with a base of their own. All else is as in
-- lua/models/llama.lua.
--
--   local gemma = require "models.gemma"
--   local model = gemma.load("path/to/folder", { device = "cpu" })
-- Source  Gemma 2, arXiv:2408.00118; Gemma 3, arXiv:2503.19786; transformers 5
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local config = require "models.config"
local fields = require "models.fields"
local json = require "kvlab.json"
local kinds = require "kvlab.tensor.kinds"
local kv = require "kvlab"
local llama = require "models.llama"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local rope = require "models.rope"

local parts, refuse = llama.parts, fields.refuse
local M = {}

-- ---- config ---------------------------------------------------------------------------

local VARIANTS = { gemma2 = { pattern = 2 }, gemma3_text = { head_norm = true } }
local FAMILIES = { "gemma2", "gemma3_text" }

--- The two rotations of Gemma 3, by the kind of layer. rope_scaling changes only the
-- rotation of the layers that see everything.
local function both_tables(path, values)
  local plain = { rope_type = "default" }
  local given, both = values.rope_parameters
    or { full_attention = plain, sliding_attention = plain }, {}
  for name in pairs(given) do
    if name ~= "full_attention" and name ~= "sliding_attention" then
      refuse(path, "rope_parameters." .. tostring(name), given[name],
        "only tables full_attention and sliding_attention")
    end
  end
  for _, kind in ipairs { "full_attention", "sliding_attention" } do
    local of, copy = given[kind], {}
    if of == json.null then of = nil end
    if of and type(of) ~= "table" then
      refuse(path, "rope_parameters." .. kind, of, "a table")
    end
    for k, v in pairs(of or {}) do copy[k] = v end
    both[kind] = copy
  end
  for k, v in pairs(values.rope_scaling or {}) do both.full_attention[k] = v end
  return both
end

--- The frequencies of local and global layers, and the factor of the scale, which has to
-- be one number for all layers.
local function rotations(path, values, c, context)
  if not c.variant.head_norm then
    local all, factor = rope.frequencies(parts.rotation(path, values, context),
      c.head_dim)
    return all, all, factor
  elseif values.original_max_position_embeddings then
    refuse(path, "original_max_position_embeddings",
      values.original_max_position_embeddings, "it in rope_parameters.full_attention")
  end
  local both, frequencies, factors = both_tables(path, values), {}, {}
  local far = values.rope_scaling and "rope_scaling" or "rope_parameters.full_attention"
  for kind, theta in pairs { full_attention = values.rope_theta,
                             sliding_attention = values.rope_local_base_freq } do
    local where = ("%s: %s"):format(path, kind == "full_attention" and far
      or "rope_parameters.sliding_attention")
    local checked = rope.check(where, both[kind], { theta = theta, context = context,
      max_position_embeddings = values.max_position_embeddings })
    if checked.truncate == false then
      refuse(where, "truncate", false, "true: transformers overlooks it in Gemma 3")
    end
    frequencies[kind], factors[kind] = rope.frequencies(checked, c.head_dim)
  end
  if factors.full_attention ~= factors.sliding_attention then
    refuse(("%s: %s"):format(path, far), "rope_type", "yarn",
      "one that leaves the scale of all layers the same")
  end
  return frequencies.sliding_attention, frequencies.full_attention,
    factors.full_attention
end

--- Refuses a field that is given under two names with different values.
local function check_same(path, values, field, other)
  if values[other] and values[other] ~= values[field] then
    refuse(path, other, values[other], ("that of %s, %s"):format(field, values[field]))
  end
end

local function configure(file, context)
  local path, family = file.path, file.fields.model_type
  local values = config.read(path, file.fields, FAMILIES)
  check_same(path, values, "sliding_window", "sliding_window_size")
  local pattern = values.sliding_window_pattern or VARIANTS[family].pattern
  if not values.layer_types then
    check_same(path, values, "sliding_window_pattern", "_sliding_window_pattern")
  end
  local c = parts.sizes_of(file, values, context)
  c.variant = VARIANTS[family]
  if family == "gemma2" then c.attn_logit_softcapping = values.attn_logit_softcapping end
  c.final_logit_softcapping = values.final_logit_softcapping
  local near, far, factor = rotations(path, values, c, context)
  c.scale = factor / math.sqrt(values.query_pre_attn_scalar)
  c.windows, c.inv_freq, c.near, c.far = {}, far, near, far
  local is_local = parts.local_layers(path, values, c.layers,
    function(i) return i % pattern ~= 0 end)
  for i = 1, c.layers do c.windows[i] = is_local[i] and values.sliding_window or 0 end
  return c
end

-- ---- weights --------------------------------------------------------------------------

---@class models.Gemma: models.Llama
local Model = setmetatable({}, { __index = parts.Model })
Model.__index = Model

--- The weights of a layer: those of Llama, and norms before and after each half.
function Model.load_layer(read, c, i)
  local layer, at = parts.Model.load_layer(read, c, i), ("model.layers.%d."):format(i)
  local function norm(which) return read(at .. which .. ".weight", { c.hidden }) end
  layer.post_norm = layer.mlp_norm
  layer.mlp_norm = norm "pre_feedforward_layernorm"
  layer.mlp_post_norm = norm "post_feedforward_layernorm"
  return layer
end

--- Loads a model: a folder (config.json and safetensors).
---@param name string
---@param o? table  device (--device's), dtype of weights and activations (bf16), context:
--                  see llama.load
---@return models.Gemma
function M.load(name, o)
  o = options.check("gemma.load", o, parts.OPTIONS)
  local file = checkpoint.open(name)
  local c, read = configure(file, o.context), file.read
  --- Norms are kept in f32 and with the 1 added, so that it costs no precision.
  function file.read(tensor, device, dtype, shape)
    if not tensor:find "norm%.weight$" then return read(tensor, device, dtype, shape) end
    local weight = read(tensor, device, "f32", shape)
    return weight:add(1, weight)
  end
  local self = parts.load(c, o, file, Model)
  local near = kv.from(self.device, "f32", c.near)
  local far = kv.from(self.device, "f32", c.far)
  local inv_freq = {}
  for i = 1, c.layers do inv_freq[i] = c.windows[i] > 0 and near or far end
  self.attention_options = { inv_freq = inv_freq, window = c.windows, scale = c.scale,
                             soft_cap = c.attn_logit_softcapping }
  -- the factor as transformers rounds it
  self.embedding_scale = kv.from(self.device, self.dtype, { 1 },
    { math.sqrt(c.hidden) }):list()[1]
  return self
end

-- ---- what the engine asks of a family -------------------------------------------------

function Model:embed(tokens, s)
  self.embedding:gather_rows(tokens, s.x)
  s.x:mul(self.embedding_scale, s.x)
end

local GELU = math.sqrt(8 / math.pi)

--- gate = gelu(gate) * up, in the approximation 0.5 x (1 + tanh(y / 2)) = x sigmoid(y),
-- where y = sqrt(8 / pi) (x + 0.044715 x^3). `rest` is overwritten.
local function gelu_mul(gate, up, rest)
  gate:mul(gate, rest)
  rest:mul(0.044715 * GELU, rest)
  rest:add(GELU, rest)
  rest:mul(gate, rest)
  rest:sigmoid(rest)
  gate:mul(rest, gate)
  gate:mul(up, gate)
end

--- One layer, which adds to the residual s.x.
function Model:forward_layer(i, s, attention)
  local w = options.entry("forward_layer", "i", self.layers, i)
  local eps = self.config.eps
  parts.attend(self, i, w, s, attention)
  s.attended_rows:matmul_t(w.o, s.delta)
  kv.ops.rmsnorm(s.delta, w.post_norm, eps, s.delta)
  kv.ops.rmsnorm(s.delta, w.mlp_norm, eps, s.h, s.x) -- adds to s.x first
  kv.ops.linear(s.h, w.gate_up, s.gate_up, "plain")
  gelu_mul(s.gate, s.up, s.gated)
  s.gate:matmul_t(w.down, s.delta)
  kv.ops.rmsnorm(s.delta, w.mlp_post_norm, eps, s.delta)
  s.x:add(s.delta, s.x)
end

function Model:buffers()
  local sizes = parts.Model.buffers(self)
  sizes.delta, sizes.gate_up = self.config.hidden, 2 * self.config.inner
  return sizes
end

function Model:views(buffers, n)
  local s, inner = parts.Model.views(self, buffers, n), self.config.inner
  s.delta = buffers.delta:narrow(0, n)
  s.gate_up = parts.outputs(buffers.gate_up, n, { inner, inner })
  s.gate, s.up = unpack(s.gate_up)
  return s
end

function Model:logits(states, out)
  kv.ops.linear(states, self.head, out, "plain")
  local cap = self.config.final_logit_softcapping
  if not cap then return end
  out:div(cap, out)
  out:tanh(out)
  out:mul(cap, out)
end

arguments.functions(M, "gemma", { load = { name = options.string } })
local VIEWS = options.like("views of a step", "x", "h", "delta", "gate_up")
arguments.methods(Model, "a model", {
  embed = { tokens = kinds.tensor, s = VIEWS },
  views = { buffers = options.like("buffers of a step", "x", "h", "delta", "gate_up"),
            n = options.count },
  forward_layer = { i = options.whole, s = VIEWS, attention = objects.attention },
  logits = { states = kinds.tensor, out = kinds.tensor },
})

return M
