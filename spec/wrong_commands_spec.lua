--- What a newcomer types wrong: each gets a clear line, a status that is not 0, and no
-- traceback. The front door's own words are in front_door_spec.lua.
local doc_blocks = require "spec.doc_blocks"
local kv = require "kvlab"

if not io.open(kv.paths.root .. "/README.md") then return end -- a bundle is not for work

local RECALL = "run lua/experiments/01_recall.lua --quick"
local QUEST = RECALL .. " --set policy=quest"
local SHORT = QUEST .. " --set context=512"
local TRACE = "run lua/experiments/09_trace.lua --set trace="

local CASES = { -- words after ./kvlab, words of the answer
  { "run syntax.lua", "syntax.lua:2: ')' expected" },
  { "run docs", "cannot read docs: Is a directory" },
  { "run big.lua", "no memory on cpu for 4000000000000 bytes" },
  { "run lua/experiments/00_cached_lm.lua --device=cuda:99", " cuda" },
  { SHORT .. " --isa=sse9",
    'kvlab: --isa: isa is "sse9"; this build and this processor have ' },
  { SHORT .. " --isa=", "this build and this processor have " },
  { SHORT .. " --set isa=plain", "isa" },
  { RECALL .. " --set policy=quset", 'no policy "quset"; did you mean "quest"?' },
  { SHORT .. " --set polcy=quest", "nothing is called polcy; did you mean policy?" },
  { SHORT .. " --set promts=2", ", unit, repeats\n" },
  { RECALL .. " policy=quest", "policy=quest is no option, expected --set policy=quest" },
  { RECALL .. " --set policy=boom",
    "policy boom cannot be loaded: ./policies/boom.lua:1: boom" },
  { QUEST .. " --set policy=tova",
    "kvlab: both --set policy=quest and --set policy=tova are given, expected one" },
  { QUEST .. " --set context=abc", 'context is "abc", expected a number' },
  { QUEST .. " --set context=-5", "context is -5, expected a whole number >= 1" },
  { QUEST .. " --set context=51.2", "context is 51.2, expected a whole number >= 1" },
  { QUEST .. " --set context=20", "needles" },
  { SHORT .. " --set budget=2", "ratio is 2, expected 0 ... 1" },
  { RECALL .. " --set policy=nan",
    "policy nan, layer 0: all scores of step 1 are NaN or -inf, expected" },
  { SHORT .. " --set prompts=0", "prompts is 0, expected a whole number >= 1" },
  { SHORT .. " --set block_size=0", "block_size is 0, expected a whole number >= 1" },
  { SHORT .. " --set memory=disk",
    'memory is "disk", expected one of resident, ring, hot' },
  { SHORT .. " --out=/proc/x", "results cannot be written: /proc/x" },
  { SHORT .. " --out=syntax.lua", "results cannot be written: syntax.lua" },
  { TRACE .. "none.jsonl", "none.jsonl: No such file" },
  { TRACE .. "empty.jsonl", "empty.jsonl has no requests" },
  { "test empty.jsonl", "no spec ran" },
  { "test policy qest", "no such policy: qest; did you mean quest?" },
  { "run 01_recal", "no such script: 01_recal; did you mean 01_recall?" },
  { "run zzz", "no such script: zzz\n" },
  { "get zzz", 'get knows no "zzz". There is ' },
  { "bench none.lua", "cannot open none.lua" },
  { "bench P99", 'no bench "P99"' },
  { "bench P1 --set foo=1", "no setting foo, expected lmdb=FILE or redis=URL" },
  { "bench P1 --out=x", "unknown option --out" },
  { "test --quick", "unknown option --quick" },
  { "time quest --out=x", "unknown option --out" },
  { "compare a b --set x=1", "unknown option --set" },
  { "compare a b --device=cpu", "unknown option --device" },
  { "chat nothere", "or a name that ./kvlab get fetches: smollm2" },
  { "serve nothere", "or a name that ./kvlab get fetches: smollm2" },
  { "serve ./no.gguf", "kvlab: ./no.gguf: No such file or directory. A model is a " },
  { "sweep status none", "none has no shards" },
  { "sweep submit 01_recal", "no such script: 01_recal; did you mean 01_recall?" },
  { "sweep submit 01_recall", "submit needs --slurm" },
}

describe("a wrong command #release", function()
  local scratch
  setup(function()
    scratch = doc_blocks.scratch(kv.paths)
    scratch:write("syntax.lua", "print(1")
    scratch:write("big.lua", 'require("kvlab").zeros("cpu", "f32", { 1e12 })')
    scratch:sh ": >empty.jsonl; mkdir policies"
    scratch:write("policies/boom.lua", 'error "boom"')
    scratch:write("policies/nan.lua", [[
      return require("kvlab").policy.define { name = "nan", decode = true, own_bytes = 0,
        score = function(_, ctx) return ctx:new_scores():fill_(0 / 0) end }]])
  end)

  it("is told that a folder with a backslash cannot be built in", function()
    local status, output = scratch:sh(("d='a\\b'; mkdir -p \"$d/lua/kvlab/shell\" "
      .. "&& cd '%s' && cp -r kvlab VERSION premake5.lua tools \"$OLDPWD/$d\" "
      .. "&& cp lua/kvlab/shell/verbs.txt \"$OLDPWD/$d/lua/kvlab/shell\" "
      .. "&& cd \"$OLDPWD/$d\" && ./kvlab build"):format(kv.paths.root))
    assert.equal(1, status, output)
    assert.matches("kvlab: .* a folder whose path has a backslash: .*/a\\b\n$", output)
  end)

  for _, case in ipairs(CASES) do
    it("is told what is wrong: " .. case[1], function()
      local status, output = scratch:sh("rm -rf results; ./kvlab " .. case[1])
      assert.is_true(status == 1 or status == 2, output)
      assert.is_true(output:find(case[2], 1, true) ~= nil, output)
      assert.is_nil(output:find("traceback", 1, true), output)
      assert.is_nil(output:find "%f[%g]%S*lua/[%w_/]+%.lua:%d+: ", output)
    end)
  end
end)
