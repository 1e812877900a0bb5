--- `kvlab run SCRIPT --help`: what a script takes, from the script itself.
local doc_blocks = require "spec.doc_blocks"
local kv = require "kvlab"

if not kv.paths.executable then return end

describe("the help of a script", function()
  local scratch
  setup(function()
    scratch = doc_blocks.scratch(kv.paths)
    scratch:write("asks.lua", [[
--- How many? Counts them.
-- of: what is counted
local kv = require "kvlab"
kv.experiment.run {
  name = "asks", title = "How many?", metrics = { "n" },
  grid = { { "of", { "a", "b" } }, { "size", { 1, 2, 3 } } },
  defaults = { prompts = 8, form = "x" }, quick = { size = { 1 } },
  kinds = { form = require("kvlab.options").one_of("x", "y") },
  run = function() error "a row was computed" end,
}]])
    scratch:write("plain.lua", "--- Prints a line.\nprint 'it ran' -- experiment.run")
  end)

  local function help(words, status)
    local got, output = scratch:sh("./kvlab run " .. words)
    assert.equal(status or 0, got, output)
    return output
  end

  it("lists axes, settings, metrics and what --quick changes, and computes nothing",
    function()
      local answer = help "asks.lua --help"
      assert.equal([[
usage: kvlab run asks.lua [options]

How many? Counts them.
of: what is counted

asks: How many?

axes: --set NAME=VALUE,VALUE runs only these values
  of       a, b
  size     1, 2, 3

settings: --set NAME=VALUE changes one
  form     x (one of x, y)
  prompts  8
  repeats  1

--quick puts these in their place
  size     1

  metrics  n

6 rows in results/asks
The options of every script: kvlab help run
]], answer)
      assert.equal(answer, help "-h asks.lua")
      assert.is_false(scratch:has "results")
    end)

  it("shows the values that --set and --quick have put in their place", function()
    local answer = help "asks.lua --quick --set of=b --help"
    assert.matches("\n  of       b\n  size     1\n", answer)
    assert.matches("\n1 rows in results/asks%-quick\n", answer)
  end)

  it("says what a setting may be, and so does a run", function()
    assert.equal('kvlab: form is "z", expected one of x, y\n',
      help("asks.lua --set form=z", 1))
  end)

  it("does not run a script that is no experiment, and says that it is none", function()
    local answer = help "plain.lua --help"
    assert.matches("\n\nPrints a line.\n\nThis script is no experiment: it has no axes",
      answer)
    assert.is_nil(answer:find("it ran", 1, true))
  end)

  it("is that of the verb where there is no script", function()
    assert.matches("^usage: kvlab run SCRIPT", help "--help")
  end)

  it("is refused for scripts and options that do not exist", function()
    assert.equal("kvlab: no such script: 01_recal; did you mean 01_recall?\n",
      help("01_recal --help", 2))
    assert.equal("kvlab: unknown option --sed; did you mean --seed?\n",
      help("asks.lua --help --sed=1", 2))
    assert.matches("nothing is called off; did you mean of?",
      help("asks.lua --help --set off=1", 1), 1, true)
  end)
end)
