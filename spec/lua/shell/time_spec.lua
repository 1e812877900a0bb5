--- `kvlab time`: policies by name and by file, written in all ways, side by side.
local doc_blocks = require "spec.doc_blocks"
local json = require "kvlab.json"
local kv = require "kvlab"

if not kv.paths.executable then return end

local SMALL = " --device=cpu --quick --set context=100 --set layers=1 "
local COLD = SMALL .. "--set flush_mib=1"

describe("kvlab time #release", function()
  local scratch
  setup(function()
    scratch = doc_blocks.scratch(kv.paths)
    scratch:sh "mkdir policies"
    scratch:write("policies/mine.lua", [[
local kv, e = require "kvlab", require("kvlab").expr
return kv.policy.define {
  name = "mine", decode = true, defaults = { ratio = 0.1 },
  summary = { mean = e.k:mean "token" }, score = (e.q * e.mean):sum "dim":max "head",
  bias = e.position * 0.001,
}]])
    scratch:write("newest.lua", [[
local kv = require "kvlab"
return kv.policy.define {
  name = "newest", decode = true, own_bytes = 0, defaults = { ratio = 0.1 },
  compute_decode = function(self, attention, ctx, out)
    local selection, n = ctx:select(ctx:new_scores(1):arange_(), self.budget)
    return attention:over(selection, ctx, out), selection, n
  end,
}]])
  end)

  local function time(words, status)
    local got, output = scratch:sh("./kvlab time " .. words)
    assert.equal(status or 0, got, output)
    return output
  end

  local function stages_of(row)
    local names = {}
    for _, name in ipairs { "summary", "score", "select", "attend", "other", "total" } do
      local us = row.us[name]
      if us then
        assert.is_true(us[1] > 0 and us[2] <= us[1] and us[1] <= us[3], name)
        names[#names + 1] = name
      end
    end
    return table.concat(names, " ")
  end

  it("times policies by name and file, and full as the reference", function()
    local rows = {}
    for line in time("quest,mine,newest.lua --json --set steps=6" .. SMALL):gmatch
      "[^\n]+" do
      rows[#rows + 1] = json.decode(line)
    end
    assert.equal("quest mine newest full", table.concat({ rows[1].policy, rows[2].policy,
      rows[3].policy, rows[4].policy }, " "))
    assert.equal("summary score select attend other total", stages_of(rows[1]))
    assert.equal("summary score select attend other total", stages_of(rows[2]))
    assert.equal("select attend other total", stages_of(rows[3]))
    assert.equal("attend other total", stages_of(rows[4]))
    assert.same({ 1, 1, 1 }, rows[1].ratio)
    assert.is_true(rows[4].ratio[2] < rows[4].ratio[3])
    assert.equal(100, rows[4].settings.context)
  end)

  it("times policies that evict, over tables of their own", function()
    for _, tables in ipairs { "head", "layer" } do
      local words = "'quest, tova' --json --set steps=6 --set seqs=2 --set tables="
      local rows = {}
      for line in time(words .. tables .. SMALL):gmatch "[^\n]+" do
        rows[#rows + 1] = json.decode(line)
      end
      assert.equal("tova", rows[2].policy)
      assert.equal("attend other total", stages_of(rows[2]))
      assert.equal(tables, rows[2].settings.tables)
    end
  end)

  it("prints them side by side, and what was measured", function()
    local text = time("streaming_blocks,quest --set seqs=2 --set unit=blocks "
      .. "--set budget=4 --set steps=3" .. COLD)
    for _, words in ipairs {
      "1 layers, 8 query heads on 2 KV heads of 64, bf16; 2 x 100 tokens in blocks of",
      "budget: blocks = 4", "cold caches: 1 MiB are read before each layer",
      "medians of 3 steps", "ratio to streaming_blocks" } do
      assert.truthy(text:find(words, 1, true), text)
    end
    assert.matches("\nus a step +streaming_blocks +quest +full\n", text)
    assert.matches("\nsummary +%- +%d+ +%-\n", text)
    assert.matches("warm caches", time("quest --set steps=1" .. SMALL
      .. "--set flush_mib=0"), 1, true)
  end)

  it("names what is wrong with its arguments", function()
    local function says(status, words, command)
      assert.truthy(time(command .. SMALL, status):find(words, 1, true), words)
    end
    says(2, "takes policies, separated by commas: names or files; given none", "")
    says(1, 'dtype is "int8", expected one of f32, f16, bf16',
      "quest --set dtype=int8")
    says(1, 'tables is "one", expected one of layer, head', "quest --set tables=one")
    says(2, "no such policy: qest; did you mean quest?", "quest,qest")
    says(2, "no such file: ./none.lua", "./none.lua")
    says(1, "there are two policies quest", "quest,quest")
    says(1, "nothing is called contxt; did you mean context?", "quest --set contxt=1")
    says(1, "seqs is 0, expected a whole number >= 1", "quest --set seqs=0")
    says(1, "policy xattention does not select in decode", "xattention")
  end)
end)
