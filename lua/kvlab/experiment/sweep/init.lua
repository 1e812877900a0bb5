--- The verb `sweep` runs an experiment in shards, on many machines.
--
--   kvlab sweep submit SCRIPT --slurm[=OPTIONS] --shards=N [--out=DIR] [options of run]
--   kvlab sweep status DIR
--   kvlab sweep merge DIR SCRIPT
--
-- `submit` queues the shards that are neither complete nor queued, so the same command
-- resubmits the shards that failed. When all shards have ended, a job merges the rows. If
-- rows are missing, the job submits their shards again, at most --retries=N times (1).
local sorted = require "kvlab.sorted"
local files = require "kvlab.files"
local results = require "kvlab.experiment.results"
local secrets = require "kvlab.secrets"
local shards = require "kvlab.experiment.sweep.shards"
local slurm = require "kvlab.experiment.sweep.slurm"
local text_table = require "kvlab.report.table"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

--- Returns the script's configurations, one line each, as `run --list` prints them.
local function list_configurations(executable, arguments)
  local problems = os.tmpname()
  local command = files.shell_line { executable, "run", "--list", unpack(arguments) }
  local pipe = io.popen(("%s 2>%s; echo $?"):format(command,
    files.shell_line { problems }))
  local lines = {}
  for line in pipe:lines() do lines[#lines + 1] = line end
  pipe:close()
  local problem = files.read(problems)
  os.remove(problems)
  if table.remove(lines) ~= "0" then
    local words = problem:gsub("^kvlab: ", ""):gsub("%s+$", "")
    fail("the script cannot be submitted: %s", words)
  end
  return lines
end

--- Returns how many of n configurations belong to shard i of `count`.
local function size_of(i, count, n)
  return math.floor(i * n / count) - math.floor((i - 1) * n / count)
end

--- Whether a shard has all its rows, for the present script and arguments.
local function is_complete(shard, arguments, n)
  local manifest = shard.manifest
  return manifest and manifest.finished
    and manifest.configurations == size_of(shard.index, shard.count, n)
    and table.concat(manifest.arguments, "\n") == table.concat(arguments, "\n")
end

--- Returns the script among the words of a command: the first that is not an option.
local function script_of(arguments)
  for _, word in ipairs(arguments) do
    if not word:find "^%-" then return word end
  end
end

--- Returns the shell commands to run when all tasks have ended: merge the shards, and
-- submit again if rows are missing.
local function follow_up(executable, options, words, root)
  local merge = files.shell_line { executable, "sweep", "merge", root,
    script_of(options.arguments) }
  local retries = options.retries or 1
  if retries == 0 then return "exec " .. merge .. "\n" end
  local again = { executable, "sweep", "submit", "--slurm=" .. options.slurm,
                  "--retries=" .. retries - 1, unpack(words) }
  return ("%s || exec %s\n"):format(merge, files.shell_line(again))
end

--- Returns the named options as words of a command line.
local function pass_on(options, names)
  local words = {}
  for _, name in ipairs(names) do
    local value = options[name]
    if value == true then words[#words + 1] = "--" .. name
    elseif value then words[#words + 1] = ("--%s=%s"):format(name, value) end
  end
  return words
end

local function append(words, more)
  for _, word in ipairs(more) do words[#words + 1] = word end
  return words
end

--- kvlab sweep submit
---@param options kvlab.CommandLine  with out, slurm, shards, retries, at-once
function M.submit(options)
  for _, word in ipairs(options.words) do
    if secrets.has(word) then
      fail("%s: the scripts of jobs would show the password: give it by"
        .. " KVLAB_REDIS_PASSWORD_FILE", secrets.mask(word))
    end
  end
  slurm.check()
  local root = options.out
  local executable = package.loaded["kvlab.paths"].executable
  local n = #list_configurations(executable, options.arguments)
  local count = math.min(options.shards, n)
  shards.check_count(root, count)
  local complete, states, wanted, queued = 0, slurm.states(root), {}, 0
  local shard_of = {}
  for _, shard in ipairs(shards.list(root)) do shard_of[shard.index] = shard end
  for i = 1, count do
    if shard_of[i] and is_complete(shard_of[i], options.arguments, n) then
      complete = complete + 1
    elseif states[i] and states[i].state then
      queued = queued + 1
    else
      wanted[#wanted + 1] = i
    end
  end
  io.write(("%d configurations in %d shards: %d complete, %d queued or running\n"):format(
    n, count, complete, queued))
  if #wanted == 0 then
    io.write(complete == count and files.shell_line { "kvlab", "sweep", "merge", root,
      script_of(options.arguments) } .. " shows the results\n"
      or "nothing is left to submit\n")
    return 0
  end
  local own = pass_on(options, { "out", "jobs", "keep-going" })
  local words = append(append(pass_on(options, { "shards", "at-once" }), own),
    options.arguments)
  local run = append(append({ executable, "run" }, own), options.arguments)
  local jobs = slurm.submit({
    root = root, name = root:match "[^/]+$" or "sweep", count = count,
    options = options.slurm, at_once = options["at-once"], run = run,
    follow = follow_up(executable, options, words, root),
  }, wanted)
  io.write(("submitted %d shards (%s) as jobs %s; a last job merges them\nkvlab sweep"
    .. " status %s shows their progress\n"):format(#wanted, slurm.ranges(wanted),
    table.concat(jobs, ", "), root))
  return 0
end

--- Returns the last line of a file that is not blank.
local function last_words(path)
  local last
  for line in (files.read(path) or ""):gmatch "[^\n]*%S[^\n]*" do last = line end
  return last
end

-- Shards in these states get a line each; the others are only counted.
local WORTH_A_LINE = { ["ended early"] = true, failed = true, running = true }

--- kvlab sweep status: prints the shards that are running or failed, and how many shards
-- are in each state.
---@param root string
function M.status(root)
  local list = shards.list(root)
  local states, shard_of, count = slurm.states(root), {}, 0
  for _, shard in ipairs(list) do shard_of[shard.index], count = shard, shard.count end
  for i in pairs(states) do count = math.max(count, i) end
  if count == 0 then shards.open(root) end -- raises: there are no shards
  local rows, total, lines = 0, {}, {}
  for i = 1, count do
    local shard, known = shard_of[i], states[i] or {}
    local manifest = shard and shard.manifest
    local there = shard and #results.read(shard.folder) or 0
    local state = known.state or manifest and manifest.finished and "complete"
      or shard and "ended early" or known.log and "failed" or "not begun"
    rows, total[state] = rows + there, (total[state] or 0) + 1
    if WORTH_A_LINE[state] then
      lines[#lines + 1] = { i, there, manifest and manifest.configurations, state,
        not known.state and known.log and last_words(known.log) or nil }
    end
  end
  if #lines > 0 then
    io.write(text_table.text { header = { "shard", "rows", "of", "state", "last words" },
                               rows = lines }, "\n")
  end
  local words = {}
  for i, state in ipairs(sorted.keys(total)) do
    words[i] = ("%d %s"):format(total[state], state)
  end
  io.write(("%d shards: %s; %d rows\n"):format(count, table.concat(words, ", "), rows))
  return 0
end

return M
