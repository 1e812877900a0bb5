--- DeepSeek-V2, V3 and V3.2, and GLM-4.7-Flash: multi-head latent attention (MLA), and
-- experts with shared ones beside them. Everything but attention is as in
-- lua/models/llama.lua.
--
--   local deepseek = require "models.deepseek"
--   local model = deepseek.load("path/to/folder", { device = "cpu" })
--
-- Attention is computed in the absorbed form, but in prefills that expand latents (see
-- Attention:expands). The cache holds one latent for a token and
-- layer, which all heads share: kv_lora_rank normed numbers, from which the matrices W_UK
-- and W_UV of a head would make its key and its value, and qk_rope_head_dim rotated ones.
-- Since q . (W_UK c) = (q W_UK) . c, a head's query is multiplied with W_UK in place of
-- all keys, and the sum of latents that attention returns is multiplied with W_UV in
-- place of all values. So attention is that of many query heads over one KV head, whose
-- keys have kv_lora_rank + qk_rope_head_dim numbers and whose values are the first of
-- these.
--
-- The published weights rotate neighbouring numbers (2i, 2i + 1). Loading reorders the
-- rows that make them, so that the attention can rotate (i, i + pairs); q . k stays the
-- same.
--
-- DeepSeek-V3.2 has an indexer, which scores tokens by small keys and queries of its own.
-- The model hands these to the attention, where the policy nsa reads them if its index is
-- "model" (docs/models.md); with any other policy they are not computed.
-- Source  DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3 Technical Report, arXiv:2412.19437;
--         DeepSeek-V3.2, arXiv:2512.02556; transformers 5.24
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local config = require "models.config"
local experts = require "models.experts"
local fields = require "models.fields"
local kv = require "kvlab"
local llama = require "models.llama"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local rope = require "models.rope"

local linear = kv.ops.linear
local parts, refuse, stack = llama.parts, fields.refuse, checkpoint.stack
local M = {}

local LATENT_EPS = 1e-6 -- of the norms of latents, whatever the config's rms_norm_eps is
local KEY_MAX = 576     -- numbers of a key that the kernels of attention take

-- ---- config ---------------------------------------------------------------------------

-- count: routed experts unless the config says how many; in_pairs: neighbouring numbers
-- are rotated, whatever the config says; dense: layers without experts.
local VARIANTS = {
  deepseek_v2 = { count = 64, in_pairs = true },
  deepseek_v3 = { count = 256, is_sigmoid = true },
  deepseek_v32 = { count = 256, is_sigmoid = true, in_pairs = true, has_index = true },
  glm4_moe_lite = { count = 64, is_sigmoid = true, dense = 1 },
}
local FAMILIES = { "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite" }

--- Refuses a field that contradicts the others.
local function expect_same(path, values, field, wanted, why)
  local given = values[field]
  if given and given ~= wanted then
    refuse(path, field, given, ("%s, %s"):format(tostring(wanted), why))
  end
end

--- Checks the fields that follow from others.
local function check_derived(path, values)
  local turned = values.qk_rope_head_dim
  expect_same(path, values, "head_dim", turned, "which is qk_rope_head_dim")
  expect_same(path, values, "qk_head_dim", values.qk_nope_head_dim + turned,
    "the sum of qk_nope_head_dim and qk_rope_head_dim")
  expect_same(path, values, "num_key_value_heads", values.num_attention_heads,
    "as many as num_attention_heads")
  if values.kv_lora_rank + turned > KEY_MAX then
    refuse(path, "kv_lora_rank", values.kv_lora_rank,
      ("at most %d: a key has qk_rope_head_dim = %d numbers besides, and %d at most")
        :format(KEY_MAX - turned, turned, KEY_MAX))
  end
  expect_same(path, values, "num_mtp_layers", values.num_nextn_predict_layers
    or values.num_mtp_layers, "that of num_nextn_predict_layers")
end

--- Which layers have experts, by layer from 0.
local function layers_of_experts(path, values, variant, layers)
  local types, is_in = values.mlp_layer_types, {}
  local dense = variant.dense or values.first_k_dense_replace
  if types and #types ~= layers then
    refuse(path, "mlp_layer_types", #types .. " entries",
      layers .. " entries, as many as num_hidden_layers")
  end
  for i = 0, layers - 1 do
    if types then is_in[i] = types[i + 1] == "sparse" else is_in[i] = i >= dense end
    local first = values.first_k_dense_replace
    if first and is_in[i] ~= (i >= first) then
      refuse(path, "first_k_dense_replace", first, "the dense layers of mlp_layer_types")
    end
  end
  return is_in
end

--- What a config says about the indexer.
local function index_of(path, values)
  if values.index_head_dim < values.qk_rope_head_dim then
    refuse(path, "index_head_dim", values.index_head_dim,
      ("at least qk_rope_head_dim, %d"):format(values.qk_rope_head_dim))
  end
  local heads, dim = values.index_n_heads, values.index_head_dim
  return { heads = heads, dim = dim, topk = values.index_topk,
           scale = heads ^ -0.5 * dim ^ -0.5 }
end

local function configure(file, context)
  local path = file.path
  local values = config.read(path, file.fields, FAMILIES)
  local variant = VARIANTS[values.model_type]
  check_derived(path, values)
  values.head_dim = 8 -- which sizes_of checks; it does not apply to heads of K and V here
  local c = parts.sizes_of(file, values, context)
  local nope, turned = values.qk_nope_head_dim, values.qk_rope_head_dim
  c.nope, c.turned, c.v_dim = nope, turned, values.v_head_dim
  c.q_rank, c.has_bias = values.q_lora_rank, values.attention_bias
  c.kv_heads, c.value_dim = 1, values.kv_lora_rank
  c.head_dim = c.value_dim + turned
  c.in_pairs = variant.in_pairs or values.rope_interleave or false
  c.predictors = values.num_nextn_predict_layers or values.num_mtp_layers or 0
  if variant.has_index then c.index = index_of(path, values) end
  local is_grouped = variant.is_sigmoid or values.topk_method == "group_limited_greedy"
  for _, name in ipairs(is_grouped and { "n_group", "topk_group" } or {}) do
    if not values[name] then refuse(path, name, nil, fields.COUNT[1]) end
  end
  c.experts = experts.config_shared(path, values, { is_sigmoid = variant.is_sigmoid,
    is_grouped = is_grouped, count = variant.count,
    is_in = layers_of_experts(path, values, variant, c.layers) })
  local factor
  local turn = parts.rotation(path, values, context)
  c.inv_freq, factor = rope.frequencies(turn, turned)
  c.turn_factor = math.sqrt(factor) -- of rotated numbers alone
  local _, table_name = rope.given(values)
  c.scale = (nope + turned) ^ -0.5
    * rope.scale_factor(("%s: %s"):format(path, table_name), turn)
  return c
end

-- ---- weights --------------------------------------------------------------------------

--- A matrix (or a bias) of `heads` heads with its rows in another order: those that
-- `order` lists, from 0. The last rows of each head, which are to be rotated, are
-- multiplied by the config's factor. Frees `weight`.
local function reorder(weight, order, heads, c)
  local n, device, dims = #order, weight.device, weight:dims()
  local out = weight:reshape { n, -1 }
    :gather_rows(kv.from(device, "i32", { n }, order))
  weight:free()
  if c.turn_factor ~= 1 then
    local each = n / heads
    local factors = kv.full(device, "f32", { each }, 1)
    factors:narrow(each - c.turned, c.turned):fill_(c.turn_factor)
    local rows = out:reshape { heads, each, -1 }
    rows:mul(factors:reshape { 1, each, 1 }:cast(out:type()), rows)
  end
  return out:reshape(dims)
end

--- The rows of a head's rotated part, in the order (i, i + pairs).
local function add_turned(order, first, c)
  for i = 0, c.turned - 1 do
    local half, pair = math.floor(2 * i / c.turned), i % (c.turned / 2)
    order[#order + 1] = first + (c.in_pairs and 2 * pair + half or i)
  end
end

--- The rows of q: of each head the part that is not rotated, and then the rotated one.
local function load_q(read, c, at)
  local order, dim, name = {}, c.nope + c.turned, c.q_rank and "q_b_proj" or "q_proj"
  for head = 0, c.heads - 1 do
    for i = 0, c.nope - 1 do order[#order + 1] = head * dim + i end
    add_turned(order, head * dim + c.nope, c)
  end
  local weight = read(("%s%s.weight"):format(at, name),
    { c.heads * dim, c.q_rank or c.hidden })
  return reorder(weight, order, c.heads, c)
end

--- Rows of the matrices that read x, or of their biases: of q's latent, if there is one,
-- of the latent of K and V, of the key's rotated part, and of the indexer, if there is
-- one: its key, and the weights of its heads.
local function load_latents(read, c, at, what, columns)
  local order = {}
  for i = 0, c.value_dim - 1 do order[i + 1] = i end
  add_turned(order, c.value_dim, c)
  local function get(name, shape)
    local weight = read(name, shape)
    return name:find("kv_a_proj", 1, true)
      and reorder(weight, order, 1, c) or weight
  end
  local index = c.index
  local names, rows = { at .. "kv_a_proj_with_mqa." .. what }, { c.head_dim }
  if c.q_rank then
    table.insert(names, 1, at .. "q_a_proj." .. what)
    table.insert(rows, 1, c.q_rank)
  end
  if index and what == "weight" then
    for i, name in ipairs { "wk", "weights_proj" } do
      names[#names + 1] = ("%sindexer.%s.weight"):format(at, name)
      rows[#rows + 1] = i == 1 and index.dim or index.heads
    end
  end
  local all = stack(get, names, rows, columns)
  if not index or what == "weight" then return all end
  local none = kv.zeros(all.device, all:type(), { index.dim + index.heads })
  return kv.cat({ all, none }, 0)
end

--- The indexer's weights: those of its queries are made of q's latent.
local function load_index(read, c, at, layer)
  local index, of = c.index, at .. "indexer."
  local wq = read(of .. "wq_b.weight", { index.heads * index.dim, c.q_rank })
  local norm = read(of .. "k_norm.weight", { index.dim }, "f32")
  local bias = read(of .. "k_norm.bias", { index.dim }, "f32")
  if c.turn_factor ~= 1 then -- of the first numbers, which are rotated
    local turned = kv.full(norm.device, "f32", { index.dim }, 1)
    turned:narrow(0, c.turned):fill_(c.turn_factor)
    norm:mul(turned, norm)
    bias:mul(turned, bias)
    local rows = wq:reshape { index.heads, index.dim, c.q_rank }
    rows:mul(turned:reshape { 1, index.dim, 1 }:cast(wq:type()), rows)
  end
  layer.index_norm, layer.index_bias, layer.index_q = norm, bias, wq
end

local function load_layer(read, c, i)
  local of_layer = ("model.layers.%d."):format(i)
  local at = of_layer .. "self_attn."
  local layer = {
    norm = read(of_layer .. "input_layernorm.weight", { c.hidden }),
    latents = load_latents(read, c, at, "weight", c.hidden),
    q = load_q(read, c, at),
    kv_norm = read(at .. "kv_a_layernorm.weight", { c.value_dim }),
    o = read(at .. "o_proj.weight", { c.hidden, c.heads * c.v_dim }),
    mlp_norm = read(of_layer .. "post_attention_layernorm.weight", { c.hidden }),
  }
  local both = read(at .. "kv_b_proj.weight",
    { c.heads * (c.nope + c.v_dim), c.value_dim })
  local by_head = both:reshape { c.heads, c.nope + c.v_dim, c.value_dim }
  layer.uk, layer.uv = by_head:narrow(0, c.nope, 1), by_head:narrow(c.nope, c.v_dim, 1)
  by_head:free()
  both:free()
  if c.q_rank then layer.q_norm = read(at .. "q_a_layernorm.weight", { c.q_rank }) end
  if c.has_bias then
    layer.latents_bias = load_latents(read, c, at, "bias")
    layer.o_bias = read(at .. "o_proj.bias", { c.hidden })
  end
  if c.index then load_index(read, c, at, layer) end
  if c.experts.is_in[i] then
    layer.experts = experts.load(read, of_layer, c)
  else
    layer.gate_up = stack(read, { of_layer .. "mlp.gate_proj.weight",
      of_layer .. "mlp.up_proj.weight" }, { c.inner, c.inner }, c.hidden)
    layer.down = read(of_layer .. "mlp.down_proj.weight", { c.hidden, c.inner })
  end
  return layer
end

---@class models.DeepSeek: models.Llama
local Model = setmetatable({ load_layer = load_layer }, { __index = parts.Model })
Model.__index = Model

--- Whether a tensor belongs to a layer that predicts further tokens (MTP), behind those
-- of the model. Such a layer has a projection of its own, eh_proj.
local function of_predictors(file, c)
  local is_predictor = {}
  for i = c.layers, c.layers + c.predictors - 1 do
    is_predictor[i] = file.has(("model.layers.%d.eh_proj.weight"):format(i))
  end
  return function(name)
    return is_predictor[tonumber(name:match "^model%.layers%.(%d+)%.")] or false
  end
end

local function build(c, o, file)
  local self = parts.load(c, o, file, Model)
  self.matrices, self.latents = {}, {}
  local rows = (c.q_rank or 0) + c.head_dim -- without those of the indexer
  for i, layer in pairs(self.layers) do
    self.matrices[i] = { keys = layer.uk, values = layer.uv }
    self.latents[i] = { weight = layer.latents:narrow(0, rows),
      bias = layer.latents_bias and layer.latents_bias:narrow(0, rows) }
  end
  if c.index then
    self.attention_options.index = { heads = c.index.heads, dim = c.index.dim }
  end
  return self
end

--- Loads a model: a folder (config.json and safetensors).
---@param name string
---@param o? table  device (--device's), dtype of weights and activations (bf16), context:
--                  see llama.load
---@return models.DeepSeek
function M.load(name, o)
  o = options.check("deepseek.load", o, parts.OPTIONS)
  local file = checkpoint.open(name)
  local c, unread = configure(file, o.context), file.unread
  function file.unread() return unread(of_predictors(file, c)) end
  return build(c, o, file)
end

--- A model of random weights, for what does not depend on them: time and memory.
---@param given table  the fields of a config.json
---@param o? table     device, dtype as for load, and seed (0)
---@return models.DeepSeek
function M.random(given, o)
  o = options.check("deepseek.random", o, parts.RANDOM)
  local file = checkpoint.random(given, o.seed or 0)
  return build(configure(file), o, file)
end

-- ---- what the engine asks of a family -------------------------------------------------

--- Numbers of each activation for one token.
function Model:buffers()
  local c = self.config
  local sizes = experts.buffers(c)
  sizes.x, sizes.h, sizes.gated = c.hidden, c.hidden, c.inner
  sizes.latents = (c.q_rank or 0) + c.head_dim
  -- by head: q before and after W_UK, and what is attended before and after W_UV
  sizes.q, sizes.absorbed = c.heads * (c.nope + c.turned), c.heads * c.head_dim
  sizes.attended, sizes.values = c.heads * c.value_dim, c.heads * c.v_dim
  if c.index then sizes.index_q = c.index.heads * c.index.dim end
  return sizes
end

--- Views and tensors of the indexer. Its keys are normed, and its weights used, in f32.
local function index_views(c, device, buffers, n, latents)
  local index, all = c.index, { unpack(latents) }
  local keys = kv.tensor(device, "f32", { n, index.dim })
  local weights = kv.tensor(device, "f32", { n, index.heads })
  local q = buffers.index_q:narrow(0, n)
  all[#all + 1], all[#all + 2] = keys, weights
  return { latents = all, keys = keys, weights = weights, q = q,
           given = { q = q:reshape { n, index.heads, index.dim }, k = keys,
                     weights = weights, scale = index.scale } }
end

--- Activations of a step of n tokens.
function Model:views(buffers, n)
  local c = self.config
  local function by_head(name, dim)
    return buffers[name]:narrow(0, n):reshape { n, c.heads, dim }
  end
  local sizes = c.q_rank and { c.q_rank, c.head_dim } or { c.head_dim }
  local s = {
    x = buffers.x:narrow(0, n), h = buffers.h:narrow(0, n),
    gated = buffers.gated:narrow(0, n),
    latents = parts.outputs(buffers.latents, n, sizes),
    q_rows = buffers.q:narrow(0, n), q = by_head("q", c.nope + c.turned),
    absorbed = by_head("absorbed", c.head_dim),
    attended = by_head("attended", c.value_dim), values = by_head("values", c.v_dim),
    values_rows = buffers.values:narrow(0, n),
    experts = experts.views(c, self.device, buffers, n),
  }
  s.q_latent, s.k_rows = c.q_rank and s.latents[1], s.latents[#s.latents]
  s.k = s.k_rows:reshape { n, 1, c.head_dim }
  if c.index then s.index = index_views(c, self.device, buffers, n, s.latents) end
  return s
end

--- The indexer's keys, queries and weights. x was multiplied for it with the latents'
-- matrix.
local function compute_index(w, s, index)
  linear(s.q_latent, w.index_q, index.q, "plain", w.q_norm, LATENT_EPS)
  kv.ops.layernorm(index.keys, w.index_norm, w.index_bias, LATENT_EPS, index.keys)
  return index.given
end

--- The attention of a layer, before its output projection, in s.values_rows.
local function attend(self, i, w, s, attention)
  local c, index = self.config, attention.reads_index and s.index or nil
  if index then
    linear(s.x, w.latents, index.latents, "plain", w.norm, c.eps, w.latents_bias)
  else -- without the rows that only the indexer reads
    local own = self.latents[i]
    linear(s.x, own.weight, s.latents, "plain", w.norm, c.eps, own.bias)
  end
  kv.ops.rmsnorm(s.k_rows, w.kv_norm, LATENT_EPS, s.k_rows) -- of the latent alone
  if c.q_rank then
    linear(s.q_latent, w.q, s.q_rows, "plain", w.q_norm, LATENT_EPS)
  else
    linear(s.x, w.q, s.q_rows, "plain", w.norm, c.eps)
  end
  index = index and compute_index(w, s, index)
  if attention:expands(self.matrices[i]) then
    attention:forward(i, s.q, s.k, nil, s.values, index, self.matrices[i])
    return
  end
  kv.ops.head_matmul(s.q, w.uk, s.absorbed)
  attention:forward(i, s.absorbed, s.k, nil, s.attended, index)
  kv.ops.head_matmul(s.attended, w.uv, s.values, true)
end

--- One layer, which adds to the residual s.x.
function Model:forward_layer(i, s, attention)
  local w = options.entry("forward_layer", "i", self.layers, i)
  attend(self, i, w, s, attention)
  parts.feed(self, w, s, s.values_rows)
end

arguments.functions(M, "deepseek", { load = { name = options.string },
                                     random = { given = options.table } })
local BUFFERS = options.like("buffers of a step", "x", "h", "latents", "absorbed")
local VIEWS = options.like("views of a step", "x", "h", "latents", "absorbed")
arguments.methods(Model, "a model", {
  views = { buffers = BUFFERS, n = options.count },
  forward_layer = { i = options.whole, s = VIEWS, attention = objects.attention },
})

return M
