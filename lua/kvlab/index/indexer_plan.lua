--- How many rows and columns of logits an indexer computes at a time.
--
-- 8 000 000 logits are always allowed. More are allowed up to half of the free memory and
-- 0.3 of all memory. Source: SGLang's NSA indexer. (SGLang keeps one chunk for logits
-- that take more than 0.3 of all memory but at most half of the free memory.)
local M = {}

local LOGITS_ALWAYS = 8000000     -- below this size the free memory does not matter
local TILE = 131072               -- columns that a tile has at least, if they fit
local ROWS = 32                   -- if fewer whole rows than this fit, use tiles
local UNIT = 256                  -- columns of a tile are a multiple, in whole blocks
local BYTES_ROUNDED = 32 * 2 ^ 20 -- for sizes up to this the allocator adds up to a
                                  -- quarter

--- The largest tensor, in bytes, for which the allocator takes no more than `bytes`.
local function usable(bytes)
  return bytes > BYTES_ROUNDED and bytes or math.floor(bytes * 0.8) - 512
end

--- The most bytes that the allocator takes for a tensor.
local function charged(bytes) return math.ceil(bytes * 1.25) + 512 end

--- Bytes that `rows` rows of a running top-k take: values and indices, twice.
local function charged_state(rows, topk) return 2 * charged(8 * rows * topk) end

--- Bytes allowed for rows x n logits, at most `most`.
---@param memory fun(): number, number  bytes free and in all
function M.allowed(rows, n, most, memory)
  if rows * n < LOGITS_ALWAYS then return most end
  local free, all = memory()
  return math.min(most, free / 2, 0.3 * all)
end

--- Rows and columns of a chunk whose memory is within `limit`. If columns < n, the chunk
-- is computed in tiles, and a running top-k is kept too. If not even the smallest tile is
-- within the limit, returns nil and the bytes that it would need.
---@param o table  rows, n, topk, bytes (of a logit), block_size, limit, together (rows
--                 that may share a tile), streaming (tiles even where rows fit)
---@return integer|nil rows
---@return integer columns
function M.chunk(o)
  local windows = charged(16 * o.rows)
  local limit = o.limit - windows
  local rows = math.min(o.rows, math.floor(usable(limit) / (math.max(o.n, 1) * o.bytes)))
  if rows >= math.min(o.together, ROWS) and not o.streaming then return rows, o.n end
  local unit = o.block_size * math.ceil(UNIT / o.block_size)
  local row = math.max(unit, math.min(o.n, TILE)) * o.bytes + 16 * o.topk
  rows = math.max(1, math.min(o.together, math.floor((0.8 * limit - 2048) / row)))
  local left = usable(limit - charged_state(rows, o.topk))
  local columns = math.floor(left / (rows * o.bytes) / unit) * unit
  if columns < unit then
    return nil, windows + charged_state(1, o.topk) + charged(unit * o.bytes) + 512
  end
  return rows, math.min(columns, math.ceil(o.n / unit) * unit)
end

return M
