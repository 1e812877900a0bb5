--- Runs expressions as a policy's kernels on small random caches, beside the reference
-- (spec/reference/expression.lua), and makes random expressions. All stored numbers are
-- small whole ones, so sums and products are exact and comparisons have one answer.
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local reference = require "spec.reference.expression"
local support = require "spec.support"

local e = kv.expr
local M = {}

-- ---- random numbers -------------------------------------------------------------------

--- A small generator with a state of its own: draw(n) is one of 0 ... n - 1.
function M.draws(seed)
  local state = seed * 2654435761 % 2 ^ 32 + 1
  local function draw(n)
    state = (state * 1664525 + 1013904223) % 2 ^ 32
    return math.floor(state / 2 ^ 32 * n)
  end
  for _ = 1, 5 do draw(2) end
  return draw
end

-- ---- a cache --------------------------------------------------------------------------

--- Makes V of token 1, 5, 9, ... of each block NaN.
local function poison_values(memory, o)
  local rows = o.blocks * 2 * o.kv_heads * o.block_size
  for row = 0, rows - 1 do
    local token = row % o.block_size
    local is_v = math.floor(row / o.block_size / o.kv_heads) % 2 == 1
    if is_v and token % 4 == 1 then
      for x = 1, o.head_dim do memory[row * o.head_dim + x] = 0 / 0 end
    end
  end
end

--- Makes the first number of each group of a row so large that its scale is 1, and that
-- small whole numbers are held as they are.
local LARGEST = { int8 = { group = 64, most = 127 }, f8_latent = { group = 128,
                                                                  most = 448 } }
local function give_scales(memory, o)
  local of = LARGEST[o.dtype]
  for row = 0, #memory / o.head_dim - 1 do
    for dim = 0, (o.value_dim or o.head_dim) - 1, of.group do
      local at = row * o.head_dim + dim + 1
      if memory[at] == memory[at] then memory[at] = of.most end
    end
  end
end

--- A layer of a small cache, with tables and queries of some sequences.
---@param o table  dtype, group, kv_heads, block_size, head_dim, lens, blocks, scaled,
--                  id: of a policy and a shape (see once), value_dim: values are the
--                  first numbers of their keys, so many; wild: one number in so many is
--                  one of wild_numbers; poison: NaN in V
function M.cache(dev, o, seed)
  local draw = M.draws(seed)
  local c = { o = o, dev = kv.device(dev), draw = draw }
  local function numbers(n)
    local list = {}
    for i = 1, n do
      list[i] = draw(5) - 2
      if o.wild and draw(o.wild) == 0 then list[i] = o.wild_numbers[draw(3) + 1] end
    end
    return list
  end
  local function make(dims)
    local n = 1
    for _, size in ipairs(dims) do n = n * size end
    local list = numbers(n)
    return list, kv.from(c.dev, "f32", dims, list)
  end
  local seqs, width = #o.lens, 0
  for _, length in ipairs(o.lens) do
    width = math.max(width, math.ceil(length / o.block_size))
  end
  c.width, c.seqs = width + 1, seqs
  c.memory = numbers(o.blocks * 2 * o.kv_heads * o.block_size * o.head_dim)
  if o.poison then poison_values(c.memory, o) end
  if LARGEST[o.dtype] then give_scales(c.memory, o) end
  c.layer = kv.from(c.dev, "f32",
    { o.blocks, 2, o.kv_heads, o.block_size, o.head_dim }, c.memory)
  local format
  if o.dtype == "int8" then c.layer, format = support.int8_pages(c.layer)
  elseif o.dtype == "f8_latent" then
    c.layer, format = support.f8_latent_pages(c.layer, o.value_dim)
  elseif o.value_dim then
    c.layer = c.layer:transpose(0, 1):index(0):clone():cast(o.dtype)
    format = kv.format { codec = o.dtype, kv_heads = o.kv_heads,
      block_size = o.block_size, head_dim = o.head_dim, value_dim = o.value_dim }
  else c.layer = c.layer:cast(o.dtype) end
  local q
  c.q, q = make { seqs, o.kv_heads * o.group, o.head_dim }
  c.query = q:cast(o.q_dtype or "f32")
  local order, tables = {}, {}
  for i = 1, o.blocks do order[i] = i - 1 end
  for i = o.blocks, 2, -1 do
    local j = draw(i) + 1
    order[i], order[j] = order[j], order[i]
  end
  local next_block = 0
  for s = 1, seqs do
    for b = 0, c.width - 1 do
      local has = b < math.ceil(o.lens[s] / o.block_size)
      next_block = next_block + (has and 1 or 0)
      tables[#tables + 1] = has and order[next_block] or -1
    end
  end
  c.tables = tables
  if o.scaled then
    c.k_scale = kv.from(c.dev, "f32", { o.kv_heads }, o.scaled)
  end
  local is_packed = o.dtype == "int8" or o.dtype == "f8_latent"
  c.format = format and { name = o.dtype, dtype = is_packed and "bf16" or o.dtype,
                          is_shared = o.value_dim ~= nil,
                          of = function() return format end, scales = function() end,
                          bytes_page = function()
                            return tonumber(kv.C.kvl_format_bytes_page(format))
                          end }
    or support.formats_of(c.layer, c.k_scale, c.k_scale)
  return c
end

--- The policy of a summary and a score, attached to the cache's shape.
function M.attach(c, def, target)
  local o = c.o
  kernel.chosen = target
  local p = policy.define(def) {}
  local ok, why = pcall(policy.attach, p, { device = c.dev, layers = 2, blocks = o.blocks,
    block_size = o.block_size, heads = o.kv_heads * o.group, kv_heads = o.kv_heads,
    head_dim = o.head_dim, value_dim = o.value_dim, dtype = o.dtype,
    max_blocks = o.blocks, scale = 1,
    format = c.format })
  kernel.chosen = nil
  if not ok then error(why, 0) end
  return p
end

--- Computes the summary of all blocks of the sequences.
function M.update(c, p)
  local o, blocks, counts = c.o, {}, {}
  for s = 1, c.seqs do
    for b = 0, math.ceil(o.lens[s] / o.block_size) - 1 do
      blocks[#blocks + 1] = c.tables[(s - 1) * c.width + b + 1]
      counts[#counts + 1] = math.min(o.block_size, o.lens[s] - b * o.block_size)
    end
  end
  blocks[#blocks + 1], counts[#counts + 1] = -1, 1 -- is skipped
  local list = kv.from(c.dev, "i32", { #blocks }, blocks)
  p:on_prefill_offload { layer = 1, blocks = list, k_blocks = list, k = c.layer,
    num_tokens = kv.from(c.dev, "i32", { #counts }, counts), turns = 0 }
end

--- The scores as a list, [seqs, kv_heads, width].
function M.score(c, p)
  local o = c.o
  local out = kv.full(c.dev, "f32", { c.seqs, o.kv_heads, c.width }, 12345)
  local ctx = { query = c.query, cache = c.layer, layer = 1, seqs = c.seqs,
    kv_heads = o.kv_heads, width = c.width, is_prefill = false,
    tables = kv.from(c.dev, "i32", { c.seqs, c.width }, c.tables),
    lens = kv.from(c.dev, "i32", { c.seqs }, o.lens),
    format = c.format,
    new_scores = function() return out end }
  p:score(ctx)
  c.dev:sync()
  return out:list()
end

-- ---- the reference --------------------------------------------------------------------

--- What the reference reads for a block of a sequence.
local function environment(c, p, s, head, b, physical)
  local o, env = c.o, {}
  local unit = o.scaled and o.scaled[head + 1] or 1
  local page = o.block_size * o.head_dim
  local function stored(which)
    local first = ((physical * 2 + which) * o.kv_heads + head) * page
    return function(token, dim)
      return c.memory[first + token * o.head_dim + dim + 1] * unit
    end
  end
  env.k, env.v = stored(0), stored(1)
  env.q = function(h, dim)
    return c.q[((s * o.kv_heads + head) * o.group + h) * o.head_dim + dim + 1]
  end
  env.block, env.length = b, o.lens[s + 1]
  env.blocks = math.ceil(env.length / o.block_size)
  env.tokens = math.min(o.block_size, env.length - b * o.block_size)
  env.layer, env.kv_head, env.block_size = 1, head, o.block_size
  env.known = {}
  env.sizes = { head = o.group, token = o.block_size, dim = o.head_dim }
  for dim, size in pairs(o.sizes or {}) do env.sizes[dim] = size end
  env.param = function(name) return p[name] end
  env.const = function(name, at) return o.consts[name](at, env) end
  env.field = function(name, at)
    return reference.eval(p.expressions.fields[name], at, env)
  end
  return env
end

local known = {} -- what the reference gave, by the id of a shape

--- What fn gives, which is computed once for the shapes that share an id: several
-- printers are compared with the same numbers.
function M.once(o, fn, ...)
  if not o.id then return fn(...) end
  known[o.id] = known[o.id] or { fn(...) }
  return unpack(known[o.id])
end

local function expected(c, p, score)
  local o, list = c.o, {}
  for s = 0, c.seqs - 1 do
    for head = 0, o.kv_heads - 1 do
      for b = 0, c.width - 1 do
        local physical = c.tables[s * c.width + b + 1]
        local x = -math.huge
        if physical >= 0 then
          x = reference.eval(score, {}, environment(c, p, s, head, b, physical))
        end
        list[#list + 1] = tonumber(x)
      end
    end
  end
  return list
end

--- The scores that the reference gives, in the same order.
function M.expected(c, p, score) return M.once(c.o, expected, c, p, score) end

--- The first place where two lists differ by more than `tolerance` of the larger number,
-- in words; nil if there is none.
function M.difference(got, want, tolerance)
  for i = 1, #want do
    local a, b = got[i], want[i]
    local same = a == b or a ~= a and b ~= b
      or math.abs(a - b) <= tolerance * math.max(1, math.abs(a), math.abs(b))
    if not same then return ("score %d is %s, expected %s"):format(i, a, b) end
  end
  if #got ~= #want then return ("%d scores, expected %d"):format(#got, #want) end
end

--- The score expression of a policy with its fields put in.
function M.resolved(p)
  local expression = require "kvlab.kernel.expression.expression"
  local place = require "kvlab.kernel.expression.place"
  return expression.resolve(p.expressions.score,
    place.seen(p.expressions.fields or {}, "f32"), "spec")
end

-- ---- random expressions ---------------------------------------------------------------

-- A random node: x, its bound (the largest magnitude), and whether it is exact.
local EXACT_MAX = 2 ^ 20

local Maker = {}
Maker.__index = Maker

local function pick(self, list) return list[self.draw(#list) + 1] end

local function leaf(self)
  local choices = { function() return e.k, 2 end, function() return e.v, 2 end,
    function() return e.tokens, 16 end }
  if self.place == "score" then
    choices = { function() return e.q, 2 end, function() return e.k, 2 end,
      function() return e.block, 8 end, function() return e.length, 128 end,
      function() return e.position, 128 end, function() return e.blocks, 8 end,
      function() return e.kv_head, 4 end, function() return e.param "weight", 3 end,
      function() return e.q, 2 end, function() return e.index, 128 end }
    for _, name in ipairs(support.names(self.fields)) do
      local bound = self.fields[name]
      choices[#choices + 1] = function() return e[name], bound end
      choices[#choices + 1] = choices[#choices]
    end
  end
  if self.leaves then choices = self.leaves
  elseif self.place == "map" then
    choices = { function() return self.inputs[1], 2 end,
      function() return self.inputs[2], 2 end, function() return e.block, 8 end,
      function() return e.length, 128 end, function() return e.blocks, 8 end,
      function() return e.kv_head, 4 end, function() return e.layer, 1 end,
      function() return e.param "weight", 3 end }
  elseif self.draw(8) == 0 then
    return e.const("f32", "table_", "dim"), 2, true
  end
  local x, bound = pick(self, choices)()
  return x, bound, true
end

local build

local function number(self, depth)
  local x, bound, exact = build(self, depth)
  return x, bound, exact
end

--- A comparison of exact values: elsewhere a rounding could turn it.
local function condition(self, depth)
  local a, bound_a, exact_a = number(self, depth)
  if not exact_a then a, bound_a = self.place == "summary" and e.tokens or e.block, 8 end
  local name = pick(self, { "lt", "le", "gt", "ge", "eq", "ne" })
  return a[name](a, math.floor(bound_a / 2) * (self.draw(3) - 1))
end

local BINARY = {
  function(a, b, x, y) return a + b, x + y end,
  function(a, b, x, y) return a - b, x + y end,
  function(a, b, x, y) return a * b, x * y end,
  function(a, b, x, y) return e.max(a, b), math.max(x, y) end,
  function(a, b, x, y) return e.min(a, b), math.max(x, y) end,
}
local UNARY = {
  function(a, x) return -a, x, true end, function(a, x) return a:abs(), x, true end,
  function(a, x) return a:relu(), x, true end,
  function(a) return (a:cast "f32" * 0.25):tanh(), 1, false end,
  function(a) return (a:cast "f32" * 0.125):sigmoid(), 1, false end,
  function(a) return (-(a:abs())):cast "f32":exp(), 1, false end,
  function(a, x) return (a:abs() + 1):sqrt(), math.sqrt(x) + 1, false end,
  function(a, x) return (a:abs() + 1):log(), math.log(x + 1) + 1, false end,
  function(a, x) return a / 3, x / 3, false end,
}

function build(self, depth)
  if depth == 0 then return leaf(self) end
  local kind = self.draw(self.place == "hook" and 8 or 10)
  if kind < 4 then
    local a, x, exact_a = number(self, depth - 1)
    local b, y, exact_b = number(self, depth - 1)
    local r, bound = pick(self, BINARY)(a, b, x, y)
    if bound > EXACT_MAX then r, bound = e.max(a, b), math.max(x, y) end
    return r, bound, exact_a and exact_b
  elseif kind < 6 then
    local a, x, exact = number(self, depth - 1)
    local r, bound, stays = pick(self, UNARY)(a, x)
    return r, bound, exact and stays
  elseif kind == 6 then
    local c = condition(self, depth - 1)
    local a, x, exact_a = number(self, depth - 1)
    local b, y, exact_b = number(self, depth - 1)
    return c:where(a, b), math.max(x, y), exact_a and exact_b
  elseif kind == 7 then
    local c = condition(self, depth - 1)
    return c:cast(pick(self, { "f32", "i32" })), 1, true
  end
  local a, x, exact = number(self, depth - 1)
  return self:reduce(a, x, exact)
end

local SIZE = { head = 4, token = 16, dim = 64 }

--- Reduces over one of the dimensions, if there is one.
function Maker:reduce(a, bound, exact)
  local dims = a.dims
  if not dims then -- a field's are not known yet
    dims = self.dims_of(a)
  end
  if #dims == 0 then return a, bound, exact end
  local dim = pick(self, dims)
  local how = self.draw(8)
  local sum = bound * (SIZE[dim] or 64)
  if how < 3 and sum < EXACT_MAX then return a:sum(dim), sum, exact end
  if how == 3 then return a:min(dim), bound, exact end
  if how == 4 and exact then return a:argmax(dim), 64, true end
  if how == 5 then return a:mean(dim), bound, false end
  if how == 6 and bound < 50 then return a:logsumexp(dim), bound + 5, false end
  if how == 7 and exact then
    return a:gt(0)[self.draw(2) == 0 and "any" or "all"](a:gt(0), dim):cast "f32", 1, true
  end
  return a:max(dim), bound, exact
end

--- Reduces over everything that `keep` does not name.
local function down_to(self, x, bound, exact, keep)
  while true do
    local left = {}
    for _, dim in ipairs(x.dims or self.dims_of(x)) do
      if not keep[dim] then left[#left + 1] = dim end
    end
    if #left == 0 then return x, bound, exact end
    x, bound, exact = self:reduce(x, bound, exact)
  end
end

--- Makes random expressions of leaves, for a place.
---@param leaves table[]  functions that give an expression and its bound
function M.maker(draw, place, leaves)
  local self = setmetatable({ draw = draw, place = place, leaves = leaves }, Maker)
  self.dims_of = function(x) return x.dims end
  return self
end

--- An expression of a maker, its bound, and whether it is exact.
M.build, M.condition, M.down_to = build, condition, down_to

--- A policy of random expressions: a summary with some fields, and a score.
---@param seed integer
function M.random(seed)
  local expression = require "kvlab.kernel.expression.expression"
  local draw = M.draws(seed)
  local summary, bounds = {}, {}
  local self = setmetatable({ draw = draw, place = "summary", fields = {} }, Maker)
  self.dims_of = function(x) return x.dims end
  for i = 1, draw(3) do
    local name = "f" .. i
    local x, bound, exact = build(self, 1 + draw(3))
    x, bound, exact = down_to(self, x, bound, exact, { dim = draw(2) == 0 })
    if x.op ~= "number" and exact then
      summary[name], bounds[name] = x, bound
    end
  end
  local place = require "kvlab.kernel.expression.place"
  local fields = place.fields(summary, "policy random")
  self.place, self.fields = "score", bounds
  self.dims_of = function(x)
    return expression.resolve(x, place.seen(fields, "f32"), "random").dims
  end
  local x, bound, exact = build(self, 2 + draw(3))
  x = down_to(self, x, bound, exact, {})
  if not (x.type == "f32" or x.type == "i32") and x.dims then x = x:cast "f32" end
  return { name = "random", decode = true, defaults = { weight = 3, ratio = 0.5 },
    summary = next(summary) and summary or nil, score = x * 1,
    init = function(p, shape)
      p.table_ = kv.from(shape.device, "f32", { shape.head_dim },
        M.table_(shape.head_dim))
    end }, exact
end

--- A random map of two tensors.
---@param seed integer
function M.random_map(seed)
  return kv.kernel.map(function(x, y)
    local self = setmetatable({ draw = M.draws(seed), place = "map", inputs = { x, y },
      dims_of = function(one) return one.dims end }, Maker)
    local made = build(self, 2 + self.draw(4))
    if made.type ~= "f32" and made.type ~= "i32" then made = made:cast "f32" end
    return made + (x - y) * 0
  end)
end

-- ---- random products ------------------------------------------------------------------

-- What rows are multiplied with.
local FACTORS = {
  function(q) return q end, function(q) return q end, function(q) return -q end,
  function(q) return q * 0.5 end, function(q) return q:relu() end,
  function(q) return q:abs() end, function(q) return e.param "weight" * q end,
  function(q, table_) return q * table_ end,
  function(q, table_) return e.max(q, table_) end,
  function(q) return q + 1 end,
}

--- A sum over dim of products of queries and rows.
local function random_product(draw, rows, has_bounds)
  local table_ = e.const("f32", "table_", "dim")
  local function factor() return FACTORS[draw(#FACTORS) + 1](e.q, table_) end
  local function row() return rows[draw(#rows) + 1] end
  local kind, f = draw(6), factor()
  if has_bounds and kind < 3 then
    local choose = kind == 0 and e.min or e.max
    local x = choose(f * e.lo, e.hi * f)
    return (draw(2) == 0 and x or x - factor() * row()):sum "dim"
  end
  if kind < 3 then return (f * row()):sum "dim" end
  if kind == 3 then return (f * row() - row() / 2):sum "dim" end
  if kind == 4 then return (f * (row() + row() * table_)):sum "dim" end
  return (-(f * row()) + factor() * row()):sum "dim"
end

--- A policy whose score has sums over dim that are matrix products.
---@param seed integer
---@param is_wild? boolean  numbers that are not finite are among those of the cache
function M.random_products(seed, is_wild)
  local draw = M.draws(seed)
  local summary, rows, has_bounds = nil, { e.k, e.v }, false
  local kind = draw(4)
  if kind < 2 then
    summary = { lo = e.k:min "token", hi = e.k:max "token" }
    if draw(3) == 0 then
      local dtypes = { "f32", "f16", "bf16", not is_wild and "f8e4m3" or nil }
      local dtype = pick({ draw = draw }, dtypes)
      summary.lo, summary.hi = summary.lo:store(dtype), summary.hi:store(dtype)
    end
    rows, has_bounds = { e.lo, e.hi }, true
  elseif kind == 2 then
    local dtype = pick({ draw = draw }, { "f32", "f16", "bf16" })
    summary = { some = (e.k:max "token" + e.v:min "token"):store(dtype),
                other = e.v:max "token":store(dtype), n = e.tokens }
    rows = { e.some, e.other }
  end
  local x = random_product(draw, rows, has_bounds)
  if draw(3) == 0 then x = x - random_product(draw, rows, has_bounds) end
  if draw(4) == 0 then x = e.max(x, e.block * 4) end
  if kind == 2 and draw(2) == 0 then x = x + e.n end
  local names = { "max", "max", "mean", "min", "sum" }
  if not is_wild then names[#names + 1] = "logsumexp" end
  local function reduced(dim)
    local how = names[draw(#names) + 1]
    if how == "logsumexp" then x = x * 0.125 end
    x = x[how](x, dim)
  end
  if kind == 3 then
    if draw(3) == 0 then x = x + e.position * 0.25 end
    if draw(2) == 0 then x = e.where(e.position:ge(2), x, -1) end
    reduced "token"
  end
  reduced "head"
  if draw(4) == 0 then x = x * 0.5 + e.blocks end
  return { name = "products", decode = true, defaults = { weight = 3 }, summary = summary,
    score = x,
    init = function(p, shape)
      p.table_ = kv.from(shape.device, "f32", { shape.head_dim },
        M.table_(shape.head_dim))
    end }
end

--- A shape of a cache for it.
function M.products_shape(seed, is_wild)
  local draw = M.draws(seed + 2000)
  local function one_of(...) return select(draw(select("#", ...)) + 1, ...) end
  local size = one_of(4, 8, 16, 16, 32, 48, 12)
  local o = { dtype = (one_of("f32", "bf16", "f16", "f8e4m3")),
    q_dtype = (one_of("f32", "bf16", "f16")),
    group = (one_of(1, 2, 4, 3, 7, 8, 11, 16, 20)), kv_heads = 1 + draw(2),
    block_size = size, head_dim = (one_of(16, 32, 48, 64, 80, 128)),
    lens = { 0, 2 * size + 3, 1 + draw(90) }, blocks = 30 }
  if draw(6) == 0 then -- several turns of each warp
    o.block_size, o.head_dim, o.lens, o.blocks = 4, 16, { 5, 4 * 170 - 1 }, 180
  end
  if o.dtype == "f8e4m3" and o.kv_heads == 2 then o.scaled = { 2, 0.5 } end
  if is_wild then
    o.wild, o.wild_numbers = 500, { math.huge, -math.huge, 0 / 0 }
    if o.dtype == "f8e4m3" then o.dtype, o.scaled = "bf16", nil end
  end
  local list = M.table_(o.head_dim)
  o.consts = { table_ = function(at) return list[at.dim + 1] end }
  return o
end

--- The numbers of the const that random expressions read.
function M.table_(n)
  local list = {}
  for i = 1, n do list[i] = (i * 7) % 5 - 2 end
  return list
end

--- A shape of a cache for a random policy.
function M.shape(seed)
  local draw = M.draws(seed + 1000)
  local function one_of(...) return select(draw(select("#", ...)) + 1, ...) end
  local o = { dtype = (one_of("f32", "bf16", "f16", "f8e4m3")),
    group = (one_of(1, 2, 4, 3)), kv_heads = 1 + draw(2), block_size = (one_of(4, 8, 16)),
    head_dim = (one_of(16, 32, 48, 64)), lens = { 0, 19, 32, 1 }, blocks = 30 }
  if o.dtype == "f8e4m3" and o.kv_heads == 2 then o.scaled = { 2, 0.5 } end
  local list = M.table_(o.head_dim)
  o.consts = { table_ = function(at) return list[at.dim + 1] end }
  return o
end

return M
