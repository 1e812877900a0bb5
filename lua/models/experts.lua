--- A layer of experts, as Mixtral, Qwen3-MoE and DeepSeek have in place of one MLP. A
-- router (lua/models/router.lua) chooses `active` of them for each token, and their
-- results are added with its weights. Shared experts, which DeepSeek has beside them,
-- compute every token. In a step of few tokens they are further experts that every token
-- chooses; with many tokens, products of their own are faster.
--
-- A step must not wait for the device, which alone knows what the router chose. So one op
-- (kv.ops.experts) sorts the tokens by expert and multiplies them on the device, and
-- reads only the weights of the experts that some token chose.
-- Source  Jiang et al. 2024, arXiv:2401.04088; Qwen3 Technical Report, arXiv:2505.09388
local fields = require "models.fields"
local kv = require "kvlab"
local router = require "models.router"

local refuse = fields.refuse
local M = {}

local MOST = 4096 -- experts of a layer, as kernels have room for
local FEW = 64    -- tokens, up to which shared experts are chosen like others

--- How many experts a layer has: the field has several names.
local function count_of(path, values, default)
  local count, first
  for _, name in ipairs { "n_routed_experts", "num_local_experts", "num_experts" } do
    local given = values[name]
    if given and count and given ~= count then
      refuse(path, name, given, ("that of %s, %d"):format(first, count))
    elseif given and not count then
      count, first = given, name
    end
  end
  return count or default, first or "num_experts"
end

--- Checks the numbers of experts.
---@param name string  of the field that says how many there are
local function complete(path, x, name)
  if x.active > x.count then
    refuse(path, "num_experts_per_tok", x.active, ("at most %d, the %s"):format(x.count,
      name))
  elseif x.count + x.shared > MOST then
    refuse(path, name, x.count, ("at most %d"):format(MOST - x.shared))
  end
  return x
end

--- What a config of Mixtral or Qwen3-MoE says about experts.
---@param path string      where it stands, for errors
---@param values table     as config.read gave them
---@param c table          the family's config, with layers, hidden and inner
---@param is_stacked? any  the matrices of a layer's experts are one tensor, as in GGUF
---@return table   # count, active, inner; shared: how many shared ones; is_normed: the
--                  weights of the chosen ones sum to 1; is_in: by layer from 0, whether
--                  it has experts
function M.config(path, values, c, is_stacked)
  local is_mixtral = values.model_type == "mixtral"
  local count, name = count_of(path, values, is_mixtral and 8 or 128)
  local x = complete(path, { is_mixtral = is_mixtral, count = count, shared = 0,
    is_stacked = is_stacked and true or false, active = values.num_experts_per_tok,
    inner = is_mixtral and c.inner or values.moe_intermediate_size,
    is_normed = is_mixtral or values.norm_topk_prob, is_in = {} }, name)
  local every, dense = values.decoder_sparse_step or 1, {}
  for _, layer in ipairs(values.mlp_only_layers or {}) do
    if layer >= c.layers then
      refuse(path, "mlp_only_layers", layer, ("layers 0 ... %d"):format(c.layers - 1))
    end
    dense[layer] = true
  end
  for i = 0, c.layers - 1 do x.is_in[i] = not dense[i] and (i + 1) % every == 0 end
  return x
end

--- What a config of DeepSeek or GLM says about experts.
---@param path string
---@param values table
---@param o table  is_sigmoid, is_grouped: the router's; count: experts unless the config
--                 says how many; is_in: by layer from 0, whether it has experts
---@return table   # as config returns it
function M.config_shared(path, values, o)
  local count, name = count_of(path, values, o.count)
  local x = complete(path, { count = count, active = values.num_experts_per_tok,
    inner = values.moe_intermediate_size, is_normed = values.norm_topk_prob,
    is_sigmoid = o.is_sigmoid, is_exact = true, is_in = o.is_in,
    shared = values.n_shared_experts,
    factor = values.routed_scaling_factor ~= 1 and values.routed_scaling_factor
      or nil }, name)
  if o.is_grouped then
    router.check_groups(path, values, x, o.is_sigmoid and 2 or 1)
  end
  return x
end

--- The names of the matrices of one expert, or of all, below a layer's `at`.
local function names(x, at, e)
  if x.is_mixtral and not x.is_stacked then
    local of = ("%sblock_sparse_moe.experts.%d."):format(at, e)
    return { gate = of .. "w1.weight", up = of .. "w3.weight", down = of .. "w2.weight" }
  end
  local of = x.is_stacked and at .. "mlp.experts."
    or ("%smlp.experts.%d."):format(at, e)
  return { gate = of .. "gate_proj.weight", up = of .. "up_proj.weight",
           down = of .. "down_proj.weight" }
end

--- The matrices of all experts: gate_up [count + shared, 2 * inner, hidden] and down
-- [count + shared, hidden, inner].
local function read_experts(read, x, at, hidden)
  local shapes = { gate = { x.inner, hidden }, up = { x.inner, hidden },
                   down = { hidden, x.inner } }
  local stacked, w, all = {}, {}, x.count + x.shared
  local function part(e, name)
    local shape = shapes[name]
    if not x.is_stacked then return read(names(x, at, e)[name], shape) end
    stacked[name] = stacked[name]
      or read(names(x, at)[name], { x.count, shape[1], shape[2] })
    return stacked[name]:index(e)
  end
  for e = 0, x.count - 1 do
    for i, name in ipairs { "gate", "up", "down" } do
      local one = part(e, name)
      if not w.down then
        w.gate_up = kv.tensor(one.device, one:type(), { all, 2 * x.inner, hidden })
        w.down = kv.tensor(one.device, one:type(), { all, hidden, x.inner })
      end
      local to = name == "down" and w.down:index(e)
        or w.gate_up:index(e):narrow((i - 1) * x.inner, x.inner)
      to:copy_(one)
      if not x.is_stacked then one:free() end
    end
  end
  for _, whole in pairs(stacked) do whole:free() end
  return w
end

--- Shared experts are stored as one MLP. Each takes its part of that.
local function read_shared(read, w, x, at, hidden)
  local width, inner, parts = x.shared * x.inner, x.inner, {}
  local shapes = { gate = { width, hidden }, up = { width, hidden },
                   down = { hidden, width } }
  for name, shape in pairs(shapes) do
    parts[name] = read(("%smlp.shared_experts.%s_proj.weight"):format(at, name), shape)
  end
  for e = 0, x.shared - 1 do
    local to = w.gate_up:index(x.count + e)
    to:narrow(0, inner):copy_(parts.gate:narrow(e * inner, inner))
    to:narrow(inner, inner):copy_(parts.up:narrow(e * inner, inner))
    w.down:index(x.count + e):copy_(parts.down:narrow(e * inner, inner, 1))
  end
  for _, part in pairs(parts) do part:free() end
end

--- Reads the weights of a layer.
---@param read fun(name: string, shape: integer[], dtype?: string): kvlab.Tensor
---@param at string  what their names begin with
function M.load(read, at, c)
  local x = c.experts
  local gate = x.is_mixtral and not x.is_stacked and "block_sparse_moe.gate."
    or "mlp.gate."
  local w = read_experts(read, x, at, c.hidden)
  w.config, w.router = x, read(at .. gate .. "weight", { x.count, c.hidden })
  if x.is_sigmoid then
    w.bias = read(at .. gate .. "e_score_correction_bias", { x.count }, "f32")
  end
  if x.shared > 0 then read_shared(read, w, x, at, c.hidden) end
  w.routed = { gate_up = w.gate_up:narrow(0, x.count), down = w.down:narrow(0, x.count) }
  w.shared = {}
  for e = 1, x.shared do
    w.shared[e] = { gate_up = w.gate_up:index(x.count + e - 1),
                    down = w.down:index(x.count + e - 1) }
  end
  return w
end

--- Bytes of the weights that a step of `rows` tokens reads, if each of them chooses any
-- expert as often as any other.
function M.bytes_read(w, rows)
  local x = w.config
  local read = x.count * (1 - (1 - x.active / x.count) ^ rows) + x.shared -- experts
  local bytes = w.router:bytes() + (w.bias and w.bias:bytes() or 0)
  return bytes + read / (x.count + x.shared) * (w.gate_up:bytes() + w.down:bytes())
end

--- Numbers of each activation for one token.
function M.buffers(c)
  local x = c.experts
  return { routed = x.count, expert_shared = x.shared > 0 and x.inner or nil }
end

--- Activations of a step of n tokens.
function M.views(c, device, buffers, n)
  local x = c.experts
  local joins = n <= FEW
  return { shared = not joins and x.shared > 0 and buffers.expert_shared:narrow(0, n),
           router = router.views(x, device, buffers.routed:narrow(0, n), n,
             joins and x.shared or 0) }
end

--- out += the experts' results for h [n, hidden].
function M.forward(w, h, s, out)
  local which, weights = router.route(w, h, s.router)
  local of = s.shared and w.routed or w
  kv.ops.experts(h, which, weights, of.gate_up, of.down, out, "add")
  if not s.shared then return end
  for _, one in ipairs(w.shared) do
    kv.ops.linear(h, one.gate_up, s.shared, "swiglu")
    kv.ops.linear(s.shared, one.down, out, "add")
  end
end

return M
