--- Compares random expressions with the reference by the book, as kernel_spec.lua does,
-- for as many seeds as asked. A seed that differs is made smaller: subexpressions take
-- the place of the whole as long as they differ, too; what is left is printed.
--
--   ./kvlab run spec/random_kernels.lua --set from=1 --set to=500
--   target: c (the CPU's), lua, cuda, or emulated (CUDA's, run on the CPU)
--   place: score (with a summary), map, attention (bias, mask, log_weight, emit), or
--          products, wild: scores that CUDA computes on the tensor cores, of small whole
--          numbers, and with some that are not finite among them
package.path = require("kvlab").paths.root .. "/?.lua;" .. package.path
local emulation = require "spec.emulation"
local expression = require "kvlab.kernel.expression.expression"
local expressions = require "spec.expressions"
local hooks = require "spec.hooks"
local kv = require "kvlab"
local maps = require "spec.maps"
local temporary = require "spec.temporary"

local set = kv.command_line.set
local from, to = tonumber(set.from or 1), tonumber(set.to or 100)
local target = set.target or "c"
local device = target == "cuda" and "cuda" or "cpu"
local chosen = (target == "lua" or target == "emulated") and target or nil
local in_attention = set.place == "attention"
local is_wild = set.place == "wild"
local of_products = set.place == "products" or is_wild

--- How a policy differs from the reference, in words; nil: it does not.
local function differs(def, seed)
  if in_attention then
    local ok, why = pcall(hooks.differs, device, chosen, seed,
      def, hooks.shape(seed))
    return not ok and tostring(why) or why
  end
  local shape = of_products and expressions.products_shape(seed, is_wild)
    or expressions.shape(seed)
  local cache = expressions.cache(device, shape, seed)
  local ok, why = pcall(function()
    local p = expressions.attach(cache, def, chosen)
    if p.summary then expressions.update(cache, p) end
    return expressions.difference(expressions.score(cache, p),
      expressions.expected(cache, p, expressions.resolved(p)), 1e-4)
  end)
  return not ok and tostring(why) or why
end

--- The subexpressions of a score that are scores themselves, the smallest first.
local function parts(def)
  local list = {}
  expression.each(def.score, function(x)
    if x ~= def.score and x.dims and #x.dims == 0
       and (x.type == "f32" or x.type == "i32") then
      list[#list + 1] = x
    end
  end)
  return list
end

--- What differs in attention, with as few of its expressions as possible.
local function fewest(def, seed)
  for _, name in ipairs { "bias", "log_weight", "mask", "emit" } do
    local copy = {}
    for key, value in pairs(def) do copy[key] = value end
    copy[name] = nil
    copy.emit = copy.emit or { mass = kv.expr.weight:max("token", "head") }
    if differs(copy, seed) then def = copy end
  end
  return def
end

local function smallest(def, seed)
  if in_attention then return fewest(def, seed) end
  for _, x in ipairs(parts(def)) do
    local copy = {}
    for key, value in pairs(def) do copy[key] = value end
    copy.score = x
    if differs(copy, seed) then return copy end
  end
  return def
end

--- Whether a seed's map is as the reference says; tells of one that is not.
local function is_map_right(seed)
  local ok, why = pcall(maps.random_difference, device, chosen, seed)
  if ok and not why then return true end
  print(tostring(why))
  return false
end

--- Whether a seed's expressions are as the reference says; tells of those that are not.
local function is_right(seed)
  local def = in_attention and hooks.random(seed)
    or of_products and expressions.random_products(seed, is_wild)
    or expressions.random(seed)
  local why = differs(def, seed)
  if not why then return true end
  local small = smallest(def, seed)
  print(("seed %d: %s\n  smallest: %s"):format(seed, why, tostring(small.score or "")))
  for name, x in pairs(small.summary or {}) do print("  ", name, x) end
  for _, name in ipairs { "bias", "log_weight", "mask" } do
    if small[name] then print("  ", name, small[name]) end
  end
  for name, x in pairs(small.emit or {}) do print("  ", "emit." .. name, x) end
  return false
end

local bad = 0
emulation.with(function()
  for seed = from, to do
    local is_fine = set.place == "map" and is_map_right or is_right
    if not is_fine(seed) then bad = bad + 1 end
  end
end)
temporary.remove()
print(("%d expressions, %d differ"):format(to - from + 1, bad))
if bad > 0 then os.exit(1) end
