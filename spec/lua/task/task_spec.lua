--- kv.task: prompts of the asked length, with the answers where they should be; files of
-- examples; and what is wrong with them.
local files = require "kvlab.files"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"
local text_models = require "spec.text_models"
local texts = require "kvlab.task.texts"

local DATA = kv.paths.root .. "/spec/data/tokenizers/"
local tokenizers = {}

--- A tokenizer of the specs, with a chat template.
local function tokenizer(name)
  if not tokenizers[name] then
    tokenizers[name] = kv.tokenizer(DATA .. name .. ".json")
    tokenizers[name].template = text_models.CHATML
  end
  return tokenizers[name]
end

local function count_of(text, part)
  local count, at = 0, 1
  while true do
    local first, last = text:find(part, at, true)
    if not first then return count end
    count, at = count + 1, last + 1
  end
end

--- What stands before the question.
local function context_of(example)
  local last
  for at in example.text:gmatch "()\n+Question: " do last = at end
  return example.text:sub(1, last - 1)
end

--- A JSONL file with 40 questions about a passage each.
local function passages()
  local lines = {}
  for i = 1, 40 do
    lines[i] = ('{"input": "Who lives at number %d?", "context": "House %d. The person '
      .. 'in house %d is called P%03d.", "answers": ["P%03d"], "_id": %d}'):format(i, i,
      i, i, i, i)
  end
  return temporary.file(table.concat(lines, "\n") .. "\n", "passages.jsonl")
end

local function raises(words, fn, ...)
  local ok, why = pcall(fn, ...)
  assert.is_false(ok, "no error: " .. words)
  assert.truthy(tostring(why):find(words, 1, true), tostring(why))
end

local GENERATED = { "needle", "needle_multikey", "needle_multivalue", "needle_multiquery",
                    "variable_tracking", "common_words", "frequent_words" }

describe("a generated task #release", function()
  for nth, name in ipairs(GENERATED) do
    for k, kind in ipairs { "smollm", "gpt2", "llama2", "qwen2" } do
      it(("fills its length: %s for %s"):format(name, kind), function()
        -- each task with each tokenizer takes two of these; with all tokenizers, all
        -- four
        for _, o in ipairs(support.one_each({ { length = 6000, chat = false },
            { length = 6000, chat = true }, { length = 9001, chat = false },
            { length = 9001, chat = true } }, 2 * nth + k, 2)) do
          local length = o.length
          for _, example in ipairs(kv.task(name, o):draw(tokenizer(kind), 2, 5)) do
            local tokens = #example.ids + example.answer_tokens
            assert.is_true(tokens <= length, tokens .. " tokens")
            -- a sentence more, or three entries of a list, would be too much; these
            -- tokenizers have a token for a letter or two
            assert.is_true(tokens > length - 128, tokens .. " tokens")
          end
        end
      end)
    end

    it("is the same for a seed and another one for others: " .. name, function()
      local task, t = kv.task(name, { length = 6000 }), tokenizer "gpt2"
      local first = task:draw(t, 3, 1)
      assert.same(first, task:draw(t, 3, 1))
      assert.same(first[2], task:draw(t, 2, 1)[2])
      local other = task:draw(t, 3, 2)
      for i = 1, 3 do
        for j = 1, 3 do
          assert.are_not.same(first[i].ids, other[j].ids)
          if i ~= j then assert.are_not.same(first[i].answers, first[j].answers) end
        end
      end
    end)

    it("cuts its tokens before the question: " .. name, function()
      for _, kind in ipairs { "smollm", "gpt2", "llama2", "qwen2" } do
        for _, chat in ipairs { false, true } do
          local t = tokenizer(kind)
          local example = kv.task(name, { length = 6000, chat = chat }):draw(t, 1, 1)[1]
          local before, after = {}, {}
          for i, id in ipairs(example.ids) do
            table.insert(i <= example.read and before or after, id)
          end
          local question = t:decode(after, { special = true })
          assert.truthy(question:find("Question: ", 1, true), question)
          assert.is_nil(t:decode(before):find("Question: ", 1, true))
          assert.is_true(#question < 400, question)
        end
      end
    end)

    it("says how long it has to be: " .. name, function()
      local task = kv.task(name, { length = 40 })
      raises(("task %s: length is 40, expected at least "):format(name), task.draw, task,
        tokenizer "gpt2", 1, 1)
      local ok, why = pcall(task.draw, task, tokenizer "gpt2", 1, 1)
      local least = not ok and tonumber(why:match "at least (%d+)")
      assert.equal(1, #kv.task(name, { length = least }):draw(tokenizer "gpt2", 1, 1))
    end)
  end

  it("takes its sentences from a text", function()
    local path = temporary.file "First one. Is this two? “Three,” he said. Four 4.5 is."
    local task = kv.task("needle", { length = 600, text = path })
    for _, example in ipairs(task:draw(tokenizer "gpt2", 4, 1)) do
      assert.truthy(context_of(example):find("First one. Is this two?", 1, true))
      assert.is_nil(example.text:find("gardener", 1, true))
    end
    assert.same({ "First one.", "Is this two?", "“Three,” he said.", "Four 4.5 is." },
      texts.sentences "First one. Is this two?\n“Three,” he said. Four 4.5 is.")
  end)
end)

describe("needles #release", function()
  it("are in the text once each, and no other number is", function()
    for name, wanted in pairs { needle = { 1, 1 }, needle_multikey = { 1, 4 },
                                needle_multivalue = { 4, 4 },
                                needle_multiquery = { 4, 4 } } do
      for _, example in ipairs(kv.task(name, { length = 3000 }):draw(tokenizer "gpt2", 4,
        7)) do
        local context = context_of(example)
        assert.equal(wanted[1], #example.answers)
        for _, answer in ipairs(example.answers) do
          assert.equal(1, count_of(context, answer))
          assert.equal(7, #answer)
          assert.equal(0, count_of(example.text:sub(#context + 1), answer))
        end
        local _, numbers = context:gsub("%d+", "")
        assert.equal(wanted[2], numbers)
      end
    end
  end)

  it("are at the depth that was asked for", function()
    for _, depth in ipairs { 0, 0.25, 0.5, 0.9, 1 } do
      local task = kv.task("needle", { length = 4000, depth = depth })
      for _, example in ipairs(task:draw(tokenizer "gpt2", 3, 1)) do
        local context = context_of(example):match "\n\n(.*)$"
        local at, total = nil, 0
        for sentence in context:gmatch "[^.]+%." do
          if sentence:find(example.answers[1], 1, true) then at = total
          else total = total + 1 end
        end
        assert.is_true(math.abs(at / total - depth) <= 0.5 / total + 1e-9,
          ("%d of %d"):format(at, total))
      end
    end
  end)

  it("are asked about by their key", function()
    local example = kv.task("needle_multikey", {}):draw(tokenizer "gpt2", 1, 3)[1]
    local key = example.text:match "What is the magic number of (the %l+ %l+) in the text"
    local needle = ("The magic number of %s is %s."):format(key, example.answers[1])
    assert.equal(1, count_of(example.text, needle))
  end)
end)

describe("variable tracking #release", function()
  it("asks for the variables that its chain leads to", function()
    for _, o in ipairs { { chains = 1, hops = 4 }, { chains = 3, hops = 2 } } do
      o.length = 3000
      for _, example in ipairs(kv.task("variable_tracking", o):draw(tokenizer "gpt2", 4,
        2)) do
        local value_of, reached, count = {}, {}, 0
        local asked = example.text:match "have the value (%d+), directly"
        for name, value in context_of(example):gmatch "VAR (%u+) = ([^.]+)%." do
          local number = value:match "^%d+$" or value_of[value:match "^VAR (%u+)$"]
          assert.truthy(number, "a variable is used before it has a value")
          assert.is_nil(value_of[name])
          value_of[name], count = number, count + 1
          if number == asked then reached[#reached + 1] = name end
        end
        assert.same(example.answers, reached)
        assert.equal(o.chains * (o.hops + 1), count)
      end
    end
  end)
end)

--- How often each word occurs, and the words by that, the most frequent first.
local function counted(text, pattern)
  local counts, list = {}, {}
  for word in text:gmatch(pattern) do
    if not counts[word] then list[#list + 1] = word end
    counts[word] = (counts[word] or 0) + 1
  end
  table.sort(list, function(a, b) return counts[a] > counts[b] end)
  return counts, list
end

local function sorted_list(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end

describe("words #release", function()
  it("of a list occur as often as they should", function()
    for _, o in ipairs { {}, { common = 4, often = 7, seldom = 2, length = 2500 } } do
      o.length = o.length or 9000
      local example = kv.task("common_words", o):draw(tokenizer "gpt2", 1, 1)[1]
      local counts, list = counted(context_of(example), "%d+%. ([%l-]+)")
      local common = o.common or 10
      assert.same(sorted_list(example.answers), sorted_list { unpack(list, 1, common) })
      assert.is_true(#list > common + 20)
      for i, word in ipairs(list) do
        assert.equal(i <= common and (o.often or 30) or (o.seldom or 3), counts[word])
      end
    end
  end)

  it("that are made up occur as Zipf has it", function()
    for _, alpha in ipairs { 2, 1.5 } do
      local o = { alpha = alpha, length = 6000 }
      local task = kv.task("frequent_words", o)
      for _, example in ipairs(task:draw(tokenizer "gpt2", 3, 1)) do
        local coded = context_of(example):match "\n\n(.*)$"
        local counts, list = counted(coded, "%f[%S](%S+)")
        assert.equal("....", list[1])
        assert.same(example.answers, { list[2], list[3], list[4] })
        assert.is_true(counts[list[4]] > counts[list[5]])
        assert.is_true(math.abs(counts[list[1]] / counts[list[3]] - 3 ^ alpha) < 1)
      end
    end
    raises("alpha is 1, expected more than 1", kv.task, "frequent_words", { alpha = 1 })
  end)
end)

describe("questions about passages #release", function()
  it("have their passage among others of the file", function()
    local path = passages()
    for _, length in ipairs { 400, 1500, 9000 } do -- the last has passages twice
      local task = kv.task("passages", { file = path, length = length })
      for _, example in ipairs(task:draw(tokenizer "gpt2", 3, 1)) do
        local number = example.answers[1]:match "P0*(%d+)"
        local passage = ("House %s. The person in house %s"):format(number, number)
        assert.equal(1, count_of(example.text, passage))
        assert.truthy(example.text:find(("Who lives at number %s?"):format(number), 1,
          true))
        local shown = count_of(example.text, "\nHouse ")
        assert.is_true(shown > length / 100, shown)
        assert.is_true(#example.ids + example.answer_tokens <= length)
      end
    end
    raises("task passages: file is missing", kv.task, "passages", {})
  end)
end)

describe("examples of a file #release", function()
  local LINE = '{"input": "%s", "context": "%s", "answers": ["%s"], "length": 3, '
    .. '"dataset": "made", "language": "en", "all_classes": null, "_id": "x"}'

  it("are those of LongBench's format", function()
    local long = ("filler words here. "):rep(200)
    local path = temporary.file(LINE:format("Q1?", "Short.", "A1") .. "\r\n\n"
      .. LINE:format("Q2?", "Begin. " .. long .. "End.", "A2"))
    local task = kv.task("examples", { file = path, length = 500 })
    local list = task:draw(tokenizer "gpt2", 2, 1)
    assert.equal("Short.\n\nQuestion: Q1?\nAnswer:", list[1].text)
    assert.truthy(list[2].text:find "^Begin%. filler")
    assert.truthy(list[2].text:find("End.\n\nQuestion: Q2?\nAnswer:", 1, true))
    local tokens = #list[2].ids + list[2].answer_tokens
    assert.is_true(tokens <= 500 and tokens > 400, tokens)
    assert.equal(2, #task:draw(tokenizer "gpt2", 9, 1))
    assert.equal(1, #task:draw(tokenizer "gpt2", 1, 1))
  end)

  it("are scored as the task says, by the first line", function()
    local path = temporary.file(LINE:format("Q?", "C", "the right answer"))
    local example = { answers = { "the right answer" } }
    local answer = "\nA right answer.\nQuestion: more?"
    local all = { exact = 1, f1 = 1, rouge_l = 2 / 3, all = 0, part = 0 }
    for metric, wanted in pairs(all) do
      local task = kv.task("examples", { file = path, metric = metric })
      assert.is_true(math.abs(wanted - task:score(answer, example)) < 1e-12, metric)
    end
    local task = kv.task("examples", { file = path, first_line = false })
    assert.is_true(task:score(answer, example) < 1)
  end)

  it("have an error that names the line", function()
    local good = LINE:format("Q?", "C", "A") .. "\n"
    local function fails(words, text)
      local path = temporary.file(text)
      raises(path .. words, kv.task, "examples", { file = path })
    end
    fails(", line 2: column 2: ", good .. "{]\n")
    fails(", line 3: answers is missing", good .. "\n" .. '{"input": "Q?"}\n')
    fails(", line 1: answers is missing or no list", '{"input": "Q?", "answers": [1]}')
    fails(", line 1: answers is missing or no list", '{"input": "Q?", "answers": []}')
    fails(", line 1: context is a number", '{"input": "Q?", "context": 1}')
    fails(", line 1: there is no input", '{"answers": ["A"]}')
    fails(", line 1: expected an object", "7")
    raises("has no examples", kv.task, "examples", { file = temporary.file " \n" })
    raises("the file /no/such cannot be read", kv.task, "examples", { file = "/no/such" })
    raises("task examples: file is missing", kv.task, "examples")
    raises("template has no {context}", kv.task, "examples",
      { file = temporary.file(good), template = "x" })
    local task = kv.task("examples", { file = temporary.file(good), length = 5 })
    raises("length is 5, and example 1 of", task.draw, task, tokenizer "gpt2", 1, 1)
  end)
end)

describe("windows of a text #release", function()
  it("are different ones, and end with the tokens to decode", function()
    local words = {}
    for i = 1, 4000 do words[i] = ("w%d"):format(i) end
    local path = temporary.file(table.concat(words, " "))
    local task = kv.task("perplexity", { text = path, length = 200, decode = 30 })
    local t, seen = tokenizer "gpt2", {}
    local list = task:draw(t, 20, 3)
    for _, example in ipairs(list) do
      assert.same({ 170, 30, 169 }, { #example.ids, #example.target, example.read })
      for word in t:decode(example.ids):gmatch "%f[%w]w%d+%f[ ]" do
        assert.is_nil(seen[word])
        seen[word] = true
      end
    end
    assert.same(list, task:draw(t, 20, 3))
    assert.are_not.same(list, task:draw(t, 20, 4))
    local whole = t:encode(table.concat(words, " "))
    raises(("has %d tokens, expected at least 200000"):format(#whole), task.draw, task, t,
      1000, 1)
  end)

  it("begin as a text does", function()
    local path = temporary.file(("one two three "):rep(100))
    local t = tokenizer "llama2"
    local begins = t:encode("", { eos = false })
    local task = kv.task("perplexity", { text = path, length = 64, decode = 4 })
    local example = task:draw(t, 1, 1)[1]
    assert.equal(64, #example.ids + #example.target)
    for i, id in ipairs(begins) do assert.equal(id, example.ids[i]) end
  end)

  it("need a text that is there and is not empty", function()
    raises("task perplexity: text is missing", kv.task, "perplexity")
    raises("length is 65, expected decode + 2 or more, 66", kv.task, "perplexity",
      { text = "x", length = 65 })
    local function draw(path)
      kv.task("perplexity", { text = path }):draw(tokenizer "gpt2", 1, 1)
    end
    raises("the text /no/such cannot be read", draw, "/no/such")
    raises("is empty", draw, temporary.file " \n")
    raises("is empty", function()
      kv.task("needle", { text = temporary.file "" })
    end)
    local popen = io.popen
    rawset(io, "popen", function() return popen "true" end)
    local has, read = texts.has_kjv, texts.read
    local ok, why = pcall(read, "kjv")
    local is_there = has()
    rawset(io, "popen", popen)
    if ok then return end -- it was read before, and is kept
    assert.is_false(is_there)
    assert.truthy(why:find("Debian package bible-kjv-text", 1, true))
  end)
end)

describe("tasks #release", function()
  it("are found by name, in lua/tasks and folders of one's own", function()
    local names = kv.task.names()
    for _, name in ipairs { "examples", "needle", "passages", "perplexity" } do
      local found = false
      for _, other in ipairs(names) do found = found or other == name end
      assert.is_true(found, name)
    end
    raises('no task "nedle"; did you mean "needle"?', kv.task, "nedle")
  end)

  it("refuse wrong options and definitions", function()
    raises('task needle: "kyes" is no option, did you mean keys?', kv.task, "needle",
      { kyes = 2 })
    raises("task needle: keys is 0, expected a whole number >= 1", kv.task, "needle",
      { keys = 0 })
    raises("task needle: depth is 2, expected 0 ... 1", kv.task, "needle", { depth = 2 })
    raises("task.define: x has neither, expected build or examples", kv.task.define,
      { name = "x" })
    raises("task.define: x has both, expected build or examples", kv.task.define,
      { name = "x", build = print, examples = print })
    raises("task.define: default y is a table", kv.task.define,
      { name = "x", build = print, defaults = { y = {} } })
    raises('no task "nedle"', kv.task.vary, "nedle", { name = "x" })
    local task = kv.task "needle"
    raises("draw: tokenizer is a table, expected a tokenizer", task.draw, task, {}, 1)
    raises("draw: n is 0", task.draw, task, tokenizer "gpt2", 0)
    raises("score: given is nil", task.score, task, nil, { answers = { "x" } })
  end)

  it("make a row depend on their files, that of another task too", function()
    local used = require("kvlab.sources").collect(kv.task, "needle_multikey")
    local names = {}
    for path in pairs(used) do
      names[path:match "lua/tasks/([%w_]+)%.lua$" or path] = true
    end
    assert.same({ needle = true, needle_multikey = true }, names)
  end)

  it("say which scores can only be 0 or 1", function()
    local one, two = { answers = { "a" } }, { answers = { "a", "b" } }
    local function says(name, options)
      local task = kv.task(name, options)
      return { task:is_zero_one(one), task:is_zero_one(two) }
    end
    assert.same({ true, false }, says "needle") -- a share of the right answers
    local file = temporary.path()
    files.write(file, '{"input": "?", "context": "c", "answers": ["a"]}')
    assert.same({ true, true }, says("examples", { file = file, metric = "exact" }))
    assert.same({ false, false }, says("examples", { file = file, metric = "f1" }))
    assert.is_false(kv.task("needle"):is_zero_one { target = { 1 } })
  end)

  it("may have a score of their own", function()
    local task = kv.task.define { name = "own", build = function() return {} end,
      metric = function(given, answers) return given == answers[1] and 0.5 or 0 end } {}
    assert.equal(0.5, task:score("x", { answers = { "x" } }))
  end)
end)
