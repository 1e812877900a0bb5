--- Evictions: which block leaves a hot cache when a missing block needs its slot. They
-- are files in folders called evictions (kvlab.named): the project's lua/evictions,
-- ./evictions, and those of --path and KVLAB_PATH. A cache is told which one to use by
-- name, `offload = { hot_slots = 512, evict = "lfu" }`, or gets one that was made with
-- options, `evict = kv.eviction("mine", { weight = 2 })`. No result depends on it.
--
--   kv.eviction.define {
--     name = "mine",
--     defaults = { weight = 0.5 },    its options: numbers, e.param "weight" reads one
--     priority = function(uses, age)  an expression. In each layer and KV head, the block
--       return uses - e.param "weight" * age     with the lowest priority leaves first,
--     end,                            and of equal ones the least recently used. Without
--   }                                 a priority, the least recently used block leaves
--
-- The names of the parameters say what is kept of every block, a number for each layer
-- and KV head:
--   uses       how many steps have selected the block since it came into the hot cache
--   age        how many steps ago it was last selected: 0 for the step before the present
--              one. A block that is brought ahead counts as selected, but not as a use
--   score      the score by which the policy last decided about it; -inf before the first
--   predicted  the same, but also the scores of the policy's predictions (predict) count,
--              so it is the newest number that the policy gave
-- The expression may also read e.layer and e.kv_head. If it is one of the parameters, the
-- runtime keeps the priority itself and nothing is computed; otherwise a kernel computes
-- the priorities of all blocks before each step's evictions.
--
-- Only decode steps are counted, and not those of a draft. A step that fails may have
-- been counted. If a step is undone, the hot cache starts again without blocks, so uses
-- and ages are lost, too. Scores that the undone step gave stay until the next step gives
-- others.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local evictions = require "kvlab.memory.evictions"
local expression = require "kvlab.kernel.expression.expression"
local kernel = require "kvlab.kernel.run.kernel"
local library = require "kvlab.library"
local map = require "kvlab.kernel.run.map"
local named = require "kvlab.named"
local options = require "kvlab.options"
local place = require "kvlab.kernel.expression.place"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

-- The numbers that can be kept of a block, and their initial values.
local KEPT = { uses = 0, age = 0, score = -math.huge, predicted = -math.huge }
local LEAVES = { layer = true, kv_head = true }

---@class kvlab.Eviction
---@field name string
---@field keeps table<string, boolean>  the numbers that its priority reads
local Eviction = { is_eviction = true }
Eviction.__index = Eviction

-- ---- in a hot cache -------------------------------------------------------------------

--- Calls of a map with one to four tensors and an `out`: no call makes a table.
local CALLS = {
  function(fn, owner, ctx, t, out) fn(owner, ctx, t[1], out) end,
  function(fn, owner, ctx, t, out) fn(owner, ctx, t[1], t[2], out) end,
  function(fn, owner, ctx, t, out) fn(owner, ctx, t[1], t[2], t[3], out) end,
  function(fn, owner, ctx, t, out) fn(owner, ctx, t[1], t[2], t[3], t[4], out) end,
}

--- A view of each layer of values [layers, kv_heads, blocks]; as_rows: each is
-- [1, kv_heads, blocks].
local function by_layer(values, as_rows)
  local views = {}
  for layer = 0, values:size(0) - 1 do
    views[layer] = as_rows and values:narrow(layer, 1) or values:index(layer)
  end
  return views
end

--- The kernel of a priority that is not simply one of the kept numbers.
local function open_kernel(self, cache, kept)
  local what = "eviction " .. self.name
  local plan = place.map(self.map.expression, what, { codec = cache.format.name,
    group = 1, layers = cache.layers, block_size = cache.block_size,
    head_dim = cache.head_dim, kv_heads = cache.kv_heads, scale = 1 })
  local one = kernel.open(plan, cache.device)
  one.by_head = true
  self.owner = setmetatable({ map_kernels = { [self.map] = one } },
    { __index = self.options })
  self.call, self.inputs = CALLS[#self.map.names], {}
  for layer = 0, cache.layers - 1 do self.inputs[layer] = {} end
  for i, name in ipairs(self.map.names) do
    for layer, view in pairs(by_layer(kept[name], true)) do
      self.inputs[layer][i] = view
    end
  end
  self.ctx = { seqs = 1, width = cache.blocks, kv_heads = cache.kv_heads, layer = 0,
    block_size = cache.block_size, lens = tensor.full(cache.device, "i32", { 1 }, 0) }
end

function Eviction:attach(cache)
  -- Allocates what the eviction keeps of the blocks of a cache. Returns the tensors that
  -- kvl_hot takes, f32 [layers, kv_heads, blocks] by name; none if nothing is kept.
  if self.kept then
    options.fail(("eviction %s belongs to another cache already; make another one")
      :format(self.name))
  end
  if not self.map then return {} end
  local dims, kept = { cache.layers, cache.kv_heads, cache.blocks }, {}
  for name in pairs(self.keeps) do
    kept[name] = tensor.full(cache.device, "f32", dims, KEPT[name])
  end
  self.scores = kept.score and by_layer(kept.score)
  self.predictions = kept.predicted and by_layer(kept.predicted)
  local priority = kept[self.map.expression.name]
  if not priority then
    priority = tensor.full(cache.device, "f32", dims, 0)
    open_kernel(self, cache, kept)
    self.priorities = by_layer(priority, true)
  end
  self.kept, self.priority = kept, priority
  return { priority = priority, uses = kept.uses, age = kept.age }
end

function Eviction:free()
  -- Frees what was allocated.
  for _, values in pairs(self.kept) do values:free() end
  self.priority:free()
end

function Eviction:rank(layer)
  -- Brings the priorities of a layer up to date, on the current stream.
  if not self.call then return end
  self.ctx.layer = layer
  self.call(self.map, self.owner, self.ctx, self.inputs[layer], self.priorities[layer])
end

local function scatter(views, ctx, scores)
  if views then
    check(C.kvl_scatter_scores(scores, ctx.tables, views[ctx.layer]))
  end
end

function Eviction:watch(attention)
  -- From now on, stores the scores by which the decode policy of an attention selects,
  -- and the scores of its predictions.
  local ctx = attention.context
  if not self.scores and not self.predictions then return end
  local select, expect = ctx.select, ctx.expect
  ctx.select = function(context, scores, budget)
    local selection, counts = select(context, scores, budget)
    if not context.is_prefill and not context.is_draft then
      scatter(self.scores, context, scores)
      scatter(self.predictions, context, scores)
      self.scored = context.layer
    end
    return selection, counts
  end
  ctx.expect = function(context, scores, budget, most)
    local selection = expect(context, scores, budget, most)
    scatter(self.predictions, context, scores)
    return selection
  end
end

function Eviction:expect_scores(ctx)
  -- Raises if the policy of a decode step does not give the scores that are read.
  if not self.scores and not self.predictions then return end
  if self.predictions and not ctx.policy.predict then
    error(("the eviction %s reads what the policy predicts, but %s has no predict")
      :format(self.name, ctx.policy.name), 0)
  elseif self.scored ~= ctx.layer then
    error(("the eviction %s needs scores, but policy %s selects without scores in layer "
      .. "%d"):format(self.name, ctx.policy.name, ctx.layer), 0)
  end
  self.scored = nil
end

-- ---- define and open ------------------------------------------------------------------

--- Checks that a priority reads nothing that is not kept.
local function check_priority(def, what, numbers)
  local made = map.map(def.priority)
  local x = place.check_map(made.expression, what)
  for _, name in ipairs(made.names) do
    if not KEPT[name] then
      error(("%s: priority has a parameter %s, expected one of %s"):format(what, name,
        table.concat(sorted.keys(KEPT), ", ")), 0)
    end
  end
  if #made.names == 0 then
    error(what .. ": priority has no parameter, so it is the same for all blocks", 0)
  end
  expression.each(x, function(one)
    local is_unknown = one.op == "const" or one.op == "leaf" and not LEAVES[one.name]
    if is_unknown then
      error(("%s: %s: there is no %s in a priority, which knows %s, its parameters and "
        .. "options"):format(expression.line_of(x), what, one.name,
        table.concat(sorted.keys(LEAVES), ", ")), 0)
    end
  end)
  kernel.check_params(x, what, numbers)
  return made
end

local DEFINITION = { name = options.required(options.string), defaults = options.table,
                     priority = options.fn }

--- Makes an eviction from its definition, whose fields are listed at the head of this
-- file. Call the result with options to get one that a cache can take.
---@param def table
---@return fun(given?: table): kvlab.Eviction
function M.define(def)
  options.check("eviction", def, DEFINITION)
  local what, known = "eviction " .. def.name, {}
  for name, value in pairs(def.defaults or {}) do
    known[name] = options.number
    options.argument(what, "the default of " .. name, value, options.number)
  end
  local made, keeps = def.priority and check_priority(def, what, known), {}
  for _, name in ipairs(made and made.names or {}) do keeps[name] = true end
  local path = def.priority and debug.getinfo(def.priority, "S").source:match "^@(.*)$"
  if path then sources.load(path) end
  local function make(given)
    local own = {}
    for name, value in pairs(def.defaults or {}) do own[name] = value end
    for name, value in pairs(options.check(what, given, known)) do
      own[name] = value
    end
    if path then sources.use(path) end
    return setmetatable({ name = def.name, map = made, keeps = keeps, options = own },
      Eviction)
  end
  return constructor({ makes_eviction = true }, make)
end

--- The names of all evictions.
---@return string[]
function M.names() return named.list "evictions" end

--- Makes an eviction by name, with options. Raises for an unknown name or option; the
-- error lists the known ones.
---@param name string
---@param given? table  its options
local function open(name, given) return evictions.open(name, given, 2) end

return constructor(M, arguments.of("eviction", open, { name = options.string }))
