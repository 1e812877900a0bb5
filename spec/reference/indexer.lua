--- From logits of tokens to what attention reads, slow and obvious, over flat row-major
-- Lua arrays. Indices, places, rows and sequences count from 0.
local M = {}

--- Does logit x of index i come before logit y of index j? Larger first, ties to
-- the lower index.
local function comes_before(x, i, y, j)
  if x ~= y then return x > y end
  return i < j
end

--- Is a token with this logit eligible? Neither -inf nor NaN is.
local function is_eligible(x) return x > -math.huge end

--- Columns of row r that are its tokens': the first, and one past the last.
local function columns(c, r)
  local first = math.max(c.starts and c.starts[r + 1] or 0, 0)
  return math.min(first, c.n), math.min(first + math.max(c.lens[r + 1], 0), c.n)
end

--- The place of token p by a table of `width` blocks; -1 where it has none.
local function place(tables, width, block_size, sequence, p)
  local b = math.floor(p / block_size)
  local block = p >= 0 and b < width and tables[sequence * width + b + 1] or -1
  return block < 0 and -1 or block * block_size + p % block_size
end

--- What index p of row r becomes. t: nil, or tables, width, block_size, sequences and
-- row_sequence or not; or offsets.
function M.transform(t, rows, r, p)
  if p < 0 then return -1 end
  if not t then return p end
  if t.offsets then return p + t.offsets[r + 1] end
  local s = t.row_sequence and t.row_sequence[r + 1]
    or math.floor(r / (rows / t.sequences))
  if s < 0 or s >= t.sequences then return -1 end
  return place(t.tables, t.width, t.block_size, s, p)
end

--- The k best indices of every row, ascending, transformed, -1 padded. c: rows, n, k,
-- logits, starts (or nil), lens, transform (or nil).
function M.topk_transform(c)
  local out = {}
  for r = 0, c.rows - 1 do
    local first, last = columns(c, r)
    local order = {}
    local function logit(p) return c.logits[r * c.n + first + p + 1] end
    for p = 0, last - first - 1 do
      if is_eligible(logit(p)) then order[#order + 1] = p end
    end
    table.sort(order, function(i, j) return comes_before(logit(i), i, logit(j), j) end)
    for i = c.k + 1, #order do order[i] = nil end
    table.sort(order)
    for i = 1, c.k do
      out[#out + 1] = M.transform(c.transform, c.rows, r, order[i] or -1)
    end
  end
  return out
end

--- Places of tokens starts[s] … of every sequence, which end at ends[s] of n entries.
function M.ragged_places(tables, width, block_size, starts, ends, n)
  local out = {}
  for s = 1, #starts do
    local from = #out
    while #out < math.min(ends[s], n) do
      out[#out + 1] = place(tables, width, block_size, s - 1, starts[s] + #out - from)
    end
  end
  while #out < n do out[#out + 1] = -1 end
  return out
end

return M
