--- Runs maps (kv.kernel.map) on small random tensors, beside the reference by the book
-- (spec/reference/expression.lua).
local expression = require "kvlab.kernel.expression.expression"
local expressions = require "spec.expressions"
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local reference = require "spec.reference.expression"

local M = {}

local SEQS, KV_HEADS, WIDTH, BLOCK = 4, 2, 9, 4
M.SEQS, M.KV_HEADS, M.WIDTH, M.BLOCK = SEQS, KV_HEADS, WIDTH, BLOCK
local LENS = { 0, 1, 4 * BLOCK, WIDTH * BLOCK - 1 }

--- A policy that has this map as `mapped`, attached to two layers of a small shape.
function M.attach(dev, map, more, target)
  local def = { name = "mine", decode = true, mapped = map, defaults = { weight = 3 },
                score = function() end }
  for key, value in pairs(more or {}) do def[key] = value end
  local dtype = def.dtype or "f32" -- of the cache, which a map does not read
  def.dtype = nil
  local p = policy.define(def) {}
  kernel.chosen = target
  local ok, why = pcall(policy.attach, p, { device = kv.device(dev), layers = 2,
    blocks = 20, block_size = BLOCK, heads = 2 * KV_HEADS, kv_heads = KV_HEADS,
    head_dim = 16, dtype = dtype, max_blocks = WIDTH, scale = 1 })
  kernel.chosen = nil
  if not ok then error(why, 0) end
  return p
end

--- A step of four sequences, one of them empty, in layer 1.
function M.context(dev)
  local ctx = { seqs = SEQS, kv_heads = KV_HEADS, width = WIDTH, block_size = BLOCK,
    layer = 1, lens = kv.from(dev, "i32", LENS) }
  function ctx.new_scores(_, heads)
    return kv.full(dev, "f32", { SEQS, heads, WIDTH }, 12345)
  end
  return ctx
end

local function numbers(dev, heads, seed, list)
  local draw, values = expressions.draws(seed), {}
  for i = 1, SEQS * heads * WIDTH do
    values[i] = list and list[draw(#list) + 1] or draw(5) - 2
  end
  return kv.from(dev, "f32", { SEQS, heads, WIDTH }, values), values
end

--- What the reference gives, in the order of the result.
local function expected(p, map, heads, inputs)
  local x = map.expression
  local want = {}
  for s = 0, SEQS - 1 do
    for head = 0, heads - 1 do
      for b = 0, WIDTH - 1 do
        local env = { block = b, length = LENS[s + 1], layer = 1, kv_head = head,
          blocks = math.ceil(LENS[s + 1] / BLOCK), sizes = {},
          param = function(name) return p[name] end,
          const = function() return ({ 1, 2, 3, 4 })[2 + head + 1] end, -- layer 1
          input = function(name)
            local one = inputs[name]
            local row = one.heads == 1 and s or s * heads + head
            return one.values[row * WIDTH + b + 1]
          end }
        want[#want + 1] = tonumber(reference.eval(x, {}, env))
      end
    end
  end
  return want
end

--- How a map's results differ from the reference, with and without out, in words; nil:
-- they do not.
---@param heads table       of the tensor for each parameter, by name
---@param out_heads integer  of the result
---@param more? table       fields of the policy's definition; dtype of the cache
---@param list? number[]    the values that the tensors have
function M.difference(dev, target, map, heads, out_heads, more, list)
  local p, ctx, given, inputs = M.attach(dev, map, more, target), M.context(dev), {}, {}
  for i, name in ipairs(map.names) do
    local values
    given[i], values = numbers(dev, heads[name], name == "x" and 1 or 2, list)
    inputs[name] = { heads = heads[name], values = values }
  end
  local want, n = expected(p, map, out_heads, inputs), #map.names
  local got = p:mapped(ctx, unpack(given, 1, n))
  if got:size(1) ~= out_heads then return ("it has %d heads"):format(got:size(1)) end
  given[n + 1] = kv.full(dev, "f32", { SEQS, out_heads, WIDTH }, 0 / 0)
  local out = p:mapped(ctx, unpack(given, 1, n + 1))
  if out.ptr ~= given[n + 1].ptr then return "it returns another tensor than out" end
  return expressions.difference(got:list(), want, 1e-4)
    or expressions.difference(out:list(), got:list(), 0)
end

--- The same for a random map.
---@param seed integer
function M.random_difference(dev, target, seed)
  local map, by_head = expressions.random_map(seed), false
  expression.each(map.expression, function(x)
    by_head = by_head or x.op == "leaf" and x.name == "kv_head"
  end)
  local why = M.difference(dev, target, map, { x = 1, y = 1 }, by_head and 2 or 1)
    or M.difference(dev, target, map, { x = 2, y = 1 }, 2)
  return why and ("seed %d: %s\n%s"):format(seed, why, expression.text(map.expression))
end

return M
