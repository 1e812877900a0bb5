--- A checkpoint as a GGUF file: its configuration in the words of a config.json of
-- Hugging Face, and its weights under Hugging Face's names. Families then read both kinds
-- of checkpoints in the same way; lua/models/checkpoint.lua opens them.
--
-- The architectures are llama (Llama, Mistral and Mixtral), qwen2, qwen3 and qwen3moe.
-- In the llama architecture, llama.cpp rotates neighbouring numbers of a head, and its
-- converter reorders the rows of Q and K for that. Loading restores the order of Hugging
-- Face, where number i is rotated with number i + head_dim / 2.
-- Source  docs/gguf.md of ggml; convert_hf_to_gguf.py and gguf-py of llama.cpp
local fields_of = require "models.fields"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

local refuse = fields_of.refuse
local M = {}

--- GGUF's names of architectures -> model_type of Hugging Face.
M.ARCHITECTURES = { llama = "llama", qwen2 = "qwen2", qwen3 = "qwen3",
                    qwen3moe = "qwen3_moe" }

-- ---- configuration --------------------------------------------------------------------

-- config.json's names of what the architecture's keys hold.
local FIELDS = {
  hidden_size = "embedding_length", intermediate_size = "feed_forward_length",
  num_hidden_layers = "block_count", num_attention_heads = "attention.head_count",
  num_key_value_heads = "attention.head_count_kv", head_dim = "attention.key_length",
  rms_norm_eps = "attention.layer_norm_rms_epsilon", rope_theta = "rope.freq_base",
  max_position_embeddings = "context_length",
  num_experts = "expert_count", num_experts_per_tok = "expert_used_count",
  moe_intermediate_size = "expert_feed_forward_length",
}

-- The keys that every model must have.
local NEEDED = { "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "rms_norm_eps", "max_position_embeddings" }

-- Other keys that are read here, or that do not affect what is computed.
local READ = { ["rope.scaling.type"] = true, ["rope.scale_linear"] = true,
  ["rope.scaling.factor"] = true, ["rope.scaling.original_context_length"] = true,
  ["rope.scaling.attn_factor"] = true, ["attention.value_length"] = true,
  ["rope.dimension_count"] = true, vocab_size = true, ["rope.scaling.finetuned"] = true,
  tensor_data_layout = true }

-- Keys that may have only one value, the one that kvlab can compute.
local ONLY = { ["attention.causal"] = true, expert_weights_norm = true,
               expert_gating_func = 1 }

--- Raises for an unknown key of the architecture, unless its value is 0 or false, which
-- asks for nothing.
local function check_keys(path, metadata, architecture)
  local is_known = {}
  for _, key in pairs(FIELDS) do is_known[key] = true end
  for _, name in ipairs(sorted.keys(metadata)) do
    local key, value = name:match("^" .. architecture .. "%.(.*)$"), metadata[name]
    if key and ONLY[key] ~= nil then
      if value ~= ONLY[key] then refuse(path, key, value, tostring(ONLY[key])) end
    elseif key and not is_known[key] and not READ[key] and value ~= 0
      and value ~= false then
      refuse(path, key, value, "none")
    end
  end
  local parts = metadata["split.count"]
  if parts and parts ~= 1 and parts ~= 0 then
    refuse(path, "split.count", parts, "1: a file with all tensors")
  end
end

local function rope_scaling(path, get)
  local kind = get "rope.scaling.type"
  if kind == nil and get "rope.scale_linear" then
    return { rope_type = "linear", factor = get "rope.scale_linear" }
  elseif kind == nil or kind == "none" then
    return nil
  elseif kind ~= "linear" and kind ~= "yarn" then
    refuse(path, "rope.scaling.type", kind, "none, linear or yarn")
  end
  return { rope_type = kind, factor = get "rope.scaling.factor",
           original_max_position_embeddings = get "rope.scaling.original_context_length",
           attention_factor = get "rope.scaling.attn_factor" }
end

local function ratio(a, b)
  return type(a) == "number" and type(b) == "number" and a / b or nil
end

--- The fields of a file, as a config.json has them.
---@param file kvlab.GGUF
---@return table fields
---@return table own  what no config.json says: has_out_bias; rope_factors: what each
--                    frequency of a rotation is divided by, or nil
function M.config(file)
  local metadata, path = file.metadata, file.path
  local architecture = metadata["general.architecture"]
  local model_type = M.ARCHITECTURES[architecture]
    or refuse(path, "general.architecture", architecture,
      "llama, qwen2, qwen3 or qwen3moe")
  local function get(key) return metadata[architecture .. "." .. key] end
  check_keys(path, metadata, architecture)
  local fields = { model_type = model_type, hidden_act = "silu",
                   rope_scaling = rope_scaling(path, get) }
  for field, key in pairs(FIELDS) do fields[field] = get(key) end
  for _, field in ipairs(NEEDED) do
    if fields[field] == nil then refuse(path, field, nil, "a whole number") end
  end
  if (fields.num_experts or 0) == 0 then
    fields.num_experts, fields.num_experts_per_tok = nil, nil
  elseif not fields.num_experts_per_tok then
    refuse(path, "expert_used_count", nil, "a whole number")
  elseif architecture == "llama" then
    fields.model_type, fields.num_local_experts = "mixtral", fields.num_experts
  elseif architecture ~= "qwen3moe" then
    refuse(path, "expert_count", fields.num_experts, "0")
  end
  if architecture == "qwen3moe" then
    fields.norm_topk_prob = true -- llama.cpp always does
  else
    fields.moe_intermediate_size = nil
  end
  if get "attention.value_length" and get "attention.value_length" ~= fields.head_dim then
    refuse(path, "attention.value_length", get "attention.value_length",
      ("that of keys, %s"):format(tostring(fields.head_dim)))
  end
  -- llama.cpp's defaults for keys that are missing.
  fields.num_key_value_heads = fields.num_key_value_heads or fields.num_attention_heads
  fields.rope_theta = fields.rope_theta or 10000
  fields.head_dim = fields.head_dim
    or ratio(fields.hidden_size, fields.num_attention_heads)
  local turned = get "rope.dimension_count"
  if turned and turned ~= fields.head_dim then
    fields.partial_rotary_factor = ratio(turned, fields.head_dim) or turned
  end
  fields.vocab_size = file:has "token_embd.weight"
    and file:describe("token_embd.weight")[1] or get "vocab_size"
  fields.tie_word_embeddings = not file:has "output.weight"
  if architecture ~= "qwen2" then -- which always has it
    fields.attention_bias = file:has "blk.0.attn_q.bias"
  end
  local own = { has_out_bias = file:has "blk.0.attn_output.bias" }
  if file:has "rope_freqs.weight" then
    own.rope_factors = file:read("rope_freqs.weight", "cpu"):list()
  end
  return fields, own
end

-- ---- weights --------------------------------------------------------------------------

-- Hugging Face's names -> GGUF's, outside of layers and in them.
local NAMES = { ["model.embed_tokens"] = "token_embd", ["model.norm"] = "output_norm",
                ["lm_head"] = "output" }
local IN_LAYER = {
  ["input_layernorm"] = "attn_norm", ["self_attn.q_proj"] = "attn_q",
  ["self_attn.k_proj"] = "attn_k", ["self_attn.v_proj"] = "attn_v",
  ["self_attn.o_proj"] = "attn_output", ["self_attn.q_norm"] = "attn_q_norm",
  ["self_attn.k_norm"] = "attn_k_norm", ["post_attention_layernorm"] = "ffn_norm",
  ["mlp.gate_proj"] = "ffn_gate", ["mlp.up_proj"] = "ffn_up",
  ["mlp.down_proj"] = "ffn_down", ["mlp.gate"] = "ffn_gate_inp",
  ["mlp.experts.gate_proj"] = "ffn_gate_exps", ["mlp.experts.up_proj"] = "ffn_up_exps",
  ["mlp.experts.down_proj"] = "ffn_down_exps",
}

local function name_of(name)
  local layer, part, kind = name:match "^model%.layers%.(%d+)%.(.*)%.(%l+)$"
  if layer then
    local short = IN_LAYER[part]
    return short and ("blk.%s.%s.%s"):format(layer, short, kind), part
  end
  part, kind = name:match "^(.*)%.(%l+)$"
  return NAMES[part] and NAMES[part] .. "." .. kind, part
end

--- The row of the file in which row i of Q or K lies, for every i.
local function rows_in_pairs(rows, head_dim)
  local index, half = {}, head_dim / 2
  for i = 0, rows - 1 do
    local at = i % head_dim
    index[i + 1] = i - at + at % half * 2 + math.floor(at / half)
  end
  return index
end

--- The weights of a file.
---@param file kvlab.GGUF
---@param fields table  as config returned them
---@return table  has, read and unread, see checkpoint.open
function M.weights(file, fields)
  local seen = { ["rope_freqs.weight"] = true } -- which config has read
  local in_pairs = file.metadata["general.architecture"] == "llama"
  local orders = {} -- by rows
  local function order(device, rows)
    orders[rows] = orders[rows] or kv.lasting(kv.from, device, "i32", { rows },
      rows_in_pairs(rows, fields.head_dim or fields.hidden_size
        / fields.num_attention_heads))
    return orders[rows]
  end
  local function read(name, device, dtype, shape)
    local stored, part = name_of(name)
    stored = stored or name
    local t = file:read(stored, device, dtype, shape)
    seen[stored] = true
    if in_pairs and (part == "self_attn.q_proj" or part == "self_attn.k_proj") then
      local rows = t:size(0)
      local wide = t.ndim == 1 and t:reshape { rows, 1 } or t
      local ordered = wide:gather_rows(order(device, rows)):reshape(t:dims())
      t:free()
      return ordered
    end
    return t
  end
  return { has = function(name) return file:has(name_of(name) or name) end, read = read,
           unread = function()
    for _, name in ipairs(file.names) do
      if not seen[name] then return name end
    end
  end }
end

return M
