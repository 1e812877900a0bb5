--- Replays a trace on a server without a model, in modelled time, with a store behind a
-- link. The experiments on prefetch share this file.
local arguments = require "kvlab.arguments"
local cost_model = require "kvlab.serve.cost_model"
local options = require "kvlab.options"
local serve = require("kvlab.serve.serve").serve
local serve_options = require "kvlab.serve.serve_options"
local trace = require "kvlab.serve.trace"

local M = {}

--- The environment of steps that no device computes, for a manifest.
M.ENVIRONMENT = { device = "model", description = "Llama-8B on one H100 80GB, modelled" }

--- The context behind which the steps of an engine are measured, in tokens. The engine's
-- cache must have room for them and one more block.
M.CONTEXT = 4096

--- What steps cost: with an engine, its steps are measured on its device; without one,
-- the cost is that of Llama-8B on one H100, from measured numbers.
---@param engine? models.Engine  with blocks of kv.trace.BLOCK tokens
---@param config table           an experiment's, with link_gbps and link_us
---@return kvlab.CostModel
function M.cost(engine, config)
  if engine then
    return cost_model.calibrate(engine, { link_gbps = config.link_gbps,
      link_us = config.link_us, context = M.CONTEXT })
  end
  local cost = cost_model.llama_8b_h100(trace.BLOCK)
  cost.link_gbps, cost.link_us = config.link_gbps, config.link_us
  cost.origin = cost.origin .. "; the link is the experiment's"
  return cost_model(cost)
end

--- Raises for a configuration of an experiment whose priority a server cannot have.
---@param config table  with its `priority`
function M.check(config) serve_options.check_priority(config.priority) end

--- Serves `rows`.
---@param rows kvlab.TraceRow[]
---@param cost kvlab.CostModel
---@param config table  an experiment's: slowdown (a request is in time when its first
--                      token takes at most slowdown times what its prefill takes on an
--                      idle server, plus 100 ms), rate (1), and options of kv.serve by
--                      their names
---@param more? table   further options of kv.serve
---@return table stats
function M.run(rows, cost, config, more)
  more = options.check("replay", more, serve_options.KNOWN)
  local block = trace.BLOCK
  local o = { cost = cost, block_size = block }
  for _, name in ipairs { "max_seqs", "max_tokens", "priority", "late", "prefetch_ahead",
                          "prefetch_workers", "max_pending_prefetch" } do
    o[name] = config[name]
  end
  for name, value in pairs(more) do o[name] = value end
  local server = serve(o)
  trace.submit(server, rows, { rate = config.rate, deadline_us = function(row)
    return 1e5 + config.slowdown * cost:prefill_us(row.input_length, block)
  end })
  return server:run():stats()
end

local function has_numbers(...)
  local names = { ... }
  return { "a table with " .. table.concat(names, " and "), function(x)
    for _, name in ipairs(names) do
      if type(x) ~= "table" or not options.not_negative[2](x[name]) then return false end
    end
    return true
  end }
end
arguments.functions(M, "replay", {
  cost = { engine = options.optional(cost_model.ENGINE),
           config = has_numbers("link_gbps", "link_us") },
  check = { config = options.table },
  run = { rows = trace.ROWS, cost = cost_model.COST_MODEL,
          config = has_numbers "slowdown" },
})

return M
