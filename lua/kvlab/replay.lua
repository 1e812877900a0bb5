--- A trace replayed by a server without a model, in modelled time, with a store behind a
-- link: what experiments on prefetch have in common.
local kv = require "kvlab"

local M = {}

M.ENVIRONMENT = { device = "model", description = "Llama-8B on one H100 80GB, modelled" }

local CONTEXT = 4096 -- tokens behind which steps are measured

--- What steps cost: Llama-8B on one H100, from measured numbers; or, given the folder of
-- a model, what its steps take on this machine's device.
---@param folder? string  with weights as Hugging Face writes them
---@param link table      link_gbps, link_us
---@return kvlab.CostModel
function M.cost(folder, link)
  local block = kv.trace.BLOCK
  if not folder then
    local cost = kv.cost_model.llama_8b_h100(block)
    cost.link_gbps, cost.link_us = link.link_gbps, link.link_us
    return kv.cost_model.new(cost)
  end
  local engine = require("models.llama").load(folder):engine { block_size = block,
    blocks = CONTEXT / block + 2, max_seqs = 1 }
  local cost = kv.cost_model.calibrate(engine, { link_gbps = link.link_gbps,
    link_us = link.link_us, context = CONTEXT })
  engine.cache:close()
  return cost
end

--- Serve `rows`. config: slowdown (a request is in time when its first token takes at
-- most slowdown times what its prefill takes on an idle server, plus 100 ms), rate (1),
-- and options of kv.serve by their names; more: further ones.
---@return table stats
function M.run(rows, cost, config, more)
  local block = kv.trace.BLOCK
  local o = { cost = cost, block_size = block }
  for _, name in ipairs { "max_seqs", "max_tokens", "priority", "late", "prefetch_ahead",
                          "prefetch_workers", "max_pending_prefetch" } do
    o[name] = config[name]
  end
  for name, value in pairs(more) do o[name] = value end
  local server = kv.serve(o)
  kv.trace.submit(server, rows, { rate = config.rate, deadline_us = function(row)
    return 1e5 + config.slowdown * cost:prefill_us(row.input_length, block)
  end })
  return server:run():stats()
end

return M
