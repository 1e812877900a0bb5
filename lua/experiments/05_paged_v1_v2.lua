--- Where does PagedAttention V2 beat V1, and does vLLM choose the faster one?
--
-- One token of each sequence is decoded over the same keys and values: by vLLM's kernels
-- in vLLM's layout (V1, V2, and the one that vLLM's dispatch rule chooses), and by
-- kvlab's kernel in kvlab's layout. V1 uses one thread block for each head of a sequence,
-- so a few long sequences leave most of the device idle. V2 uses one thread block for
-- every 512 tokens, but must then merge the results. V1 also keeps 4 bytes per token in
-- shared memory. If that is more than a thread block may have (beyond 57 thousand tokens
-- on an H100), its metrics are null. All outputs are compared before anything is timed.
-- Times are medians from events of the device, with cold caches; gb_s counts every key
-- and value once.
--
-- On the CPU, V1 and V2 are the same loop; only the last two kernels differ there.
--
--   ./kvlab run lua/experiments/05_paged_v1_v2.lua [--device=cuda] [--set seqs=1,64]
local kv = require "kvlab"
local options = require "kvlab.options"
local seeds = require "kvlab.seeds"
local text_table = require "kvlab.report.table"

local dev = kv.device()
local is_cpu = dev:is_cpu()
local MIB, TOKENS_MOST = 1024 * 1024, 1024 * 1024   -- tokens of all sequences together
local KERNELS = { "V1", "V2", "vLLM", "kvlab" }
local VERSIONS = { V1 = 1, V2 = 2, vLLM = 0 }

--- Returns block tables that hold all blocks in random order.
local function random_table(seqs, blocks, seed)
  local keys = kv.rand(kv.device "cpu", "f32", { 1, seqs * blocks }, { seed = seed })
  local _, order = keys:sort()
  return order:reshape({ seqs, blocks }):to(dev)
end

--- Makes the random KV of a batch in both layouts, once for all kernels. Returns the
-- arguments of kv.vllm.attention and of kv.ops.paged_attention.
local function batch(s, config)
  local name = ("%d x %d, seed %d"):format(config.seqs, config.context, config.seed)
  if s.name == name then return s.args end
  for _, t in pairs(s.args or {}) do t:free() end
  s.name, s.args = name, kv.scope(function()
    local shape, size = kv.synthetic.SHAPES[config.shape], config.block_size
    local seqs, blocks = config.seqs, config.context / size
    local function random(dims, what)
      return kv.randn(dev, "bf16", dims, { seed = seeds.derive(config.seed, what) })
    end
    local a = {
      q = random({ seqs, shape.heads, shape.head_dim }, 0),
      cache = random({ seqs * blocks, 2, shape.kv_heads, size, shape.head_dim }, 1),
      tables = random_table(seqs, blocks, seeds.derive(config.seed, 2)),
      lens = kv.full(dev, "i32", { seqs }, config.context),
    }
    a.key_cache, a.value_cache = kv.vllm.from_blocks(a.cache)
    a.want = kv.ops.step.paged_attention(a)
    a.out = kv.tensor(dev, "bf16", a.q:dims())
    return a
  end)
  return s.args
end

--- Whether the kernel accepts the batch. Raises when its result differs from kvlab's.
local function check(run, a)
  a.out:fill_(0 / 0)
  local ok, problem = pcall(run)
  if not ok and problem:find "shared memory" then return false end
  if not ok then error(problem, 0) end
  kv.scope(function()
    local want = a.want:cast "f32"
    local off = (a.out:cast "f32" - want):abs():max():item()
    local most = 0.02 * want:abs():max():item()
    assert(off <= most, ("off by %g, %g is rounding"):format(off, most))
  end)
  return true
end

--- Returns the median time of run() in microseconds. The caches are flushed before every
-- call, so that it reads its inputs from memory.
local function time(s, run, timings)
  local times, stream = {}, dev:stream()
  for i = 1, timings do
    s.flush:sum(0, s.flush_sum)
    s.from:record(stream)
    run()
    s.to:record(stream)
    times[i] = s.from:elapsed_us(s.to)
  end
  table.sort(times)
  return times[math.ceil(#times / 2)]
end

local function check_context(config)
  kv.experiment.expect_multiple(config, "context", config.block_size)
end

--- Times one kernel.
local function run(config, s)
  local a, version = batch(s, config), VERSIONS[config.kernel]
  local function call()
    a.version = version
    return version and kv.vllm.step.attention(a) or kv.ops.step.paged_attention(a)
  end
  if not check(call, a) then return { us = 0 / 0, gb_s = 0 / 0 } end
  local us = time(s, call, config.timings)
  return { us = us, gb_s = a.cache:bytes() / us * 1e-3 }
end

--- Returns a table of V1's time divided by V2's time, by seqs and context.
local function v1_over_v2(rows)
  local us, ratios = {}, {}
  for _, row in ipairs(rows) do
    local c = row.config
    us[c.kernel .. c.seqs .. "x" .. c.context] = row.metrics.us
  end
  for _, row in ipairs(text_table.where(rows, { kernel = "V2" })) do
    local c = row.config
    local v1 = us["V1" .. c.seqs .. "x" .. c.context]   -- nil if --set left it out
    local ratio = v1 and v1 == v1 and v1 / row.metrics.us or nil -- NaN: V1 does not fit
    ratios[#ratios + 1] = { config = c, metrics = { ratio = ratio } }
  end
  return text_table.pivot(ratios, { rows = "seqs", columns = "context", value = "ratio",
    format = "%.2f", caption = "time of V1 / time of V2" })
end

kv.experiment.run {
  name = "05_paged_v1_v2",
  title = "Where does PagedAttention V2 beat V1?",
  grid = {
    { "seqs", is_cpu and { 1, 4 } or { 1, 4, 16, 64 } },
    { "context", is_cpu and { 512, 1024, 2048, 4096, 8192 }
                         or { 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536,
                              131072 } },
    { "kernel", KERNELS },
  },
  defaults = { shape = kv.synthetic.default_shape(dev), block_size = 16,
               timings = is_cpu and 15 or 30 },
  kinds = kv.experiment.kinds({
    count = { "seqs", "context", "block_size", "timings" },
  }, {
    shape = kv.synthetic.SHAPE, kernel = options.one_of(unpack(KERNELS)),
  }),
  quick = { seqs = { 1, 4 }, context = { 512, 2048 }, timings = 5 },
  when = function(config) return config.seqs * config.context <= TOKENS_MOST end,
  setup = function(s)
    s.flush = kv.rand(dev, "f32", { (is_cpu and 128 or 512) * MIB / 4 })
    s.flush_sum = kv.tensor(dev, "f32", {})
    s.from, s.to = dev:open_event(), dev:open_event()
  end,
  metrics = { "us", "gb_s" },
  check = check_context, run = run,
  table = v1_over_v2,
  plot = { x = "context", y = "us", series = "kernel", panel = "seqs", logx = true,
           logy = true, xlabel = "context (tokens)", ylabel = "time (us)",
           title = "Shape {shape}: time of attention, by context and sequences" },
}
