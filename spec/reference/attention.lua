--- Paged attention and everything around it, slow and obvious, in double precision over
-- flat Lua arrays. The truth that the CPU kernels are checked against.
--
-- `layout` names the sizes: blocks, kv_heads, block_size, head_dim, and where they matter
-- heads, max_blocks. Indices are 0-based; the arrays are Lua's, hence the + 1.
local ffi = require "ffi"

local M = {}

local INF = math.huge

--- Where element (block, half, kv_head, token, d = 0) of the cache lies: half 0 is K.
local function cache_at(layout, block, half, kv_head, token)
  local row = ((block * 2 + half) * layout.kv_heads + kv_head) * layout.block_size + token
  return row * layout.head_dim
end

local function blocks_of(len, layout)
  return math.ceil(len / layout.block_size)
end

local function dot(a, a_at, b, b_at, n)
  local sum = 0
  for d = 1, n do sum = sum + a[a_at + d] * b[b_at + d] end
  return sum
end

--- Whether row `token` of q sees the key at position p, as far as a draft tree decides.
-- parents: for each row, the row that its token follows, -1 for none (then it follows the
-- context); first: the first row of the sequence, which lies at position `at`.
local function tree_shows(a, token, first, at, p)
  if not a.parents or p < at then return true end
  while token >= 0 do
    if token - first == p - at then return true end
    token = a.parents[token + 1]
  end
  return false
end

--- How many keys a row sees; writes their offsets and their positions.
local function keys_seen(a, seq, kv_head, position, token0, first, at0, at, positions)
  local n, len, size = 0, a.lens[seq + 1], a.layout.block_size
  local function see(p)
    local in_window = not a.window or p > position - a.window
    local block = p >= 0 and p < len and a.tables[seq * a.max_blocks
      + math.floor(p / size) + 1]
    if block and (not a.causal or p <= position) and in_window
       and tree_shows(a, token0, first, at0, p) then
      n = n + 1
      at[n], positions[n] = cache_at(a.layout, block, 0, kv_head, p % size), p
    end
  end
  if a.listed then
    local list = token0 * a.selection_heads + (a.selection_heads > 1 and kv_head or 0)
    for i = 1, a.max_selected do see(a.listed[list * a.max_selected + i]) end
    return n
  end
  local list_heads = a.selection and a.selection_heads or 1
  local row = seq * list_heads + (list_heads > 1 and kv_head or 0)
  local list = row * (a.max_selected or 0)
  for i = 0, (a.selection and a.max_selected or blocks_of(len, a.layout)) - 1 do
    local logical = a.selection and a.selection[list + i + 1] or i
    if logical >= 0 then
      for token = 0, size - 1 do see(logical * size + token) end
    end
  end
  return n
end

--- out, lse of one row: q[q_at + 1 ...] against n given keys of a KV head; writes scores.
local function attend(a, q_at, kv_head, n, at, positions, scores, position, slope, out,
                      out_at)
  local dim, top, sum = a.layout.head_dim, -INF, 0
  local value = a.layout.kv_heads * a.layout.block_size * dim   -- from K to V
  local k_scale = a.k_scale and a.k_scale[kv_head + 1] or 1
  local v_scale = a.v_scale and a.v_scale[kv_head + 1] or 1
  local cache, mix, scale = a.cache, ffi.new("double[?]", dim + 1), a.scale * k_scale
  for i = 1, n do
    local s = scale * dot(a.q, q_at, cache, at[i], dim)
    if a.soft_cap then s = a.soft_cap * math.tanh(s / a.soft_cap) end
    scores[i] = s + slope * (positions[i] - position)
    top = math.max(top, scores[i])
  end
  for i = 1, n do
    local weight, from = math.exp(scores[i] - top), at[i] + value
    sum = sum + weight
    weight = weight * v_scale
    for d = 1, dim do mix[d] = mix[d] + weight * cache[from + d] end
  end
  for d = 1, dim do out[out_at + d] = sum == 0 and 0 or mix[d] / sum end
  return sum == 0 and -INF or top + math.log(sum)
end

--- a: layout, q, cache, tables, lens, max_blocks, heads, scale, causal, and optionally
-- starts, selection or listed with selection_heads and max_selected, alibi, window,
-- soft_cap, parents (for each row, the row that its token follows in a draft tree, or
-- -1), k_scale
-- and v_scale (lists by KV head). Returns out, lse.
function M.paged_attention(a)
  local out, lse, dim = {}, {}, a.layout.head_dim
  local group, at, positions, scores, n = a.heads / a.layout.kv_heads, {}, {}, {}, nil
  for seq = 0, #a.lens - 1 do
    local first = a.starts and a.starts[seq + 1] or seq
    local rows = a.starts and a.starts[seq + 2] - first or 1
    for r = 0, rows - 1 do
      local position = a.lens[seq + 1] - rows + r
      for head = 0, a.heads - 1 do
        local kv_head = math.floor(head / group)
        local row = (first + r) * a.heads + head
        if head % group == 0 then
          n = keys_seen(a, seq, kv_head, position, first + r, first,
            a.lens[seq + 1] - rows, at, positions)
        end
        lse[row + 1] = attend(a, row * dim, kv_head, n, at, positions, scores, position,
          a.alibi and a.alibi[head + 1] or 0, out, row * dim)
      end
    end
  end
  return out, lse
end

--- Join rows of `dim`; returns out, lse.
function M.merge(out_a, lse_a, out_b, lse_b, dim)
  local out, lse = {}, {}
  for row = 0, #lse_a - 1 do
    local a, b = lse_a[row + 1], lse_b[row + 1]
    local top = math.max(a, b)
    local weight_a = a > -INF and math.exp(a - top) or 0
    local weight_b = b > -INF and math.exp(b - top) or 0
    local sum = weight_a + weight_b
    lse[row + 1] = sum > 0 and top + math.log(sum) or -INF
    for i = row * dim + 1, (row + 1) * dim do
      out[i] = 0
      if weight_a > 0 then out[i] = out[i] + weight_a / sum * out_a[i] end
      if weight_b > 0 then out[i] = out[i] + weight_b / sum * out_b[i] end
    end
  end
  return out, lse
end

--- memory[place] = k, v, changed in place: flat values [tokens, kv_heads, head_dim] that
-- are rounded already. slot_of (optional, [kv_heads, blocks]): where a block of the slots
-- lies in memory, -1: nowhere.
function M.append_kv(memory, layout, k, v, places, slot_of, blocks)
  local dim, size, heads = layout.head_dim, layout.block_size, layout.kv_heads
  for t, place in ipairs(places) do
    for head = 0, place >= 0 and heads - 1 or -1 do
      local block = math.floor(place / size)
      if slot_of then block = slot_of[head * blocks + block + 1] end
      local from = ((t - 1) * heads + head) * dim
      for half, rows in ipairs(block >= 0 and { k, v } or {}) do
        local to = cache_at(layout, block, half - 1, head, place % size)
        for d = 1, dim do memory[to + d] = rows[from + d] end
      end
    end
  end
  return memory
end

--- Elementwise min and max of K: [blocks, 2, kv_heads, head_dim], changed in place.
function M.block_minmax(cache, layout, blocks, tokens, summary)
  local dim = layout.head_dim
  for i, block in ipairs(blocks) do
    for head = 0, block >= 0 and layout.kv_heads - 1 or -1 do
      local low = (block * 2 * layout.kv_heads + head) * dim
      local high = low + layout.kv_heads * dim
      for d = 1, dim do
        summary[low + d], summary[high + d] = INF, -INF
        for token = 0, tokens[i] - 1 do
          local x = cache[cache_at(layout, block, 0, head, token) + d]
          summary[low + d] = math.min(summary[low + d], x)
          summary[high + d] = math.max(summary[high + d], x)
        end
      end
    end
  end
  return summary
end

--- Mean of K: [blocks, kv_heads, head_dim], changed in place.
function M.block_mean(cache, layout, blocks, tokens, summary)
  for i, block in ipairs(blocks) do
    for head = 0, block >= 0 and layout.kv_heads - 1 or -1 do
      local at = (block * layout.kv_heads + head) * layout.head_dim
      for d = 1, layout.head_dim do
        local sum = 0
        for token = 0, tokens[i] - 1 do
          sum = sum + cache[cache_at(layout, block, 0, head, token) + d]
        end
        summary[at + d] = tokens[i] > 0 and sum / tokens[i] or 0
      end
    end
  end
  return summary
end

--- Scores [seqs, kv_heads, max_blocks]: `block_score(q_at, block, kv_head, tokens)` of
-- each query head, joined over the group by "max" or "mean"; -inf past the last block.
local function score(a, block_score)
  local scores, layout, size = {}, a.layout, a.layout.block_size
  local group = a.heads / layout.kv_heads
  for seq = 0, #a.lens - 1 do
    for kv_head = 0, layout.kv_heads - 1 do
      for b = 0, a.max_blocks - 1 do
        local tokens = math.min(a.lens[seq + 1] - b * size, size)
        local joined = -INF
        if tokens > 0 then
          local block, sum = a.tables[seq * a.max_blocks + b + 1], 0
          for head = kv_head * group, (kv_head + 1) * group - 1 do
            local q_at = (seq * a.heads + head) * layout.head_dim
            local x = block_score(q_at, block, kv_head, tokens)
            joined, sum = math.max(joined, x), sum + x
          end
          if a.group == "mean" then joined = sum / group end
        end
        scores[#scores + 1] = joined
      end
    end
  end
  return scores
end

--- a: layout, q, summary, tables, lens, max_blocks, heads, group.
function M.score_minmax(a)
  local dim, heads = a.layout.head_dim, a.layout.kv_heads
  return score(a, function(q_at, block, kv_head)
    local low = (block * 2 * heads + kv_head) * dim
    local high, sum = low + heads * dim, 0
    for d = 1, dim do
      local x = a.q[q_at + d]
      sum = sum + math.max(x * a.summary[low + d], x * a.summary[high + d])
    end
    return sum
  end)
end

function M.score_mean(a)
  local dim = a.layout.head_dim
  return score(a, function(q_at, block, kv_head)
    return dot(a.q, q_at, a.summary, (block * a.layout.kv_heads + kv_head) * dim, dim)
  end)
end

--- Like the others, with `cache` for `summary`.
function M.score_max_qk(a)
  return score(a, function(q_at, block, kv_head, tokens)
    local best = -INF
    for token = 0, tokens - 1 do
      best = math.max(best, dot(a.q, q_at, a.cache,
        cache_at(a.layout, block, 0, kv_head, token), a.layout.head_dim))
    end
    return best
  end)
end

--- How many of n blocks a budget allows.
function M.budget_blocks(budget, n)
  local k = budget.blocks or 0
  if budget.ratio and budget.ratio >= 0 then k = math.ceil(budget.ratio * n - 1e-6) end
  k = math.max(k, budget.min_blocks or 0, (budget.sink or 0) + (budget.recent or 0))
  return math.min(k, n)
end

--- One row: scores of n blocks -> the chosen ones, ascending. A block whose score is -inf
-- or NaN is not eligible: it is chosen only as a sink or a recent block.
function M.select(scores, n, budget, max_selected)
  local k = math.min(M.budget_blocks(budget, n), max_selected)
  local sink = math.min(budget.sink or 0, k)
  local recent = math.min(budget.recent or 0, k - sink)
  local middle, chosen = {}, {}
  for b = sink, n - recent - 1 do
    if scores[b + 1] > -INF then middle[#middle + 1] = b end
  end
  table.sort(middle, function(x, y)
    local sx, sy = scores[x + 1], scores[y + 1]
    if sx ~= sy then return sx > sy end
    return x < y
  end)
  for b = 0, sink - 1 do chosen[#chosen + 1] = b end
  for i = 1, math.min(k - sink - recent, #middle) do
    chosen[#chosen + 1] = middle[i]
  end
  for b = n - recent, n - 1 do chosen[#chosen + 1] = b end
  table.sort(chosen)
  return chosen
end

--- One row: of the `chosen` blocks the fewest whose weights reach `mass` of all weights,
-- ascending; the first `sink` and last `recent` of the #weights blocks stay.
function M.trim_selection(weights, chosen, mass, sink, recent)
  local function weight(b)
    local w = weights[b + 1]
    return w > 0 and w or 0
  end
  local wanted, kept, loose = 0, {}, {}
  for b = 0, #weights - 1 do wanted = wanted + mass * weight(b) end
  for _, b in ipairs(chosen) do
    if b < sink or b >= #weights - recent then
      kept[#kept + 1] = b
      wanted = wanted - weight(b)
    else
      loose[#loose + 1] = b
    end
  end
  table.sort(loose, function(x, y)
    if weight(x) ~= weight(y) then return weight(x) > weight(y) end
    return x < y
  end)
  local reachable = 0
  for _, b in ipairs(loose) do reachable = reachable + weight(b) end
  for _, b in ipairs(loose) do
    if reachable > wanted and wanted <= 0 then break end
    kept[#kept + 1] = b
    wanted, reachable = wanted - weight(b), reachable - weight(b)
  end
  table.sort(kept)
  return kept
end

return M
