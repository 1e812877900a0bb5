--- A layer of experts, as Mixtral, Qwen3-MoE and DeepSeek have in place of one MLP. A
-- router (lua/models/router.lua) chooses `active` of them for each token, and their
-- results are added with its weights. Shared experts, which DeepSeek has beside them,
-- compute every token; together they are one MLP.
--
-- A step must not wait for the device, which alone knows what the router chose. So every
-- expert computes every token, and those that were not chosen get the weight 0. This
-- costs `count` / `active` times the arithmetic of the chosen ones, and each step reads
-- the weights of all experts. Experts stand in groups, whose matrices are one: a product
-- for gate, one for up, and one for down that adds the experts of the group, too.
-- Source  Jiang et al. 2024, arXiv:2401.04088; Qwen3 Technical Report, arXiv:2505.09388
local checkpoint = require "models.checkpoint"
local fields = require "models.fields"
local kv = require "kvlab"
local router = require "models.router"

local refuse = fields.refuse
local M = {}

local WIDTH = 8192 -- rows of a group's matrix, and numbers of an activation, at most

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

--- Completes x, whose count, active and inner are known: how many experts form a group.
---@param name string  of the field that says how many there are
local function complete(path, x, name)
  if x.active > x.count then
    refuse(path, "num_experts_per_tok", x.active, ("at most %d, the %s"):format(x.count,
      name))
  end
  x.group = x.count
  while x.group > 1 and (x.group * x.inner > WIDTH or x.count % x.group > 0) do
    x.group = x.group - 1
  end
  return x
end

--- What a config of Mixtral or Qwen3-MoE says about experts.
---@param path string      where it stands, for errors
---@param values table     as config.read gave them
---@param c table          the family's config, with layers, hidden and inner
---@param is_stacked? any  the matrices of a layer's experts are one tensor, as in GGUF
---@return table   # count, active, inner; group: experts of a group; is_normed: the
--                  weights of the chosen ones sum to 1; is_in: by layer from 0, whether
--                  it has experts
function M.config(path, values, c, is_stacked)
  local is_mixtral = values.model_type == "mixtral"
  local count, name = count_of(path, values, is_mixtral and 8 or 128)
  local x = complete(path, { is_mixtral = is_mixtral, count = count,
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
---@return table   # as config returns it, and shared: the width of the shared experts
function M.config_shared(path, values, o)
  local count, name = count_of(path, values, o.count)
  local x = complete(path, { count = count, active = values.num_experts_per_tok,
    inner = values.moe_intermediate_size, is_normed = values.norm_topk_prob,
    is_sigmoid = o.is_sigmoid, is_exact = true, is_in = o.is_in,
    shared = values.n_shared_experts * values.moe_intermediate_size,
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

--- One matrix of each expert of a group, [group, rows, columns].
local function read_group(read, x, at, part, first, rows, columns)
  local all
  for e = 0, x.group - 1 do
    local one = read(names(x, at, first + e)[part], { rows, columns })
    all = all or kv.tensor(one.device, one:type(), { x.group, rows, columns })
    all:index(e):copy_(one)
    one:free()
  end
  return all
end

--- The matrices of the experts of a layer, a tensor for each group: for gate and up their
-- rows, one expert below the other; for down their columns, side by side.
local function read_groups(read, x, at, part, rows, columns)
  local list = {}
  local stacked = x.is_stacked and read(names(x, at)[part], { x.count, rows, columns })
  for first = 0, x.count - 1, x.group do
    local group = stacked and stacked:narrow(first, x.group)
      or read_group(read, x, at, part, first, rows, columns)
    if part == "down" then
      list[#list + 1] = group:transpose(0, 1):reshape { rows, x.group * columns }
      if not stacked then group:free() end
    else
      list[#list + 1] = group:reshape { x.group * rows, columns }
    end
  end
  if stacked and part == "down" then stacked:free() end
  return list
end

--- Reads the weights of a layer.
---@param read fun(name: string, shape: integer[], dtype?: string): kvlab.Tensor
---@param at string  what their names begin with
function M.load(read, at, c)
  local x = c.experts
  local gate = x.is_mixtral and not x.is_stacked and "block_sparse_moe.gate."
    or "mlp.gate."
  local w = { config = x, router = read(at .. gate .. "weight", { x.count, c.hidden }),
              gate = read_groups(read, x, at, "gate", x.inner, c.hidden),
              up = read_groups(read, x, at, "up", x.inner, c.hidden),
              down = read_groups(read, x, at, "down", c.hidden, x.inner) }
  if x.is_sigmoid then
    w.bias = read(at .. gate .. "e_score_correction_bias", { x.count }, "f32")
      :reshape { 1, x.count }
  end
  if x.shared then
    local of = at .. "mlp.shared_experts."
    w.shared_gate_up = checkpoint.stack(read, { of .. "gate_proj.weight",
      of .. "up_proj.weight" }, { x.shared, x.shared }, c.hidden)
    w.shared_down = read(of .. "down_proj.weight", { c.hidden, x.shared })
  end
  return w
end

--- Bytes of the weights, all of which a step reads.
function M.bytes_read(w)
  local bytes = w.router:bytes() + 3 * #w.gate * w.gate[1]:bytes()
  if w.bias then bytes = bytes + w.bias:bytes() end
  if w.shared_down then
    bytes = bytes + w.shared_gate_up:bytes() + w.shared_down:bytes()
  end
  return bytes
end

--- Numbers of each activation for one token.
function M.buffers(c)
  local x = c.experts
  return { expert_gate = x.group * x.inner, expert_up = x.group * x.inner,
           expert_out = c.hidden, routed = x.count, expert_shared = x.shared }
end

--- Activations of a step of n tokens.
function M.views(c, device, buffers, n)
  local x = c.experts
  local routed, groups = buffers.routed:narrow(0, n), x.count / x.group
  local by_group = kv.tensor(device, routed:type(), { groups, n, x.group })
  local s = {
    gate = buffers.expert_gate:narrow(0, n), up = buffers.expert_up:narrow(0, n),
    out = buffers.expert_out:narrow(0, n), routed = routed, by_group = by_group,
    shared = x.shared and buffers.expert_shared:narrow(0, n),
    router = router.views(x, device, routed, n), column = {},
  }
  s.of_group = routed:reshape { n, groups, x.group }
  s.each = s.gate:reshape { n, x.group, x.inner }
  for g = 1, groups do s.column[g] = by_group:index(g - 1):reshape { n, x.group, 1 } end
  return s
end

--- The weight of every expert for every token, in s.column.
local function route(w, h, s)
  router.route(w.config, w, h, s.router)
  s.router.weights:cast(s.routed:type(), s.routed)
  s.of_group:transpose(0, 1, s.by_group)
end

--- out = the experts' results for h [n, hidden].
function M.forward(w, h, s, out)
  route(w, h, s)
  for g = 1, #w.gate do
    h:matmul_t(w.gate[g], s.gate)
    h:matmul_t(w.up[g], s.up)
    kv.ops.silu_mul(s.gate, s.up, s.gate)
    s.each:mul(s.column[g], s.each)
    if g == 1 then
      s.gate:matmul_t(w.down[g], out)
    else
      s.gate:matmul_t(w.down[g], s.out)
      out:add(s.out, out)
    end
  end
  if not w.shared_down then return end
  kv.ops.linear(h, w.shared_gate_up, s.shared, "swiglu")
  kv.ops.linear(s.shared, w.shared_down, out, "add")
end

return M
