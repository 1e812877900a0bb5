--- Prints a kernel in CUDA, from its plan. What it calls is in
-- kernels/cuda/expression.cuh.
--
-- A row of dim lies in the lanes of a team (a part of a warp), which load it 16 bytes at
-- a time. Every lane keeps its elements in registers, and a reduction over dim ends with
-- one over the team. A team scores several blocks at once, so that enough bytes are under
-- way, and all query heads of a group read a row that was loaded once.
local expression = require "kvlab.kernel.expression"
local print_c = require "kvlab.kernel.print_c"

local shared = print_c.shared
local bytes_of, indented, TYPES = shared.bytes_of, shared.indented, shared.TYPES
local M = {}

local THREADS, WARP = 256, 32
-- Larger groups are a loop.
local HEADS_UNROLLED = 16
-- Queries that are kept in registers: floats in each lane; more lie in shared memory.
local QUERY_FLOATS = 64

local ELEMENTS = { f32 = "f32", f16 = "f16", bf16 = "bf16", f8e4m3 = "f8e4m3" }

---@class kvlab.PrinterCuda
local Printer = {}
Printer.__index = Printer

-- ---- loops ----------------------------------------------------------------------------

--- The dimension whose elements lie in the lanes of a team.
local function lanes_of(plan) return plan.place == "emit" and "token" or "dim" end

function Printer:mode(dim, size)
  if dim == lanes_of(self.plan) then return "lanes" end
  if dim == "item" or dim == "head" and size <= HEADS_UNROLLED then return "unroll" end
  return "loop"
end

function Printer:elements(dim, size)
  return dim == lanes_of(self.plan) and self.each or size
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
  if dim == "token" then -- always all of them: lanes of a warp must not part
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

--- The loop has as many turns for every word, because lanes of a warp must not part; bits
-- past the last are those of the last, and are not packed.
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

--- Queries that lie in shared memory are read again for every few blocks.
function Printer:varies(x) return self.q_shared and x.op == "leaf" and x.name == "q" end

local function item_of(bind) return bind.item and "_" .. bind.item.text or "" end

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
    s:line(("chunk<%d> %s;"):format(bytes, chunk))
    if self.partial then
      s:line(("if (lane + %d < %d) %s else %s.clear();"):format(to.chunk * self.team,
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

--- An element of memory, by itself.
local function load_one(pointer, at, dtype, kind)
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
  return load_one(pointer, s:index(x.dims, bind, stored), dtype, x.type)
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
    return load(self, s, x, bind, x.name .. "_row" .. item, nil, self.plan.dtype)
  elseif x.name == "position" and self.plan.place == "hook" then return "position"
  elseif x.name == "position" then
    return ("(block%s * TOKENS + %s)"):format(item, bind.token.text)
  elseif x.name == "block" or x.name == "tokens" then return x.name .. item
  end
  return x.name
end

function Printer:compute(s, x, bind, texts)
  if #x.args == 0 then return read_leaf(self, s, x, bind) end
  if x.op == "tanh" then return ("tanh_f32(%s)"):format(texts[1]) end
  return shared.operation(x, texts, false)
end

-- ---- arrays ---------------------------------------------------------------------------

--- What differs between blocks is each thread's own; the rest is the thread block's.
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

-- ---- the kernel -----------------------------------------------------------------------

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

local SCORE = [[
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int kv_heads = (int)a->kv_heads, kv_head = blockIdx.x %% kv_heads;
  const int64_t seq = blockIdx.y, width = a->width;
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS;
  const int64_t first = blockIdx.x / kv_heads * a->each;
  const int64_t stop = first + a->each < width ? first + a->each : width;
  const int32_t *table = (const int32_t *)a->tables + seq * width;
  const int32_t *last = (const int32_t *)a->last;
  float *scores = (float *)a->scores + (seq * kv_heads + kv_head) * width;
  const int64_t q_row = ((last ? last[seq] : seq) * kv_heads + kv_head) * %d;
%s  auto look = [&](int64_t at) { return at < stop && at < blocks ? table[at] : -1; };
%s  for (int64_t base = first; base < stop; base += TEAMS * ITEMS) {
%s  }
}
]]

local SUMMARY = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int kv_heads = (int)a->kv_heads;
  const int64_t item = (int64_t)blockIdx.x * TEAMS + team;
  const int64_t entry = item < a->n * kv_heads ? item / kv_heads : 0;
  const int kv_head = (int)(item %% kv_heads);
  const int64_t found = ((const int32_t *)a->k_blocks)[entry];
  const int64_t row = ((const int32_t *)a->blocks)[entry];
  const bool known = item < a->n * kv_heads && found >= 0 && found < a->memory_rows &&
                     row >= 0 && row < a->rows;
  const int64_t physical = known ? found : 0;
  const int tokens = min_i32(((const int32_t *)a->counts)[entry], TOKENS);
%s}
]]

local MAP = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int64_t item = blockIdx.x, seq = item / a->heads;
  const int kv_head = (int)(item %% a->heads);
  const int block = (int)(blockIdx.y * THREADS + threadIdx.x);
  if (block >= a->width) return;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (int)(((int64_t)length + a->block_size - 1) / a->block_size);
  float *out = (float *)a->out + item * a->width;
%s}
]]

local function fixed_lines(plan)
  local lines = {}
  lines[#lines + 1] = "const int layer = (int)a->layer;"
  if plan.scaled then
    for _, name in ipairs { "k", "v" } do
      lines[#lines + 1] = ("const float *%s_scales = (const float *)a->%s_scale;"):format(
        name, name)
      lines[#lines + 1] = ("const float %s_unit = %s_scales ? %s_scales[kv_head] : 1;")
        :format(name, name, name)
    end
  end
  return lines
end

local function row_lines(plan, lines, block, memory, item)
  local page = plan.sizes.token * plan.sizes.dim * bytes_of(plan.dtype)
  for i, name in ipairs { "k", "v" } do
    if plan.uses[name] then
      lines[#lines + 1] = ("const char *%s_row%s = (const char *)a->%s + "
        .. "((%s * 2 + %d) * kv_heads + kv_head) * %d;"):format(name, item, memory, block,
        i - 1, page)
    end
  end
  for _, field in ipairs(plan.fields) do
    lines[#lines + 1] = ("const char *field_%s%s = (const char *)a->field_%s + (%s * "
      .. "kv_heads + kv_head) * %d;"):format(field.name, item, field.name, block,
      field.count * bytes_of(field.dtype))
  end
end

--- The start of every block that a team scores in one turn. What was looked up before the
-- turn lies in found_U.
local function item_lines(self, u)
  local item, lines = self.items > 1 and "_" .. u or "", {}
  local function line(text) lines[#lines + 1] = (text:gsub("@", item)) end
  line(("const int64_t at@ = base + %d * TEAMS + team;"):format(u))
  line "const bool known@ = found@ >= 0 && found@ < a->rows;"
  line "const int64_t physical@ = known@ ? found@ : 0;"
  line "const int block@ = (int)at@, tokens@ = min_i32(TOKENS, length - block@ * TOKENS);"
  row_lines(self.plan, lines, "physical" .. item, "cache", item)
  return lines
end

--- Rows of fields are loaded a turn ahead, and their blocks are looked up two turns
-- ahead, so that a team computes while it waits for memory. Returns the lines before the
-- loop and those at its start.
local function pipeline(self)
  local before, start = {}, {}
  local function add(list, text, ...) list[#list + 1] = text:format(...) end
  local step = "TEAMS * ITEMS"
  for u = 0, self.items - 1 do
    local item = self.items > 1 and "_" .. u or ""
    add(before, "int ahead%s = look(first + %d * TEAMS + team), soon%s = -1;", item, u,
      item)
  end
  for _, one in ipairs(self.streams) do
    add(before, "chunk<%d> %s_soon;", one.bytes, one.name)
  end
  add(before, "auto fetch = [&](int64_t base) {")
  for u = 0, self.items - 1 do
    local item, lines = self.items > 1 and "_" .. u or "", {}
    add(before, "  soon%s = ahead%s;", item, item)
    add(before, "  ahead%s = look(base + %s + %d * TEAMS + team);", item, step, u)
    add(before, "  const int64_t row%s = soon%s >= 0 && soon%s < a->rows ? soon%s : 0;",
      item, item, item, item)
    for _, field in ipairs(self.plan.fields) do
      add(lines, "const char *field_%s%s = (const char *)a->field_%s + "
        .. "(row%s * kv_heads + kv_head) * %d;", field.name, item, field.name, item,
        field.count * bytes_of(field.dtype))
    end
    for _, text in ipairs(lines) do add(before, "  %s", text) end
  end
  for _, one in ipairs(self.streams) do
    local text = one.load:gsub("^" .. one.name, one.name .. "_soon")
    if self.partial then
      add(before, "  if (lane + %d < %d) %s else %s_soon.clear();", one.chunk * self.team,
        self.chunks, text, one.name)
    else
      add(before, "  %s", text)
    end
  end
  add(before, "};")
  add(before, "fetch(first);")
  for u = 0, self.items - 1 do
    local item = self.items > 1 and "_" .. u or ""
    add(start, "const int found%s = soon%s;", item, item)
  end
  for _, one in ipairs(self.streams) do
    add(start, "const chunk<%d> %s = %s_soon;", one.bytes, one.name, one.name)
  end
  add(start, "fetch(base + %s);", step)
  return before, start
end

local Q_SHARED = [[
__shared__ float q_shared[%d];
for (int i = threadIdx.x; i < %d; i += THREADS) {
  const int head = i / DIM, d = i %% DIM, chunk = d / VEC;
  q_shared[(head * %d + chunk / TEAM * VEC + d %% VEC) * TEAM + chunk %% TEAM] =
      q_at(a, q_row + i);
}
__syncthreads();]]

local function print_score(self)
  local plan = self.plan
  self.streams = {}
  local fixed, block = shared.body(self, function(s)
    local root = plan.roots[1].node
    for u = 0, self.items - 1 do
      local bind = self.items > 1 and { item = self:element("item", u) } or {}
      local text = s:value(root, bind)
      local item = item_of(bind)
      s:line(("if (lane == 0 && at%s < stop) scores[at%s] = known%s ? (float)(%s) : "
        .. "-INFINITY;"):format(item, item, item, text))
    end
  end)
  local before, starts = pipeline(self)
  for u = 0, self.items - 1 do
    for _, text in ipairs(item_lines(self, u)) do starts[#starts + 1] = text end
  end
  local first = fixed_lines(plan)
  if self.q_shared then
    local head, dim = plan.sizes.head, plan.sizes.dim
    first[#first + 1] = Q_SHARED:format(head * self.each * self.team, head * dim,
      self.each)
  end
  return Q_AT .. SCORE:format(plan.sizes.head * plan.sizes.dim,
    indented(first, "  ") .. indented(fixed, "  "), indented(before, "  "),
    indented(starts, "    ") .. indented(block, "    "))
end

--- Lines that store an element of a field; of dim, a chunk once its last element is
-- there.
local function store(self, s, root, dims, bind, text, pending)
  local p = ("(char *)a->field_%s + (row * kv_heads + kv_head) * %d"):format(root.name,
    root.count * bytes_of(root.dtype))
  local kind = ELEMENTS[root.dtype] or root.dtype
  local to = bind.dim
  if not to then
    s:line(("if (known && lane == 0) store_%s(%s, %s, %s);"):format(kind, p,
      s:index(dims, bind), text))
    return
  end
  local list = pending[root] or {}
  pending[root] = list
  list[#list + 1] = text
  if #list < self.vec then return end
  pending[root] = nil
  local first = {}
  for dim, one in pairs(bind) do first[dim] = one end
  first.dim = self:element("dim", to.chunk * self.vec)
  local values = s:name "v"
  s:line(("const %s %s[%d] = {%s};"):format(TYPES[root.node.type], values, self.vec,
    table.concat(list, ", ")))
  s:line(("if (known && lane + %d < %d) store_chunk_%s<%d>(%s, %s, %s);"):format(
    to.chunk * self.team, self.chunks, kind, self.vec, p, s:index(dims, first), values))
end

local function print_summary(self)
  local plan = self.plan
  local fixed, block = shared.body(self, function(s)
    local pending = {}
    for _, root in ipairs(plan.roots) do
      local dims = root.node.dims
      s:over(dims, function(bind)
        store(self, s, root, dims, bind, s:value(root.node, bind), pending)
      end)
    end
  end)
  local lines = fixed_lines(plan)
  row_lines(plan, lines, "physical", "k", "")
  return SUMMARY:format(indented(lines, "  ") .. indented(fixed, "  ")
    .. indented(block, "  "))
end

local function print_map(self)
  local plan = self.plan
  local fixed, block = shared.body(self, function(s)
    s:line(("out[block] = (float)(%s);"):format(s:value(plan.roots[1].node, {})))
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(shared.input_lines(plan, "seq", "item")) do
    lines[#lines + 1] = text
  end
  return MAP:format(indented(lines, "  ") .. indented(fixed, "  ")
    .. indented(block, "  "))
end

-- ---- attention ------------------------------------------------------------------------

local HOOK = [=[
struct policy_hook {
  static constexpr bool ACTIVE = true, KEEPS = %s;
  float *scores;
  int64_t room;
  arguments args;

  __device__ __forceinline__ float operator()(float score, const kvl::hook_row &row,
                                              int position) const {
    const arguments *a = &args;
    [[maybe_unused]] const int head = row.head, kv_head = row.kv_head;
    [[maybe_unused]] const int length = row.length, query_position = row.query_position;
    [[maybe_unused]] const int blocks = (length + TOKENS - 1) / TOKENS;
    [[maybe_unused]] const int block = position / TOKENS, token = position %% TOKENS;
    [[maybe_unused]] const float logit = score * kvl::LN2;
%s    return score;
  }
};

]=]

-- The kernels of attention that are compiled with a hook: header, then the kernel, whose
-- name is what kernels/cuda/paged_attention.cu asks for.
local DECODE = [[
extern "C" __global__ void __maxnreg__((kvl::decode_shape<%d, %s>::REGISTERS))
    decode_%s_%d%s(const __grid_constant__ kvl_paged_attention_args a,
                   const __grid_constant__ kvl::split_place place,
                   const __grid_constant__ policy_hook hook) {
  kvl::decode<%s, %d, %s>(a, place, hook);
}
]]
local PREFILL = [[
extern "C" __global__ void __launch_bounds__(kvl::prefill_shape<%d>::THREADS, 1)
    prefill_%s_%d%s(const __grid_constant__ kvl_paged_attention_args a, int subgroups,
                    const __grid_constant__ policy_hook hook) {
  kvl::prefill<%s, %d, %s>(a, subgroups, hook);
}
]]
local F32 = [[
extern "C" __global__ void __launch_bounds__(kvl::f32_shape<%s, %d>::WARPS *kvl::WARP, 2)
    f32_%s_%s_%d_%d(const __grid_constant__ kvl_paged_attention_args a,
                    const __grid_constant__ %s,
                    const __grid_constant__ policy_hook hook) {
  kvl::f32_%s<%s, %d, %d>(a, %s, hook);
}
]]

local CPP = { f32 = "float", f16 = "__half", bf16 = "__nv_bfloat16",
              f8e4m3 = "kvl::f8e4m3" }
local SHORT = { f32 = "f32", f16 = "f16", bf16 = "bf16", f8e4m3 = "f8" }

--- The smallest of these sizes that takes n.
local function size_for(n, ...)
  for i = 1, select("#", ...) do
    local size = select(i, ...)
    if n <= size then return size end
  end
end

--- The header of the attention kernel of a shape, and the kernel with the hook. The rules
-- are those of launch_16bit and launch_f32_dim in kernels/cuda/paged_attention.cu.
local function attention_kernel(plan)
  local dim, group, q, kv = plan.sizes.dim, plan.sizes.head, plan.q_dtype, plan.dtype
  if q == "f32" then
    local rows = (plan.is_prefill or group > 4) and 8 or group > 1 and 4 or 1
    local size = size_for(dim, 64, 128, 256)
    local phase = plan.is_prefill and "prefill" or "decode"
    local second = plan.is_prefill and "subgroups" or "place"
    return "paged_f32.cuh", F32:format(CPP[kv], size, phase, SHORT[kv], size, rows,
      plan.is_prefill and "int subgroups" or "kvl::split_place place", phase, CPP[kv],
      size, rows, second)
  end
  local is_f8 = kv == "f8e4m3"
  local last = is_f8 and "_f8" or ""
  if plan.is_prefill then
    local size = size_for(dim, 64, 96, 128, 192, 256)
    return "paged_prefill.cuh", PREFILL:format(size, SHORT[q], size, last, CPP[q], size,
      CPP[kv])
  end
  local size = size_for(dim, 64, 128, 256)
  return "paged_decode.cuh", DECODE:format(size, tostring(is_f8), SHORT[q], size, last,
    CPP[q], size, tostring(is_f8))
end

--- A hook is compiled into the attention kernel of a shape.
local function print_hook(self)
  local plan, lines = self.plan, fixed_lines(self.plan)
  for _, text in ipairs(shared.input_lines(plan, "row.seq",
    "(row.seq * row.kv_heads + kv_head)")) do
    lines[#lines + 1] = text
  end
  local body = shared.body(self, function(s)
    local bind = { head = { text = "head", level = 1 },
                   token = { text = "token", level = 1 } }
    s.block_level = 1
    local texts = {}
    for i, root in ipairs(plan.roots) do texts[i] = s:at(1, s.value, root.node, bind) end
    s.top = 1
    for i, root in ipairs(plan.roots) do
      s:line((root.name == "add" and "score += (%s) * kvl::LOG2E;"
        or "if (!(%s)) score = -INFINITY;"):format(texts[i]))
    end
    s.top = 2
  end)
  local header, text = attention_kernel(plan)
  return ('#include "%s"\n#include "expression.cuh"\n\n'):format(header)
    .. ("enum { TOKENS = %d };\n"):format(plan.sizes.token) .. shared.struct(plan) .. "\n"
    .. HOOK:format(tostring(plan.keeps or false), indented(lines, "    ")
      .. indented(body, "    ")) .. text
end

local EMIT = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int kv_heads = (int)a->kv_heads;
  const int64_t row = blockIdx.y, seq = row / kv_heads, stride = a->width * TOKENS;
  const int kv_head = (int)(row %% kv_heads);
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS, query_position = length - 1;
  const int seen_from = a->window > 0 ? max_i32(length - (int)a->window, 0) : 0;
  const float *row_lse = (const float *)a->lse + row * GROUP;
  const float *scores = (const float *)a->scores + row * GROUP * stride;
  float *out = (float *)a->out + row * a->width;
%s  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int64_t entry = (int64_t)blockIdx.x * TEAMS + team;
  const int32_t *selection = (const int32_t *)a->selection;
  if (selection)
    selection += (seq * a->selection_heads + kv_head %% a->selection_heads) * a->entries;
  const int found = entry >= a->entries ? -1 : selection ? selection[entry] : (int)entry;
  const bool known = found >= 0 && found < blocks && found < a->width;
  const int block = known ? found : 0; /* lanes of a warp must not part */
  const int tokens = known ? min_i32(TOKENS, length - block * TOKENS) : 0;
%s  const float value = (float)(%s);
  if (known && lane == 0) out[block] = value;
  if (!known && !selection && entry < a->width && lane == 0) out[entry] = 0;
}
]]

--- A team takes a block, and its lanes take the tokens.
local function print_emit(self)
  local plan, value = self.plan, nil
  local fixed, block = shared.body(self, function(s)
    value = s:value(plan.roots[1].node, {})
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(shared.input_lines(plan, "seq", "row")) do
    lines[#lines + 1] = text
  end
  return ("enum { GROUP = %d };\n"):format(plan.sizes.head)
    .. EMIT:format(indented(lines, "  ") .. indented(fixed, "  "), indented(block, "  "),
      value)
end

local PRINTS = { score = print_score, summary = print_summary, map = print_map,
                 emit = print_emit }

-- ---- how rows lie in teams ------------------------------------------------------------

--- The dtype whose rows are loaded most: that of the cache where K or V is read, else of
-- the largest field.
local function main_dtype(plan)
  if plan.place == "summary" or plan.uses.k or plan.uses.v then return plan.dtype end
  local best, most = plan.dtype, 0
  for _, field in ipairs(plan.fields) do
    local bytes = field.count * bytes_of(field.dtype)
    if bytes > most then best, most = field.dtype, bytes end
  end
  return best
end

--- Whether anything runs along dim.
local function has_rows(plan)
  local has, seen = false, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      has = has or expression.has_dim(x.dims, "dim")
    end, seen)
  end
  return has
end

local function lay_out(self)
  local plan, dim = self.plan, self.plan.sizes.dim
  if not has_rows(plan) then -- a thread is a team
    self.vec, self.chunks, self.team, self.each, self.partial = 1, 1, 1, 1, false
    return
  end
  local vec = 16 / math.min(bytes_of(main_dtype(plan)), 4)
  while dim % vec ~= 0 do vec = vec / 2 end
  local chunks, team = dim / vec, 1
  while team < chunks and team < WARP do team = team * 2 end
  self.vec, self.chunks, self.team = vec, chunks, team
  self.each = math.ceil(chunks / team) * vec -- elements of a lane
  self.partial = chunks % team ~= 0
end

--- Whether a node reduces over tokens, and whether queries meet only what differs between
-- blocks.
local function look(plan)
  local over_tokens, alone, varies, seen = false, false, {}, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      over_tokens = over_tokens or x.over == "token"
      local some = x.op == "field" or x.op == "leaf"
        and (x.name == "k" or x.name == "v" or x.name == "block" or x.name == "tokens"
          or x.name == "position")
      local has_q = false
      for _, arg in ipairs(x.args) do
        some = some or varies[arg]
        has_q = has_q or arg.op == "leaf" and arg.name == "q"
      end
      varies[x] = some
      if has_q and not some then alone = true end
    end, seen)
  end
  return over_tokens, alone
end

--- The source of a kernel, and how it is launched: threads, teams of a thread block,
-- items that a team scores at once.
---@param plan kvlab.Plan
---@return string source
---@return table launch
function M.print(plan)
  local self = setmetatable({ plan = plan }, Printer)
  lay_out(self)
  local over_tokens, alone = look(plan)
  local group = plan.sizes.head
  self.items = (plan.place ~= "score" or over_tokens) and 1 or group <= 4 and 4 or 2
  self.q_shared = plan.place == "score" and plan.uses.q and not alone
    and group * self.each > QUERY_FLOATS or false
  local title = {}
  for i, root in ipairs(plan.roots) do
    title[i] = (" * %s = %s"):format(root.name, expression.text(root.node))
  end
  if plan.place == "hook" then
    return ("/* A kernel that kvlab generated.\n%s */\n"):format(table.concat(title,
      "\n")) .. print_hook(self), { threads = 1 }
  end
  if plan.place == "emit" then
    self.team, self.partial = 1, false
    while self.team < math.min(plan.sizes.token, WARP) do self.team = self.team * 2 end
    self.each = math.ceil(plan.sizes.token / self.team)
  end
  local teams = THREADS / self.team
  local text = ("/* A kernel that kvlab generated.\n%s */\n"):format(table.concat(title,
    "\n")) .. '#include "expression.cuh"\n\n'
    .. ("enum { TOKENS = %d, DIM = %d, THREADS = %d, TEAM = %d, TEAMS = %d, VEC = %d, "
      .. "ITEMS = %d };\n"):format(plan.sizes.token, plan.sizes.dim, THREADS, self.team,
      teams, self.vec, self.items) .. shared.struct(plan) .. "\n"
    .. PRINTS[plan.place](self)
  return text, { threads = THREADS, teams = teams, items = self.items }
end

return M
