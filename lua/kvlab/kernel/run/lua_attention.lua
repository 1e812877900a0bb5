--- Paged attention in plain Lua, with a hook. It runs if there is no compiler for the
-- hook. It computes in doubles, one number after the other, on one thread. On a GPU, what
-- it reads is copied to the host. It takes the arguments of the op paged_attention.
local ffi = require "ffi"
local library = require "kvlab.library"
local lua_kernel = require "kvlab.kernel.run.lua_kernel"
local pages = require "kvlab.tensor.pages"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

--- The tensors on the host, as pointers by name, and readers for tensors that may have
-- several dtypes.
local function host_of(call, dev)
  local a = {}
  for _, name in ipairs { "q", "tables", "lens", "starts", "selection", "listed", "slots",
                          "alibi", "prev_out", "prev_lse", "tree" } do
    if call[name] then
      a[name], a["keep_" .. name] = lua_kernel.pointer_of(call[name], dev)
    end
  end
  lua_kernel.take_pages(a, { memory = call.cache, format = call.format }, dev)
  a.read_q = lua_kernel.reader(a.q, call.q:type())
  return a
end

--- The physical blocks that a sequence's queries of a KV head read, with their logical
-- numbers.
local function blocks_of(a, d, seq, kv_head)
  local list, n = {}, math.ceil(a.lens[seq] / d.block_size)
  local entries = d.entries or n
  for entry = 0, entries - 1 do
    local logical = entry
    if a.selection then
      local row = seq * d.selection_heads + kv_head % d.selection_heads
      logical = a.selection[row * d.entries + entry]
    end
    if logical >= 0 and logical < n and logical < d.width then
      local physical = a.tables[seq * d.width + logical]
      if a.slots then
        local row = seq * d.slot_heads + kv_head % d.slot_heads
        physical = a.slots[row * d.entries + entry]
      end
      if physical >= 0 and physical < d.blocks then
        list[#list + 1] = { logical = logical, physical = physical }
      end
    end
  end
  return list
end

--- The same for the tokens that row `row` of q lists.
local function listed_of(a, d, seq, kv_head, row)
  local list = {}
  local at = (row * d.selection_heads + kv_head % d.selection_heads) * d.entries
  for entry = 0, d.entries - 1 do
    local index = a.listed[at + entry]
    if index >= 0 and index < d.room then
      local physical = a.tables[seq * d.width + math.floor(index / d.block_size)]
      if a.slots then
        local of = row * d.slot_heads + kv_head % d.slot_heads
        physical = a.slots[of * d.entries + entry]
      end
      if physical >= 0 and physical < d.blocks then
        list[#list + 1] = { logical = math.floor(index / d.block_size),
                            physical = physical, token = index % d.block_size }
      end
    end
  end
  return list
end

--- Whether the draft tree hides a key from row `row` of q, see the op.
local function tree_hides(a, d, row, back)
  if not a.tree or back >= 64 * d.tree_words then return false end
  local seen = a.tree[row * d.tree_words + math.floor(back / 64)]
  return bit.band(bit.rshift(seen, back % 64), 1) == 0
end

--- The keys of these blocks, or of one token of each, that row `query` of q sees (its
-- token has this index): their indices, and where K and V of each begin in the cache.
local function keys_of(call, a, d, blocks, kv_head, query, index, length)
  local indices, keys, values, n = {}, {}, {}, 0
  local first = (call.window or 0) > 0 and index + 1 - call.window or 0
  local last = call.causal == false and length - 1 or math.min(index, length - 1)
  for _, block in ipairs(blocks) do
    for token = block.token or 0, block.token or d.block_size - 1 do
      local at = block.logical * d.block_size + token
      if at >= first and at <= last and not tree_hides(a, d, query, length - 1 - at) then
        indices[n] = at
        keys[n] = a.key_row(block.physical, kv_head, token)
        values[n] = a.value_row(block.physical, kv_head, token)
        n = n + 1
      end
    end
  end
  return indices, keys, values, n
end

local function scores_of(call, a, d, q_row, kv_head, keys, n)
  local scores, cap = {}, call.soft_cap or 0
  local scale = call.scale * (a.k_scale and a.k_scale[kv_head] or 1)
  for i = 0, n - 1 do
    local dot = 0
    for x = 0, d.dim - 1 do
      dot = dot + a.read_q(q_row + x) * a.read_cache(keys[i] + x)
    end
    dot = dot * scale
    scores[i] = cap > 0 and cap * math.tanh(dot / cap) or dot
  end
  return scores
end

--- One query row: its values, to be divided by the sum, the largest score and the sum.
local function softmax(a, d, scores, rows, n)
  local top, sum, values = -math.huge, 0, {}
  for i = 0, n - 1 do top = math.max(top, scores[i]) end
  for x = 0, d.value_dim - 1 do values[x] = 0 end
  for i = 0, n - 1 do
    local weight = top > -math.huge and math.exp(scores[i] - top) or 0
    sum = sum + weight
    if weight > 0 then
      for x = 0, d.value_dim - 1 do
        values[x] = values[x] + weight * a.read_cache(rows[i] + x)
      end
    end
  end
  return values, top, sum
end

--- Joins the result with that of the earlier attention, as the op does.
local function join(a, d, row, values, top, sum)
  local before = a.prev_lse and a.prev_lse[row] or -math.huge
  if before == -math.huge then return values, top, sum end
  local both = sum == 0 and before or math.max(before, top)
  local keep = sum == 0 and 0 or math.exp(top - both)
  local weight = math.exp(before - both)
  for x = 0, d.value_dim - 1 do
    values[x] = values[x] * keep + weight * a.prev_out[row * d.value_dim + x]
  end
  return values, both, sum * keep + weight
end

local function sizes_of(call)
  local p = pages.of(call.cache, call.format)
  local selection, slots = call.selection or call.listed, call.slots
  return { kv_heads = p.kv_heads, block_size = p.block_size, dim = p.key.dim,
    value_dim = p.value.dim, blocks = call.cache:size(0), heads = call.q:size(1),
    tokens = call.q:size(0), seqs = call.lens:size(0), width = call.tables:size(1),
    entries = selection and selection:size(2),
    selection_heads = selection and selection:size(1),
    slot_heads = slots and slots:size(1),
    room = call.tables:size(1) * p.block_size,
    tree_words = call.tree and call.tree:size(1) }
end

--- Attends from every row of a sequence.
local function attend_sequence(call, a, d, hook, seq, write)
  local length = math.max(0, math.min(a.lens[seq], d.room))
  local first = a.starts and a.starts[seq] or seq
  local rows = a.starts and a.starts[seq + 1] - first or 1
  local group = d.heads / d.kv_heads
  for kv_head = 0, d.kv_heads - 1 do
    local blocks = not a.listed and blocks_of(a, d, seq, kv_head)
    for i = 0, rows - 1 do
      if a.listed then blocks = listed_of(a, d, seq, kv_head, first + i) end
      local index = length - rows + i
      local indices, keys, values, n = keys_of(call, a, d, blocks, kv_head, first + i,
        index, length)
      for head = 0, group - 1 do
        local row = (first + i) * d.heads + kv_head * group + head
        local scores = scores_of(call, a, d, row * d.dim, kv_head, keys, n)
        local slope = a.alibi and a.alibi[kv_head * group + head] or 0
        for k = 0, n - 1 do scores[k] = scores[k] + slope * (indices[k] - index) end
        hook(seq, d.kv_heads, kv_head, head, length, index, indices, n, scores)
        write(row, kv_head, indices, scores, n, softmax(a, d, scores, values, n))
      end
    end
  end
end

--- The op, with the hook in call.hook.
---@param call table  as kv.ops.paged_attention takes it, with hook: a kernel in Lua
---@param out kvlab.Tensor
---@return kvlab.Tensor out
function M.attend(call, out)
  local one, dev = call.hook, call.q.device
  if C.kvl_device_is_recording(dev) == 1 then
    error(("%s: it runs in plain Lua, which no graph can record"):format(
      one.plan.what), 0)
  end
  check(C.kvl_device_sync(dev))
  local a, d = host_of(call, dev), sizes_of(call)
  local result = ffi.new("float[?]", d.tokens * d.heads * d.value_dim)
  local lse = ffi.new("float[?]", d.tokens * d.heads)
  local kept, kept_memory
  if call.scores then
    kept, kept_memory = lua_kernel.pointer_of(call.scores, dev)
  end
  local hook = one:run()
  local function write(row, kv_head, indices, scores, n, values, top, sum)
    for k = 0, kept and n - 1 or -1 do
      kept[row * d.room + indices[k]] = scores[k]
    end
    local unit = a.v_scale and a.v_scale[kv_head] or 1
    for x = 0, d.value_dim - 1 do values[x] = values[x] * unit end
    values, top, sum = join(a, d, row, values, top, sum)
    for x = 0, d.value_dim - 1 do
      result[row * d.value_dim + x] = sum == 0 and 0 or values[x] / sum
    end
    lse[row] = sum == 0 and -math.huge or top + math.log(sum)
  end
  for seq = 0, d.seqs - 1 do attend_sequence(call, a, d, hook, seq, write) end
  local dims = { d.tokens, d.heads, d.value_dim }
  local values = tensor.tensor(dev, "f32", dims)
  check(C.kvl_tensor_write(values, result, ffi.sizeof(result)))
  values:cast(out:type(), out)
  if call.lse then check(C.kvl_tensor_write(call.lse, lse, ffi.sizeof(lse))) end
  if kept and not dev:is_cpu() then
    check(C.kvl_tensor_write(call.scores, kept_memory, call.scores:bytes()))
  end
  return out
end

return M
