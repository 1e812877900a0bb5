--- A server with a small model and a store, for specs in which the store or the process
-- fails. As a script, it serves without an end:
--
--   kvlab run spec/serving.lua --device=cpu --set store=lmdb:PATH --set ready=FILE
--
-- FILE is written after the first round of requests.
local kv = require "kvlab"
package.path = kv.paths.root .. "/?.lua;" .. package.path
local tiny = require("spec.models.tiny").tiny

local M = { ROUNDS = 3, BLOCK = 4 }

local model = tiny(kv.device "cpu")

--- The requests of a round: prompts of several lengths, some of which begin alike.
function M.requests(round)
  local list = {}
  for i, length in ipairs { 30, 9, 33, 30, 17 } do
    local tokens = {}
    for t = 1, length do
      tokens[t] = (t * 31 + round * 5 + (t > 16 and i or i % 2) * 7) % 97
    end
    list[i] = { tokens = tokens, max_tokens = 5 + 2 * i }
  end
  return list
end

--- Opens a store for blocks of the model.
function M.store(url, timeout_ms)
  return kv.store(url, { model = "tiny", block_size = M.BLOCK, timeout_ms = timeout_ms })
end

--- Serves a round. Returns the ids that each request got. `each(step)` is called after
-- each step.
function M.serve(round, store, each)
  local engine = model:engine { blocks = 80, block_size = M.BLOCK, chunk = 16,
    max_seqs = 4, policy = kv.policy("quest", { ratio = 0.5 }) }
  local server, requests, outputs = kv.serve { engine = engine, store = store }, {}, {}
  for i, one in ipairs(M.requests(round)) do requests[i] = assert(server:submit(one)) end
  local step = 0
  while server:step() do
    step = step + 1
    if each then each(step) end
  end
  for i, r in ipairs(requests) do outputs[i] = r:output() end
  server:close()
  engine.cache:close()
  return outputs
end

--- The KV of a round's requests that a store holds: the numbers of each block, by
-- request, block and layer.
function M.contents(round, store, outputs)
  local cache = kv.cache { device = "cpu", format = "f32", layers = 2, blocks = 1,
    block_size = M.BLOCK, kv_heads = 2, head_dim = 16 }
  local found = {}
  for i, one in ipairs(M.requests(round)) do
    local tokens = { unpack(one.tokens) }
    for _, id in ipairs(outputs[i]) do tokens[#tokens + 1] = id end
    local keys, n = store:keys(tokens)
    for b = 0, n - 1 do
      for layer = 0, 1 do
        if store:get_block(keys + b, layer, cache:layer(layer), 0) then
          found[("%d %d %d"):format(i, b, layer)] = cache:layer(layer):list()
        end
      end
    end
  end
  cache:close()
  return found
end

local set = kv.command_line.set
if set.ready then
  local store, round = M.store(set.store), 0
  while true do
    M.serve(round % M.ROUNDS, store)
    round = round + 1
    if round == 1 then io.open(set.ready, "w"):close() end
    if round % M.ROUNDS == 0 then -- puts everything again
      for i = 0, M.ROUNDS - 1 do
        for _, one in ipairs(M.requests(i)) do
          local keys, n = store:keys(one.tokens)
          for b = 0, n - 1 do
            for layer = 0, 1 do store:remove(keys[b], layer) end
          end
        end
      end
    end
  end
end

return M
