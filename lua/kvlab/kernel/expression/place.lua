--- The places where an expression can stand, and what a kernel for it needs: a plan, from
-- which a printer writes the kernel and kernel/run/kernel.lua fills its arguments.
--
--   summary   a block's tokens -> the fields of a summary, for a list of blocks
--   score     the newest query and a block -> a number for each block and KV head
--   map       tensors [seqs, kv_heads, width] -> one of that shape, element by element
--   hook      a query head and a key that it sees -> what is added to their score, and
--             whether the key is seen at all
--   emit      the weights of a block's keys -> a number for each block, or for each of
--             its tokens, and KV head, in a decode step, from the scores that attention
--             kept
--   prompt    the same in a prefill: the sum or the maximum over the queries of the
--             chunk, from scores that are computed again
local expression = require "kvlab.kernel.expression.expression"
local ffi = require "ffi"
local of_query = require "kvlab.kernel.expression.of_query"
local options = require "kvlab.options"
local pages = require "kvlab.tensor.pages"
local sorted = require "kvlab.sorted"

local M = {}

---@class kvlab.Plan
---@field place string
---@field what string       for errors: "policy quest: score"
---@field roots table[]     name, node, dtype (of the memory that it is stored in); of an
--                         emit also join (sum or max over queries) and by_token
---@field sizes table<string, integer>
---@field codec string      of the cache
---@field dtype string      of keys and values that are read out of it
---@field scaled boolean    it reads K and V, and the cache holds K / k_scale, V / v_scale
---@field fields table[]    what is read of the summary: name, node, count, dtype
---@field definitions table<string, kvlab.Expression>  of the summary's fields; of a score
---@field consts kvlab.Expression[]
---@field params kvlab.Expression[]
---@field inputs string[]
---@field uses table<string, boolean>  leaves by name
---@field of_query table<string, boolean>|nil  of a prompt: leaves that differ by query
---@field query_values table[]|nil  of a prompt: values of the query alone, name and node;
--                         "needed" is false for queries that add 0

local AVAILABLE = {
  summary = { k = true, v = true, tokens = true, layer = true, kv_head = true },
  score = { q = true, k = true, v = true, tokens = true, index = true, position = true,
            block = true, blocks = true, length = true, layer = true, kv_head = true,
            scale = true },
  map = { block = true, blocks = true, length = true, layer = true, kv_head = true,
          scale = true },
  hook = { logit = true, index = true, position = true, query_index = true,
           query_position = true, block = true, blocks = true, length = true,
           layer = true, kv_head = true, scale = true },
  emit = { weight = true, index = true, position = true, query_index = true,
           query_position = true, tokens = true, block = true, blocks = true,
           length = true, layer = true, kv_head = true, scale = true },
  prompt = { logit = true, index = true, position = true, query_index = true,
             query_position = true, tokens = true, block = true, blocks = true,
             length = true, layer = true, kv_head = true, scale = true },
}
local PLACE_NAMES = { summary = "a summary", score = "a score", map = "a map",
                      hook = "a bias, a mask or a log_weight", emit = "an emit",
                      prompt = "an emit" }
-- What stands for the weight in the kernel of an emit.
local INTERNAL = { score = true, lse = true, seen_from = true }
-- Places whose inputs are fields of the policy.
local HAS_INPUTS = { map = true, hook = true, emit = true, prompt = true }

--- The expression with the attention's scale put in. The scale is a constant of the
-- kernel, like the sizes of the dimensions.
local function with_scale(x, o)
  local scale = o.scale or 1 / math.sqrt(o.head_dim)
  return expression.replace(x, expression.leaves.scale,
    expression.number(scale, "f32", "scale"))
end

--- The expression with indices in place of positions. A sequence holds the whole of its
-- text, so the two are the same; of the code for expressions, only this function relies
-- on that.
local function in_indices(x)
  local leaves = expression.leaves
  x = expression.replace(x, leaves.position, leaves.index)
  return expression.replace(x, leaves.query_position, leaves.query_index)
end

local function fail(x, message, ...)
  error(("%s: %s"):format(expression.line_of(x), message:format(...)), 0)
end

-- ---- what is stored as the cache stores it --------------------------------------------

-- These operations leave an element of K or V as it is.
local KEEPS = { min = true, max = true }

--- "k" or "v" if the value is an element of K or V itself, so that it can be stored in
-- the cache's dtype without a loss; else nil.
local function raw_of(x, raw)
  if x.op == "leaf" then return (x.name == "k" or x.name == "v") and x.name or nil end
  if x.op == "field" then return x.raw end
  if x.op == "store" then return raw[x.args[1]] end
  if not KEEPS[x.op] then return nil end
  local first = raw[x.args[1]]
  for _, arg in ipairs(x.args) do if raw[arg] ~= first then return nil end end
  return first
end

--- Notes which nodes are raw.
local function raws(root)
  local raw = {}
  expression.each(root, function(x) raw[x] = raw_of(x, raw) end)
  return raw
end

--- The same expression with added nodes "unit", which multiply by the scale of K or V:
-- one wherever a raw value and one that is not raw are operands of the same node.
local function with_units(root, keep_root)
  local raw, new = raws(root), {}
  local function unit(x)
    if not raw[x] then return new[x] end
    return setmetatable({ op = "unit", unit = raw[x], args = { new[x] }, dims = x.dims,
      type = "f32", line = x.line }, expression.Expression)
  end
  expression.each(root, function(x)
    local copy = {}
    for key, value in pairs(x) do copy[key] = value end
    copy.args = {}
    for i, arg in ipairs(x.args) do copy.args[i] = raw[x] and new[arg] or unit(arg) end
    new[x] = setmetatable(copy, expression.Expression)
  end)
  return keep_root and new[root] or unit(root)
end

-- ---- plans ----------------------------------------------------------------------------

--- Records the size of a dimension; raises if it has another size elsewhere.
local function set_size(plan, x, dim, size)
  local known = plan.sizes[dim]
  if known and known ~= size then
    fail(x, "%s: dimension %s of %s is %d, and %d elsewhere", plan.what, dim,
      expression.text(x), size, known)
  end
  plan.sizes[dim] = size
end

local function check_leaf(plan, root, x)
  if x.name == "v" and plan.is_shared then
    fail(root, "%s: v is read where values are the first numbers of their keys, expected "
      .. "k alone", plan.what)
  end
  if AVAILABLE[plan.place][x.name] or INTERNAL[x.name] then return end
  fail(root, "%s: there is no %s in %s, which knows %s", plan.what, x.name,
    PLACE_NAMES[plan.place], table.concat(sorted.keys(AVAILABLE[plan.place]), ", "))
end

--- Raises if the same const is another tensor elsewhere.
local function check_same_const(plan, x, other)
  local a, b = ("%s [%s]"):format(x.dtype, table.concat(x.stored, ", ")),
    ("%s [%s]"):format(other.dtype, table.concat(other.stored, ", "))
  if a ~= b then
    fail(x, "%s: the const %s is %s here and %s on %s", plan.what, x.name, a, b,
      other.line)
  end
end

--- Adds to the plan what an expression reads. consts(node) returns the tensor of a const.
local function add_uses(plan, root, o)
  local seen = plan.seen
  expression.each(root, function(x)
    if x.op == "leaf" then
      check_leaf(plan, root, x)
      plan.uses[x.name] = true
    elseif x.op == "param" and not seen["param " .. x.name] then
      seen["param " .. x.name] = true
      plan.params[#plan.params + 1] = x
    elseif x.op == "input" then
      if not HAS_INPUTS[plan.place] then
        fail(x, "%s: an input is for a map and for attention, not for a %s", plan.what,
          plan.place)
      end
      if not seen["input " .. x.name] then
        seen["input " .. x.name] = true
        plan.inputs[#plan.inputs + 1] = x.name
      end
    elseif x.op == "field" and not seen["field " .. x.name] then
      seen["field " .. x.name] = true
      plan.fields[#plan.fields + 1] = { name = x.name, node = x, dtype = x.dtype }
    elseif x.op == "const" and seen["const " .. x.name] then
      check_same_const(plan, x, seen["const " .. x.name])
    elseif x.op == "const" then
      seen["const " .. x.name] = x
      plan.consts[#plan.consts + 1] = x
      for i, size in ipairs(o.const_dims(x)) do
        set_size(plan, x, x.stored[i], size)
      end
    elseif x.op == "pack" then
      set_size(plan, x, "word", math.ceil(plan.sizes[x.over] / 32))
    end
  end)
end

--- How many elements a node has.
local function count_of(plan, x)
  local count = 1
  for _, dim in ipairs(x.dims) do
    if not plan.sizes[dim] then
      fail(x, "%s: the size of dimension %s is not known", plan.what, dim)
    end
    count = count * plan.sizes[dim]
  end
  return count
end

local STORED = { f32 = "f32", i32 = "i32", u32 = "i32", u64 = "u64", bool = "u8" }

--- The dtype in which a field is stored.
local function field_dtype(root, cache_dtype)
  if root.op == "store" then
    if root.type ~= "f32" then
      fail(root, "store: %s is %s, expected f32", expression.text(root.args[1]),
        root.type)
    end
    return root.dtype
  end
  return raws(root)[root] and cache_dtype or STORED[root.type]
end

local function new_plan(place, what, o)
  local plan = { place = place, what = what, roots = {}, fields = {}, consts = {},
    params = {}, inputs = {}, uses = {}, seen = {}, codec = o.codec,
    dtype = pages.CODECS[o.codec].dtype, is_shared = o.is_shared,
    value_dim = o.value_dim or o.head_dim,
    scaled = o.codec == "f8e4m3" and AVAILABLE[place].k or false,
    sizes = { head = o.group, token = o.block_size, dim = o.head_dim, layer = o.layers,
              kv_head = o.kv_heads } }
  for dim, size in pairs(o.sizes or {}) do plan.sizes[dim] = size end
  return plan
end

local function add_root(plan, name, node, dtype, o)
  add_uses(plan, node, o)
  node = in_indices(node)
  local keep = dtype == plan.dtype and plan.place == "summary" and raws(node)[node]
    and node.op ~= "store"
  plan.roots[#plan.roots + 1] = { name = name, dtype = dtype,
    count = count_of(plan, node), node = plan.scaled and with_units(node, keep) or node }
end

--- Raises for an entry of `summary` or `emit` whose key is no name: kernels are text, and
-- the names of what they write stand in it.
---@param table_name string  "summary"
---@param what string  "policy quest"
function M.check_names(table_name, exprs, what)
  for key, x in pairs(exprs) do
    if not expression.is_name(key) then
      local where = expression.is_expression(x) and expression.line_of(x) .. ": " or ""
      error(("%s%s: %s[%s] has no name, expected NAME = an expression, where NAME has "
        .. "letters, digits and _"):format(where, what, table_name, options.shown(key)),
        0)
    end
  end
end

-- The members that the summary of an attached policy has besides its fields.
local METHODS = { update = true, bytes_block = true }

--- The fields of a summary as other expressions see them: their dimensions, types and
-- dtypes. Checks that every expression can be a field.
---@param exprs table<string, kvlab.Expression>
---@param what string  "policy quest"
function M.fields(exprs, what)
  local fields = {}
  if expression.is_expression(exprs) then
    fail(exprs, "%s: summary is an expression, expected a table of its fields: "
      .. "summary = { NAME = ... }", what)
  end
  M.check_names("summary", exprs, what)
  for _, name in ipairs(sorted.keys(exprs)) do
    local x = exprs[name]
    local label = ("%s: summary.%s"):format(what, name)
    if not expression.is_expression(x) then
      error(("%s is %s, expected an expression"):format(label, type(x)), 0)
    end
    if rawget(expression.e, name) then
      fail(x, "%s: expressions have a %s of their own; choose another name", label, name)
    end
    if METHODS[name] then
      fail(x, "%s: a summary has a method %s; choose another name", label, name)
    end
    x = expression.resolve(x, {}, label, exprs)
    if x.op == "number" or x.type == "number" then
      error(("%s is a number, expected an expression of k, v or tokens"):format(label), 0)
    end
    for _, dim in ipairs(x.dims) do
      if dim == "head" then
        fail(x, "%s: %s has the dimension head, and a summary knows no queries", label,
          expression.text(x, 60))
      end
    end
    expression.each(x, function(one)
      if one.op == "leaf" then check_leaf({ place = "summary", what = label }, x, one) end
    end)
    fields[name] = x
  end
  return fields
end

--- A kernel that computes all fields of a summary.
---@param fields table<string, kvlab.Expression>  as M.fields gives them
---@param o table  codec, group, block_size, head_dim, layers, kv_heads, const_dims(node)
---@return kvlab.Plan
function M.summary(fields, what, o)
  local plan = new_plan("summary", what .. ": summary", o)
  for _, name in ipairs(sorted.keys(fields)) do
    add_root(plan, name, fields[name], field_dtype(fields[name], plan.dtype), o)
  end
  return plan
end

--- The fields in the form that expressions need to read them.
---@param fields table<string, kvlab.Expression>
---@param dtype string  of keys and values that are read out of the cache
function M.seen(fields, dtype)
  local seen = {}
  for name, x in pairs(fields) do
    seen[name] = { dims = x.dims, type = x.type, dtype = field_dtype(x, dtype),
                   raw = x.op ~= "store" and raws(x)[x] or nil }
  end
  return seen
end

--- The expression of a score with its fields put in; raises if it is not one number, or
-- one for each element of the dimension `along`.
---@param along? string
local function check_score(x, seen, what, along)
  x = expression.resolve(x, seen, what)
  local dims = {}
  for _, dim in ipairs(x.dims) do if dim ~= along then dims[#dims + 1] = dim end end
  if #dims > 0 then
    fail(x, "%s: %s has dimensions [%s], expected none%s: reduce it over %s", what,
      expression.text(x, 60), table.concat(x.dims, ", "),
      along and " but " .. along or "", table.concat(dims, " and "))
  end
  if x.type ~= "f32" and x.type ~= "i32" then
    fail(x, "%s: %s is %s, expected f32 or i32", what, expression.text(x, 60), x.type)
  end
  return x
end

--- A kernel that gives every block a score.
function M.score(x, fields, what, o)
  what = what .. ": score"
  x = with_scale(check_score(x, M.seen(fields, pages.CODECS[o.codec].dtype), what), o)
  local plan = new_plan("score", what, o)
  plan.definitions = fields
  add_root(plan, "scores", x, "f32", o)
  for _, field in ipairs(plan.fields) do field.count = count_of(plan, field.node) end
  return plan
end

--- Checks the expression of a score before any device is known: its fields, dimensions
-- and type.
---@param x kvlab.Expression
function M.check_score(x, fields, what)
  what = what .. ": score"
  expression.each(x, function(one)
    if one.op == "leaf" then check_leaf({ place = "score", what = what }, x, one) end
  end)
  check_score(x, M.seen(fields, "f32"), what)
end

--- Checks the expression of a map before any device is known.
---@return kvlab.Expression
function M.check_map(x, what)
  expression.each(x, function(one)
    if one.op == "field" then
      fail(one, "%s: %s is no parameter of the map, and a map reads no summary", what,
        one.name)
    end
  end)
  x = expression.resolve(x, {}, what)
  if #x.dims > 0 then
    fail(x, "%s: %s has dimensions [%s], expected none", what, expression.text(x, 60),
      table.concat(x.dims, ", "))
  end
  if x.type ~= "f32" and x.type ~= "i32" then
    fail(x, "%s: %s is %s, expected f32 or i32", what, expression.text(x, 60), x.type)
  end
  expression.each(x, function(one)
    if one.op == "leaf" and not AVAILABLE.map[one.name] then
      fail(x, "%s: there is no %s in a map, which knows %s", what, one.name,
        table.concat(sorted.keys(AVAILABLE.map), ", "))
    end
  end)
  return x
end

--- A kernel over scores, element by element.
function M.map(x, what, o)
  x = with_scale(M.check_map(x, what), o)
  local plan = new_plan("map", what, o)
  add_root(plan, "out", x, "f32", o)
  return plan
end

-- ---- attention ------------------------------------------------------------------------

local function leaf(name, kind, dims)
  return setmetatable({ op = "leaf", name = name, type = kind, dims = dims, args = {},
    line = name }, expression.Expression)
end

--- The expression for single keys: keys may lie in different blocks, so leaves that
-- describe the block get the dimension token.
local function by_key(root)
  local new = {}
  root = in_indices(root)
  expression.each(root, function(x)
    local copy = {}
    for key, value in pairs(x) do copy[key] = value end
    copy.args = {}
    for i, arg in ipairs(x.args) do copy.args[i] = new[arg] end
    if #copy.args > 0 then copy.dims = expression.join(copy.args) end
    if x.op == "input" or x.op == "leaf" and x.name == "block" then
      copy.dims = { "token" }
    end
    new[x] = setmetatable(copy, expression.Expression)
  end)
  return new[root]
end

local WANTED = { bias = "f32 or i32", log_weight = "f32 or i32", mask = "bool" }

--- Checks an expression of attention's hook, before any device is known.
local function check_hook(name, x, what)
  what = ("%s: %s"):format(what, name)
  if not expression.is_expression(x) then
    error(("%s is %s, expected an expression"):format(what, type(x)), 0)
  end
  expression.each(x, function(one)
    if one.op == "leaf" then check_leaf({ place = "hook", what = what }, x, one) end
  end)
  x = expression.resolve(x, {}, what)
  local wanted = WANTED[name]
  if x.op ~= "number" and not wanted:find(x.type, 1, true) then
    fail(x, "%s: %s is %s, expected %s", what, expression.text(x, 60), x.type, wanted)
  end
  for _, dim in ipairs(x.dims) do
    if dim ~= "head" and dim ~= "token" then
      fail(x, "%s: %s has the dimension %s, expected none but head and token", what,
        expression.text(x, 60), dim)
    end
  end
  expression.each(x, function(one)
    if one.over then
      fail(one, "%s: %s: it is computed for each key by itself and knows no reductions",
        what, expression.text(one, 60))
    end
  end)
  return x
end

--- Checks the parts of a policy's definition that change attention: bias, mask,
-- log_weight, emit. Returns whether there are any.
function M.check_attention(def, what)
  local has = false
  for _, name in ipairs(sorted.keys(WANTED)) do
    if def[name] ~= nil then
      check_hook(name, def[name], what)
      has = true
    end
  end
  M.check_names("emit", def.emit or {}, what)
  for _, name in ipairs(sorted.keys(def.emit or {})) do
    M.check_emit(name, def.emit[name], what)
    has = true
  end
  return has
end

--- The hook of attention: what it adds to a score, and which keys it hides.
---@param def table  bias, mask, log_weight: expressions; each may be nil
---@return kvlab.Plan  roots: add (f32), mask (bool), or one of the two, or none
function M.hook(def, what, o)
  local plan = new_plan("hook", what .. ": attention", o)
  local add
  for _, name in ipairs { "bias", "log_weight" } do
    if def[name] then
      local x = with_scale(check_hook(name, def[name], what), o)
      add = add and add + x or x
    end
  end
  if add then
    if add.type ~= "f32" then add = add + expression.number(0, "f32") end
    add_root(plan, "add", by_key(add), "f32", o)
  end
  if def.mask then
    add_root(plan, "mask", by_key(with_scale(check_hook("mask", def.mask, what), o)),
      "u8", o)
  end
  return plan
end

--- The weight of a key: e^(score - lse), and 0 for what the query does not see.
---@param score kvlab.Expression
---@param mask? kvlab.Expression
local function weight_node(score, mask)
  local e, lse = expression.e, leaf("lse", "f32", { "head" })
  local seen = e.index:ge(leaf("seen_from", "i32", {})):band(lse:gt(-math.huge))
  if mask then seen = seen:band(mask) end
  return seen:where(e.exp(score - lse), 0)
end

-- The number that is emitted where nothing is read, by join.
M.NOTHING = of_query.NOTHING

--- Checks an expression of `emit`, before any device is known.
---@return kvlab.Expression  of one query: none but the dimension token
---@return string join  sum or max: what a prefill makes of the numbers of its queries
function M.check_emit(name, x, what)
  what = ("%s: emit.%s"):format(what, name)
  if not expression.is_expression(x) then
    error(("%s is %s, expected an expression"):format(what, type(x)), 0)
  end
  local join = "sum"
  if x.over == "query" then x, join = x.args[1], x.op end
  x = check_score(x, {}, what, "token")
  expression.each(x, function(one)
    if one.op == "leaf" then check_leaf({ place = "emit", what = what }, x, one) end
  end)
  return x, join
end

--- Adds what is emitted under a name.
local function add_emit(plan, name, x, join, o)
  if x.type ~= "f32" then x = x:cast "f32" end
  add_root(plan, name, x, "f32", o)
  local root = plan.roots[#plan.roots]
  root.join, root.by_token = join, #x.dims > 0
end

--- What attention emits for each block that it read, or for each token of it.
function M.emit(name, x, what, o)
  local of_one, join = M.check_emit(name, x, what)
  local plan = new_plan("emit", ("%s: emit.%s"):format(what, name), o)
  local score = leaf("score", "f32", { "head", "token" })
  add_emit(plan, "out", expression.replace(with_scale(of_one, o),
    expression.leaves.weight, weight_node(score)), join, o)
  return plan
end

--- What attention emits in a prefill: for each block or token, the sum or the maximum
-- over the queries that see it. All of a policy's expressions are one kernel, because
-- they share the weights.
---@param def table  emit, and the bias, mask and log_weight that attention has
---@return kvlab.Plan  roots: those of def.emit, by name
function M.prompt(def, what, o)
  local plan = new_plan("prompt", what .. ": emit", o)
  local score, mask, roots = expression.leaves.logit, nil, {}
  for _, name in ipairs { "bias", "log_weight" } do
    if def[name] then
      score = score + with_scale(check_hook(name, def[name], what), o)
    end
  end
  if def.mask then mask = with_scale(check_hook("mask", def.mask, what), o) end
  local weight = weight_node(score, mask)
  for _, name in ipairs(sorted.keys(def.emit)) do
    local x, join = M.check_emit(name, def.emit[name], what)
    x = with_scale(x, o)
    roots[#roots + 1] = { node = in_indices(x), join = join }
    add_emit(plan, name, expression.replace(x, expression.leaves.weight, weight), join, o)
  end
  plan.query_values = {}
  for _, root in ipairs(plan.roots) do
    root.node = of_query.take_out(root.node, plan.query_values)
  end
  plan.of_query = { query_index = true, lse = true, seen_from = true }
  for _, value in ipairs(plan.query_values) do plan.of_query[value.name] = true end
  local condition = of_query.needed(roots)
  if condition then
    table.insert(plan.query_values, { name = "needed", node = condition })
  end
  plan.needed = condition ~= nil
  return plan
end

-- ---- arguments ------------------------------------------------------------------------

local PAGES_WORDS = ffi.sizeof "struct kvl_pages" / 8

local FRAMES = {
  score = { "pointer q", "pages cache", "pointer tables", "pointer lens",
            "pointer last", "out scores", "int q_dtype", "int seqs", "int kv_heads",
            "int width", "int rows",
            "int layer", "int each" },
  summary = { "pages cache", "pointer k_blocks", "pointer blocks", "pointer counts",
              "int n", "int kv_heads", "int rows", "int layer" },
  map = { "pointer lens", "out out", "int seqs", "int heads", "int width",
          "int block_size", "int layer" },
  hook = { "int width", "int layer" },
  emit = { "pointer selection", "pointer lens", "pointer scores", "pointer lse",
           "out out", "int seqs", "int kv_heads", "int width", "int entries",
           "int selection_heads", "int window", "int layer" },
  prompt = { "pointer q", "pages cache", "pointer tables", "pointer lens",
             "pointer starts", "pointer selection", "pointer slots", "pointer lse",
             "pointer alibi", "int q_dtype", "int seqs",
             "int kv_heads", "int width", "int rows", "int entries",
             "int selection_heads", "int slot_heads", "int window", "int layer",
             "float scale", "float soft_cap" },
}

--- The arguments of a kernel, in order: name, kind (pages, pointer, out, int, float) and
-- where it begins, in words of 8 bytes. Pages are a struct kvl_pages, others one word.
---@param plan kvlab.Plan
---@return table[] list
---@return integer words  of all
function M.arguments(plan)
  local list, words = {}, 0
  local function add(kind, name)
    list[#list + 1] = { kind = kind, name = name, at = words }
    words = words + (kind == "pages" and PAGES_WORDS or 1)
  end
  for _, text in ipairs(FRAMES[plan.place]) do add(text:match "(%S+) (%S+)") end
  if plan.place == "summary" then
    for _, root in ipairs(plan.roots) do add("out", "field_" .. root.name) end
  end
  if plan.place == "prompt" then
    for _, root in ipairs(plan.roots) do add("out", "emit_" .. root.name) end
  end
  for _, field in ipairs(plan.fields) do add("pointer", "field_" .. field.name) end
  for _, x in ipairs(plan.consts) do add("pointer", "const_" .. x.name) end
  for _, name in ipairs(plan.inputs) do
    add("pointer", "in_" .. name)
    add("int", "heads_" .. name)
  end
  for _, x in ipairs(plan.params) do add("float", "param_" .. x.name) end
  return list, words
end

return M
