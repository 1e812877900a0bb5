--- Experiments: one question, a grid of configurations, one row of metrics for each.
--
--   experiment.run {
--     name = "01_recall", title = "Which selection keeps recall, at which budget?",
--     grid = { {"context", {512, 4096}}, {"policy", {"quest", "random"}},
--              {"budget", {0.05, 0.1}} },            -- the last axis varies fastest
--     defaults = { prompts = 8 },                    -- --set prompts=2 changes one
--     quick = { context = {512}, prompts = 2 },      -- what --quick puts in their place
--     when = function(config) return … end,          -- leaves combinations out
--     run = function(config, settings) return { accuracy = … } end,
--     table = { rows = "policy", columns = "budget", value = "accuracy",
--               where = { context = 4096 }, format = "%.3f" },
--     plot = { x = "budget", y = "accuracy", series = "policy", panel = "context",
--              logx = true },
--   }
--
-- `config` holds the axes, the defaults, device and seed, and is the row's "config" as it
-- is written. `settings` is one table for the whole run: the defaults, seed, device,
-- quick, out, configs and what `setup(settings)` adds; `teardown(settings)` ends it.
-- `table` and `plot` may be lists, or functions of the rows that return what
-- text_table.text and plot.svg take. `metrics` lists names that every row must have, in
-- the order to write them. `environment` = { device, description, driver, versions } is
-- needed only when the device is not the one that kv.device() opens.
--
-- The folder (--out=DIR, results/NAME, or results/NAME-quick with --quick) gets
-- results.jsonl, manifest.json, report.html and the plots. Configurations that
-- results.jsonl already holds are not run again; --set fresh=true starts over.
local json = require "kvlab.json"
local manifests = require "kvlab.manifest"
local grids = require "kvlab.grid"
local options = require "kvlab.options"
local plans = require "kvlab.plan"
local plots = require "kvlab.plot"
local progress = require "kvlab.progress"
local report = require "kvlab.report"
local results = require "kvlab.results"
local text_table = require "kvlab.table"

local M = {}

local NAN = 0 / 0

local function fail(fmt, ...) error(fmt:format(...), 0) end

--- Keeps the stack of an error when KVLAB_TRACEBACK asks for it.
local function keep_stack(problem)
  if os.getenv "KVLAB_TRACEBACK" and type(problem) == "string" then
    return debug.traceback(problem, 2)
  end
  return problem
end

--- The metrics as results.jsonl holds them: numbers, strings, booleans; NaN for what is
-- not finite.
local function check_metrics(plan, metrics)
  if type(metrics) ~= "table" then
    fail("run returned a %s, expected a table of metrics", type(metrics))
  end
  local checked = {}
  for name, value in pairs(metrics) do
    local kind = type(value)
    if type(name) ~= "string" then
      fail("metrics have the key %s, expected names", tostring(name))
    end
    if kind == "cdata" and tonumber(value) then -- a 64-bit integer
      value, kind = tonumber(value), "number"
    end
    if kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
      fail("metric %s is a %s, expected a number, a string or a boolean", name, kind)
    end
    checked[name] = (kind == "number" and value - value ~= 0) and NAN or value
  end
  if next(checked) == nil then fail "run returned no metrics" end
  for _, name in ipairs(plan.required) do
    if checked[name] == nil then
      local names = {}
      for other in pairs(checked) do names[#names + 1] = other end
      table.sort(names)
      fail("metrics have no %s; there is %s", name, table.concat(names, ", "))
    end
  end
  return checked
end

--- What to say when the work stops early.
local function explain_stop(plan, store, config, problem)
  local kept = ("%d of %d rows are in %s; the same command goes on from there"):format(
    #plan.configs - plan.left, #plan.configs, store.path)
  if tostring(problem):find("interrupted", 1, true) then
    io.stderr:write("interrupted: ", kept, "\n")
    return "interrupted"
  end
  if not config then return tostring(problem) end
  return ("%s\n  configuration %s\n  %s"):format(tostring(problem),
    grids.describe(plan.grid, config), kept)
end

--- Runs the configurations that are missing; raises when one fails, with its name.
local function run_missing(spec, plan, store, missing)
  local line = progress.new(#missing)
  local current
  local ok, problem = xpcall(function()
    if spec.setup then spec.setup(plan.settings) end
    for i, config in ipairs(missing) do
      current = config
      line:show(i, grids.describe(plan.grid, config))
      local copy = {} -- what run does to its table does not reach the row
      for key, value in pairs(config) do copy[key] = value end
      local metrics = check_metrics(plan, spec.run(copy, plan.settings))
      store:append({ config = config, metrics = metrics }, plan.order)
      plan.left = plan.left - 1
    end
    current = nil
  end, keep_stack)
  line:clear()
  if not ok then problem = explain_stop(plan, store, current, problem) end
  if spec.teardown then
    local torn_down, why = pcall(spec.teardown, plan.settings)
    if ok and not torn_down then ok, problem = false, why end
  end
  if not ok then error(problem, 0) end
end

--- The plan's rows in the plan's order, whoever computed them.
local function rows_of_plan(plan, store)
  local rows = {}
  for i, config in ipairs(plan.configs) do rows[i] = store:find(config) end
  return rows
end

local function as_list(value)
  return type(value) == "table" and value[1] == nil and { value } or value or {}
end

local function make_tables(plan, rows)
  if type(plan.table) == "function" then return as_list(plan.table(rows)) end
  local tables = {}
  for i, view in ipairs(plan.table or {}) do tables[i] = text_table.pivot(rows, view) end
  return tables
end

--- { svg =, file =, reason = } for every plot; what cannot be drawn has a reason.
local function make_plots(plan, rows)
  local described = {}
  if type(plan.plot) == "function" then
    described = as_list(plan.plot(rows))
  else
    for i, view in ipairs(plan.plot or {}) do
      described[i] = plots.lines(rows, view)
      local title, where = view.title or view.y .. " by " .. view.x, view.where_text
      described[i].title = where == "" and title or ("%s (%s)"):format(title, where)
      described[i].file = ("%s_by_%s"):format(view.y, view.x)
    end
  end
  local drawn, taken = {}, {}
  for i, p in ipairs(described) do
    local base = (p.file or "plot"):gsub("[^%w_-]", "_")
    local file, n = base, 1
    while taken[file] do n, file = n + 1, base .. "_" .. n + 1 end
    taken[file] = true
    local svg, reason = plots.svg(p)
    drawn[i] = { svg = svg, reason = reason, file = file .. ".svg" }
  end
  return drawn
end

--- Prints the table, writes the plots and the report, prints where everything is.
local function finish(plan, store, manifest)
  local rows = rows_of_plan(plan, store)
  local full = text_table.of_rows(rows, plan.grid.axes, plan.order)
  local tables = make_tables(plan, rows)
  for _, t in ipairs(plan.table and tables or { full }) do
    io.write("\n", text_table.text(t))
  end
  local paths = { store.path, plan.folder .. "/report.html" }
  local pictures = make_plots(plan, rows)
  for _, picture in ipairs(pictures) do
    local path = plan.folder .. "/" .. picture.file
    if picture.svg then
      results.write_file(path, picture.svg)
      paths[#paths + 1] = path
    end
  end
  if pictures[1] and pictures[1].reason then io.stderr:write(pictures[1].reason, "\n") end
  results.write_file(paths[2], report.html { title = plan.title, manifest = manifest,
    plots = pictures, tables = tables, rows = full })
  io.write("\n", table.concat(paths, "\n"), "\n")
  return { rows = rows, folder = plan.folder, paths = paths, tables = tables }
end

local function describe_run(plan)
  local env = plan.environment
  local axes = json.array {}
  for i, axis in ipairs(plan.grid.axes) do
    axes[i] = { name = axis.name, values = axis.values }
  end
  local library = package.loaded["kvlab.library"]
  local versions = { luajit = jit.version, kvlab_abi = library and library.C.kvl_abi() }
  for name, version in pairs(env.versions or {}) do versions[name] = version end
  return {
    name = plan.name, title = plan.title, seed = plan.settings.seed, device = env.device,
    description = env.description, driver = env.driver, quick = plan.settings.quick,
    axes = axes, defaults = plan.grid.defaults, configurations = #plan.configs,
    versions = versions,
  }
end

local function execute(spec, plan)
  results.make_folder(plan.folder)
  local described, old = describe_run(plan), nil
  if not plan.fresh then old = manifests.check(plan.folder, described) end
  local store = results.open(plan.folder, plan.fresh)
  local ok, answer = pcall(function()
    local missing = {}
    for _, config in ipairs(plan.configs) do
      if not store:find(config) then missing[#missing + 1] = config end
    end
    plan.left = #missing
    local resumed = #store.rows > 0 and old or nil
    local manifest = manifests.write(plan.folder, described, resumed, #missing > 0)
    if store.was_torn then io.write "dropped a row that was cut off\n" end
    if #store.rows > 0 then
      io.write(("resumed %d of %d\n"):format(#plan.configs - #missing, #plan.configs))
    end
    if #missing > 0 then run_missing(spec, plan, store, missing) end
    return finish(plan, store, manifest)
  end)
  store:close()
  if not ok then error(answer, 0) end
  return answer
end

--- Runs an experiment; see the head of this file.
---@param spec table
---@param given? kvlab.options  instead of the command line's
---@return {rows: table[], folder: string, paths: string[], tables: table[]}
function M.run(spec, given)
  local ok, plan = pcall(plans.new, spec, given or options)
  if not ok then error(plan, 2) end
  local answer
  ok, answer = pcall(execute, spec, plan)
  if not ok then error(answer, 0) end
  return answer
end

return M
