--- Models with random weights in the shape of well-known ones, for experiments that
-- measure times: the time of a step does not depend on what the weights are.
local arguments = require "kvlab.arguments"
local deepseek = require "models.deepseek"
local fields = require "models.fields"
local llama = require "models.llama"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local M = {}

-- 8b: Llama-3-8B. small: a small version of it, for a CPU. glm-flash: GLM-4.7-Flash,
-- which are the defaults of its family; in bf16 its weights take 60 GB. v32: 8 layers of
-- DeepSeek-V3.2, all as its first three, because the experts of one layer take 22 GB.
-- v32-experts: its first seven layers, of which four have experts; 100 GB. v32-small: a
-- small version of v32.
local SHAPES = {
  ["glm-flash"] = { model_type = "glm4_moe_lite" },
  v32 = { model_type = "deepseek_v32", num_hidden_layers = 8, first_k_dense_replace = 8,
          n_routed_experts = 16, max_position_embeddings = 163840 },
  ["v32-experts"] = { model_type = "deepseek_v32", num_hidden_layers = 7,
                      max_position_embeddings = 163840 },
  ["v32-small"] = {
    model_type = "deepseek_v32", num_hidden_layers = 2, first_k_dense_replace = 2,
    hidden_size = 256, intermediate_size = 512, num_attention_heads = 8,
    num_key_value_heads = 8, q_lora_rank = 64, kv_lora_rank = 64, qk_nope_head_dim = 32,
    qk_rope_head_dim = 32, v_head_dim = 32, index_n_heads = 4, index_head_dim = 64,
    n_routed_experts = 16, vocab_size = 2048,
  },
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
---@param keys table  model: one of the above; dtype, seed
---@return table model
function M.open(keys)
  local shape = SHAPES[keys.model]
  if not shape then
    error(("model is %q, expected %s"):format(tostring(keys.model),
      fields.one_of(sorted.keys(SHAPES))), 0)
  end
  local o = { dtype = keys.dtype, seed = keys.seed }
  if shape.model_type then return deepseek.random(shape, o) end
  local config = { model_type = "llama", hidden_act = "silu", rope_theta = 500000,
                   rms_norm_eps = 1e-5 }
  for name, value in pairs(shape) do config[name] = value end
  return llama.random(config, o)
end

--- The prompts that a text describes: "8x32K" means 8 prompts of 32768 tokens.
---@param prompts string
---@return integer sequences
---@return integer tokens
function M.prompts(prompts)
  local sequences, tokens, unit = tostring(prompts):match "^([1-9]%d*)x([1-9]%d*)(K?)$"
  if not sequences then
    error(("prompts is %q, expected SEQUENCESxTOKENS such as 8x32K"):format(
      tostring(prompts)), 0)
  end
  return tonumber(sequences), tonumber(tokens) * (unit == "K" and 1024 or 1)
end

--- The blocks that prompts need.
---@param prompts string
---@param block_size integer
---@param more integer  tokens that may follow a prompt
---@return integer each  of one sequence
---@return integer all
function M.blocks(prompts, block_size, more)
  local count, context = M.prompts(prompts)
  local each = math.ceil((context + more) / block_size)
  return each, count * each
end

--- Reads the prompts anew, with the attention that the engine has now.
---@param engine models.Engine
---@param count integer    how many
---@param context integer  tokens of each
---@return kvlab.Sequence[]
function M.read_again(engine, count, context)
  local seqs = {}
  for i = 1, count do
    local tokens, seq = {}, engine:sequence()
    for t = 1, context do
      tokens[t] = (t * 7919 + i * 104729) % engine.model.config.vocab
    end
    engine:prefill(seq, tokens)
    seqs[i] = seq
  end
  return seqs
end

--- An engine with a sequence for each prompt, which it has read.
---@param model table
---@param prompts string
---@param o table  options of the engine; max_seqs, chunk, blocks and max_blocks follow
--                 from the prompts
---@param more integer  tokens that may follow a prompt
---@return kvlab.Engine
---@return kvlab.Sequence[]
---@return integer context  tokens of a prompt
function M.read(model, prompts, o, more)
  local count, context = M.prompts(prompts)
  local all = { graph = true, max_seqs = count, chunk = math.min(context, 4096) }
  for name, value in pairs(o) do all[name] = value end
  all.max_blocks, all.blocks = M.blocks(prompts, o.block_size, more)
  local engine = model:engine(all)
  return engine, M.read_again(engine, count, context), context
end

arguments.functions(M, "shapes", { has = { name = options.string },
                                   open = { keys = options.table } })

return M
