--- Prints a kernel in Lua, from its plan: plain loops over host memory, which LuaJIT
-- compiles. It needs no compiler, computes in doubles, and runs at once, on one thread.
-- What it calls is in kernel/run/numbers.lua.
local expression = require "kvlab.kernel.expression.expression"
local pages = require "kvlab.tensor.pages"
local place = require "kvlab.kernel.expression.place"
local schedule = require "kvlab.kernel.print.schedule"

local M = {}

---@class kvlab.PrinterLua
local Printer = {}
Printer.__index = Printer

local ARRAYS = { f32 = "double", i32 = "int32_t", u32 = "uint32_t", u64 = "uint64_t",
                 bool = "uint8_t" }
-- The most variables of a function that hold values; Lua has room for 200, including
-- those of loops.
local VARIABLES_MAX = 100
-- How a stored number is read, for dtypes that need a conversion.
local READ = { f16 = "F16[%s]", bf16 = "BF16[%s]", f8e4m3 = "F8[%s]" }

function Printer:mode() return "loop" end
function Printer:elements(_, size) return size end
function Printer:varies(x)
  local of_query = self.plan.of_query
  return of_query and x.op == "leaf" and of_query[x.name] or false
end

function Printer:loop(s, dim, size)
  local name = s:name(dim:sub(1, 1))
  local last = dim == "token" and "tokens - 1" or tostring(size - 1)
  local text = name
  if self.plan.place == "hook" then -- the tokens are keys of several blocks
    self.key, text = name, ("(indices[%s] %% TOKENS)"):format(name)
  end
  return ("for %s = 0, %s do"):format(name, last), "end", text
end

function Printer:word_loop(s, word, size)
  local bit, at = s:name "b", s:name "at"
  s:line(("local %s = %s * 32"):format(at, word))
  return ("for %s = 0, min(31, %d - %s) do"):format(bit, size - 1, at), "end",
    ("%s + %s"):format(at, bit), bit
end

function Printer:pack_step(word, text, shift)
  return ("if %s then %s = %s + POWER[%s] end"):format(text, word, word, shift)
end

function Printer:reduces_in_vectors() return false end

-- ---- values ---------------------------------------------------------------------------

function Printer:literal(value, kind)
  if kind == "u64" then return ("%.0fULL"):format(value) end
  if value ~= value then return "NAN" end
  if value == math.huge then return "INF" end
  if value == -math.huge then return "(-INF)" end
  return value < 0 and ("(%.17g)"):format(value) or ("%.17g"):format(value)
end

local function set(name, text)
  return ("%s%s = %s"):format(name:find "^more%." and "" or "local ", name, text)
end

function Printer:declare(_, _, name, text) return set(name, text) end

--- Lua has room for 200 variables in a function: a value that is used once needs none.
function Printer:is_named(x) return self.named[x] end

--- A name for a value; after VARIABLES_MAX names, it is an entry of the table `more`.
function Printer:variable(s, prefix)
  if s:count_variable() <= VARIABLES_MAX then return s:name(prefix) end
  self.more = self.more + 1
  return ("more.%s%d"):format(prefix, self.more)
end

local INFIX = { lt = "<", le = "<=", gt = ">", ge = ">=", eq = "==", ne = "~=" }
local F32 = { add = "(%s + %s)", sub = "(%s - %s)", mul = "(%s * %s)" }

local function operation(x, t)
  local op, kind, from = x.op, x.type, x.args[1].type
  if F32[op] and (kind == "f32" or kind == "u64") then
    return F32[op]:format(t[1], t[2])
  end
  if INFIX[op] then return ("(%s %s %s)"):format(t[1], INFIX[op], t[2]) end
  if op == "div" then return ("(%s / %s)"):format(t[1], t[2])
  elseif op == "neg" then
    return kind == "i32" and ("tobit(-%s)"):format(t[1]) or ("(-%s)"):format(t[1])
  elseif op == "pow" then return ("(%s ^ %s)"):format(t[1], t[2])
  elseif op == "store" then return t[1]
  elseif op == "unit" then return ("(%s * %s_unit)"):format(t[1], x.unit)
  elseif op == "where" then
    -- a and b may be false, so `c and a or b` would not do for bools
    return ("(where_%s(%s, %s, %s))"):format(kind == "bool" and "bool" or "any",
      t[1], t[2], t[3])
  elseif op == "band" and kind == "bool" then return ("(%s and %s)"):format(t[1], t[2])
  elseif op == "bor" and kind == "bool" then return ("(%s or %s)"):format(t[1], t[2])
  elseif op == "bxor" and kind == "bool" then return ("(%s ~= %s)"):format(t[1], t[2])
  elseif op == "bnot" and kind == "bool" then return ("(not %s)"):format(t[1])
  elseif op == "cast" then
    return ("%s_from_%s(%s)"):format(kind, from, t[1])
  elseif op == "popcount" then return ("popcount_%s(%s)"):format(from, t[1])
  end
  return ("%s_%s(%s)"):format(op, kind, table.concat(t, ", "))
end

local function load(pointer, at, dtype, kind)
  local text = ("%s[%s]"):format(pointer, at)
  if READ[dtype] then return READ[dtype]:format(text) end
  if kind == "bool" then return ("(%s ~= 0)"):format(text) end
  if kind == "u32" then return ("u32_from_i32(%s)"):format(text) end
  return text
end

--- The dtype of K and V that a Lua kernel sees: packed pages are unpacked first.
local function lua_codec(plan)
  return pages.CODECS[plan.codec].packs and "f32" or plan.codec
end

local OF_KEY = {
  logit = "scores[%s]", index = "indices[%s]",
  block = "floor(indices[%s] / TOKENS)",
}

local function read_leaf(self, s, x, bind)
  if self.plan.place == "hook" then
    if x.op == "input" then
      return ("a.in_%s[in_%s + floor(indices[%s] / TOKENS)]"):format(x.name, x.name,
        self.key)
    end
    local text = x.op == "leaf" and OF_KEY[x.name]
    if text then return text:format(self.key) end
  end
  if x.op == "param" then
    return x.type == "i32" and ("i32_from_f32(a.param_%s)"):format(x.name)
      or "a.param_" .. x.name
  elseif x.op == "const" then
    return load("a.const_" .. x.name, s:index(nil, bind, x.stored), x.dtype, x.type)
  elseif x.op == "field" then
    return load("a.field_" .. x.name, ("field_%s + %s"):format(x.name,
      s:index(x.dims, bind)), x.dtype, x.type)
  elseif x.op == "input" then return ("a.in_%s[in_%s + block]"):format(x.name, x.name)
  elseif x.name == "q" then return ("a.read_q(q_row + %s)"):format(s:index(x.dims, bind))
  elseif x.name == "k" or x.name == "v" then
    return load("memory", ("%s_row + %s"):format(x.name, s:index(x.dims, bind)),
      lua_codec(self.plan), "f32")
  elseif x.name == "index" then
    return ("(block * %d + %s)"):format(self.plan.sizes.token, bind.token.text)
  elseif x.name == "score" then
    return ("a.scores[scores + %s * stride + block * TOKENS + %s]"):format(bind.head.text,
      bind.token.text)
  elseif x.name == "logit" then
    return ("logits[%s * TOKENS + %s]"):format(bind.head.text, bind.token.text)
  elseif x.name == "lse" then return ("a.lse[lse + %s]"):format(bind.head.text)
  end
  return x.name
end

function Printer:compute(s, x, bind, texts)
  if #x.args == 0 then return read_leaf(self, s, x, bind) end
  return operation(x, texts)
end

-- ---- arrays ---------------------------------------------------------------------------

function Printer:array(name, kind, count)
  return set(name, ("ffi.new(\"%s[%d]\")"):format(ARRAYS[kind], count))
end

function Printer:array_store(name, at, text, kind)
  if kind == "bool" then text = text .. " and 1 or 0" end
  return ("%s[%s] = %s"):format(name, at, text)
end

function Printer:array_filled() return "" end

function Printer:array_load(name, at, kind)
  return (kind == "bool" and "%s[%s] ~= 0" or "%s[%s]"):format(name, at)
end

-- ---- reductions -----------------------------------------------------------------------

local START = { sum = { f32 = "0", i32 = "0", u32 = "0", u64 = "0ULL" },
                max = { f32 = "-INF", i32 = "-2147483648", u32 = "0", u64 = "0ULL" },
                min = { f32 = "INF", i32 = "2147483647", u32 = "4294967295",
                        u64 = "0xFFFFFFFFFFFFFFFFULL" }, mean = { f32 = "0" },
                any = { bool = "false" }, all = { bool = "true" },
                argmax = { i32 = "-1" }, logsumexp = { f32 = "-INF" } }

function Printer:reduce_start(s, x)
  local name = s:variable "r"
  local function also(what, text)
    s:count_variable()
    s:line(set(name .. what, text))
  end
  s:line(set(name, START[x.op][x.type]))
  if x.op == "argmax" then also("_best", "-INF") end
  if x.op == "logsumexp" then also("_sum", "0") end
  return { name = name }
end

function Printer:reduce_step(s, x, into, text, to)
  local r, op = into.name, x.op
  if op == "sum" or op == "mean" then
    local sum = (x.type == "f32" or x.type == "u64") and "%s = %s + %s"
      or "%s = add_" .. x.type .. "(%s, %s)"
    s:line(sum:format(r, r, text))
  elseif op == "max" or op == "min" then
    s:line(("%s = %s_%s(%s, %s)"):format(r, op, x.type, r, text))
  elseif op == "any" then s:line(("%s = %s or %s"):format(r, text, r))
  elseif op == "all" then s:line(("%s = %s and %s"):format(r, text, r))
  elseif op == "logsumexp" then
    s:line(("%s, %s_sum = lse_add(%s, %s_sum, %s)"):format(r, r, r, r, text))
  elseif op == "argmax" then
    s:line(("%s_best, %s = arg_add(%s_best, %s, %s, %s)"):format(r, r, r, r, text,
      to.text))
  end
end

function Printer:reduce_end(s, work, _, size)
  local names = {}
  for i, one in ipairs(work) do
    local x, r = one.node, one.into.name
    names[i] = r
    if x.op == "logsumexp" then s:line(("%s = %s + log(%s_sum)"):format(r, r, r)) end
    if x.op == "mean" then
      s:line(("%s = %s / %s"):format(r, r, x.over == "token" and "max(tokens, 1)"
        or tostring(size)))
    end
  end
  return names
end

-- ---- the kernel -----------------------------------------------------------------------

local SCORE = [[
for seq = 0, a.seqs - 1 do
  for kv_head = 0, a.kv_heads - 1 do
    local length, layer = a.lens[seq], a.layer
    local blocks = ceil(length / TOKENS)
    local row = (a.last ~= nil and a.last[seq] or seq) * a.kv_heads + kv_head
    local q_row, out = row * %d, (seq * a.kv_heads + kv_head) * a.width
%s    for block = 0, a.width - 1 do
      local physical = block < blocks and a.tables[seq * a.width + block] or -1
      if physical < 0 or physical >= a.rows then
        a.scores[out + block] = -INF
      else
        local tokens = min(TOKENS, length - block * TOKENS)
%s      end
    end
  end
end
]]

local SUMMARY = [[
for entry = 0, a.n - 1 do
  local physical, row, layer = a.k_blocks[entry], a.blocks[entry], a.layer
  if physical >= 0 and physical < a.cache_blocks and row >= 0 and row < a.rows then
    local tokens = max(0, min(a.counts[entry], TOKENS))
    for kv_head = 0, a.kv_heads - 1 do
%s    end
  end
end
]]

local MAP = [[
for seq = 0, a.seqs - 1 do
  local length, layer = a.lens[seq], a.layer
  local blocks = ceil(length / a.block_size)
  for kv_head = 0, a.heads - 1 do
    local item = seq * a.heads + kv_head
    local out = item * a.width
%s    for block = 0, a.width - 1 do
%s    end
  end
end
]]

-- A hook is a function of one query row and `tokens` keys, whose scores it changes.
local HOOK = [[
return function(seq, kv_heads, kv_head, head, length, query_index, indices, tokens,
                scores)
local layer, blocks = a.layer, ceil(length / TOKENS)
%send
]]

local EMIT = [[
local stride = a.width * TOKENS
for row = 0, a.seqs * a.kv_heads - 1 do
  local seq, kv_head = floor(row / a.kv_heads), row %% a.kv_heads
  local length, layer, lse = a.lens[seq], a.layer, row * GROUP
  local blocks, query_index = ceil(length / TOKENS), length - 1
  local seen_from = a.window > 0 and max(length - a.window, 0) or 0
  local out, scores = row * a.width * CELLS, row * GROUP * stride
  local list = (seq * a.selection_heads + kv_head %% a.selection_heads) * a.entries
%s  for entry = 0, a.entries - 1 do
    for cell = 0, a.selection == nil and CELLS - 1 or -1 do
      a.out[out + entry * CELLS + cell] = %s
    end
    local block = a.selection ~= nil and a.selection[list + entry] or entry
    if block >= 0 and block < blocks and block < a.width then
      local tokens = min(TOKENS, length - block * TOKENS)
%s    end
  end
end
]]

-- `logits` has the scores of one query and one block, before bias, mask and log_weight.
local PROMPT = [[
local logits, cap = ffi.new("double[?]", GROUP * TOKENS), a.soft_cap
for seq = 0, a.seqs - 1 do
  local length, layer, first = a.lens[seq], a.layer, a.starts[seq]
  local blocks, rows = ceil(length / TOKENS), a.starts[seq + 1] - first
  for kv_head = 0, a.kv_heads - 1 do
    local row = seq * a.kv_heads + kv_head
    local list = (seq * a.selection_heads + kv_head %% a.selection_heads) * a.entries
    local slots = (seq * a.slot_heads + kv_head %% a.slot_heads) * a.entries
    local scale = a.scale * (a.k_scale ~= nil and a.k_scale[kv_head] or 1)
    local out = row * a.width
%s    for entry = 0, a.entries - 1 do
      local block = a.selection ~= nil and a.selection[list + entry] or entry
      local physical = -1
      if block >= 0 and block < blocks and block < a.width then
        physical = a.slots ~= nil and a.slots[slots + entry]
          or a.tables[seq * a.width + block]
      end
      local is_there = physical >= 0 and physical < a.rows
      local k_row = is_there and a.key_row(physical, kv_head, 0) or 0
%s      for query = 0, is_there and rows - 1 or -1 do
        local query_index = length - rows + query
        local tokens = min(TOKENS, query_index + 1 - block * TOKENS)
        if tokens > 0 and %s then
%s          local seen_from = a.window > 0 and max(query_index + 1 - a.window, 0) or 0
          local lse = ((first + query) * a.kv_heads + kv_head) * GROUP
          for head = 0, GROUP - 1 do
            local slope = a.alibi ~= nil and a.alibi[kv_head * GROUP + head] or 0
            for token = 0, tokens - 1 do
              local dot = 0
              for d = 0, DIM - 1 do
                dot = dot + a.read_q((lse + head) * DIM + d) * %s
              end
              dot = dot * scale
              if cap > 0 then dot = cap * tanh_f32(dot / cap) end
              logits[head * TOKENS + token] = dot
                + slope * (block * TOKENS + token - query_index)
            end
          end
%s        end
      end
%s    end
  end
end
]]

local function body(self, fn)
  local plan = self.plan
  local s, roots = schedule.new(self, plan.sizes), {}
  for i, root in ipairs(plan.roots) do roots[i] = root.node end
  s:take(roots, expression.each)
  s.block_level = schedule.BLOCK
  s:push(nil)
  fn(s)
  return s.scopes[schedule.FIXED].lines, s.scopes[schedule.BLOCK].lines
end

local function unit_lines(plan, lines)
  if not plan.scaled then return end
  for _, name in ipairs { "k", "v" } do
    lines[#lines + 1] = ("local %s_unit = a.%s_scale ~= nil and a.%s_scale[kv_head] or 1")
      :format(name, name, name)
  end
end

local function row_lines(plan, lines)
  for _, one in ipairs { { "k", "key_row" }, { "v", "value_row" } } do
    local name, row = one[1], one[2]
    if plan.uses[name] then
      lines[#lines + 1] = ("local %s_row = a.%s(physical, kv_head, 0)"):format(name, row)
    end
  end
  if plan.uses.k or plan.uses.v then lines[#lines + 1] = "local memory = a.cache" end
  for _, field in ipairs(plan.fields) do
    lines[#lines + 1] = ("local field_%s = (physical * a.kv_heads + kv_head) * %d")
      :format(field.name, field.count)
  end
end

local function indented(lines, indent)
  if #lines == 0 then return "" end
  return indent .. table.concat(lines, "\n" .. indent) .. "\n"
end

local function print_score(self)
  local plan, first, rows = self.plan, {}, {}
  local fixed, block = body(self, function(s)
    s:line(("a.scores[out + block] = %s"):format(s:value(plan.roots[1].node, {})))
  end)
  unit_lines(plan, first)
  row_lines(plan, rows)
  return SCORE:format(plan.sizes.head * plan.sizes.dim, indented(first, "    ")
    .. indented(fixed, "    "), indented(rows, "        ") .. indented(block, "        "))
end

local function print_summary(self)
  local plan, first = self.plan, {}
  local fixed, block = body(self, function(s)
    for _, root in ipairs(plan.roots) do
      local dims = root.node.dims
      s:over(dims, function(bind)
        local text = s:value(root.node, bind)
        s:line(("a.field_%s[(row * a.kv_heads + kv_head) * %d + %s] = to_%s(%s)"):format(
          root.name, root.count, s:index(dims, bind), root.dtype, text))
      end)
    end
  end)
  unit_lines(plan, first)
  row_lines(plan, first)
  return SUMMARY:format(indented(first, "      ") .. indented(fixed, "      ")
    .. indented(block, "      "))
end

local function print_map(self)
  local plan, first = self.plan, {}
  local fixed, block = body(self, function(s)
    s:line(("a.out[out + block] = %s"):format(s:value(plan.roots[1].node, {})))
  end)
  for _, name in ipairs(plan.inputs) do
    first[#first + 1] = ("local in_%s = (a.heads_%s == 1 and seq or item) * a.width")
      :format(name, name)
  end
  return MAP:format(indented(first, "    ") .. indented(fixed, "    "),
    indented(block, "      "))
end

local function print_hook(self)
  local plan, first = self.plan, {}
  local s, roots = schedule.new(self, plan.sizes), {}
  for i, root in ipairs(plan.roots) do roots[i] = root.node end
  s:take(roots, expression.each)
  s.block_level = schedule.BLOCK
  s:over({ "token" }, function(bind)
    for _, root in ipairs(plan.roots) do
      local text = s:value(root.node, bind)
      s:line((root.name == "add" and "local add = %s"
        or "local seen = %s"):format(text))
    end
    for _, root in ipairs(plan.roots) do
      local score = ("scores[%s]"):format(self.key)
      s:line(root.name == "add" and ("%s = %s + add"):format(score, score)
        or ("if not seen then %s = -INF end"):format(score))
    end
  end, { head = { text = "head", level = schedule.FIXED } })
  for _, name in ipairs(plan.inputs) do
    first[#first + 1] = ("local in_%s = (a.heads_%s == 1 and seq or seq * kv_heads + "
      .. "kv_head) * a.width"):format(name, name)
  end
  return HOOK:format(indented(first, "  ")
    .. indented(s.scopes[schedule.FIXED].lines, "  "))
end

--- Calls fn(text, at) with the emitted value and its cell of the block, inside of a loop
-- if there is a value for each token.
local function each_cell(s, root, fn)
  if not root.by_token then return fn(s:value(root.node, {}), "0") end
  s:over({ "token" }, function(bind)
    local text = s:value(root.node, bind)
    fn(text, bind.token.text)
  end)
end

--- The number that is emitted where nothing is read.
local function nothing(self, root)
  return self:literal(place.NOTHING[root.join], "f32")
end

local function print_emit(self)
  local plan, first = self.plan, {}
  local root = plan.roots[1]
  local fixed, block = body(self, function(s)
    each_cell(s, root, function(text, at)
      s:line(("a.out[out + block * CELLS + %s] = %s"):format(at, text))
    end)
  end)
  for _, name in ipairs(plan.inputs) do
    first[#first + 1] = ("local in_%s = (a.heads_%s == 1 and seq or row) * a.width")
      :format(name, name)
  end
  return ("local GROUP, CELLS = %d, %s\n"):format(plan.sizes.head,
      root.by_token and "TOKENS" or "1")
    .. EMIT:format(indented(first, "  ") .. indented(fixed, "  "), nothing(self, root),
      indented(block, "      "))
end

local QUERY_VALUE = [[
local function compute_%s(kv_head, length, blocks, query_index)
  local layer = a.layer
%s  return %s
end
]]
local QUERY_CALL = "compute_%s(kv_head, length, blocks, query_index)"

--- The functions that compute values which depend only on a query.
local function query_values_text(self)
  local texts = {}
  for i, value in ipairs(self.plan.query_values) do
    local s = schedule.new(self, self.plan.sizes)
    s:take({ value.node }, expression.each)
    s.block_level = schedule.FIXED
    local text = s:value(value.node, {})
    texts[i] = QUERY_VALUE:format(value.name,
      indented(s.scopes[schedule.FIXED].lines, "  "), text)
  end
  return table.concat(texts)
end

local function print_prompt(self)
  local plan, first, starts, ends, values = self.plan, {}, {}, {}, {}
  for _, value in ipairs(plan.query_values) do
    if value.name ~= "needed" then
      values[#values + 1] = ("local %s = %s"):format(value.name,
        QUERY_CALL:format(value.name))
    end
  end
  local fixed, block = body(self, function(s)
    for _, root in ipairs(plan.roots) do
      each_cell(s, root, function(text, at)
        s:line((root.join == "max" and "sums_%s[%s] = max_f32(sums_%s[%s], %s)"
          or "sums_%s[%s] = sums_%s[%s] + %s"):format(root.name, at, root.name, at, text))
      end)
    end
  end)
  for i, root in ipairs(plan.roots) do
    local cells = root.by_token and "TOKENS" or "1"
    starts[i] = ("local sums_%s = ffi.new(\"double[?]\", %s)\n"
      .. "      for cell = 0, %s - 1 do sums_%s[cell] = %s end"):format(root.name, cells,
      cells, root.name, nothing(self, root))
    ends[i] = ("for cell = 0, is_there and %s - 1 or -1 do\n        a.emit_%s[(out + "
      .. "block) * %s + cell] = sums_%s[cell]\n      end"):format(cells, root.name, cells,
      root.name)
  end
  for _, name in ipairs(plan.inputs) do
    first[#first + 1] = ("local in_%s = (a.heads_%s == 1 and seq or row) * a.width")
      :format(name, name)
  end
  return ("local GROUP, DIM = %d, %d\n"):format(plan.sizes.head, plan.sizes.dim)
    .. query_values_text(self) .. PROMPT:format(indented(first, "    ")
      .. indented(fixed, "    "), indented(starts, "      "),
      plan.needed and QUERY_CALL:format "needed" or "true",
      indented(values, "          "),
      load("a.cache", "k_row + token * DIM + d", lua_codec(plan), "f32"),
      indented(block, "          "), indented(ends, "      "))
end

local PRINTS = { score = print_score, summary = print_summary, map = print_map,
                 hook = print_hook, emit = print_emit, prompt = print_prompt }

--- The source of a kernel: a chunk that gets kernel/run/numbers.lua, and returns a
-- function of the arguments.
---@param plan kvlab.Plan
---@return string
function M.print(plan)
  local title, values = {}, {}
  for i, root in ipairs(plan.roots) do
    title[i] = ("-- %s = %s"):format(root.name, expression.text(root.node))
    values[i] = root.node
  end
  for _, value in ipairs(plan.query_values or {}) do values[#values + 1] = value.node end
  local self = setmetatable({ plan = plan, named = expression.named(values), more = 0 },
    Printer)
  local text = PRINTS[plan.place](self)
  return table.concat(title, "\n") .. "\nlocal numbers = ...\nsetfenv(1, numbers)\n"
    .. ("local TOKENS = %d\nreturn function(a)\n"):format(plan.sizes.token or 1)
    .. (self.more > 0 and "local more = {}\n" or "") .. text .. "end\n"
end

return M
