--- Prints values, loops and reductions of a kernel in CUDA, for schedule.lua beside it.
-- What the text calls is in kernels/cuda/expression.cuh.
--
-- A row of dim lies in the lanes of a team (a part of a warp), which load it 16 bytes at
-- a time. Every lane keeps its elements in registers, and a reduction over dim ends with
-- one over the team. Some kernels have tokens in the lanes in place of dim.
--
-- What a kernel sets: plan, lanes (the dimension that lies in lanes), team (lanes of a
-- team), each (elements of a lane), vec and chunks (elements of a load of dim, and loads
-- of a row), partial (a team's last load is not whole), items (blocks at once), q_shared
-- (queries lie in shared memory), streams (a list for loads that are done ahead), and
-- product (a function that gives the text of a product). array_room: how many elements of
-- arrays a thread still has room for.
local shared = require "kvlab.kernel.print.c_text"

local bytes_of, TYPES = shared.bytes_of, shared.TYPES
local M = {}

-- The most elements of all arrays that save a thread operations; they lie in local
-- memory.
local ARRAY_ROOM = 4096

-- The types of stored numbers.
M.CPP = { f32 = "float", f16 = "__half", bf16 = "__nv_bfloat16", f8e4m3 = "kvl::f8e4m3",
          int8 = "kvl::int8", f8_latent = "kvl::f8_latent" }

local ELEMENTS = { f32 = "f32", f16 = "f16", bf16 = "bf16", f8e4m3 = "f8e4m3",
                   int8 = "int8", f8_latent = "f32" }

---@class kvlab.PrinterCuda
local Printer = {}
Printer.__index = Printer

-- ---- loops ----------------------------------------------------------------------------

function Printer:mode(dim, size)
  if dim == self.lanes then return "lanes" end
  if dim == "item" or dim == "head" and size <= shared.heads_unrolled(self.plan) then
    return "unroll"
  end
  return "loop"
end

function Printer:elements(dim, size)
  return dim == self.lanes and self.each or size
end

--- Element `value` of an unrolled dimension; of dim, the value-th of each lane.
function Printer:element(dim, value)
  if dim == "token" then
    return { text = value == 0 and "lane" or ("(lane + %d)"):format(value * self.team),
             level = 0 }
  end
  if dim ~= "dim" then return { text = tostring(value), level = 0 } end
  local chunk, at = math.floor(value / self.vec), value % self.vec
  local lane = chunk == 0 and "lane" or ("(lane + %d)"):format(chunk * self.team)
  local text = ("%s * %d"):format(lane, self.vec)
  if at > 0 then text = ("%s + %d"):format(text, at) end
  return { text = text, level = 0, value = value, chunk = chunk }
end

function Printer:loop(s, dim, size, _, share)
  local name = s:name(dim:sub(1, 1))
  if dim == "token" then -- always all of them: lanes of a warp must not diverge
    s.scopes[s.top - 1].lines[#s.scopes[s.top - 1].lines + 1] = "#pragma unroll 4"
    return ("for (int %s = 0; %s < TOKENS; %s++) {"):format(name, name, name), "}", name
  end
  if share then
    self.own = "own"
    s:line(("const int %s = min_i32(%s_first + team, %d);"):format(name, name, size - 1))
    s:line(("const bool own = %s_first + team < %d;"):format(name, size))
    return ("for (int %s_first = 0; %s_first < %d; %s_first += TEAMS) {"):format(name,
      name, size, name), "}", name
  end
  return ("for (int %s = 0; %s < %d; %s++) {"):format(name, name, size, name), "}", name
end

--- The loop has the same number of iterations for every word, because lanes of a warp
-- must not diverge; iterations past the last bit compute the last bit again, and do not
-- pack it.
function Printer:word_loop(s, word, size)
  local bit, at = s:name "b", s:name "at"
  s:line(("const int %s = %s * 32;"):format(at, word))
  local index, shift = ("%s + %s"):format(at, bit), bit
  if size % 32 ~= 0 then
    shift = { bit = bit, inside = ("%s < %d"):format(index, size) }
    index = ("min_i32(%s, %d)"):format(index, size - 1)
  end
  return ("for (int %s = 0; %s < %d; %s++) {"):format(bit, bit, math.min(size, 32), bit),
    "}", index, shift
end

function Printer:pack_step(word, text, shift)
  if type(shift) == "table" then
    return ("%s |= (uint32_t)(%s && %s) << %s;"):format(word, shift.inside, text,
      shift.bit)
  end
  return ("%s |= (uint32_t)(%s) << %s;"):format(word, text, shift)
end

function Printer:reduces_in_vectors() return false end

-- ---- values ---------------------------------------------------------------------------

Printer.literal = shared.literal

function Printer:declare(kind, _, name, text)
  return ("%s %s = %s;"):format(TYPES[kind], name, text)
end

function Printer:is_named(x) return #x.args > 0 end

--- Queries in shared memory are read again for every few blocks; each block has its own
-- products of queries and rows.
function Printer:varies(x)
  if x.op ~= "leaf" then return false end
  local of_query = self.plan.of_query
  return self.q_shared and x.name == "q" or x.name == "product"
    or of_query and of_query[x.name] or false
end

local function item_of(bind) return bind.item and "_" .. bind.item.text or "" end

--- The number, or its scale, at index `at` of a strip of packed numbers.
local function packed(what, plan, strip, at)
  return ("packed_%s(%s, %s, %d, %d)"):format(what, strip, at, plan.sizes.token,
    plan.sizes.dim)
end

--- An element of memory with the dimension dim, from the chunk that the lane loads.
local function load_chunk(self, s, x, bind, pointer, stored, dtype)
  local to, bytes = bind.dim, self.vec * bytes_of(dtype)
  local key = { "chunk", s.id[x], tostring(to.chunk) }
  for _, dim in ipairs(s.dims[x]) do
    if dim ~= "dim" then key[#key + 1] = bind[dim].text end
  end
  local name = s:once(table.concat(key, "|"), function()
    local first = {}
    for dim, one in pairs(bind) do first[dim] = one end
    first.dim = self:element("dim", to.chunk * self.vec)
    local chunk = s:name "c"
    local load = ("%s.load((const char *)%s + (%s) * %d);"):format(chunk, pointer,
      s:index(x.dims, first, stored), bytes_of(dtype))
    if self.streams and x.op == "field" and #x.dims == 1 then
      self.streams[#self.streams + 1] = { name = chunk, bytes = bytes, chunk = to.chunk,
        item = bind.item and tonumber(bind.item.text) or 0, load = load }
      return chunk
    end
    if dtype == "f8_latent" then -- a chunk of floats
      load = ("%s.load(%s, %s, %d, %d);"):format(chunk, pointer,
        s:index(x.dims, first, stored), self.plan.sizes.dim, self.plan.value_dim)
      s:line(("latent_chunk<%d> %s;"):format(self.vec, chunk))
    else
      s:line(("chunk<%d> %s;"):format(bytes, chunk))
    end
    if dtype == "int8" then -- a chunk has one scale
      load = load .. (" %s.scale = %s;"):format(chunk, packed("scale", self.plan, pointer,
        s:index(x.dims, first, stored)))
    end
    if self.partial then
      s:line(("if (lane + %d < %d) { %s } else %s.clear();"):format(to.chunk * self.team,
        self.chunks, load, chunk))
    else
      s:line(load)
    end
    return chunk
  end)
  local at = to.value % self.vec
  if dtype == "i32" then return ("(%s)%s.w[%d]"):format(TYPES[x.type], name, at) end
  if dtype == "u8" then return ("%s.u8(%d) != 0"):format(name, at) end
  return ("%s.%s(%d)"):format(name, ELEMENTS[dtype], at)
end

--- An element of memory, by itself. int8, f8_latent: of K or V of a plan.
local function load_one(pointer, at, dtype, kind, plan)
  if dtype == "int8" then return packed("one", plan, pointer, at) end
  if dtype == "f8_latent" then
    return ("latent_one(%s, %s, %d, %d)"):format(pointer, at, plan.sizes.dim,
      plan.value_dim)
  end
  if ELEMENTS[dtype] and dtype ~= "f32" then
    local memory = bytes_of(dtype) == 1 and "uint8_t" or "uint16_t"
    return ("from_%s(((const %s *)%s)[%s])"):format(dtype, memory, pointer, at)
  end
  local memory = dtype == "u8" and "uint8_t" or TYPES[kind]
  local text = ("((const %s *)%s)[%s]"):format(memory, pointer, at)
  return kind == "bool" and text .. " != 0" or text
end

local function load(self, s, x, bind, pointer, stored, dtype)
  local order = stored or x.dims
  if bind.dim and order[#order] == "dim" and dtype ~= "u64" then
    return load_chunk(self, s, x, bind, pointer, stored, dtype)
  end
  return load_one(pointer, s:index(x.dims, bind, stored), dtype, x.type, self.plan)
end

local function read_leaf(self, s, x, bind)
  local item = item_of(bind)
  if x.op == "param" then return ("(%s)a->param_%s"):format(TYPES[x.type], x.name)
  elseif x.op == "const" then
    return load(self, s, x, bind, "a->const_" .. x.name, x.stored, x.dtype)
  elseif x.op == "field" then
    return load(self, s, x, bind, "field_" .. x.name .. item, nil, x.dtype)
  elseif x.op == "input" then return ("in_%s[block]"):format(x.name)
  elseif x.name == "score" then
    return ("scores[%s * stride + block * TOKENS + %s]"):format(bind.head.text,
      bind.token.text)
  elseif x.name == "logit" and self.plan.place == "prompt" then
    return ("logits[%s * STRIDE + %s]"):format(bind.head.text, bind.token.text)
  elseif x.name == "product" then return self.product(x, bind)
  elseif x.name == "lse" then return ("row_lse[%s]"):format(bind.head.text)
  elseif x.name == "q" then
    if self.q_shared then
      return ("q_shared[(%s * %d + %d) * TEAM + lane]"):format(bind.head.text, self.each,
        bind.dim.value)
    end
    local to, first = bind.dim, {}
    for dim, one in pairs(bind) do first[dim] = one end
    first.dim = self:element("dim", to.chunk * self.vec)
    local name = s:once(("q|%s|%d"):format(bind.head.text, to.chunk), function()
      local q = s:name "q"
      s:line(("float %s[%d];"):format(q, self.vec))
      s:line(("q_load<%d>(a, q_row + %s, lane + %d < %d, %s);"):format(self.vec,
        s:index(x.dims, first), to.chunk * self.team, self.chunks, q))
      return q
    end)
    return ("%s[%d]"):format(name, to.value % self.vec)
  elseif x.name == "k" or x.name == "v" then
    return load(self, s, x, bind, x.name .. "_row" .. item, nil, self.plan.codec)
  elseif x.name == "index" and self.plan.place == "hook" then return "index"
  elseif x.name == "index" then
    return ("(block%s * TOKENS + %s)"):format(item, bind.token.text)
  elseif x.name == "block" or x.name == "tokens" then return x.name .. item
  end
  return x.name
end

function Printer:compute(s, x, bind, texts)
  if #x.args == 0 then return read_leaf(self, s, x, bind) end
  return shared.operation(x, texts, false, true)
end

-- ---- arrays ---------------------------------------------------------------------------

--- A value that differs between blocks belongs to one thread; other values are shared by
-- the thread block.
function Printer:array(name, kind, count, varies)
  self.own = varies and "true" or "team == 0"
  return ("%s%s %s[%d];"):format(varies and "" or "__shared__ ", TYPES[kind], name, count)
end

function Printer:array_store(name, at, text)
  local store = ("%s[%s] = %s;"):format(name, at, text)
  return self.own == "true" and store or ("if (%s) %s"):format(self.own, store)
end

function Printer:array_filled(varies) return varies and "" or "__syncthreads();" end

function Printer:array_load(name, at) return ("%s[%s]"):format(name, at) end

-- ---- reductions -----------------------------------------------------------------------

function Printer:reduce_start(s, x)
  local name = s:name "r"
  if x.op == "logsumexp" then s:line(("lse %s = {-INFINITY, 0.0f};"):format(name))
  elseif x.op == "argmax" then s:line(("arg %s = {-INFINITY, -1};"):format(name))
  else s:line(self:declare(x.type, false, name, shared.START[x.op][x.type])) end
  return { name = name }
end

local NEUTRAL = { logsumexp = "-INFINITY", argmax = "NAN" }

--- The value, or the neutral element where there is no token or no element.
local function masked(self, x, text, to, bind)
  local condition
  if x.over == "token" then condition = ("%s < tokens%s"):format(to.text, item_of(bind))
  elseif x.over == "dim" and self.partial then
    condition = ("lane + %d < %d"):format(to.chunk * self.team, self.chunks)
  end
  if not condition then return text end
  local neutral = NEUTRAL[x.op] or shared.START[x.op][x.type]
  return ("(%s ? %s : %s)"):format(condition, text, neutral)
end

function Printer:reduce_step(s, x, into, text, to, _, bind)
  local name, op = into.name, x.op
  if op == "argmax" and x.args[1].type ~= "f32" then text = "(float)" .. text end
  text = masked(self, x, text, to, bind)
  if op == "sum" or op == "mean" then s:line(("%s += %s;"):format(name, text))
  elseif op == "max" or op == "min" then
    s:line(("%s = %s_%s(%s, %s);"):format(name, op, x.type, name, text))
  elseif op == "any" then s:line(("%s |= %s;"):format(name, text))
  elseif op == "all" then s:line(("%s &= %s;"):format(name, text))
  elseif op == "logsumexp" then s:line(("lse_add(&%s, %s);"):format(name, text))
  elseif op == "argmax" then
    s:line(("arg_add(&%s, %s, %s);"):format(name, text, to.text))
  end
end

local function ended(one, mode, size)
  local x, name = one.node, one.into.name
  local across = mode == "lanes"
  if x.op == "logsumexp" then
    return (across and "team_lse<TEAM>(%s)" or "lse_end(%s)"):format(name)
  elseif x.op == "argmax" then
    return (across and "team_arg<TEAM>(%s)" or "%s.at"):format(name)
  end
  local over = x.op == "mean" and "sum" or x.op
  local text = across and ("team_%s<TEAM>(%s)"):format(over, name) or name
  if x.op ~= "mean" then return text end
  return ("%s / %s"):format(text, x.over == "token" and ("max_i32(tokens%s, 1)"):format(
    item_of(one.bind)) or ("%d"):format(size))
end

function Printer:reduce_end(s, work, mode, size)
  local names = {}
  for i, one in ipairs(work) do
    names[i] = s:name "x"
    s:line(self:declare(one.node.type, false, names[i], ended(one, mode, size)))
  end
  return names
end

-- ---- queries --------------------------------------------------------------------------

local Q_AT = [[
DEVICE float q_at(const arguments *a, int64_t i) {
  if (a->q_dtype == 0) return ((const float *)a->q)[i];
  const uint16_t x = ((const uint16_t *)a->q)[i];
  return a->q_dtype == 1 ? from_f16(x) : from_bf16(x);
}
template <int N>
DEVICE void q_load(const arguments *a, int64_t i, bool inside, float *x) {
  chunk<4 * N> wide;
  chunk<2 * N> narrow;
  wide.clear(), narrow.clear();
  if (!inside) i = 0;
  if (a->q_dtype == 0) wide.load((const float *)a->q + i);
  else narrow.load((const uint16_t *)a->q + i);
#pragma unroll
  for (int k = 0; k < N; k++)
    x[k] = !inside            ? 0.0f
           : a->q_dtype == 0 ? wide.f32(k)
           : a->q_dtype == 1 ? narrow.f16(k)
                             : narrow.bf16(k);
}
]]

-- ---- what kernels begin with ----------------------------------------------------------

--- Lines for what is fixed in all kernels that read K, V or fields.
local function fixed_lines(plan)
  local lines = {}
  lines[#lines + 1] = "const int layer = (int)a->layer;"
  if plan.scaled then
    for _, name in ipairs { "k", "v" } do
      lines[#lines + 1] = ("const float *%s_scales = a->cache.%s_scale;"):format(
        name, name)
      lines[#lines + 1] = ("const float %s_unit = %s_scales ? %s_scales[kv_head] : 1;")
        :format(name, name, name)
    end
  end
  return lines
end

--- Lines for where the rows of a block are.
local function row_lines(plan, lines, block, item)
  for _, one in ipairs { { "k", "kvl__keys_of" }, { "v", "kvl__values_of" } } do
    local name, strip = one[1], one[2]
    if plan.uses[name] then
      lines[#lines + 1] = ("const char *%s_row%s = %s(&a->cache, %s, kv_head);"):format(
        name, item, strip, block)
    end
  end
  for _, field in ipairs(plan.fields) do
    lines[#lines + 1] = ("const char *field_%s%s = (const char *)a->field_%s + (%s * "
      .. "kv_heads + kv_head) * %d;"):format(field.name, item, field.name, block,
      field.count * bytes_of(field.dtype))
  end
end

--- A printer of a plan.
function M.new(plan)
  return setmetatable({ plan = plan, lanes = "dim", items = 1,
    array_room = ARRAY_ROOM }, Printer)
end

M.ELEMENTS, M.Q_AT = ELEMENTS, Q_AT
M.fixed_lines, M.row_lines = fixed_lines, row_lines
M.item_of, M.load_one = item_of, load_one

return M
