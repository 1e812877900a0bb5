--- Runs experiments in a folder of their own, with what they print and do on record.
local experiment = require "kvlab.experiment.experiment"
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local M = {
  folder = nil,  -- results go here
  printed = nil, -- stdout and stderr of the last run
  calls = nil,   -- "context policy budget" of every configuration that was run
}

function M.make_folder() M.folder = temporary.path "results" end

function M.path(name) return M.folder .. "/" .. name end

function M.read(name) return assert(files.read(M.path(name)), name) end

--- The lines of results.jsonl.
function M.lines()
  local list = {}
  for line in M.read("results.jsonl"):gmatch "([^\n]*)\n" do list[#list + 1] = line end
  return list
end

local function make_spec(changes)
  if changes and changes.whole then return changes.whole end
  local spec = {
    name = "spec", title = "Is it so?",
    grid = { { "context", { 512, 1024 } }, { "policy", { "quest", "random" } },
             { "budget", { 0.1, 0.3 } } },
    defaults = { prompts = 8, exact = true, model = "small" },
    environment = { device = "cpu", description = "a spec" },
    run = function(c)
      M.calls[#M.calls + 1] = ("%s %s %s"):format(c.context, c.policy, c.budget)
      return { accuracy = c.budget * c.prompts, step_us = 3 }
    end,
  }
  for key, value in pairs(changes or {}) do spec[key] = value end
  return spec
end

--- Runs the usual specification with some `changes` (or changes.whole instead of it),
-- with `set` as --set gives it and `other` options.
function M.run(changes, set, other)
  local given = { seed = 0, out = M.folder, set = set or {}, quick = false, args = {} }
  for key, value in pairs(other or {}) do given[key] = value end
  local out, err = io.output(), io.stderr
  local name = temporary.path()
  local file = assert(io.open(name, "w"))
  M.calls = {}
  io.output(file)
  rawset(io, "stderr", file)
  local ok, answer = pcall(function()
    local spec = make_spec(changes)
    return (experiment.run(spec, given))
  end)
  rawset(io, "stderr", err)
  io.output(out)
  file:close()
  M.printed = files.read(name)
  if not ok then error(answer, 0) end
  return answer
end

--- The message of a run that must fail.
function M.problem_of(...)
  local ok, problem = pcall(M.run, ...)
  if ok then error("the run did not fail", 2) end
  return problem
end

function M.assert_has(words, text)
  if not text:find(words, 1, true) then
    error(("%q is not in %q"):format(words, text), 2)
  end
end

return M
