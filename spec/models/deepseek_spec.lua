--- Families with latent attention, beyond what llama_spec.lua compares with transformers
-- for every family. golden_sparse.json has the logits of DeepSeek-V3.2 with 12 selected
-- tokens, by an indexer that rotates and rounds as DeepSeek's does (tools/hf_goldens.py).
-- Tolerance: f32 against f32, as in llama_spec.lua.
local deepseek = require "models.deepseek"
local families = require "models.families"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local TOLERANCE = 2e-4
local NAMES = { "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_apart",
                "deepseek_v32", "glm4_moe_lite" }

local function folder(name) return kv.paths.root .. "/spec/data/hf/" .. name end
local function read(path) return json.decode(assert(files.read(path))) end

local function load(name, dev)
  return families.load(folder(name), { device = dev or "cpu", dtype = "f32" })
end

local function first(list, n)
  local head = {}
  for i = 1, n do head[i] = list[i] end
  return head
end

--- Raises unless logits [n, vocab] are those of golden's tokens from number `at` on.
local function check(golden, logits, at, words)
  for row = 0, logits:size(0) - 1 do
    support.close(logits:index(row), golden.logits[at + row], TOLERANCE, TOLERANCE,
      ("%s, token %d"):format(words, at + row))
  end
end

--- The published policy, for `topk` tokens.
local function dsa(topk, more)
  local o = { granularity = "token", index = "model", index_topk = topk, min_blocks = 0,
              sink = 0, recent = 0 }
  for key, value in pairs(more or {}) do o[key] = value end
  return kv.policy("nsa", o)
end

describe("a cache of a model with latents", function()
  it("holds one latent and one rotated part for a token", function()
    for _, name in ipairs(NAMES) do
      local model = load(name)
      local cache = model:engine({ blocks = 4 }).cache
      assert.equal((16 + 8) * 4, cache:bytes_token())
      assert.same({ 1, 24, 16 }, { cache.kv_heads, cache.head_dim, cache.value_dim })
    end
  end)

  it("gives the golden where prefills expand latents", function()
    for _, name in ipairs(NAMES) do
      local golden = read(folder(name) .. "/golden.json")
      for _, chunk in ipairs { 512, 17, 1 } do
        local engine = load(name):engine { blocks = 16, block_size = 8, expand = true,
                                           chunk = chunk }
        local seq = engine:sequence()
        check(golden, engine:prefill_all(seq, first(golden.tokens, 39)), 1,
          ("%s, chunk %d"):format(name, chunk))
        check(golden, engine:decode({ seq }, { golden.tokens[40] }), 40, name)
      end
    end
  end)

  it("gives the golden to policies whose budget is everything", function()
    for name, policies in pairs {
      deepseek_v2 = { quest = { ratio = 1 }, block_mean = { ratio = 1 },
                      streaming_blocks = { ratio = 1 } },
      glm4_moe_lite = { quest = { blocks = 9 }, oracle = { ratio = 1 } },
      deepseek_v32 = { quest = { tokens = 64 }, topk = { ratio = 1 },
                       nsa = { ratio = 1, index = "random", granularity = "token" } },
    } do
      local model, golden = load(name), read(folder(name) .. "/golden.json")
      for policy, options in pairs(policies) do
        local engine = model:engine { blocks = 16, block_size = 8,
                                      policy = kv.policy(policy, options) }
        local seq = engine:sequence()
        engine:prefill(seq, first(golden.tokens, 30))
        for at = 31, #golden.tokens do
          check(golden, engine:decode({ seq }, { golden.tokens[at] }), at,
            name .. " by " .. policy)
        end
      end
    end
  end)

  it("differs from the golden where a policy reads less", function()
    local golden = read(folder "deepseek_v3" .. "/golden.json")
    local engine = load("deepseek_v3"):engine { blocks = 16, block_size = 8,
      policy = kv.policy("quest", { blocks = 2, min_blocks = 0, sink = 0, recent = 1 }) }
    local seq = engine:sequence()
    engine:prefill(seq, first(golden.tokens, 39))
    local logits = engine:decode({ seq }, { golden.tokens[40] })
    assert.is_false(pcall(check, golden, logits, 40, "quest"))
  end)
end)

-- ---- the indexer of DeepSeek-V3.2 -----------------------------------------------------

support.each_device(function(dev)
  describe("DeepSeek-V3.2 on " .. dev:name(), function()
    local golden = read(folder "deepseek_v32" .. "/golden_sparse.json")
    local whole = read(folder "deepseek_v32" .. "/golden.json")
    local model = load("deepseek_v32", dev)
    local tokens = golden.tokens

    local function sparse(more)
      local policy = dsa(12)
      local o = { blocks = 32, block_size = 8, prefill_policy = policy, policy = policy }
      for key, value in pairs(more or {}) do o[key] = value end
      return model:engine(o)
    end

    it("reads the tokens that its indexer selects, in any chunking", function()
      for _, chunk in ipairs { 512, 17, 8, 1 } do
        local engine = sparse { chunk = chunk }
        check(golden, engine:prefill_all(engine:sequence(), tokens), 1, "chunk " .. chunk)
      end
    end)

    it("decodes by them, and in a graph", function()
      for _, graph in ipairs { false, true } do
        local engine = sparse { graph = graph, max_blocks = 8 }
        local seq = engine:sequence()
        check(golden, engine:prefill(seq, first(tokens, 9)), 9, "prefill")
        for at = 10, #tokens do
          check(golden, engine:decode({ seq }, { tokens[at] }), at,
            graph and "graph" or "decode")
        end
      end
    end)

    it("verifies drafts, and takes tokens back", function()
      local engine = sparse()
      local seq = engine:sequence()
      engine:prefill(seq, first(tokens, 30))
      local given = { tokens[31], tokens[32], 7, 9 }
      local logits = engine:verify({ seq }, { 4 }, given)
      check(golden, logits:narrow(0, 2), 31, "verified")
      engine:take_back { 2 }
      for at = 33, #tokens do
        check(golden, engine:decode({ seq }, { tokens[at] }), at, "after a draft")
      end
    end)

    -- Who writes first to a block that is shared gets a copy of it, with its index keys.
    it("selects the same in batches and forks", function()
      local engine = sparse()
      local seq, other = engine:sequence(), engine:sequence()
      engine:prefill(seq, first(tokens, 38))
      engine:prefill(other, { 5, 9, 2 })
      local fork = seq:fork()
      local logits = engine:decode({ fork, other, seq }, { tokens[39], 1, tokens[39] })
      check(golden, logits:narrow(0, 1), 39, "fork")
      check(golden, logits:narrow(2, 1), 39, "original")
      check(golden, engine:decode({ fork }, { tokens[40] }), 40, "fork")
      check(golden, engine:decode({ seq }, { tokens[40] }), 40, "original")
    end)

    it("reads the keys of a dense prefill", function()
      local engine = sparse { prefill_policy = kv.policy "full" }
      local seq = engine:sequence()
      check(whole, engine:prefill(seq, first(tokens, 12)), 12, "all of 12 tokens")
      for at = 13, #tokens do
        check(golden, engine:decode({ seq }, { tokens[at] }), at, "decode")
      end
    end)

    it("decodes by them with latents in host memory", function()
      local engine = model:engine { blocks = 16, block_size = 8, policy = dsa(12),
                                    offload = { hot_tokens = 20 } }
      local seq = engine:sequence()
      engine:prefill(seq, first(tokens, 12))
      for at = 13, #tokens do
        check(golden, engine:decode({ seq }, { tokens[at] }), at, "host memory")
      end
    end)

    --- What a server says after `prompt`, and the request.
    local function served(server, prompt, attention)
      local r = assert(server:submit { tokens = prompt, max_tokens = 4,
                                       attention = attention })
      server:run()
      return table.concat(r:output(), " "), r
    end

    it("shares blocks on a server with requests of the same policy", function()
      local longer, other = first(tokens, 30), { tokens[1] + 1 }
      longer[31], longer[32], longer[33] = 7, 9, 11
      for i = 2, 20 do other[i] = tokens[i] end
      local engine = sparse { blocks = 64 }
      local server = kv.serve { engine = engine, max_seqs = 2 }
      served(server, first(tokens, 30))
      local said, request = served(server, longer)
      assert.equal(3, request.blocks_shared)
      local alone = kv.serve { engine = sparse { blocks = 64 }, max_seqs = 2 }
      assert.equal(served(alone, longer), said)
      -- blocks of another policy have no index keys, or old ones
      local full = engine:attention_of(kv.policy "full")
      local _, dense = served(server, other, full)
      assert.equal(0, dense.blocks_shared)
      said, request = served(server, other)
      assert.equal(0, request.blocks_shared)
      assert.equal(served(alone, other), said)
      -- nor are blocks of a sparse prefill those of a dense one
      _, dense = served(server, longer, full)
      assert.equal(0, dense.blocks_shared)
      server:close()
      alone:close()
    end)

    it("shares blocks of a store that has the keys of its indexer, too", function()
      local longer = first(tokens, 30)
      longer[31], longer[32], longer[33] = 7, 9, 11
      for _, pool in ipairs { 1, 4 } do
        local store = kv.store("memory:", { model = "v32", block_size = 8 })
        local function serve(prompt, given, name)
          local policy = name or dsa(12, { index_pool = pool })
          local server = kv.serve { engine = sparse { blocks = 64, policy = policy,
            prefill_policy = kv.policy "full" }, store = given, max_seqs = 2 }
          local said, request = served(server, prompt)
          server:close()
          return said, request.blocks_loaded
        end
        local alone = serve(longer)
        serve(longer, store, kv.policy "full") -- leaves K and V alone, which do not help
        assert.same({ alone, 0 }, { serve(longer, store) })
        assert.same({ alone, 4 }, { serve(longer, store) })
        local keys = store:keys(longer)
        local last = model.config.layers * 2 - 1
        assert.is_true(store:remove(keys + 2, last)) -- an index key of the third block
        assert.same({ alone, 2 }, { serve(longer, store) })
        -- found, and gone when the latents have arrived
        local get = store.get_block
        store.get_block = function(self, key, layer, ...)
          if layer == last and key.lo == keys[1].lo then return nil end
          return get(self, key, layer, ...)
        end
        assert.same({ alone, 1 }, { serve(longer, store) })
        store.get_block = function() error "no connection" end
        assert.same({ alone, 0 }, { serve(longer, store) })
        store:close()
      end
    end)

    it("shows other policies the blocks that it takes from a store", function()
      local prompt, other = first(tokens, 33), {}
      for i = 1, 20 do other[i] = tokens[i] + 1 end
      local store = kv.store("memory:", { model = "v32 quest", block_size = 8 })
      local function serve(given, before)
        local quest = kv.policy("quest", { ratio = 0.3, sink = 0, recent = 1,
                                           min_blocks = 0 })
        local server = kv.serve { store = given, max_seqs = 1,
          engine = sparse { blocks = 24, policy = quest } }
        if before then served(server, before) end
        local said, request = served(server, prompt)
        server:close()
        return said, request.blocks_loaded
      end
      local alone = serve()
      serve(store)
      assert.same({ alone, 4 }, { serve(store, other) })
      store:close()
    end)

    it("serves forks, also of whole blocks, and refuses drafts that their parents lack",
      function()
      local server = kv.serve { engine = sparse { blocks = 64 }, max_seqs = 2 }
      local function fork(at, draft)
        local made, why
        local parent = assert(server:submit { tokens = first(tokens, 29), max_tokens = 8,
          on_token = function(r)
            if made == nil and r:output_length() == at then
              local ok, got = pcall(server.fork, server, r, { max_tokens = 8 - at,
                                                              draft = draft })
              made, why = ok and got, got
            end
          end })
        server:run()
        return parent, made, why
      end
      for at = 1, 6 do
        local parent, made = fork(at)
        assert.equal(table.concat(parent:output(), " ", at + 1),
          table.concat(made:output(), " "))
      end
      local _, made, why = fork(3, { policy = "quest", ratio = 0.3, tokens = 2 })
      assert.is_false(made)
      assert.matches("expected the parent's draft or none", why)
      server:close()
    end)

    it("is dense where the indexer selects all tokens", function()
      local engine = sparse { prefill_policy = dsa(40) }
      check(whole, engine:prefill_all(engine:sequence(), tokens), 1, "40 tokens")
    end)
  end)
end)

describe("an index of the model", function()
  it("is refused over a model without an indexer", function()
    support.raises("index is model, but the model has no indexer, expected key, random",
      function() load("deepseek_v3"):engine { blocks = 8, policy = dsa(12) } end)
  end)

  it("is needed for the whole prompt", function()
    local engine = load("deepseek_v32"):engine { blocks = 8 }
    local seq = engine:sequence()
    engine:prefill(seq, { 1, 2, 3 })
    support.raises("watches the prompt's queries, which are gone: prefill anew",
      engine.use_policy, engine, dsa(12), { seq })
  end)
end)

-- ---- folders --------------------------------------------------------------------------

--- A copy of a model, its config or tensors changed by change(config, tensors).
local function changed(name, change)
  local dir, tensors = temporary.folder(), {}
  local file = kv.safetensors(folder(name) .. "/model.safetensors")
  for _, tensor in ipairs(file.names) do tensors[tensor] = file:read(tensor, "cpu") end
  local config = read(folder(name) .. "/config.json")
  change(config, tensors)
  files.write(dir .. "/config.json", json.encode(config))
  kv.safetensors.save(dir .. "/model.safetensors", tensors)
  return dir
end

describe("a folder of a model with latents", function()
  --- Rounds the matrices of layers to 8 bits, with a scale for 16 x 16 numbers. fn(name,
  -- rounded, scales, tensor): what becomes of each.
  local function quantise(tensors, fn)
    for _, name in ipairs(require("kvlab.sorted").keys(tensors)) do
      local x = tensors[name]
      if x.ndim == 2 and name:find "layers" and not name:find "gate.weight" then
        local rows, columns = math.ceil(x:size(0) / 16), math.ceil(x:size(1) / 16)
        local scales = kv.rand("cpu", "f32", { rows, columns }, { seed = #name }) * 0.01
          + 0.005
        local function block_of(n)
          local list = {}
          for i = 1, n do list[i] = math.floor((i - 1) / 16) end
          return kv.from("cpu", "i32", { n }, list)
        end
        local wide = scales:gather_rows(block_of(x:size(0))):transpose(0, 1)
          :gather_rows(block_of(x:size(1))):transpose(0, 1)
        local rounded = (x / wide):cast "f8e4m3"
        fn(name, rounded, scales, rounded:cast "f32" * wide)
      end
    end
  end

  it("may have weights in 8 bits with scales of blocks", function()
    for _, name in ipairs { "deepseek_v3", "deepseek_v32" } do
      local dirs = {
        changed(name, function(config, tensors)
          config.quantization_config = { quant_method = "fp8", fmt = "e4m3",
            weight_block_size = { 16, 16 }, activation_scheme = "dynamic",
            scale_fmt = "ue8m0" }
          quantise(tensors, function(tensor, rounded, scales)
            tensors[tensor], tensors[tensor .. "_scale_inv"] = rounded, scales
          end)
        end),
        changed(name, function(_, tensors)
          quantise(tensors, function(tensor, _, _, x) tensors[tensor] = x end)
        end),
      }
      local logits = {}
      for i, dir in ipairs(dirs) do
        local engine = families.load(dir, { device = "cpu", dtype = "f32" })
          :engine { blocks = 4 }
        logits[i] = engine:prefill_all(engine:sequence(), { 3, 1, 4, 1, 5, 9 })
      end
      support.close(logits[1], logits[2]:list(), TOLERANCE, TOLERANCE, name)
    end
  end)

  local function refused(words, name, change)
    support.raises(words, families.load, changed(name, change), { device = "cpu" })
  end

  --- Adds a layer behind the last one.
  local function add_layer(tensors, without)
    for _, part in ipairs { "eh_proj.weight", "enorm.weight", "hnorm.weight",
      "embed_tokens.weight", "shared_head.norm.weight", "mlp.experts.0.up_proj.weight",
      "mlp.experts.0.up_proj.weight_scale_inv" } do
      if part ~= without then
        tensors["model.layers.2." .. part] = kv.zeros("cpu", "f32", { 8, 8 })
      end
    end
  end

  it("may have layers that predict further tokens, which are left out", function()
    local golden = read(folder "deepseek_v3" .. "/golden.json")
    local dir = changed("deepseek_v3", function(config, tensors)
      config.num_nextn_predict_layers = 1
      add_layer(tensors)
    end)
    local engine = families.load(dir, { device = "cpu", dtype = "f32" })
      :engine { blocks = 4 }
    check(golden, engine:prefill_all(engine:sequence(), golden.tokens), 1, "predictors")
  end)

  it("may have no other layer behind the last one", function()
    local words = 'is no part of deepseek_v3 as it is computed here'
    refused(words, "deepseek_v3", function(config, tensors)
      config.num_nextn_predict_layers = 0
      add_layer(tensors)
    end)
    refused(words, "deepseek_v3", function(config, tensors)
      config.num_nextn_predict_layers = 1
      add_layer(tensors, "eh_proj.weight")
    end)
    refused(words, "deepseek_v3", function(config)
      config.num_hidden_layers, config.num_nextn_predict_layers = 1, 1
    end)
  end)

  it("names a tensor that is missing", function()
    refused('no tensor "model.layers.1.mlp.gate.e_score_correction_bias"',
      "glm4_moe_lite", function(_, tensors)
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = nil
      end)
    refused('no tensor "model.layers.0.self_attn.indexer.k_norm.bias"', "deepseek_v32",
      function(_, tensors)
        tensors["model.layers.0.self_attn.indexer.k_norm.bias"] = nil
      end)
  end)
end)

describe("a config of a model with latents", function()
  local function refused(words, name, change)
    local config = read(folder(name) .. "/config.json")
    change(config)
    support.raises(words, deepseek.random, config, { device = "cpu" })
  end

  it("says what cannot be computed", function()
    for words, change in pairs {
      ["kv_lora_rank is 20, expected a multiple of 8 from 8 to 568"] =
        { kv_lora_rank = 20 },
      ["kv_lora_rank is 520, expected at most 512: a key has qk_rope_head_dim = 64 "
        .. "numbers besides, and 576 at most"] =
        { kv_lora_rank = 520, qk_rope_head_dim = 64, head_dim = 64, qk_head_dim = 80 },
      ["head_dim is 16, expected 8, which is qk_rope_head_dim"] = { head_dim = 16 },
      ["qk_head_dim is 25, expected 24, the sum of qk_nope_head_dim and"] =
        { qk_head_dim = 25 },
      ["num_key_value_heads is 1, expected 2, as many as num_attention_heads"] =
        { num_key_value_heads = 1 },
      ["n_group is 3, expected a number of groups of equal size, each of 2 or more of"] =
        { n_group = 3 },
      ["num_experts_per_tok is 5, expected at most 4, those in topk_group"] =
        { num_experts_per_tok = 5 },
      ["num_local_experts is 5, expected that of n_routed_experts, 8"] =
        { num_local_experts = 5 },
      ["scoring_func is softmax, expected sigmoid"] = { scoring_func = "softmax" },
      ["topk_method is greedy, expected noaux_tc"] = { topk_method = "greedy" },
      ["moe_layer_freq is 2, expected 1"] = { moe_layer_freq = 2 },
    } do
      refused(words, "deepseek_v3", function(config)
        for field, value in pairs(change) do config[field] = value end
      end)
    end
  end)

  it("agrees with itself about layers without experts", function()
    refused("first_k_dense_replace is 2, expected the dense layers of mlp_layer_types",
      "deepseek_v32", function(config) config.first_k_dense_replace = 2 end)
    refused("mlp_layer_types is 1 entries, expected 2 entries, as many as",
      "deepseek_v32", function(config) config.mlp_layer_types = { "dense" } end)
    refused("index_head_dim is 48, expected one of 32, 64, 128", "deepseek_v32",
      function(config) config.index_head_dim = 48 end)
    refused("n_group is nil, expected a whole number", "deepseek_v2_groups",
      function(config) config.n_group = nil end)
  end)

  it("of GLM-4.7-Flash has its sizes by default", function()
    local model = deepseek.random({ model_type = "glm4_moe_lite", num_hidden_layers = 1,
      vocab_size = 32 }, { device = "cpu", dtype = "bf16" })
    local engine, c = model:engine { blocks = 2 }, model.config
    assert.equal(1152, engine.cache:bytes_token())
    assert.same({ 20, 576, 512, 768, 2048, 10240 },
      { c.heads, c.head_dim, c.value_dim, c.q_rank, c.hidden, c.inner })
    assert.near(256 ^ -0.5, c.scale, 1e-12)
    assert.equal(32, #engine:prefill(engine:sequence(), { 1, 2, 3 }):list())
  end)

  it("of random weights gives a model that runs", function()
    for _, name in ipairs(NAMES) do
      local config = read(folder(name) .. "/config.json")
      local model = deepseek.random(config, { device = "cpu", dtype = "f32", seed = 5 })
      local engine = model:engine { blocks = 4 }
      local logits = engine:prefill(engine:sequence(), { 1, 2, 3 })
      assert.is_true(logits:abs():max():item() < 100)
      assert.is_true(model:weight_bytes() > 50000)
    end
  end)
end)
