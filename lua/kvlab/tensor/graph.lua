--- `local g = kv.graph(fn)` makes a graph: it records the work that fn launches on a
-- device's current stream, without running it. `g:replay()` runs all of it, with no Lua
-- and no gaps between launches. Ops read lengths, tables and selections from the device,
-- so a step that was recorded once serves later lengths. fn must not read from the
-- device or write to it. Run fn once before you record it, so that its buffers exist.
-- Until it is closed, a graph holds the memory that it reads and writes.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local device = require "kvlab.tensor.device"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local out_graph = ffi.new "kvl_graph *[1]"

local graph_t = ffi.typeof "kvl_graph *"

ffi.metatype("kvl_graph", {
  __index = arguments.receivers({
    --- Runs the graph on the stream that it was recorded on.
    replay = function(self) check(C.kvl_graph_replay(device.alive(self, "graph"))) end,
    close = function(self) device.close(self, C.kvl_graph_close) end,
  }, "a graph", function(x) return type(x) == "cdata" and ffi.istype(graph_t, x) end),
})

--- Records the work that fn() launches on `dev` (the default device). fn may not yield.
---@param fn fun()
---@param dev? kvlab.Device|string
---@return kvlab.Graph graph
function M.graph(fn, dev)
  options.argument("graph", "fn", fn, options.fn)
  dev = device.device(dev)
  tensor.collect() -- memory that is freed while recording is held until its end
  C.kvl_interrupt_hold(1)
  collectgarbage "stop"
  local status = C.kvl_graph_begin(dev)
  local ok, why, graph = true, nil, nil
  if status >= 0 then
    local results = protected.call("graph", fn, 0, {})
    ok, why = results[1], results[2]
    status = C.kvl_graph_end(dev, out_graph)
    graph = status >= 0 and ffi.gc(out_graph[0], C.kvl_graph_close)
  end
  collectgarbage "restart"
  C.kvl_interrupt_hold(-1)
  if not ok then
    if graph then graph:close() end
    error(why, 0)
  end
  check(status)
  return graph
end

return M
