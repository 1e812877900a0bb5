--- Paged KV memory as the cases want it, and the attention that they are checked with:
-- keys and values gathered block by block, products, softmax, all in f32.
local ffi = require "ffi"
local kv = require "kvlab"

local M = { HEADS = 32, KV_HEADS = 8, DIM = 128, BLOCK = 16 }
M.GROUP = M.HEADS / M.KV_HEADS
M.SCALE = 1 / math.sqrt(M.DIM)

--- Elements of K and V of a token.
M.TOKEN = 2 * M.KV_HEADS * M.DIM

--- Random block tables for sequences of these lengths: every block belongs to one, -1
-- past its last. Returns i32 [#lens, width] and how many blocks there are.
---@param lens integer[]
---@param block? integer  tokens of a block; BLOCK unless given
function M.random_tables(dev, lens, block)
  local width, total = 0, 0
  for _, len in ipairs(lens) do
    local n = math.ceil(len / (block or M.BLOCK))
    width, total = math.max(width, n), total + n
  end
  local _, order = kv.rand("cpu", "f32", { 1, total }, { seed = 5 }):sort()
  local tables = kv.full("cpu", "i32", { #lens, width }, -1)
  order = order:reshape { total }
  local used = 0
  for s, len in ipairs(lens) do
    local n = math.ceil(len / (block or M.BLOCK))
    tables:index(s - 1):narrow(0, n):copy_(order:narrow(used, n))
    used = used + n
  end
  return tables:to(dev), total
end

--- The budget of that many blocks, as kvl_select takes it.
function M.budget(blocks) return ffi.new("kvl_budget", -1, blocks, 0, 0, 0) end

--- Random pages of int8, filled in pieces.
local function random_int8(dev, blocks, format)
  local memory = kv.tensor(dev, "u8", { blocks,
    tonumber(kv.C.kvl_format_bytes_page(format)) })
  local piece = 4096
  for from = 0, blocks - 1, piece do
    local n = math.min(piece, blocks - from) * format.block_size
    kv.scope(function()
      local rows = kv.randn(dev, "bf16", { 2, n, format.kv_heads, format.key_dim },
        { seed = 1 + from })
      kv.ops.append_kv(rows:index(0), rows:index(1),
        kv.arange(dev, "i64", n, from * format.block_size), memory, format)
    end)
  end
  return memory
end

--- Random KV memory of `blocks` blocks; f8e4m3 in pieces, through bf16. format: of int8.
function M.random_memory(dev, dtype, blocks, format)
  if dtype == "int8" then return random_int8(dev, blocks, format) end
  local shape = { blocks, 2, M.KV_HEADS, M.BLOCK, M.DIM }
  if dtype ~= "f8e4m3" then return kv.randn(dev, dtype, shape, { seed = 1 }) end
  local memory, piece = kv.tensor(dev, dtype, shape), 4096
  for from = 0, blocks - 1, piece do
    local n = math.min(piece, blocks - from)
    kv.scope(function()
      memory:narrow(from, n):copy_(kv.randn(dev, "bf16",
        { n, 2, M.KV_HEADS, M.BLOCK, M.DIM }, { seed = 1 + from }):cast(dtype))
    end)
  end
  return memory
end

--- K (half 0) or V (half 1) of KV head g in some blocks, the first `tokens` of them:
-- f32 [tokens, DIM].
---@param blocks kvlab.Tensor  i32 [n], physical
---@param format? kvl_format  of the memory, if its shape does not say it
function M.gather(memory, blocks, g, half, tokens, format)
  local rows = kv.tensor(memory.device, "f32", { blocks:size(0), M.KV_HEADS, M.BLOCK,
    M.DIM })
  kv.ops.read_blocks(memory, blocks, half == 0 and rows or nil, half == 1 and rows or nil,
    format)
  return rows:transpose(0, 1):index(g):reshape({ -1, M.DIM }):narrow(0, tokens)
end

--- Attention of rows q [n, DIM] over gathered keys and values: out [n, DIM] and lse [n].
function M.attend(q, keys, values)
  local scores = q:matmul_t(keys) * M.SCALE
  local out = scores:softmax():matmul(values)
  local most = scores:max(-1):reshape { -1, 1 }
  local lse = (scores - most):exp():sum(-1):log() + most:reshape { -1 }
  return out, lse
end

--- Raise unless got is want within `share` of the largest |want|.
function M.expect(what, got, want, share)
  local size = want:abs():max():item()
  local off = (got:cast "f32" - want):abs():max():item()
  assert(off <= share * size, ("%s is off by %g of %g"):format(what, off, size))
end

--- Rows of a decode: query heads of KV head g of sequence s, f32 [GROUP, DIM].
function M.group_rows(q, s, g)
  return q:index(s):narrow(g * M.GROUP, M.GROUP):cast "f32"
end

return M
