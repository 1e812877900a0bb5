--- kvlab: `local kv = require "kvlab"`.
--
--   kv.device kv.cuda_available                devices
--   kv.tensor zeros ones full arange from      tensors
--   kv.randn rand randint                      random tensors, the same on every device
--   kv.pinned                                  tensors in pinned host memory
--   kv.scope kv.lasting                        frees what a function made; does not
--   kv.graph                                   records a step, replays it without Lua
--   kv.ops                                     transformer and paged-attention ops
--   kv.cache kv.attention                      paged memory, attention with a policy
--   kv.probe kv.record                         watch it: beside dense attention, as maps
--   kv.policy kv.summary kv.hash kv.tally      what policies are made of
--   kv.index_cache                             an indexer's keys, and its logits
--   kv.indexer                                 tokens by top-k of those
--   kv.landmarks kv.compressed                 index keys of a model's own; block means
--   kv.prefix_chunks                           a long prefix, a part at a time
--   kv.sampling                                blocks by chance, and their weights
--   kv.store                                   KV blocks in memory, LMDB or Redis
--   kv.prefetch                                blocks from a store, ahead of their use
--   kv.serve kv.cost_model kv.trace            requests, step by step
--   kv.capture                                 what a real model's attention was given
--   kv.vllm                                    vLLM's cache layout and its attention
--   kv.safetensors kv.C kv.check               files; the C library itself
--   kv.reload                                  reads a policy's file again
local library = require "kvlab.library"
local tensor = require "kvlab.arithmetic"
local device = require "kvlab.device"

local M = {
  C = library.C, check = library.check, paths = library.paths,
  device = device.device, cuda_available = device.cuda_available,
  scope = tensor.scope, lasting = tensor.lasting, is_tensor = tensor.is_tensor,
}
for _, name in ipairs { "tensor", "pinned", "full", "zeros", "ones", "arange", "randn",
                        "rand", "randint", "from" } do
  M[name] = tensor[name]
end

--- Bytes of one element of a dtype.
function M.dtype_bytes(name) return library.C.kvl_dtype_bytes(library.dtype(name)) end

-- policy files require "kvlab" while it loads
package.loaded["kvlab"] = M

M.ops = require "kvlab.ops"
M.summary = require "kvlab.summary"
M.hash = require "kvlab.hash"
M.tally = require("kvlab.tally").tally
M.index_cache = require("kvlab.index_cache").index_cache
M.indexer = require("kvlab.indexer").indexer
M.landmarks = require("kvlab.landmarks").landmarks
M.compressed = require("kvlab.compressed").compressed
M.prefix_chunks = require("kvlab.prefix_chunks").prefix_chunks
M.sampling = require("kvlab.sampling").sampling
M.policy = require "kvlab.policy"
M.graph = require("kvlab.graph").graph
M.cache = require("kvlab.cache").cache
M.attention = require("kvlab.attention").attention
M.prefetch = require("kvlab.prefetch").prefetch
M.probe = require "kvlab.probe"
M.record = require "kvlab.record"
M.store = require "kvlab.store"
M.serve = require("kvlab.serve").serve
M.cost_model = require "kvlab.cost_model"
M.trace = require "kvlab.trace"
M.vllm = require "kvlab.vllm"
M.safetensors = require "kvlab.safetensors"
M.capture = require "kvlab.capture"
M.reload = require "kvlab.reload"

return M
