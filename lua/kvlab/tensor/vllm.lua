--- vLLM's layout of KV memory and its PagedAttention V1 and V2, as a baseline. Shapes,
-- dtypes and errors: runtime/kvlab.h.
--
--   local key_cache, value_cache = kv.vllm.cache(dev, "bf16", 64, 8, 16, 128)
--   kv.vllm.append(k, v, places, key_cache, value_cache)
--   local out = kv.vllm.attention { q = q, key_cache = key_cache,
--     value_cache = value_cache, tables = tables, lens = lens, version = 2 }
--
-- `kv.vllm.step.attention` is the same without the check of the table's names and types.
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local argument, expect_tensor = options.argument, tensor.expect
local a_tensor, needed = kinds.tensor, options.required(kinds.tensor)
local step = {}
local M = { step = step }

--- The two caches of one layer, uninitialised.
---@return kvlab.Tensor key_cache    [blocks, kv_heads, head_dim / x, block_size, x]
---@return kvlab.Tensor value_cache  [blocks, kv_heads, head_dim, block_size]
function M.cache(dev, dtype, blocks, kv_heads, block_size, head_dim)
  argument("vllm.cache", "head_dim", head_dim, options.count)
  local x = 16 / C.kvl_dtype_bytes(library.dtype(dtype))
  return tensor.tensor(dev, dtype, { blocks, kv_heads, head_dim / x, block_size, x }),
    tensor.tensor(dev, dtype, { blocks, kv_heads, head_dim, block_size })
end

--- Writes k, v [tokens, kv_heads, head_dim] at the places in places, i64 [tokens], -1 to
-- skip.
function M.append(k, v, places, key_cache, value_cache, k_scale, v_scale)
  expect_tensor("vllm.append", "k", k)
  expect_tensor("vllm.append", "v", v)
  expect_tensor("vllm.append", "places", places)
  expect_tensor("vllm.append", "key_cache", key_cache)
  expect_tensor("vllm.append", "value_cache", value_cache)
  if k_scale ~= nil then expect_tensor("vllm.append", "k_scale", k_scale) end
  if v_scale ~= nil then expect_tensor("vllm.append", "v_scale", v_scale) end
  check(C.kvl_vllm_append(k, v, places, key_cache, value_cache, k_scale, v_scale))
end

local call = ffi.new "kvl_vllm"

function step.attention(a)
  local out = a.out or tensor.open_like(a.q)
  call.q, call.key_cache, call.value_cache = a.q, a.key_cache, a.value_cache
  call.tables, call.lens, call.alibi, call.out = a.tables, a.lens, a.alibi, out
  call.k_scale, call.v_scale = a.k_scale, a.v_scale
  call.scale = a.scale or 1 / math.sqrt(a.q:size(-1))
  call.version = a.version or 0
  check(C.kvl_vllm_attention(call))
  return out
end

local ATTENTION = {
  q = needed, key_cache = needed, value_cache = needed, tables = needed, lens = needed,
  alibi = a_tensor, k_scale = a_tensor, v_scale = a_tensor, out = a_tensor,
  scale = options.number, version = options.whole,
}

--- Decode attention.
---@param a table  q, key_cache, value_cache, tables, lens; alibi, k_scale, v_scale, scale
--                 (1 / sqrt(head_dim)), version (0: vLLM's choice), out
---@return kvlab.Tensor out  like q unless given
function M.attention(a)
  return step.attention(options.check("vllm.attention", a, ATTENTION))
end

--- Makes vLLM's caches with the contents of kvlab's own cache [blocks, 2, kv_heads,
-- block_size, head_dim]. The blocks are the same, so the tables are too. An f8e4m3 cache
-- keeps its bits, but vLLM's caches cannot hold scales that differ between KV heads. It
-- needs memory for a second copy of the cache until it is done.
---@return kvlab.Tensor key_cache
---@return kvlab.Tensor value_cache
function M.from_blocks(cache)
  expect_tensor("vllm.from_blocks", "cache", cache)
  local dev, blocks, kv_heads = cache.device, cache:size(0), cache:size(2)
  local size, dim, dtype = cache:size(3), cache:size(4), cache:type()
  -- Treats each KV head of a block as a block of its own, whose tokens have successive
  -- places.
  local lanes = blocks * kv_heads
  local key_cache, value_cache = M.cache(dev, dtype, lanes, 1, size, dim)
  tensor.scope(function()
    -- append casts bf16 back to f8e4m3 exactly
    local k = tensor.tensor(dev, dtype == "f8e4m3" and "bf16" or dtype,
      { lanes * size, 1, dim })
    local v, page = tensor.open_like(k), { blocks, kv_heads, size, dim }
    check(C.kvl_read_blocks(cache, nil, tensor.arange(dev, "i32", blocks),
      k:reshape(page), v:reshape(page)))
    M.append(k, v, tensor.arange(dev, "i64", lanes * size), key_cache, value_cache)
  end)
  local x = key_cache:size(-1)
  return key_cache:reshape { blocks, kv_heads, dim / x, size, x },
    value_cache:reshape { blocks, kv_heads, dim, size }
end

return M
