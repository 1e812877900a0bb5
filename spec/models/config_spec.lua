--- models.config: what is read from the config.json of models as people publish them, and
-- what stands for a field that is left out. fields_spec.lua changes every field.
local config = require "models.config"
local families = require "models.families"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local support = require "spec.support"
local temporary = require "spec.temporary"

local HF = kv.paths.root .. "/spec/data/hf/"

--- Loads a copy of a model, whose config has other fields; false: one that is left out.
local function load(name, changes, o)
  local folder, fields = temporary.folder(), json.decode(files.read(HF .. name
    .. "/config.json"))
  for field, value in pairs(changes) do fields[field] = value or nil end
  files.write(folder .. "/config.json", json.encode(fields))
  os.execute(("ln -s '%s%s/model.safetensors' '%s'"):format(HF, name, folder))
  o = o or {}
  o.device = "cpu"
  return families.load(folder, o)
end

-- What the config.json of these models has besides sizes and what all have.
local PUBLISHED = {
  ["SmolLM2-135M"] = { model_type = "llama", is_llama_config = true,
    rope_interleaved = false, rope_scaling = json.null, rope_theta = 100000,
    pretraining_tp = 1, attention_bias = false, initializer_range = 0.041666666666666664,
    tie_word_embeddings = true, hidden_act = "silu", torch_dtype = "bfloat16" },
  ["Qwen2-7B-Instruct"] = { model_type = "qwen2", max_window_layers = 28,
    sliding_window = 131072, use_sliding_window = false, rope_theta = 1000000,
    num_key_value_heads = 4, hidden_size = 3584, num_attention_heads = 28,
    eos_token_id = 151645, transformers_version = "4.41.2", use_cache = true },
  ["gemma-2-9b"] = { model_type = "gemma2", _name_or_path = "google/gemma-2-9b",
    attn_logit_softcapping = 50, final_logit_softcapping = 30,
    query_pre_attn_scalar = 256, cache_implementation = "hybrid",
    hidden_act = "gelu_pytorch_tanh", hidden_activation = "gelu_pytorch_tanh",
    sliding_window = 4096, sliding_window_size = 4096, attention_dropout = 0,
    pad_token_id = 0 },
}

describe("a config", function()
  it("of a published model is read", function()
    for _, fields in pairs(PUBLISHED) do
      local values = config.read("config.json", fields, config.NAMES)
      assert.equal(fields.model_type, values.model_type)
    end
  end)

  it("without a window has that of its family", function()
    assert.same({ 4096, 4096 },
      load("mistral", { sliding_window = false }).config.windows)
    assert.is_nil(load("mistral", { sliding_window = json.null }).config.windows)
    assert.same({ 4096, 0, 4096 },
      load("gemma2", { sliding_window = false }).config.windows)
    assert.is_nil(load("mixtral", { sliding_window = false }).config.windows)
  end)

  it("says which tokens end a text, unless generation_config.json does", function()
    local function ends(of_config, text)
      local folder = temporary.folder()
      local fields = json.decode(files.read(HF .. "llama/config.json"))
      fields.eos_token_id = of_config
      files.write(folder .. "/config.json", json.encode(fields))
      if text then files.write(folder .. "/generation_config.json", text) end
      os.execute(("ln -s '%sllama/model.safetensors' '%s'"):format(HF, folder))
      return families.load(folder, { device = "cpu" }).config.ends
    end
    assert.same({ 7 }, ends(7))
    assert.same({ 1, 106 }, ends { 1, 106 })
    assert.same({}, ends(json.null))
    assert.same({}, ends(nil))
    assert.same({ 5, 6 }, ends(7, '{"eos_token_id": [5, 6], "temperature": 0.6}'))
    assert.same({ 7 }, ends(7, '{"eos_token_id": null, "top_p": 0.9}'))
    support.raises("generation_config.json: eos_token_id is x, expected a token id or a "
      .. "list of them", ends, 7, '{"eos_token_id": "x"}')
    support.raises("config.json: eos_token_id is -1, expected a token id", ends, -1)
  end)

  it("of another family is refused with the names of those that are known", function()
    support.raises("config.json: model_type is gpt2, expected deepseek_v2, deepseek_v3, "
      .. "deepseek_v32, gemma2, gemma3_text, glm4_moe_lite, llama, mistral, mixtral, "
      .. "qwen2, qwen3 or qwen3_moe", load, "llama", { model_type = "gpt2" })
    support.raises("config.json: model_type is nil, expected deepseek_v2", load, "llama",
      { model_type = false })
  end)

  it("of Gemma stretches to the context that is asked for", function()
    local o = { context = 40 }
    local gemma = load("gemma2", { max_position_embeddings = 16, rope_parameters =
      { rope_type = "dynamic", rope_theta = 1000, factor = 3 } }, o)
    local same = llama.load(HF .. "dynamic", { device = "cpu", context = 40 })
    assert.same(same.config.inv_freq, gemma.config.inv_freq)
    assert.equal(40, gemma.config.context)
  end)
end)
