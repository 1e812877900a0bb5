--- Budgets: how many blocks a policy may select. The amount is one of the options ratio
-- (share of a sequence's blocks), tokens and blocks: a number, a list with a number for
-- each layer, or a tensor [layers, kv_heads], f32 for ratio and i32 for the others. The
-- option `split` divides it among layers or KV heads (kvlab/policy/split.lua).
--
-- A budget that is a number for all layers and heads is a kvl_budget. Any other budget is
-- ragged: a layer's part is the kvl_budget of the head that may select most, and the
-- limits of all heads if these differ. The host knows a ragged budget, too, so no step
-- waits.
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

---@class kvlab.RaggedBudget
---@field sink integer
---@field recent integer
---@field layers table  from 0: the kvl_budget of each layer
---@field limits table  from 0: kvlab.Tensor [1, kv_heads], f32 ratios or i32 blocks, of
--                      the layers whose heads differ
---@field split kvlab.Split|nil  divides what all heads of a layer may select
local Ragged = {}
Ragged.__index = Ragged

local is_tensor, is_even = kinds.tensor[2], kinds.budget[2]

--- What Context:select takes.
M.kind = { kinds.budget[1], function(x)
  return is_even(x) or getmetatable(x) == Ragged
end }

-- ---- amounts --------------------------------------------------------------------------

local ONE = { ratio = options.share, tokens = options.whole, blocks = options.whole }
local DTYPES = { ratio = "f32", tokens = "i32", blocks = "i32" }

--- Whether x is a list of numbers, with no holes and nothing beside them.
local function is_list(x)
  if type(x) ~= "table" or #x == 0 then return false end
  local count = 0
  for key, value in pairs(x) do
    if type(key) ~= "number" or type(value) ~= "number" then return false end
    count = count + 1
  end
  return count == #x
end

--- What the options of an amount may be. The entries of lists and tensors are checked by
-- check_amount, so that errors name them.
M.AMOUNTS = {}
for key, kind in pairs(ONE) do
  M.AMOUNTS[key] = { ("%s, a list with one for each layer, or %s [layers, kv_heads]")
    :format(kind[1], DTYPES[key]), below = kind.below, function(x)
      if is_tensor(x) then return x:type() == DTYPES[key] and #x:dims() == 2 end
      return kind[2](x) or is_list(x)
    end }
end

--- The option that is the amount, and its value. Without one, all blocks may be selected.
local function amount_of(o)
  for key in pairs(ONE) do if o[key] then return key, o[key] end end
  return "ratio", 1
end

--- An amount by layer: lists of one number, or of one for each KV head.
local function rows_of(amount, layers)
  local rows = {}
  if is_tensor(amount) then
    local dims, flat = amount:dims(), amount:list()
    for i = 1, dims[1] do
      rows[i] = { unpack(flat, (i - 1) * dims[2] + 1, i * dims[2]) }
    end
    return rows
  end
  for i = 1, type(amount) == "table" and #amount or layers do
    rows[i] = { type(amount) == "table" and amount[i] or amount }
  end
  return rows
end

--- The position of entry h of row i, in words.
local function place_of(i, h, row)
  return ("layer %d"):format(i - 1) .. (#row > 1 and (", KV head %d"):format(h - 1) or "")
end

--- Raises for an entry of a list or tensor that is no amount.
---@param what string  "policy quest"
---@param key string   ratio, tokens or blocks
---@param name? string  what the option is called, if it is another name
function M.check_amount(what, key, amount, name)
  if type(amount) == "number" then return end
  for i, row in ipairs(rows_of(amount)) do
    for h, x in ipairs(row) do
      if not ONE[key][2](x) then
        options.fail(("%s: %s of %s %s"):format(what, name or key, place_of(i, h, row),
          options.problem(x, ONE[key])))
      end
    end
  end
end

--- The share of an amount that a nested policy gets, as an option of the same name.
-- Blocks and tokens are rounded down; an amount that differs among layers is at least
-- sink and recent. No ratio is above 1.
---@param self kvlab.Policy  attached
---@param share number       0 or more
---@return table
function M.part(self, share)
  local key, amount = amount_of(self)
  local unit = key == "tokens" and self.shape.block_size or 1
  local least = (self.sink + self.recent) * unit
  local function of(x)
    return key == "ratio" and math.min(1, share * x) or math.floor(share * x)
  end
  if type(amount) == "number" then return { [key] = of(amount) } end
  if is_tensor(amount) then
    local part = amount:cast "f32":mul(share)
    part = key == "ratio" and part:minimum(1) or part:cast "i32":maximum(least)
    return { [key] = part }
  end
  local list = {}
  for i, x in ipairs(amount) do
    list[i] = key == "ratio" and of(x) or math.max(least, of(x))
  end
  return { [key] = list }
end

-- ---- budgets --------------------------------------------------------------------------

--- An f32 ratio is rounded as in kernels/args/select.h, kvl__list_blocks.
local function new_even(o, key, x, is_f32)
  if is_f32 and x < 1 then x = x * (1 - 2 ^ -24) end
  return ffi.new("kvl_budget", key == "ratio" and x or -1, key == "ratio" and 0 or x,
    o.min_blocks, o.sink, o.recent)
end

local function check_shape(what, key, amount, rows, shape)
  local by_head, heads = is_tensor(amount), shape.kv_heads * (shape.cut_heads or 1)
  if #rows == shape.layers and (not by_head or #rows[1] == heads) then return end
  options.fail(by_head and ("%s: %s is %s [%d, %d], expected [%d, %d]: layers, KV heads")
    :format(what, key, DTYPES[key], #rows, amount:size(1), shape.layers, heads)
    or ("%s: %s is a list of %d, expected a number for each of %d layers"):format(what,
      key, #rows, shape.layers))
end

--- Tokens as blocks.
local function in_blocks(rows, block_size)
  for _, row in ipairs(rows) do
    for h, x in ipairs(row) do row[h] = math.ceil(x / block_size) end
  end
end

local function check_least(what, key, rows, o)
  local always = o.sink + o.recent
  for i, row in ipairs(rows) do
    for h, x in ipairs(row) do
      if x < always then
        options.fail(("%s: %s of %s is %d block%s, expected at least sink + recent = %d "
          .. "blocks"):format(what, key, place_of(i, h, row), x, x == 1 and "" or "s",
          always))
      end
    end
  end
end

--- The amounts that a split gives layers; raises unless they are a list of `count`
-- numbers from 0 to `most` whose mean is `mean`.
local function shares_of(what, split, mean, most, count)
  local list = split:layers(mean, most, count)
  local function refuse(fmt, ...)
    options.fail(("%s: split %s gives layers %s, expected %d numbers, 0 ... %g, with a "
      .. "mean of %g"):format(what, split.name, fmt:format(...), count, most, mean))
  end
  if type(list) ~= "table" then refuse("%s", options.shown(list)) end
  if #list ~= count then refuse("a list of %d", #list) end
  local sum, slack = 0, 1e-6 * (1 + mean)
  for i, x in ipairs(list) do
    if type(x) ~= "number" or not (x >= -slack and x <= most + slack)
      or math.abs(x) == math.huge then
      refuse("%s, layer %d,", options.shown(x), i - 1)
    end
    sum = sum + x
  end
  if math.abs(sum / count - mean) > slack then refuse("a mean of %g", sum / count) end
  return list
end

--- The parts of an amount, given as one number, that a split gives each layer. An amount
-- in blocks is divided, without sink, recent and min_blocks, into whole numbers with the
-- same sum.
local function divide(o, what, key, amount, layers)
  local least = key == "ratio" and 0 or math.max(o.min_blocks, o.sink + o.recent)
  local most = key == "ratio" and 1 or math.huge
  local list = shares_of(what, o.split, math.max(0, amount - least), most, layers)
  local rows, sum, given = {}, 0, 0
  for i = 1, layers do
    local x = list[i]
    if key ~= "ratio" then
      sum = sum + x
      x = math.floor(sum + 0.5) - given
      given = given + x
    end
    rows[i] = { x + least }
  end
  return rows
end

local function make_limits(rows, key, shape)
  local flat = {}
  for _, row in ipairs(rows) do
    for _, x in ipairs(row) do flat[#flat + 1] = x end
  end
  local all = tensor.from(shape.device, key == "ratio" and "f32" or "i32",
    { #rows, #rows[1] }, flat)
  local limits = {}
  for i = 1, #rows do limits[i - 1] = all:narrow(i - 1, 1) end
  return limits
end

--- The budget of a policy's options. Raises for a list or tensor that does not fit the
-- shape, or gives less than sink and recent.
---@param o kvlab.Policy  its options
---@param shape table     see policy.lua
---@return kvlab.Budget|kvlab.RaggedBudget
function M.make(o, shape)
  local what, key, amount = "policy " .. o.name, amount_of(o)
  local split, is_number = o.split, type(amount) == "number"
  if is_number and not split then
    return new_even(o, key == "tokens" and "blocks" or key,
      key == "tokens" and math.ceil(amount / shape.block_size) or amount)
  elseif not is_number and split and split.layers then
    options.fail(("%s: %s is a %s, expected a number that split %s divides among layers")
      :format(what, key, is_tensor(amount) and "tensor" or "list", split.name))
  end
  M.check_amount(what, key, amount) -- again, as it may have been written to
  local rows, name = rows_of(amount, shape.layers), key
  check_shape(what, key, amount, rows, shape)
  if key == "tokens" then in_blocks(rows, shape.block_size) end
  if key ~= "ratio" then key = "blocks" end
  if not is_number and key == "blocks" then check_least(what, name, rows, o) end
  if split and split.layers then
    rows = divide(o, what, key, rows[1][1], shape.layers)
  end
  local self = setmetatable({ sink = o.sink, recent = o.recent, layers = {}, limits = {},
    split = split and split.heads and split:again() or nil }, Ragged)
  for i, row in ipairs(rows) do
    self.layers[i - 1] = new_even(o, key, math.max(unpack(row)),
      key == "ratio" and is_tensor(amount))
  end
  if #rows > 0 and #rows[1] > 1 then
    self.limits = tensor.lasting(make_limits, rows, key, shape)
  end
  return self
end

--- A layer's part of a budget: a kvl_budget, the limits of its heads if they differ, and
-- the split that divides it among them.
---@return kvlab.Budget, kvlab.Tensor|nil, kvlab.Split|nil
function M.of_layer(budget, layer)
  if getmetatable(budget) ~= Ragged then return budget end
  return options.entry("budget", "layer", budget.layers, layer), budget.limits[layer],
    budget.split
end

--- Whether the parts of KV heads in a budget differ.
function M.differs(budget)
  return getmetatable(budget) == Ragged and next(budget.limits) ~= nil
end

--- The kvl_budgets of all layers and heads that differ, without min_blocks, sink and
-- recent. Before a policy is attached, an amount that a split divides counts as
-- undivided.
---@return kvlab.Budget[]
function M.asked(o, block_size)
  local key, amount = amount_of(o)
  local bare, list = { min_blocks = 0, sink = 0, recent = 0 }, {}
  local function add(x)
    list[#list + 1] = new_even(bare, key == "ratio" and key or "blocks",
      key == "tokens" and math.ceil(x / block_size) or x,
      key == "ratio" and is_tensor(amount))
  end
  if type(amount) == "number" and getmetatable(o.budget) == Ragged then
    for layer = 0, #o.budget.layers do
      local b = o.budget.layers[layer]
      list[#list + 1] = new_even(bare, b.ratio < 0 and "blocks" or "ratio",
        b.ratio < 0 and b.blocks or b.ratio)
    end
    return list
  end
  for _, row in ipairs(rows_of(amount, 1)) do
    for _, x in ipairs(row) do add(x) end
  end
  return list
end

return M
