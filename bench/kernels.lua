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

--- A decode step of `seqs` sequences of `len` tokens over random keys, and a policy of
-- expressions over it.
local function new_rig(b, seqs, len, heads, def)
  local lens = {}
  for i = 1, seqs do lens[i] = len end
  local r = shipped.rig(b.device, { dtype = "bf16", query_dtype = "bf16",
    group = heads / KV_HEADS, kv_heads = KV_HEADS, block_size = BLOCK, head_dim = DIM,
    lens = lens })
  def.name, def.decode = "bench", true
  r.policy = policy.attach(policy.define(def) {}, r.shape)
  r.both = kv.tensor(b.device, "bf16", { r.blocks, 2, KV_HEADS, DIM })
  return r
end

--- The rows of a half of the hand-written minima and maxima: [blocks, kv_heads * dim].
local function half(r, i)
  local rows = kv.arange(r.device, "i32", r.blocks) * 2 + i
  return r.both:reshape { r.blocks * 2, KV_HEADS * DIM }:gather_rows(rows)
end

local function minmax_by_hand(r)
  kv.check(kv.C.kvl_block_minmax(r.ev.k, nil, r.list, r.ev.num_tokens, r.list, r.both))
end

--- A row of scores: `hand` computes them by hand into the tensor that it is given.
local function score_row(r, bytes, hand, is_hand)
  local by_hand = r.ctx:new_scores()
  local function run()
    shipped.begin(r)
    return r.policy:score(r.ctx)
  end
  local function ours() hand(by_hand) end
  return { run = is_hand and ours or run, bytes = bytes + by_hand:bytes(),
    check = function()
      by_hand:fill_(0 / 0)
      ours()
      paged.expect("score", run():reshape { -1 }, by_hand:reshape { -1 }, 1e-3)
    end }
end

local function quest(seqs, len, heads, is_hand)
  return function(b)
    local r = new_rig(b, seqs, len, heads, {
      summary = { lo = e.k:min "token", hi = e.k:max "token" },
      score = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head" })
    r.policy:on_prefill_offload(r.ev)
    minmax_by_hand(r)
    return score_row(r, r.both:bytes(), function(scores)
      kv.check(kv.C.kvl_score_minmax(r.ctx.query, r.both, r.ctx.tables, r.ctx.lens, BLOCK,
        kv.C.KVL_GROUP_MAX, scores))
    end, is_hand)
  end
end

local function minmax(seqs, len, is_hand)
  return function(b)
    local r = new_rig(b, seqs, len, HEADS, {
      summary = { lo = e.k:min "token", hi = e.k:max "token" },
      score = (e.q * e.lo):sum "dim":max "head" })
    local function run() r.policy:on_prefill_offload(r.ev) end
    return { run = is_hand and function() minmax_by_hand(r) end or run,
      bytes = r.ev.k:bytes() / 2 + r.both:bytes(),
      check = function()
        run()
        minmax_by_hand(r)
        for i, name in ipairs { "lo", "hi" } do
          paged.expect(name, r.policy.summary[name]:layer(0):cast("f32"):reshape { -1 },
            half(r, i - 1):cast("f32"):reshape { -1 }, 0)
        end
      end }
  end
end

local function over_keys(seqs, len, what, is_hand)
  return function(b)
    local qk = (e.q * e.k):sum "dim"
    local r = new_rig(b, seqs, len, HEADS, {
      score = what == "lse" and qk:logsumexp "token":mean "head"
        or qk:max "token":max "head" })
    local row = score_row(r, r.ev.k:bytes() / 2, function(scores)
      kv.check(kv.C.kvl_score_max_qk(r.ctx.query, r.ev.k, nil, r.ctx.tables, r.ctx.lens,
        kv.C.KVL_GROUP_MAX, scores))
    end, is_hand)
    if what == "lse" then
      row.check = function()
        local scores = row.run()
        local finite = scores:sub(scores):max(0):max(0):max(0):list()[1]
        assert(finite == 0, "a score is not finite")
      end
    end
    return row
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
