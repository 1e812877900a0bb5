--- Shows what an expression becomes: expression:source "cuda".
local expression = require "kvlab.kernel.expression.expression"
local device = require "kvlab.tensor.device"
local kernel = require "kvlab.kernel.run.kernel"
local library = require "kvlab.library"
local options = require "kvlab.options"
local pages = require "kvlab.tensor.pages"
local place = require "kvlab.kernel.expression.place"

local M = {}

-- The defaults for the cache and the consts.
M.FORMAT, M.GROUP, M.BLOCK_SIZE, M.HEAD_DIM, M.KV_HEADS, M.OWN = "f32", 4, 16, 128, 8, 64

local IS_SCORE = { q = true, index = true, position = true, block = true, blocks = true,
                   length = true }

--- The place where an expression can stand: "emit" if it reads weights; "map" if it reads
-- an input; "score" if it reads a query, where a block is, or a field; else "summary".
---@param x kvlab.Expression
---@return string
function M.place_of(x)
  local has_input, is_score, has_weight = false, false, false
  expression.each(x, function(one)
    has_weight = has_weight or one.op == "leaf" and one.name == "weight"
    has_input = has_input or one.op == "input"
    is_score = is_score or one.op == "field" or one.op == "leaf" and IS_SCORE[one.name]
  end)
  return has_weight and "emit" or has_input and "map" or is_score and "score" or "summary"
end

--- The options of a plan, with a size for every dimension.
local function plan_options(o)
  local own = o.sizes or {}
  local all = { codec = o.format or M.FORMAT, group = o.group or M.GROUP, layers = 1,
    block_size = o.block_size or M.BLOCK_SIZE, head_dim = o.head_dim or M.HEAD_DIM,
    kv_heads = M.KV_HEADS, is_shared = o.format == "f8_latent" }
  local sizes = { head = all.group, token = all.block_size, dim = all.head_dim,
                  layer = 1, kv_head = all.kv_heads }
  function all.const_dims(x)
    local dims = {}
    for i, dim in ipairs(x.stored) do dims[i] = sizes[dim] or own[dim] or M.OWN end
    return dims
  end
  return all
end

local function plan_of(x, o)
  local all, where = plan_options(o), o.place or M.place_of(x)
  if where == "map" then return place.map(x, "map", all) end
  if where == "emit" then return place.emit("value", x, "source", all) end
  if where == "prompt" then
    return place.prompt({ emit = { value = x } }, "source", all)
  end
  if where == "summary" then
    return place.summary(place.fields({ value = x }, "source"), "source", all)
  end
  return place.score(x, place.fields(o.summary or {}, "source"), "source", all)
end

local SOURCE = {
  place = options.one_of("summary", "score", "map", "emit", "prompt"),
  format = options.one_of(unpack(pages.NAMES)), group = options.count,
  block_size = options.within(1, 4096), head_dim = options.within(8, 256),
  summary = options.table, sizes = options.table,
}
local TARGET = options.one_of("c", "cuda", "lua")

--- The source of the kernel that computes the expression: "c", for this machine's
-- processor, "cuda" or "lua". The place is an emit in decode if it reads weights, a map
-- if it reads an input, a score if it reads a query, a field or where a block is, else a
-- summary. The place "prompt" is an emit in prefill.
---@param target string
---@param o? table  place: summary, score, map, emit or prompt, if it is another one;
--                  format (f32) of the cache, group (4), block_size (16), head_dim
--                  (128); summary: the fields that a score reads, as in a policy; sizes:
--                  of dimensions of consts that are not the model's, by name (64 each)
---@return string
function expression.methods.source(self, target, o)
  options.argument("source", "target", target, TARGET)
  o = options.check("source", o, SOURCE)
  for dim, size in pairs(o.sizes or {}) do
    options.argument("source", "sizes." .. tostring(dim), size, options.count)
  end
  if target == "c" then target = kernel.target(device.device "cpu") end
  return (kernel.print(plan_of(self, o), target == "cuda" and "sm_90a" or target))
end

--- Bytes that one launch of a kernel over `blocks` blocks of one sequence reads and
-- writes; of a map, over a row of so many blocks for each KV head.
---@param plan kvlab.Plan
---@param blocks integer
---@return integer
function M.bytes(plan, blocks)
  local sizes, bytes = plan.sizes, plan.place == "score" and 4 or 0
  local function size(dtype) return library.C.kvl_dtype_bytes(library.dtypes[dtype]) end
  if plan.place == "map" then
    bytes = 4 * (#plan.inputs + 1)
  else
    for _, name in ipairs { "k", "v" } do
      if plan.uses[name] then bytes = bytes + pages.strip_bytes(plan) end
    end
    for _, field in ipairs(plan.fields) do
      bytes = bytes + field.count * size(field.dtype)
    end
  end
  if plan.place == "summary" then
    for _, root in ipairs(plan.roots) do bytes = bytes + root.count * size(root.dtype) end
  end
  return bytes * blocks * sizes.kv_head
end

return M
