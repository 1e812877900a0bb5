--- Exams of the recall model: what they take, and that full attention passes them.
local exam = require "models.recall.exam"
local kv = require "kvlab"
local prompts = require "models.recall.prompts"
require "spec.support" -- compiles kernels as specs do

describe("an exam #release", function()
  it("is passed with full attention", function()
    for _, question in ipairs { "decode", "prompt", "row", "chain", "sum" } do
      local sitting = exam.open { context = 512, prompts = 1, needles = 16,
                                  block_size = 16, seed = 1, question = question }
      local accuracy = sitting:ask(kv.policy "full")
      assert.is_true(accuracy >= 0.9, question .. " " .. accuracy)
      sitting:close()
    end
  end)

  it("is the same under a policy that may hold everything", function()
    for _, question in ipairs { "decode", "row", "chain" } do
      local sitting = exam.open { context = 256, prompts = 2, needles = 8, hops =
        question == "chain" and 2 or nil, block_size = 16, seed = 3, question = question,
        tables = "head" }
      local want = sitting:ask(kv.policy "full")
      local dense = sitting:stats()
      assert.equal(want, (sitting:ask(kv.policy("tova", { ratio = 1 }))), question)
      local all = sitting:stats()
      assert.equal(0, all.bytes_evicted)
      local _, _, probe = sitting:ask(kv.policy("tova", { blocks = 4 }), kv.probe)
      local few = sitting:stats()
      -- of 16 blocks of each context 4 stay, in each layer and head
      assert.equal(2 * 12 * sitting.engine.cache.cut_layers
        * sitting.engine.cache.cut_heads, few.pages_evicted)
      assert.is_true(few.bytes_peak < all.bytes_peak)
      -- forks share whole blocks with dense attention, and copy all of them elsewhere
      assert.is_true(dense.bytes_moved == 0 and all.bytes_moved > 0)
      assert.near(64 / 260, probe:metrics().held_share, 0.03)
      sitting:close()
    end
  end)

  it("leads through chains, whose values are the keys of the next needles", function()
    local sitting = exam.open { context = 512, prompts = 2, needles = 14, hops = 3,
                                block_size = 16, seed = 2, question = "chain" }
    local ids = prompts.ids()
    assert.equal(4, sitting.questions)
    for _, prompt in ipairs(sitting.prompts) do
      assert.equal(4, #prompt.queries)
      local text, seen = " " .. table.concat(prompt.tokens, " ") .. " ", {}
      for _, lookups in ipairs(prompt.queries) do
        assert.equal(3, #lookups)
        for hop, query in ipairs(lookups) do
          local k1, k2, v1, v2 = query.ask[2], query.ask[3], unpack(query.answer)
          local needle = table.concat({ ids.key, k1, k2, ids.val, v1, v2, ids["end"] },
            " ")
          local _, count = text:gsub(" " .. needle .. " ", "")
          assert.equal(1, count)
          _, count = text:gsub((" %d %d %d %d "):format(ids.key, k1, k2, ids.val), "")
          assert.equal(1, count, "a key of one needle")
          assert.is_nil(seen[query.needle])
          seen[query.needle] = true
          if hop > 1 then
            local before = lookups[hop - 1].answer
            assert.same({ before[1] - ids.value_first, before[2] - ids.value_first },
              { k1 - ids.key_first, k2 - ids.key_first })
          end
        end
      end
    end
    sitting:close()
  end)

  it("counts a chain or a sum as wrong when one of its needles is not read", function()
    for _, question in ipairs { "chain", "sum" } do
      local sitting = exam.open { context = 1024, prompts = 2, needles = 32, hops = 8,
                                  block_size = 16, question = question }
      local none = sitting:ask(kv.policy("streaming_blocks",
        { blocks = 3, min_blocks = 0 }))
      assert.equal(0, none, question)
      sitting:close()
    end
  end)

  it("refuses hops that mean nothing", function()
    local o = { context = 512, prompts = 1, needles = 3, block_size = 16, hops = 4 }
    assert.error_matches(function() exam.open(o) end, "hops is given, but question is")
    o.question = "sum"
    assert.error_matches(function() exam.open(o) end,
      "needles is 3, expected at least hops = 4")
  end)

  it("asks about every needle once when there are fewer than 16", function()
    local sitting = exam.open { context = 256, prompts = 2, needles = 5, block_size = 16 }
    local asked, count = {}, 0
    local accuracy = sitting:ask(kv.policy "full", nil, function(query)
      asked[query.needle], count = (asked[query.needle] or 0) + 1, count + 1
    end)
    sitting:close()
    assert.equal(5, sitting.questions)
    assert.same({ 2, 2, 2, 2, 2 }, asked)
    assert.equal(10, count)
    assert.is_true(accuracy >= 0.8, tostring(accuracy))
  end)

  it("has no context in common with that of another seed", function()
    local has, places = {}, 0
    for seed = 0, 2 do
      local sitting = exam.open { context = 256, prompts = 4, needles = 16,
                                  block_size = 16, seed = seed }
      for i, prompt in ipairs(sitting.prompts) do
        local text = table.concat(prompt.tokens, " ")
        assert.is_nil(has[text], ("context %d of seed %d"):format(i, seed))
        has[text], places = true, places + 1
      end
      sitting:close()
    end
    assert.equal(12, places)
  end)

  it("refuses options by name and type, and when one is missing", function()
    local function refused(words, change)
      local o = { context = 512, prompts = 1, needles = 16, block_size = 16 }
      for name, value in pairs(change) do o[name] = value ~= "none" and value or nil end
      local line = debug.getinfo(1, "l").currentline + 1
      local ok, text = pcall(function() exam.open(o) end)
      assert.is_false(ok)
      assert.truthy(text:find("exam_spec.lua:" .. line .. ": exam.open: ", 1, true), text)
      assert.truthy(text:find(words, 1, true), text)
    end
    refused('"offlod" is no option, did you mean offload?', { offlod = {} })
    refused("context is 0, expected a whole number >= 1", { context = 0 })
    refused("seed is a table, expected a whole number", { seed = {} })
    refused('question is "promt", expected one of decode, prompt, row, chain, sum',
      { question = "promt" })
    refused("needles is missing, expected a whole number >= 1", { needles = "none" })
  end)
end)
