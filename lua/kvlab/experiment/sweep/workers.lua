--- Runs configurations in N processes of this machine, for --jobs=N. Each process (a
-- worker) runs the same script, and this process sends it the numbers of its
-- configurations.
--
-- Only this process writes to the folder, so a kill at any instant does no more harm than
-- a kill of a run without workers; the workers end with this process. Each worker begins
-- with a run of neighbouring configurations, so that the preparations for one serve the
-- next. A worker that has none left takes half of the longest run that another worker
-- still has. Rows do not depend on the worker that computed them. On a CPU each worker
-- has fewer threads than a single process, so sums may be rounded differently.
--
-- With several GPUs and no --device=cuda:N, worker k uses the k-th GPU alone. On the CPU
-- the cores are divided among the workers. Measured times are those of a machine that
-- runs N configurations at once.
local json = require "kvlab.json"
local processes = require "kvlab.experiment.sweep.process"
local results = require "kvlab.experiment.results"
local sessions = require "kvlab.experiment.session"

local M = {}

-- ---- the worker -----------------------------------------------------------------------

--- Runs the configurations whose numbers the parent sends, and answers each with its row.
-- Ends the program when the parent has no more numbers.
---@param spec table       see kvlab.experiment
---@param plan kvlab.plan
function M.serve(spec, plan)
  processes.follow_parent()
  local session = sessions.new(spec, plan)
  for number in processes.lines() do
    local ok, row = session:run(plan.configs[tonumber(number)])
    if not ok and tostring(row):find("interrupted", 1, true) then os.exit(130) end
    processes.answer(json.encode(ok and row or { problem = tostring(row) },
      { order = plan.order }))
  end
  session:close()
  os.exit(0, true)
end

-- ---- GPUs, cores and configurations of each worker ------------------------------------

--- Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.
local function visible_gpus()
  local names = {}
  local given = os.getenv "CUDA_VISIBLE_DEVICES"
  if given then
    for name in given:gmatch "[^,%s]+" do names[#names + 1] = name end
    return names
  end
  local pipe = io.popen "ls -d /dev/nvidia[0-9]* 2>/dev/null"
  for _ in pipe:lines() do names[#names + 1] = tostring(#names) end
  pipe:close()
  return names
end

local function count_cores()
  local pipe = io.popen "nproc 2>/dev/null"
  local n = pipe:read "*n"
  pipe:close()
  return n or 1
end

--- Returns the words of the command `env` that set the environment of worker k of n.
local function environment_of(plan, given, k, n, gpus)
  local words = { "env" }
  if plan.environment.device:find "^cuda" and not given.device:find "^cuda:" then
    if #gpus > 1 then
      words[2] = "CUDA_VISIBLE_DEVICES=" .. gpus[(k - 1) % #gpus + 1]
    end
  elseif not os.getenv "OMP_NUM_THREADS" then
    words[2] = ("OMP_NUM_THREADS=%d"):format(math.max(1, math.floor(count_cores() / n)))
  end
  return words
end

local function start_worker(plan, given, k, n, gpus)
  local words = environment_of(plan, given, k, n, gpus)
  words[#words + 1] = package.loaded["kvlab.paths"].executable
  words[#words + 1] = "run"
  words[#words + 1] = "--worker"
  for _, word in ipairs(given.words) do words[#words + 1] = word end
  return processes.spawn(words)
end

--- Returns the index of worker k's next configuration; nil if none is left. If its own
-- run is empty, the worker first takes over the second half of the longest one.
local function take_number(runs, k)
  local run = runs[k]
  if run.first > run.last then
    local longest = run
    for _, other in ipairs(runs) do
      if other.last - other.first > longest.last - longest.first then longest = other end
    end
    if longest.first > longest.last then return nil end
    local middle = math.ceil((longest.first + longest.last) / 2)
    run.first, run.last, longest.last = middle, longest.last, middle - 1
  end
  run.first = run.first + 1
  return run.first - 1
end

-- ---- the parent -----------------------------------------------------------------------

---@class kvlab.sweep.pool
local Pool = {}
Pool.__index = Pool

--- Gives worker k its next configuration. If none is left, tells it to end; its teardown
-- may still take some time.
function Pool:feed(k)
  local worker = self.workers[k]
  local number = not self.failure and take_number(self.runs, k)
  worker.config = number and self.missing[number]
  if not number then return worker.process:finish() end
  self.record:begin(worker.config)
  worker.process:send(tostring(self.number_of[worker.config]))
end

function Pool:start(k)
  self.workers[k] = { process = start_worker(self.plan, self.given, k, #self.runs,
    self.gpus) }
  self:feed(k)
end

--- Takes a worker's answer: stores the row, or notes the failure. Unless --keep-going is
-- given, the first failure ends the run as soon as the other workers have answered.
function Pool:take(config, answer)
  if not answer.problem and results.key(answer.config) ~= results.key(config) then
    answer = { problem = "a worker ran a different configuration: does the grid change"
      .. " from one run of the script to the next?" }
  end
  if not answer.problem then
    self.record:row(answer)
  elseif self.record.keeps_going then
    self.record:failure(config, answer.problem)
  else
    self.failure = self.failure or { config, answer.problem }
  end
end

local function decode(line)
  local answer = json.decode(line)
  return answer.problem and answer or results.decode(line)
end

--- Removes worker k, which has ended. If it ended in the middle of a configuration, this
-- is a failure, and another worker starts in its place.
function Pool:bury(k)
  local worker = self.workers[k]
  self.workers[k] = nil
  local how = worker.process:close()
  if worker.config then
    self:take(worker.config, { problem = "its process ended: " .. how })
    if not self.failure then self:start(k) end
  elseif how ~= "exit status 0" and not self.failure then
    error("a worker process ended with an error: " .. how, 0)
  end
end

function Pool:run()
  for k = 1, #self.runs do self:start(k) end
  while next(self.workers) do
    local list, number_of = {}, {}
    for k, worker in pairs(self.workers) do
      list[#list + 1], number_of[worker.process] = worker.process, k
    end
    local process, lines = processes.wait_any(list)
    local k = number_of[process]
    for _, line in ipairs(lines or {}) do
      self:take(self.workers[k].config, decode(line))
      self:feed(k)
    end
    if not lines then self:bury(k) end
  end
  if self.failure then self.record:failure(unpack(self.failure)) end
end

--- Runs configurations in worker processes.
---@param spec table
---@param plan kvlab.plan
---@param missing table[]                    configurations of the plan, in its order
---@param record kvlab.experiment.record     is told of begins, rows and failures
---@param given kvlab.CommandLine
function M.run(_, plan, missing, record, given)
  if not package.loaded["kvlab.paths"] or not given.words then
    error("--jobs needs the executable kvlab, which it starts for each process", 0)
  end
  local jobs = math.min(given.jobs, #missing)
  local pool = setmetatable({ plan = plan, missing = missing, record = record,
    given = given, workers = {}, runs = {}, number_of = {}, gpus = visible_gpus() }, Pool)
  for i, config in ipairs(plan.configs) do pool.number_of[config] = i end
  for k = 1, jobs do
    pool.runs[k] = { first = math.floor((k - 1) * #missing / jobs) + 1,
                     last = math.floor(k * #missing / jobs) }
  end
  local ok, problem = pcall(pool.run, pool)
  for _, worker in pairs(pool.workers) do worker.process:close(true) end
  if not ok then error(problem, 0) end
end

return M
