--- Eviction for good, against a reference that keeps lists of tokens (spec/reference):
-- what is held to the token, and the attention over it, for random scripts of prompts,
-- decode steps and forks.
local kv = require "kvlab"
local reference = require "spec.reference.eviction"
local support = require "spec.support"

local LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
local HEADS = KV_HEADS * GROUP
local TOLERANCE = { f32 = 2e-5, bf16 = 0.03, int8 = 0.08 } -- of sums of normal numbers

-- Policies, and the worth of a token in the reference.
local worth = {}
function worth.streaming(token) return token.position end
function worth.tova(token) return token.newest end
function worth.h2o(token) return token.mass end

function worth.knorm(token) return -math.sqrt(reference.dot(token.k, token.k)) end

--- What is computed once for all tokens of a layer and head, at the end of a prompt.
local function once(seq, layer, head, make)
  local kept = seq.kept or {}
  seq.kept = kept
  local key = (seq.length * LAYERS + layer) * KV_HEADS + head
  kept[key] = kept[key] or make()
  return kept[key]
end

local function anchor_of(tokens)
  local sum = {}
  for d = 1, #tokens[1].k do sum[d] = 0 end
  for _, token in ipairs(tokens) do
    local length = math.sqrt(reference.dot(token.k, token.k))
    for d, x in ipairs(token.k) do sum[d] = sum[d] + x / length end
  end
  return sum
end
function worth.keydiff(token, seq, layer, head)
  local anchor = once(seq, layer, head, function()
    return anchor_of(seq.held[layer][head])
  end)
  return -reference.dot(token.k, anchor)
    / math.sqrt(reference.dot(token.k, token.k) * reference.dot(anchor, anchor))
end

local WINDOW, POOL = 6, 3

--- The weights of each token, as means over a prompt's last queries; the heads of a group
-- are joined by `join`. Returns the number of these queries, too.
local function weights_of(seq, layer, head, join)
  local tokens, votes, queries = seq.held[layer][head], {}, seq.queries[layer]
  for i = 1, #tokens do votes[i] = 0 end
  local count = math.min(WINDOW, #queries)
  for back = count - 1, 0, -1 do
    local seen, of_heads = { unpack(tokens, 1, #tokens - back) }, {}
    for g = 1, GROUP do
      of_heads[g] = reference.weights(queries[#queries - back][head * GROUP + g], seen,
        DIM ^ -0.5)
    end
    for i = 1, #seen do
      votes[i] = votes[i] + join(of_heads[1][i], of_heads[2][i]) / count
    end
  end
  return votes, count
end

local function votes_of(seq, layer, head)
  local tokens, pooled = seq.held[layer][head], {}
  local votes, count = weights_of(seq, layer, head, function(a, b) return (a + b) / 2 end)
  for i = 1, #tokens do
    pooled[i] = i > #tokens - count and math.huge
      or ((votes[i - 1] or 0) + votes[i] + (votes[i + 1] or 0)) / POOL
  end
  return pooled
end
function worth.snapkv(_, seq, layer, head, i)
  return once(seq, layer, head, function() return votes_of(seq, layer, head) end)[i]
end

-- R-KV: the tokens of a head by their positions, importance, redundancy.
local INTERVAL, MIX, NEAR = 12, 0.3, 0.2
local function in_text(tokens)
  local list = { unpack(tokens) }
  table.sort(list, function(a, b) return a.position < b.position end)
  return list
end

--- The shares of the mean cosine of each key to the others; of each key's neighbours, the
-- newest does not count.
local function redundancy_of(tokens)
  local sums, total = {}, 0
  for j = 1, #tokens do sums[j] = 0 end
  for _, a in ipairs(tokens) do
    local near, newest = {}, nil
    for j, b in ipairs(tokens) do
      near[j] = a == b and 0 or reference.dot(a.k, b.k)
        / math.sqrt(reference.dot(a.k, a.k) * reference.dot(b.k, b.k))
      if near[j] > NEAR and (not newest or b.position > tokens[newest].position) then
        newest = j
      end
    end
    if newest then near[newest] = 0 end
    for j = 1, #tokens do sums[j] = sums[j] + near[j] / #tokens end
  end
  for j = 1, #tokens do
    sums[j] = math.exp(sums[j])
    total = total + sums[j]
  end
  for j = 1, #tokens do sums[j] = sums[j] / total end
  return sums
end

local function score_rkv(seq, layer, head)
  local tokens = in_text(seq.held[layer][head])
  local votes = {}
  if seq.ends then
    local of_list = weights_of(seq, layer, head, math.max)
    local at = {}
    for i, token in ipairs(seq.held[layer][head]) do at[token] = of_list[i] end
    for i, token in ipairs(tokens) do votes[i] = at[token] end
  else
    local count = (seq.length - 1) % WINDOW + 1
    for i, token in ipairs(tokens) do votes[i] = (token.votes or 0) / count end
  end
  local redundancy = redundancy_of(tokens)
  for i, token in ipairs(tokens) do
    local most = math.max(votes[i - 1] or 0, votes[i], votes[i + 1] or 0)
    token.worth = token.position >= seq.length - WINDOW and math.huge
      or MIX * most - (1 - MIX) * redundancy[i]
  end
end

function worth.rkv(token, seq, layer, head)
  if seq.ends or seq.length % INTERVAL == 0 then
    seq.scored = seq.scored or {}
    local key = ("%d %d"):format(layer, head)
    local when = ("%d %s"):format(seq.length, tostring(seq.ends))
    if seq.scored[key] ~= when then score_rkv(seq, layer, head) end
    seq.scored[key] = when
  end
  return token.worth or math.huge
end

worth.rocketkv = worth.snapkv -- says what is held; all of it is read below

-- A worth without a paper: a random number for each position.
local LOTS = {}
do
  local rng = support.rng(9)
  for i = 0, 999 do LOTS[i] = rng(2 ^ 20) end
end
function worth.lots(token) return LOTS[token.position] end
local lots = kv.policy.define {
  name = "lots", decode = true, own_bytes = 0, defaults = { sink = 0, recent = 0 },
  init = function(self, shape)
    local list = {}
    for i = 0, 999 do list[i + 1] = LOTS[i] end
    self.lots = kv.from(shape.device, "f32", { 1000, 1 }, list)
  end,
  evict = function(self, ctx)
    local positions = ctx:positions()
    return self.lots:gather_rows(positions:reshape { positions.count }:cast "i32")
      :reshape(positions:dims())
  end,
}

local function new_policy(name, o)
  return name == "lots" and lots(o) or kv.policy(name, o)
end

-- ---- a run ----------------------------------------------------------------------------

--- An attention with its cache and the references of its sequences. o: policy, options,
-- tables, format, block_size.
local function open(dev, o)
  local size = o.block_size or 4
  local most = math.ceil(240 / size)
  local cache = kv.cache { device = dev, format = o.format or "f32", layers = LAYERS,
    blocks = 5 * most, block_size = size, kv_heads = KV_HEADS, head_dim = DIM,
    tables = o.tables }
  local policy = new_policy(o.policy, o.options)
  local self = { dev = dev, cache = cache, policy = policy, size = size, seqs = {},
    refs = {}, format = o.format or "f32", numbers = 0,
    attention = kv.attention { cache = cache, heads = HEADS, decode_policy = policy,
                               max_seqs = 4, max_blocks = most },
    batch = cache:batch { max_seqs = 4, max_tokens = 64, max_blocks = most } }
  local sink, recent, least = policy.sink, policy.recent, policy.min_blocks
  self.ref = { layers = LAYERS, kv_heads = KV_HEADS, group = GROUP, dim = DIM,
    by = o.tables, sink = sink * size, recent = recent * size,
    keep_decoded = o.options.keep_decoded or policy.prompt_only, worth = worth[o.policy],
    floor = o.floor, window = WINDOW, cap = function(length, layer, head)
      local blocks = math.ceil(length / size)
      local ratio = o.ratios and o.ratios[layer + 1][head + 1] or o.options.ratio
      if ratio == 1 then return math.huge end
      local amount = o.options.blocks or math.ceil(ratio * blocks - 1e-9)
      return math.max(amount, least, sink + recent + 1) * size
    end }
  return self
end

local function start(self)
  table.insert(self.seqs, self.cache:sequence())
  table.insert(self.refs, reference.new(self.ref))
  return #self.seqs
end

--- Random numbers in the cache's precision, as a tensor [n, heads, DIM] and as lists.
local function draw(self, n, heads, seed)
  local t = kv.randn(self.dev, "f32", { n, heads, DIM }, { seed = seed })
  if self.format ~= "f32" then t = t:cast "bf16":cast "f32" end
  local flat, list = t:list(), {}
  for i = 1, n do
    list[i] = {}
    for h = 1, heads do
      local at = ((i - 1) * heads + h - 1) * DIM
      list[i][h] = { unpack(flat, at + 1, at + DIM) }
    end
  end
  return self.format ~= "f32" and t:cast "bf16" or t, list
end

--- A step of sequences `which` with counts[i] tokens; ends: whose prompt ends (nil: it is
-- a decode step). Compares the outputs. fails(layer): raises in it.
local function step(self, which, counts, ends, fails)
  local seqs, total, worst = {}, 0, 0
  for i, w in ipairs(which) do seqs[i], total = self.seqs[w], total + counts[i] end
  local seed = self.numbers
  self.cache:transaction(function()
    self.batch:append(seqs, counts, nil, nil, nil, not ends)
    self.attention:begin(self.batch, ends ~= nil, ends or nil)
    for layer = 0, LAYERS - 1 do
      local at = 10 * seed + 3 * layer
      local q, q_list = draw(self, total, HEADS, at)
      local k, k_list = draw(self, total, KV_HEADS, at + 1)
      local v, v_list = draw(self, total, KV_HEADS, at + 2)
      local out = self.attention:forward(layer, q, k, v)
      if fails then fails(layer) end
      local got, row = out:cast("f32"):list(), 0
      for i, w in ipairs(which) do
        local function part(list) return { unpack(list, row + 1, row + counts[i]) } end
        local want = self.refs[w]:compute(layer, part(q_list), part(k_list), part(v_list),
          ends ~= nil)
        for t = 1, counts[i] do
          for h = 1, HEADS do
            for d = 1, DIM do
              local apart = got[((row + t - 1) * HEADS + h - 1) * DIM + d] - want[t][h][d]
              worst = math.max(worst, math.abs(apart))
            end
          end
        end
        row = row + counts[i]
      end
    end
  end)
  self.numbers = seed + 1
  for i, w in ipairs(which) do self.refs[w]:finish(counts[i], ends and ends[i]) end
  assert(worst < TOLERANCE[self.format], worst)
end

--- A step that fails in its last layer, which leaves everything as it was.
local function failed_step(self, which, counts, ends)
  local before = {}
  for i, ref in ipairs(self.refs) do before[i] = ref:fork() end
  local ok, why = pcall(step, self, which, counts, ends, function(layer)
    if layer == LAYERS - 1 then error("it fails", 0) end
  end)
  assert.is_false(ok)
  assert.equal("it fails", why)
  self.refs = before
end

--- What a layer and head of a sequence holds: its positions in the text, ascending.
local function held(self, w, layer, head)
  local seq = self.seqs[w]
  local view = seq:heads()[self.cache.tables == "head" and head + 1 or 1]
  local tally = self.attention.evictor.positions
  local row = view.state[tally]
  local n = seq:held(layer, head)
  local all = tally.layers[layer]:reshape { tally.row_count, tally.row_cells }
  local list = all:index(row):narrow(0, n):list()
  table.sort(list)
  return list
end

local function check(self)
  for w, seq in ipairs(self.seqs) do
    assert.equal(self.refs[w].length, seq:length())
    for layer = 0, LAYERS - 1 do
      for head = 0, KV_HEADS - 1 do
        assert.same(self.refs[w]:positions(layer, head), held(self, w, layer, head))
      end
    end
  end
end

--- Every page has one owner, or is free.
local function check_pages(self)
  local owners, count = {}, 0
  for _, seq in ipairs(self.seqs) do
    for layer = 0, LAYERS - 1 do
      for head = 0, self.cache.cut_heads - 1 do
        for _, page in ipairs(seq:table(layer, head)) do
          if not owners[page] then count = count + 1 end
          owners[page] = true
        end
      end
    end
  end
  assert.equal(self.cache.pages - count, self.cache:pages_free())
end

local function fork(self, w)
  table.insert(self.seqs, self.seqs[w]:fork())
  table.insert(self.refs, self.refs[w]:fork())
end

local function random_script(self, rng, steps)
  start(self)
  step(self, { 1 }, { 1 + rng(30) }, { true })
  for _ = 1, steps do
    local n = #self.seqs
    local kind = rng(12)
    if kind == 0 and n < 4 then
      fork(self, 1 + rng(n))
    elseif kind == 1 and n < 4 then
      local w = start(self)
      local parts = { 1 + rng(20), 1 + rng(20) }
      step(self, { w }, { parts[1] }, { false })
      step(self, { w }, { parts[2] }, { true })
    elseif kind == 2 and n > 1 then
      local w = 1 + rng(n)
      self.seqs[w]:close()
      table.remove(self.seqs, w)
      table.remove(self.refs, w)
    elseif kind == 3 then -- a prompt goes on
      local w = 1 + rng(n)
      if self.refs[w].length < 150 then step(self, { w }, { 1 + rng(20) }, { true }) end
    else
      local which, counts = {}, {}
      for i, w in ipairs(support.distinct(rng, 1 + rng(n), n)) do
        which[i], counts[i] = w + 1, 1
      end
      if kind < 6 then failed_step(self, which, counts, nil) end
      step(self, which, counts, nil)
    end
    check(self)
    check_pages(self)
  end
end

local OWN = { snapkv = { window = WINDOW, pool = POOL }, rkv = { window = WINDOW,
  pool = POOL, interval = INTERVAL, mix = MIX, threshold = NEAR } }
local ONE_BUDGET = {}
for _, name in ipairs(support.names(worth)) do
  if name ~= "rocketkv" then table.insert(ONE_BUDGET, name) end
end
local PROMPT_ONLY = { knorm = true, keydiff = true, snapkv = true }

local BUDGETS = { { blocks = 4 }, { ratio = 0.4, min_blocks = 2 },
  { blocks = 5, sink = 1, recent = 2 }, { ratio = 1 },
  { blocks = 3, keep_decoded = true } }

local function specs(dev)
  for _, tables in ipairs { "layer", "head" } do
    for nth, name in ipairs(ONE_BUDGET) do
      it(("of %s, tables by %s, holds what the reference holds"):format(name, tables),
        function()
          for i, options in ipairs(BUDGETS) do
            -- policies meet each budget in blocks of one size, together in both
            for _, size in ipairs(support.one_each({ 4, 1 }, nth + i, 1)) do
              local o = {}
              for key, value in pairs(options) do o[key] = value end
              for key, value in pairs(OWN[name] or {}) do o[key] = value end
              if PROMPT_ONLY[name] then o.keep_decoded = nil end
              local self = open(dev, { policy = name, options = o, tables = tables,
                block_size = size })
              random_script(self, support.rng(10 * i + size), 25)
              self.cache:close()
            end
          end
        end)
    end
  end
end

-- Budgets that differ: options, and what they are to the reference.
local RAGGED = {
  ["a tensor by layer and head"] = { tables = "head", policy = "lots",
    ratios = { { 0.5, 0.2 }, { 0.3, 1 } } },
  ["a list by layer"] = { tables = "layer", policy = "tova", ratios = { { 0.6, 0.6 },
    { 0.25, 0.25 } }, options = { ratio = { 0.6, 0.25 } } },
  ["a pyramid"] = { tables = "head", policy = "knorm", ratios = { { 0.58, 0.58 },
    { 0.02, 0.02 } },
    options = { ratio = 0.3, split = kv.split("pyramid", { beta = 15 }) } },
  ["all for some heads, and sinks and the newest for the others"] = { tables = "head",
    policy = "streaming", ratios = { { 1, 0 }, { 0, 1 } },
    options = { sink = 1, recent = 3 } }, -- DuoAttention
  ["what the heads of a layer divide"] = { tables = "head", policy = "h2o",
    floor = 0.25, options = { ratio = 0.3, recent = 1,
      split = kv.split("adaptive", { floor = 0.25 }) } },
  ["a part of the policy's"] = { tables = "head", policy = "rocketkv",
    ratios = { { 0.4, 0.4 }, { 0.4, 0.4 } }, options = { ratio = 0.4, spare = 1, sink = 0,
      recent = 0, window = WINDOW, pool = POOL } },
  ["what they divide after the prompt"] = { tables = "head", policy = "snapkv",
    floor = 0.2, options = { ratio = 0.3, window = WINDOW, pool = POOL,
                             split = "adaptive" } },
}

local function ragged(dev)
  for _, name in ipairs(support.names(RAGGED)) do
    it("holds what a budget gives that is " .. name, function()
      local o = { options = {} }
      for key, value in pairs(RAGGED[name]) do o[key] = value end
      local options = {}
      for key, value in pairs(o.options) do options[key] = value end
      options.min_blocks = 1
      if o.ratios and not options.ratio then
        local a, b = unpack(o.ratios)
        options.ratio = kv.from(dev, "f32", { 2, 2 }, { a[1], a[2], b[1], b[2] })
      end
      o.options = options
      for seed = 1, support.is_full and 3 or 2 do
        local self = open(dev, o)
        random_script(self, support.rng(seed), 20)
        self.cache:close()
      end
    end)
  end
end

describe("eviction", function()
  support.each_device(specs)
  support.each_device(ragged)
end)
