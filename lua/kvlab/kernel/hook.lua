--- What a policy's expressions do inside of attention. bias, mask and log_weight become
-- a hook: code that changes the score of a query and a key before the softmax. It is
-- compiled into a GPU's attention kernel, and called by that of the CPU. What a policy
-- emits is computed from the scores that the softmax saw, which attention keeps then, and
-- from their log-sum-exp, without reading K again.
local kernel = require "kvlab.kernel.kernel"
local lua_attention = require "kvlab.kernel.lua_attention"
local place = require "kvlab.kernel.place"
local sorted = require "kvlab.sorted"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Hook  of an attached policy
local Hook = {}
Hook.__index = Hook

-- The scores are read in vectors and by lanes of a warp, which may end after the last.
local PAST_END = 32

local function new_scores(self, ctx, seqs, room)
  local count = seqs * self.shape.heads * room
  local memory = tensor.tensor(ctx.device, "f32", { count + PAST_END }):fill_(-math.huge)
  return { scores = memory:narrow(0, count):reshape { seqs, self.shape.heads, room },
           lse = tensor.tensor(ctx.device, "f32", { seqs, self.shape.heads }) }
end

--- Memory for the scores of a decode step and their log-sum-exp.
local function scores_of(self, ctx)
  local kept = self.kept[ctx.shape_number]
  if not kept then
    kept = tensor.lasting(new_scores, self, ctx, ctx.seqs, ctx.width * ctx.block_size)
    self.kept[ctx.shape_number] = kept
  end
  return kept
end

--- The rows of a tensor [rows of a step, …] that belong to a context, which may be a part
-- of the step, see memory/rows.lua.
local function part_of(t, ctx) return ctx.row and t:narrow(ctx.row, ctx.seqs) or t end

--- Gives a kernel the tensors of the policy that its expression reads.
local function give_inputs(one, owner, ctx)
  for _, name in ipairs(one.plan.inputs) do
    local t = owner[name]
    if tensor.is_tensor(t) then t = part_of(t, ctx) end
    local fits = tensor.is_tensor(t) and t:type() == "f32" and t.ndim == 3
      and t:size(0) == ctx.seqs and t:size(2) == ctx.width
      and (t:size(1) == 1 or t:size(1) == ctx.kv_heads)
    if not fits then
      error(("%s: the input %s is %s, expected a tensor f32 [%d, %d or 1, %d]"):format(
        one.plan.what, name, tostring(t), ctx.seqs, ctx.kv_heads, ctx.width), 0)
    end
    one:give("in_" .. name, t)
    one:set("heads_" .. name, t:size(1))
  end
  for _, x in ipairs(one.plan.consts) do one:give("const_" .. x.name, owner[x.name]) end
  one:set_params(owner)
  one:set("width", ctx.width)
  one:set("layer", ctx.layer)
end

-- Bytes of a hook's arguments, see kernels/hook.h.
local ARGUMENTS_MAX = 192

--- The hook's code for a dtype of queries and a phase. On the CPU all have the same.
local function code_for(self, dtype, is_prefill)
  local key = self.shape.device:is_cpu() and ""
    or dtype .. (is_prefill and " prefill" or "")
  local one = self.codes[key]
  if one then return one end
  local plan = place.hook(self.expressions, self.what, self.o)
  plan.q_dtype, plan.is_prefill = dtype, is_prefill
  plan.keeps = next(self.emits) ~= nil and not is_prefill
  if 8 * #place.arguments(plan) > ARGUMENTS_MAX then
    error(("%s: %d parameters, constants and inputs, expected at most %d"):format(
      plan.what, #place.arguments(plan) - 2, ARGUMENTS_MAX / 8 - 2), 0)
  end
  one = kernel.open(plan, self.shape.device)
  self.codes[key] = one
  return one
end

--- The kernels that are compiled so far, for people: the hook's, then those of what is
-- emitted.
---@return kvlab.Kernel[]
function Hook:kernels()
  local list = {}
  for _, key in ipairs(sorted.keys(self.codes)) do list[#list + 1] = self.codes[key] end
  for _, name in ipairs(sorted.keys(self.emits)) do list[#list + 1] = self.emits[name] end
  return list
end

--- Prepares the hook for a layer, and gives it to the arguments of attention.
function Hook:give(call, ctx)
  local one = code_for(self, ctx.query:type(), ctx.is_prefill)
  one.count = 0
  give_inputs(one, self.owner, ctx)
  call.hook, call.scores = one, nil
  if next(self.emits) and not ctx.is_prefill then
    call.scores = part_of(scores_of(self, ctx).scores, ctx)
  end
end

--- Attends with the hook, and computes what the policy emits.
---@param attention kvlab.Attention
---@param reader table  of a memory tier
---@param selection kvlab.Tensor|nil
---@param ctx kvlab.Context
function Hook:attend(attention, reader, selection, ctx, out, lse)
  local emits = next(self.emits) and not ctx.is_prefill
  local kept = emits and scores_of(self, ctx)
  if emits then lse = lse or kept.lse end
  for name in pairs(self.emits) do self.owner.emitted[name] = nil end
  attention.hook = self
  local ok, result = pcall(reader.attend, reader, attention, selection, ctx, out, lse)
  attention.hook = nil -- also after an error, or attention:direct would have it
  if not ok then error(result, 0) end
  out = result
  if emits then
    for name, one in pairs(self.emits) do
      self.owner.emitted[name] = self:emit(one, selection, ctx, lse,
        attention.call.window or 0)
    end
  end
  return out
end

--- What the policy emits of a layer that it has no part in: zeros.
function Hook:emit_nothing(ctx)
  for name in pairs(ctx.is_prefill and {} or self.emits) do
    self.owner.emitted[name] = ctx:new_scores():fill_(0)
  end
end

--- What one expression makes of the weights: f32 [seqs, kv_heads, width], 0 for blocks
-- that were not selected. It belongs to the policy until the layer is over.
function Hook:emit(one, selection, ctx, lse, window)
  local out = ctx:new_scores()
  if selection then out:fill_(0) end
  one.count = 0
  give_inputs(one, self.owner, ctx)
  one:give("selection", selection)
  one:give("lens", ctx.lens)
  one:give("scores", scores_of(self, ctx).scores)
  one:give("lse", lse)
  one:give("out", out)
  one:set("seqs", ctx.seqs)
  one:set("kv_heads", ctx.kv_heads)
  one:set("entries", selection and selection:size(2) or ctx.width)
  one:set("selection_heads", selection and selection:size(1) or 1)
  one:set("window", window)
  one.grid.x = math.ceil((selection and selection:size(2) or ctx.width) / one.teams)
  one.grid.y = ctx.seqs * ctx.kv_heads
  one:launch()
  return out
end

--- Whether the hook runs in plain Lua, and so the whole op does.
function M.is_in_lua(one) return one ~= nil and one.run ~= false end

--- The op paged_attention in plain Lua, with the arguments `call`.
M.attend_in_lua = lua_attention.attend

--- Checks what a definition says of attention: bias, mask, log_weight, emit. Returns
-- whether it says anything.
---@param numbers table<string, boolean>  the options that are numbers
function M.check(def, numbers)
  local what = "policy " .. def.name
  if not place.check_attention(def, what) then return false end
  for _, name in ipairs { "bias", "mask", "log_weight" } do
    if def[name] then kernel.check_params(def[name], what .. ": " .. name, numbers) end
  end
  for name, x in pairs(def.emit or {}) do
    kernel.check_params(x, what .. ": emit." .. name, numbers)
  end
  return true
end

--- Makes the hook of a policy that was attached to a shape, if its definition says
-- anything about attention.
---@param self table   the policy
---@param shape table  as init gets it
function M.attach(self, shape)
  local expressions = self.expressions.attention
  if not expressions then return end
  local what = "policy " .. self.name
  local o = kernel.options_of(self, shape, what)
  local hook = setmetatable({ owner = self, shape = shape, what = what, o = o,
    expressions = expressions, codes = {}, kept = {}, emits = {} }, Hook)
  for _, name in ipairs(sorted.keys(expressions.emit or {})) do
    hook.emits[name] = kernel.open(place.emit(name, expressions.emit[name], what, o),
      shape.device)
  end
  -- most likely queries have the dtype of the cache; other code is made when it is needed
  local dtype = shape.dtype == "f8e4m3" and "bf16" or shape.dtype
  if self.decode then code_for(hook, dtype, false) end
  if self.prefill then code_for(hook, dtype, true) end
  self.hook, self.emitted = hook, {}
end

return M
