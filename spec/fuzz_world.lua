--- What spec/fuzz.lua calls functions with: a world of objects that are in use, random
-- arguments from it, and the argument that takes the place of one that was refused.
local ffi = require "ffi"
local kv = require "kvlab"
local rows = require "spec.lua.option_tables"
local sorted = require "kvlab.sorted"

local M = {}
local root = kv.paths.root

-- ---- the world of a round -------------------------------------------------------------

local SHAPE = { layers = 2, blocks = 8, block_size = 16, kv_heads = 2, head_dim = 64 }

local function cache_of(offload)
  local o = { device = "cpu", format = "f32", offload = offload }
  for name, value in pairs(SHAPE) do o[name] = value end
  return kv.cache(o)
end

local CAPTURE = root .. "/spec/data/capture"
local LLAMA = { model_type = "llama", hidden_act = "silu", hidden_size = 32,
                intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4,
                num_key_value_heads = 2, head_dim = 16, vocab_size = 50 }

local TOKENIZER = root .. "/spec/data/tokenizers/llama2.json"

--- Objects that are made when they are first asked for, from the world that has them.
local LATE = {
  graph = function() return kv.graph(function() kv.zeros("cpu", "f32", { 2 }) end) end,
  file = function() return kv.safetensors(CAPTURE .. "/layer_000.safetensors") end,
  gguf = function() return kv.gguf(root .. "/spec/data/gguf/types.gguf") end,
  ticket = function(w)
    return w.prefetch:submit { request = 1, cache = w.cache,
      keys = ffi.new("kvl_key[?]", 2), blocks = { 0, 1 } }
  end,
  keys = function(w) return kv.summary.keys(w.shape) end,
  centred = function(w) return kv.hash.centred(w.shape) end,
  hash_cache = function()
    local cache = kv.hash.cache { size = 2 }
    cache:put("a", 1)
    return cache
  end,
  sampling = function(w) return kv.sampling(w.shape, 1) end,
  probe = function(w) return kv.probe(w.attention) end,
  record = function(w)
    local record = kv.record(w.synthetic.attention)
    w.synthetic:decode { w.synthetic:sequence(40) }
    return record
  end,
  capture = function() return kv.capture(CAPTURE) end,
  replay = function(w) return w.capture:replay { decode = 2 } end,
  index_cache = function()
    return kv.index_cache { device = "cpu", layers = 2, blocks = 8, block_size = 16,
                            dim = 32, bits = 4 }
  end,
  source = function() return kv.kernel.source(rows["kv.kernel.source"].good()) end,
  indexer = function() return kv.indexer { device = "cpu", topk = 8 } end,
  chunks = function()
    return kv.prefix_chunks { tables = kv.zeros("cpu", "i32", { 1, 4 }), lens = { 40 },
                              block_size = 16, capacity = 32 }
  end,
  landmarks = function(w) return kv.landmarks(w.shape, { index = "key" }) end,
  compressed = function(w) return kv.compressed(w.shape) end,
  model = function() return require("spec.models.tiny").tiny(kv.device "cpu") end,
  engine = function(w)
    local engine = w.model:engine { blocks = 16, chunk = 8, max_seqs = 2,
                                    policy = kv.policy "quest" }
    w.engine_seq = engine:sequence()
    w.logits = engine:prefill(w.engine_seq, { 1, 2, 3 })
    return engine
  end,
  server = function(w)
    local server = kv.serve { engine = w.engine }
    w.request = server:submit { tokens = { 1, 2, 3 }, max_tokens = 8 }
    server:step()
    return server
  end,
  modelled = function(w)
    local server = kv.serve { cost = kv.cost_model.llama_8b_h100(16), blocks = 20,
                              block_size = 16, store_blocks = 10 }
    w.modelled_request = server:submit { input_length = 20, hash_ids = { 1, 2 },
                                         hash_block = 16, max_tokens = 3 }
    return server
  end,
  text_model = function()
    return kv.model(require("spec.text_models").folder(),
      { device = "cpu", engine = { blocks = 16, chunk = 8, max_seqs = 2 } })
  end,
  http_server = function(w)
    return kv.http_server { model = w.text_model, port = 0 }
  end,
  llama = function()
    return require("models.llama").random(LLAMA, { device = "cpu", dtype = "f32" })
  end,
  gemma = function()
    return require("models.gemma").load(root .. "/spec/data/hf/gemma3",
      { device = "cpu", dtype = "f32" })
  end,
  deepseek = function()
    return require("models.deepseek").load(root .. "/spec/data/hf/deepseek_v32",
      { device = "cpu", dtype = "f32" })
  end,
  lm = function()
    return require("models.small_lm").new { vocab_size = 20, embed_dim = 32,
                                            num_heads = 2, device = "cpu" }
  end,
  task = function() return kv.task("needle", { length = 400 }) end,
  writer = function() return require("kvlab.task.writer").new(1) end,
  reading = function()
    return require("models.reading").open(rows["reading.open"].good())
  end,
  exam = function()
    return require("models.recall.exam").open { context = 128, prompts = 1, needles = 2,
                                                block_size = 16 }
  end,
  tokenizer = function()
    local tokenizer = kv.tokenizer(TOKENIZER)
    tokenizer.template = "<|im_start|><|im_end|>\n"
    return tokenizer
  end,
  text_stream = function(w) return w.tokenizer:stream { stop = { "x", "long" } } end,
  stops = function() return require("kvlab.text.stream").stops { "x", "%s" } end,
  synthetic = function()
    return kv.synthetic { device = "cpu", shape = "small", layers = 1, context = 64,
                          chunk = 32, decode_policy = kv.policy "quest" }
  end,
  event_of_step = function(w)
    local blocks = kv.from("cpu", "i32", { 2 }, { 0, 1 })
    return { layer = 0, k = w.cache:layer(0), blocks = blocks, k_blocks = blocks,
             num_tokens = kv.from("cpu", "i32", { 2 }, { 16, 4 }), turns = 1 }
  end,
}

local LATE_NAMES = sorted.keys(LATE)
local LATE_OBJECTS = { __index = function(w, name)
  local make = LATE[name]
  if not make then return nil end
  local object = make(w)
  rawset(w, name, object)
  return object
end }

--- One of two receivers of a class that has two kinds.
local function either(a, b)
  return function(w, rng) return rng(2) == 0 and w[a] or w[b] end
end

local function of(name) return function(w) return w[name] end end

--- How the receiver of a class is found in a world.
M.MAKERS = {
  ["tensor/tensor tensor"] = function(w) return w.any_tensor() end,
  ["tensor/shape tensor"] = function(w) return w.any_tensor() end,
  ["tensor/arithmetic tensor"] = function(w) return w.any_tensor() end,
  ["tensor/device device"] = function() return kv.device "cpu" end,
  ["opened stream"] = of "stream", ["opened event"] = of "event",
  ["opened graph"] = of "graph", ["memory/cache Cache"] = function(w) return w.cache end,
  ["memory/sequence Sequence"] = function(w) return w.seq end,
  ["memory/batch Batch"] = function(w) return w.batch end,
  ["memory/formats Format"] = function(w) return w.cache.format end,
  ["memory/host_tier HostTier"] = function(w) return w.offloaded.tier end,
  ["memory/hot_cache HotCache"] = function(w) return w.offloaded.tier.hot end,
  ["memory/store Store"] = function(w) return w.store end,
  ["memory/prefetch Prefetch"] = function(w) return w.prefetch end,
  ["policy/attention Attention"] = function(w) return w.attention end,
  ["policy/context Context"] = function(w) return w.attention.context end,
  ["policy/summary Summary"] = function(w) return w.summary end,
  ["policy/hash Hashes"] = function(w) return w.hashes end,
  ["policy/hash Centred"] = of "centred", ["policy/split Split"] = of "split",
  ["kernel/expression/expression expression"] = function(w) return w.any_expression() end,
  ["kernel/run/show expression"] = function(w) return w.any_expression() end,
  ["kernel/run/source Source"] = of "source",
  ["policy/queries Queries"] = function(w) return w.queries end,
  ["policy/tally Tally"] = function(w) return w.tally end,
  ["tensor/safetensors File"] = of "file", ["tensor/gguf File"] = of "gguf",
  ["memory/prefetch Ticket"] = of "ticket",
  ["policy/summary Keys"] = of "keys", ["policy/hash Cache"] = of "hash_cache",
  ["policy/sampling Sampling"] = of "sampling", ["observe/probe Probe"] = of "probe",
  ["observe/record Record"] = of "record", ["observe/capture Capture"] = of "capture",
  ["observe/capture Replay"] = of "replay",
  ["index/index_cache IndexCache"] = of "index_cache",
  ["index/indexer Indexer"] = of "indexer",
  ["index/prefix_chunks PrefixChunks"] = of "chunks",
  ["index/landmarks Landmarks"] = of "landmarks",
  ["index/compressed Compressed"] = of "compressed",
  ["serve/serve Server"] = either("server", "modelled"),
  ["serve/model Model"] = of "text_model",
  ["http/server HttpServer"] = of "http_server",
  ["serve/request Request"] = function(w, rng)
    local server = either("server", "modelled")(w, rng)
    return server == w.server and w.request or w.modelled_request
  end,
  ["models/engine Engine"] = of "engine", ["models/llama Model"] = of "llama",
  ["models/gemma Model"] = of "gemma", ["models/deepseek Model"] = of "deepseek",
  ["models/small_lm LM"] = of "lm", ["models/recall/exam Exam"] = of "exam",
  ["task/task Task"] = of "task", ["task/writer Writer"] = of "writer",
  ["models/reading Reading"] = of "reading",
  ["serve/cost_model CostModel"] = function() return kv.cost_model { head_dim = 64 } end,
  ["text/tokenizer Tokenizer"] = of "tokenizer",
  ["text/stream Stream"] = of "text_stream", ["text/stream Stops"] = of "stops",
  ["experiment/synthetic Synthetic"] = of "synthetic",
}

--- A world: objects that are in use, among which the calls find receivers and arguments.
function M.new(rng)
  local dev, w = kv.device "cpu", setmetatable({}, LATE_OBJECTS)
  local dtypes = { "f32", "f32", "f32", "f16", "bf16", "i32", "i32", "i64", "u8", "u64",
                   "f8e4m3" }
  function w.any_tensor()
    local dims = {}
    for i = 1, rng(5) do dims[i] = ({ 0, 1, 2, 2, 4, 8, 64 })[1 + rng(7)] end
    return kv.zeros(dev, dtypes[1 + rng(#dtypes)], dims)
  end
  local leaves = { "q", "k", "v", "tokens", "position", "length", "a_field" }
  function w.any_expression()
    local e = kv.expr
    local made = { function() return e[leaves[1 + rng(#leaves)]] end,
      function() return e.q * e.k end, function() return (e.q * e.k):gt(rng(3)) end,
      function() return e.tokens + rng(3) end, function() return e.tokens:cast "u32" end,
      function() return (e.q * e.a_field):sum "dim" end,
      function() return e.const("u64", "name", "word") end }
    return made[1 + rng(#made)]()
  end
  w.cache = cache_of(nil)
  w.offloaded = cache_of { slots = 2, slot_blocks = 1, max_seqs = 2, max_tokens = 64,
                           hot_slots = 8 }
  local from = rng(2) == 0 and w.cache or w.offloaded
  w.seq, w.other = from:sequence(), from:sequence()
  w.batch = from:batch { max_seqs = 2, max_tokens = 64 }
  w.batch:append({ w.seq, w.other }, { 20, 3 })
  w.attention = kv.attention { cache = from, heads = 4, max_seqs = 2,
    decode_policy = kv.policy "quest", prefill_policy = kv.policy "full" }
  w.attention:begin(w.batch, true)
  local q, k = kv.zeros(dev, "f32", { 23, 4, 64 }), kv.zeros(dev, "f32", { 23, 2, 64 })
  for layer = 0, 1 do w.attention:forward(layer, q, k, k) end
  local shape = w.attention.shape
  w.summary, w.hashes = kv.summary.minmax(shape), kv.hash.summary(shape, { bits = 64 })
  w.tally, w.queries = kv.tally(shape, 2, 0), kv.queries(shape, 4)
  w.store = kv.store("memory:", { block_size = 16, model = "m" })
  w.prefetch = kv.prefetch { store = w.store, device = dev, prefetch_workers = 1 }
  w.stream, w.event = dev:open_stream(), dev:open_event()
  w.split = kv.split "adaptive"
  w.budget, w.policy, w.ctx, w.shape =
    kv.policy.recent(2), kv.policy "quest", w.attention.context, shape
  return w
end

-- ---- arguments ------------------------------------------------------------------------

local NUMBERS = { 0, -0, 1, 2, 3, 7, 8, 16, -1, 0.5, 1e9, 2 ^ 31, 2 ^ 40, 2 ^ 53, -2 ^ 63,
                  1 / 0, -1 / 0, 0 / 0, 1e-300 }
local STRINGS = { "", "x", "f32", "i32", "cpu", "max", "mean", "memory:", "quest", "\0",
                  "%s%n", ("long"):rep(100), "../x", "nan" }
M.OWN = "an error of the fuzzer's function"

local look_alike

--- Any value at all.
local function any_value(w, rng)
  local kinds = {
    function() return nil end,
    function() return NUMBERS[1 + rng(#NUMBERS)] end,
    function() return rng(20) - 4 end,
    function() return STRINGS[1 + rng(#STRINGS)] end,
    function() return rng(2) == 0 end,
    function() return {} end,
    function() return { rng(9) - 1, NUMBERS[1 + rng(#NUMBERS)] } end,
    function() return { x = 1, { "a" } } end,
    function() return function() if rng(2) == 0 then error(M.OWN) end end end,
    function() return function(...) return ... end end,
    function() return ffi.new("int[2]") end,
    function() return 5LL end,
    function() return look_alike(w, rng) end,
    w.any_tensor, w.any_tensor, w.any_tensor,
    function()
      local closed = w.any_tensor()
      closed:free()
      return closed
    end,
    function()
      if rng(4) == 0 then return w[LATE_NAMES[1 + rng(#LATE_NAMES)]] end
      local names = sorted.keys(w)
      return w[names[1 + rng(#names)]]
    end,
  }
  return kinds[1 + rng(#kinds)]()
end

--- A table with the fields of `object`, or of a random object of the world. One of the
-- fields has another value.
function look_alike(w, rng, object)
  local all, copy, names = sorted.keys(w), {}, {}
  object = object or w[all[1 + rng(#all)]]
  if type(object) ~= "table" then return copy end
  for name, value in pairs(object) do
    if type(name) == "string" then copy[name], names[#names + 1] = value, name end
  end
  table.sort(names)
  if #names > 0 then copy[names[1 + rng(#names)]] = any_value(w, rng) end
  return copy
end

--- Values that fit a parameter's name.
local BY_NAME = {
  dev = function() return "cpu" end, dtype = function() return "f32" end,
  shape = function(w, rng) return rng(2) == 0 and { 2, 4 } or w.shape end,
  seq = function(w) return w.seq end, seqs = function(w) return { w.seq, w.other } end,
  counts = function(_, rng) return { rng(4), rng(4) } end,
  layer = function(_, rng) return rng(2) end, ctx = function(w) return w.ctx end,
  batch = function(w) return w.batch end, budget = function(w) return w.budget end,
  stream = function(w) return w.stream end, event = function(w) return w.event end,
  attention = function(w) return w.attention end, cache = function(w) return w.cache end,
  blocks = function() return { 0, 1 } end, n = function(_, rng) return rng(9) end,
  fn = function() return function(...) return ... end end,
  scores = function(w) return w.ctx:new_scores() end,
  tokens = function(_, rng) return rng(2) == 0 and { 1, 2, 3 } or rng(5) end,
  ev = of "event_of_step", engine = of "engine", model = either("model", "llama"),
  server = either("server", "modelled"), r = either("request", "modelled_request"),
  parent = either("request", "modelled_request"), logits = of "logits",
  device = function() return "cpu" end, policy = function() return kv.policy "quest" end,
  tokenizer = of "tokenizer", task = of "task",
  answers = function() return { "x", "long" } end,
  parts = function() return { context = "a", question = "b", answers = { "c" } } end,
  folder = function(_, rng) return rng(2) == 0 and CAPTURE or root .. "/spec/data/hf" end,
  config = function(_, rng)
    return rng(2) == 0 and LLAMA or { link_gbps = 10, link_us = 5, slowdown = 2 }
  end,
  rows = function(_, rng)
    return rng(2) == 0 and { { config = { x = 1 }, metrics = { y = 2 } } }
      or kv.trace.generate { requests = 2, input_tokens = 9 }
  end,
  spans = function()
    return { { kind = "load", begin_us = 0, end_us = 4, layer = 0 } }
  end,
  cost = function() return kv.cost_model(kv.cost_model.llama_8b_h100(512)) end,
  key = function(_, rng) return rng(2) == 0 and "a" or rng(3) end,
  block = function(_, rng) return rng(8) end, count = function(_, rng) return rng(5) end,
  first = function(_, rng) return rng(3) end, steps = function(_, rng) return rng(3) end,
  query = function(w) return w.ctx.query end, out = function() return nil end,
  selection = function(w) return (w.ctx:everything()) end,
  values = function(_, rng)
    return rng(2) == 0 and { 1, 2 } or kv.ones("cpu", "f32", { 2, 3 })
  end,
  q = function() return kv.zeros("cpu", "f32", { 23, 4, 64 }) end,
  k = function() return kv.zeros("cpu", "f32", { 23, 2, 64 }) end,
  v = function() return kv.zeros("cpu", "f32", { 23, 2, 64 }) end,
  memory = function(w) return w.cache:layer(0) end,
  path = function(_, rng) return rng(2) == 0 and "out.jsonl" or "nowhere/x" end,
}

--- Options of a function that are right but for one value, at times.
local function options_for(name, w, rng)
  local row = rows[name]
  local good = row and row.good()
  if type(good) ~= "table" or rng(4) == 0 then return good end
  local names = sorted.keys(good)
  if #names > 0 then good[names[1 + rng(#names)]] = any_value(w, rng) end
  return good
end

--- Another table with one wrong entry, at times in a table inside. What takes the place
-- of an object only looks like it.
local function spoilt(value, w, rng)
  if type(value) ~= "table" then return value end
  if getmetatable(value) then return look_alike(w, rng, value) end
  local copy, names = {}, {}
  for key, entry in pairs(value) do
    copy[key] = entry
    names[#names + 1] = key
  end
  if #names == 0 then return copy end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  local name = names[1 + rng(#names)]
  if type(copy[name]) == "table" and rng(2) == 0 then
    copy[name] = spoilt(copy[name], w, rng)
  else
    copy[name] = any_value(w, rng)
  end
  return copy
end

-- What the functions of kv.expr take besides expressions.
local OPERANDS = {
  to = { "f32", "i32", "u32", "u64", "f16" }, name = { "x", "planes", "two words" },
  kind = { "f32", "i32", "u8" }, ["..."] = { "dim", "token", "head", "word", "dimm" },
}

local function an_operand(parameter, w, rng)
  local names = OPERANDS[parameter]
  if names then return names[1 + rng(#names)] end
  return rng(4) == 0 and NUMBERS[1 + rng(#NUMBERS)] or w.any_expression()
end

local OPTIONS = { o = true, a = true, opts = true, given = true, limits = true }

--- Arguments of a call, and how many they are.
function M.arguments_for(target, w, rng)
  local list, n = {}, #target.parameters
  for i, parameter in ipairs(target.parameters) do
    local by_name = BY_NAME[parameter]
    if rng(3) == 0 then list[i] = any_value(w, rng)
    elseif OPTIONS[parameter] and rows[target.name] then
      list[i] = options_for(target.name, w, rng)
    elseif by_name then list[i] = by_name(w, rng)
    elseif target.section == "kvlab/kernel/expression/expression" then
      list[i] = an_operand(parameter, w, rng)
    else list[i] = any_value(w, rng) end
    if by_name and rng(4) == 0 then list[i] = spoilt(list[i], w, rng) end
  end
  if rng(8) == 0 then n = math.max(0, n - 1) end
  return list, n
end

-- ---- past the first door --------------------------------------------------------------

-- Values that are what an error expects, by how its words begin.
local FITTING = {
  { "^one of (.*)$", function(_, rng, list)
    local words = {}
    for word in list:gmatch "[^, ]+" do words[#words + 1] = word end
    return words[1 + rng(#words)]
  end },
  { "^a whole number from (%-?%d+)", function(_, _, low) return tonumber(low) end },
  { "^a whole number", function(_, rng) return 1 + rng(4) end },
  { "^a number", function(_, rng) return rng(8) / 8 end },
  { "^0 %.%.%. 1", function(_, rng) return rng(8) / 8 end },
  { "^0 %.%.%. ", function() return 0 end },
  { "^true or false", function(_, rng) return rng(2) == 0 end },
  { "^a string", function(_, rng) return STRINGS[1 + rng(#STRINGS)] end },
  { "^a function", function() return function(...) return ... end end },
  { "^a list of sequences", function(w) return { w.seq, w.other } end },
  { "^a list", function(_, rng) return { rng(3), rng(3) } end },
  { "^a tensor", function(w) return w.any_tensor() end },
  { "^a device", function() return "cpu" end }, { "^a shape", of "shape" },
  { "^a sequence", of "seq" }, { "^a batch", of "batch" }, { "^a cache", of "cache" },
  { "^an attention", of "attention" }, { "^a context", of "ctx" },
  { "^a budget", of "budget" }, { "^a policy", function() return kv.policy "quest" end },
  { "^a summary", of "summary" }, { "^hashes", of "hashes" },
  { "^a stream", of "stream" },
  { "^an offload event", of "event_of_step" },
  { "^an expression", function(w) return w.any_expression() end },
  { "^a table", function() return {} end },
}

--- A value that is what an error's words expect; nil: none is known.
local function fitting(words, w, rng)
  for _, entry in ipairs(FITTING) do
    local captured = words:match(entry[1])
    if captured then return entry[2](w, rng, captured) end
  end
end

--- Mends the argument, or the option, that an error names. Returns whether it did, so
-- that the same call can be made with what is behind the check.
function M.mend(target, arguments, why, w, rng)
  if type(why) ~= "string" then return false end
  local name, words = why:match "([%w_]+) is [^\n]-, expected ([^\n]+)$"
  local value = words and fitting(words, w, rng)
  if value == nil then return false end
  for i, parameter in ipairs(target.parameters) do
    local list = arguments[i]
    if parameter == name then
      arguments[i] = value
      return true
    elseif OPTIONS[parameter] and type(list) == "table" and not getmetatable(list) then
      local copy = { [name] = value }
      for key, entry in pairs(list) do
        if key ~= name then copy[key] = entry end
      end
      arguments[i] = copy
      return true
    end
  end
  return false
end

M.any_value = any_value

return M
