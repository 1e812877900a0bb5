--- How much faster is an answer that a sparse policy drafts and full attention verifies?
--
-- A policy drafts `tokens` tokens on the sequence itself, one step of full attention
-- computes all of them again, and tokens that full attention would not have said are
-- taken back (docs/generation.md). So the answer is that of full attention. The open
-- questions are how many tokens of a draft are right, and what a draft and a check cost.
--
--   accepted_share  tokens that were right, of those up to the first wrong one of a draft
--   first_share     first tokens of drafts that were right; both with intervals over
--                   answers
--   tokens_step     tokens of an answer for each check; 1 without drafts
--   speedup         tokens per second, of those of full attention
--   closed_form     the speedup that the parts alone would give: with a, the
--                   accepted_share, and k tokens, a check yields (1 - a^(k + 1)) /
--                   (1 - a) tokens, and takes k drafted tokens and itself
--   of_closed       speedup over closed_form
--   draft_ms, check_ms, plain_ms  of a drafted token, a check, a step without drafts
--   alone_ms        of a drafted token if one draft follows the other, without checks: a
--                   check may take a GPU to its limit of power, so its clock falls.
--                   For shapes
--   same_share      answers that have exactly the tokens of full attention
--   bytes_share     bytes that drafts and checks read for an answer, of those that full
--                   attention reads for one; held_share and moved_share likewise
--                   (docs/experiments.md). They are counted while nothing is timed, in
--                   one answer or in four rounds of drafts and checks
--
-- model: recall, the small trained model of this project; what ./kvlab get fetched, such
-- as smollm2; or a shape with random weights (models/shapes.lua). Random weights say
-- nothing about which tokens are right, so accept is then set by hand: a drafted token is
-- right with this probability. A policy "quest reused" makes one selection for all tokens
-- of a draft. temperature: at which a trained model's tokens are drawn; 0, its likeliest
-- ones. spread: the length of a trained model's longest prompt, `context`, over that of
-- its shortest one.
--
--   ./kvlab run lua/experiments/21_lossless.lua                    the recall model
--   ./kvlab run lua/experiments/21_lossless.lua --set model=smollm2
--   ./kvlab run lua/experiments/21_lossless.lua --device=cuda --set model=8b
--       --set prompts=1x128K,16x32K [--set accept=0.9] [--set cache=f8e4m3]
local costs = require "kvlab.experiment.costs"
local kv = require "kvlab"
local llama = require "models.llama"
local opener = require "models.open"
local recall = require "models.recall.prompts"
local shapes = require "models.shapes"

local is_cuda = kv.cuda_available()

-- ---- what full attention takes, and drafts --------------------------------------------

--- The options of a row's draft.
local function draft_of(config)
  local name = config.policy:match "^(.*) reused$"
  return { policy = name or config.policy, ratio = config.ratio, sink = 1, recent = 2,
           min_blocks = 0, tokens = config.draft, reuse = name ~= nil }
end

--- The policy that drafts, of what draft_of returns.
local function policy_of(draft)
  return kv.policy(draft.policy, { ratio = draft.ratio, sink = draft.sink,
    recent = draft.recent, min_blocks = draft.min_blocks })
end

--- The sum of some numbers over the sum of others, and the limits of its interval over
-- the pairs.
local function share_of(some, all)
  local above, below = 0, 0
  for i, x in ipairs(some) do above, below = above + x, below + all[i] end
  if below == 0 then return 0 end
  local share, near = above / below, {}
  for i, x in ipairs(some) do
    near[i] = share + (x - share * all[i]) / (below / #all)
  end
  local _, low, high = kv.statistics.interval(near)
  return share, low and math.max(0, low), high and math.min(1, high)
end

--- Adds to the metrics m the shares of drafted tokens that were accepted, with intervals.
-- each: the counts of each answer.
local function with_shares(m, each)
  local right, tried, firsts, drafts = {}, {}, {}, {}
  for i, d in ipairs(each) do
    right[i], tried[i] = d.accepted, d.accepted + d.cut
    firsts[i], drafts[i] = d.accepted_at[1] or 0, d.proposed_at[1] or 0
  end
  m.accepted_share, m.accepted_share_low, m.accepted_share_high = share_of(right, tried)
  m.first_share, m.first_share_low, m.first_share_high = share_of(firsts, drafts)
  return m
end

--- Adds what follows from the parts of a row.
local function with_closed_form(m, share, k)
  local tokens = share < 1 and (1 - share ^ (k + 1)) / (1 - share) or k + 1
  m.closed_form = tokens * m.plain_ms / (k * m.draft_ms + m.check_ms)
  m.of_closed = m.speedup / m.closed_form
  return m
end

-- ---- answers of a model that was trained ----------------------------------------------

local NAMES = { "Aro", "Bela", "Cadi", "Doru", "Elin", "Fara", "Goro", "Hale", "Iska",
                "Joru", "Kemi", "Lona", "Miro", "Nera", "Oslo", "Pira" }

--- A list of made-up facts of about so many tokens, and a beginning that goes on.
local function text_prompt(tokenizer, context, seed)
  local lines, ids = {}, {}
  local draws = kv.rand("cpu", "f32", { context, 3 }, { seed = seed }):list()
  while #ids < context do
    for _ = 1, 8 do
      local i = #lines
      local first = math.floor(draws[3 * i + 1] * #NAMES * 0.999)
      local second = math.floor(draws[3 * i + 2] * #NAMES * 0.999)
      lines[i + 1] = ("The river %s%s is %d km long."):format(NAMES[first + 1],
        NAMES[second + 1]:lower(), 100 + math.floor(draws[3 * i + 3] * 6000))
    end
    ids = tokenizer:encode(table.concat(lines, "\n")
      .. "\n\nIn short, the list says that")
  end
  return ids
end

--- The prompts of a sitting: ids. Their lengths are spread evenly.
local function prompts_of(tokenizer, keys)
  local list, shortest = {}, keys.context / keys.spread
  for i = 1, keys.answers do
    local seed = 1000 * keys.seed + i
    local context = math.floor(keys.context - (keys.context - shortest)
      * (keys.answers - i) / math.max(1, keys.answers - 1))
    if tokenizer then
      list[i] = text_prompt(tokenizer, context, seed)
    else
      local prompt = recall.draw(context, keys.needles, 1, seed)
      list[i] = { unpack(prompt.tokens) }
      for _, id in ipairs(prompt.queries[1].ask) do table.insert(list[i], id) end
    end
  end
  return list
end

local function load(keys)
  if keys.model ~= "recall" then return opener.for_experiment(keys) end
  return { model = llama.load(kv.paths.root .. "/lua/models/recall",
    { dtype = keys.dtype }) }
end

local Sitting = {}
Sitting.__index = Sitting

--- Prompts, and a server that keeps what it has read of them: each prompt is read once,
-- whatever drafts its answers.
local function open_sitting(keys)
  local loaded = load(keys)
  local prompts, blocks, longest = prompts_of(loaded.tokenizer, keys), 0, 0
  for _, ids in ipairs(prompts) do
    local most = math.ceil((#ids + keys.tokens + 32) / keys.block_size)
    blocks, longest = blocks + most, math.max(longest, most)
  end
  local engine = loaded.model:engine { graph = true, max_seqs = 1,
    blocks = blocks + longest, max_blocks = longest, block_size = keys.block_size,
    format = keys.cache }
  return setmetatable({ keys = keys, prompts = prompts, engine = engine,
    server = kv.serve { engine = engine, max_seqs = 1 } }, Sitting)
end

function Sitting:close()
  self.server:close()
  self.engine.cache:close()
end

--- Answers the first `count` prompts; the microseconds of decoding, and what the drafts
-- did. more: the requests' attention and draft.
function Sitting:answer(count, more)
  local out, keys = { ids = {}, us = 0, tokens = 0, each = {}, checks = 0,
                      proposed = 0, draft_us = 0, check_us = 0, choose_us = 0 }, self.keys
  for i = 1, count do
    local o = { tokens = self.prompts[i], max_tokens = keys.tokens,
                temperature = keys.temperature, seed = 1000 * keys.seed + i }
    for name, value in pairs(more) do o[name] = value end
    local r = assert(self.server:submit(o))
    self.server:run()
    out.us, out.tokens = out.us + r.finish_us - r.first_token_us,
      out.tokens + r:output_length() - 1
    out.ids[i], out.each[i] = table.concat(r:output(), " "), r.draft
    if r.draft then
      out.checks = out.checks + (r.draft.proposed_at[1] or 0)
      for _, name in ipairs { "proposed", "draft_us", "check_us", "choose_us" } do
        out[name] = out[name] + r.draft[name]
      end
    end
  end
  return out
end

--- The fastest of some runs.
function Sitting:fastest(runs, more)
  local best
  for _ = 1, runs do
    local got = self:answer(#self.prompts, more)
    best = best and best.us < got.us and best or got
  end
  return best
end

local KEYS_OF_ANSWERS = { "model", "dtype", "cache", "block_size", "context", "spread",
                          "needles", "answers", "tokens", "temperature", "runs", "seed" }

local function run_answers(config)
  local keys = {}
  for _, name in ipairs(KEYS_OF_ANSWERS) do keys[name] = config[name] end
  local sitting = kv.experiment.memo(keys, open_sitting)
  local o = draft_of(config)
  local policy = policy_of(o)
  local drafting = { draft = { policy = policy, tokens = o.tokens, reuse = o.reuse },
    attention = sitting.engine:attention_of(kv.policy "full", policy, o.reuse) }
  sitting.plain = sitting.plain or sitting:fastest(config.runs, { draft = false })
  local plain, drafted = sitting.plain, sitting:fastest(config.runs, drafting)
  local counted, stop = costs.count(drafting.attention)
  local shares = costs.of_answers(counted, sitting:answer(1, drafting).tokens)
  stop()
  local same, checks = 0, math.max(1, drafted.checks)
  for i, ids in ipairs(plain.ids) do
    same = same + (ids == drafted.ids[i] and 1 or 0)
  end
  local m = with_shares({
    tokens_step = drafted.tokens / checks, same_share = same / #plain.ids,
    alone_ms = 0 / 0,
    tokens_s = 1e6 * drafted.tokens / drafted.us,
    plain_tokens_s = 1e6 * plain.tokens / plain.us,
    speedup = plain.us / plain.tokens / (drafted.us / drafted.tokens),
    draft_ms = 1e-3 * drafted.draft_us / math.max(1, drafted.proposed),
    check_ms = 1e-3 * (drafted.check_us + drafted.choose_us) / checks,
    plain_ms = 1e-3 * plain.us / plain.tokens }, drafted.each)
  return with_closed_form(costs.add(m, shares), m.accepted_share, config.draft)
end

-- ---- a shape with random weights ------------------------------------------------------

-- Steps before the clock starts. One makes buffers, one records the graph; and it takes
-- about 30 until the Lua around the graphs is compiled.
local WARM = 32
local ROUNDS_COUNTED = 4 -- in which bytes are counted

--- An engine whose sequences have read their prompts.
local function open_shape(keys)
  local model = kv.experiment.memo({ model = keys.model, dtype = keys.dtype,
    seed = keys.seed }, shapes.open)
  local more = 2 * (WARM + keys.steps) * (keys.most + 1)
  local engine, seqs, context = shapes.read(model, keys.prompts,
    { block_size = keys.block_size, format = keys.cache }, more)
  return { model = model, context = context, seqs = seqs, engine = engine }
end

local function begin(self, attention)
  for _, seq in ipairs(self.seqs) do seq:truncate(self.context) end
  if attention then
    attention:adopt(self.seqs)
    self.engine:use_attention(attention)
  else
    self.engine:use_policy(kv.policy "full", self.seqs)
  end
end

local function now_s() return tonumber(kv.C.kvl_clock_ns()) * 1e-9 end

--- Milliseconds of a step of full attention.
local function time_plain(self, steps)
  begin(self)
  local ids = kv.full(self.model.device, "i32", { #self.seqs }, 1)
  local start
  for step = 1, WARM + steps do
    if step == WARM + 1 then
      self.model.device:sync()
      start = now_s()
    end
    ids = self.engine:decode(self.seqs, ids):argmax()
  end
  self.model.device:sync()
  return 1e3 * (now_s() - start) / steps
end

--- Rounds of a draft and a check, after `warm` rounds that do not count. accepted(): how
-- many tokens of a draft are right. Returns the milliseconds of drafts, of checks and of
-- all, and the tokens that were kept.
local function time_rounds(self, k, warm, steps, accepted)
  local engine, device, count = self.engine, self.model.device, #self.seqs
  local newest, counts, drafted, tokens, taken = {}, {}, {}, {}, {}
  for i = 1, count do
    newest[i], counts[i], drafted[i] = 1, k + 1, k
    for _ = 0, k do tokens[#tokens + 1] = 1 end
  end
  local marks = {}
  local ms = { draft = 0, check = 0, all = 0, tokens = 0, cut = 0 }
  for i = 1, 3 do marks[i] = device:open_event() end
  local start
  for round = 1, warm + steps do
    if round == warm + 1 then
      device:sync()
      start = now_s()
    end
    marks[1]:record(device:stream())
    engine:draft(self.seqs, drafted, newest)
    marks[2]:record(device:stream())
    local says = engine:verify(self.seqs, counts, tokens, nil, drafted):argmax()
    marks[3]:record(device:stream())
    says = says:list()
    for i = 1, count do
      local n = accepted()
      newest[i], taken[i] = says[(i - 1) * (k + 1) + n + 1], k - n
      tokens[(i - 1) * (k + 1) + 1] = newest[i]
      if start then
        ms.tokens, ms.cut = ms.tokens + n + 1, ms.cut + (n < k and 1 or 0)
      end
    end
    engine:take_back(taken)
    if start then
      ms.draft = ms.draft + 1e-3 * marks[1]:elapsed_us(marks[2])
      ms.check = ms.check + 1e-3 * marks[2]:elapsed_us(marks[3])
    end
  end
  device:sync()
  ms.all = 1e3 * (now_s() - start)
  for i = 1, 3 do marks[i]:close() end
  return ms
end

--- Milliseconds of a drafted token if one draft follows the other.
local function time_drafts(self, k, warm, steps)
  local counts, newest, start = {}, {}, nil
  for i = 1, #self.seqs do counts[i], newest[i] = k, 1 end
  for round = 1, warm + steps do
    if round == warm + 1 then
      self.model.device:sync()
      start = now_s()
    end
    self.engine:draft(self.seqs, counts, newest)
    for _, seq in ipairs(self.seqs) do seq:truncate(self.context) end
  end
  self.model.device:sync()
  return 1e3 * (now_s() - start) / steps / k
end

local KEYS = { "model", "dtype", "cache", "prompts", "block_size", "steps", "seed" }

local function run_shape(config)
  local keys, k = { most = config.most }, config.draft
  for _, name in ipairs(KEYS) do keys[name] = config[name] end
  local sitting = kv.experiment.memo(keys, open_shape)
  sitting.plain_ms = sitting.plain_ms or time_plain(sitting, config.steps)
  local o = draft_of(config)
  local attention = sitting.engine:attention_of(kv.policy "full", policy_of(o),
    o.reuse)
  begin(sitting, attention)
  -- At least n tokens are right with accept^n. The numbers of a golden sequence are
  -- spread so evenly that few drafts already have nearly the mean of many.
  local at = config.seed
  local function accepted()
    at = at + 1
    local chance = at * 0.6180339887498949 % 1
    if config.accept >= 1 then return k end
    return math.floor(math.min(k, math.log(chance) / math.log(config.accept)))
  end
  local ms, plain, count = time_rounds(sitting, k, WARM, config.steps, accepted),
    sitting.plain_ms, #sitting.seqs
  begin(sitting, attention)
  local alone = time_drafts(sitting, k, WARM, config.steps)
  begin(sitting, attention)
  local counted, stop = costs.count(attention)
  local shares = costs.of_answers(counted,
    time_rounds(sitting, k, 0, ROUNDS_COUNTED, accepted).tokens)
  stop()
  local right = ms.tokens - count * config.steps
  local share = right / (right + ms.cut)
  return with_closed_form(costs.add({ accepted_share = share, first_share = config.accept,
    tokens_step = ms.tokens / count / config.steps, same_share = 0 / 0,
    tokens_s = 1e3 * ms.tokens / ms.all, plain_tokens_s = 1e3 * count / plain,
    speedup = ms.tokens / ms.all / (count / plain), plain_ms = plain,
    alone_ms = alone, draft_ms = ms.draft / config.steps / k,
    check_ms = ms.check / config.steps }, shares), share, k)
end

local function check(config)
  policy_of(draft_of(config))
  if not (config.spread >= 1 and config.spread < math.huge) then
    error(("spread is %s, expected a number from 1"):format(tostring(config.spread)), 0)
  end
  if not shapes.has(config.model) then
    if config.prompts == "text" then return end
    error(("prompts is %s, expected text for a trained model, with context and answers")
      :format(config.prompts), 0)
  end
  shapes.prompts(config.prompts)
  if config.temperature ~= 0 then
    error(("temperature is %s, expected 0 for random weights: accept says what is right")
      :format(tostring(config.temperature)), 0)
  end
end

local function run(config)
  if shapes.has(config.model) then return run_shape(config) end
  return run_answers(config)
end

-- ---- the page -------------------------------------------------------------------------

local function tables(rows, settings)
  local list, is_random = {}, shapes.has(rows[1].config.model)
  for _, prompts in ipairs(kv.table.distinct(rows, "prompts")) do
    for _, policy in ipairs(kv.table.distinct(rows, "policy")) do
      local function add(value, beside, format, text)
        list[#list + 1] = kv.table.pivot(rows, { rows = "ratio", columns = "draft",
          value = value, beside = beside, format = format,
          where = { policy = policy, prompts = prompts },
          caption = ("%s, %s: %s"):format(prompts, policy, text) })
      end
      add("accepted_share", "tokens_step", "%.3f", is_random
        and "share of right tokens, set by hand since the weights are random (tokens a "
        .. "check)" or "share of right tokens (tokens a check)")
      add("speedup", "closed_form", "%.2f", "speedup over full attention (closed form)")
      add("draft_ms", "check_ms", "%.3g", "ms of a drafted token (of a check)")
      add(settings.over, nil, "%.3f",
        costs.words(settings.over) .. " for an answer, of those of full attention")
    end
  end
  return list
end

--- A picture for each kind of prompts.
local function pictures(rows)
  local list = {}
  for i, prompts in ipairs(kv.table.distinct(rows, "prompts")) do
    list[i] = kv.plot.lines(kv.table.where(rows, { prompts = prompts }), { x = "draft",
      y = "speedup", series = "policy", panel = "ratio", xlabel = "tokens of a draft",
      ylabel = "speedup",
      title = ("Lossless answers, %s: speedup over full attention"):format(prompts) })
    list[i].file = "speedup_" .. prompts
  end
  return list
end

kv.experiment.run {
  name = "21_lossless",
  title = "How much faster is an answer of drafts that full attention verifies?",
  grid = {
    { "prompts", { "text" } },
    { "policy", { "quest", "quest reused", "gsa_on_device", "streaming_blocks" } },
    { "ratio", { 0.05, 0.1 } },
    { "draft", { 2, 4, 8 } },
  },
  defaults = { model = "recall", dtype = is_cuda and "bf16" or "f32",
               cache = is_cuda and "bf16" or "f32", block_size = 16, accept = 0.9,
               temperature = 0, context = 2048, spread = 1, needles = 32, answers = 4,
               tokens = 48, steps = 16, most = 8, runs = 2 },
  kinds = kv.experiment.kinds {
    count = { "draft", "block_size", "context", "needles", "answers", "tokens", "steps",
      "most", "runs" },
    share = { "ratio", "accept" }, text = { "model" }, not_negative = { "temperature" },
    positive = { "spread" }, dtype = { "dtype" }, format = { "cache" },
  },
  quick = { policy = { "quest" }, ratio = { 0.1 }, draft = { 3 }, context = 512,
            needles = 8, answers = 1, tokens = 12, runs = 1, steps = 2 },
  proportions = { "accepted_share", "first_share", "same_share", "held_share" },
  metrics = { "speedup", "closed_form", "of_closed", "accepted_share", "first_share",
              "tokens_step", "tokens_s", "plain_tokens_s", "draft_ms", "check_ms",
              "alone_ms", "plain_ms", "same_share", "bytes_share", "held_share",
              "moved_share" },
  check = check,
  run = run,
  table = tables,
  plot = pictures,
}
