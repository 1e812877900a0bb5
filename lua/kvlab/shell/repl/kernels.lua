--- `:kernel` shows the kernels of an expression, a map, a policy or a source text, and
-- `:time` measures them, over a synthetic cache on the current device.
local device = require "kvlab.tensor.device"
local expression = require "kvlab.kernel.expression.expression"
local inspect = require "kvlab.shell.repl.inspect"
local kernel = require "kvlab.kernel.run.kernel"
local kernel_hook = require "kvlab.kernel.run.hook"
local library = require "kvlab.library"
local map = require "kvlab.kernel.run.map"
local policy = require "kvlab.policy.policy"
local show = require "kvlab.kernel.run.show"
local sorted = require "kvlab.sorted"
local source = require "kvlab.kernel.run.source"
local tensor = require "kvlab.tensor.arithmetic"
local timing = require "kvlab.shell.repl.timing"

local M = {}

local BLOCKS = 1024 -- of the one sequence

-- ---- a policy of it -------------------------------------------------------------------

--- The parameters and consts of expressions: defaults and an init that fills them.
local function with_leaves(def, roots)
  local consts = {}
  def.defaults = {}
  for _, root in ipairs(roots) do
    expression.each(root, function(x)
      if x.op == "param" then def.defaults[x.name] = 1 end
      if x.op == "const" then consts[x.name] = x end
    end)
  end
  function def.init(self, shape)
    local sizes = { layer = shape.layers, kv_head = shape.kv_heads,
      head = shape.heads / shape.kv_heads, token = shape.block_size,
      dim = shape.head_dim }
    for name, x in pairs(consts) do
      local dims = {}
      for i, dim in ipairs(x.stored) do dims[i] = sizes[dim] or show.OWN end
      self[name] = x.type == "f32"
        and tensor.randn(shape.device, "f32", dims):cast(x.dtype)
        or tensor.zeros(shape.device, x.dtype, dims)
    end
  end
  return def
end

local function policy_of_expression(x)
  local where = show.place_of(x)
  local def = { name = "expression", decode = true, score = function() end }
  if where == "map" then
    error(("%s is a part of a map; show the map"):format(expression.text(x, 60)), 0)
  elseif where == "emit" then
    def.emit, def.watches_prompt = { value = x }, true
  elseif where == "summary" then def.summary = { value = x }
  else def.score = x end
  return policy.define(with_leaves(def, { x })) {}
end

local function policy_of_map(one)
  return policy.define(with_leaves({ name = "map", decode = true, mapped = one,
    score = function() end }, { one.expression })) {}
end

--- The same policy with the same options, not attached.
local function copy_of(p)
  local copy = {}
  for _, name in ipairs(p.options) do copy[name] = p[name] end
  copy.options, copy.expressions = p.options, p.expressions
  return setmetatable(copy, getmetatable(p))
end

local function is_policy(value)
  return type(value) == "table" and type(value.expressions) == "table"
    and type(value.options) == "table"
end

--- Whether `:time` measures the kernels of a value, in place of the code that makes it.
function M.has_kernels(value)
  if expression.is_expression(value) or map.is_map(value) then return true end
  if not is_policy(value) then return false end
  local own = value.expressions
  return (own.fields or own.score or own.attention or next(own.maps)) ~= nil
end

--- Whether `:time` measures the kernels of a value: it has some, or it is a policy, which
-- should have them.
function M.is_timed(value) return M.has_kernels(value) or is_policy(value) end

--- Raises for a value that has no kernels.
local function expect_kernels(command, value)
  if M.has_kernels(value) then return end
  error(is_policy(value) and ("policy %s has no expressions: its kernels are ops"):format(
    value.name) or ("%s takes an expression, a map, a policy or a kernel of source text, "
    .. "given a %s"):format(command, type(value)), 0)
end

--- A policy with the value's expressions, attached to a cache of one layer.
local function attach(value, dev)
  local p = expression.is_expression(value) and policy_of_expression(value)
    or map.is_map(value) and policy_of_map(value) or copy_of(value)
  policy.attach(p, { device = dev, layers = 1, blocks = BLOCKS,
    block_size = show.BLOCK_SIZE, heads = show.KV_HEADS * show.GROUP,
    kv_heads = show.KV_HEADS, head_dim = show.HEAD_DIM, dtype = show.FORMAT,
    max_blocks = BLOCKS, scale = 1 / math.sqrt(show.HEAD_DIM), max_seqs = 1 })
  kernel_hook.emitters(p.prefill and p or {}, p) -- opens those of a prefill
  return p
end

--- The kernels of an attached policy, in order: what, kernel.
local function kernels_of(p)
  local list = {}
  if p.expressions.fields then
    list[1] = { what = "summary", kernel = kernel.of_summary(p.summary) }
  end
  if p.expressions.score then
    list[#list + 1] = { what = "score", kernel = p.score_kernel }
  end
  for _, name in ipairs(sorted.keys(p.expressions.maps)) do
    local one = p.expressions.maps[name]
    list[#list + 1] = { what = name, kernel = p.map_kernels[one], map = one }
  end
  return list
end

-- ---- :kernel --------------------------------------------------------------------------

--- Writes the sources of a value's kernels.
function M.show(value)
  local dev = device.device()
  if getmetatable(value) == source.Source then
    return io.stdout:write(value:source(dev:is_cpu() and "c" or "cuda"))
  end
  expect_kernels(":kernel", value)
  local p = attach(value, dev)
  local list = kernels_of(p)
  for _, one in ipairs(p.hook and p.hook:kernels() or {}) do
    list[#list + 1] = { kernel = one }
  end
  for i, one in ipairs(list) do
    io.stdout:write(i > 1 and "\n" or "", one.kernel.source)
  end
end

-- ---- :time ----------------------------------------------------------------------------

--- What an attention would give the kernels: one sequence in a layer of a random cache.
local function context(p, dev)
  local ctx = { layer = 0, seqs = 1, kv_heads = show.KV_HEADS, width = BLOCKS,
    block_size = show.BLOCK_SIZE, is_prefill = false,
    tables = tensor.arange(dev, "i32", BLOCKS):reshape { 1, BLOCKS },
    lens = tensor.full(dev, "i32", { 1 }, BLOCKS * show.BLOCK_SIZE),
    query = tensor.randn(dev, "f32", { 1, show.KV_HEADS * show.GROUP, show.HEAD_DIM }),
    cache = tensor.randn(dev, show.FORMAT, { BLOCKS, 2, show.KV_HEADS, show.BLOCK_SIZE,
      show.HEAD_DIM }, { seed = 1 }),
    format = p.shape.format }
  local scores = tensor.tensor(dev, "f32", { 1, show.KV_HEADS, BLOCKS })
  function ctx.new_scores() return scores end
  return ctx
end

--- A function that launches a kernel once.
local function launcher(p, one, ctx, dev)
  if one.what == "summary" then
    local list = tensor.arange(dev, "i32", BLOCKS)
    local ev = { layer = 0, k = ctx.cache, k_blocks = list, blocks = list,
      num_tokens = tensor.full(dev, "i32", { BLOCKS }, show.BLOCK_SIZE) }
    return function() p.summary:update(ev) end
  elseif one.map then
    local inputs = {}
    for i in ipairs(one.map.names) do
      inputs[i] = tensor.randn(dev, "f32", { 1, show.KV_HEADS, BLOCKS }, { seed = i })
    end
    inputs[#inputs + 1] = tensor.tensor(dev, "f32", { 1, show.KV_HEADS, BLOCKS })
    return function() one.map(p, ctx, unpack(inputs)) end
  end
  return function() p:score(ctx) end
end

--- Times reading so many bytes: the sum of one row.
local function read(bytes, dev)
  local row = tensor.full(dev, "f32", { math.ceil(bytes / 4) }, 1)
  local out = tensor.tensor(dev, "f32", {})
  return timing.runs(function() row:sum(0, out) end)
end

local function rows_of(value, dev)
  local p, rows = attach(value, dev), {}
  local ctx = context(p, dev)
  for i, one in ipairs(kernels_of(p)) do
    local run = launcher(p, one, ctx, dev)
    run() -- so that nothing is made for the first time
    local seconds, bytes = timing.runs(run), show.bytes(one.kernel.plan, BLOCKS)
    rows[i] = { one.what, timing.text(timing.median(seconds)), timing.text(seconds[1]),
      inspect.bytes(bytes),
      timing.text(timing.median(read(bytes, dev))) }
  end
  return rows
end

--- Times a value's kernels: a header and rows for a table, and what they ran over.
---@return string[] header, table[] rows, string over
function M.time(value)
  local dev = device.device()
  expect_kernels(":time", value)
  local rows = tensor.scope(rows_of, value, dev)
  if #rows == 0 then
    error(("policy %s has kernels inside of attention alone: %s bench K3 measures such "
      .. "ones"):format(value.name, library.program), 0)
  end
  return { "kernel", "median", "best", "bytes", "a read of as many" }, rows,
    ("one sequence of %d tokens on %s: %s, %d KV heads, group %d, head_dim %d, blocks of "
      .. "%d"):format(BLOCKS * show.BLOCK_SIZE, dev:name(), show.FORMAT, show.KV_HEADS,
      show.GROUP, show.HEAD_DIM, show.BLOCK_SIZE)
end

return M
