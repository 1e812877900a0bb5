--- For every function that takes a table of options, options that work and a call with
-- them, for option_tables_spec.lua. A row's name is the function's in docs/api_lua.md; a
-- word after it names a table inside the options. Errors have to blame a line of `call`,
-- or of the function `at`.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local text_models = require "spec.text_models"

local M = {}

--- A value that is made when it is first asked for.
local function once(make)
  local value
  return function()
    if value == nil then value = kv.lasting(make) end
    return value
  end
end

local function zeros(...) return kv.zeros("cpu", "f32", { ... }) end
local function ints(...) return kv.zeros("cpu", "i32", { ... }) end
local function score() end

-- ---- tensors and ops ------------------------------------------------------------------

M["kv.randn"] = {
  good = function() return { seed = 1, offset = 2, mean = 3, std = 4 } end,
  call = function(o) kv.randn("cpu", "f32", { 2 }, o) end,
}
M["kv.rand"] = {
  good = function() return { seed = 1, offset = 2, low = -1, high = 2 } end,
  call = function(o) kv.rand("cpu", "f32", { 2 }, o) end,
}
M["kv.randint"] = {
  good = function() return { seed = 1, offset = 2, low = -1, high = 2 } end,
  call = function(o) kv.randint("cpu", "i32", { 2 }, o) end,
}
M["kv.ops.paged_attention"] = {
  good = function()
    return { q = zeros(1, 2, 8), cache = zeros(2, 2, 1, 4, 8), tables = ints(1, 2),
             lens = ints(1) + 3, scale = 0.3, causal = true, window = 0, soft_cap = 0 }
  end,
  call = function(a) kv.ops.paged_attention(a) end,
}
M["kv.ops.route"] = {
  good = function()
    return { logits = zeros(2, 8), bias = zeros(8), active = 2, is_sigmoid = true,
             is_normed = true, groups = 4, open_groups = 2, factor = 2.5 }
  end,
  call = function(a) kv.ops.route(a) end,
}
M["kv.format"] = {
  good = function()
    return { codec = "f8e4m3", kv_heads = 2, block_size = 4, head_dim = 16,
             k_scale = kv.ones("cpu", "f32", { 2 }) }
  end,
  call = function(o) kv.format(o) end,
}
M["kv.ops.topk_transform"] = {
  good = function() return { logits = zeros(2, 5), lens = ints(2) + 4, k = 16 } end,
  call = function(a) kv.ops.topk_transform(a) end,
}
M["kv.ops.transform_indices"] = {
  good = function()
    return { indices = ints(2, 4), offsets = ints(2) + 1, out = ints(2, 4) }
  end,
  call = function(a) kv.ops.transform_indices(a) end,
}
M["kv.ops.topk_merge"] = {
  good = function()
    return { logits = zeros(2, 4), first = 0, lens = ints(2), kept_values = zeros(2, 3),
             kept_indices = ints(2, 3) - 1, values = zeros(2, 3),
             indices = ints(2, 3) }
  end,
  call = function(a) kv.ops.topk_merge(a) end,
}
M["kv.vllm.attention"] = {
  good = function()
    local key_cache, value_cache = kv.vllm.cache("cpu", "f32", 2, 1, 16, 64)
    return { q = zeros(1, 2, 64), key_cache = key_cache:fill_(0),
             value_cache = value_cache:fill_(0), tables = ints(1, 2), lens = ints(1) + 3,
             scale = 0.3, version = 1 }
  end,
  call = function(a) kv.vllm.attention(a) end,
}

-- ---- text -----------------------------------------------------------------------------

local tokenizer = once(function()
  return kv.tokenizer(kv.paths.root .. "/spec/data/tokenizers/llama2.json")
end)

M["Tokenizer:encode"] = {
  good = function() return { special = true, bos = true, eos = false } end,
  call = function(o) tokenizer():encode("text", o) end,
}
M["Tokenizer:decode"] = {
  good = function() return { special = true, bytes = true } end,
  call = function(o) tokenizer():decode({ 1, 300 }, o) end,
}
M["Tokenizer:stream"] = {
  good = function() return { special = true, stop = { "\n" } } end,
  call = function(o) tokenizer():stream(o) end,
}
M["Tokenizer:chat"] = {
  good = function()
    return { add_generation_prompt = true, tools = { { a = 1 } }, documents = {},
             variables = { x = false }, template = "default" }
  end,
  call = function(o)
    local t = tokenizer()
    t.template = text_models.CHATML .. "{{ tools }}{{ documents }}{{ x }}"
    t:chat({ { role = "user", content = "Hello" } }, o)
  end,
}

-- ---- tasks ----------------------------------------------------------------------------

M["kv.task"] = {
  good = function()
    return { length = 600, text = kv.paths.root .. "/LICENSE", chat = false, keys = 2,
             answer_tokens = 9, values = 1, queries = 1, digits = 5, depth = 0.5 }
  end,
  call = function(o) kv.task("needle", o) end,
}
M["kv.task.define"] = {
  good = function()
    return { name = "x", metric = "all", defaults = { sort = 3 }, least = 2,
             takes = { sort = kv.task.count }, build = score, open = score }
  end,
  call = function(o) kv.task.define(o) end,
}
M["kv.task.vary"] = {
  good = function() return { name = "x", defaults = { keys = 2 } } end,
  call = function(o) kv.task.vary("needle", o) end,
}

local small_model = once(function() return require("spec.models.tiny").tiny(
  kv.device "cpu") end)

M["reading.open"] = {
  good = function()
    -- its tokenizer has more tokens than the model, whose task is made of few
    local task = { length = 30, score = score, is_zero_one = score, draw = function()
      return { { ids = { 1, 2, 3, 4 }, read = 2, answers = { "x" }, answer_tokens = 2 } }
    end }
    return { engine = small_model():engine { blocks = 16 }, tokenizer = tokenizer(),
             task = task, examples = 1, seed = 1, question = "prompt" }
  end,
  call = function(o) require("models.reading").open(o):close() end,
}

-- ---- KV memory ------------------------------------------------------------------------

local function cache_options()
  return { device = "cpu", format = "f32", layers = 2, blocks = 8, block_size = 4,
           kv_heads = 1, head_dim = 32 }
end

local cache = once(function() return kv.cache(cache_options()) end)
local store = once(function() return kv.store("memory:", { block_size = 4 }) end)
local prefetch = once(function()
  return kv.prefetch { store = store(), device = "cpu" }
end)

M["kv.cache"] = {
  good = cache_options,
  call = function(o) kv.cache(o) end,
}
M["kv.cache offload"] = {
  good = function()
    return { slots = 2, slot_blocks = 1, max_seqs = 2, max_tokens = 8, hot_slots = 2,
             evict = "lfu" }
  end,
  call = function(o)
    local all = cache_options()
    all.offload = o
    kv.cache(all)
  end,
}
M["kv.eviction"] = {
  good = function() return { weight = 0.5 } end,
  call = function(o) kv.eviction.define({ name = "x", defaults = { weight = 1 } })(o) end,
}
M["kv.eviction.define"] = {
  good = function()
    return { name = "x", defaults = { weight = 1 },
             priority = function(uses) return uses * kv.expr.param "weight" end }
  end,
  call = function(o) kv.eviction.define(o) end,
}
M["Cache:batch"] = {
  good = function()
    return { max_seqs = 2, max_tokens = 8, max_blocks = 4, fixed_width = true }
  end,
  call = function(o) cache():batch(o) end,
}
M["kv.store"] = {
  good = function()
    return { capacity = 1e6, timeout_ms = 100, model = "m", block_size = 16 }
  end,
  call = function(o) kv.store("memory:", o) end,
}
M["kv.prefetch"] = {
  good = function()
    return { store = store(), device = "cpu", prefetch_workers = 1,
             max_pending_prefetch = 4, bytes_staging = 2 ^ 16 }
  end,
  call = function(o) kv.prefetch(o) end,
}
M["Prefetch:submit"] = {
  good = function()
    return { request = 1, cache = cache(), keys = ffi.new("kvl_key[?]", 1),
             blocks = { 0 }, first_layer = 0, layers = 1, priority = 2, timeout = 1 }
  end,
  call = function(o) prefetch():submit(o) end,
}

-- ---- policies -------------------------------------------------------------------------

local SHAPE = { device = kv.device "cpu", layers = 1, blocks = 4, block_size = 4,
                heads = 2, kv_heads = 1, head_dim = 32, dtype = "f32", max_blocks = 4,
                scale = 1 }

M["kv.policy"] = {
  good = function() return { ratio = 0.2, sink = 1, recent = 2, min_blocks = 3 } end,
  call = function(o) kv.policy("quest", o) end,
}
M["kv.policy.define"] = {
  good = function()
    return { name = "x", prefill = false, decode = true, score = score,
             defaults = { sort = 3 }, takes = { sort = kv.policy.count },
             aliases = { kind = "sort" } }
  end,
  call = function(o) kv.policy.define(o) end,
}
M["kv.split"] = {
  good = function() return { floor = 0.3, softmax = true } end,
  call = function(o) kv.split("adaptive", o) end,
}
M["kv.split.define"] = {
  good = function()
    return { name = "x", defaults = { share = 0.5, text = "a", is = true },
             takes = { share = kv.policy.share }, layers = function() end,
             heads = function() end }
  end,
  call = function(o) kv.split.define(o) end,
}
M["kv.policy.nest"] = {
  good = function() return { blocks = 2, sink = 0 } end,
  call = function(o)
    local outer = kv.policy "layers"
    outer.shape = SHAPE
    kv.policy.nest(outer, "quest", o)
  end,
}
M["kv.policy.hold"] = {
  good = function() return { blocks = 2, window = 4 } end,
  call = function(o)
    local outer = kv.policy "rocketkv"
    outer.shape = SHAPE
    kv.policy.hold(outer, "snapkv", o)
  end,
}
M["kv.attention"] = {
  good = function()
    return { cache = cache(), heads = 2, decode_policy = kv.policy "quest", scale = 0.5,
             window = 0, soft_cap = 0, max_seqs = 2, max_blocks = 4,
             index = { heads = 2, dim = 32 } }
  end,
  call = function(o) kv.attention(o) end,
}
M["kv.hash.planes"] = {
  good = function()
    return { bits = 64, head_dim = 8, kind = "gaussian", seed = 1, device = "cpu" }
  end,
  call = function(o) kv.hash.planes(o) end,
}
M["kv.hash.summary"] = {
  good = function()
    return { bits = 64, hash_planes = 64, per = "token", planes = "gaussian", seed = 1,
             cache_size = 10 }
  end,
  call = function(o) kv.hash.summary(SHAPE, o) end,
}
M["kv.hash.centred"] = {
  good = function() return { bits = 64, planes = "gaussian", seed = 1 } end,
  call = function(o) kv.hash.centred(SHAPE, o) end,
}
M["kv.hash.cache"] = {
  good = function() return { size = 4 } end,
  call = function(o) kv.hash.cache(o) end,
}

-- ---- kernels --------------------------------------------------------------------------

M["kv.kernel.source"] = {
  good = function()
    return { name = "x", arguments = { "a f32 [n]", "b f32 [n] written", "c i32" },
             c = "void x(const float *a, float *b, int32_t c, int64_t n) {}",
             cuda = "void x(const float *a, float *b, int32_t c, int64_t n) {}",
             grid = 1, block = 32, shared = 0 }
  end,
  call = function(o) kv.kernel.source(o) end,
}
M["expression:source"] = {
  good = function()
    return { place = "score", format = "bf16", group = 2, block_size = 8, head_dim = 64,
             summary = { mean = kv.expr.k:mean "token" }, sizes = { bit = 64 } }
  end,
  call = function(o)
    local _ = (kv.expr.q * kv.expr.mean):sum("dim", "head"):source("lua", o)
  end,
}

-- ---- observers ------------------------------------------------------------------------

local synthetic = once(function()
  return kv.synthetic { device = "cpu", shape = "small", layers = 1, context = 64,
                        chunk = 32, decode_policy = kv.policy "quest" }
end)
local record = once(function()
  local s = synthetic()
  local watched = kv.record(s.attention)
  s:decode { s:sequence(40) }
  watched:detach()
  return watched
end)
local capture = once(function()
  return kv.capture(kv.paths.root .. "/spec/data/capture")
end)

M["kv.record"] = {
  good = function() return { seq = 1 } end,
  call = function(o) kv.record(synthetic().attention, o):detach() end,
}
M["Record:selection_map"] = {
  good = function()
    return { layers = { 0 }, heads = { 0, 1 }, title = "t", step_names = { "a" },
             block_names = { "b" } }
  end,
  call = function(o) record():selection_map(o) end,
}
M["Record:score_map"] = {
  good = function() return { layers = { 0 }, heads = { 0, 1 }, title = "t" } end,
  call = function(o) record():score_map(o) end,
}
M["Capture:replay"] = {
  good = function() return { decode = 2, block_size = 16, device = "cpu" } end,
  call = function(o) capture():replay(o) end,
}

-- ---- the indexer ----------------------------------------------------------------------

local indexer = once(function() return kv.indexer { device = "cpu", topk = 16 } end)
local index = once(function()
  return kv.index_cache { device = "cpu", blocks = 4, block_size = 64, dim = 32 }
end)
local landmarks = once(function() return kv.landmarks(SHAPE, { index = "key" }) end)

M["kv.index_cache"] = {
  good = function()
    return { blocks = 2, layers = 1, block_size = 16, dim = 32, rotate = true, bits = 4,
             device = "cpu" }
  end,
  call = function(o) kv.index_cache(o) end,
}
M["kv.indexer"] = {
  good = function()
    return { topk = 16, logits_bytes_max = 1e6, logits = "bf16", streaming = true,
             device = "cpu" }
  end,
  call = function(o) kv.indexer(o) end,
}
M["Indexer:select"] = {
  good = function()
    return { q = kv.zeros("cpu", "f8e4m3", { 1, 4, 32 }), weights = zeros(1, 4),
             cache = index():layer(0), tables = ints(1, 4), block_size = 64,
             lens = ints(1) + 100, max_len = 100, to = "places", out = ints(1, 16) }
  end,
  call = function(o) indexer():select(o) end,
}
M["kv.prefix_chunks"] = {
  good = function()
    return { tables = ints(1, 4), lens = { 40 }, block_size = 16, capacity = 32 }
  end,
  call = function(o) kv.prefix_chunks(o) end,
}
M["PrefixChunks:attend"] = {
  good = function()
    return { q = zeros(1, 2, 8), cache = zeros(4, 2, 1, 16, 8), scale = 1, soft_cap = 0 }
  end,
  call = function(o)
    kv.prefix_chunks({ tables = ints(1, 4), lens = { 40 }, block_size = 16 }):attend(o)
  end,
}
M["kv.landmarks"] = {
  good = function()
    return { index = "random", dim = 32, rotate = true, bits = 8, scale = "ue8m0",
             seed = 1, pool = 2 }
  end,
  call = function(o) kv.landmarks(SHAPE, o) end,
}
M["Landmarks:select"] = {
  good = function() return { k = function() return 16 end, sink = 1, recent = 1 } end,
  call = function(want)
    local ctx = { query = zeros(1, 2, 32), layer = 0,
      format = { scales = function() end }, lens = ints(1) + 9,
      tables = ints(1, 4), sequences = { { length = function() return 9 end } },
      total_kv_len = 9, new_scores = function() end }
    landmarks():select(ctx, want)
  end,
}

-- ---- serving --------------------------------------------------------------------------

local function serve_options()
  return { cost = kv.cost_model.llama_8b_h100(512), blocks = 20, block_size = 512,
           store_blocks = 10, max_seqs = 4, max_tokens = 1024, priority = "fifo",
           late = "skip", watermark = 0.1, slo_us = 1e6, prefetch_ahead = 1,
           prefetch_workers = 2, max_pending_prefetch = 8, hooks = {} }
end

local server = once(function() return kv.serve(serve_options()) end)
local model = once(function()
  return require("models.llama").load(kv.paths.root .. "/lua/models/recall",
    { device = "cpu" })
end)
local running = once(function()
  local engine = model():engine { blocks = 16, chunk = 32, max_seqs = 2 }
  local serving = kv.serve { engine = engine }
  local request = serving:submit { tokens = { 1, 2, 3 }, max_tokens = 8 }
  serving:step()
  return { server = serving, request = request }
end)

local engine = once(function() return model():engine { blocks = 16, chunk = 32 } end)

M["kv.serve"] = {
  good = serve_options,
  call = function(o) kv.serve(o) end,
}
M["kv.serve hooks"] = {
  good = function() return { build_sparse_meta = score, request_begin = score } end,
  call = function(o)
    local all = serve_options()
    all.hooks = o
    kv.serve(all)
  end,
}
M["Server:submit"] = {
  good = function()
    return { input_length = 600, hash_ids = { 1, 2 }, hash_block = 512, max_tokens = 3,
             arrival_us = 0, deadline_us = 9, on_token = score, temperature = 0.5,
             top_k = 4, top_p = 0.5, min_p = 0.1, repetition_penalty = 1.1, seed = 3,
             logprobs = 2, draft = false }
  end,
  call = function(o) server():submit(o) end,
}
M["kv.generate"] = {
  good = function()
    return { tokenizer = tokenizer(), max_tokens = 2, temperature = 1, top_k = 3,
             top_p = 0.5, min_p = 0.1, repetition_penalty = 1.1, seed = 1,
             stop = { "x" }, stop_tokens = { 5 }, ignore_eos = true, logprobs = 1,
             on_text = score, draft = false }
  end,
  call = function(o) kv.generate(engine(), { 1, 2 }, o) end,
}
local text_model = once(function()
  return kv.model(require("spec.text_models").folder(),
    { device = "cpu", engine = { blocks = 16, chunk = 32 } })
end)

M["kv.model"] = {
  good = function() return { device = "cpu", dtype = "f32", engine = { blocks = 8 } } end,
  call = function(o) kv.model(require("spec.text_models").folder(), o) end,
}
M["Model:generate"] = {
  good = function()
    local o = M["kv.generate"].good()
    o.policy, o.tokenizer = kv.policy "quest", nil
    return o
  end,
  call = function(o) text_model():generate({ 1, 2 }, o) end,
}
M["Model:selection_map"] = {
  good = function()
    return { max_tokens = 3, layers = { 0 }, heads = { 1 }, title = "t", seed = 2 }
  end,
  call = function(o) text_model():selection_map("Hello", o) end,
}
M["Model:chat"] = {
  good = function()
    return { system = "Be brief.", max_tokens = 3, variables = { x = 1 },
             read = function() end }
  end,
  call = function(o) text_model():chat(o) end,
}
M["Server:fork"] = {
  good = function()
    return { tokens = { 4 }, max_tokens = 2, stop_tokens = { 5 }, stop = { { 6, 7 } } }
  end,
  call = function(o) running().server:fork(running().request, o) end,
}
M["Server:continue"] = {
  good = function()
    return { tokens = { 4 }, max_tokens = 2, stop_tokens = { 5 }, stop = { { 6, 7 } } }
  end,
  call = function(o)
    local serving = kv.serve { engine = engine() }
    local r = serving:submit { tokens = { 1, 2 }, max_tokens = 1, hold = true }
    serving:run()
    local ok, why = pcall(serving.continue, serving, r, o)
    serving:close()
    if not ok then error(why, 0) end
  end,
}
local server_model = once(function()
  local m = text_model()
  local own = m.model:engine { blocks = 16, chunk = 32 }
  return { engine_for = function() return own end, tokenizer = m.tokenizer,
           name = "tiny" }
end)
M["kv.http_server"] = {
  good = function()
    return { model = server_model(), name = "tiny", address = "127.0.0.1", port = 0,
             key = "k", policy = "quest", policy_options = { ratio = 0.5 }, log = score }
  end,
  call = function(o) kv.http_server(o):close() end,
}
M["kv.http_server limits"] = {
  good = function()
    return { queue = 4, connections = 8, bytes_body = 100, n = 2, logprobs = 3, stops = 1,
             messages = 2, completion_tokens = 3, chat_tokens = 4, request_s = 1.5,
             arrival_s = 2, taking_s = 3, unsent = 100, policies = 2 }
  end,
  call = function(o)
    kv.http_server({ model = server_model(), port = 0, limits = o }):close()
  end,
}
M["http connections"] = {
  good = function() return require("spec.http_client").options() end,
  call = function(o) require("kvlab.http.connections").open(o):close() end,
}
M["kv.cost_model"] = {
  good = function() return kv.cost_model.llama_8b_h100(16) end,
  call = function(o) kv.cost_model(o) end,
}
M["kv.cost_model.calibrate"] = {
  good = function() return { link_gbps = 10, link_us = 5, context = 64 } end,
  call = function(o)
    kv.cost_model.calibrate(model():engine { blocks = 8, chunk = 32 }, o)
  end,
}
M["kv.trace.generate"] = {
  good = function()
    return { requests = 3, seed = 1, rate = 2, turns = 2, think_s = 1,
             system_tokens = 512, input_tokens = 600, answer_tokens = 5 }
  end,
  call = function(o) kv.trace.generate(o) end,
}
M["kv.trace.submit"] = {
  good = function()
    return { rate = 2, deadline_us = function() return 1 end }
  end,
  call = function(o)
    kv.trace.submit(server(), kv.trace.generate { requests = 1, input_tokens = 9 }, o)
  end,
}
M["kv.replay.run"] = {
  good = function() return { blocks = 40, store_blocks = 3 } end,
  call = function(more)
    local config = { link_gbps = 10, link_us = 5, slowdown = 2 }
    kv.replay.run(kv.trace.generate { requests = 1, input_tokens = 9 },
      kv.replay.cost(nil, config), config, more)
  end,
}

-- ---- models ---------------------------------------------------------------------------

local function small_config()
  local json = require "kvlab.json"
  local path = kv.paths.root .. "/lua/models/recall/config.json"
  local config = json.decode(files.read(path))
  config.num_hidden_layers = 1
  return config
end

M["gemma.load"] = {
  good = function() return { device = "cpu", dtype = "bf16", context = 100 } end,
  call = function(o)
    require("models.gemma").load(kv.paths.root .. "/spec/data/hf/gemma3", o)
  end,
}
M["deepseek.load"] = {
  good = function() return { device = "cpu", dtype = "bf16", context = 100 } end,
  call = function(o)
    require("models.deepseek").load(kv.paths.root .. "/spec/data/hf/glm4_moe_lite", o)
  end,
}
M["deepseek.random"] = {
  good = function() return { device = "cpu", dtype = "bf16", seed = 1 } end,
  call = function(o)
    local json = require "kvlab.json"
    local path = kv.paths.root .. "/spec/data/hf/deepseek_v32/config.json"
    require("models.deepseek").random(json.decode(files.read(path)), o)
  end,
}
M["families.load"] = {
  good = function() return { device = "cpu", dtype = "bf16", context = 100 } end,
  call = function(o)
    require("models.families").load(kv.paths.root .. "/lua/models/recall", o)
  end,
}
M["llama.load"] = {
  good = function() return { device = "cpu", dtype = "bf16", context = 100 } end,
  call = function(o)
    require("models.llama").load(kv.paths.root .. "/lua/models/recall", o)
  end,
}
M["llama.random"] = {
  good = function() return { device = "cpu", dtype = "bf16", seed = 1 } end,
  call = function(o) require("models.llama").random(small_config(), o) end,
}
M["engine.new"] = { -- called as model:engine
  good = function()
    return { policy = kv.policy "quest", prefill_policy = kv.policy "full", blocks = 8,
             block_size = 16, max_seqs = 2, chunk = 32, max_blocks = 4,
             format = "bf16", graph = false }
  end,
  call = function(o) model():engine(o) end,
}
M["small_lm.new"] = {
  good = function()
    return { device = "cpu", vocab_size = 16, embed_dim = 16, num_heads = 2, seed = 1,
             block_size = 4, blocks = 4 }
  end,
  call = function(o) require("models.small_lm").new(o) end,
}
local function exam_options()
  return { context = 128, prompts = 1, needles = 2, block_size = 16, seed = 1,
           question = "sum", hops = 2, even = true, format = "bf16" }
end

M["exam.open"] = {
  good = exam_options,
  call = function(o) require("models.recall.exam").open(o):close() end,
}
M["exam.check"] = {
  good = exam_options,
  call = function(o) require("models.recall.exam").check(o) end,
}

-- ---- experiments ----------------------------------------------------------------------

local function rows()
  return { { config = { x = 1, y = 2 }, metrics = { z = 3 } },
           { config = { x = 2, y = 2 }, metrics = { z = 4 } } }
end

--- fn() with what it prints thrown away.
local function in_silence(fn)
  local out, err = io.output(), io.stderr
  local nowhere = assert(io.open("/dev/null", "w"))
  io.output(nowhere)
  rawset(io, "stderr", nowhere)
  local ok, why = pcall(fn)
  rawset(io, "stderr", err)
  io.output(out)
  nowhere:close()
  if not ok then error(why, 0) end
end

local function experiment()
  return { name = "x", title = "t", grid = { { "x", { 1, 2 } } }, defaults = { n = 1 },
           repeats = 1, quick = {}, when = function() return true end, metrics = { "z" },
           environment = { device = "cpu", description = "d" }, setup = score,
           run = function() return { z = 1 } end, teardown = score,
           table = { rows = "x", value = "z" }, plot = { x = "x", y = "z" } }
end

local function run_experiment(changes)
  local folder, spec = os.tmpname(), experiment()
  os.remove(folder)
  for name, value in pairs(changes) do spec[name] = value end
  local given = { seed = 0, out = folder, set = {}, quick = false, args = {} }
  local ok, why = pcall(in_silence, function() kv.experiment.run(spec, given) end)
  os.execute("rm -rf '" .. folder .. "'")
  if not ok then error(why, 0) end
end

M["kv.experiment.run"] = { good = experiment, call = run_experiment, at = run_experiment }
M["kv.experiment.run environment"] = {
  good = function()
    return { device = "cpu", description = "d", driver = "x", versions = { a = "1" } }
  end,
  call = function(o) run_experiment { environment = o } end, at = run_experiment,
}
M["kv.experiment.run table"] = {
  good = function() return { rows = "x", value = "z", format = "%g", caption = "c" } end,
  call = function(o) run_experiment { table = o } end, at = run_experiment,
}
M["kv.experiment.run plot"] = {
  good = function() return { x = "x", y = "z", logx = true, title = "t" } end,
  call = function(o) run_experiment { plot = o } end, at = run_experiment,
}
M["kv.plot.lines"] = {
  good = function()
    return { x = "x", y = "z", series = "y", where = { y = 2 }, logx = true, logy = false,
             xpow2 = true, style = { ["2"] = "limit" }, title = "t", xlabel = "x",
             ylabel = "y", ymin = 0, ymax = 9 }
  end,
  call = function(o) kv.plot.lines(rows(), o) end,
}
M["kv.plot.bars"] = {
  good = function()
    return { value = "z", bar = "x", split = "y", panel = "y", limit = "w", title = "t",
             where = { y = 2 }, xlabel = "x", limit_label = "l", format = "%g",
             file = "f" }
  end,
  call = function(o) kv.plot.bars(rows(), o) end,
}
M["kv.plot.heat_map"] = {
  good = function()
    return { rows = 1, columns = 2, panels = { { values = { 1, 2 } } }, title = "t",
             row_names = { "a" }, column_names = { "b", "c" }, low = 0, high = 2,
             format = "%g", file = "f", xlabel = "x", ylabel = "y", zlabel = "z",
             ends = { "no", "yes" } }
  end,
  call = function(o) kv.plot.heat_map(o) end,
}
M["kv.plot.heat_maps"] = {
  good = function()
    return { x = "x", y = "y", value = "z", where = { y = 2 }, title = "t", low = 0,
             high = 9, format = "%g", file = "f", xlabel = "x", ylabel = "y",
             zlabel = "z" }
  end,
  call = function(o) kv.plot.heat_maps(rows(), o) end,
}
M["kv.table.text"] = {
  good = function()
    return { caption = "c", header = { "a" }, rows = { { 1 } }, format = "%g" }
  end,
  call = function(o) kv.table.text(o) end,
}
M["kv.table.csv"] = {
  good = function() return { header = { "a" }, rows = { { 1 } } } end,
  call = function(o) kv.table.csv(o) end,
}
M["kv.table.pivot"] = {
  good = function()
    return { rows = "x", columns = "y", value = "z", beside = "w", where = { y = 2 },
             format = "%g", caption = "c" }
  end,
  call = function(o) kv.table.pivot(rows(), o) end,
}
M["kv.table.front"] = {
  good = function()
    return { front = "z", over = "w", axes = { "x" }, where = { y = 2 }, format = "%g",
             caption = "c" }
  end,
  call = function(o) kv.table.front(rows(), o) end,
}
M["kv.timeline.plot"] = {
  good = function() return { title = "t", file = "f" } end,
  call = function(o) kv.timeline.plot({}, o) end,
}
M["kv.synthetic"] = {
  good = function()
    return { device = "cpu", shape = "small", layers = 1, context = 64, block_size = 16,
             max_seqs = 1, chunk = 32, dtype = "bf16", format = "bf16", seed = 1,
             max_blocks = 4, prefill_policy = kv.policy "full",
             decode_policy = kv.policy "quest",
             fixed_width = true, offload = { slots = 2 } }
  end,
  call = function(o) kv.synthetic(o):close() end,
}
M["json.encode"] = {
  good = function() return { order = { "a" }, indent = "  " } end,
  call = function(o) require("kvlab.json").encode({ a = 1 }, o) end,
}

return M
