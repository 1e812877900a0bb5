--- Kernels of expressions on a device: compiled or taken from the cache, given their
-- arguments, and launched. A policy gets them by kernel.attach.
local ffi = require "ffi"
local by_page = require "kvlab.tensor.by_page"
local cache = require "kvlab.kernel.run.cache"
local compiler = require "kvlab.kernel.run.compiler"
local expression = require "kvlab.kernel.expression.expression"
local hint = require("kvlab.words").hint
local library = require "kvlab.library"
local pages = require "kvlab.tensor.pages"
local place = require "kvlab.kernel.expression.place"
local print_c = require "kvlab.kernel.print.c"
local sorted = require "kvlab.sorted"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local pointer_array, integer_array = ffi.typeof "const void **", ffi.typeof "int64_t *"
local pages_pointer = ffi.typeof "struct kvl_pages *"
local tensor_pointer = ffi.typeof "kvl_tensor *"

---@class kvlab.Kernel
---@field plan kvlab.Plan
---@field source string
local Kernel = {}
Kernel.__index = Kernel
M.Kernel = Kernel

-- ---- compiled -------------------------------------------------------------------------

local target_text = ffi.new "char[32]"
local told = false -- that a compiler lacks
local out_code = ffi.new "kvl_code *[1]"
-- Code that was loaded, by kind of device and name. It stays: graphs may hold it.
local loaded = {}

--- What a compiler must be told of a device: "sm_90a", or the CPU's instruction set.
function M.target(dev)
  check(C.kvl_device_target(dev, target_text, 32))
  return ffi.string(target_text)
end

--- The source of a kernel for a target.
function M.print(plan, target)
  if target == "lua" then return require("kvlab.kernel.print.lua").print(plan) end
  if compiler.LANES[target] then return print_c.print(plan, compiler.LANES[target]) end
  return require("kvlab.kernel.print.cuda").print(plan, target)
end

--- Compiles a source. Returns its image, or nil and why.
function M.compile(source, target)
  if compiler.LANES[target] then return compiler.compile(source, target) end
  return require("kvlab.kernel.run.nvrtc").compile(source, target)
end

--- The code of an image; nil and why it cannot be loaded.
local function open_image(dev, what, image)
  if C.kvl_code_open(dev, what, image, #image, out_code) < 0 then
    return nil, ffi.string(C.kvl_last_error())
  end
  return out_code[0]
end

--- The name that the image of a source is kept under: the hash of all that it is made
-- from. The compiler is not part of the name: every compiler gives code with the same
-- meaning, and stored code must be found even where there is no compiler.
function M.name_of(source, target)
  local flags = compiler.LANES[target] and compiler.flags(target, source) or ""
  return cache.hash(table.concat({ source, target, flags,
    ffi.string(C.kvl_code_headers()) }, "\0"))
end

--- The code of a source if it is in memory or on disk, else nil; and its name.
local function kept_code(dev, what, source, target)
  local name = M.name_of(source, target)
  if not loaded[name] then
    local image = cache.load(name)
    loaded[name] = image and open_image(dev, what, image) or nil
  end
  return loaded[name], name
end

--- The code of a source: from memory, from disk, or from the compiler. If stored code
-- cannot be loaded, as when it needs the OpenMP library of a compiler that is gone, the
-- source is compiled again.
---@param shown? string  what the compiler gets in place of the source: the same, but for
--                       the lines that its errors name
---@return ffi.cdata*|nil code  kvl_code
---@return string|nil why
function M.load(dev, what, source, target, shown)
  local code, name = kept_code(dev, what, source, target)
  if code then return code end
  local image, why = M.compile(shown or source, target)
  if not image then return nil, ("%s: it cannot be compiled: %s"):format(what, why) end
  code, why = open_image(dev, what, image)
  if not code then return nil, why end
  cache.keep(name, image)
  loaded[name] = code
  return code
end

local function load_or_fail(...)
  local code, why = M.load(...)
  return code or error(why, 0)
end

-- ---- arguments ------------------------------------------------------------------------

--- The target of a device; or "lua" if there is no compiler for it and no stored kernel
-- either. Prints a line the first time that a compiler is missing.
local function usual_target(plan, dev)
  local has, why
  if dev:is_cpu() then
    has, why = compiler.find(), "there is no C compiler (gcc, or what CC names)"
  else
    has, why = require("kvlab.kernel.run.nvrtc").open()
  end
  local target = M.target(dev)
  if has or kept_code(dev, plan.what, M.print(plan, target), target) then
    return target
  end
  if not told then
    told = true
    io.stderr:write(("kvlab: %s runs in plain Lua, and slowly: %s\n"):format(plan.what,
      why))
  end
  return "lua"
end

--- The names of arguments, so that no launch has to make them.
local function names_of(prefix, entries)
  local names = {}
  for i, one in ipairs(entries) do names[i] = prefix .. one.name end
  return names
end

--- A kernel for a plan on a device, compiled if need be.
---@param plan kvlab.Plan
---@param dev kvlab.Device
---@param target? string  "lua", or what kernel.target gives
---@return kvlab.Kernel
function M.open(plan, dev, target)
  target = target or M.chosen or usual_target(plan, dev)
  local source, launch = M.print(plan, target)
  local list, count = place.arguments(plan)
  local memory, at = ffi.new("int64_t[?]", count), {}
  for _, one in ipairs(list) do at[one.name] = one.at end
  local is_lua = target == "lua"
  return setmetatable({ plan = plan, device = dev, source = source, target = target,
    code = not is_lua and load_or_fail(dev, plan.what, source, target),
    run = is_lua and require("kvlab.kernel.run.lua_kernel").load(plan, source),
    given = is_lua and {},
    at = at, bytes = 8 * count, words = memory,
    param_names = names_of("param_", plan.params),
    const_names = names_of("const_", plan.consts),
    field_names = names_of("field_", plan.fields),
    pointers = ffi.cast(pointer_array, memory),
    integers = ffi.cast(integer_array, memory), floats = ffi.cast("double *", memory),
    tensors = ffi.new("kvl_tensor *[?]", #list + 2), count = 0,
    grid = ffi.new("kvl_grid", 1, 1, 1, launch and launch.threads or 1, 0, 1),
    teams = launch and launch.teams or 1, items = launch and launch.items or 1,
    products = launch and launch.bytes_shared and launch or nil }, Kernel)
end

function Kernel:give(name, t)
  -- Gives argument `name` a tensor; nil: NULL.
  local at = self.at[name]
  if self.given then self.given[name] = t end
  if t == nil then
    self.pointers[at] = nil
    return
  end
  self.pointers[at] = t.ptr
  self.tensors[self.count] = t
  self.count = self.count + 1
end

function Kernel:give_pages(name, memory, format)
  -- Gives argument `name` one layer's memory of a format.
  if self.given then self.given[name] = { memory = memory, format = format } end
  pages.fill(ffi.cast(pages_pointer, self.words + self.at[name]), memory, format)
  self.tensors[self.count] = memory
  self.count = self.count + 1
  for i = 1, format and 2 or 0 do
    local scale = i == 1 and format.k_scale or i == 2 and format.v_scale or nil
    if scale ~= nil then
      self.tensors[self.count] = ffi.cast(tensor_pointer, scale)
      self.count = self.count + 1
    end
  end
end

function Kernel:set(name, value) self.integers[self.at[name]] = value end

function Kernel:set_float(name, value) self.floats[self.at[name]] = value end

function Kernel:set_params(owner)
  -- Gives the parameters the present options of a policy.
  local list = self.plan.params
  for i = 1, #list do
    local x = list[i]
    local value = owner[x.name]
    local is_right = type(value) == "number" and (x.type ~= "i32" or value % 1 == 0)
    if not is_right then
      error(("%s: the option %s is %s, expected a %snumber"):format(self.plan.what,
        x.name, tostring(value), x.type == "i32" and "whole " or ""), 0)
    end
    self.floats[self.at[self.param_names[i]]] = value
  end
end

function Kernel:give_consts(owner)
  -- Gives the consts the tensors of a policy.
  local list = self.plan.consts
  for i = 1, #list do self:give(self.const_names[i], owner[list[i].name]) end
end

function Kernel:launch()
  local n = self.count
  self.count = 0
  if self.run then return self.run(self) end
  check(C.kvl_code_launch(self.code, self.device, self.words, self.bytes, self.tensors, n,
    self.grid))
end

-- ---- consts ---------------------------------------------------------------------------

local function const_of(owner, x, what, dev)
  local t = owner[x.name]
  if not tensor.is_tensor(t) then
    error(("%s: %s: the const %s is %s, expected a tensor, which init sets"):format(
      x.line, what, x.name, type(t)), 0)
  end
  if t.ndim ~= #x.stored or t:type() ~= x.dtype or t.device ~= dev then
    error(("%s: %s: the const %s is %s [%s] on %s, expected %s [%s] on %s"):format(x.line,
      what, x.name, t:type(), table.concat(t:dims(), ", "), t.device:name(), x.dtype,
      table.concat(x.stored, ", "), dev:name()), 0)
  end
  return t
end

--- What the plans of a policy's expressions need to know.
function M.options_of(owner, shape, what)
  return {
    codec = shape.format.name, is_shared = shape.format.is_shared,
    group = shape.heads / shape.kv_heads, layers = shape.layers,
    block_size = shape.block_size, head_dim = shape.head_dim,
    value_dim = shape.value_dim,
    kv_heads = shape.kv_heads, scale = shape.scale,
    const_dims = function(x) return const_of(owner, x, what, shape.device):dims() end,
  }
end

-- ---- a summary of expressions ---------------------------------------------------------

---@class kvlab.Field  a field of a policy's summary: self.summary.NAME
---@field dtype string  of its entries
---@field layer fun(self, layer: integer): kvlab.Tensor  the entries of one layer, by
--                                 physical block: [blocks, kv_heads, ...]
---@field bytes_block fun(self): integer  bytes of the entry of one block and KV head
local Field = {}
Field.__index = Field

function Field:layer(layer) return self.layers[layer] end

function Field:bytes_block() return self.bytes end

---@class kvlab.Fields
local Fields = {}
Fields.__index = Fields

local STATE = {} -- the key of what a summary has besides its fields, whose names it keeps

local function new_field(shape, plan, root)
  local dims = { shape.kv_heads }
  for _, dim in ipairs(root.node.dims) do dims[#dims + 1] = plan.sizes[dim] end
  local memory, layers = by_page.new(by_page.open, shape, root.dtype, dims)
  return setmetatable({ memory = memory, layers = layers, dtype = root.dtype,
    bytes = root.count * C.kvl_dtype_bytes(library.dtypes[root.dtype]) }, Field)
end

--- Memory for the fields of a policy's summary, and the kernel that fills it.
local function new_fields(owner, shape, fields, o)
  local plan = place.summary(fields, "policy " .. owner.name, o)
  local self = { [STATE] = { kernel = M.open(plan, shape.device), owner = owner,
                             shape = shape, names = sorted.keys(fields) } }
  for _, root in ipairs(plan.roots) do self[root.name] = new_field(shape, plan, root) end
  return setmetatable(self, Fields)
end

function Fields:update(ev)
  -- Computes the fields of an offload event's blocks from their K and V.
  local state = self[STATE]
  local kernel, shape, names = state.kernel, state.shape, state.names
  local n = ev.blocks:size(0)
  kernel.count = 0
  kernel:give_pages("cache", ev.k, shape.format:of(ev.layer))
  kernel:give("k_blocks", ev.k_blocks)
  kernel:give("blocks", ev.blocks)
  kernel:give("counts", ev.num_tokens)
  for i = 1, #names do
    kernel:give("field_" .. names[i], self[names[i]].layers[ev.layer])
  end
  kernel:give_consts(state.owner)
  kernel:set_params(state.owner)
  kernel:set("n", n)
  kernel:set("kv_heads", shape.kv_heads)
  kernel:set("rows", shape.blocks)
  kernel:set("layer", ev.layer)
  kernel.grid.x = math.ceil(n * shape.kv_heads / kernel.teams)
  kernel:launch()
end

function Fields:bytes_block()
  -- Bytes of the fields of one block and KV head.
  local bytes = 0
  for _, name in ipairs(self[STATE].names) do bytes = bytes + self[name].bytes end
  return bytes
end

--- The kernel that computes a summary of expressions.
---@param summary kvlab.Fields
---@return kvlab.Kernel
function M.of_summary(summary) return summary[STATE].kernel end

-- ---- a score --------------------------------------------------------------------------

local Q_DTYPES = library.dtypes

-- Thread blocks for each multiprocessor: enough to fill it twice over.
local WAVES = 4

--- The same for a kernel of products (kernel/print/cuda_products.lua): one wave of thread
-- blocks; for expressions with tokens, more and shorter blocks, which balance better.
local function set_grid_of_products(kernel, ctx)
  local launch = kernel.products
  local turn, q_dtype = launch.turn, tonumber(ctx.query.dtype)
  local at_once = launch.at_once[q_dtype] * kernel.processors
  local ranges = math.max(1, math.floor(at_once / (ctx.kv_heads * ctx.seqs)))
  local each = math.min(math.ceil(ctx.width / ranges), launch.most)
  each = math.max(1, math.ceil(each / turn)) * turn
  kernel:set("each", each)
  kernel.grid.x = math.ceil(ctx.width / each) * ctx.kv_heads
  kernel.grid.y = ctx.seqs
  kernel.grid.bytes_shared = launch.bytes_shared[q_dtype]
end

--- Shares the blocks of all sequences among thread blocks: enough to fill the GPU, and
-- not more, because each reads the queries anew.
local function set_grid(kernel, ctx)
  if kernel.products then return set_grid_of_products(kernel, ctx) end
  local turn = kernel.teams * kernel.items
  local ranges = math.max(1, math.ceil(ctx.width / turn))
  local all = ranges * ctx.kv_heads * ctx.seqs
  local turns = math.max(1, math.min(16, math.floor(all / (WAVES * kernel.processors))))
  kernel:set("each", turn * turns)
  kernel.grid.x = math.ceil(ctx.width / (turn * turns)) * ctx.kv_heads
  kernel.grid.y = ctx.seqs
end

--- Bytes of some fields of one block and KV head.
local function bytes_of_fields(fields)
  local bytes = 0
  for _, field in ipairs(fields) do
    bytes = bytes + field.count * C.kvl_dtype_bytes(Q_DTYPES[field.dtype])
  end
  return bytes
end

--- Counts what a score reads.
local function count_score(plan, ctx)
  local bytes = bytes_of_fields(plan.fields)
  if plan.uses.v then ctx.reads:share(ctx, 0.5) end
  if plan.uses.k then ctx.reads:keys(ctx) end
  ctx.reads:each_block(ctx, bytes)
end

--- Scores of the blocks of a step's sequences, for the newest query of each.
---@param owner table   the policy
---@param ctx kvlab.Context
---@return kvlab.Tensor  f32 [seqs, kv_heads, width]
local function compute_score(kernel, owner, ctx)
  local scores = ctx:new_scores()
  kernel.count = 0
  kernel:give("q", ctx.query)
  kernel:give_pages("cache", ctx.cache, ctx.format:of(ctx.layer))
  kernel:give("tables", ctx.tables)
  kernel:give("lens", ctx.lens)
  kernel:give("last", ctx.is_prefill and ctx.batch.last or nil)
  kernel:give("scores", scores)
  if ctx.reads then count_score(kernel.plan, ctx) end
  local fields = owner.summary
  local read = kernel.plan.fields
  for i = 1, #read do
    kernel:give(kernel.field_names[i], fields[read[i].name].layers[ctx.layer])
  end
  kernel:give_consts(owner)
  kernel:set_params(owner)
  kernel:set("q_dtype", ctx.query.dtype)
  kernel:set("seqs", ctx.seqs)
  kernel:set("kv_heads", ctx.kv_heads)
  kernel:set("width", ctx.width)
  kernel:set("rows", kernel.rows)
  kernel:set("layer", ctx.layer)
  set_grid(kernel, ctx)
  kernel:launch()
  return scores
end

-- ---- maps -----------------------------------------------------------------------------

--- The kernel of a map (kernel/run/map.lua).
local function open_map(map, what, o, dev)
  local plan = place.map(map.expression, what, o)
  local kernel = M.open(plan, dev)
  kernel.by_head = plan.uses.kv_head or false
  for _, x in ipairs(plan.consts) do
    kernel.by_head = kernel.by_head or expression.has_dim(x.stored, "kv_head")
  end
  return kernel
end

-- ---- policies -------------------------------------------------------------------------

--- Raises for a parameter unless it is an option of the policy that is a number.
function M.check_params(x, what, numbers)
  expression.each(x, function(one)
    if one.op == "param" and not numbers[one.name] then
      error(("%s: %s: there is no option %s that is a number%s"):format(one.line, what,
        one.name, hint(one.name, sorted.keys(numbers), ", did you mean %s?")), 0)
    end
  end)
end

--- Checks the expressions of a policy's definition, when it is defined.
---@param def table      summary: expressions by name, or nil; score: an expression or
--                       anything else
---@param maps table     the expressions of its maps, by name
---@param numbers table  the names of its options that are numbers, as keys
---@return table|nil fields
function M.check(def, maps, numbers)
  local what = "policy " .. def.name
  local fields = def.summary and place.fields(def.summary, what)
  for name, x in pairs(fields or {}) do
    M.check_params(x, what .. ": summary." .. name, numbers)
  end
  if expression.is_expression(def.score) then
    place.check_score(def.score, fields or {}, what)
    M.check_params(def.score, what .. ": score", numbers)
  end
  for name, x in pairs(maps) do
    local of = what .. ": " .. name
    M.check_params(place.check_map(x, of), of, numbers)
  end
  return fields
end

--- Makes the summary and the kernels of an attached policy's expressions, after its init.
---@param self table   the policy, with its definition's fields and score
---@param shape table  as init gets it
function M.attach(self, shape)
  local what = "policy " .. self.name
  local o = M.options_of(self, shape, what)
  local fields, score = self.expressions.fields, self.expressions.score
  local maps = self.expressions.maps
  if fields then self.summary = new_fields(self, shape, fields, o) end
  if score then
    local plan = place.score(score, fields or {}, what, o)
    local kernel = M.open(plan, shape.device)
    kernel.rows = shape.blocks
    kernel.processors = tonumber(shape.device:description():match "(%d+) SMs") or 1
    self.score_kernel = kernel
  end
  if next(maps) then self.map_kernels = {} end
  for name, map in pairs(maps) do
    self.map_kernels[map] = open_map(map, ("%s: %s"):format(what, name), o, shape.device)
  end
end

--- The score of a policy whose score is an expression.
function M.score(self, ctx) return compute_score(self.score_kernel, self, ctx) end

return M
