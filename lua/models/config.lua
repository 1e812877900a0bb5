--- What the config.json of each family may say: its fields, and what transformers'
-- config class takes for one that is left out. `./kvlab run tools/fields.lua` makes the
-- table in docs/models.md from it; spec/models/fields_spec.lua changes every field and
-- compares with transformers.
-- Source  transformers 5.23, of families with latents 5.24: models/*/configuration_*.py;
--         configuration_utils.py; config.json of models on the Hugging Face hub, for what
--         older versions wrote
local fields = require "models.fields"
local options = require "kvlab.options"
local rope = require "models.rope"
local sorted = require "kvlab.sorted"

local known, nullable = fields.known, fields.nullable
local only, nothing, positive = fields.only, fields.nothing, fields.positive
local COUNT, BOOLEAN, TABLE = fields.COUNT, fields.BOOLEAN, fields.TABLE
local M = {}

-- ---- fields that change nothing -------------------------------------------------------

--- Fields that change nothing here, in any family: what they are about -> names.
M.HARMLESS = {
  ["where it comes from"] = { "architectures", "transformers_version", "_name_or_path",
    "name_or_path", "_commit_hash", "is_llama_config", "transformers.js_config",
    "unsloth_version", "unsloth_fixed", "max_sequence_length" },
  ["dtype and kernels, which the caller chooses"] = { "dtype", "torch_dtype",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_flash_attn_2_enabled",
    "chunk_size_feed_forward", "torchscript", "use_bfloat16" },
  ["training"] = { "attention_dropout", "initializer_range", "pretraining_tp",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise" },
  ["tokens, which the tokenizer names"] = { "bos_token_id", "pad_token_id",
    "sep_token_id", "decoder_start_token_id", "tokenizer_class", "prefix" },
  ["what a call returns, or keeps"] = { "output_attentions", "output_hidden_states",
    "output_scores", "return_dict", "return_dict_in_generate", "use_cache",
    "use_return_dict", "tie_last_hidden_states", "cache_implementation", "is_decoder",
    "tie_encoder_decoder" },
  ["other tasks"] = { "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params" },
  ["how text is generated, which a request says"] = { "assistant_confidence_threshold",
    "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
    "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty",
    "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
    "typical_p" },
}

-- ---- fields of all families -----------------------------------------------------------

--- The sizes of a head that the kernels of attention have.
M.HEAD_DIM = { "a multiple of 8 from 8 to 256", function(x)
  return type(x) == "number" and x >= 8 and x <= 256 and x % 8 == 0
end }
--- The tokens that end a text: one id, or a list of them.
M.ENDS = options.either({ "a token id", options.whole[2] },
  { "a list of them", options.list_of(options.whole)[2] })
local EPS, HEAD_DIM = positive(1), M.HEAD_DIM
local WINDOW = nullable(COUNT, 4096)

local function base()
  local all = {
    model_type = known(options.string), head_dim = nullable(HEAD_DIM),
    num_key_value_heads = nullable(COUNT), rms_norm_eps = known(EPS, 1e-6),
    tie_word_embeddings = known(BOOLEAN, false), eos_token_id = nullable(M.ENDS),
    rope_parameters = nullable(TABLE), rope_scaling = nullable(TABLE),
    rope_theta = known(rope.THETA, 10000),
    original_max_position_embeddings = nullable(COUNT),
    partial_rotary_factor = nullable(only(1)),
    quantization_config = nullable(TABLE),
    attention_bias = known(only(false)), mlp_bias = known(only(false)),
    is_causal = known(only(true)), is_encoder_decoder = known(only(false)),
    add_cross_attention = known(only(false)),
    pruned_heads = nullable(nothing "pruned heads"),
    per_layer_config = nullable(nothing "layers of their own"),
    auto_map = nullable(nothing "code of the folder, which is not run"),
  }
  for reason, names in pairs(M.HARMLESS) do
    for _, name in ipairs(names) do all[name] = fields.harmless(reason) end
  end
  return all
end

--- Every field of a family: those of all, its own, and its sizes.
---@param sizes integer[]  defaults of vocab_size, hidden_size, intermediate_size,
--                         num_hidden_layers, num_attention_heads, max_position_embeddings
---@param own table<string, models.Field>
local function family(sizes, own)
  local all = base()
  for i, name in ipairs { "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "max_position_embeddings" } do
    all[name] = known(COUNT, sizes[i])
  end
  for name, field in pairs(own) do all[name] = field end
  return all
end

-- ---- families -------------------------------------------------------------------------

local CAUSAL = nullable { "false: a token sees no later one",
  function(x) return x == false end, only = false }
local SILU = known(only "silu", "silu")
local GELU = known(only "gelu_pytorch_tanh", "gelu_pytorch_tanh")
local CAP = positive(1e6)
local FACTOR = positive(1e6)

--- A size of a latent or of a rotated part, of which kernels take multiples of 8.
local LATENT = { "a multiple of 8 from 8 to 568", function(x)
  return type(x) == "number" and x >= 8 and x <= 568 and x % 8 == 0
end }
local KINDS_OF_LAYERS = { "a list of dense and sparse", function(x)
  return options.list_of(options.one_of("dense", "sparse"))[2](x)
end }
local ALL_INDEXED = { "a list of indexed_attention", function(x)
  return options.list_of(only "indexed_attention")[2](x)
end }

--- A family whose cache holds latents (lua/models/deepseek.lua): its own fields in place
-- of those that these families have in common.
local function latent_family(sizes, own)
  local all = {
    hidden_act = SILU, attention_bias = known(BOOLEAN, false),
    kv_lora_rank = known(LATENT, 512), qk_rope_head_dim = known(LATENT, 64),
    qk_nope_head_dim = known(COUNT, 128), v_head_dim = known(COUNT, 128),
    qk_head_dim = known(COUNT), n_routed_experts = known(COUNT),
    num_experts_per_tok = known(COUNT, 8), first_k_dense_replace = known(options.whole),
    moe_layer_freq = known(only(1)), num_nextn_predict_layers = known(options.whole),
    topk_method = known(only "noaux_tc", "noaux_tc"),
    scoring_func = known(only "sigmoid", "sigmoid"),
    auto_map = fields.harmless "what the folder's code computes is computed here",
    ep_size = fields.harmless "training", seq_aux = fields.harmless "training",
    aux_loss_alpha = fields.harmless "training",
  }
  for name, field in pairs(own) do all[name] = field end
  return family(sizes, all)
end

--- model_type -> its fields.
---@type table<string, table<string, models.Field>>
M.FAMILIES = {
  llama = family({ 32000, 4096, 11008, 32, 32, 2048 }, {
    hidden_act = SILU, attention_bias = known(BOOLEAN, false),
    rope_interleaved = known(only(false)), use_sliding_window = known(only(false)),
  }),
  mistral = family({ 32000, 4096, 14336, 32, 32, 131072 }, {
    hidden_act = SILU, num_key_value_heads = nullable(COUNT, 8), sliding_window = WINDOW,
  }),
  mixtral = family({ 32000, 4096, 14336, 32, 32, 131072 }, {
    hidden_act = SILU, num_key_value_heads = nullable(COUNT, 8),
    rms_norm_eps = known(EPS, 1e-5), sliding_window = nullable(COUNT),
    rope_theta = known(rope.THETA, 1000000), num_local_experts = known(COUNT),
    num_experts = known(COUNT), num_experts_per_tok = known(COUNT, 2),
  }),
  qwen2 = family({ 151936, 4096, 22016, 32, 32, 32768 }, {
    hidden_act = SILU, num_key_value_heads = nullable(COUNT, 32),
    head_dim = known(HEAD_DIM), use_sliding_window = known(BOOLEAN, false),
    sliding_window = WINDOW, max_window_layers = known(options.whole, 28),
    layer_types = nullable(TABLE), use_mrope = known(only(false)),
  }),
  qwen3 = family({ 151936, 4096, 22016, 32, 32, 32768 }, {
    hidden_act = SILU, num_key_value_heads = nullable(COUNT, 32),
    head_dim = known(HEAD_DIM, 128), attention_bias = known(BOOLEAN, false),
    use_sliding_window = known(BOOLEAN, false), sliding_window = WINDOW,
    max_window_layers = known(options.whole, 28), layer_types = nullable(TABLE),
  }),
  qwen3_moe = family({ 151936, 2048, 6144, 24, 32, 32768 }, {
    hidden_act = SILU, num_key_value_heads = known(COUNT, 4), head_dim = known(HEAD_DIM),
    attention_bias = known(BOOLEAN, false), use_sliding_window = known(BOOLEAN, false),
    sliding_window = WINDOW, max_window_layers = fields.harmless "no such layers here",
    num_experts = known(COUNT), num_local_experts = known(COUNT),
    num_experts_per_tok = known(COUNT, 8), moe_intermediate_size = known(COUNT, 768),
    norm_topk_prob = known(BOOLEAN, false), decoder_sparse_step = known(COUNT, 1),
    mlp_only_layers = nullable(options.list_of(options.whole)),
    shared_expert_intermediate_size = known(only(0)), use_qk_norm = known(only(true)),
    qkv_bias = known(only(false)),
  }),
  gemma2 = family({ 256000, 2304, 9216, 26, 8, 8192 }, {
    hidden_activation = GELU, hidden_act = GELU, num_key_value_heads = known(COUNT, 4),
    head_dim = known(HEAD_DIM, 256), tie_word_embeddings = known(BOOLEAN, true),
    query_pre_attn_scalar = known(COUNT, 256),
    sliding_window = known(COUNT, 4096),
    sliding_window_size = known(COUNT), layer_types = nullable(TABLE),
    attn_logit_softcapping = nullable(CAP, 50),
    final_logit_softcapping = nullable(CAP, 30), use_bidirectional_attention = CAUSAL,
  }),
  gemma3_text = family({ 262208, 2304, 9216, 26, 8, 131072 }, {
    hidden_activation = GELU, hidden_act = GELU, num_key_value_heads = known(COUNT, 4),
    head_dim = known(HEAD_DIM, 256), tie_word_embeddings = known(BOOLEAN, true),
    query_pre_attn_scalar = known(COUNT, 256),
    sliding_window = known(COUNT, 4096),
    sliding_window_pattern = known(COUNT, 6), _sliding_window_pattern = known(COUNT),
    layer_types = nullable(TABLE), rope_local_base_freq = known(rope.THETA, 10000),
    rope_theta = known(rope.THETA, 1000000),
    final_logit_softcapping = nullable(CAP), use_bidirectional_attention = CAUSAL,
    attn_logit_softcapping = nullable(nothing "transformers overlooks it in Gemma 3"),
  }),
  deepseek_v2 = latent_family({ 102400, 4096, 11008, 32, 32, 2048 }, {
    q_lora_rank = nullable(COUNT, 1536), num_experts = known(COUNT),
    n_shared_experts = known(COUNT, 2), num_experts_per_tok = fields.required(COUNT),
    moe_intermediate_size = known(COUNT, 1407), routed_scaling_factor = known(FACTOR, 1),
    n_group = nullable(COUNT), topk_group = nullable(COUNT),
    first_k_dense_replace = known(options.whole, 0),
    topk_method = known(options.one_of("greedy", "group_limited_greedy"), "greedy"),
    scoring_func = known(only "softmax", "softmax"),
    norm_topk_prob = nullable(only(false), false), rope_interleave = known(only(true)),
  }),
  deepseek_v3 = latent_family({ 129280, 7168, 18432, 61, 128, 4096 }, {
    q_lora_rank = nullable(COUNT, 1536), num_local_experts = known(COUNT),
    num_key_value_heads = nullable(COUNT, 128), n_shared_experts = known(COUNT, 1),
    moe_intermediate_size = known(COUNT, 2048),
    routed_scaling_factor = known(FACTOR, 2.5), n_group = known(COUNT, 8),
    topk_group = known(COUNT, 4), first_k_dense_replace = known(options.whole, 3),
    norm_topk_prob = nullable(BOOLEAN, true), rope_interleave = nullable(BOOLEAN, true),
    num_mtp_layers = known(options.whole),
  }),
  deepseek_v32 = latent_family({ 129280, 7168, 18432, 61, 128, 163840 }, {
    q_lora_rank = known(COUNT, 1536), num_local_experts = known(COUNT),
    num_experts = nullable(COUNT), num_key_value_heads = known(COUNT, 128),
    n_shared_experts = known(COUNT, 1), moe_intermediate_size = known(COUNT, 2048),
    routed_scaling_factor = known(FACTOR, 2.5), n_group = known(COUNT, 8),
    topk_group = known(COUNT, 4), first_k_dense_replace = known(options.whole, 3),
    mlp_layer_types = nullable(KINDS_OF_LAYERS), layer_types = nullable(ALL_INDEXED),
    norm_topk_prob = known(BOOLEAN, true), rope_interleave = known(only(true)),
    index_topk = known(COUNT, 2048), index_n_heads = known(COUNT, 64),
    index_head_dim = known(options.one_of(32, 64, 128), 128),
  }),
  glm4_moe_lite = latent_family({ 154880, 2048, 10240, 47, 20, 202752 }, {
    q_lora_rank = nullable(COUNT, 768), qk_nope_head_dim = known(COUNT, 192),
    v_head_dim = known(COUNT, 256), num_local_experts = known(COUNT),
    num_key_value_heads = known(COUNT, 20), n_shared_experts = known(COUNT, 1),
    num_experts_per_tok = known(COUNT, 4), moe_intermediate_size = known(COUNT, 1536),
    routed_scaling_factor = known(FACTOR, 1.8), n_group = known(COUNT, 1),
    topk_group = known(COUNT, 1), mlp_layer_types = nullable(KINDS_OF_LAYERS),
    norm_topk_prob = known(BOOLEAN, true), rope_interleave = known(BOOLEAN, true),
    rms_norm_eps = known(EPS, 1e-5),
  }),
}

--- The families that have a field, in words for an error; nil for none.
local function families_with(name)
  local list = {}
  for _, family_name in ipairs(sorted.keys(M.FAMILIES)) do
    if M.FAMILIES[family_name][name] then list[#list + 1] = family_name end
  end
  return #list > 0 and table.concat(list, ", ") or nil
end

--- Reads a config.
---@param path string    where it stands, for errors
---@param raw table      as JSON has it, with json.null
---@param families string[]  the model_types that the caller computes
---@return table values  see fields.read
function M.read(path, raw, families)
  for _, name in ipairs(families) do
    if name == raw.model_type then
      return fields.read(path, name, raw, M.FAMILIES[name], families_with)
    end
  end
  return fields.refuse(path, "model_type", raw.model_type, fields.one_of(families))
end

--- The names of the families, sorted.
M.NAMES = sorted.keys(M.FAMILIES)

return M
