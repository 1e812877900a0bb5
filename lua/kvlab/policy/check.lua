--- Checks what a policy hands to attention: scores, selections and lists of tokens. Their
-- shapes are checked always. Their contents are checked where the host can read them
-- without waiting, which is on the CPU's default stream; with --check they are checked
-- everywhere, after waiting for the device. While a graph is recorded, tensors have no
-- contents yet, so they are not checked. Scores that are all NaN or -inf are found in
-- steps that are observed, and in the first step of each phase of an attention, on every
-- device.
local ffi = require "ffi"
local command_line = require "kvlab.command_line"
local house = require "kvlab.house"
local library = require "kvlab.library"
local options = require "kvlab.options"

local C, check = library.C, library.check
local F32, I32 = library.dtypes.f32, library.dtypes.i32
local floats, ints = ffi.typeof "const float *", ffi.typeof "const int32_t *"
local M = {}

--- The nearest caller that is not part of kvlab itself: the policy's line, if a function
-- of the policy made the call.
local function level_outside()
  for level = 3, math.huge do
    local info = debug.getinfo(level, "S")
    if not info then return 0 end
    if info.what ~= "C" and not house.has(info.source) then return level - 1 end
  end
end

local function refuse(ctx, fmt, ...)
  local name = type(ctx.policy) == "table" and ctx.policy.name
  error(("policy %s, layer %s: %s"):format(tostring(name or "?"),
    tostring(ctx.layer or 0), fmt:format(...)), level_outside())
end

--- The dims of a tensor in words.
local function shown(t)
  if not ffi.istype("kvl_tensor", t) then return options.shown(t) end
  if t.storage == nil then return "a tensor that is closed" end
  return ("%s [%s]"):format(library.dtype_names[t.dtype], table.concat(t:dims(), ", "))
end

local function is_block_tensor(ctx, t, dtype)
  return ffi.istype("kvl_tensor", t) and t.dtype == dtype and t.ndim == 3
    and t.sizes[0] == ctx.seqs and (t.sizes[1] == 1 or t.sizes[1] == ctx.kv_heads)
end

--- Whether the host may read what the device holds now, and whether it must wait first.
local function access(ctx)
  local dev = ctx.device
  if C.kvl_device_is_recording(dev) == 1 then return false, false end
  if command_line.check then return true, true end
  return ctx.is_cpu and C.kvl_device_stream(dev) == ctx.default_stream, false
end

local host -- a buffer for contents that have to be copied

--- A pointer to the contents of a tensor.
local function contents(t, waits, pointer)
  if not waits then return ffi.cast(pointer, t.ptr) end
  local bytes = 4 * tonumber(t.count)
  if not host or host.bytes < bytes then
    host = { bytes = bytes, memory = ffi.new("uint8_t[?]", bytes) }
  end
  check(C.kvl_tensor_read(t, host.memory, bytes))
  return ffi.cast(pointer, host.memory)
end

--- The blocks of sequence s whose scores matter: those that are neither sink nor recent,
-- if there are several and the sequence selects in this step. A block that is always
-- selected needs no score, and a policy may leave it unwritten.
local function decided(ctx, s, budget)
  if ctx.asked and not ctx.asked[s + 1] then return 0, -1 end
  local n = ctx.sequences[s + 1]:blocks()
  return budget.sink, n > 1 and n - budget.recent - 1 or -1
end

local function has_decided(ctx, budget)
  for s = 0, ctx.seqs - 1 do
    local first, last = decided(ctx, s, budget)
    if first <= last then return true end
  end
end

--- Raises unless `scores` are f32 [seqs, kv_heads or 1, width]; if ctx.checks_scores,
-- also when all that decide are NaN or -inf, so that nothing is selected but sink and
-- recent blocks; with --check, also for one NaN.
---@param budget kvlab.Budget  by which the blocks are selected
---@param what? string         what errors call the scores: "scores"
function M.scores(ctx, scores, budget, what)
  if not is_block_tensor(ctx, scores, F32) or scores.sizes[2] ~= ctx.width then
    refuse(ctx, "%s are %s, expected f32 [%d, %d or 1, %d]: sequences, KV heads, "
      .. "ctx.width", what or "scores", shown(scores), ctx.seqs, ctx.kv_heads, ctx.width)
  end
  if not (command_line.check or ctx.checks_scores) or not has_decided(ctx, budget)
    or C.kvl_device_is_recording(ctx.device) == 1 then return end
  local values, heads = contents(scores, true, floats), tonumber(scores.sizes[1])
  local has_number = false
  for row = 0, ctx.seqs * heads - 1 do
    local s = math.floor(row / heads)
    local first, last = decided(ctx, s, budget)
    for b = first, last do
      local x = values[row * ctx.width + b]
      has_number = has_number or x > -math.huge
      if x ~= x and command_line.check then
        refuse(ctx, "the score of sequence %d, head %d, block %d is NaN, expected a "
          .. "number, or -inf for a block that is not eligible", s, row % heads, b)
      end
    end
  end
  if not has_number then
    refuse(ctx, "all %s of step %d are NaN or -inf, expected numbers: a block with such "
      .. "a score is never selected", what or "scores", ctx.step)
  end
  ctx.has_checked[ctx.phase] = true
end

--- For each sequence, the sum of the even budgets of its heads, `even` i32 [seqs,
-- kv_heads]: a list; nil if the host cannot read it now.
function M.totals(ctx, even)
  local is_open, waits = access(ctx)
  if not is_open then return nil end
  local list, heads, totals = contents(even, waits, ints), ctx.kv_heads, {}
  for s = 0, ctx.seqs - 1 do
    totals[s] = 0
    for head = 0, heads - 1 do totals[s] = totals[s] + list[s * heads + head] end
  end
  return totals
end

--- Raises unless `limits`, which a split made, are i32 [seqs, kv_heads], not negative,
-- and their sum is at most that of the even budgets of a sequence.
---@param totals table|nil  of M.totals, from before the split was called
---@param name string       the split's
function M.limits(ctx, limits, totals, name)
  if not ffi.istype("kvl_tensor", limits) or limits.storage == nil or limits.dtype ~= I32
    or limits.ndim ~= 2 or limits.sizes[0] ~= ctx.seqs
    or limits.sizes[1] ~= ctx.kv_heads then
    refuse(ctx, "split %s returns %s, expected i32 [%d, %d]: sequences, KV heads", name,
      shown(limits), ctx.seqs, ctx.kv_heads)
  end
  local is_open, waits = access(ctx)
  if not is_open or not totals then return end
  local list, heads, sums = contents(limits, waits, ints), ctx.kv_heads, {}
  local unit = ctx.block_size == 1 and "tokens" or "blocks"
  for row = 0, ctx.seqs * heads - 1 do
    local s = math.floor(row / heads)
    if list[row] < 0 then
      refuse(ctx, "split %s gives sequence %d, head %d %d %s, expected 0 or more", name,
        s, row % heads, list[row], unit)
    end
    sums[s] = (sums[s] or 0) + list[row]
  end
  for s = 0, ctx.seqs - 1 do
    if sums[s] > totals[s] then
      refuse(ctx, "split %s gives the heads of sequence %d %d %s, expected at most the "
        .. "%d that they have undivided", name, s, sums[s], unit, totals[s])
    end
  end
end

local function refuse_entry(ctx, row, heads, i, block, before, n)
  local where = ("entry %d of the selection of sequence %d, head %d is %d"):format(i,
    math.floor(row / heads), row % heads, block)
  if block >= n or block < -1 then
    refuse(ctx, "%s, expected a block, 0 ... %d, or -1 after the last", where, n - 1)
  elseif before == -1 then
    refuse(ctx, "%s behind a -1, expected nothing but -1 there", where)
  end
  refuse(ctx, "%s behind %d, expected ascending blocks, each once", where, before)
end

--- Raises unless `selection` is i32 [seqs, kv_heads or 1, n], and every row of it lists
-- blocks of its sequence in ascending order, each once, and then only -1.
---@param ctx kvlab.Context
function M.selection(ctx, selection)
  if not is_block_tensor(ctx, selection, I32) then
    refuse(ctx, "the selection is %s, expected i32 [%d, %d or 1, n]: sequences, KV "
      .. "heads, blocks", shown(selection), ctx.seqs, ctx.kv_heads)
  end
  local is_open, waits = access(ctx)
  if not is_open then return end
  local list = contents(selection, waits, ints)
  local heads, width = tonumber(selection.sizes[1]), tonumber(selection.sizes[2])
  for row = 0, ctx.seqs * heads - 1 do
    local n = ctx.sequences[math.floor(row / heads) + 1]:blocks()
    local before, has_ended = -1, false
    for i = 0, width - 1 do
      local block = list[row * width + i]
      if block == -1 then
        has_ended = true
      elseif has_ended or block <= before or block >= n then
        refuse_entry(ctx, row, heads, i, block, has_ended and -1 or before, n)
      else
        before = block
      end
    end
  end
end

local function check_list(ctx, list, row, width, length)
  local seen = {}
  for i = 0, width - 1 do
    local token = list[i]
    if token < -1 or token >= length or seen[token] then
      refuse(ctx, "entry %d of list %d is %d, expected a token of its sequence, 0 ... %d"
        .. ", each once, or -1", i, row, token, length - 1)
    end
    seen[token] = token >= 0 or nil
  end
end

--- Raises unless `listed` is i32 [rows of q, kv_heads or 1, n]; with --check, also unless
-- every list names tokens of the row's sequence, each once, and -1.
---@param ctx kvlab.Context
function M.listed(ctx, listed)
  local rows = tonumber(ctx.query.sizes[0])
  if not ffi.istype("kvl_tensor", listed) or listed.dtype ~= I32 or listed.ndim ~= 3
    or listed.sizes[0] ~= rows
    or listed.sizes[1] ~= 1 and listed.sizes[1] ~= ctx.kv_heads then
    refuse(ctx, "the list of tokens is %s, expected i32 [%d, %d or 1, n]: rows of q, KV "
      .. "heads, tokens", shown(listed), rows, ctx.kv_heads)
  end
  if not command_line.check or not access(ctx) or listed.count == 0 then return end
  local list = contents(listed, true, ints)
  local width, row = tonumber(listed.sizes[2]), 0
  for s, seq in ipairs(ctx.sequences) do
    local count = ctx.is_prefill and ctx.batch.counts[s] or 1
    for _ = 1, count * tonumber(listed.sizes[1]) do
      check_list(ctx, list + row * width, row, width, seq:length())
      row = row + 1
    end
  end
end

return M
