--- kvlab: `local kv = require "kvlab"`.
--
--   kv.device kv.cuda_available    devices
--   kv.tensor zeros ones full arange linspace from    tensors on a device
--   kv.pinned                      tensors in pinned host memory
--   kv.cat                         joins tensors along a dim
--   kv.randn rand randint          random tensors, the same on every device
--   kv.scope(fn)                   runs fn and frees every tensor that it made except its
--                                  results
--   kv.lasting(fn, ...)            runs fn and keeps what it made, even inside a scope
--   kv.graph(fn)                   records a step, and replays it without Lua
--   kv.ops                         transformer and paged-attention ops
--   kv.cache kv.attention          paged KV memory, attention with a policy
--   kv.policy kv.summary kv.hash kv.tally kv.sampling    what policies are made of
--   kv.expr                        kernels for policies, written as arithmetic
--   kv.kernel                      kernels over scores, kernels of source text
--   kv.reload                      reads a policy's file again
--   kv.probe kv.record kv.capture  observers: a policy beside dense attention, what it
--                                  selected as maps, what a real model's attention got
--   kv.index_cache kv.indexer kv.landmarks kv.compressed kv.prefix_chunks
--                                  attention to tokens that an indexer selects
--   kv.store kv.prefetch           KV blocks in memory, LMDB or Redis, and fetching them
--                                  before they are needed
--   kv.serve kv.cost_model kv.trace kv.replay    a server of requests, with a model or
--                                  without one
--   kv.model kv.generate           a model with its tokenizer, answers to prompts
--   kv.http_server                 a server for clients of OpenAI's API
--   kv.experiment kv.statistics kv.synthetic     experiments over many configurations
--   kv.plot kv.table kv.timeline   pictures and tables
--   kv.tokenizer                   text to token ids and back, and chats
--   kv.task kv.scores kv.longbench  what a model is asked, and how good its answers are
--   kv.vllm kv.safetensors kv.gguf kv.npy    vLLM's cache layout, files of tensors
--   kv.command_line kv.paths       options given to ./kvlab, where things are
--   kv.version                     "0.2.0"
--   kv.C kv.check                  the C library itself
local arguments = require "kvlab.arguments"
local library = require "kvlab.library"
local device = require "kvlab.tensor.device"
local expression = require "kvlab.kernel.expression"
require "kvlab.kernel.show" -- expression:source
local tensor = require "kvlab.tensor.arithmetic"

local M = {
  C = library.C, check = library.check, paths = library.paths,
  version = require "kvlab.version", command_line = require "kvlab.command_line",
  device = device.device, cuda_available = device.cuda_available,
  scope = tensor.scope, lasting = tensor.lasting, is_tensor = tensor.is_tensor,
}
for _, name in ipairs { "tensor", "pinned", "full", "zeros", "ones", "arange",
                        "linspace", "randn", "rand", "randint", "from", "cat" } do
  M[name] = tensor[name]
end

--- Bytes of one element of a dtype.
function M.dtype_bytes(name) return library.C.kvl_dtype_bytes(library.dtype(name)) end

M.graph = require("kvlab.tensor.graph").graph
M.ops = require "kvlab.tensor.ops"
M.safetensors = require "kvlab.tensor.safetensors"
M.gguf = require("kvlab.tensor.gguf").open
M.npy = require "kvlab.tensor.npy"
M.vllm = require "kvlab.tensor.vllm"

M.tokenizer = require("kvlab.text.tokenizer").tokenizer
M.task = require "kvlab.task.task"
M.longbench = require "kvlab.task.longbench"
M.scores = require "kvlab.task.scores"

M.cache = require("kvlab.memory.cache").cache
M.store = require "kvlab.memory.store"
M.prefetch = require("kvlab.memory.prefetch").prefetch

M.index_cache = require("kvlab.index.index_cache").index_cache
M.indexer = require("kvlab.index.indexer").indexer
M.landmarks = require("kvlab.index.landmarks").landmarks
M.compressed = require("kvlab.index.compressed").compressed
M.prefix_chunks = require("kvlab.index.prefix_chunks").prefix_chunks

M.expr = expression.e
M.kernel = { source = require("kvlab.kernel.source").source,
             map = require("kvlab.kernel.map").map }

M.policy = require "kvlab.policy.policy"
M.attention = require("kvlab.policy.attention").attention
M.summary = require "kvlab.policy.summary"
M.hash = require "kvlab.policy.hash"
M.tally = require("kvlab.policy.tally").tally
M.sampling = require("kvlab.policy.sampling").sampling
M.reload = require "kvlab.policy.reload"

M.probe = require "kvlab.observe.probe"
M.record = require "kvlab.observe.record"
M.capture = require "kvlab.observe.capture"

M.serve = require("kvlab.serve.serve").serve
M.generate = require("kvlab.serve.generate").generate
M.model = require("kvlab.serve.model").model
M.http_server = require("kvlab.http.server").http_server
M.cost_model = require "kvlab.serve.cost_model"
M.trace = require "kvlab.serve.trace"
M.replay = require "kvlab.serve.replay"

M.plot = require "kvlab.report.plot"
M.table = require "kvlab.report.table"
M.timeline = require "kvlab.report.timeline"

arguments.receivers(tensor.methods, "a tensor", tensor.is_tensor)
arguments.receivers(device.methods, "a device", device.is_device)
arguments.receivers(expression.methods, "an expression", expression.is_expression)

M.experiment = require "kvlab.experiment.experiment"
M.statistics = require "kvlab.experiment.statistics"
M.synthetic = require "kvlab.experiment.synthetic"

return M
