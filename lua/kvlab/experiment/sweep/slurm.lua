--- Runs sweeps on a Slurm cluster. Each shard is a task of a job array.
--
--   DIR/slurm/array.sh    the script of a task
--   DIR/slurm/follow.sh   the script that runs when all tasks have ended
--   DIR/slurm/jobs.jsonl  a line for each array that was submitted
--   DIR/slurm/J_T.log     the output of task T of array J
--
-- It calls sbatch, squeue and scontrol, and does not need Slurm's accounting.
local json = require "kvlab.json"
local files = require "kvlab.files"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

--- Runs a program. Returns what it printed, errors included, and whether it succeeded.
local function ask(words)
  local command = files.shell_line(words) .. " 2>&1; echo $?"
  local pipe = io.popen(command)
  local text, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
  pipe:close()
  return text, status == "0"
end

--- Raises if one of Slurm's programs is missing on this machine.
function M.check()
  for _, program in ipairs { "sbatch", "squeue", "scontrol" } do
    local _, is_there = ask { "sh", "-c", "command -v " .. program }
    if not is_there then
      fail("--slurm needs %s, which is not in PATH: submit from a machine of the cluster"
        .. " (Debian's package is slurm-client), or compute here with kvlab run --jobs=N",
        program)
    end
  end
end

--- Returns how many tasks an array may have at most.
local function array_limit()
  local text, ok = ask { "scontrol", "show", "config" }
  local limit = tonumber(text:match "MaxArraySize%s*=%s*(%d+)")
  if not ok or not limit then
    fail("scontrol does not print MaxArraySize; is the controller running? %s",
      text:gsub("%s+$", ""))
  end
  if limit < 1 then fail "this cluster allows no job arrays (MaxArraySize is 0)" end
  return limit
end

--- Returns numbers in the form that sbatch --array takes: "0-3,7,9-10".
---@param numbers integer[]  ascending
---@return string
function M.ranges(numbers)
  local words, first = {}, nil
  for i, n in ipairs(numbers) do
    first = first or n
    if numbers[i + 1] ~= n + 1 then
      words[#words + 1] = first == n and tostring(n) or ("%d-%d"):format(first, n)
      first = nil
    end
  end
  return table.concat(words, ",")
end

--- Divides shards into arrays. In an array with offset o, task t is shard o + t + 1.
---@param shards integer[]  ascending
---@param limit integer     the most tasks of an array, whose numbers are 0 to limit - 1
---@return {offset: integer, tasks: integer[]}[]
function M.arrays(shards, limit)
  local arrays = {}
  for _, shard in ipairs(shards) do
    local offset = math.floor((shard - 1) / limit) * limit
    local last = arrays[#arrays]
    if not last or last.offset ~= offset then
      last = { offset = offset, tasks = {} }
      arrays[#arrays + 1] = last
    end
    last.tasks[#last.tasks + 1] = shard - 1 - offset
  end
  return arrays
end

local function sbatch(words)
  table.insert(words, 1, "sbatch")
  table.insert(words, 2, "--parsable")
  local text, ok = ask(words)
  local job = ok and text:match "(%d+)[;%w]*%s*$"
  if not job then fail("sbatch refused: %s", (text:gsub("%s+$", ""))) end
  return job
end

local function write_script(path, options, lines)
  local head = { "#!/bin/sh" }
  if options ~= "" then head[2] = "#SBATCH " .. options end
  files.write(path, table.concat(head, "\n") .. "\n" .. lines)
end

--- Submits shards of a sweep, and a job that runs when all of them have ended.
---@param sweep {root: string, name: string, count: integer, options: string,
---  at_once: integer|nil, run: string[], follow: string}
---  options: sbatch's, in one text; run: the command of a shard, without --shard;
---  at_once: how many tasks of an array may run at a time; follow: the shell commands of
---  the last job
---@param shards integer[]  ascending
---@return string[]         # the job numbers of the arrays
function M.submit(sweep, shards)
  local folder, jobs = sweep.root .. "/slurm", {}
  files.make_folder(folder)
  write_script(folder .. "/array.sh", sweep.options, ([[
shard=$(($1 + SLURM_ARRAY_TASK_ID + 1))
exec %s --shard=$shard/%d %s
]]):format(files.shell_line { sweep.run[1], sweep.run[2] }, sweep.count,
    files.shell_line { unpack(sweep.run, 3) }))
  write_script(folder .. "/follow.sh", sweep.options, sweep.follow)
  for i, array in ipairs(M.arrays(shards, array_limit())) do
    local tasks = M.ranges(array.tasks)
    if sweep.at_once then tasks = ("%s%%%d"):format(tasks, sweep.at_once) end
    jobs[i] = sbatch { "--array=" .. tasks, "--job-name=" .. sweep.name,
      ("--output=%s/%%A_%%a.log"):format(folder), folder .. "/array.sh",
      tostring(array.offset) }
    files.append(folder .. "/jobs.jsonl", json.encode { job = jobs[i],
      offset = array.offset, count = sweep.count,
      tasks = json.array(array.tasks) } .. "\n")
  end
  sbatch { "--dependency=afterany:" .. table.concat(jobs, ":"),
    "--job-name=" .. sweep.name .. "-merge", ("--output=%s/%%j.log"):format(folder),
    folder .. "/follow.sh" }
  return jobs
end

--- Returns what Slurm knows of the shards of a folder, by number: a shard's state while
-- it is queued or running, and the log of its last try. The table is empty if the sweep
-- was never submitted.
---@param root string
---@return table<integer, {state: string|nil, log: string}>
function M.states(root)
  local shard_of, known = {}, {}
  local jobs = files.read(root .. "/slurm/jobs.jsonl") or ""
  for line in jobs:gmatch "([^\n]+)\n" do
    local array = json.decode(line)
    for _, task in ipairs(array.tasks) do
      local shard, name = array.offset + task + 1, ("%s_%d"):format(array.job, task)
      shard_of[name] = shard
      known[shard] = { log = ("%s/slurm/%s.log"):format(root, name) }
    end
  end
  if next(known) == nil then return known end
  local text, ok = ask { "squeue", "--me", "-h", "-r", "-o", "%F_%K %T" }
  if not ok then fail("squeue does not answer: %s", (text:gsub("%s+$", ""))) end
  for name, state in text:gmatch "(%S+) (%S+)" do
    local shard = shard_of[name]
    if shard then known[shard].state = state:lower() end
  end
  return known
end

return M
