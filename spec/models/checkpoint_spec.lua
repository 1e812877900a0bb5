--- What a folder of a model holds beside its config: every tensor is read, or is known to
-- change nothing, or is refused by its name.
local families = require "models.families"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local support = require "spec.support"
local temporary = require "spec.temporary"

local HF = kv.paths.root .. "/spec/data/hf/"
local O = { device = "cpu", dtype = "f32" }

local function read(path) return json.decode(assert(files.read(path))) end

--- The config and the tensors of a folder.
local function parts(name)
  local file, tensors = kv.safetensors(HF .. name .. "/model.safetensors"), {}
  for _, tensor in ipairs(file.names) do tensors[tensor] = file:read(tensor, "cpu") end
  return read(HF .. name .. "/config.json"), tensors
end

local function write(config, tensors)
  local folder = temporary.folder()
  files.write(folder .. "/config.json", json.encode(config))
  kv.safetensors.save(folder .. "/model.safetensors", tensors)
  return folder
end

--- Loads a copy of a model, changed by change(config, tensors, folder).
local function load(name, change)
  local config, tensors = parts(name)
  local late = change(config, tensors)
  local folder = write(config, tensors)
  if late then late(folder) end
  return families.load(folder, O)
end

local function logits(model)
  local engine = model:engine { blocks = 8 }
  return engine:prefill_all(engine:sequence(), { 3, 1, 4, 1, 5, 9, 2, 6 }):list()
end

describe("a tensor of a folder", function()
  it("is refused by its name when the model does not read it", function()
    for _, name in ipairs { "model.layers.0.self_attn.q_proj.bias",
      "model.layers.7.mlp.up_proj.weight", "score.weight", "lm_head.bias",
      "model.layers.0.self_attn.q_proj.lora_A.weight" } do
      for _, family in ipairs { "llama", "gemma3" } do
        support.raises(('tensor "%s" is no part of '):format(name), load, family,
          function(_, tensors) tensors[name] = kv.full("cpu", "f32", { 4 }, 1) end)
      end
    end
  end)

  it("may be a table of frequencies, which older versions wrote", function()
    local plain = logits(load("llama", function() end))
    assert.same(plain, logits(load("llama", function(_, tensors)
      for _, at in ipairs { "model.", "model.layers.0.self_attn." } do
        tensors[at .. "rotary_emb.inv_freq"] = kv.full("cpu", "f32", { 8 }, 1)
      end
    end)))
  end)

  it("is refused when it is no float", function()
    for _, dtype in ipairs { "i32", "u8", "i64", "f8e4m3" } do
      support.raises(('tensor "model.norm.weight" is %s, expected a float'):format(dtype),
        load, "llama", function(_, tensors)
          tensors["model.norm.weight"] = kv.full("cpu", "f32", { 64 }, 1):cast(dtype)
        end)
    end
  end)
end)

describe("an output head beside tied embeddings", function()
  local function add_head(config, tensors, scale)
    config.tie_word_embeddings = true
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale
  end

  it("is used if it differs, as transformers does", function()
    local both = load("mistral", function(c, t) add_head(c, t, 2) end)
    local untied = load("mistral", function(config, tensors)
      add_head(config, tensors, 2)
      config.tie_word_embeddings = false
    end)
    local tied = logits(load("mistral", function() end))
    assert.same(logits(untied), logits(both))
    assert.are_not.same(tied, logits(both))
  end)

  it("is the embedding if it is the same", function()
    local model = load("mistral", function(c, t) add_head(c, t, 1) end)
    assert.equal(model.embedding, model.head)
    assert.same(logits(load("mistral", function() end)), logits(model))
  end)
end)

describe("a folder in shards", function()
  --- The llama folder in two shards, changed by change(map, shards).
  local function load_shards(change)
    local config, tensors = parts "llama"
    local folder, map, shards = temporary.folder(), {}, { a = {}, b = {} }
    for name, t in pairs(tensors) do
      local shard = name:find "layers" and "a" or "b"
      map[name], shards[shard][name] = shard .. ".safetensors", t
    end
    change(map, shards)
    files.write(folder .. "/config.json", json.encode(config))
    files.write(folder .. "/model.safetensors.index.json",
      json.encode { metadata = { total_size = 1 }, weight_map = map })
    for name, shard in pairs(shards) do
      kv.safetensors.save(("%s/%s.safetensors"):format(folder, name), shard)
    end
    return llama.load(folder, O)
  end

  it("gives the logits of the folder in one file", function()
    assert.same(logits(llama.load(HF .. "llama", O)),
      logits(load_shards(function() end)))
  end)

  it("is refused when its index and its files differ", function()
    local NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    support.raises('no tensor "model.norm.weight" in the index', load_shards,
      function(map) map[NORM] = nil end)
    support.raises('b.safetensors has no tensor "model.norm.weight"', load_shards,
      function(_, shards) shards.b[NORM] = nil end)
    support.raises("/b.safetensors: ", load_shards, function(_, s) s.b = nil end)
    support.raises(('tensor "%s of b.safetensors" is no part of llama'):format(Q),
      load_shards, function(_, shards) shards.b[Q] = shards.a[Q] end)
    support.raises('tensor "other.weight" is no part of llama', load_shards,
      function(map) map["other.weight"] = "c.safetensors" end)
  end)

  it("is refused beside the weights in one file", function()
    support.raises("has both model.safetensors and model.safetensors.index.json", load,
      "llama", function()
        return function(folder)
          files.write(folder .. "/model.safetensors.index.json", '{"weight_map": {}}')
        end
      end)
  end)
end)

describe("a folder", function()
  it("with an adapter is refused", function()
    support.raises("has an adapter_config.json, expected a whole model", load, "llama",
      function()
        return function(folder) files.write(folder .. "/adapter_config.json", "{}") end
      end)
  end)

  it("whose config has numbers that JSON has not is refused", function()
    for _, word in ipairs { "NaN", "Infinity", "-Infinity" } do
      support.raises("config.json: ", load, "llama", function(config)
        return function(folder)
          local text = json.encode(config):gsub('"rms_norm_eps": [^,}]*',
            '"rms_norm_eps": ' .. word)
          assert.truthy(text:find(word, 1, true))
          files.write(folder .. "/config.json", text)
        end
      end)
    end
  end)
end)
