--- Prints values, loops and reductions of a kernel in C, for schedule.lua beside it. What
-- the text calls is in kernels/cpu/expression.h. Vectors run along dim, and the query
-- heads of a group are unrolled, so that a row is read once for all of them.
--
-- What a kernel sets: plan, lanes (numbers of a vector), vectors (whether vectors can run
-- along dim), token_vectors (the reductions over tokens that use vectors),
-- keys_in_vectors (of a hook, or an emit by token), items (blocks at once), tokens (how
-- many, as text), key_bytes (of a summary, or a score that walks through the K of one
-- block at a time).
local c_text = require "kvlab.kernel.print.c_text"
local expression = require "kvlab.kernel.expression.expression"
local pages = require "kvlab.tensor.pages"

local TYPES, VECTORS, MEMORY, NUMBERS = c_text.TYPES, c_text.VECTORS, c_text.MEMORY,
  c_text.NUMBERS
local START, item_of, operation = c_text.START, c_text.item_of, c_text.operation
local suffix, widen = c_text.suffix, c_text.widen
local M = {}

local heads_unrolled = c_text.heads_unrolled

-- The most elements of arrays that lie on a thread's stack; larger arrays lie in memory
-- of the thread.
local STACK_MAX = 65536

---@class kvlab.PrinterC
local Printer = {}
Printer.__index = Printer

-- ---- loops ----------------------------------------------------------------------------

function Printer:mode(dim, size)
  if dim == "token" then return self.keys_in_vectors and "vector" or "loop" end
  if dim == "dim" and self.vectors then return "vector" end
  if dim == "item" or dim == "head" and size <= heads_unrolled(self.plan) then
    return "unroll"
  end
  return "loop"
end

--- A reduction over tokens uses vectors if nothing that it reads runs along dim; sums
-- over dim then come from an array.
function Printer:reduces_in_vectors(x)
  return x.over == "token" and self.vectors and self.token_vectors[x] or false
end

--- Whether to treat a value as one that differs between blocks.
function Printer:varies(x)
  local of_query = self.plan.of_query
  return of_query and x.op == "leaf" and of_query[x.name] or false
end

function Printer:elements(_, size) return size end

function Printer:element(_, value)
  return { text = tostring(value), level = 0 }
end

--- How many vectors along dim one iteration of a loop handles. In a summary the loops
-- over tokens are inside of this loop. With more vectors, each of them reads more of a
-- row and has more sums in flight, as many as there are registers for.
function Printer:vectors_together(dim, size)
  if dim ~= "dim" or self.plan.place ~= "summary" then return 1 end
  local count = self.lanes == 16 and 8 or 4
  while size % (count * self.lanes) ~= 0 do count = count / 2 end
  return count
end

--- The head and tail of a loop over a dimension, and its variable.
function Printer:loop(s, dim, size, is_vector, _, step)
  local name = s:name(dim:sub(1, 1))
  local last = dim == "token" and self.tokens or tostring(size)
  local head = ("for (int %s = 0; %s < %s; %s) {"):format(name, name, last,
    step and ("%s += %s"):format(name, step) or is_vector and name .. " += VF"
    or name .. "++")
  if self.key_bytes and dim == "token" and (step or self.plan.place == "summary") then
    self.asks_for_keys = true -- the keys of these tokens in the next block
    head = ("%s soon(k_soon + %s * %d, %d);"):format(head, name, self.key_bytes,
      self.key_bytes * (step or 1))
  end
  if self.plan.place == "hook" then
    self.key = name
    return head, "}", ("(indices[%s] %% TOKENS)"):format(name)
  end
  return head, "}", name
end

--- For how many tokens sums along dim are computed together; nil: one after the other.
-- Some of these tokens may be past the last one; they still lie in the block's memory.
function Printer:tokens_together(x)
  local sizes = self.plan.sizes
  if not (self.vectors and x.over == "dim" and x.op == "sum" and x.type == "f32") then
    return nil
  end
  if not expression.has_dim(x.dims, "token") or #x.dims > 2 then return nil end
  if #x.dims == 2 and (x.dims[1] ~= "head" or sizes.head > heads_unrolled(self.plan)) then
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

Printer.literal = c_text.literal

function Printer:declare(kind, vector, name, text)
  return ("%s %s = %s;"):format(vector and VECTORS[kind] or TYPES[kind], name, text)
end

--- Leaves without dimensions are variables already.
function Printer:is_named(x) return #x.args > 0 or #x.dims > 0 end

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

--- Reads number `at` of a strip of K or V.
local function load_row(plan, strip, at, vector)
  if not pages.CODECS[plan.codec].packs then
    return load(strip, at, plan.codec, "f32", vector)
  end
  return ("%s_load_packed(%s, %s, %d, %d, %d, %s)"):format(vector and "vf" or "f32",
    strip, at, plan.sizes.token, plan.sizes.dim, plan.value_dim, NUMBERS[plan.codec])
end

--- What a hook reads of the present key, or of VF keys.
local function read_of_key(self, x, vector)
  local key = self.key
  if x.name == "logit" then
    return (vector and "load_f32_vf(scores + %s)" or "scores[%s]"):format(key)
  end
  local index = (vector and "load_i32_vi(indices + %s)" or "indices[%s]"):format(
    key)
  if x.name == "index" then return index end
  local block = index .. " / TOKENS"
  if x.name == "block" then return block end
  return (vector and "gather_f32_vf(in_%s, %s)" or "in_%s[%s]"):format(x.name, block)
end

local OF_KEY = { logit = true, index = true, block = true }

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
    return load_row(self.plan, x.name .. "_row" .. item, s:index(x.dims, bind), vector)
  elseif x.name == "index" then
    local text = ("block%s * TOKENS + %s"):format(item, bind.token.text)
    return vector and ("vi_iota(%s)"):format(text) or text
  elseif x.name == "score" then
    return (vector and "load_f32_vf(%s)" or "*(%s)"):format(("scores + %s * stride + "
      .. "block * TOKENS + %s"):format(bind.head.text, bind.token.text))
  elseif x.name == "logit" then
    return (vector and "load_f32_vf(%s)" or "*(%s)"):format(("logits + %s * COLUMNS + %s")
      :format(bind.head.text, bind.token.text))
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
  self.on_stack = (self.on_stack or 0) + count
  return ("%s%s %s[%d + VF] __attribute__((aligned(64)));"):format(
    self.on_stack > STACK_MAX and "static _Thread_local " or "", TYPES[kind], name, count)
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

--- LANES sums over dim are added up across lanes together, which costs little more than a
-- single sum.
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

-- ---- what is emitted ------------------------------------------------------------------

--- Prints what is emitted for one query and block. Returns the text of its cell t: the
-- number of the block, or of its token t.
function M.emitted(s, root)
  if not root.by_token then return s:value(root.node, {}) end
  local cells = s:name "cells"
  s:line(("float %s[TOKENS + VF] __attribute__((aligned(64)));"):format(cells))
  s:over({ "token" }, function(bind)
    local text, at = s:value(root.node, bind), bind.token.text
    s:line((bind.token.vector and "vf_store(%s, %s, %s, KVL_DTYPE_F32);"
      or "%s[%s] = %s;"):format(cells, at, text))
  end)
  return cells .. "[t]"
end

-- ---- what kernels begin with ----------------------------------------------------------

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
      line("const float *%s_scales = a->cache.%s_scale;", name, name)
      line("const float %s_unit = %s_scales ? %s_scales[kv_head] : 1;", name, name, name)
    end
  end
  return lines
end

M.fixed_lines = fixed_lines

--- A printer of a kernel, with the fields that the kernel sets.
function M.new(kernel) return setmetatable(kernel, Printer) end

return M
