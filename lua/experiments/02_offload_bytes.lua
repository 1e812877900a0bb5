--- How many bytes does a policy bring over the link, and does the formula predict them?
--
-- KV lies in host memory. A prompt is prefilled in chunks of one block, then one token is
-- decoded. Every byte that crosses the link is counted and compared with the formula: a
-- chunk loads the earlier blocks that were selected, and every token's KV is copied to
-- the host once.
--
--   ./kvlab run lua/experiments/02_offload_bytes.lua [--device=cuda]
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

local PREFILL = { full = "full", quest = "full", topk = "full", streaming_blocks = "full",
                  xattention = "xattention" }

--- Returns how many blocks of the history a policy loads: those that it selects among n
-- blocks, without the open one.
local function selected(policy, n)
  if policy.name == "full" then return n - 1 end
  return kv.policy.budget_blocks(policy.budget, n) - 1
end

--- Returns the number of block loads that the formula predicts: those of a prefill of
-- `chunks` chunks of one block, and those of the token decoded after it.
local function closed_form(prefill, decode, chunks)
  local loads = 0
  for chunk = 1, chunks do loads = loads + selected(prefill, chunk) end
  return loads, selected(decode, chunks + 1)
end

--- The policies of prefill and of decode.
local function policies_of(config)
  local name = config.policy
  local function open(policy)
    return kv.policy(policy, policy ~= "full"
      and { ratio = config.ratio, sink = 1, recent = 1, min_blocks = 0 } or nil)
  end
  if not PREFILL[name] then
    error(("policy is %s, expected %s"):format(name,
      table.concat(sorted.keys(PREFILL), ", ")), 0)
  end
  return open(PREFILL[name]), open(name == PREFILL[name] and "full" or name)
end

local function run(config)
  local chunks = config.context / config.block_size
  local prefill, decode = policies_of(config)
  local s = kv.synthetic { shape = config.shape, context = config.context + 1,
    block_size = config.block_size, chunk = config.block_size, seed = config.seed,
    prefill_policy = prefill, decode_policy = decode,
    offload = { slots = config.slots, slot_blocks = 1 } }
  local seq, engine = s.cache:sequence(), s.cache.tier
  s:prefill(seq, config.context)
  local loaded, offloaded = engine:bytes()
  s:decode { seq }
  local loaded_after, offloaded_after = engine:bytes()
  local bytes_block = engine.bytes_block * s.layers
  local loads, decode_loads = closed_form(prefill, decode, chunks)
  s:close()
  return {
    prefill_loaded = loaded, prefill_loaded_formula = loads * bytes_block,
    prefill_offloaded = offloaded, prefill_offloaded_formula = chunks * bytes_block,
    decode_loaded = loaded_after - loaded,
    decode_loaded_formula = decode_loads * bytes_block,
    decode_offloaded = offloaded_after - offloaded,
    decode_offloaded_formula = bytes_block / config.block_size,
    exact = loaded == loads * bytes_block and offloaded == chunks * bytes_block
      and loaded_after - loaded == decode_loads * bytes_block
      and offloaded_after - offloaded == bytes_block / config.block_size,
  }
end

local dev = kv.device()
local is_cpu = dev:is_cpu()

kv.experiment.run {
  name = "02_offload_bytes",
  title = "How many bytes does a policy bring over the link?",
  grid = {
    { "context", is_cpu and { 4096, 8192, 16384 } or { 16384, 32768, 65536 } },
    { "policy", { "full", "xattention", "quest", "topk", "streaming_blocks" } },
  },
  defaults = { shape = kv.synthetic.default_shape(dev),
               block_size = is_cpu and 256 or 1024,
               ratio = 0.25, slots = 4 },
  kinds = kv.experiment.kinds({
    count = { "context", "block_size", "slots" }, share = { "ratio" },
  }, {
    shape = kv.synthetic.SHAPE,
  }),
  quick = { context = { 1024, 2048, 4096 } },
  metrics = { "prefill_loaded", "prefill_loaded_formula", "prefill_offloaded",
              "prefill_offloaded_formula", "decode_loaded", "decode_loaded_formula",
              "decode_offloaded", "decode_offloaded_formula", "exact" },
  check = function(config)
    policies_of(config)
    kv.experiment.expect_multiple(config, "context", config.block_size)
  end,
  run = run,
  table = {
    { rows = "policy", columns = "context", value = "prefill_loaded", format = "%.0f" },
    { rows = "policy", columns = "context", value = "prefill_loaded_formula",
      format = "%.0f" },
    { rows = "policy", columns = "context", value = "decode_loaded", format = "%.0f" },
    { rows = "policy", columns = "context", value = "exact" },
  },
  plot = { x = "context", y = "prefill_loaded", series = "policy", logx = true,
           logy = true, xlabel = "context (tokens)",
           ylabel = "bytes to the device in a prefill",
           title = "Shape {shape}: bytes over the link in a prefill, by context" },
}
