--- Maps: expressions over scores and tallies, f32 [seqs, kv_heads or 1, width], element
-- by element. A policy has one under a name of its own, and calls it as a method:
--
--   mixed = kv.kernel.map(function(near, often)
--     return near + e.param "weight" * often + e.block / e.max(e.blocks - 1, 1)
--   end),
--   score = function(self, ctx)
--     return self:mixed(ctx, kv.ops.score_mean(ctx.query, self.means, ctx),
--       self.tally:load(ctx))
--   end,
--
-- The parameters of the function are the tensors. Besides them an expression may read
-- block, blocks, length, layer, kv_head, options of the policy and its consts. Columns
-- past a sequence's last block are computed like all others; no selection looks at them.
local expression = require "kvlab.kernel.expression.expression"
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Map
local Map = {}
Map.__index = Map

--- Whether a value is a map.
---@return boolean
function M.is_map(value) return getmetatable(value) == Map end

-- ---- a call ---------------------------------------------------------------------------

local function refuse(self, name, t, heads)
  local ctx = self.ctx
  local shown = tensor.is_tensor(t) and ("%s [%s] on %s"):format(t:type(),
    table.concat(t:dims(), ", "), t.storage == nil and "nothing, for it is closed"
    or t.device:name()) or options.shown(t)
  options.fail(("%s: %s is %s, expected f32 [seqs=%d, %s, width=%d] on %s"):format(
    self.kernel.plan.what, name, shown, ctx.seqs, heads, ctx.width,
    ctx.lens.device:name()))
end

local F32 = library.dtypes.f32

--- Whether a value is f32 [seqs, …, width] on the context's device.
local function fits(ctx, t)
  return tensor.is_tensor(t) and t.storage ~= nil and t.dtype == F32 and t.ndim == 3
    and t.sizes[0] == ctx.seqs and t.sizes[2] == ctx.width and t.device == ctx.lens.device
end

local function begin(self, owner, ctx, more)
  if more > 0 then
    options.fail(("%s: %d tensors more than its parameters and out"):format(
      tostring(self), more))
  end
  local kernels = type(owner) == "table" and rawget(owner, "map_kernels")
  local found = kernels and kernels[self]
  if not found then
    options.fail(("%s is not called as a method of a policy that has it and is attached")
      :format(tostring(self)))
  end
  if type(ctx) ~= "table" or not tensor.is_tensor(ctx.lens) or not ctx.width then
    options.fail(("%s: ctx is %s, expected a context of an attention's step"):format(
      found.plan.what, options.shown(ctx)))
  end
  self.kernel, self.ctx, found.count = found, ctx, 0
  self.heads = found.by_head and ctx.kv_heads or 1
end

local function take(self, i, t)
  local ctx, k = self.ctx, self.kernel
  if not fits(ctx, t) or t.sizes[1] ~= 1 and t.sizes[1] ~= ctx.kv_heads then
    refuse(self, self.names[i], t, ("kv_heads=%d or 1"):format(ctx.kv_heads))
  end
  local heads = tonumber(t.sizes[1])
  if heads > self.heads then self.heads = heads end
  k:give(self.pointers[i], t)
  k:set(self.counts[i], heads)
end

local function launch(self, owner, out)
  local ctx, k = self.ctx, self.kernel
  if out == nil then out = ctx:new_scores(self.heads)
  elseif not fits(ctx, out) or out.sizes[1] ~= self.heads then
    refuse(self, "out", out, ("heads=%d"):format(self.heads))
  end
  k:give("lens", ctx.lens)
  k:give("out", out)
  k:give_consts(owner)
  k:set_params(owner)
  k:set("seqs", ctx.seqs)
  k:set("heads", self.heads)
  k:set("width", ctx.width)
  k:set("block_size", ctx.block_size)
  k:set("layer", ctx.layer or 0)
  k.grid.x = ctx.seqs * self.heads
  k.grid.y = math.ceil(ctx.width / k.grid.threads)
  k:launch()
  return out
end

--- The function that a call runs. It takes each tensor by name, so that a call makes no
-- garbage.
local function caller(self)
  local names, takes = {}, {}
  for i in ipairs(self.names) do
    names[i] = ("p%d, "):format(i)
    takes[i] = ("take(self, %d, p%d)\n"):format(i, i)
  end
  local text = ("local begin, take, launch = ...\n"
    .. "return function(self, owner, ctx, %sout, ...)\n"
    .. "begin(self, owner, ctx, select('#', ...))\n"
    .. "%sreturn launch(self, owner, out)\nend"):format(table.concat(names),
    table.concat(takes))
  return assert(loadstring(text, debug.getinfo(1, "S").source))(begin, take, launch)
end

Map.__call = function(self, ...) return self.call(self, ...) end

function Map:__tostring()
  return ("map(%s) = %s"):format(table.concat(self.names, ", "),
    expression.text(self.expression, 60))
end

-- ---- making one -----------------------------------------------------------------------

local function check_inputs(names, x)
  local read, is_name = {}, {}
  expression.each(x, function(one)
    if one.op == "input" then read[one.name] = true end
  end)
  for _, name in ipairs(names) do
    is_name[name] = true
    if not read[name] then
      options.fail(("kernel.map: %s does not read the parameter %s"):format(
        expression.text(x, 60), name))
    end
  end
  for name in pairs(read) do
    if not is_name[name] then
      options.fail(("kernel.map: %s reads %s, which is no parameter of fn"):format(
        expression.text(x, 60), name))
    end
  end
end

--- Makes a map, which a policy has under a name of its own: `self:NAME(ctx, a, b, out)`
-- with a tensor for each parameter of fn, f32 [seqs, kv_heads or 1, width], computes fn's
-- expression in one launch. Without out, the result is a tensor of scores that belongs to
-- the caller until the layer's attention is over; it has one row for all heads if every
-- tensor does, unless the expression reads kv_head. out may be one of the tensors.
---@param fn fun(...): kvlab.Expression  is called once, with an expression for each
--                                       parameter
---@return kvlab.Map
function M.map(fn)
  options.argument("kernel.map", "fn", fn, options.fn)
  local info = debug.getinfo(fn, "uS")
  if info.isvararg or info.what == "C" then
    options.fail("kernel.map: fn is a function of any number of parameters, expected "
      .. "named ones")
  end
  local names, inputs = {}, {}
  for i = 1, info.nparams do
    names[i] = debug.getlocal(fn, i)
    inputs[i] = expression.e.input(names[i])
  end
  local x = fn(unpack(inputs))
  if not expression.is_expression(x) then
    options.fail(("kernel.map: fn returns %s, expected an expression"):format(
      options.shown(x)))
  end
  check_inputs(names, x)
  local self = setmetatable({ expression = x, names = names, pointers = {}, counts = {} },
    Map)
  for i, name in ipairs(names) do
    self.pointers[i], self.counts[i] = "in_" .. name, "heads_" .. name
  end
  self.call = caller(self)
  return self
end

return M
