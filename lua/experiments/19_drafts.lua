--- How much faster is an answer whose next tokens are looked up in the text so far?
--
-- Much of what a language model writes is in its prompt already: a summary quotes, an
-- edited text keeps most of its words. With drafts (docs/generation.md), kvlab searches
-- the text for an earlier occurrence of the last `ngram` tokens. The tokens that followed
-- there are the guess of what comes next, and one decode step checks the whole guess. A
-- row answers the same prompts with and without drafts, greedily, one after the other,
-- and compares the two runs.
--
--   speedup         tokens per second with drafts, of those without
--   tokens_step     tokens that a decode step gives; 1 without drafts
--   accepted_share  the share of proposed tokens that were right
--   same_share      answers that have exactly the tokens of those without drafts. With
--                   dense attention in f32 all do
--
-- A document is a list of made-up facts, which the model is asked to repeat (copy), to
-- repeat with another beginning of each line (edit), or to shorten (summarise). story
-- asks for a text that has nothing to do with it, in which a model can only repeat
-- itself.
--
--   ./kvlab get smollm2
--   ./kvlab run lua/experiments/19_drafts.lua --set model=smollm2 [--device=cuda]
--
-- Without a model here, a small one with random weights answers (model = sample). It only
-- serves as a test: such a model soon repeats itself, and drafts suit it too well.
local downloads = require "kvlab.downloads"
local kv = require "kvlab"
local opener = require "models.open"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local NAMES = { "Aro", "Bela", "Cadi", "Doru", "Elin", "Fara", "Goro", "Hale", "Iska",
                "Joru", "Kemi", "Lona", "Miro", "Nera", "Oslo", "Pira" }

-- ---- prompts --------------------------------------------------------------------------

--- `lines` made-up facts, others for another seed.
local function document(lines, seed)
  local draws = kv.rand("cpu", "f32", { lines, 3 }, { seed = seed }):list()
  local list = {}
  for i = 1, lines do
    local first = math.floor(draws[3 * i - 2] * #NAMES * 0.999)
    local second = math.floor(draws[3 * i - 1] * #NAMES * 0.999)
    list[i] = ("The river %s%s is %d km long."):format(NAMES[first + 1],
      NAMES[second + 1]:lower(), 100 + math.floor(draws[3 * i] * 6000))
  end
  return list
end

local PROMPTS = {
  copy = function(text, lines)
    return text .. "\n\nHere is the same list once more:\n\n" .. lines[1] .. "\n"
  end,
  edit = function(text, lines)
    return text .. "\n\nHere is the same list with \"We know that\" before each line:\n\n"
      .. "We know that " .. lines[1]:gsub("^The", "the") .. "\nWe know that the river"
  end,
  summarise = function(text)
    return text .. "\n\nIn short, the list says that"
  end,
  story = function(text)
    return text .. "\n\nAnd now for something else. Once upon a time there was a girl"
  end,
}

-- ---- a row ----------------------------------------------------------------------------

local function policy_of(config)
  return config.policy ~= "full" and kv.policy(config.policy,
    { ratio = config.ratio, sink = 1, recent = 2 }) or nil
end

--- Answers every prompt. Returns the answers' tokens, the microseconds that decoding
-- took, and what the drafts did.
local function answer(loaded, config, draft)
  local engine = loaded.model:engine { policy = policy_of(config), max_seqs = 1,
                                       blocks = 1024, block_size = 16 }
  local ids, us, steps, proposed, accepted, tokens = {}, 0, 0, 0, 0, 0
  for i = 1, config.prompts do
    local lines = document(config.lines, 1000 * config.seed + i)
    local server = kv.serve { engine = engine }
    local prompt = PROMPTS[config.text](table.concat(lines, "\n"), lines)
    local got = kv.generate(server, prompt, { tokenizer = loaded.tokenizer,
      max_tokens = config.tokens, ignore_eos = true, draft = draft })
    local r = server.requests[1]
    us, tokens = us + r.finish_us - r.first_token_us, tokens + #got.ids - 1
    ids[i] = got.ids
    if draft then
      steps, proposed = steps + got.draft.steps, proposed + got.draft.proposed
      accepted = accepted + got.draft.accepted
    end
    server:close()
  end
  engine.cache:close()
  return { ids = ids, us = us, tokens = tokens, steps = steps, proposed = proposed,
           accepted = accepted }
end

--- The faster of `runs` runs of each kind, which take turns.
local function both(loaded, config)
  local plain, drafted
  local draft = { ngram = config.ngram, tokens = config.draft }
  for _ = 1, config.runs do
    local a, b = answer(loaded, config, false), answer(loaded, config, draft)
    plain = plain and plain.us < a.us and plain or a
    drafted = drafted and drafted.us < b.us and drafted or b
  end
  return plain, drafted
end

local function run(config)
  local loaded = kv.experiment.memo({ model = config.model, dtype = config.dtype,
    seed = config.seed }, opener.for_experiment)
  local plain, drafted = both(loaded, config)
  local same = 0
  for i, ids in ipairs(plain.ids) do
    same = same + (table.concat(ids, " ") == table.concat(drafted.ids[i], " ") and 1 or 0)
  end
  return { speedup = plain.us / drafted.us, tokens_s = 1e6 * drafted.tokens / drafted.us,
    plain_tokens_s = 1e6 * plain.tokens / plain.us,
    tokens_step = drafted.tokens / drafted.steps,
    accepted_share = drafted.proposed > 0 and drafted.accepted / drafted.proposed or 0,
    same_share = same / #plain.ids }
end

local function pivot(value, format, policy)
  return { rows = "text", columns = "draft", value = value, where = { policy = policy },
           format = format, caption = ("%s, %s"):format(value, policy) }
end

kv.experiment.run {
  name = "19_drafts",
  title = "How much faster is an answer with drafts from its own text?",
  grid = {
    { "text", { "copy", "edit", "summarise", "story" } },
    { "policy", { "full", "quest" } },
    { "draft", { 4, 8, 16 } },
  },
  defaults = { model = downloads.find "smollm2" and "smollm2" or "sample", dtype = "f32",
               lines = 60, tokens = 128, prompts = 2, ngram = 3, ratio = 0.1,
               runs = 2 },
  kinds = kv.experiment.kinds({
    count = { "draft", "lines", "tokens", "prompts", "ngram", "runs" },
    share = { "ratio" }, text = { "model" }, dtype = { "dtype" },
  }, {
    text = options.one_of(unpack(sorted.keys(PROMPTS))),
  }),
  quick = { draft = { 8 }, lines = 20, tokens = 48, prompts = 1, runs = 1 },
  proportions = { "accepted_share", "same_share" },
  metrics = { "speedup", "tokens_step", "accepted_share", "same_share", "tokens_s",
              "plain_tokens_s" },
  check = policy_of, run = run,
  table = { pivot("speedup", "%.2f", "full"), pivot("tokens_step", "%.2f", "full"),
            pivot("accepted_share", "%.2f", "full"), pivot("speedup", "%.2f", "quest"),
            pivot("tokens_step", "%.2f", "quest"),
            pivot("same_share", "%.2f", "quest") },
  plot = { x = "draft", y = "speedup", series = "text", panel = "policy",
           xlabel = "tokens of a draft", ylabel = "speedup",
           title = "Answers with drafts from the text: speedup by tokens of a draft" },
}
