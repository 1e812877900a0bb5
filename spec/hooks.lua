--- Runs bias, mask, log_weight and emit of a policy on a small random cache, beside the
-- reference (spec/reference/hooked_attention.lua), and makes random ones. Stored numbers
-- are small whole ones and the scale is a power of two, so logits are exact.
local expressions = require "spec.expressions"
local kernel = require "kvlab.kernel.run.kernel"
local kernel_hook = require "kvlab.kernel.run.hook"
local kv = require "kvlab"
local ops = require "kvlab.tensor.ops"
local policy = require "kvlab.policy.policy"
local reference = require "spec.reference.hooked_attention"

local M = {}

local SCALE, LAYER = 0.125, 1

-- Stated: 1e-4 of the larger number. With queries of 16 bits, CUDA rounds weights to
-- their dtype (in decode over an f8e4m3 cache to f16) before it multiplies them with V,
-- which is at most 4.
local TOLERANCE = 1e-4
local function out_tolerance(dev, o)
  if dev == "cpu" or (o.q_dtype or "f32") == "f32" then return TOLERANCE end
  local weights_bf16 = o.q_dtype == "bf16" and (o.dtype == "bf16" or o.rows)
  return weights_bf16 and 4 * 2 ^ -8 or 4 * 2 ^ -11
end

-- ---- what attention is given ----------------------------------------------------------

--- Queries of `rows[s]` new tokens of each sequence.
local function make_queries(c, rows)
  local o, list, starts = c.o, {}, { 0 }
  for s = 1, c.seqs do starts[s + 1] = starts[s] + rows[s] end
  local tokens = starts[#starts]
  for i = 1, tokens * o.kv_heads * o.group * o.head_dim do list[i] = c.draw(5) - 2 end
  local t = kv.from(c.dev, "f32", { tokens, o.kv_heads * o.group, o.head_dim }, list)
  return list, t:cast(o.q_dtype or "f32"), starts
end

--- For each sequence and KV head, about half of the blocks, the last one always.
local function make_selection(c)
  local o, lists, flat, most = c.o, {}, {}, c.width
  for s = 1, c.seqs do
    for _ = 1, o.kv_heads do
      local blocks, list = math.ceil(o.lens[s] / o.block_size), {}
      for b = 0, blocks - 1 do
        if b == blocks - 1 or c.draw(2) == 0 then list[#list + 1] = b end
      end
      lists[#lists + 1] = list
    end
  end
  for _, list in ipairs(lists) do
    for i = 1, most do flat[#flat + 1] = list[i] or -1 end
  end
  return lists, kv.from(c.dev, "i32", { c.seqs, o.kv_heads, most }, flat)
end

--- For each row of q all tokens of its sequence, in another order for each.
local function make_lists(c, starts)
  local most, flat = c.width * c.o.block_size, {}
  for s = 1, c.seqs do
    for _ = starts[s], starts[s + 1] - 1 do
      local list = {}
      for i = 1, most do
        local at = c.draw(i) + 1
        list[i] = i <= c.o.lens[s] and i - 1 or -1
        list[i], list[at] = list[at], list[i]
      end
      for i = 1, most do flat[#flat + 1] = list[i] end
    end
  end
  return kv.from(c.dev, "i32", { starts[c.seqs + 1], 1, most }, flat)
end

local function slopes(n)
  local list = {}
  for i = 1, n do list[i] = i % 4 * 0.25 end
  return list
end

--- The tensors that expressions read: input "mix" and const "slope".
local function give_fields(c, p)
  local o, mix = c.o, {}
  for i = 1, c.seqs * o.kv_heads * c.width do mix[i] = (i * 5) % 7 - 3 end
  p.mix = kv.from(c.dev, "f32", { c.seqs, o.kv_heads, c.width }, mix)
  c.mix = mix
end

-- ---- kvlab ----------------------------------------------------------------------------

--- A memory tier's reader that knows the op alone. K is read again in two parts: the
-- blocks of odd entries, with their slots, and then the others.
local function reader_of(c, q, starts, selection, listed)
  local o, reader = c.o, {}
  local function add_parts(ctx, lse, emitter)
    if not o.parts then return emitter:add_part(ctx, lse, c.layer, selection, nil) end
    local lists = selection and selection:list() or {}
    local entries = selection and selection:size(2) or c.width
    for part = 0, 1 do
      local logical, slots = {}, {}
      for s = 0, c.seqs - 1 do
        for head = 0, o.kv_heads - 1 do
          for entry = 0, entries - 1 do
            local row = s * o.kv_heads + head
            local block = selection and lists[row * entries + entry + 1] or entry
            local is_in = entry % 2 == part and block >= 0
            logical[#logical + 1] = is_in and block or -1
            slots[#slots + 1] = is_in and c.tables[s * c.width + block + 1] or -1
          end
        end
      end
      local dims = { c.seqs, o.kv_heads, entries }
      emitter:add_part(ctx, lse, c.layer, kv.from(c.dev, "i32", dims, logical),
        kv.from(c.dev, "i32", dims, slots))
    end
  end
  function reader.attend(_, _, _, ctx, out, lse, hook, emitters)
    local call = { q = q, cache = c.layer, tables = ctx.tables, lens = ctx.lens,
      starts = starts, selection = selection, listed = listed, scale = SCALE,
      window = o.window, soft_cap = o.soft_cap, alibi = c.alibi,
      format = c.format:of(LAYER), out = out, lse = lse }
    call.hook, call.scores = hook:prepare(ctx, listed ~= nil)
    local attend = kernel_hook.is_in_lua(call.hook) and kernel_hook.attend_in_lua
      or ops.step.paged_attention
    attend(call, out)
    if emitters then add_parts(ctx, lse, emitters[1]) end
    return out
  end
  return reader
end

local function context_of(c, q, starts)
  local o = c.o
  return { query = q, layer = LAYER, seqs = c.seqs, kv_heads = o.kv_heads,
    width = c.width, block_size = o.block_size, is_prefill = starts ~= nil,
    device = c.dev, shape_number = 1, starts = starts,
    format = c.format, scale = SCALE, window = o.window, alibi = c.alibi,
    soft_cap = o.soft_cap,
    tables = kv.from(c.dev, "i32", { c.seqs, c.width }, c.tables),
    lens = kv.from(c.dev, "i32", { c.seqs }, o.lens),
    new_scores = function()
      return kv.full(c.dev, "f32", { c.seqs, o.kv_heads, c.width }, 12345)
    end }
end

--- Attends with the policy of a definition. Gives the lists out, lse, and those emitted.
local function run(c, p, q, starts, selection, listed)
  local of_starts = starts and kv.from(c.dev, "i32", { #starts }, starts)
  local ctx = context_of(c, q, of_starts)
  local out = kv.full(c.dev, "f32",
    { q:size(0), q:size(1), c.o.value_dim or c.o.head_dim }, 12345)
  local lse = kv.full(c.dev, "f32", { q:size(0), q:size(1) }, 12345)
  local reader = reader_of(c, q, of_starts, selection, listed)
  if listed and not starts then
    local attention = { attend_part = function(_, of, hook)
      return reader.attend(nil, nil, nil, of, out, lse, hook)
    end }
    p.hook:attend_listed(attention, ctx, listed, out, lse)
  elseif not starts then
    p.hook:attend({}, reader, selection, ctx, out, lse)
  elseif p.hook.prompt then
    kernel_hook.attend_in_prefill(p.hook, { p.hook }, {}, reader, selection, ctx, out,
      lse)
  else
    reader:attend({}, selection, ctx, out, lse, p.hook)
  end
  local emitted = {}
  for name, t in pairs(p.emitted) do emitted[name] = t:list() end
  return out:list(), lse:list(), emitted
end

-- ---- the reference --------------------------------------------------------------------

local function environment(c, p, q, def)
  local o, page = c.o, c.o.block_size * c.o.head_dim
  local function stored(which)
    return function(row, position, x)
      local block = math.floor(position / o.block_size)
      local physical = c.tables[row.seq * c.width + block + 1]
      local first = ((physical * 2 + which) * o.kv_heads + row.kv_head) * page
      local unit = o.scaled and o.scaled[row.kv_head + 1] or 1
      return c.memory[first + position % o.block_size * o.head_dim + x + 1] * unit
    end
  end
  local slope = slopes(2 * o.kv_heads * o.group)
  return { soft_cap = o.soft_cap, alibi = c.alibi and slopes(o.kv_heads * o.group),
    dim = o.head_dim, value_dim = o.value_dim or o.head_dim, group = o.group,
    block_size = o.block_size, scale = SCALE, window = o.window or 0, layer = LAYER,
    expressions = def, k = stored(0),
    v = stored(o.value_dim and 0 or 1), q = q, param = function(name) return p[name] end,
    const = function(_, at, row)
      return slope[(LAYER * o.kv_heads + row.kv_head) * o.group + at.head + 1]
    end,
    input = function(_, seq, kv_head, block)
      return c.mix[(seq * o.kv_heads + kv_head) * c.width + block + 1]
    end }
end

local function selected_set(list)
  if not list then return nil end
  local set = {}
  for _, b in ipairs(list) do set[b] = true end
  return set
end

--- What is emitted: an expression of one query, whether its numbers are joined by their
-- maximum, and whether there is one for each token.
local function parts_of(x)
  local is_max = x.over == "query" and x.op == "max"
  if x.over == "query" then x = x.args[1] end
  return x, is_max, x.dims[1] == "token"
end

--- Joins what a row emits of block b, if its query may see it, with what is in a list.
local function join_emitted(env, row, x, weights, b, list, first)
  local size, of_query, is_max, by_token = env.block_size, parts_of(x)
  local tokens = math.min(size, row.position + 1 - b * size)
  if tokens <= 0 then return end
  for token = 0, by_token and tokens - 1 or 0 do
    local at = by_token and (first + b) * size + token + 1 or first + b + 1
    local number = reference.emit(env, row, of_query, weights, b, token)
    list[at] = is_max and math.max(list[at], number) or not is_max and list[at] + number
  end
end

--- What the reference gives, in the same order. What is emitted is joined over a
-- sequence's tokens.
local function expected(c, p, def, q, starts, lists)
  local o, out, lses, emitted = c.o, {}, {}, {}
  local env = environment(c, p, q, def)
  local numbers = env.value_dim
  for name, x in pairs(def.emit or {}) do
    emitted[name] = {}
    local _, is_max, by_token = parts_of(x)
    for i = 1, c.seqs * o.kv_heads * c.width * (by_token and o.block_size or 1) do
      emitted[name][i] = is_max and -math.huge or 0
    end
  end
  for s = 0, c.seqs - 1 do
    local first, last = starts[s + 1], starts[s + 2] - 1
    for kv_head = 0, o.kv_heads - 1 do
      local blocks_at = (s * o.kv_heads + kv_head) * c.width
      local selected = selected_set(lists and lists[s * o.kv_heads + kv_head + 1])
      for token = first, last do
        local weights, row = {}, nil
        for head = 0, o.group - 1 do
          local at = token * o.kv_heads * o.group + kv_head * o.group + head
          row = { seq = s, kv_head = kv_head, head = head, length = o.lens[s + 1],
            position = o.lens[s + 1] - (last - token) - 1, selected = selected,
            q = function(x) return q[at * o.head_dim + x + 1] end }
          local values
          values, lses[at + 1], weights[head] = reference.row(env, row)
          for x = 1, numbers do out[at * numbers + x] = values[x] end
        end
        for name, x in pairs(def.emit or {}) do
          for b = 0, c.width - 1 do
            if not selected or selected[b] then
              join_emitted(env, row, x, weights, b, emitted[name], blocks_at)
            end
          end
        end
      end
    end
  end
  return out, lses, emitted
end

-- ---- a case ---------------------------------------------------------------------------

--- How kvlab differs from the reference, in words; nil: it does not.
---@param o table  see expressions.cache, and: rows: new tokens of each sequence in a
--                  prefill; nil: decode; selects; listed: rows list all tokens, in any
--                  order; window; soft_cap; alibi; parts: a prefill emits from two parts
--                  of memory
function M.differs(dev, target, seed, def, o)
  local c = expressions.cache(dev, o, seed)
  kernel.chosen = target
  local p = policy.define(def) {}
  local ok, why = pcall(policy.attach, p, { device = c.dev, layers = 2,
    blocks = o.blocks, block_size = o.block_size, heads = o.kv_heads * o.group,
    kv_heads = o.kv_heads, head_dim = o.head_dim, dtype = o.dtype,
    value_dim = o.value_dim, format = o.value_dim and c.format,
    max_blocks = o.blocks, scale = SCALE })
  if not ok then
    kernel.chosen = nil
    error(why, 0)
  end
  give_fields(c, p)
  c.alibi = o.alibi and kv.from(c.dev, "f32", { o.kv_heads * o.group },
    slopes(o.kv_heads * o.group)) or nil
  local rows = o.rows or {}
  for s = 1, c.seqs do rows[s] = o.rows and math.min(rows[s], o.lens[s]) or 1 end
  local numbers, q, starts = make_queries(c, rows)
  local lists, selection
  if o.selects then lists, selection = make_selection(c) end
  local listed = o.listed and make_lists(c, starts) or nil
  local done, out, lse, emitted = pcall(run, c, p, q, o.rows and starts, selection,
    listed)
  kernel.chosen = nil
  if not done then error(out, 0) end
  local want_out, want_lse, want = expressions.once(o, expected, c, p, def, numbers,
    starts, lists)
  for name, list in pairs(want) do
    local what = expressions.difference(emitted[name] or {}, list, TOLERANCE)
    if what then return ("emit.%s: %s"):format(name, what) end
  end
  local what = expressions.difference(lse, want_lse, TOLERANCE)
  if what then return "lse: " .. what end
  what = expressions.difference(out, want_out, out_tolerance(dev, o))
  return what and "out: " .. what or nil
end

-- ---- random ones ----------------------------------------------------------------------

local e = kv.expr
local OF_KEY = {
  function() return e.logit, 32 end, function() return e.position, 128 end,
  function() return e.query_position, 128 end, function() return e.index, 128 end,
  function() return e.query_index, 128 end, function() return e.block, 32 end,
  function() return e.blocks, 32 end, function() return e.length, 128 end,
  function() return e.kv_head, 4 end, function() return e.param "weight", 3 end,
  function() return e.input "mix", 3 end,
  function() return e.const("f32", "slope", "layer", "kv_head", "head"), 1 end,
}
local OF_BLOCK = {
  function() return e.position, 128 end, function() return e.block, 32 end,
  function() return e.tokens, 16 end, function() return e.length, 128 end,
  function() return e.input "mix", 3 end, function() return e.param "weight", 3 end,
  function() return e.query_position, 128 end, function() return e.query_index, 128 end,
}

--- A policy of random expressions of attention.
---@param seed integer
function M.random(seed)
  local draw = expressions.draws(seed)
  local def = { name = "random", decode = true, prefill = true, complete = false,
    defaults = { weight = 3 }, select_blocks = function() end, init = M.init }
  local keys = expressions.maker(draw, "hook", OF_KEY)
  for _, name in ipairs { "bias", "log_weight" } do
    if draw(2) == 0 then
      local x, bound = expressions.build(keys, 1 + draw(3))
      def[name] = x:cast "f32" * (4 / math.max(bound, 4))
    end
  end
  if draw(2) == 0 then def.mask = expressions.condition(keys, 1 + draw(2)) end
  local blocks = expressions.maker(draw, "emit", OF_BLOCK)
  def.emit = {}
  for i = 1, draw(3) do
    local x, bound = expressions.build(blocks, 1 + draw(2))
    x = x:cast "f32" * e.weight * (4 / math.max(bound, 4))
    if draw(4) == 0 then -- not all queries of a prompt are needed
      x = e.where((e.query_position % (2 + draw(4))):gt(0), x, 0)
    end
    local by_token = draw(3) == 0
    x = expressions.down_to(blocks, x, 4, false, by_token and { token = true } or {})
    if draw(3) == 0 then x = x:max "query" elseif by_token then x = x:sum "query" end
    def.emit["f" .. i] = x
  end
  if not (def.bias or def.log_weight or def.mask or next(def.emit)) then
    def.bias = e.input "mix"
  end
  return def
end

--- A shape of a cache for a random policy.
function M.shape(seed)
  local o, draw = expressions.shape(seed), expressions.draws(seed + 2000)
  o.blocks, o.lens = 40, { 0, 19, 32, 1 }
  o.selects = draw(2) == 0
  if o.dtype ~= "f32" and draw(2) == 0 then
    o.q_dtype = o.dtype == "f8e4m3" and "bf16" or o.dtype
  end
  if draw(3) == 0 then o.window = 5 + draw(20) end
  if draw(2) == 0 then o.rows = { 2, 1 + draw(19), 32, 1 } end
  if draw(5) == 0 then o.soft_cap = 4 end
  o.alibi, o.parts = draw(5) == 0, draw(2) == 0
  return o
end

--- The const of random hooks, for the init of a definition.
function M.init(p, shape)
  local group = shape.heads / shape.kv_heads
  p.slope = kv.from(shape.device, "f32", { 2, shape.kv_heads, group },
    slopes(2 * shape.heads))
end

return M
