--- Loads a model of any family: its config says which one it is.
--
--   local families = require "models.families"
--   local model = families.load("smollm2", { device = "cpu" })
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local gemma = require "models.gemma"
local llama = require "models.llama"
local options = require "kvlab.options"

local M = {}

--- Loads a model: a folder (config.json and safetensors), a GGUF file, or a model that
-- ./kvlab get has fetched. The families are those of `docs/models.md`.
---@param name string
---@param o? table  device (--device's), dtype of weights and activations (bf16), context:
--                  see llama.load
---@return table model  what its family's load returns
function M.load(name, o)
  o = options.check("families.load", o, llama.parts.OPTIONS)
  local is_gemma = tostring(checkpoint.model_type(name)):find "^gemma"
  if not is_gemma then return llama.load(name, o) end
  return gemma.load(name, { device = o.device, dtype = o.dtype })
end

arguments.functions(M, "families", { load = { name = options.string } })

return M
