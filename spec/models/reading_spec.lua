--- models.reading: examples of tasks, asked under one policy after the other; and
-- 18_text_budget, which runs them.
local checkpoint = require "models.checkpoint"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local readings = require "models.reading"
local temporary = require "spec.temporary"
require "spec.support" -- compiles kernels as specs do

local tokenizer = kv.tokenizer(kv.paths.root .. "/spec/data/tokenizers/smollm.json")

local model = llama.random({ model_type = "llama", hidden_act = "silu", hidden_size = 64,
  intermediate_size = 96, num_hidden_layers = 2, num_attention_heads = 4,
  num_key_value_heads = 2, vocab_size = tokenizer.size }, { device = "cpu",
  dtype = "f32", seed = 3 })

local function text_file()
  return temporary.file(table.concat(
    require("kvlab.task.writer").new(1):noise(200), " "), "text.txt")
end

local function perplexity() return kv.task("perplexity", { text = text_file(),
  length = 150, decode = 20 }) end
local function needle() return kv.task("needle", { length = 400, answer_tokens = 9 }) end

--- A reading of three examples.
local function open(task, o)
  o = o or {}
  local engine = model:engine { max_seqs = o.max_seqs or 4, block_size = 8, chunk = 64,
    blocks = readings.blocks(task, 3, 8, o.tables ~= nil), tables = o.tables }
  return readings.open { engine = engine, tokenizer = tokenizer, task = task,
    examples = 3, seed = 1, question = o.question }
end

local function column(list, name)
  local values = {}
  for i, entry in ipairs(list) do values[i] = entry[name] end
  return values
end

describe("reading #release", function()
  -- f32 sums over the same keys in another order; logits are of the size of 1.
  local MOST = 1e-4

  it("has the perplexity of one prefill", function()
    local reading = open(perplexity())
    local result = reading:ask(kv.policy "full")
    for i, example in ipairs(reading.examples) do
      local ids = { unpack(example.ids) }
      for _, id in ipairs(example.target) do ids[#ids + 1] = id end
      local engine = model:engine { blocks = 64 }
      local logits = engine:prefill_all(engine:sequence(), ids)
      local nll, right = 0, 0
      for n = 1, #example.target do
        local row = logits:index(#example.ids + n - 2):list()
        local sum, best = 0, 1
        for j, x in ipairs(row) do
          sum = sum + math.exp(x)
          if x > row[best] then best = j end
        end
        nll = nll + math.log(sum) - row[example.target[n] + 1]
        right = right + (best - 1 == example.target[n] and 1 or 0)
      end
      assert.is_true(math.abs(result.each[i].nll - nll / 20) < MOST)
      assert.equal(right / 20, result.each[i].score)
      assert.same(example.target, result.each[i].tokens)
    end
    local mean, low, high = kv.statistics.interval(column(result.each, "nll"))
    assert.same({ mean, low, high, 60 }, { result.nll, result.nll_low, result.nll_high,
                                           result.tokens })
  end)

  it("gives the greedy answers of the engine", function()
    for _, question in ipairs { "decode", "prompt" } do
      local reading = open(needle(), { question = question })
      local result = reading:ask(kv.policy "full")
      for i, example in ipairs(reading.examples) do
        local engine = model:engine { blocks = 64 }
        local seq = engine:sequence()
        local ids = engine:generate(seq, engine:prefill(seq, example.ids), 9)
        local wanted = {}
        for _, id in ipairs(ids) do
          wanted[#wanted + 1] = id
          if id == tokenizer.eos then break end
        end
        assert.same(wanted, result.each[i].tokens)
        assert.equal(tokenizer:decode(wanted), result.each[i].answer)
        assert.equal(result.each[i].score,
          reading.task:score(result.each[i].answer, example))
        assert.equal(question == "prompt" and #example.ids - 1 or example.read,
          reading.seqs[i]:length())
      end
    end
  end)

  it("and an engine alone raise where the logits give no token", function()
    local own = model.logits
    model.logits = function(_, _, out) out:fill_(0 / 0) end
    local ok, why = pcall(function() return open(needle()):ask(kv.policy "full") end)
    local engine = model:engine { blocks = 8 }
    local seq = engine:sequence()
    local alone, words = pcall(engine.generate, engine, seq,
      engine:prefill(seq, { 1, 2, 3 }), 4)
    model.logits = own
    assert.is_false(ok)
    assert.equal("the model's logits hold NaN, in row 0 of 3", why)
    assert.is_false(alone)
    assert.equal("the model's logits hold NaN, in row 0 of 1", words)
  end)

  it("is refused where a prompt is longer than the model's context", function()
    local own = model.config.context
    model.config.context = 399
    local ok, why = pcall(open, needle())
    model.config.context = own
    assert.is_false(ok)
    assert.matches("the task's length is 400, but the model's context is 399$", why)
  end)

  it("does not depend on what is decoded together", function()
    for _, task in ipairs { perplexity(), needle() } do
      local function ask(most)
        return open(task, { max_seqs = most }):ask(kv.policy("quest",
          { blocks = 6, min_blocks = 0 }))
      end
      local alone, together = ask(1), ask(2)
      assert.same(column(alone.each, "tokens"), column(together.each, "tokens"))
      assert.same(alone.score, together.score)
      assert.is_true(not alone.nll or math.abs(alone.nll - together.nll) < MOST)
    end
  end)

  it("leaves the contexts as they were, whatever the policy", function()
    local reading = open(perplexity())
    local blocks = reading.engine.cache:blocks_free()
    local first = reading:ask(kv.policy "full")
    for _, name in ipairs { "quest", "h2o_blocks", "snapkv_blocks", "random",
                             "gsa_on_device" } do
      local policy = kv.policy(name, { ratio = 0.1, sink = 1, recent = 2,
                                       min_blocks = 0 })
      local result, probe = reading:ask(policy, kv.probe)
      assert.is_true(math.abs(result.nll - first.nll) > MOST, name)
      assert.is_true(probe:metrics().bytes_share < 0.5, name)
      assert.equal(60, probe.reads.observed)
      assert.is_true(math.abs(reading:ask(kv.policy "full").nll - first.nll) < MOST)
    end
    assert.equal(blocks, reading.engine.cache:blocks_free())
    reading:close()
  end)

  it("reads the contexts again for a policy that evicts, and after it", function()
    local dense = open(perplexity()):ask(kv.policy "full")
    for _, tables in ipairs { "layer", "head" } do
      local reading = open(perplexity(), { tables = tables })
      assert.near(dense.nll, reading:ask(kv.policy "full").nll, 1e-6)
      local quest = kv.policy("quest", { ratio = 0.3, min_blocks = 0 })
      local selected = reading:ask(quest).nll
      for _, name in ipairs { "tova", "snapkv" } do
        assert.near(dense.nll, reading:ask(kv.policy(name, { ratio = 1 })).nll, MOST)
        local result, probe = reading:ask(kv.policy(name, { blocks = 5 }), kv.probe)
        local seen, stats = probe:metrics(), reading:stats()
        assert.is_true(math.abs(result.nll - dense.nll) > MOST, name)
        -- of 130 ... 149 tokens, 40 and, after snapkv's prompt, those that are decoded
        assert.near(name == "tova" and 40 / 140 or 49.5 / 140, seen.held_share, 0.02)
        -- 17 blocks of each prompt fall, 5 are taken, in each of 4 layers and heads
        assert.equal(3 * (17 - 5) * 4 * 8 * 16 * 2 * 4, stats.bytes_evicted)
        assert.is_true(stats.bytes_peak > stats.bytes_held)
      end
      assert.near(selected, reading:ask(kv.policy("quest", { ratio = 0.3,
        min_blocks = 0 })).nll, 1e-6)
      reading:close()
    end
  end)

  it("equals dense attention at a budget of everything", function()
    local reading = open(perplexity())
    local dense = reading:ask(kv.policy "full")
    for _, name in ipairs { "quest", "block_mean", "oracle", "h2o_blocks",
                             "snapkv_blocks" } do
      local result = reading:ask(kv.policy(name, { ratio = 1 }))
      assert.is_true(math.abs(result.nll - dense.nll) < MOST, name)
    end
  end)

  it("leaves out ids that the tokenizer does not have", function()
    local padded = llama.random({ model_type = "llama", hidden_act = "silu",
      hidden_size = 64, intermediate_size = 96, num_hidden_layers = 1,
      num_attention_heads = 4, vocab_size = 50 * tokenizer.size }, { device = "cpu",
      dtype = "f32", seed = 1 })
    local task = needle()
    local reading = readings.open { tokenizer = tokenizer, task = task, examples = 3,
      engine = padded:engine { blocks = readings.blocks(task, 3, 16) }, seed = 1 }
    local most = 0
    for _, each in ipairs(reading:ask(kv.policy "full").each) do
      assert.equal(9, #each.tokens)
      most = math.max(most, unpack(each.tokens))
    end
    assert.is_true(most >= tokenizer.size)
  end)

  it("has the perplexity of transformers #model", function()
    local golden = json.decode(files.read(kv.paths.root
      .. "/spec/data/tasks/perplexity.json"))
    local smollm2 = llama.load("smollm2", { device = "cpu", dtype = "f32" })
    local t = kv.tokenizer(kv.gguf(checkpoint.find "smollm2").metadata)
    local task = kv.task("perplexity", { text = temporary.file(golden.text),
      length = #golden.tokens, decode = golden.decode })
    local reading = readings.open { task = task, tokenizer = t, examples = 1, seed = 1,
      engine = smollm2:engine { blocks = 32 } }
    assert.same(golden.tokens, t:encode(golden.text))
    -- the same sums in another order, over 30 layers
    assert.is_true(math.abs(reading:ask(kv.policy "full").nll - golden.nll) <= 1e-3)
  end)
end)

describe("18_text_budget #release", function()
  local it = kv.paths.executable and it or pending

  local function run(options, environment)
    local out = temporary.folder()
    local pipe = io.popen(("%s '%s' run '%s/lua/experiments/18_text_budget.lua' "
      .. "--device=cpu --quick --csv --out='%s' %s 2>&1; echo status $?"):format(
      environment or "", kv.paths.executable, kv.paths.root, out, options))
    local printed = pipe:read "*a"
    pipe:close()
    return printed, out
  end

  it("runs without a model, on a sample", function()
    local printed, out = run "--set model=sample --set policy=full,quest,h2o_blocks"
    assert.matches("status 0\n$", printed)
    local caption = "score of needle by random weights (bytes_share)"
    assert.truthy(printed:find(caption, 1, true), printed)
    assert.truthy(printed:find("Pareto front of perplexity", 1, true))
    for _, name in ipairs { "results.csv", "score_by_bytes_share.svg",
                            "perplexity_by_bytes_share.svg", "gap_by_bytes_share.svg",
                            "log_p_by_bytes_share.svg" } do
      assert.truthy(files.read(out .. "/" .. name), name)
    end
    local gaps = 0
    for line in files.read(out .. "/results.jsonl"):gmatch "[^\n]+" do
      local row = json.decode(line)
      local m = row.metrics
      assert.is_true(m.score_low <= m.score and m.score <= m.score_high)
      assert.is_true(m.score_high - m.score_low > 0.1) -- four texts, also if they agree
      assert.same({ 4, row.config.task == "needle" and 4 or 0 }, { m.texts, m.zero_one })
      if row.config.task == "perplexity" then
        assert.is_true(math.abs(math.exp(-m.log_p) / m.perplexity - 1) < 1e-9)
        assert.is_true(m.perplexity_low < m.perplexity)
        assert.is_true(math.abs(math.exp(-m.log_p_high) / m.perplexity_low - 1) < 1e-9)
        if row.config.policy == "full" then assert.equal(0, m.gap)
        else gaps = gaps + math.abs(m.gap) end
      end
    end
    assert.is_true(gaps > 0)
  end)

  it("takes policies that evict, and draws over what is held", function()
    local printed, out = run("--set model=sample --set policy=full,quest,tova,snapkv "
      .. "--set task=perplexity --over=held_share")
    assert.matches("status 0\n$", printed)
    assert.truthy(printed:find("gap of perplexity by random weights (held_share)", 1,
      true), printed)
    assert.truthy(files.read(out .. "/log_p_by_held_share.svg"))
    for line in files.read(out .. "/results.jsonl"):gmatch "[^\n]+" do
      local row = json.decode(line)
      local m, evicts = row.metrics, kv.policy(row.config.policy).evict ~= nil
      assert.equal(not evicts, m.held_share == 1)
      assert.equal(evicts, m.bytes_evicted > 0)
      assert.equal(evicts, m.moved_share > 0)
      assert.is_true(not evicts or m.held_share > 0.1 and m.held_share < 0.2)
      assert.is_true(m.bytes_peak > 0)
    end
  end)

  it("gives duo the heads of its model", function()
    local options = "--set model=sample --set task=perplexity --set policy=duo"
    assert.matches("policy duo: heads is not set, expected results of 24_heads",
      (run(options)))
    local rows = {} -- of the sample's 2 layers of 2 KV heads, of which one holds all
    for i = 0, 3 do
      rows[i + 1] = json.encode { config = { layer = math.floor(i / 2), head = i % 2 },
                                  metrics = { lost = i == 2 and 1 or 0 } }
    end
    local heads = temporary.folder()
    options = options .. " --set heads=" .. heads
    assert.matches("expected a folder or a file with results of 24_heads", (run(options)))
    files.write(heads .. "/results.jsonl", table.concat(rows, "\n") .. "\n")
    local printed, out = run(options)
    assert.matches("status 0\n$", printed)
    local m = json.decode(files.read(out .. "/results.jsonl"):match "[^\n]+").metrics
    assert.is_true(m.held_share > 0.25 and m.held_share < 0.35, m.held_share)
  end)

  it("shows an interval over texts in every row of its table", function()
    local printed = run("--set model=sample --set length=200 --set decode=4 "
      .. "--set budget=0.1,0.3 --set task=perplexity")
    local caption, shown = "perplexity of perplexity by random weights (bytes_share)\n", 0
    local at = select(2, printed:find(caption, 1, true))
    for line in printed:sub(assert(at, printed) + 1):gmatch "[^\n]+" do
      if line:find "^gap of" then break end
      local _, cells = line:gsub("[%d.]+ %[[%d.]+, [%d.]+%]", "")
      if line:find "^%l[%w_]+ +%d" then
        assert.equal(2, cells, line)
        shown = shown + 1
      end
    end
    assert.is_true(shown >= 20, printed)
  end)

  it("reads a text that is given, with every task", function()
    local printed = run(("--set model=sample --set policy=full,streaming_blocks "
      .. "--set text='%s' --set length=1200 --set examples=1 --set decode=4 "
      .. "--set task=perplexity,needle_multikey,needle_multivalue,"
      .. "needle_multiquery,variable_tracking,frequent_words,common_words"):format(
      text_file()))
    assert.matches("status 0\n$", printed)
    local caption = "score of common_words by random weights (bytes_share)"
    assert.truthy(printed:find(caption, 1, true), printed)
  end)

  it("says how to get a model that is not there", function()
    local printed = run("--set model=smollm2", "XDG_CACHE_HOME=" .. temporary.folder())
    assert.truthy(printed:find("kvlab get smollm2", 1, true), printed)
    assert.matches("status 1\n$", printed)
  end)
end)
