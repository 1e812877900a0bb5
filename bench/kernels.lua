--- Kernels from Lua (K1): the kernels that expressions become, each beside the
-- hand-written op that computes the same, where there is one.
--
-- K2 has a row for each summary and score of the policies, as expressions
-- (bench/lib/shipped.lua); the note has what the shipped policy's ops and tensor ops
-- take. The calls of a row are interleaved.
local kv = require "kvlab"
local median = require("kvlab.experiment.statistics").median
local paged = require "bench.lib.paged"
local policy = require "kvlab.policy.policy"
local shipped = require "bench.lib.shipped"
local show = require "kvlab.kernel.run.show"

local e = kv.expr
local KV_HEADS, HEADS, DIM, BLOCK = paged.KV_HEADS, paged.HEADS, paged.DIM, paged.BLOCK

--- The input of a policy's kernels: sequences of `len` tokens with blocks in random
-- order.
local function step(b, seqs, len, heads)
  local dev, lens = b.device, {}
  for i = 1, seqs do lens[i] = len end
  local tables, count = paged.random_tables(dev, lens)
  local scores = kv.full(dev, "f32", { seqs, KV_HEADS, len / BLOCK }, 0 / 0)
  local s = { blocks = count, scores = scores, heads = heads or HEADS,
    ctx = { layer = 0, seqs = seqs, kv_heads = KV_HEADS, width = len / BLOCK,
      is_prefill = false, tables = tables, lens = kv.from(dev, "i32", { seqs }, lens),
      query = kv.randn(dev, "bf16", { seqs, heads or HEADS, DIM }, { seed = 2 }),
      format = { scales = function() end }, new_scores = function() return scores end } }
  return s
end

--- A policy of expressions, attached to one layer.
local function attach(b, s, def)
  def.name, def.decode = "bench", true
  local p = policy.define(def) {}
  return policy.attach(p, { device = b.device, layers = 1, blocks = s.blocks,
    block_size = BLOCK, heads = s.heads, kv_heads = KV_HEADS, head_dim = DIM,
    dtype = "bf16", max_blocks = s.ctx.width, scale = 1, format = s.ctx.format })
end

local function compare(s, run, hand)
  return function()
    run()
    local got = s.scores:clone()
    s.scores:fill_(0 / 0)
    hand()
    paged.expect("score", got:reshape { -1 }, s.scores:reshape { -1 }, 1e-3)
  end
end

-- ---- Quest ----------------------------------------------------------------------------

local function quest(seqs, len, heads, is_hand)
  return function(b)
    local s = step(b, seqs, len, heads)
    local p = attach(b, s, { summary = { lo = e.k:min "token", hi = e.k:max "token" },
      score = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head" })
    local both = kv.tensor(b.device, "bf16", { s.blocks, 2, KV_HEADS, DIM })
    local half = kv.randn(b.device, "bf16", { s.blocks, KV_HEADS * DIM }, { seed = 1 })
    local low, high = half:sub(8), half:add(8)
    p.summary.lo:layer(0):copy_(low:reshape { s.blocks, KV_HEADS, DIM })
    p.summary.hi:layer(0):copy_(high:reshape { s.blocks, KV_HEADS, DIM })
    local rows = kv.arange(b.device, "i32", s.blocks) * 2
    both:reshape { s.blocks * 2, KV_HEADS * DIM }:scatter_rows_(rows, low)
      :scatter_rows_(rows + 1, high)
    local function hand()
      kv.check(kv.C.kvl_score_minmax(s.ctx.query, both, s.ctx.tables, s.ctx.lens, BLOCK,
        kv.C.KVL_GROUP_MAX, s.scores))
    end
    local function run() p:score(s.ctx) end
    return { run = is_hand and hand or run, bytes = both:bytes() + s.scores:bytes(),
             check = compare(s, run, hand) }
  end
end

local function minmax(seqs, len, is_hand)
  return function(b)
    local s = step(b, seqs, len)
    local p = attach(b, s, { summary = { lo = e.k:min "token", hi = e.k:max "token" },
      score = (e.q * e.lo):sum "dim":max "head" })
    local cache = kv.randn(b.device, "bf16", { s.blocks, 2, KV_HEADS, BLOCK, DIM },
      { seed = 1 })
    local list = kv.arange(b.device, "i32", s.blocks)
    local counts = kv.full(b.device, "i32", { s.blocks }, BLOCK)
    local both = kv.tensor(b.device, "bf16", { s.blocks, 2, KV_HEADS, DIM })
    local ev = { layer = 0, k = cache, k_blocks = list, blocks = list,
                 num_tokens = counts }
    local function hand()
      kv.check(kv.C.kvl_block_minmax(cache, nil, list, counts, list, both))
    end
    local function run() p:on_decode_offload(ev) end
    return { run = is_hand and hand or run, bytes = cache:bytes() / 2 + both:bytes(),
      check = function()
        run()
        hand()
        local rows = kv.arange(b.device, "i32", s.blocks) * 2
        local low = both:reshape { s.blocks * 2, KV_HEADS * DIM }:gather_rows(rows)
        paged.expect("lo", p.summary.lo:layer(0):cast("f32"):reshape { -1 },
          low:cast("f32"):reshape { -1 }, 0)
      end }
  end
end

-- ---- all keys -------------------------------------------------------------------------

local function over_keys(seqs, len, what, hand_group)
  return function(b)
    local s = step(b, seqs, len)
    local qk = (e.q * e.k):sum "dim"
    local p = attach(b, s, { score = what == "lse" and qk:logsumexp "token":mean "head"
      or qk:max "token":max "head" })
    local cache = kv.randn(b.device, "bf16", { s.blocks, 2, KV_HEADS, BLOCK, DIM },
      { seed = 1, std = 0.05 })
    s.ctx.cache = cache
    local function hand()
      kv.check(kv.C.kvl_score_max_qk(s.ctx.query, cache, nil, s.ctx.tables, s.ctx.lens,
        kv.C.KVL_GROUP_MAX, s.scores))
    end
    local function run() p:score(s.ctx) end
    return { run = hand_group and hand or run,
      bytes = cache:bytes() / 2 + s.scores:bytes(),
      check = what == "max" and compare(s, run, hand) or function()
        run()
        local finite = s.scores:sub(s.scores):max(0):max(0):max(0):list()[1]
        assert(finite == 0, "a score is not finite")
      end }
  end
end

-- ---- the policies ---------------------------------------------------------------------

local REPEATS = 15
local WAYS = { "expression", "hand", "tensors" }

--- The median time of each function in microseconds, and its launches. The calls
-- alternate, so that a disturbance affects all of them.
local function median_times(b, fns)
  local from, to, stream = b.device:open_event(), b.device:open_event(), b.device:stream()
  local times, us, launches = {}, {}, {}
  for i = 0, b.quick and 1 or REPEATS do
    for way, fn in pairs(fns) do
      times[way] = times[way] or {}
      b:flush()
      local before = b.device:stats().launches
      from:record(stream)
      kv.scope(fn)
      to:record(stream)
      launches[way] = b.device:stats().launches - before
      local time = from:elapsed_us(to)
      if i > 0 then times[way][i] = time end
    end
  end
  for way in pairs(fns) do us[way] = median(times[way]) end
  from:close()
  to:close()
  return us, launches
end

--- The row of a case's summary or score.
local function policy_row(case, what)
  return function(b)
    local lens = {}
    for i = 1, b.kind == "cpu" and 1 or 16 do lens[i] = b.quick and 1024 or 32768 end
    local rig = shipped.rig(b.device, { dtype = "bf16", query_dtype = "bf16",
      group = case.group or paged.GROUP, kv_heads = KV_HEADS, block_size = BLOCK,
      head_dim = DIM, lens = lens })
    local fns, plan, way_of = {}, nil, nil
    for _, name in ipairs(WAYS) do
      local way = case[name] and case[name](rig)
      if way and way.update then way.update(rig.ev) end
      if way and what == "summary" and way.update then
        fns[name] = function() way.update(rig.ev) end
      elseif way and what == "score" and way.score then
        fns[name] = function()
          shipped.begin(rig)
          way.score(rig.ctx)
        end
      end
      if name == "expression" then
        plan, way_of = shipped.kernel(way, what).plan, way
      end
    end
    local us, launches = median_times(b, fns)
    local note = ("%d launch%s"):format(launches.expression,
      launches.expression == 1 and "" or "es")
    for i = 2, #WAYS do
      local way = WAYS[i]
      if us[way] then
        note = ("%s; %s %.1f us, %d"):format(note, way == "hand" and "by hand"
          or "tensor ops", us[way], launches[way])
      end
    end
    local written = 4 * rig.blocks * KV_HEADS -- a score's
    if what == "summary" then
      written = rig.blocks * KV_HEADS * way_of.policy.summary:bytes_block()
    end
    return { us = us.expression, bytes = show.bytes(plan, rig.blocks), written = written,
             note = note }
  end
end

local function policy_rows(b)
  for _, case in ipairs(shipped.cases) do
    for _, what in ipairs { "summary", "score" } do
      if what == "score" and not case.no_score or what == "summary" and case.summary then
        b:case { id = "K2", name = ("%s, %s"):format(case.name, what),
                 setup = policy_row(case, what) }
      end
    end
  end
end

return function(b)
  policy_rows(b)
  local len = math.max(BLOCK, b:shrunk(32768))
  for _, row in ipairs { { 16, HEADS }, { 1, HEADS }, { 16, 64 }, { 16, 128 } } do
    local of = (", %d x %d, group %d"):format(row[1], len, row[2] / KV_HEADS)
    b:case { id = "K1", name = "Quest's score, by hand" .. of,
             setup = quest(row[1], len, row[2], true) }
    b:case { id = "K1", name = "Quest's score, an expression" .. of,
             setup = quest(row[1], len, row[2], false), target = { of_limit = 0.80 } }
  end
  local of = (", %d x %d"):format(4, len)
  b:case { id = "K1", name = "min and max of blocks, by hand" .. of,
           setup = minmax(4, len, true) }
  b:case { id = "K1", name = "min and max of blocks, an expression" .. of,
           setup = minmax(4, len, false), target = { of_limit = 0.80 } }
  b:case { id = "K1", name = "max of q . k, by hand" .. of,
           setup = over_keys(4, len, "max", true) }
  b:case { id = "K1", name = "max of q . k, an expression" .. of,
           setup = over_keys(4, len, "max") }
  b:case { id = "K1", name = "logsumexp of q . k, an expression" .. of,
           setup = over_keys(4, len, "lse"), target = { of_limit = 0.80 } }
end
