--- Orders the work of a kernel: which value is computed in which loop. It knows no
-- language; a printer (kernel/print/*.lua) says how each thing is written.
--
-- A value is computed in the innermost loop among those of its dimensions, so everything
-- is computed once, and as early as possible. A reduction is a loop of its own there. If
-- such a value would be computed again in each iteration of an outer loop that it does
-- not depend on, it is computed before that loop, into an array.
--
-- The printer decides how the loop over a dimension runs (its `mode`):
--   loop    an ordinary loop, one element in each iteration
--   unroll  no loop: the text is repeated for every element
--   vector  a loop over vectors of elements; reductions over it end with a horizontal one
--   lanes   the threads of a team hold the elements, a few in each; the text is repeated
--           for those of one thread, and reductions over it end with one over the team
local M = {}

---@class kvlab.Schedule
local Schedule = {}
Schedule.__index = Schedule

-- The most elements of such an array; if it would be larger, the value is computed again.
local ARRAY_MAX = 65536
-- If several loops need a value, each may spend this many operations to compute it again.
local AGAIN_MAX = 16
-- The most lines of a kernel: more would keep a compiler busy for minutes.
local LINES_MAX = 50000

--- Level 1 has what is fixed throughout a kernel (its sequence and KV head), level 2 what
-- is fixed throughout a block.
local FIXED, BLOCK = 1, 2

---@param printer table
---@param sizes table<string, integer>  of each dimension
function M.new(printer, sizes)
  return setmetatable({ printer = printer, sizes = sizes, count = 0, ids = 0, top = FIXED,
    variables = 0, line_count = 0, scopes = { { lines = {}, memo = {} } } }, Schedule)
end

--- A name that nothing else has.
function Schedule:name(prefix)
  self.count = self.count + 1
  return prefix .. self.count
end

--- A name for a value, in whatever way the printer has room for it.
function Schedule:variable(prefix)
  if self.printer.variable then return self.printer:variable(self, prefix) end
  return self:name(prefix)
end

--- Records that the innermost scope has one more variable. Returns how many variables all
-- open scopes have.
function Schedule:count_variable()
  local scope = self.scopes[self.top]
  scope.variables, self.variables = (scope.variables or 0) + 1, self.variables + 1
  return self.variables
end

function Schedule:line(text)
  local lines = self.scopes[self.top].lines
  lines[#lines + 1] = text
  self.line_count = self.line_count + 1
  if self.line_count > LINES_MAX then
    error(("%s: its kernel would have more than %d lines; use fewer reductions inside of "
      .. "each other"):format(self.printer.plan.what, LINES_MAX), 0)
  end
end

--- The result of fn under a key: fn is called once for each key in a scope.
function Schedule:once(key, fn)
  local memo = self.scopes[self.top].memo
  if memo[key] == nil then memo[key] = fn() end
  return memo[key]
end

--- Opens a loop; everything until `pop` is inside of it.
---@param dim string|nil  the dimension that it walks; nil: the blocks
function Schedule:push(dim)
  self.top = self.top + 1
  self.scopes[self.top] = { lines = {}, memo = {}, dim = dim }
  return self.top
end

--- Ends the loop: `head`, its lines and `tail` go into the scope around it.
function Schedule:pop(head, tail)
  local inner = self.scopes[self.top]
  self.scopes[self.top] = nil
  self.top = self.top - 1
  self.variables = self.variables - (inner.variables or 0)
  self:line(head)
  local lines = self.scopes[self.top].lines
  for _, text in ipairs(inner.lines) do lines[#lines + 1] = "  " .. text end
  self:line(tail)
end

--- Calls fn as if only the scopes up to `level` were open. What it opens must be closed.
function Schedule:at(level, fn, ...)
  local inner, top = {}, self.top
  for i = level + 1, top do inner[i], self.scopes[i] = self.scopes[i], nil end
  self.top = level
  local result = fn(self, ...)
  for i = level + 1, top do self.scopes[i] = inner[i] end
  self.top = top
  return result
end

-- ---- what a node is -------------------------------------------------------------------

local VARYING = { k = true, v = true, tokens = true, index = true, block = true,
                  logit = true, score = true }

--- Records for each node: varies (from block to block), height (reductions inside of it),
-- an id, and its dimensions as loops see them. If a printer works on several blocks at
-- once, a node that varies has one more dimension, item.
local function note(self, x)
  local varies = self.printer:varies(x) or x.op == "field" or x.op == "input"
    or x.op == "leaf" and VARYING[x.name]
  local height = 0
  for _, arg in ipairs(x.args) do
    varies = varies or self.varies[arg]
    height = math.max(height, self.heights[arg])
  end
  self.ids = self.ids + 1
  self.id[x] = self.ids
  self.varies[x], self.heights[x] = varies or false, height + (x.over and 1 or 0)
  self.dims[x] = x.dims
  if varies and self.items > 1 then self.dims[x] = { "item", unpack(x.dims) } end
end

-- ---- what several loops need ----------------------------------------------------------

--- Whether a value differs between the iterations of a loop.
local function is_looped(self, x)
  for _, dim in ipairs(x.dims) do
    local mode = self.printer:mode(dim, self.sizes[dim])
    if mode == "loop" or mode == "vector" then return true end
  end
  return false
end

local SEVERAL = {}

--- The loop that needs each value: the group of a reduction, a root, or SEVERAL.
---@param order kvlab.Expression[]  operands first
local function loops_of(self, order)
  local loops = {}
  for i = #order, 1, -1 do
    local x = order[i]
    local loop = self.groups[x] or loops[x] or x
    for _, arg in ipairs(x.args) do
      local other = loops[arg]
      loops[arg] = other ~= nil and other ~= loop and SEVERAL or loop
    end
  end
  return loops
end

--- Counts the operations by which a loop that needs x computes it, up to AGAIN_MAX + 1.
---@return integer  how many they are
local function add_again(again, x)
  local all, count = again[x], 1
  all[x] = true
  for _, arg in ipairs(x.args) do
    for one in pairs(again[arg]) do
      if count > AGAIN_MAX then return count end
      if not all[one] then all[one], count = true, count + 1 end
    end
  end
  return count
end

--- Finds the values that several loops need and that would cost each loop much to compute
-- again; they are computed once, into arrays. Otherwise a chain of n reductions, each
-- over the result of the previous one, would print n loops of up to n operations.
local function find_apart(self, order)
  local loops, again = loops_of(self, order), {}
  self.apart = {}
  for _, x in ipairs(order) do
    again[x] = {}
    if #x.args > 0 and is_looped(self, x) then
      local count = add_again(again, x)
      if count > AGAIN_MAX and loops[x] == SEVERAL then
        self.apart[x], again[x] = true, {}
      end
    end
  end
end

--- Registers the expressions that will be printed.
---@param roots kvlab.Expression[]
---@param each fun(root: table, fn: function, seen: table)  walks a root, operands first
function Schedule:take(roots, each)
  self.varies, self.heights, self.id, self.groups, self.dims = {}, {}, {}, {}, {}
  self.items = self.printer.items or 1
  self.sizes.item = self.items
  local seen, order = {}, {}
  for _, root in ipairs(roots) do
    each(root, function(x)
      note(self, x)
      order[#order + 1] = x
      if not x.over then return end
      local key = ("%s|%s|%s|%d|%s"):format(x.over, table.concat(x.dims, ","),
        tostring(self.varies[x]), self.heights[x], x.op == "pack" and "pack" or "")
      self.groups[key] = self.groups[key] or {}
      table.insert(self.groups[key], x)
      self.groups[x] = self.groups[key]
    end, seen)
  end
  find_apart(self, order)
end

--- The innermost scope that the value depends on.
local function level_of(self, x, bind)
  local level = self.varies[x] and self.block_level or FIXED
  for _, dim in ipairs(self.dims[x]) do
    local to = bind[dim]
    if to.level > level then level = to.level end
  end
  return level
end

local function key_of(self, x, bind)
  local parts = { self.id[x] }
  for i, dim in ipairs(self.dims[x]) do parts[i + 1] = bind[dim].text end
  return table.concat(parts, "|")
end

local function is_vector(x, bind)
  for _, dim in ipairs(x.dims) do if bind[dim].vector then return true end end
  return false
end

-- ---- arrays ---------------------------------------------------------------------------

--- Whether the value would be computed again by a loop that it does not depend on.
local function is_repeated(self, x, bind, level)
  -- a sum along dim gives the number of one token, but a vector over tokens is wanted
  if x.over == "dim" and bind.token and bind.token.vector then return true end
  if x.op == "number" or x.op == "const" or x.op == "param" or #x.dims == 0 then
    return false
  end
  local base = self.varies[x] and self.block_level or FIXED
  if level <= base then return false end
  if self.apart[x] then return true end
  if self.varies[x] and not x.over then return false end -- cheaper to do again
  local bound = {}
  for _, dim in ipairs(self.dims[x]) do
    local to = bind[dim]
    bound[to.level] = true
    if to.also then bound[to.also] = true end
  end
  for i = base + 1, level do if not bound[i] then return true end end
  return false
end

--- What an iteration of a loop binds its dimension to: one element or vector, or several
-- vectors, which reductions inside of the loop compute together.
local function elements_of_turn(text, level, vector, together)
  local list = {}
  for u = 0, together - 1 do
    list[u + 1] = { text = u == 0 and text or ("(%s + %d * VF)"):format(text, u),
                    level = level, vector = vector, turn = together > 1 and list or nil }
  end
  return list
end

--- Binds the dimensions of a list, one after the other, and calls fn with the bindings,
-- inside of the loops that are needed.
function Schedule:over(dims, fn, bind, i)
  bind, i = bind or {}, i or 1
  local dim = dims[i]
  if not dim then return fn(bind) end
  local mode = self.printer:mode(dim, self.sizes[dim])
  if mode == "unroll" or mode == "lanes" then
    for value = 0, self.printer:elements(dim, self.sizes[dim]) - 1 do
      bind[dim] = self.printer:element(dim, value)
      self:over(dims, fn, bind, i + 1)
    end
  else
    local level, together = self:push(dim), 1
    if mode == "vector" and self.printer.vectors_together then
      together = self.printer:vectors_together(dim, self.sizes[dim])
    end
    local head, tail, text = self.printer:loop(self, dim, self.sizes[dim],
      mode == "vector", self.sharing,
      together > 1 and ("%d * VF"):format(together) or nil)
    self.sharing = false
    for _, element in ipairs(elements_of_turn(text, level, mode == "vector", together)) do
      bind[dim] = element
      self:over(dims, fn, bind, i + 1)
    end
    self:pop(head, tail)
  end
  bind[dim] = nil
end

local reduce_group

--- Fills an array of sums along dim for several tokens at a time, if the printer wants
-- that: their sums across lanes are then computed together.
local function fill_by_tokens(self, x, name, item)
  local step = self.printer.tokens_together and self.printer:tokens_together(x)
  if not step then return false end
  local printer, level = self.printer, self:push "token"
  local head, tail, text = printer:loop(self, "token", self.sizes.token, false, false,
    step)
  local others = {}
  for u = 0, step - 1 do
    others[u + 1] = { item = item,
      token = { text = u == 0 and text or ("(%s + %d)"):format(text, u), level = level } }
  end
  reduce_group(self, x, nil, others)
  for _, other in ipairs(others) do
    for _, one in ipairs(self:instances(x, other)) do
      self:line(printer:array_store(name, self:index(x.dims, one), self:value(x, one),
        x.type, false))
    end
  end
  self:pop(head, tail)
  return true
end

local function fill_array(self, x, item)
  local count = 1
  for _, dim in ipairs(x.dims) do count = count * self.sizes[dim] end
  if count > ARRAY_MAX then return nil end
  local printer = self.printer
  if self.apart[x] and self.varies[x] and printer.array_room then
    if count > printer.array_room then return nil end
    printer.array_room = printer.array_room - count
  end
  local own = printer.own -- of an outer array, whose values need this one
  local name = self:variable "array"
  self:line(self.printer:array(name, x.type, count, self.varies[x]))
  if fill_by_tokens(self, x, name, item) then
    printer.own = own
    return name
  end
  self.sharing = not self.varies[x] -- the first loop may be shared by threads
  self:over(x.dims, function(bind)
    local vector = is_vector(x, bind)
    local text = self:value(x, bind)
    self:line(self.printer:array_store(name, self:index(x.dims, bind), text, x.type,
      vector))
  end, { item = item })
  self.sharing = false
  self:line(self.printer:array_filled(self.varies[x]))
  printer.own = own
  return name
end

--- The index of an element in row-major order of these dimensions.
function Schedule:index(dims, bind, stored)
  local text
  for _, dim in ipairs(stored or dims) do
    local at = bind[dim] and bind[dim].text or dim -- layer and kv_head have fixed names
    local first = tonumber(text) -- of an unrolled dimension
    if not text then text = at
    elseif first == 0 then text = at
    elseif first then text = ("%d + %s"):format(first * self.sizes[dim], at)
    else
      text = (text:find " " and "(%s) * %d + %s" or "%s * %d + %s"):format(text,
        self.sizes[dim], at)
    end
  end
  return text or "0"
end

--- The value from an array that holds it for every element of its dimensions.
local function from_array(self, x, bind)
  local base = self.varies[x] and self.block_level or FIXED
  local memo = self.scopes[base].memo
  local key = "array" .. self.id[x] .. (bind.item and bind.item.text or "")
  if memo[key] == nil then
    memo[key] = false -- while it is being filled
    memo[key] = self:at(base, fill_array, x, bind.item) or false
  end
  local name = memo[key]
  if not name then return nil end
  return self.printer:array_load(name, self:index(x.dims, bind), x.type,
    is_vector(x, bind))
end

local function load_array(self, x, bind, text)
  local name = self:variable "x"
  self:line(self.printer:declare(x.type, is_vector(x, bind), name, text))
  return name
end

-- ---- reductions -----------------------------------------------------------------------

--- All bindings of a reduction's dimensions that share its loop: loop dimensions as in
-- `bind`, with all vectors of the iteration, and every element of an unrolled dimension.
local instances
function instances(self, x, bind, others)
  local list = { {} }
  if others then
    local all = {}
    for _, other in ipairs(others) do
      for _, one in ipairs(instances(self, x, other)) do all[#all + 1] = one end
    end
    return all
  end
  for _, dim in ipairs(self.dims[x]) do
    local mode = self.printer:mode(dim, self.sizes[dim])
    local next_list = {}
    for _, one in ipairs(list) do
      local count = (mode == "unroll" or mode == "lanes")
        and self.printer:elements(dim, self.sizes[dim])
      local turn_of = not count and bind[dim].turn
      for value = 0, (count or turn_of and #turn_of or 1) - 1 do
        local copy = {}
        for name, to in pairs(one) do copy[name] = to end
        copy[dim] = count and self.printer:element(dim, value)
          or turn_of and turn_of[value + 1] or bind[dim]
        next_list[#next_list + 1] = copy
      end
    end
    list = next_list
  end
  return list
end

function Schedule:instances(x, bind) return instances(self, x, bind) end

--- One iteration of the loop, or one element of an unrolled loop.
local function turn(self, work, to)
  for _, one in ipairs(work) do
    one.bind[one.dim] = to
    local text = self:value(one.node.args[1], one.bind)
    self.printer:reduce_step(self, one.node, one.into, text, to,
      is_vector(one.node.args[1], one.bind), one.bind)
    one.bind[one.dim] = nil
  end
end

--- Packs 32 bools, one after the other, into word `word`.
local function pack(self, x, bind)
  local name, size = self:variable "word", self.sizes[x.over]
  local printer = self.printer
  self:line(printer:declare("u32", false, name, printer:literal(0, "u32")))
  local head, tail, text, shift = printer:word_loop(self, bind.word.text, size)
  local level = self:push(x.over)
  local inner = {}
  for dim, to in pairs(bind) do inner[dim] = to end
  -- the index of a bit has that of its word in it
  inner.word = nil
  inner[x.over] = { text = text, level = level, also = bind.word.level }
  self:line(printer:pack_step(name, self:value(x.args[1], inner), shift))
  self:pop(head, tail)
  return name
end

--- others: bindings of one more dimension than `bind`, for which the value is printed,
-- too.
function reduce_group(self, x, bind, others)
  local dim, printer, work = x.over, self.printer, {}
  local mode = printer:mode(dim, self.sizes[dim])
  if printer:reduces_in_vectors(x) then mode = "vector" end
  for _, one in ipairs(self.groups[x]) do
    for _, inner in ipairs(instances(self, one, bind, others)) do
      local key = key_of(self, one, inner)
      local vector = is_vector(one, inner) or mode == "vector"
      local into = printer:reduce_start(self, one, vector)
      work[#work + 1] = { node = one, bind = inner, into = into, key = key, dim = dim }
    end
  end
  if mode == "unroll" or mode == "lanes" then
    for value = 0, printer:elements(dim, self.sizes[dim]) - 1 do
      turn(self, work, printer:element(dim, value))
    end
  else
    local level = self:push(dim)
    local head, tail, text = printer:loop(self, dim, self.sizes[dim], mode == "vector")
    turn(self, work, { text = text, level = level, vector = mode == "vector" })
    self:pop(head, tail)
  end
  local ends = printer:reduce_end(self, work, mode, self.sizes[dim])
  local memo = self.scopes[self.top].memo
  for i, one in ipairs(work) do memo[one.key] = ends[i] end
end

-- ---- values ---------------------------------------------------------------------------

local function compute(self, x, bind)
  if x.op == "pack" then return pack(self, x, bind) end
  if x.over then
    reduce_group(self, x, bind)
    return self.scopes[self.top].memo[key_of(self, x, bind)]
  end
  local vector = is_vector(x, bind)
  local texts, vectors = {}, {}
  for i, arg in ipairs(x.args) do
    texts[i], vectors[i] = self:value(arg, bind), is_vector(arg, bind)
  end
  local text = self.printer:compute(self, x, bind, texts, vectors, vector)
  if not self.printer:is_named(x) then return text end
  local name = self:variable "x"
  self:line(self.printer:declare(x.type, vector, name, text))
  return name
end

--- The text of a node's value, after the lines that compute it.
---@param x kvlab.Expression
---@param bind table<string, table>  for each of its dimensions: text, level, vector
function Schedule:value(x, bind)
  if x.op == "number" then return self.printer:literal(x.value, x.type) end
  local level = level_of(self, x, bind)
  local key = key_of(self, x, bind)
  local memo = self.scopes[level].memo
  if memo[key] then return memo[key] end
  local text = is_repeated(self, x, bind, level) and from_array(self, x, bind)
  if text then
    text = self:at(level, load_array, x, bind, text)
  else
    text = self:at(level, compute, x, bind)
  end
  self.scopes[level].memo[key] = text
  return text
end

M.FIXED, M.BLOCK = FIXED, BLOCK

return M
