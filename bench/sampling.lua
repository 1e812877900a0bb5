--- Choosing tokens (H4): the time that a step spends on it after the logits are there,
-- for random logits of 49152 tokens, with the ids and what else was asked for on the
-- host.
local kv = require "kvlab"
local sampler = require "kvlab.serve.sampler"

local VOCAB, CONTEXT, SPREAD, REPEATS = 49152, 240, 3, 31

local CHOICES = {
  { "the likeliest", {} },
  { "temperature", { temperature = 0.8 } },
  { "top_k", { temperature = 0.8, top_k = 50 } },
  { "top_p", { temperature = 0.8, top_p = 0.9 } },
  { "all options", { temperature = 0.8, top_k = 50, top_p = 0.9, min_p = 0.05,
                     repetition_penalty = 1.1 } },
  { "log-probabilities", { logprobs = 5 } },
}

--- The fields of a request with CONTEXT tokens that the sampler reads.
local function request(options, seed)
  local tokens = {}
  for i = 1, CONTEXT do tokens[i] = (i * 977 + seed) % VOCAB end
  return { choice = sampler.take(options), tokens = tokens, num_tokens = CONTEXT,
           output_length = function() return 0 end }
end

local function time_of(options, count)
  return function()
    local logits, list, times = kv.randn(kv.device(), "f32", { count, VOCAB },
      { seed = 1, std = SPREAD }), {}, {}
    for i = 1, count do list[i] = request(options, i) end
    for i = -2, REPEATS do
      local start = kv.C.kvl_clock_ns()
      sampler.choose(logits, list)
      if i > 0 then times[i] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3 end
    end
    local us = kv.statistics.median(times)
    return { us = us, note = ("%.0f us a request"):format(us / count) }
  end
end

return function(b)
  for _, count in ipairs { 1, 8 } do
    for _, choice in ipairs(CHOICES) do
      b:case { id = "H4", name = ("choose by %s, batch %d"):format(choice[1], count),
               setup = time_of(choice[2], count) }
    end
  end
end
