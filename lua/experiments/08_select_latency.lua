--- What does it cost to choose blocks on the host, and on the device?
--
-- GSA's guide gives 3 to 7 ms for a selection on the CPU (2 to 5 ms of work, and a copy
-- each way) and 0.1 to 0.3 ms on the device; it names no source for the latter. This
-- experiment measures both, for one layer of a decode step. In the first case the queries
-- are copied to the host, the CPU chooses from summaries in its own memory, and the
-- selection is copied back. In the second case the device chooses. Blocks are chosen by
-- hashes of blocks or of tokens (one fused op), and by mean keys (scores, then select).
-- Copies use pinned memory. Times are medians in microseconds.
--
--   ./kvlab run lua/experiments/08_select_latency.lua [--device=cuda]
--
-- Without a GPU only the host's selection is measured, with copies from memory to memory.
local ffi = require "ffi"
local kv = require "kvlab"
local options = require "kvlab.options"

local KV_HEADS, GROUP, DIM, BLOCK, BUDGET, REPEATS = 8, 4, 128, 16, 0.3, 31
local dev, cpu = kv.device(), kv.device "cpu"

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

--- Makes everything that a selection reads and writes, on device `at`.
local function setting(config, at)
  local seqs, blocks = config.seqs, config.context / BLOCK
  local shape = { device = at, layers = 1, blocks = seqs * blocks, block_size = BLOCK,
                  heads = KV_HEADS * GROUP, kv_heads = KV_HEADS, head_dim = DIM,
                  dtype = "bf16" }
  local budget = ffi.new("kvl_budget", BUDGET, 0, 0, 1, 2)
  local k = kv.policy.budget_blocks(budget, blocks)
  local order = kv.arange(at, "i32", seqs * blocks)
  local scores = kv.tensor(at, "f32", { seqs, KV_HEADS, blocks })
  return {
    budget = budget, layer = 0, block_size = BLOCK,
    query = kv.randn(at, "bf16", { seqs, KV_HEADS * GROUP, DIM }, { seed = 1 }),
    tables = order:reshape { seqs, blocks },
    lens = kv.full(at, "i32", { seqs }, config.context),
    scores = scores, new_scores = function() return scores end,
    selection = kv.full(at, "i32", { seqs, KV_HEADS, k }, -1), shape = shape,
  }
end

--- Returns a function that chooses blocks on the device of `s`, from hashes or means of
-- random keys.
local function chooser(config, s)
  local n = s.shape.blocks
  if config.by == "means" then
    local means = kv.summary.mean(s.shape)
    means:layer(0):copy_(kv.randn(s.shape.device, "f32", { n, KV_HEADS, DIM },
      { seed = 3 }))
    return function()
      kv.ops.score_mean(s.query, means, s, "max", s.scores)
      kv.ops.select(s.scores, s.lens, BLOCK, s.budget, s.selection)
    end
  end
  local per = config.by == "token hashes" and "token" or "block"
  local hashes = kv.hash.summary(s.shape, { bits = config.bits, per = per })
  local rows = hashes:layer(0):reshape { -1, math.ceil(config.bits / 64) }
  for first = 0, rows:size(0) - 1, 65536 do -- in pieces, since keys are much larger
    kv.scope(function()
      local piece = rows:narrow(first, math.min(65536, rows:size(0) - first))
      local keys = kv.randn(s.shape.device, "bf16", { piece:size(0), DIM },
        { seed = 3, offset = first * DIM })
      kv.hash.rows(keys, hashes.planes, piece)
    end)
  end
  return function()
    kv.ops.select_hamming(s.query, hashes, s, s.budget, s.selection)
  end
end

--- Lets the device choose. Returns the microseconds between two events.
local function on_device(config)
  local choose, times = chooser(config, setting(config, dev)), {}
  local from, to, stream = dev:open_event(), dev:open_event(), dev:stream()
  for i = 1, REPEATS + 3 do
    from:record(stream)
    choose()
    to:record(stream)
    times[i] = from:elapsed_us(to)
  end
  from:close()
  to:close()
  local us = kv.statistics.median(times)
  return { d2h_us = 0, select_us = us, h2d_us = 0, total_us = us }
end

--- Lets the host choose. Returns microseconds by the clock of the host, which waits for
-- each part to end.
local function on_host(config)
  local there, here = setting(config, dev), setting(config, cpu)
  local choose = chooser(config, here)
  local query = kv.pinned(dev, "bf16", there.query:dims())
  local selection = kv.pinned(dev, "i32", there.selection:dims())
  local parts = { d2h_us = {}, select_us = {}, h2d_us = {}, total_us = {} }
  local function on_cpu(t, like) -- pinned memory as a tensor of the CPU
    return require("kvlab.tensor.tensor").wrap(cpu, like:type(), like:dims(), t.ptr)
  end
  here.query = on_cpu(query, here.query)
  here.selection = on_cpu(selection, here.selection)
  for i = 1, REPEATS + 3 do
    dev:sync()
    local start = clock_us()
    query:copy_(there.query)
    dev:sync()
    local asked = clock_us()
    choose()
    cpu:sync()
    local chosen = clock_us()
    there.selection:copy_(selection)
    dev:sync()
    local done = clock_us()
    parts.d2h_us[i], parts.select_us[i] = asked - start, chosen - asked
    parts.h2d_us[i], parts.total_us[i] = done - chosen, done - start
  end
  local metrics = {}
  for name, list in pairs(parts) do metrics[name] = kv.statistics.median(list) end
  return metrics
end

if dev:is_cpu() then
  print "no GPU: measures only the host's selection, with copies from memory to memory"
end

local WAYS = { "block hashes", "token hashes", "means" }
local PLACES = dev:is_cpu() and { "host" } or { "host", "device" }
local tables = {}
for _, at in ipairs(PLACES) do
  for _, part in ipairs(at == "host" and { "d2h_us", "select_us", "h2d_us", "total_us" }
                        or { "total_us" }) do
    tables[#tables + 1] = { rows = "by", columns = "context", value = part,
                            where = { where = at, seqs = 1 }, format = "%.1f" }
  end
end

kv.experiment.run {
  name = "08_select_latency",
  title = "Choosing blocks on the host and on the device",
  grid = {
    { "where", PLACES },
    { "by", WAYS },
    { "seqs", { 1, 16 } },
    { "context", { 8192, 32768, 131072 } },
  },
  defaults = { bits = 128 },
  kinds = kv.experiment.kinds({
    count = { "seqs", "context", "bits" },
  }, {
    where = options.one_of(unpack(PLACES)), by = options.one_of(unpack(WAYS)),
  }),
  quick = { context = { 8192, 32768 }, seqs = { 1 } },
  when = function(config) -- 16 x 131072 tokens are 2 GB of token hashes
    return config.seqs == 1 or config.context < 131072
  end,
  check = function(config) kv.experiment.expect_multiple(config, "context", BLOCK) end,
  metrics = { "d2h_us", "select_us", "h2d_us", "total_us" },
  run = function(config)
    return kv.scope(config.where == "host" and on_host or on_device, config)
  end,
  table = tables,
  plot = { x = "context", y = "total_us", series = "by", panel = "where",
           where = { seqs = 1 }, logx = true, logy = true, xlabel = "context (tokens)",
           ylabel = "time of a layer (us)",
           title = "Time to select blocks and attend, by where the host selects" },
}
