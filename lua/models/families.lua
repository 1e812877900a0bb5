--- Loads a model of any family: its config says which one it is.
--
--   local families = require "models.families"
--   local model = families.load("smollm2", { device = "cpu" })
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local config = require "models.config"
local deepseek = require "models.deepseek"
local fields = require "models.fields"
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
  local family, path = checkpoint.model_type(name)
  if not config.FAMILIES[family] then
    fields.refuse(path, "model_type", family, fields.one_of(config.NAMES))
  end
  local module = family:find "^gemma" and gemma or llama
  if family:find "^deepseek" or family == "glm4_moe_lite" then module = deepseek end
  return module.load(name, o)
end

arguments.functions(M, "families", { load = { name = options.string } })

return M
