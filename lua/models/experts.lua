--- A layer of experts, as Mixtral and Qwen3-MoE have in place of one MLP. A router gives
-- every expert a probability; the best `active` of them compute, and their results are
-- added with these weights.
--
-- A step must not wait for the device, which alone knows what the router chose. So every
-- expert computes every token, and those that were not chosen get the weight 0. This
-- costs `count` / `active` times the arithmetic of the chosen ones, and each step reads
-- the weights of all experts. Experts stand in groups, whose matrices are one: a product
-- for gate, one for up, and one for down that adds the experts of the group, too.
-- Source  Jiang et al. 2024, arXiv:2401.04088; Qwen3 Technical Report, arXiv:2505.09388
local fields = require "models.fields"
local kv = require "kvlab"

local C, check, refuse = kv.C, kv.check, fields.refuse
local M = {}

local WIDTH = 8192 -- rows of a group's matrix, and numbers of an activation, at most

--- How many experts a layer has: the field has two names.
local function count_of(path, values, default)
  local a, b = values.num_local_experts, values.num_experts
  if a and b and a ~= b then
    refuse(path, "num_experts", b, ("that of num_local_experts, %d"):format(a))
  end
  return a or b or default
end

--- What a config says about experts.
---@param path string      where it stands, for errors
---@param values table     as config.read gave them
---@param c table          the family's config, with layers, hidden and inner
---@param is_stacked? any  the matrices of a layer's experts are one tensor, as in GGUF
---@return table   # count, active, inner; group: experts of a group; is_normed: the
--                  weights of the chosen ones sum to 1; is_in: by layer from 0, whether
--                  it has experts
function M.config(path, values, c, is_stacked)
  local is_mixtral = values.model_type == "mixtral"
  local x = { is_mixtral = is_mixtral, is_stacked = is_stacked and true or false,
    count = count_of(path, values, is_mixtral and 8 or 128),
    active = values.num_experts_per_tok,
    inner = is_mixtral and c.inner or values.moe_intermediate_size,
    is_normed = is_mixtral or values.norm_topk_prob, is_in = {} }
  if x.active > x.count then
    refuse(path, "num_experts_per_tok", x.active, ("at most %d, the %s"):format(x.count,
      values.num_local_experts and "num_local_experts" or "num_experts"))
  end
  x.group = x.count
  while x.group > 1 and (x.group * x.inner > WIDTH or x.count % x.group > 0) do
    x.group = x.group - 1
  end
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

--- The matrices of the experts of a layer, a tensor for each group: of gate and up their
-- rows, one expert below the other; of down their columns, side by side.
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
---@param read fun(name: string, shape: integer[]): kvlab.Tensor
---@param at string  what their names begin with
function M.load(read, at, c)
  local x = c.experts
  local router = x.is_mixtral and not x.is_stacked and "block_sparse_moe.gate.weight"
    or "mlp.gate.weight"
  return { config = x, router = read(at .. router, { x.count, c.hidden }),
           gate = read_groups(read, x, at, "gate", x.inner, c.hidden),
           up = read_groups(read, x, at, "up", x.inner, c.hidden),
           down = read_groups(read, x, at, "down", c.hidden, x.inner) }
end

--- Bytes of the weights, all of which a step reads.
function M.bytes_read(w)
  return w.router:bytes() + 3 * #w.gate * w.gate[1]:bytes()
end

--- Numbers of each activation for one token.
function M.buffers(c)
  local x = c.experts
  return { expert_gate = x.group * x.inner, expert_up = x.group * x.inner,
           expert_out = c.hidden, routed = x.count }
end

--- Activations of a step of n tokens. What the router computes with is f32.
function M.views(c, device, buffers, n)
  local x = c.experts
  local function of(dtype, ...) return kv.tensor(device, dtype, { ... }) end
  local dtype, groups = buffers.routed:type(), x.count / x.group
  local s = {
    gate = buffers.expert_gate:narrow(0, n), up = buffers.expert_up:narrow(0, n),
    out = buffers.expert_out:narrow(0, n), routed = buffers.routed:narrow(0, n),
    scores = of("f32", n, x.count), best = of("f32", n, x.active),
    which = of("i32", n, x.active), sum = of("f32", n),
    weights = of("f32", n, x.count), by_group = of(dtype, groups, n, x.group),
    column = {},
  }
  s.sum_column = s.sum:reshape { n, 1 }
  s.of_group = s.routed:reshape { n, groups, x.group }
  s.each = s.gate:reshape { n, x.group, x.inner }
  for g = 1, groups do s.column[g] = s.by_group:index(g - 1):reshape { n, x.group, 1 } end
  return s
end

--- The weight of every expert for every token, in s.column.
local function route(w, h, s)
  local x = w.config
  h:matmul_t(w.router, s.routed)
  s.routed:cast("f32", s.scores)
  s.scores:softmax(1, s.scores)
  check(C.kvl_topk(s.scores, C.KVL_TOPK_LARGEST, s.best, s.which))
  if x.is_normed then
    s.best:sum(1, s.sum)
    s.best:div(s.sum_column, s.best)
  end
  s.weights:fill_(0)
  s.weights:scatter_(s.which, s.best)
  s.weights:cast(s.routed:type(), s.routed)
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
end

return M
