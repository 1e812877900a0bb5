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
--   kv.policy kv.summary kv.hash kv.tally kv.queries kv.sampling
--                                  what policies are made of
--   kv.split                       how a policy's budget is divided
--   kv.eviction                    what leaves a hot cache
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
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
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

-- Modules that are loaded when they are first used, because most programs need only a
-- third of them.
local later = {}
function later.expr()
  local expression = require "kvlab.kernel.expression.expression"
  require "kvlab.kernel.run.show" -- expression:source
  arguments.receivers(expression.methods, "an expression", expression.is_expression)
  return expression.e
end
function later.kernel()
  return { source = require("kvlab.kernel.run.source").source,
           map = require("kvlab.kernel.run.map").map }
end
function later.graph() return require("kvlab.tensor.graph").graph end
function later.ops() return require "kvlab.tensor.ops" end
function later.safetensors() return require "kvlab.tensor.safetensors" end
function later.gguf() return require("kvlab.tensor.gguf").open end
function later.npy() return require "kvlab.tensor.npy" end
function later.vllm() return require "kvlab.tensor.vllm" end

function later.tokenizer() return require("kvlab.text.tokenizer").tokenizer end
function later.task() return require "kvlab.task.task" end
function later.longbench() return require "kvlab.task.longbench" end
function later.scores() return require "kvlab.task.scores" end

function later.cache() return require("kvlab.memory.cache").cache end
function later.format() return require("kvlab.memory.formats").format end
function later.store() return require "kvlab.memory.store" end
function later.prefetch() return require("kvlab.memory.prefetch").prefetch end

function later.index_cache() return require("kvlab.index.index_cache").index_cache end
function later.indexer() return require("kvlab.index.indexer").indexer end
function later.landmarks() return require("kvlab.index.landmarks").landmarks end
function later.compressed() return require("kvlab.index.compressed").compressed end
function later.prefix_chunks()
  return require("kvlab.index.prefix_chunks").prefix_chunks
end

function later.policy() return require "kvlab.policy.policy" end
function later.eviction() return require "kvlab.policy.eviction" end
function later.attention() return require("kvlab.policy.attention").attention end
function later.split() return require "kvlab.policy.split" end
function later.summary() return require "kvlab.policy.summary" end
function later.hash() return require "kvlab.policy.hash" end
function later.queries() return require("kvlab.policy.queries").queries end
function later.tally() return require("kvlab.policy.tally").tally end
function later.sampling() return require("kvlab.policy.sampling").sampling end
function later.reload() return require "kvlab.policy.reload" end

function later.probe() return require "kvlab.observe.probe" end
function later.record() return require "kvlab.observe.record" end
function later.capture() return require "kvlab.observe.capture" end

function later.serve() return require("kvlab.serve.serve").serve end
function later.generate() return require("kvlab.serve.generate").generate end
function later.model() return require("kvlab.serve.model").model end
function later.http_server() return require("kvlab.http.server").http_server end
function later.cost_model() return require "kvlab.serve.cost_model" end
function later.trace() return require "kvlab.serve.trace" end
function later.replay() return require "kvlab.serve.replay" end

function later.plot() return require "kvlab.report.plot" end
function later.table() return require "kvlab.report.table" end
function later.timeline() return require "kvlab.report.timeline" end

function later.experiment() return require "kvlab.experiment.experiment" end
function later.statistics() return require "kvlab.experiment.statistics" end
function later.synthetic() return require "kvlab.experiment.synthetic" end

arguments.receivers(tensor.methods, "a tensor", tensor.is_tensor)
arguments.receivers(device.methods, "a device", device.is_device)

--- Raises for a name that kv does not have.
local function refuse(self, name)
  if type(name) ~= "string" then return nil end
  local names = sorted.keys(self)
  for more in pairs(later) do names[#names + 1] = more end
  options.fail(("kv has no %s%s"):format(name, hint(name, names)), 3)
end

setmetatable(M, { __index = function(self, name)
  local load = later[name]
  if not load then return refuse(self, name) end
  library.C.kvl_interrupt_hold(1) -- a module that is half loaded cannot be loaded again
  local ok, value = pcall(load)
  library.C.kvl_interrupt_hold(-1)
  if not ok then error(value, 0) end
  self[name] = value
  return value
end })

--- Loads every module, so that all names in kv can be listed. Returns kv.
function M.load_all()
  for name in pairs(later) do assert(M[name]) end
  return M
end

return M
