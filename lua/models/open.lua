--- Opens a checkpoint of any family with its tokenizer. `kv.model` finds this file by its
-- name, so that the core requires no model.
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local kv = require "kvlab"
local options = require "kvlab.options"

local M = {}

--- What a checkpoint is, in the words of its own file.
local function kind_of(path, metadata)
  if metadata then return tostring(metadata["general.architecture"]) end
  return tostring(checkpoint.config(path).model_type)
end

--- Loads a model and its tokenizer.
---@param name string  a folder, a file that ends with .gguf, or what ./kvlab get fetched
---@param o? table     of the family's load: device, dtype, …
---@return table model  as lua/models/engine.lua describes it
---@return kvlab.text.Tokenizer tokenizer
function M.open(name, o)
  local path = checkpoint.find(name)
  local metadata = path:find "%.gguf$" and checkpoint.gguf(path).metadata
  local family = kind_of(path, metadata):find "^gemma" and "models.gemma"
    or "models.llama"
  local tokenizer = kv.tokenizer(metadata or path)
  return require(family).load(path, o), tokenizer
end

arguments.functions(M, "open", { open = { name = options.string } })

return M
