--- What a policy's expressions do inside of attention. bias, mask and log_weight become
-- a hook: code that changes the score of a query and a key before the softmax. It is
-- compiled into a GPU's attention kernel, and called by that of the CPU. What a policy
-- emits in a decode step is computed from the scores that the softmax saw, and from their
-- log-sum-exp, without reading K again; attention stores the scores for this. A prefill
-- has too many scores to store, so they are computed again from q and K.
local expression = require "kvlab.kernel.expression.expression"
local kernel = require "kvlab.kernel.run.kernel"
local place = require "kvlab.kernel.expression.place"
local sorted = require "kvlab.sorted"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Hook  of an attached policy
local Hook = {}
Hook.__index = Hook

-- The scores are read in vectors and by lanes of a warp, which may read past the last
-- score.
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

local function view_of(buffer, seqs, heads, tokens)
  return buffer:narrow(0, seqs * heads * tokens):reshape { seqs, heads, tokens }
end

--- Memory for what is emitted by token under a name: f32 [seqs, kv_heads, width *
-- block_size]. There is a view for each shape of a step, because graphs write to these
-- views.
local function cells_of(self, name, ctx)
  local kept = self.cells[name]
  local view = kept[ctx.shape_number]
  if view then return view end
  local tokens = ctx.width * self.shape.block_size
  local count = ctx.seqs * ctx.kv_heads * tokens
  if not kept.buffer or kept.buffer.count < count then
    local old = kept.buffer and tonumber(kept.buffer.count) or 0
    kept.buffer = tensor.lasting(tensor.tensor, ctx.device, "f32",
      { math.max(count, 2 * old) }) -- the views of the old buffer keep it
  end
  view = tensor.lasting(view_of, kept.buffer, ctx.seqs, ctx.kv_heads, tokens)
  kept[ctx.shape_number] = view
  return view
end

--- The number that is emitted under a name where nothing is read, and a tensor for the
-- results: by token, or a tensor of scores. It belongs to the policy until the layer is
-- over.
local function new_emitted(self, name, ctx)
  local root = self.emits[name].plan.roots[1]
  return root.by_token and cells_of(self, name, ctx) or ctx:new_scores(),
    place.NOTHING[root.join]
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
  one:give_consts(owner)
  one:set_params(owner)
  one:set("width", ctx.width)
  one:set("layer", ctx.layer)
end

-- Bytes of a hook's arguments, see kernels/hook.h.
local ARGUMENTS_MAX = 192

--- The hook's code for a dtype of queries, a phase and a source of keys: blocks, or
-- listed tokens. On the CPU all of these have the same code. nil: nothing is changed and
-- no scores are stored.
local function code_for(self, dtype, is_prefill, is_listed)
  if is_prefill and not self.changes then return nil end
  local key = self.shape.device:is_cpu() and ""
    or dtype .. (is_prefill and " prefill" or "") .. (is_listed and " listed" or "")
  local one = self.codes[key]
  if one then return one end
  local plan = place.hook(self.expressions, self.what, self.o)
  plan.q_dtype, plan.is_prefill, plan.is_listed = dtype, is_prefill, is_listed
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
  list[#list + 1] = self.prompt
  return list
end

--- Prepares the hook for a layer. Returns its kernel, and the memory where attention
-- stores the scores; nil if there is no hook. is_listed: attention reads listed tokens.
function Hook:prepare(ctx, is_listed)
  -- on a GPU, the kernels of prompts attend to draft trees
  local as_prompt = ctx.is_prefill or ctx.tree ~= nil and not self.shape.device:is_cpu()
  local one = code_for(self, ctx.query:type(), as_prompt, is_listed)
  if not one then return nil, nil end
  one.count = 0
  give_inputs(one, self.owner, ctx)
  if ctx.is_prefill or not next(self.emits) then return one, nil end
  return one, part_of(scores_of(self, ctx).scores, ctx)
end

--- Attends with the hook in a decode step, and computes what the policy emits.
---@param attention kvlab.Attention
---@param reader table  of a memory tier
---@param selection kvlab.Tensor|nil
---@param ctx kvlab.Context
function Hook:attend(attention, reader, selection, ctx, out, lse)
  if next(self.emits) then lse = lse or scores_of(self, ctx).lse end
  self:forget()
  out = reader:attend(attention, selection, ctx, out, lse, self)
  for name in pairs(self.emits) do
    self.owner.emitted[name] = self:emit(name, selection, ctx, lse)
  end
  return out
end

--- Tokens that the coming attention does not read have no weight in what is emitted, even
-- where a selection or a list names their block: the scores of earlier steps are
-- dropped.
function Hook:forget_scores(ctx)
  if next(self.emits) then scores_of(self, ctx).scores:fill_(-math.huge) end
end

--- The same over listed tokens, whose K and V are on the device. What the policy emits
-- counts a token once, even where it is listed twice.
function Hook:attend_listed(attention, ctx, listed, out, lse)
  if next(self.emits) then lse = lse or scores_of(self, ctx).lse end
  self:forget_scores(ctx)
  self:forget()
  out = attention:attend_part(ctx, self, ctx.cache, nil, nil, out, lse, nil, nil, nil,
    listed)
  for name in pairs(self.emits) do
    self.owner.emitted[name] = self:emit(name, nil, ctx, lse)
  end
  return out
end

--- Bytes that the hook and `emit` read for each attended block and KV head: the policy's
-- inputs, and for each emitted number the stored scores.
function Hook:bytes_block()
  local shape, _, one = self.shape, next(self.codes)
  local numbers = one and #one.plan.inputs or 0
  for _, emit in pairs(self.emits) do
    numbers = numbers + #emit.plan.inputs
      + shape.block_size * shape.heads / shape.kv_heads
  end
  return 4 * numbers
end

--- Drops what was emitted.
function Hook:forget()
  for name in pairs(self.emits) do self.owner.emitted[name] = nil end
end

--- Whether the policy emits in a step of this phase.
local function is_emitting(self, is_prefill)
  if is_prefill then return self.prompt ~= nil end
  return next(self.emits) ~= nil
end

--- What the policy emits in a layer where it takes no part: the same as if nothing were
-- read.
function Hook:emit_nothing(ctx)
  if not is_emitting(self, ctx.is_prefill) then return end
  for name in pairs(self.emits) do
    local out, nothing = new_emitted(self, name, ctx)
    self.owner.emitted[name] = out:fill_(nothing)
  end
end

-- ---- in a prefill ---------------------------------------------------------------------

--- The log-sum-exp of a chunk's queries, f32 [tokens, heads].
local function lse_of(self, ctx)
  local tokens, heads = ctx.query:size(0), self.shape.heads
  local memory = self.prompt_lse
  if not memory or memory.count < tokens * heads then
    memory = tensor.lasting(tensor.tensor, ctx.device, "f32", { tokens * heads })
    self.prompt_lse = memory
  end
  return memory:narrow(0, tokens * heads):reshape { tokens, heads }
end

--- Attends in a prefill step, and computes what policies emit of it. hook: of the policy
-- that selects, or nil. emitters: the hooks of the policies that emit.
---@param hook kvlab.Hook|nil
---@param emitters kvlab.Hook[]
function M.attend_in_prefill(hook, emitters, attention, reader, selection, ctx, out, lse)
  lse = lse or lse_of(emitters[1], ctx)
  for _, one in ipairs(emitters) do one:begin_prompt(ctx) end
  out = reader:attend(attention, selection, ctx, out, lse, hook, emitters)
  for _, one in ipairs(emitters) do one:end_prompt() end
  return out
end

--- Sets the kernel's arguments that are the same for all parts of memory in which the
-- layer's K lies.
function Hook:begin_prompt(ctx)
  local one = self.prompt
  self:forget()
  for name in pairs(self.emits) do
    local out, nothing = new_emitted(self, name, ctx)
    self.sums[name] = out:fill_(nothing)
  end
  one:set("q_dtype", ctx.query.dtype)
  one:set("seqs", ctx.seqs)
  one:set("kv_heads", ctx.kv_heads)
  one:set("window", ctx.window or 0)
  one:set_float("scale", ctx.scale)
  one:set_float("soft_cap", ctx.soft_cap or 0)
end

--- Adds the blocks that lie in `memory`: those of a selection (nil: all), where the
-- tables or `slots` say, as attention:attend_slots takes them. lse: of the whole
-- attention.
function Hook:add_part(ctx, lse, memory, selection, slots)
  local one = self.prompt
  one.count = 0
  give_inputs(one, self.prompt_owner, ctx)
  one:give("q", ctx.query)
  one:give_pages("cache", memory, ctx.format:of(ctx.layer))
  one:give("tables", ctx.tables)
  one:give("lens", ctx.lens)
  one:give("starts", ctx.starts)
  one:give("selection", selection)
  one:give("slots", slots)
  one:give("lse", lse)
  one:give("alibi", ctx.alibi)
  for name, out in pairs(self.sums) do one:give(self.emit_names[name], out) end
  local entries = selection and selection:size(2) or ctx.width
  one:set("rows", memory:size(0))
  one:set("entries", entries)
  one:set("selection_heads", selection and selection:size(1) or 1)
  one:set("slot_heads", slots and slots:size(1) or 1)
  one.grid.x = ctx.seqs * ctx.kv_heads -- the first blocks have most queries
  one.grid.y = math.ceil(entries / one.items)
  if one.products then
    local bytes = one.products.bytes_shared[tonumber(ctx.query.dtype)]
    one.grid.bytes_shared = bytes or error(("%s: %s queries of %d heads with %d numbers "
      .. "do not fit in shared memory, expected bf16"):format(one.plan.what,
      ctx.query:type(), one.plan.sizes.head, one.plan.sizes.dim), 0)
  end
  one:launch()
end

--- Gives the policy what was emitted.
function Hook:end_prompt()
  for name in pairs(self.emits) do self.owner.emitted[name] = self.sums[name] end
end

--- What one expression makes of the weights: f32 [seqs, kv_heads, width], or by token. It
-- belongs to the policy until the layer is over.
function Hook:emit(name, selection, ctx, lse)
  local one, out, nothing = self.emits[name], new_emitted(self, name, ctx)
  if selection then out:fill_(nothing) end
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
  one:set("window", ctx.window or 0)
  one.grid.x = math.ceil((selection and selection:size(2) or ctx.width) / one.teams)
  one.grid.y = ctx.seqs * ctx.kv_heads
  one:launch()
  return out
end

--- Whether the hook runs in plain Lua; then the whole op does.
function M.is_in_lua(one) return one ~= nil and one.run ~= false end

--- The op paged_attention in plain Lua, with the arguments `call`.
function M.attend_in_lua(call, out)
  return require("kvlab.kernel.run.lua_attention").attend(call, out)
end

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

--- Opens the kernel for what the policy emits in a prefill. changes: the definition whose
-- bias, mask and log_weight this attention uses.
local function open_prompt(self, changes)
  local def = { emit = self.expressions.emit, bias = changes.bias, mask = changes.mask,
                log_weight = changes.log_weight }
  self.prompt = kernel.open(place.prompt(def, self.what,
    kernel.options_of(self.prompt_owner, self.shape, self.what)), self.shape.device)
end

-- The names that options, consts and inputs of the prefill's policy get in the kernel of
-- another policy, which may use some of the same names itself.
local PREFIX = "prefill_"

local RENAMED = { param = true, const = true, input = true }

--- The bias, mask and log_weight of a policy, under these names.
local function renamed(def)
  local new = {}
  for _, name in ipairs { "bias", "mask", "log_weight" } do
    local x = def[name]
    expression.each(x or expression.number(0, "f32"), function(one)
      if RENAMED[one.op] then
        local copy = {}
        for key, value in pairs(one) do copy[key] = value end
        copy.name = PREFIX .. one.name
        x = expression.replace(x, one, setmetatable(copy, expression.Expression))
      end
    end)
    new[name] = x
  end
  return new
end

--- Finds these options, consts and inputs in the policy that they belong to.
local function owner_of_both(own, of_prefill)
  return setmetatable({}, { __index = function(_, name)
    if name:sub(1, #PREFIX) ~= PREFIX then return own[name] end
    return of_prefill[name:sub(#PREFIX + 1)]
  end })
end

--- The hooks of the policies that emit in a prefill: of the policy that selects in it,
-- and of other policies that watch the prompt. nil: there are none.
---@param prefill_policy table
---@param decode_policy table
---@param draft_policy table|nil
---@return kvlab.Hook[]|nil
---@return table[] watchers  those of the others that watch the prompt
function M.emitters(prefill_policy, decode_policy, draft_policy)
  local first, list, watchers = prefill_policy.hook, {}, {}
  if first and first.prompt then list[1] = first end
  for _, policy in ipairs { decode_policy, draft_policy } do
    local own = policy.hook
    if own and own ~= first and next(own.emits) and policy.watches_prompt then
      local changes = {}
      if first and first.changes then
        changes = renamed(first.expressions)
        own.prompt_owner = owner_of_both(policy, prefill_policy)
      end
      open_prompt(own, changes)
      list[#list + 1], watchers[#watchers + 1] = own, policy
    end
  end
  return list[1] and list or nil, watchers
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
  local hook = setmetatable({ owner = self, prompt_owner = self, shape = shape,
    what = what, o = o, expressions = expressions, codes = {}, kept = {}, emits = {},
    sums = {}, cells = {}, emit_names = {}, changes = (expressions.bias
      or expressions.mask or expressions.log_weight) ~= nil }, Hook)
  for _, name in ipairs(sorted.keys(expressions.emit or {})) do
    hook.emits[name] = kernel.open(place.emit(name, expressions.emit[name], what, o),
      shape.device)
    hook.emit_names[name], hook.cells[name] = "emit_" .. name, {}
  end
  if self.prefill and next(hook.emits) then open_prompt(hook, expressions) end
  -- most likely queries have the dtype of the cache; other code is made when it is needed
  local dtype = shape.dtype == "f8e4m3" and "bf16" or shape.dtype
  if self.decode then code_for(hook, dtype, false) end
  if self.prefill then code_for(hook, dtype, true) end
  self.hook, self.emitted = hook, {}
end

return M
