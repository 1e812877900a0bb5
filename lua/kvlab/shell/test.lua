--- Runs the specs inside this executable, with busted as a library. So they test the
-- embedded LuaJIT and, in a hostile build, every C function under the sanitizers.
--
-- If there are several spec files, each runs in a process of its own, two more at a time
-- than there are cores, since some of them wait. So a file cannot depend on what ran
-- before it, and one that crashes fails alone. A GPU is shared by the processes. Stock
-- busted (.busted) runs all files in one process. There they are not insulated from each
-- other, because a module that declares C types for the FFI cannot be loaded twice.
local ffi = require "ffi"

local M = {}

local JOBS_MOST = 8
-- Files whose processes have two threads, so that loops of kernels run in parallel. With
-- --full all have; elsewhere a second thread costs processor time and tests nothing more.
local PARALLEL = "spec/kernels/"
-- Files that take long, and would otherwise run alone at the end.
local FIRST = { ["docs_spec.lua"] = true, ["front_door_spec.lua"] = true,
                ["slurm_spec.lua"] = true, ["prefetch_stress_spec.lua"] = true,
                ["hook_prefill_cuda_spec.lua"] = true, ["hook_spec.lua"] = true,
                ["hook_random_cuda_spec.lua"] = true, ["wrong_commands_spec.lua"] = true }

-- Bytes that are shown of what a spec says when it fails.
local MESSAGE_MAX = 20000

local function inside_root(root, name)
  if name:sub(1, #root + 1) == root .. "/" then return name:sub(#root + 2) end
  return name
end

local function print_now(...)
  io.stdout:write(...)
  io.stdout:flush()
end

--- Lets busted show a table that is raised as the REPL shows one, to some depth. Busted
-- itself writes each table as often as it is met, which may take for ever.
local function bound_messages(busted)
  local inspect, rewrite = require "kvlab.shell.repl.inspect", busted.rewriteMessage
  function busted.rewriteMessage(element, message, trace)
    local has_words = (debug.getmetatable(message) or {}).__tostring
    if type(message) == "table" and not has_words then
      message = inspect.text(message, { colour = false, columns = 88 })
    end
    return rewrite(element, message, trace)
  end
end

--- Makes the handler that writes the output. For each file it gives one line to
-- `progress`: a letter for every spec that did not pass, then how many passed. At the end
-- it gives what failed and what was skipped to `report`.
local function make_handler(busted, root, progress, report)
  local handler = require "busted.outputHandlers.base"()
  local marks = { success = "", pending = "s", failure = "F", error = "E" }
  local passed_before = 0

  local function describe_problem(problem)
    local text = tostring(problem.message)
    if #text > MESSAGE_MAX then
      text = ("%s … %d more bytes"):format(text:sub(1, MESSAGE_MAX), #text - MESSAGE_MAX)
    end
    report("\nFAILED  ", inside_root(root, problem.name or "?"), "\n",
      text:gsub("^", "  "):gsub("\n", "\n  "), "\n")
    if os.getenv "KVLAB_TRACEBACK" and problem.trace then
      report(problem.trace.traceback or "", "\n")
    end
  end

  busted.subscribe({ "file", "start" }, function(file)
    passed_before = handler.successesCount
    progress(inside_root(root, file.name), " ")
    return nil, true
  end)
  busted.subscribe({ "file", "end" }, function()
    progress(" ", handler.successesCount - passed_before, " passed\n")
    return nil, true
  end)
  busted.subscribe({ "test", "end" }, function(_, _, status)
    progress(marks[status] or "?")
    return nil, true
  end)
  busted.subscribe({ "suite", "end" }, function()
    for _, problem in ipairs(handler.failures) do describe_problem(problem) end
    for _, problem in ipairs(handler.errors) do describe_problem(problem) end
    for _, skipped in ipairs(handler.pendings) do
      local why = type(skipped.message) == "string" and skipped.message or ""
      report("skipped  ", skipped.name, ": ", why:gsub("^[^\n]-%.lua:%d+: ", ""), "\n")
    end
    return nil, true
  end)
  return handler
end

--- Whether a CUDA device can be used; if not, specs tagged #gpu are left out.
local function has_cuda()
  local ok, kv = pcall(require, "kvlab")
  if not ok then return false end -- the specs will say why
  local found, answer = pcall(kv.cuda_available)
  return found and answer
end

--- Whether `./kvlab get smollm2` has fetched the model; if not, specs tagged #model are
-- left out.
local function has_model()
  local ok, downloads = pcall(require, "kvlab.downloads")
  return ok and downloads.find "smollm2" ~= nil
end

--- Ends the program after Ctrl-C. The interrupt raises an error in one spec only, and
-- busted would go on with the next.
local function stop_when_interrupted(busted)
  ffi.cdef "int kvl_interrupted(void);"
  local ok, interrupted = pcall(function() return ffi.C.kvl_interrupted end)
  if not ok then return end
  busted.subscribe({ "test", "end" }, function()
    if interrupted() ~= 0 then
      io.stderr:write "\ninterrupted\n"
      os.exit(130)
    end
    return nil, true
  end)
end

ffi.cdef [[
typedef struct { long s, us; } kvl_shell_time;
typedef struct { kvl_shell_time user, system; long others[14]; } kvl_shell_usage;
int getrusage(int who, kvl_shell_usage *usage);
int clock_gettime(int clock, kvl_shell_time *time);
]]
local SELF, CHILDREN, MONOTONIC = 0, -1, 1

--- Processor time of this process or of its children that have ended, in seconds.
local function used_s(who)
  local u = ffi.new "kvl_shell_usage"
  ffi.C.getrusage(who, u)
  return tonumber(u.user.s + u.system.s) + 1e-6 * tonumber(u.user.us + u.system.us)
end

local function clock_s()
  local t = ffi.new "kvl_shell_time" -- its second number are nanoseconds
  ffi.C.clock_gettime(MONOTONIC, t)
  return tonumber(t.s) + 1e-9 * tonumber(t.us)
end

--- Prints what each file or spec took, the longest first.
local function print_times(times)
  table.sort(times, function(a, b) return a.own + a.children > b.own + b.children end)
  local own, children = 0, 0
  print_now "\nseconds of processor time: own, of programs that it started; of a clock\n"
  for _, t in ipairs(times) do
    own, children = own + t.own, children + t.children
    print_now(("%8.1f %8.1f %8.1f  %s\n"):format(t.own, t.children, t.wall, t.name))
  end
  print_now(("%8.1f %8.1f           all\n"):format(own, children))
end

--- Collects in `times` what each spec takes.
local function time_specs(busted, times)
  local began
  local function now()
    return { own = used_s(SELF), children = used_s(CHILDREN), wall = clock_s() }
  end
  busted.subscribe({ "test", "start" }, function()
    began = now()
    return nil, true
  end)
  busted.subscribe({ "test", "end" }, function(spec)
    local taken = now()
    for name, s in pairs(began) do taken[name] = taken[name] - s end
    taken.name = spec.name
    times[#times + 1] = taken
    return nil, true
  end)
end

--- Runs the specs of `files` in this process.
---@return table  # passed, failed and skipped: how many specs
local function run_here(root, files, options, has_gpu, progress, report)
  -- Specs are short and of many kinds: few of their loops gain from being compiled.
  require("jit.opt").start("hotloop=500", "hotexit=200")
  -- What they leave behind is collected less often, which saves a tenth of their time.
  collectgarbage("setpause", 500)
  package.path = root .. "/?.lua;" .. package.path -- require "spec.support"
  local has_names, named = pcall(require, "kvlab.named")
  if has_names then named.finds_own = options.policy ~= nil end
  local busted = require "busted.core"()
  require "busted"(busted)
  require "busted.luajit"()
  busted.register("file", "file", {}) -- files are not insulated

  local excluded = { unpack(options["exclude-tags"] or {}) }
  if not has_gpu then excluded[#excluded + 1] = "gpu" end
  if not has_model() then excluded[#excluded + 1] = "model" end
  local handler = make_handler(busted, root, progress, report)
  handler:subscribe { language = "en" }
  stop_when_interrupted(busted)
  bound_messages(busted)
  local times = {}
  if options.times and not options.worker then time_specs(busted, times) end
  require "busted.modules.filter_loader"()(busted, {
    tags = options.tags or {},
    excludeTags = excluded,
    filter = { options.filter },
    filterOut = {},
    list = options.list,
  })
  local load_files = require "busted.modules.test_file_loader"(busted, { "lua" })
  load_files(files, { "_spec%.lua$" }, { excludes = {}, recursive = true })
  require "busted.execute"(busted)(1, {})
  if times[1] then print_times(times) end
  return { passed = handler.successesCount, skipped = handler.pendingsCount,
           failed = handler.failuresCount + handler.errorsCount }
end

-- ---- a process for each file ----------------------------------------------------------

--- Runs in a process that `start` has started: runs its file and sends the result.
local function serve(root, files, options, has_gpu)
  local process = require "kvlab.experiment.sweep.process"
  process.follow_parent()
  local line, report = {}, {}
  local function into(list)
    return function(...) for _, text in ipairs { ... } do list[#list + 1] = text end end
  end
  local start = clock_s()
  local result = run_here(root, files, options, has_gpu, into(line), into(report))
  result.seconds = { wall = clock_s() - start, own = used_s(SELF),
                     children = used_s(CHILDREN) }
  result.line, result.report = table.concat(line), table.concat(report)
  process.answer(require("kvlab.json").encode(result))
  return result.failed == 0 and 0 or 1
end

local function start(file, options)
  local threads = (options.full or file:find(PARALLEL, 1, true)) and 2 or 1
  local words = { "env", "OMP_NUM_THREADS=" .. threads,
    package.loaded["kvlab.paths"].executable, "test", "--worker" }
  for _, word in ipairs(options.words) do
    if word:find "^%-%-" then words[#words + 1] = word end
  end
  words[#words + 1] = file
  return require("kvlab.experiment.sweep.process").spawn(words)
end

--- The result of a file, from what its process has sent and how that ended. A process has
-- failed too if it has sent nothing, whatever its exit status is, and if its end does not
-- agree with its result, as after a leak that a sanitizer finds.
local function result_of(root, file, answer, how)
  local name = inside_root(root, file)
  local result = answer and require("kvlab.json").decode(answer)
    or { passed = 0, failed = 0, skipped = 0, line = name .. " E 0 passed\n",
         report = "" }
  local expected = result.failed == 0 and "exit status 0" or "exit status 1"
  if not answer or how ~= expected then
    result.failed = result.failed + 1
    result.report = ("%s\nFAILED  %s\n  its process ended%s: %s\n"):format(result.report,
      name, answer and "" or " before its specs", how)
  end
  return result
end

--- Runs each file in a process of its own, `jobs` at a time.
---@return table  # passed, failed and skipped: how many specs
local function run_apart(root, files, options, jobs)
  local process = require "kvlab.experiment.sweep.process"
  local total = { passed = 0, failed = 0, skipped = 0 }
  local running, file_of, answer_of, reports, at = {}, {}, {}, {}, 0
  local times = {}

  local function start_next()
    at = at + 1
    if not files[at] then return end
    local child = start(files[at], options)
    running[#running + 1], file_of[child] = child, files[at]
  end

  local function bury(child)
    for i, other in ipairs(running) do
      if other == child then table.remove(running, i) end
    end
    local result = result_of(root, file_of[child], answer_of[child], child:close())
    print_now(result.line)
    reports[#reports + 1] = result.report
    if result.seconds then
      times[#times + 1], result.seconds.name = result.seconds, inside_root(root,
        file_of[child])
    end
    for name in pairs(total) do total[name] = total[name] + result[name] end
    start_next()
  end

  local ok, problem = pcall(function()
    for _ = 1, jobs do start_next() end
    while #running > 0 do
      local child, lines = process.wait_any(running)
      if lines then answer_of[child] = lines[1] or answer_of[child] end
      if answer_of[child] or not lines then bury(child) end
    end
  end)
  for _, child in ipairs(running) do child:close(true) end
  if not ok then error(problem, 0) end
  print_now(table.concat(reports))
  if options.times then print_times(times) end
  return total
end

--- The spec files among these files and in these folders, in the order of their start.
local function find_files(names)
  local busted = require "busted.core"()
  local _, _, find = require "busted.modules.test_file_loader"(busted, { "lua" })
  local first, rest, filters = {}, {}, { excludes = {}, recursive = true }
  for _, file in ipairs(find(names, { "_spec%.lua$" }, filters)) do
    local list = FIRST[file:match "[^/]*$"] and first or rest
    list[#list + 1] = file
  end
  for _, file in ipairs(rest) do first[#first + 1] = file end
  return first
end

local function count_cores()
  local pipe = io.popen "env -u OMP_NUM_THREADS nproc 2>/dev/null"
  local n = pipe:read "*n"
  pipe:close()
  return n or 1
end

---@param root string        the project
---@param files string[]     spec files and folders
---@param options table      tags, exclude-tags (lists), filter (pattern), list (boolean),
--  need-model (fails where specs tagged #model would be left out),
--  times (boolean: what each file took, or each spec of one file),
--  jobs (how many processes; two more than cores, at most 8)
---@return integer           # 0 when specs ran and none failed, else 1
function M.main(root, files, options)
  local has_gpu = has_cuda()
  if options.worker then return serve(root, files, options, has_gpu) end
  if not has_gpu then print_now "no CUDA device: specs tagged #gpu are left out\n" end
  if not has_model() then
    print_now("no smollm2: specs tagged #model are left out; this fetches it: "
      .. "./kvlab get smollm2\n")
    if options["need-model"] then
      print_now "--need-model: they may not be left out\n\n0 passed, 1 failed\n"
      return 1
    end
  end

  local jobs = options.jobs or math.min(count_cores() + 2, JOBS_MOST)
  local found = find_files(files)
  local is_apart = jobs > 1 and #found > 1 and not options.list
    and package.loaded["kvlab.paths"]
  local counts = is_apart and run_apart(root, found, options, jobs)
    or run_here(root, files, options, has_gpu, print_now, print_now)
  if options.list then return 0 end

  if counts.passed + counts.failed == 0 then print_now "no spec ran\n" end
  local text = ("%d passed, %d failed"):format(counts.passed, counts.failed)
  if counts.skipped > 0 then text = ("%s, %d skipped"):format(text, counts.skipped) end
  print_now("\n", text, "\n")
  return (counts.failed == 0 and counts.passed > 0) and 0 or 1
end

return M
