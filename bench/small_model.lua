--- A real model on few cores (P22): SmolLM2-135M, 2048 tokens of a prompt, and a decode
-- step after 512. The cases are there when the model is: ./kvlab get smollm2.
-- bench/small_model_peers.py runs them beside transformers and llama.cpp.
local kv = require "kvlab"
local downloads = require "kvlab.downloads"

local DECODED = 64

local function prompt_of(model, n)
  local tokens = {}
  for i = 1, n do tokens[i] = (i * 7919) % model.config.vocab end
  return tokens
end

local function note(tokens, us) return ("%.1f tokens/s"):format(tokens / us * 1e6) end

--- The median of some calls, after one that is not counted.
local function median_us(device, calls, run)
  local times = {}
  for i = 0, calls do
    local start = kv.C.kvl_clock_ns()
    run()
    device:sync()
    if i > 0 then times[i] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3 end
  end
  return kv.statistics.median(times)
end

local function engine_of(b, dtype)
  local model = require("models.llama").load(downloads.find "smollm2",
    { device = b.device, dtype = dtype })
  return model:engine { blocks = 160, chunk = 512, max_seqs = 1,
                        graph = b.kind == "cuda" }
end

local function prefill(dtype, n)
  return function(b)
    local engine = engine_of(b, dtype)
    local tokens = prompt_of(engine.model, n)
    local us = median_us(b.device, b.quick and 1 or 3, function()
      local seq = engine:sequence()
      engine:prefill(seq, tokens)
      engine:finish(seq)
    end)
    return { us = us, note = note(n, us) }
  end
end

local function decode(dtype, context)
  return function(b)
    local engine = engine_of(b, dtype)
    local seq, id = engine:sequence(), { 1 }
    engine:prefill(seq, prompt_of(engine.model, context))
    local us = median_us(b.device, b.quick and 2 or DECODED, function()
      engine:decode({ seq }, id)
    end)
    return { us = us, note = note(1, us) }
  end
end

return function(b)
  if not downloads.find "smollm2" then return end
  local n, context = b.quick and 64 or 2048, b.quick and 16 or 512
  for _, dtype in ipairs { "f32", "bf16" } do
    local name = "SmolLM2-135M, " .. dtype
    b:case { id = "P22", name = ("%s, prefill of %d"):format(name, n),
             setup = prefill(dtype, n) }
    b:case { id = "P22", name = ("%s, decode after %d"):format(name, context),
             setup = decode(dtype, context) }
  end
end
