--- The forward pass against Hugging Face transformers (tools/hf_goldens.py made the
-- goldens), and the equalities that hold for every model: chunked, decoded, batched,
-- forked. Tolerance: f32 against f32 over two layers, sums in another order: 2e-4 of
-- logits that are O(1) to O(10).
local families = require "models.families"
local files = require "kvlab.files"
local gemma = require "models.gemma"
local kv = require "kvlab"
local json = require "kvlab.json"
local llama = require "models.llama"
local support = require "spec.support"
local temporary = require "spec.temporary"

local NAMES = { "llama", "llama3", "qwen2", "qwen3", "yarn", "yarn_mscale", "dynamic",
                "mistral", "qwen3_window", "mixtral", "qwen3_moe",
                "qwen3_moe_some", "gemma2", "gemma3", "deepseek_v2",
                "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_apart",
                "deepseek_v32", "glm4_moe_lite" }

local function folder(name) return kv.paths.root .. "/spec/data/hf/" .. name end

local function golden(name)
  local file = assert(io.open(folder(name) .. "/golden.json"))
  local g = json.decode(file:read "*a")
  file:close()
  local flat = {}
  for _, row in ipairs(g.logits) do
    for _, x in ipairs(row) do flat[#flat + 1] = x end
  end
  return g.tokens, flat
end

local function load(name, dev)
  -- the golden of `dynamic` is of 40 tokens read at once
  local o = { device = dev, dtype = "f32", context = name == "dynamic" and 40 or nil }
  return families.load(folder(name), o)
end

local function check(dev)
  for _, name in ipairs(NAMES) do
    describe(name .. " on " .. dev:name(), function()
      local tokens, logits = golden(name)
      local model = load(name, dev)
      local vocab = model.config.vocab

      it("gives the logits of transformers", function()
        local engine = model:engine { blocks = 16 }
        local got = engine:prefill_all(engine:sequence(), tokens)
        support.close(got, logits, 2e-4, 2e-4, name)
      end)

      it("gives them in any chunking", function()
        for _, chunk in ipairs { 1, 3, 16, 17 } do
          local engine = model:engine { blocks = 16, chunk = chunk, block_size = 8 }
          local got = engine:prefill_all(engine:sequence(), tokens)
          support.close(got, logits, 2e-4, 2e-4, name .. " chunk " .. chunk)
        end
      end)

      it("gives them when it decodes after a prefill", function()
        local engine = model:engine { blocks = 16 }
        local seq, cut = engine:sequence(), #tokens - 5
        local head = {}
        for i = 1, cut do head[i] = tokens[i] end
        local got = engine:prefill(seq, head)
        for at = cut, #tokens do
          local want = {}
          for i = 1, vocab do want[i] = logits[(at - 1) * vocab + i] end
          support.close(got, want, 2e-4, 2e-4, name .. " token " .. at)
          if at < #tokens then got = engine:decode({ seq }, { tokens[at + 1] }) end
        end
      end)

      it("gives them when a graph replays the steps", function()
        local engine = model:engine { blocks = 16, graph = true }
        local seq, cut = engine:sequence(), #tokens - 5
        local head = {}
        for i = 1, cut do head[i] = tokens[i] end
        engine:prefill(seq, head)
        for at = cut + 1, #tokens do
          local got, want = engine:decode({ seq }, { tokens[at] }), {}
          for i = 1, vocab do want[i] = logits[(at - 1) * vocab + i] end
          support.close(got, want, 2e-4, 2e-4, name .. " token " .. at)
        end
      end)

      it("gives them to sequences of a batch and to forks", function()
        local engine = model:engine { blocks = 32 }
        local seq, other = engine:sequence(), engine:sequence()
        local head, last = {}, tokens[#tokens]
        for i = 1, #tokens - 1 do head[i] = tokens[i] end
        engine:prefill(seq, head)
        engine:prefill(other, { 5, 9, 2 })
        local fork = seq:fork()
        local got = engine:decode({ fork, other, seq }, { last, 1, last })
        local want = {}
        for i = 1, vocab do want[i] = logits[(#tokens - 1) * vocab + i] end
        support.close(got:index(0), want, 2e-4, 2e-4, "fork")
        support.close(got:index(2), want, 2e-4, 2e-4, "original")
      end)
    end)
  end
end

support.each_device(check)

describe("a model with windows", function()
  local tokens, logits = golden "qwen3_window"

  -- A budget of one block would be far from the golden in the layer that sees everything,
  -- so that layer's policy is full where the others' are not asked.
  it("reads its windows whole, whatever the policy of the other layers", function()
    local model = load("qwen3_window", kv.device "cpu")
    local asked = {}
    local policy = kv.policy.define {
      name = "asked", decode = true,
      select_blocks = function(_, ctx)
        asked[ctx.layer] = true
        return ctx:everything()
      end,
    }
    local tiers = { resident = false, ring = { slots = 2, slot_blocks = 1 },
                    hot = { slots = 2, slot_blocks = 1, hot_slots = 5 } }
    for name, offload in pairs(tiers) do
      local engine = model:engine { blocks = 5, block_size = 8, policy = policy(),
                                    offload = offload or nil }
      local seq, head = engine:sequence(), {}
      for i = 1, #tokens - 1 do head[i] = tokens[i] end
      engine:prefill(seq, head)
      local got, want = engine:decode({ seq }, { tokens[#tokens] }), {}
      for i = 1, model.config.vocab do
        want[i] = logits[(#tokens - 1) * model.config.vocab + i]
      end
      support.close(got, want, 2e-4, 2e-4, name)
    end
    assert.same({ [0] = true }, asked)
  end)

  it("is counted as the blocks that hold the window", function()
    local model = load("qwen3_window", kv.device "cpu")
    local engine = model:engine { blocks = 16, block_size = 8 }
    local seq, head = engine:sequence(), {}
    for i = 1, #tokens - 1 do head[i] = tokens[i] end
    engine:prefill(seq, head)
    local seen = {}
    local probe = kv.probe(engine.attention)
    probe.observe = function(_, _, ctx, selection)
      seen[ctx.layer] = { probe.reads.blocks_layer, selection and selection:list() }
    end
    local got, want = engine:decode({ seq }, { tokens[#tokens] }), {}
    for i = 1, model.config.vocab do
      want[i] = logits[(#tokens - 1) * model.config.vocab + i]
    end
    support.close(got, want, 2e-4, 2e-4, "selected")
    -- 40 tokens in 5 blocks; the last 9 tokens are in 2 of them
    assert.same({ [0] = { 5 }, { 2, { 3, 4 } }, { 2, { 3, 4 } } }, seen)
  end)

  it("has one for every layer", function()
    local cache = kv.cache { device = "cpu", layers = 2, blocks = 4, kv_heads = 1,
                             head_dim = 16, block_size = 8, format = "f32" }
    support.raises("attention: window has 3 entries, expected one for each of 2 layers",
      kv.attention, { cache = cache, heads = 1, window = { 1, 2, 3 } })
  end)

  it("has fields that are checked", function()
    local config = { model_type = "qwen3", hidden_act = "silu", hidden_size = 32,
      intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 2,
      num_key_value_heads = 2, head_dim = 16, vocab_size = 50,
      use_sliding_window = true, sliding_window = 8 }
    local function refused(words, field, value)
      local changed = {}
      for name, old in pairs(config) do changed[name] = old end
      changed[field] = value
      support.raises(words, llama.random, changed, { device = "cpu" })
    end
    refused("sliding_window is 0.5, expected a whole number", "sliding_window", 0.5)
    refused("layer_types is 1 entries, expected 2 entries", "layer_types",
      { "full_attention" })
    refused("layer_types is linear, expected sliding_attention or full_attention",
      "layer_types", { "full_attention", "linear" })
    local model = llama.random(config, { device = "cpu" })
    assert.same({ 0, 0 }, model.config.windows) -- max_window_layers is 28
  end)
end)

describe("llama.load", function()
  local function fails(words, change)
    local dir = temporary.folder()
    local copy = ("cp '%s'/* '%s'"):format(folder "llama", dir)
    assert(os.execute(copy) == 0)
    local file = assert(io.open(dir .. "/config.json"))
    local text = file:read "*a"
    file:close()
    file = assert(io.open(dir .. "/config.json", "w"))
    file:write((change(text, dir)))
    file:close()
    local ok, why = pcall(llama.load, dir, { device = "cpu" })
    assert.is_false(ok)
    assert.truthy(why:find(words, 1, true), why)
  end

  it("names the field of a config that it cannot run", function()
    fails("model_type is gpt2", function(t) return t:gsub('"model_type": "llama"',
      '"model_type": "gpt2"') end)
    fails("hidden_act is gelu", function(t) return t:gsub('"silu"', '"gelu"') end)
    fails("num_hidden_layers is 1.5", function(t)
      return t:gsub('("num_hidden_layers": )%d+', "%11.5") end)
    fails("no tensor \"model.layers.2", function(t)
      return t:gsub('("num_hidden_layers": )%d+', "%13") end)
    fails("expected [", function(t) return t:gsub('("vocab_size": )%d+', "%1100") end)
    fails("config.json", function(t) return t:sub(1, 50) end)
  end)

  --- The config with further fields; of two with one name the last one counts.
  local function with(fields)
    return function(t) return t:gsub("}%s*$", "," .. fields .. "}") end
  end

  it("refuses sizes that no model has, at once", function()
    for _, field in ipairs { "head_dim", "hidden_size", "num_attention_heads",
      "num_key_value_heads", "num_hidden_layers", "vocab_size", "intermediate_size" } do
      for _, value in ipairs { "1e9", "1e300", "-1", "0", "1.5", '"8"', "[]", "true" } do
        fails("config.json: " .. field .. " is ", with(('"%s": %s'):format(field, value)))
      end
    end
  end)

  it("refuses heads that the kernels lack", function()
    for _, value in ipairs { 4, 12, 257, 264, 512 } do
      fails(("head_dim is %d, expected a multiple of 8 from 8 to 256"):format(value),
        with('"head_dim": ' .. value))
    end
    fails("num_attention_heads is 4, expected a multiple of num_key_value_heads, 3",
      with '"num_attention_heads": 4, "num_key_value_heads": 3')
  end)

  it("refuses rotary embeddings that transformers would compute otherwise", function()
    fails("partial_rotary_factor is 0.5, expected 1", with '"partial_rotary_factor": 0.5')
    fails("partial_rotary_factor is 0.5, expected 1",
      with '"rope_parameters": {"partial_rotary_factor": 0.5}')
    fails("rope_type is longrope, expected default, linear, dynamic, yarn or llama3",
      with '"rope_scaling": {"rope_type": "longrope"}')
    fails("beta_fast is x, expected a number > 0",
      with '"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": "x"}')
    fails("factor is nil, expected a number > 0",
      with '"rope_scaling": {"rope_type": "dynamic"}')
    fails("max_position_embeddings is 0, expected a whole number",
      with('"rope_scaling": {"type": "dynamic", "factor": 2},'
        .. '"max_position_embeddings": 0'))
    fails("rope_scaling is linear, expected a table", with '"rope_scaling": "linear"')
    fails("factor is nil, expected a number > 0",
      with '"rope_scaling": {"type": "linear"}')
    fails("factor is 0, expected a number > 0",
      with '"rope_scaling": {"type": "linear", "factor": 0}')
    fails("rope_theta is x, expected a number above 1", with '"rope_theta": "x"')
    fails("rms_norm_eps is x, expected a number > 0", with '"rms_norm_eps": "x"')
    local LLAMA3 = { factor = 8, low_freq_factor = 1, high_freq_factor = 4,
                     original_max_position_embeddings = 64 }
    for missing in pairs(LLAMA3) do
      local parts = { '"rope_type": "llama3"' }
      for name, value in pairs(LLAMA3) do
        if name ~= missing then parts[#parts + 1] = ('"%s": %d'):format(name, value) end
      end
      fails(missing .. " is nil, expected a number > 0",
        with(('"rope_scaling": {%s}'):format(table.concat(parts, ","))))
    end
    fails("high_freq_factor is 1, expected more than low_freq_factor, 1",
      with('"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,'
        .. '"high_freq_factor": 1, "original_max_position_embeddings": 64}'))
  end)

  it("names what is wrong with an index of shards", function()
    for text, words in pairs { ["{}"] = "weight_map is nil, expected a table",
      ['{"weight_map": 3}'] = "weight_map is 3",
      ['{"weight_map": {"model.embed_tokens.weight": 3}}'] = "is 3, expected a plain",
      ['{"weight_map": {"model.embed_tokens.weight": "../x"}}'] = "is ../x, expected" } do
      fails(words, function(t, dir)
        files.write(dir .. "/model.safetensors.index.json", text)
        os.remove(dir .. "/model.safetensors")
        return t
      end)
    end
  end)

  it("names a folder that is not there", function()
    local ok, why = pcall(llama.load, "/nonexistent", { device = "cpu" })
    assert.is_false(ok)
    assert.truthy(why:find "/nonexistent/config.json", why)
  end)
end)

describe("gemma.load", function()
  it("names the field of a config that it cannot run", function()
    for words, fields in pairs {
      ["model_type is gemma, expected gemma2 or gemma3_text"] = '"model_type": "gemma"',
      ["hidden_activation is gelu, expected gelu_pytorch_tanh"] =
        '"hidden_activation": "gelu"',
      ["attention_bias is true, expected false"] = '"attention_bias": true',
      ["use_bidirectional_attention is true, expected false: a token sees no later"] =
        '"use_bidirectional_attention": true',
      ["attn_logit_softcapping is 50, expected null: transformers overlooks it"] =
        '"attn_logit_softcapping": 50',
      ["final_logit_softcapping is -1, expected a number > 0"] =
        '"final_logit_softcapping": -1',
      ["sliding_window is null, expected a whole number"] = '"sliding_window": null',
      ["layer_types is 1 entries, expected 3"] = '"layer_types": ["full_attention"]',
      ["query_pre_attn_scalar is x, expected a whole number"] =
        '"query_pre_attn_scalar": "x"',
      ["rope_type is yarn, expected one that leaves the scale"] =
        '"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_parameters": null',
      ["rope_type is longrope"] =
        '"rope_parameters": {"sliding_attention": {"rope_type": "longrope"},'
        .. '"full_attention": {"rope_type": "default"}}',
    } do
      local dir = temporary.folder()
      local text = files.read(folder "gemma3" .. "/config.json")
      files.write(dir .. "/config.json", (text:gsub("}%s*$", "," .. fields .. "}")))
      os.execute(("cp '%s/model.safetensors' '%s'"):format(folder "gemma3", dir))
      support.raises(words, gemma.load, dir, { device = "cpu", dtype = "f32" })
    end
  end)
end)

describe("options of llama", function()
  local CONFIG = {
    model_type = "llama", hidden_act = "silu", hidden_size = 32, intermediate_size = 48,
    num_hidden_layers = 1, num_attention_heads = 2, vocab_size = 50,
  }

  --- fn() raises, blames its own line, and says `words`.
  local function refused(words, fn)
    local ok, text = pcall(fn)
    assert.is_false(ok)
    local line = debug.getinfo(fn, "S").linedefined
    assert.truthy(text:find("llama_spec.lua:" .. line .. ":", 1, true), text)
    assert.truthy(text:find(words, 1, true), text)
  end

  it("are refused by name and type", function()
    refused('llama.load: "dtpye" is no option, did you mean dtype?',
      function() llama.load(folder "llama", { dtpye = "f32" }) end)
    refused('llama.load: dtype is "i32", expected one of f32, f16, bf16',
      function() llama.load(folder "llama", { dtype = "i32" }) end)
    refused("llama.load: device is 3, expected a device or its name",
      function() llama.load(folder "llama", { device = 3 }) end)
    refused('llama.random: "sede" is no option, did you mean seed?',
      function() llama.random(CONFIG, { sede = 1 }) end)
    refused("llama.random: seed is 0.5, expected a whole number",
      function() llama.random(CONFIG, { seed = 0.5 }) end)
  end)

  it("leave the config of a random model as it is", function()
    local before = {}
    for name, value in pairs(CONFIG) do before[name] = value end
    local small = llama.random(CONFIG, { device = "cpu", seed = 3 })
    assert.same(before, CONFIG)
    assert.equal(16, small.config.head_dim)
    assert.equal(2, small.config.kv_heads)
  end)
end)

describe("an engine", function()
  local model = load("llama", kv.device "cpu")

  it("refuses tokens that are not ids and stays usable", function()
    local engine = model:engine { blocks = 8 }
    local seq = engine:sequence()
    for words, bad in pairs { ["token 1 is 9999"] = { 1, 9999 },
                              ["token 0 is -1"] = { -1 }, ["empty"] = {},
                              ["token 0 is 1.5"] = { 1.5 } } do
      local ok, why = pcall(engine.prefill, engine, seq, bad)
      assert.is_false(ok)
      assert.truthy(why:find(words, 1, true), why)
    end
    assert.equal(0, seq:length())
    assert.same({ 1, model.config.vocab }, engine:prefill(seq, { 1, 2 }):dims())
  end)

  it("runs out of blocks with words, and goes on when some are freed", function()
    local engine = model:engine { blocks = 4, block_size = 8 }
    local a, b = engine:sequence(), engine:sequence()
    local long = {}
    for i = 1, 24 do long[i] = i end
    engine:prefill(a, long)
    local ok, why = pcall(engine.prefill, engine, b, long)
    assert.is_false(ok)
    assert.truthy(why:find "out of blocks: 3 wanted, 1 of 4 free", why)
    a:close()
    engine:prefill(b, long)
    assert.equal(24, b:length())
  end)

  it("generates what step by step decoding gives", function()
    local engine = model:engine { blocks = 16 }
    local seq = engine:sequence()
    local ids = engine:generate(seq, engine:prefill(seq, { 3, 1, 4, 1, 5 }), 6)
    local again = engine:sequence()
    local all = { 3, 1, 4, 1, 5 }
    for i = 1, 6 do
      local next_id = engine:prefill(again, all):argmax():list()[1]
      assert.equal(ids[i], next_id)
      all[#all + 1] = next_id
      again:truncate(0)
    end
  end)

  it("tells its policies when a sequence begins and is done", function()
    local heard = {}
    local function hear(what)
      return function(self, seq)
        heard[#heard + 1] = what
        seq.state[self.name] = what
      end
    end
    local policy = kv.policy.define {
      name = "listener", decode = true, select_blocks = function() end,
      request_begin = hear "begin", request_finished = hear "finished",
    }
    local engine = model:engine { blocks = 8, policy = policy() }
    local seq = engine:sequence()
    engine:prefill(seq, { 1, 2, 3 })
    engine:use_policy(policy(), { seq })
    local free = engine.cache:blocks_free()
    engine:finish(seq)
    assert.same({ "begin", "begin", "finished" }, heard)
    assert.equal("finished", seq.state.listener)
    assert.equal(free + 1, engine.cache:blocks_free())
  end)
end)
