--- Opens a checkpoint of any family with its tokenizer. `kv.model` finds this file by its
-- name, so that the core requires no model.
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local families = require "models.families"
local kv = require "kvlab"
local llama = require "models.llama"
local options = require "kvlab.options"

local M = {}

--- Loads a model and its tokenizer.
---@param name string  a folder, a file that ends with .gguf, or what ./kvlab get fetched
---@param o? table     of families.load: device, dtype, …
---@return table model  as lua/models/engine.lua describes it
---@return kvlab.text.Tokenizer tokenizer
function M.open(name, o)
  local path = checkpoint.find(name)
  local model = families.load(path, o)
  local metadata = path:find "%.gguf$" and checkpoint.gguf(path).metadata
  local ok, tokenizer = pcall(kv.tokenizer, metadata or path)
  if ok then return model, tokenizer end
  local why = tostring(tokenizer) -- names a line of this file
  return error(why:sub(why:find("tokenizer: ", 1, true) or 1), 0)
end

--- Loads a model and its tokenizer for an experiment. "sample" is a small model with
-- random weights, for the tokens of a small tokenizer: it shows that everything runs.
---@param o table  model: a name as open takes it, or "sample"; dtype; seed
---@return { model: table, tokenizer: kvlab.text.Tokenizer } loaded
function M.for_experiment(o)
  if o.model ~= "sample" then
    local model, tokenizer = M.open(o.model, { dtype = o.dtype })
    return { model = model, tokenizer = tokenizer }
  end
  local tokenizer = kv.tokenizer(kv.paths.root .. "/spec/data/tokenizers/smollm.json")
  local model = llama.random({ model_type = "llama", hidden_act = "silu",
    hidden_size = 64, intermediate_size = 96, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, vocab_size = tokenizer.size },
    { dtype = o.dtype, seed = o.seed })
  return { model = model, tokenizer = tokenizer }
end

arguments.functions(M, "open", { open = { name = options.string },
                                 for_experiment = { o = options.table } })

return M
