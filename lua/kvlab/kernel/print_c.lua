--- Prints a kernel in C, from its plan. What it calls is in kernels/cpu/expression.h;
-- threads share the work as in every CPU kernel. Vectors run along dim, and the query
-- heads of a group are unrolled, so that a row is read once for all of them.
local expression = require "kvlab.kernel.expression"
local place = require "kvlab.kernel.place"
local schedule = require "kvlab.kernel.schedule"

local M = {}

-- Larger groups are a loop.
local HEADS_UNROLLED = 16
-- Blocks that a thread scores in one go, and how far ahead it asks for rows.
local RUN_BLOCKS, SOON = 1024, 16

local TYPES = { f32 = "float", i32 = "int32_t", u32 = "uint32_t", u64 = "uint64_t",
                bool = "int" }
local VECTORS = { f32 = "vf", i32 = "vi", u32 = "vu", bool = "vi" }
local MEMORY = { f32 = "float", f16 = "uint16_t", bf16 = "uint16_t", f8e4m3 = "uint8_t",
                 i32 = "int32_t", u64 = "uint64_t", u8 = "uint8_t" }
local NUMBERS = { f32 = "KVL_DTYPE_F32", f16 = "KVL_DTYPE_F16", bf16 = "KVL_DTYPE_BF16",
                  f8e4m3 = "KVL_DTYPE_F8E4M3" }

---@class kvlab.PrinterC
local Printer = {}
Printer.__index = Printer

-- ---- loops ----------------------------------------------------------------------------

function Printer:mode(dim, size)
  if dim == "token" and self.plan.place == "hook" then
    return self.keys_in_vectors and "vector" or "loop"
  end
  if dim == "dim" and self.vectors then return "vector" end
  if dim == "item" or dim == "head" and size <= HEADS_UNROLLED then return "unroll" end
  return "loop"
end

--- A reduction over tokens is done in vectors if nothing that it reads runs along dim:
-- what is summed over dim comes from an array then.
function Printer:reduces_in_vectors(x)
  return x.over == "token" and self.vectors and self.token_vectors[x] or false
end

--- Whether a value is to be taken for one that differs between blocks.
function Printer:varies() return false end

function Printer:elements(_, size) return size end

function Printer:element(_, value)
  return { text = tostring(value), level = 0 }
end

--- The head and tail of a loop over a dimension, and its variable.
function Printer:loop(s, dim, size, is_vector, _, step)
  local name = s:name(dim:sub(1, 1))
  local last = dim == "token" and self.tokens or tostring(size)
  local head = ("for (int %s = 0; %s < %s; %s) {"):format(name, name, last,
    is_vector and name .. " += VF" or step and ("%s += %d"):format(name, step)
    or name .. "++")
  if self.plan.place == "hook" then
    self.key = name
    return head, "}", ("(positions[%s] %% TOKENS)"):format(name)
  end
  return head, "}", name
end

--- How many tokens' sums along dim are computed together; nil: one after the other. They
-- may include some past the last token, which lie in the block's memory all the same.
function Printer:tokens_together(x)
  local sizes = self.plan.sizes
  if not (self.vectors and x.over == "dim" and x.op == "sum" and x.type == "f32") then
    return nil
  end
  if not expression.has_dim(x.dims, "token") or #x.dims > 2 then return nil end
  if #x.dims == 2 and (x.dims[1] ~= "head" or sizes.head > HEADS_UNROLLED) then
    return nil
  end
  local heads = #x.dims == 2 and sizes.head or 1
  local step = math.max(1, math.floor(self.lanes / heads))
  while sizes.token % step ~= 0 do step = step / 2 end
  return step >= 1 and step or nil
end

--- The loop over the bits of a word.
function Printer:word_loop(s, word, size)
  local bit, at = s:name "b", s:name "at"
  s:line(("const int %s = %s * 32;"):format(at, word))
  return ("for (int %s = 0; %s < 32 && %s + %s < %d; %s++) {"):format(bit, bit, at, bit,
    size, bit), "}", ("%s + %s"):format(at, bit), bit
end

function Printer:pack_step(word, text, shift)
  return ("%s |= (uint32_t)(%s) << %s;"):format(word, text, shift)
end

-- ---- values ---------------------------------------------------------------------------

function Printer:literal(value, kind)
  if kind == "bool" then return value and "1" or "0" end
  if kind == "u64" then return ("%.0fULL"):format(value) end
  if kind == "u32" then return ("%.0fU"):format(value) end
  if kind == "i32" then
    return value == -2 ^ 31 and "INT32_MIN" or ("%d"):format(value)
  end
  if value ~= value then return "NAN" end
  if value == math.huge then return "INFINITY" end
  if value == -math.huge then return "-INFINITY" end
  local text = ("%.9g"):format(value)
  if not text:find "[%.e]" then text = text .. ".0" end
  return value < 0 and "(" .. text .. "f)" or text .. "f"
end

function Printer:declare(kind, vector, name, text)
  return ("%s %s = %s;"):format(vector and VECTORS[kind] or TYPES[kind], name, text)
end

--- Leaves without dimensions are variables already.
function Printer:is_named(x) return #x.args > 0 or #x.dims > 0 end

--- A value as a vector, if it is not one yet.
local function widen(text, kind, vector)
  if vector then return text end
  local set = { f32 = "vf_set(%s)", i32 = "vi_set(%s)", u32 = "vu_set(%s)",
                bool = "vi_set(-(%s))" }
  return set[kind]:format(text)
end

local INFIX = { add = "+", sub = "-", mul = "*", div = "/" }
local COMPARE = { lt = "<", le = "<=", gt = ">", ge = ">=", eq = "==", ne = "!=" }
local BITS = { band = "&", bor = "|", bxor = "^" }
local FUNCTIONS = { exp = "expf", log = "logf", sqrt = "sqrtf", tanh = "tanhf",
                    floor = "floorf", pow = "powf", sigmoid = "sigmoid_f32" }
local FUNCTIONS_VECTOR = { exp = "vf_exp", log = "vf_log", sqrt = "vf_sqrt",
                           tanh = "vf_tanh", floor = "vf_floor", pow = "pow_vf",
                           sigmoid = "vf_sigmoid" }

local function cast(x, text, from, vector)
  local to = x.type
  if vector then
    if from == "bool" then text, from = "(" .. text .. " & 1)", "i32" end
    if to == "f32" then
      return (from == "u32" and "vf_from_vu(%s)" or "vf_from_vi(%s)"):format(text)
    end
    if from == "f32" then
      return (to == "u32" and "vu_from_vf(%s)" or "vi_from_vf(%s)"):format(text)
    end
    return ("(%s)(%s)"):format(VECTORS[to], text)
  end
  if from == "f32" and to ~= "f32" then return ("%s_from_f32(%s)"):format(to, text) end
  return ("(%s)(%s)"):format(TYPES[to], text)
end

--- The type's part in the name of a function: f32, or vf for vectors.
local function suffix(kind, vector) return vector and VECTORS[kind] or kind end

local function operation(x, t, vector)
  local op, kind = x.op, x.type
  local from = x.args[1].type
  if INFIX[op] then return ("%s %s %s"):format(t[1], INFIX[op], t[2]) end
  if COMPARE[op] then return ("%s %s %s"):format(t[1], COMPARE[op], t[2]) end
  if BITS[op] then return ("%s %s %s"):format(t[1], BITS[op], t[2]) end
  if op == "min" or op == "max" or op == "mod" then
    return ("%s_%s(%s, %s)"):format(op, suffix(kind, vector), t[1], t[2])
  elseif op == "neg" then return "-" .. t[1]
  elseif op == "relu" then
    local zero = kind == "f32" and "0.0f" or "0"
    return ("max_%s(%s, %s)"):format(suffix(kind, vector), t[1],
      vector and widen(zero, kind) or zero)
  elseif op == "abs" then
    local name = kind == "f32" and (vector and "vf_abs" or "fabsf")
      or "abs_" .. suffix(kind, vector)
    return ("%s(%s)"):format(name, t[1])
  elseif op == "bnot" then
    return (kind == "bool" and not vector and "!%s" or "~%s"):format(t[1])
  elseif op == "lshift" or op == "rshift" then
    local sign = op == "lshift" and "<<" or ">>"
    local mask = kind == "u64" and 63 or 31
    if vector then return ("%s %s (vu)(%s & 31)"):format(t[1], sign, t[2]) end
    return ("%s %s (%s & %d)"):format(t[1], sign, t[2], mask)
  elseif op == "popcount" then
    if vector then return ("popcount_vu(%s)"):format(t[1]) end
    return ("popcount_%s(%s)"):format(from, t[1])
  elseif op == "where" then
    if vector then
      return (kind == "f32" and "vf_select(%s, %s, %s)" or kind == "u32"
        and "where_vu(%s, %s, %s)" or "where_vi(%s, %s, %s)"):format(t[1], t[2], t[3])
    end
    return ("%s ? %s : %s"):format(t[1], t[2], t[3])
  elseif op == "cast" then return cast(x, t[1], from, vector)
  elseif op == "store" then return t[1]
  elseif op == "unit" then
    return ("%s * %s"):format(t[1], vector and ("vf_set(%s_unit)"):format(x.unit)
      or x.unit .. "_unit")
  end
  local name = (vector and FUNCTIONS_VECTOR or FUNCTIONS)[op]
  return ("%s(%s)"):format(name, table.concat(t, ", "))
end

--- Reads element `at` of memory of a dtype.
local function load(pointer, at, dtype, kind, vector)
  if NUMBERS[dtype] then
    return (vector and "vf_load(%s, %s, %s)" or "f32_load(%s, %s, %s)"):format(pointer,
      at, NUMBERS[dtype])
  end
  local p = ("(const %s *)%s + %s"):format(kind == "u32" and "uint32_t" or MEMORY[dtype],
    pointer, at)
  if vector then
    return ("load_%s_%s(%s)"):format(kind, VECTORS[kind], p)
  end
  return (kind == "bool" and "*(%s) != 0" or "*(%s)"):format(p)
end

local function item_of(bind) return bind.item and "_" .. bind.item.text or "" end

--- What a hook reads of the key at hand, or of VF keys.
local function read_of_key(self, x, vector)
  local key = self.key
  if x.name == "logit" then
    return (vector and "load_f32_vf(scores + %s)" or "scores[%s]"):format(key)
  end
  local position = (vector and "load_i32_vi(positions + %s)" or "positions[%s]"):format(
    key)
  if x.name == "position" then return position end
  local block = position .. " / TOKENS"
  if x.name == "block" then return block end
  return (vector and "gather_f32_vf(in_%s, %s)" or "in_%s[%s]"):format(x.name, block)
end

local OF_KEY = { logit = true, position = true, block = true }

local function read_leaf(self, s, x, bind, vector)
  local item = item_of(bind)
  if self.plan.place == "hook" and (x.op == "input" or x.op == "leaf"
      and OF_KEY[x.name]) then
    return read_of_key(self, x, vector)
  end
  if x.op == "param" then
    return ("(%s)a->param_%s"):format(TYPES[x.type], x.name)
  elseif x.op == "const" then
    return load("a->const_" .. x.name, s:index(nil, bind, x.stored), x.dtype, x.type,
      vector)
  elseif x.op == "field" then
    return load("field_" .. x.name .. item, s:index(x.dims, bind), x.dtype, x.type,
      vector)
  elseif x.op == "input" then
    return ("in_%s[block]"):format(x.name)
  elseif x.name == "q" then
    -- the dtype of q is an argument, so this one is no constant
    return (vector and "q_load(a, q_row + %s)" or "q_load_one(a, q_row + %s)"):format(
      s:index(x.dims, bind))
  elseif x.name == "k" or x.name == "v" then
    return load(x.name .. "_row" .. item, s:index(x.dims, bind), self.plan.dtype, "f32",
      vector)
  elseif x.name == "position" then
    local text = ("block%s * TOKENS + %s"):format(item, bind.token.text)
    return vector and ("vi_iota(%s)"):format(text) or text
  elseif x.name == "score" then
    return (vector and "load_f32_vf(%s)" or "*(%s)"):format(("scores + %s * stride + "
      .. "block * TOKENS + %s"):format(bind.head.text, bind.token.text))
  elseif x.name == "lse" then return ("lse[%s]"):format(bind.head.text)
  elseif x.name == "block" or x.name == "tokens" then return x.name .. item
  end
  return x.name -- a variable of the frame
end

function Printer:compute(s, x, bind, texts, vectors, vector)
  if #x.args == 0 then return read_leaf(self, s, x, bind, vector) end
  if vector then
    for i, arg in ipairs(x.args) do texts[i] = widen(texts[i], arg.type, vectors[i]) end
  end
  return operation(x, texts, vector)
end

-- ---- arrays ---------------------------------------------------------------------------

function Printer:array(name, kind, count)
  return ("%s %s[%d + VF] __attribute__((aligned(64)));"):format(TYPES[kind], name, count)
end

function Printer:array_store(name, at, text, kind, vector)
  if not vector then return ("%s[%s] = %s;"):format(name, at, text) end
  return ("*(%s *)(%s + %s) = %s;"):format(VECTORS[kind], name, at, text)
end

function Printer:array_load(name, at, kind, vector)
  if kind == "bool" then
    return (vector and "load_i32_vi(%s + %s) != 0" or "%s[%s] != 0"):format(name, at)
  end
  if not vector then return ("%s[%s]"):format(name, at) end
  return ("load_%s_%s(%s + %s)"):format(kind, VECTORS[kind], name, at)
end

function Printer:array_filled() return "" end

-- ---- reductions -----------------------------------------------------------------------

local START = { sum = { f32 = "0", i32 = "0", u32 = "0", u64 = "0" },
                max = { f32 = "-INFINITY", i32 = "INT32_MIN", u32 = "0", u64 = "0" },
                min = { f32 = "INFINITY", i32 = "INT32_MAX", u32 = "UINT32_MAX",
                        u64 = "UINT64_MAX" }, mean = { f32 = "0" },
                any = { bool = "0" }, all = { bool = "1" } }

function Printer:reduce_start(s, x, vector)
  local name = s:name "r"
  if x.op == "logsumexp" then
    s:line((vector and "struct vlse %s = {vf_set(-INFINITY), vf_set(0)};"
      or "struct lse %s = {-INFINITY, 0};"):format(name))
  elseif x.op == "argmax" then
    s:line((vector and "struct varg %s = {vf_set(-INFINITY), vi_set(-1)};"
      or "struct arg %s = {-INFINITY, -1};"):format(name))
  else
    local start = START[x.op][x.type]
    s:line(self:declare(x.type, vector, name, vector and widen(start, x.type) or start))
  end
  return { name = name, vector = vector }
end

local NEUTRAL = { logsumexp = "-INFINITY", argmax = "NAN" }

function Printer:reduce_step(s, x, into, text, to, vector, bind)
  local name, op = into.name, x.op
  local kind = x.args[1].type
  if x.over == "token" and to.vector then -- there may be fewer tokens than lanes
    local neutral = NEUTRAL[op] or START[op][x.type]
    local mask = ("vi_iota(%s) < vi_set(tokens%s)"):format(to.text, item_of(bind))
    local select = kind == "f32" and "vf_select" or kind == "u32" and "where_vu"
      or "where_vi"
    text = ("%s(%s, %s, %s)"):format(select, mask, widen(text, kind, vector),
      widen(neutral, kind))
    vector = true
  end
  if op == "argmax" and kind ~= "f32" then
    text = vector and ("vf_from_vi(%s)"):format(text) or ("(float)%s"):format(text)
  end
  local wide = into.vector and widen(text, op == "argmax" and "f32" or kind,
    vector) or text
  if op == "sum" or op == "mean" then
    s:line(("%s += %s;"):format(name, wide))
  elseif op == "max" or op == "min" then
    s:line(("%s = %s_%s(%s, %s);"):format(name, op, suffix(kind, into.vector), name,
      wide))
  elseif op == "any" then s:line(("%s |= %s;"):format(name, wide))
  elseif op == "all" then s:line(("%s &= %s;"):format(name, wide))
  elseif op == "logsumexp" then
    s:line(("%s_add(&%s, %s);"):format(into.vector and "vlse" or "lse", name, wide))
  elseif op == "argmax" then
    local at = to.text
    if into.vector then at = (to.vector and "vi_iota(%s)" or "vi_set(%s)"):format(at) end
    s:line(("%s_add(&%s, %s, %s);"):format(into.vector and "varg" or "arg", name, wide,
      at))
  end
end

local ACROSS = {
  sum = { f32 = "vf_sum(%s)", i32 = "sum_across_vi(%s)", u32 = "sum_across_vu(%s)" },
  mean = { f32 = "vf_sum(%s)" },
  max = { f32 = "vf_hmax(%s)", i32 = "max_across_vi(%s)", u32 = "max_across_vu(%s)" },
  min = { f32 = "hmin_vf(%s)", i32 = "min_across_vi(%s)", u32 = "min_across_vu(%s)" },
  any = { bool = "-or_across_vi(%s)" }, all = { bool = "-and_across_vi(%s)" },
}

--- The text of a finished reduction.
local function ended(one, mode, size, tokens)
  local x, name = one.node, one.into.name
  local across = mode == "vector"
  local text = name
  if x.op == "logsumexp" then
    if across then text = ("vlse_end(%s)"):format(name)
    elseif one.into.vector then
      return ("%s.most + vf_log(%s.sum)"):format(name, name)
    else text = ("lse_end(%s)"):format(name) end
  elseif x.op == "argmax" then
    if across then return ("varg_end(%s)"):format(name) end
    return name .. ".at"
  elseif across then
    text = ACROSS[x.op][x.type]:format(name)
  end
  if x.op == "mean" then
    local n = x.over == "token" and ("max_i32(%s, 1)"):format(tokens) or tostring(size)
    text = (one.into.vector and not across and "%s / vf_set(%s)"
      or "%s / %s"):format(text,
      n)
  end
  return text
end

--- Sums over dim are added up across lanes LANES at a time, which costs little more than
-- one of them.
local function sums_together(self, s, list, names)
  local lanes = self.lanes
  for first = 1, #list, lanes do
    local last = math.min(first + lanes - 1, #list)
    if last - first + 1 <= lanes / 4 then
      for i = first, last do
        local one = list[i]
        names[one.at] = s:name "x"
        s:line(("float %s = vf_sum(%s);"):format(names[one.at], one.name))
      end
    else
      local array, sums, parts = s:name "a", s:name "s", {}
      for i = 1, lanes do
        local at = first + i - 1
        parts[i] = list[at] and at <= last and list[at].name or "vf_set(0)"
      end
      s:line(("vf %s[VF] = {%s};"):format(array, table.concat(parts, ", ")))
      s:line(("float %s[VF] __attribute__((aligned(64)));"):format(sums))
      s:line(("*(vf *)%s = vf_sum_lanes(%s);"):format(sums, array))
      for i = first, last do
        names[list[i].at] = ("%s[%d]"):format(sums, i - first)
      end
    end
  end
end

function Printer:reduce_end(s, work, mode, size)
  local names, sums = {}, {}
  for i, one in ipairs(work) do
    local x = one.node
    if mode == "vector" and x.op == "sum" and x.type == "f32" then
      sums[#sums + 1] = { name = one.into.name, at = i }
    else
      names[i] = s:name "x"
      s:line(self:declare(x.type, one.into.vector and mode ~= "vector", names[i],
        ended(one, mode, size, "tokens" .. item_of(one.bind))))
    end
  end
  sums_together(self, s, sums, names)
  return names
end

-- ---- the kernel -----------------------------------------------------------------------

--- Whether dim can be walked in vectors: its size, and the types along it.
local function can_use_vectors(plan, lanes)
  if plan.sizes.dim % lanes ~= 0 then return false end
  local ok, seen = true, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      if expression.has_dim(x.dims, "dim") then
        if not VECTORS[x.type] then ok = false end
        if x.op == "const" and x.stored[#x.stored] ~= "dim" then ok = false end
      end
      if x.op == "pack" and x.over == "dim" then ok = false end
    end, seen)
  end
  return ok
end

--- Whether a hook can take its keys in vectors: by the types, and what it reads of them.
local function can_use_key_vectors(plan)
  local ok, seen = true, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      local of_key = expression.has_dim(x.dims, "token")
      if of_key and (not VECTORS[x.type] or x.op == "const") then ok = false end
    end, seen)
  end
  return ok
end

--- Which reductions over tokens can be done in vectors, and whether there are any.
local function vectors_over_tokens(plan)
  local can, some, along, seen = {}, false, {}, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      -- along[x]: what x reads at one token is a number, or a vector over tokens
      local fine = VECTORS[x.type] ~= nil and not expression.has_dim(x.dims, "dim")
      if x.op == "const" and expression.has_dim(x.dims, "token") then fine = false end
      if x.op == "field" and expression.has_dim(x.dims, "token") then fine = false end
      if x.op == "pack" then fine = false end
      local inner = x.over == "dim" -- comes from an array
      for _, arg in ipairs(x.args) do fine = fine and (inner or along[arg]) end
      for _, dim in ipairs(x.dims) do
        if dim ~= "token" and dim ~= "head" then fine = false end
      end
      along[x] = fine
      if x.over == "token" then
        some = true
        can[x] = along[x.args[1]] and plan.sizes.head <= HEADS_UNROLLED
      end
    end, seen)
  end
  return can, some
end

local function struct(plan)
  local lines = { "struct arguments {" }
  for _, one in ipairs(place.arguments(plan)) do
    local kind = one.kind == "pointer" and "const void *" or one.kind == "out"
      and "void *"
      or one.kind == "int" and "int64_t " or "double "
    lines[#lines + 1] = ("  %s%s;"):format(kind, one.name)
  end
  lines[#lines + 1] = "};"
  return table.concat(lines, "\n")
end

local function bytes_of(dtype)
  return ({ f32 = 4, f16 = 2, bf16 = 2, f8e4m3 = 1, i32 = 4, u64 = 8, u8 = 1 })[dtype]
end

local Q_LOADS = [[
static inline KVL_HOT float q_load_one(const struct arguments *a, int64_t i) {
  return f32_load(a->q, i, (int)a->q_dtype);
}
static inline KVL_HOT vf q_load(const struct arguments *a, int64_t i) {
  float x[VF];
  for (int j = 0; j < VF; j++) x[j] = q_load_one(a, i + j);
  return load_f32_vf(x);
}
]]

--- Lines at the start of (sequence, KV head), of what the expressions use.
local function fixed_lines(plan)
  local uses, lines = plan.uses, {}
  local function line(text, ...) lines[#lines + 1] = text:format(...) end
  if uses.layer then line "const int layer = (int)a->layer;" end
  for _, x in ipairs(plan.consts) do
    if expression.has_dim(x.stored, "layer") and not uses.layer then
      line "const int layer = (int)a->layer;"
      break
    end
  end
  if plan.scaled then
    for _, name in ipairs { "k", "v" } do
      line("const float *%s_scales = a->%s_scale;", name, name)
      line("const float %s_unit = %s_scales ? %s_scales[kv_head] : 1;", name, name, name)
    end
  end
  return lines
end

--- Lines at the start of a block whose physical number is `block`.
local function row_lines(plan, block, rows, item)
  local uses, lines, sizes = plan.uses, {}, plan.sizes
  local page = sizes.token * sizes.dim
  for i, name in ipairs { "k", "v" } do
    if uses[name] then
      lines[#lines + 1] = ("const void *%s_row%s = (const char *)a->%s + "
        .. "((%s * 2 + %d) * a->kv_heads + kv_head) * %d;"):format(name, item, rows,
        block, i - 1, page * bytes_of(plan.dtype))
    end
  end
  for _, field in ipairs(plan.fields) do
    lines[#lines + 1] = ("const void *field_%s%s = (const char *)a->field_%s + (%s * "
      .. "a->kv_heads + kv_head) * %d;"):format(field.name, item, field.name, block,
      field.count * bytes_of(field.dtype))
  end
  return lines
end

local function prefetch_lines(plan)
  local lines, sizes = {}, plan.sizes
  for i, name in ipairs { "k", "v" } do
    if plan.uses[name] then
      lines[#lines + 1] =
        ("soon((const char *)a->cache + ((next * 2 + %d) * a->kv_heads + "
        .. "kv_head) * %d, %d);"):format(i - 1,
        sizes.token * sizes.dim * bytes_of(plan.dtype),
        sizes.token * sizes.dim * bytes_of(plan.dtype))
    end
  end
  for _, field in ipairs(plan.fields) do
    local bytes = field.count * bytes_of(field.dtype)
    lines[#lines + 1] =
      ("soon((const char *)a->field_%s + (next * a->kv_heads + kv_head) "
      .. "* %d, %d);"):format(field.name, bytes, bytes)
  end
  return lines
end

local function indented(lines, indent)
  if #lines == 0 then return "" end
  return indent .. table.concat(lines, "\n" .. indent) .. "\n"
end

local SCORE = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *tables = a->tables, *lens = a->lens, *last = a->last;
  const int64_t runs = (a->width + RUN_BLOCKS - 1) / RUN_BLOCKS;
  for (int64_t item = begin; item < end; item++) {
    const int64_t seq = item / runs / a->kv_heads, kv_head = item / runs %% a->kv_heads;
    const int64_t first = item %% runs * RUN_BLOCKS;
    const int length = lens[seq], blocks = (length + TOKENS - 1) / TOKENS;
    const int64_t stop = i64_min(first + RUN_BLOCKS, a->width);
    const int64_t valid = i64_max(first, i64_min(stop, blocks));
    const int32_t *table = tables + seq * a->width;
    float *scores = (float *)a->scores + (seq * a->kv_heads + kv_head) * a->width;
    const int64_t q_row = ((last ? last[seq] : seq) * a->kv_heads + kv_head) * %d;
    (void)q_row;
%s%s    for (int64_t base = first; base < valid; base += ITEMS) {
%s%s    }
    for (int64_t at = valid; at < stop; at++) scores[at] = -INFINITY;
  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  const int64_t runs = (a->width + RUN_BLOCKS - 1) / RUN_BLOCKS;
  return kvl__split(a->seqs * a->kv_heads * runs, 1, piece, a);
}
]]

local SUMMARY = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *from = a->k_blocks, *to = a->blocks, *counts = a->counts;
  for (int64_t item = begin; item < end; item++) {
    const int64_t kv_head = item %% a->kv_heads, entry = item / a->kv_heads;
    const int64_t physical = from[entry], row = to[entry];
    if (physical < 0 || physical >= a->memory_rows || row < 0 || row >= a->rows) continue;
    const int tokens = (int)i64_max(0, i64_min(counts[entry], TOKENS));
    (void)tokens;
    if (item + 1 < end) {
      const int64_t next = from[(item + 1) / a->kv_heads];
      const int64_t next_head = (item + 1) %% a->kv_heads;
      if (next >= 0 && next < a->memory_rows) {
%s      }
    }
%s%s%s  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->n * a->kv_heads, kvl__grain_rows(TOKENS * DIM), piece, a);
}
]]

local MAP = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  for (int64_t item = begin; item < end; item++) {
    const int64_t seq = item / a->heads, kv_head = item %% a->heads;
    const int length = ((const int32_t *)a->lens)[seq];
    const int blocks = (int)(((int64_t)length + a->block_size - 1) / a->block_size);
    float *out = (float *)a->out + item * a->width;
    (void)kv_head, (void)blocks;
%s%s    for (int block = 0; block < (int)a->width; block++) {
%s    }
  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->seqs * a->heads, kvl__grain_rows(a->width), piece, a);
}
]]

local HOOK = [[
__attribute__((visibility("default"))) void kvl_code_hook(const void *arguments,
                                                          const struct kvl_hook_row *row,
                                                          const int32_t *positions,
                                                          int tokens, float *scores) {
  const struct arguments *a = arguments;
  const int head = row->head, kv_head = row->kv_head, length = row->length;
  const int query_position = row->query_position, blocks = (length + TOKENS - 1) / TOKENS;
  (void)a, (void)head, (void)kv_head, (void)query_position, (void)blocks;
%s}
]]

local EMIT = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *lens = a->lens;
  const int64_t stride = a->width * TOKENS;
  for (int64_t item = begin; item < end; item++) {
    const int64_t entry = item %% a->entries, row = item / a->entries;
    const int64_t seq = row / a->kv_heads, kv_head = row %% a->kv_heads;
    const int32_t *selection = a->selection;
    if (selection)
      selection +=
          (seq * a->selection_heads + kv_head %% a->selection_heads) * a->entries;
    const int length = lens[seq], blocks = (length + TOKENS - 1) / TOKENS;
    const int block = selection ? selection[entry] : (int)entry;
    float *out = (float *)a->out + row * a->width;
    if (!selection && block >= blocks) out[entry] = 0;
    if (block < 0 || block >= blocks || block >= a->width) continue;
    const int tokens = (int)i64_min(TOKENS, length - block * TOKENS);
    const int query_position = length - 1;
    const int seen_from = a->window > 0 ? max_i32(length - (int)a->window, 0) : 0;
    const float *scores = (const float *)a->scores + row * GROUP * stride;
    const float *lse = (const float *)a->lse + row * GROUP;
    (void)kv_head, (void)tokens, (void)query_position;
%s    out[block] = %s;
  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->seqs * a->kv_heads * a->entries, kvl__grain_rows(TOKENS * GROUP),
                    piece, a);
}
]]

--- The statement that stores a field's element.
local function store(root, at, text, vector, block)
  local p = ("(char *)a->field_%s + (%s * a->kv_heads + kv_head) * %d"):format(root.name,
    block, root.count * bytes_of(root.dtype))
  local kind = root.node.type
  if NUMBERS[root.dtype] then
    return (vector and "vf_store(%s, %s, %s, %s);"
      or "f32_store(%s, %s, %s, %s);"):format(
      p, at, text, NUMBERS[root.dtype])
  end
  local typed = ("(%s *)(%s) + %s"):format(kind == "u32" and "uint32_t"
    or MEMORY[root.dtype], p, at)
  if vector then return ("store_%s_%s(%s, %s);"):format(kind, VECTORS[kind], typed,
    text) end
  return ("*(%s) = %s;"):format(typed, text)
end

--- Opens the scopes of a kernel, lets `fn` print into the innermost one, and returns the
-- lines of what is fixed and of a block.
local function body(self, fn)
  local plan = self.plan
  local s = schedule.new(self, plan.sizes)
  local roots = {}
  for i, root in ipairs(plan.roots) do roots[i] = root.node end
  s:take(roots, expression.each)
  s.block_level = schedule.BLOCK
  s:push(nil)
  fn(s)
  return s.scopes[schedule.FIXED].lines, s.scopes[schedule.BLOCK].lines
end

--- The start of every block that is scored in one turn. What is past the last block, or
-- no block, reads some block, and its score is not used.
local function item_lines(self, u)
  local item, lines = self.items > 1 and "_" .. u or "", {}
  local function line(text) lines[#lines + 1] = (text:gsub("@", item)) end
  line(("const int64_t at@ = i64_min(base + %d, valid - 1);"):format(u))
  line "const int64_t next@ = table[i64_min(at@ + SOON, valid - 1)];"
  line "if (next@ >= 0 && next@ < a->rows) {"
  for _, text in ipairs(prefetch_lines(self.plan)) do
    lines[#lines + 1] = "  " .. text:gsub("next", "next" .. item)
  end
  line "}"
  line "const int found@ = table[at@];"
  line "const int known@ = found@ >= 0 && found@ < a->rows;"
  line "const int64_t physical@ = known@ ? found@ : 0;"
  line "const int block@ = (int)at@;"
  line "const int tokens@ = (int)i64_min(TOKENS, length - at@ * TOKENS);"
  for _, text in ipairs(row_lines(self.plan, "physical" .. item, "cache", item)) do
    lines[#lines + 1] = text
  end
  return lines
end

local function print_score(self)
  local plan, starts = self.plan, {}
  for u = 0, self.items - 1 do
    for _, text in ipairs(item_lines(self, u)) do starts[#starts + 1] = text end
  end
  local fixed, block = body(self, function(s)
    local root = plan.roots[1]
    for u = 0, self.items - 1 do
      local bind = self.items > 1 and { item = self:element("item", u) } or {}
      local text, item = s:value(root.node, bind), item_of(bind)
      s:line(("scores[at%s] = known%s ? (float)(%s) : -INFINITY;"):format(item, item,
        text))
    end
  end)
  return ("enum { RUN_BLOCKS = %d, SOON = %d, TOKENS = %d, ITEMS = %d };\n"):format(
      RUN_BLOCKS,
      SOON, plan.sizes.token, self.items) .. struct(plan) .. "\n" .. Q_LOADS
    .. SCORE:format(plan.sizes.head * plan.sizes.dim,
      indented(fixed_lines(plan), "    "), indented(fixed, "    "),
      indented(starts, "      "), indented(block, "      "))
end

--- Asks for the K and V of the block that comes next.
local function next_lines(plan)
  local lines = {}
  local page = plan.sizes.token * plan.sizes.dim * bytes_of(plan.dtype)
  for i, name in ipairs { "k", "v" } do
    if plan.uses[name] then
      lines[#lines + 1] = ("soon((const char *)a->k + ((next * 2 + %d) * a->kv_heads + "
        .. "next_head) * %d, %d);"):format(i - 1, page, page)
    end
  end
  return lines
end

local function print_summary(self)
  local plan = self.plan
  local fixed, block = body(self, function(s)
    local by_dims, order = {}, {}
    for _, root in ipairs(plan.roots) do
      local key = table.concat(root.node.dims, ",")
      if not by_dims[key] then order[#order + 1] = key end
      by_dims[key] = by_dims[key] or {}
      table.insert(by_dims[key], root)
    end
    for _, key in ipairs(order) do
      local dims = by_dims[key][1].node.dims
      s:over(dims, function(bind)
        for _, root in ipairs(by_dims[key]) do
          local vector = bind.dim and bind.dim.vector
          s:line(store(root, s:index(dims, bind), s:value(root.node, bind), vector,
            "row"))
        end
      end)
    end
  end)
  return ("enum { TOKENS = %d, DIM = %d };\n"):format(plan.sizes.token, plan.sizes.dim)
    .. struct(plan) .. "\n"
    .. SUMMARY:format(indented(next_lines(plan), "        "),
      indented(fixed_lines(plan), "    ") .. indented(fixed, "    "),
      indented(row_lines(plan, "physical", "k", ""), "    "), indented(block, "    "))
end

--- Pointers to the part of each input that belongs to a row.
local function input_lines(plan, seq, row)
  local lines = {}
  for _, name in ipairs(plan.inputs) do
    lines[#lines + 1] = ("const float *in_%s = (const float *)a->in_%s + "
      .. "(a->heads_%s == 1 ? %s : %s) * a->width;"):format(name, name, name, seq, row)
  end
  return lines
end

local function print_map(self)
  local plan = self.plan
  local fixed, block = body(self, function(s)
    local text = s:value(plan.roots[1].node, {})
    s:line(("out[block] = %s;"):format(text))
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "seq", "item")) do lines[#lines + 1] = text end
  return struct(plan) .. "\n" .. MAP:format(indented(lines, "    "),
    indented(fixed, "    "), indented(block, "      "))
end

--- A hook reads scores[t], changes them and writes them back, for each key or each VF.
local function print_hook(self)
  local plan = self.plan
  local s, roots = schedule.new(self, plan.sizes), {}
  for i, root in ipairs(plan.roots) do roots[i] = root.node end
  s:take(roots, expression.each)
  s.block_level = schedule.BLOCK
  s:over({ "token" }, function(bind)
    local vector, score = bind.token.vector, s:name "score"
    local at = ("scores%s%s"):format(vector and " + " or "[", self.key)
    s:line(vector and ("vf %s = load_f32_vf(%s);"):format(score, at)
      or ("float %s = %s];"):format(score, at))
    for _, root in ipairs(plan.roots) do
      local text = s:value(root.node, bind)
      if root.name == "add" then s:line(("%s += %s;"):format(score, text))
      elseif vector then
        s:line(("%s = vf_select(%s, %s, vf_set(-INFINITY));"):format(score,
          widen(text, "bool", expression.has_dim(root.node.dims, "token")), score))
      else s:line(("if (!(%s)) %s = -INFINITY;"):format(text, score)) end
    end
    s:line(vector and ("vf_store(%s, %s, %s, KVL_DTYPE_F32);"):format("scores", self.key,
      score) or ("%s] = %s;"):format(at, score))
  end, { head = { text = "head", level = schedule.FIXED } })
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "row->seq",
    "(row->seq * row->kv_heads + kv_head)")) do
    lines[#lines + 1] = text
  end
  return ('#include "hook.h"\n\nenum { TOKENS = %d };\n'):format(plan.sizes.token)
    .. struct(plan) .. "\n" .. HOOK:format(indented(lines, "  ")
      .. indented(s.scopes[schedule.FIXED].lines, "  "))
end

local function print_emit(self)
  local plan, value = self.plan, nil
  local fixed, block = body(self, function(s) value = s:value(plan.roots[1].node, {}) end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "seq", "row")) do lines[#lines + 1] = text end
  return ("enum { TOKENS = %d, GROUP = %d };\n"):format(plan.sizes.token,
      plan.sizes.head) .. struct(plan) .. "\n"
    .. EMIT:format(indented(lines, "    ") .. indented(fixed, "    ")
      .. indented(block, "    "), value)
end

local PRINTS = { score = print_score, summary = print_summary, map = print_map,
                 hook = print_hook, emit = print_emit }

-- What CUDA is printed with, too.
M.shared = { TYPES = TYPES, START = START, operation = operation, struct = struct,
             bytes_of = bytes_of, body = body, indented = indented,
             input_lines = input_lines,
             literal = Printer.literal }

--- The source of a kernel.
---@param plan kvlab.Plan
---@param lanes integer  floats in a vector of the instruction set
---@return string
function M.print(plan, lanes)
  local self = setmetatable({ plan = plan, vectors = can_use_vectors(plan, lanes),
                              lanes = lanes, tokens = "tokens" }, Printer)
  local over_tokens
  self.token_vectors, over_tokens = vectors_over_tokens(plan)
  self.keys_in_vectors = plan.place == "hook" and can_use_key_vectors(plan)
  self.items = plan.place == "score" and self.vectors and not over_tokens
    and math.max(1, math.floor(lanes / plan.sizes.head)) or 1
  local title = {}
  for i, root in ipairs(plan.roots) do
    title[i] = (" * %s = %s"):format(root.name, expression.text(root.node))
  end
  return ("/* A kernel that kvlab generated.\n%s */\n"):format(table.concat(title, "\n"))
    .. '#include "cpu/expression.h"\n\n' .. PRINTS[plan.place](self)
end

return M
