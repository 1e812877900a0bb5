--- kv.longbench, beside LongBench's own metrics (tools/longbench_goldens.py), and the
-- task of that name. The prompts here are made up; LongBench's are its own.
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local temporary = require "spec.temporary"

local tokenizer = kv.tokenizer(kv.paths.root .. "/spec/data/tokenizers/smollm.json")

describe("LongBench's scores #release", function()
  local rows = json.decode(files.read(kv.paths.root .. "/spec/data/tasks/longbench.json"))

  for _, name in ipairs { "f1", "rouge", "classes", "count", "retrieval", "retrieval_zh",
                          "code" } do
    it("are those of LongBench: " .. name, function()
      local different, some = {}, false
      for i, row in ipairs(rows) do
        local its = row.scores[name]
        local got = kv.longbench[name:gsub("_zh", "")](row.given, its.answers, row)
        some = some or its.score > 0 and its.score < 1
        if math.abs(got - its.score) > 1e-12 then
          different[#different + 1] = ("%d: %g, expected %g"):format(i, got, its.score)
        end
      end
      assert.same({}, different)
      assert.is_true(some or name == "retrieval_zh")
      assert.is_true(#rows >= 70)
    end)
  end

  it("refuse what they cannot score", function()
    assert.error_matches(function() kv.longbench.retrieval("3", { "three" }) end,
      'the right answer is "three", expected the number of a paragraph', 1, true)
    assert.error_matches(function() kv.longbench.classes("3", { "three" }, {}) end,
      "the example has no all_classes", 1, true)
    assert.error_matches(function() kv.longbench.f1("3", {}) end,
      "longbench.f1: answers is a table, expected a list", 1, true)
  end)
end)

describe("task longbench #release", function()
  local PROMPTS = { qasper = "Read.\n\n{context}\n\nAsked: {input}\nSaid:",
                    trec = "Kinds.\n{context}\n{input}", lcc = "{context}Next:\n" }
  local folder = temporary.folder()
  local function written(name, text)
    files.write(folder .. "/" .. name, text)
    return folder .. "/" .. name
  end
  local prompts = written("prompts.json", json.encode(PROMPTS))
  local lengths = written("lengths.json", '{"qasper": 24, "trec": 8}')
  local row = { input = "Who {context}?",
                context = ("It rains. "):rep(80) .. "Ash {input}.",
                answers = { "Ash" }, all_classes = json.null }
  local file = written("data.jsonl", json.encode(row) .. "\n")

  local function open(o)
    local given = { file = file, prompts = prompts, lengths = lengths, dataset = "qasper",
                    length = 2000 }
    for name, value in pairs(o or {}) do
      given[name] = value ~= json.null and value or nil
    end
    return kv.task("longbench", given)
  end

  it("asks with the prompt of the data set", function()
    local example = open():draw(tokenizer, 1, 1)[1]
    local text = "Read.\n\n" .. row.context .. "\n\nAsked: Who {context}?\nSaid:"
    assert.equal(text, example.text)
    assert.same(tokenizer:encode(text, { eos = false }), example.ids)
    assert.equal(24, example.answer_tokens)
    local after = {}
    for i = example.read + 1, #example.ids do after[#after + 1] = example.ids[i] end
    assert.equal("\n\nAsked: Who {context}?\nSaid:", tokenizer:decode(after))
  end)

  it("leaves out the middle of a prompt that is too long, as LongBench does", function()
    for _, length in ipairs { 60, 101, 200 } do
      local example = open { length = length }:draw(tokenizer, 1, 1)[1]
      local ids = tokenizer:encode(open():draw(tokenizer, 1, 1)[1].text, { eos = false })
      assert.is_true(#example.ids + 24 <= length)
      assert.is_true(#example.ids + 24 > length - 12)
      local half = math.floor(#example.ids / 2) - 4
      for i = 1, half do
        assert.equal(ids[i], example.ids[i])
        assert.equal(ids[#ids + 1 - i], example.ids[#example.ids + 1 - i])
      end
      assert.is_true(example.read < #example.ids)
    end
  end)

  it("scores as its data set does", function()
    local task = open { dataset = "trec", chat = true }
    assert.is_false(task.chat) -- LongBench asks these without
    local example = { answers = { "Date" }, all_classes = { "Date", "Number", "Other" } }
    assert.equal(0.5, task:score("\nDate or Number\nOther", example))
    task = open { dataset = "lcc", answer_tokens = 9 }
    assert.equal(1, task:score("# note\nx = 1\ny = 2", { answers = { "x = 1" } }))
    assert.equal(1, open():score("the Ash", { answers = { "ash" } }))
  end)

  it("says what is wrong with its options and files", function()
    local none = json.null
    for words, o in pairs {
      ["file is missing, expected a string"] = { file = none },
      ["prompts is missing, expected a string"] = { prompts = none },
      ["dataset is missing, expected a string"] = { dataset = none },
      ["lengths is missing, expected dataset2maxlen.json"] = { lengths = none },
      ['dataset is "qaspr", expected one of LongBench'] = { dataset = "qaspr" },
      ["dureader is scored by the words that jieba finds"] = { dataset = "dureader" },
      ["prompts.json has no string for musique"] = { dataset = "musique" },
      ["lengths.json has no number for lcc"] = { dataset = "lcc" },
      ["the file /no/such cannot be read"] = { prompts = "/no/such" },
      ["bad.jsonl, line 1"] = { file = written("bad.jsonl", "{") },
    } do
      local ok, why = pcall(open, o)
      assert.is_false(ok, words)
      assert.truthy(tostring(why):find(words, 1, true), why)
    end
  end)
end)
