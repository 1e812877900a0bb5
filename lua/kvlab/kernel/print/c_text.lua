--- What the texts of kernels in C and in CUDA have in common: types, operations, and the
-- parts that a kernel is put together from.
local expression = require "kvlab.kernel.expression.expression"
local pages = require "kvlab.tensor.pages"
local place = require "kvlab.kernel.expression.place"
local rules = require "kvlab.kernel.expression.rules"
local schedule = require "kvlab.kernel.print.schedule"

local M = {}

-- Up to how many query heads of a group have their operations written out one after the
-- other; larger groups are a loop. If an expression has many operations, it is fewer
-- heads, because compilers need more than a minute for functions of some thousands of
-- operations.
local HEADS_UNROLLED, OPERATIONS_MAX = 16, 1024

local TYPES = { f32 = "float", i32 = "int32_t", u32 = "uint32_t", u64 = "uint64_t",
                bool = "int" }
local VECTORS = { f32 = "vf", i32 = "vi", u32 = "vu", bool = "vi" }
local MEMORY = { f32 = "float", f16 = "uint16_t", bf16 = "uint16_t", f8e4m3 = "uint8_t",
                 i32 = "int32_t", u64 = "uint64_t", u8 = "uint8_t" }
local NUMBERS, BYTES = {}, { f32 = 4, f16 = 2, bf16 = 2, f8e4m3 = 1, i32 = 4, u64 = 8,
                             u8 = 1 }
for name, codec in pairs(pages.CODECS) do
  NUMBERS[name] = (codec.packs and "KVL_CODEC_" or "KVL_DTYPE_") .. name:upper()
  BYTES[name] = BYTES[name] or 1 -- what is packed has 8 bits
end

-- ---- how much is written out ----------------------------------------------------------

local operations = setmetatable({}, { __mode = "k" }) -- of a plan

local function operations_of(plan)
  if not operations[plan] then
    local count, seen = 0, {}
    for _, root in ipairs(plan.roots) do
      expression.each(root.node, function(x)
        if #x.args > 0 then count = count + 1 end
      end, seen)
    end
    operations[plan] = math.max(count, 1)
  end
  return operations[plan]
end

--- How many query heads are written out at most; a group with more of them is a loop.
function M.heads_unrolled(plan)
  local room = math.floor(OPERATIONS_MAX / operations_of(plan))
  return math.max(1, math.min(HEADS_UNROLLED, room))
end

--- How many of `most` blocks are scored at once, each with operations of its own.
function M.items_together(plan, most)
  local room = OPERATIONS_MAX / (operations_of(plan) * plan.sizes.head)
  return math.max(1, math.min(most, math.floor(room)))
end

-- ---- values ---------------------------------------------------------------------------

--- A number as text; a printer's method.
function M.literal(_, value, kind)
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
local POW = { scalar = "powf", vector = "pow_vf" }

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

--- The text of an operation, from the texts of its operands. vector: of vectors, in C.
local function operation(x, t, vector, is_cuda)
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
  local of = rules.FUNCTIONS[op] or POW
  local name = vector and of.vector or is_cuda and of.cuda or of.scalar
  return ("%s(%s)"):format(name, table.concat(t, ", "))
end

--- The initial value of a reduction, by its type.
local START = { sum = { f32 = "0", i32 = "0", u32 = "0", u64 = "0" },
                max = { f32 = "-INFINITY", i32 = "INT32_MIN", u32 = "0", u64 = "0" },
                min = { f32 = "INFINITY", i32 = "INT32_MAX", u32 = "UINT32_MAX",
                        u64 = "UINT64_MAX" }, mean = { f32 = "0" },
                any = { bool = "0" }, all = { bool = "1" } }

-- ---- parts of a kernel ----------------------------------------------------------------

--- The suffix of the names of a block's variables if several blocks are scored at once.
local function item_of(bind) return bind.item and "_" .. bind.item.text or "" end

local KINDS = { pages = "struct kvl_pages ", pointer = "const void *", out = "void *",
                int = "int64_t ", float = "double " }

--- The struct of a kernel's arguments.
local function struct(plan)
  local lines = { "struct arguments {" }
  for _, one in ipairs(place.arguments(plan)) do
    lines[#lines + 1] = ("  %s%s;"):format(KINDS[one.kind], one.name)
  end
  lines[#lines + 1] = "};"
  return table.concat(lines, "\n")
end

local function bytes_of(dtype) return BYTES[dtype] end

local function indented(lines, indent)
  if #lines == 0 then return "" end
  return indent .. table.concat(lines, "\n" .. indent) .. "\n"
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

--- Opens the scopes of a kernel, lets `fn` print into the innermost one, and returns two
-- lists of lines: those that are fixed for the kernel, and those of a block.
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

--- The number that is emitted where nothing is read.
function M.nothing(root)
  return M.literal(nil, place.NOTHING[root.join], "f32")
end

--- How many numbers are emitted for each block.
function M.cells(root) return root.by_token and "TOKENS" or "1" end

--- Lines that compute the values of the present query, for what a prefill emits.
---@return string[]
function M.query_value_lines(plan)
  local lines = {}
  for _, value in ipairs(plan.query_values) do
    if value.name ~= "needed" then
      lines[#lines + 1] = ("const %s %s = compute_%s(a, (int)kv_head, length, blocks, "
        .. "query_index);"):format(TYPES[value.node.type], value.name, value.name)
    end
  end
  return lines
end

M.TYPES, M.VECTORS, M.MEMORY, M.NUMBERS, M.START = TYPES, VECTORS, MEMORY, NUMBERS, START
M.widen, M.suffix, M.operation, M.item_of = widen, suffix, operation, item_of
M.struct, M.bytes_of, M.indented = struct, bytes_of, indented
M.input_lines, M.body = input_lines, body

return M
