--- Models with random weights in the shape of well-known ones, for experiments that
-- measure times: the time of a step does not depend on what the weights are.
local arguments = require "kvlab.arguments"
local llama = require "models.llama"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local M = {}

-- 8b: Llama-3-8B. small: the same in little, for a CPU.
local SHAPES = {
  ["8b"] = { hidden_size = 4096, intermediate_size = 14336, num_hidden_layers = 32,
             num_attention_heads = 32, num_key_value_heads = 8, vocab_size = 128256 },
  small = { hidden_size = 512, intermediate_size = 1792, num_hidden_layers = 4,
            num_attention_heads = 8, num_key_value_heads = 2, vocab_size = 2048 },
}

--- Whether there is a shape of this name.
---@param name string
---@return boolean
function M.has(name) return SHAPES[name] ~= nil end

--- A model of a shape, with random weights.
---@param keys table  model: "8b" or "small"; dtype, seed
---@return table model
function M.open(keys)
  local config = { model_type = "llama", hidden_act = "silu", rope_theta = 500000,
                   rms_norm_eps = 1e-5 }
  local shape = SHAPES[keys.model]
  if not shape then
    error(("model is %q, expected %s"):format(tostring(keys.model),
      table.concat(sorted.keys(SHAPES), " or ")), 0)
  end
  for name, value in pairs(shape) do config[name] = value end
  return llama.random(config, { dtype = keys.dtype, seed = keys.seed })
end

--- The prompts that a text stands for: "8x32K" are 8 of 32768 tokens.
---@param prompts string
---@return integer sequences
---@return integer tokens
function M.prompts(prompts)
  local sequences, tokens, unit = tostring(prompts):match "^(%d+)x(%d+)(K?)$"
  if not sequences then
    error(("prompts is %q, expected SEQUENCESxTOKENS such as 8x32K"):format(
      tostring(prompts)), 0)
  end
  return tonumber(sequences), tonumber(tokens) * (unit == "K" and 1024 or 1)
end

arguments.functions(M, "shapes", { has = { name = options.string },
                                   open = { keys = options.table } })

return M
