--- Runs an experiment: a question, a grid of configurations, and a row of metrics for
-- each configuration.
--
--   experiment.run {
--     name = "01_recall", title = "Which selection keeps recall, at which budget?",
--     grid = { {"context", {512, 4096}}, {"policy", {"quest", "random"}},
--              {"budget", {0.05, 0.1}} },            -- the last axis varies fastest
--     defaults = { prompts = 8 },                    -- --set prompts=2 changes one
--     kinds = kv.experiment.kinds { count = { "prompts" } }, -- what values may be
--     quick = { context = {512}, prompts = 2 },      -- what --quick puts in their place
--     when = function(config) return … end,          -- leaves combinations out
--     check = function(config) … end,                -- raises for one that cannot run
--     run = function(config, settings) return { accuracy = … } end,
--     table = { rows = "policy", columns = "budget", value = "accuracy",
--               where = { context = 4096 }, format = "%.3f" },
--     plot = { x = "budget", y = "accuracy", series = "policy", panel = "context",
--              logx = true },
--   }
--
-- `config` holds one value of every axis, the defaults, device and seed; it is written
-- to the row as "config". `settings` is one table for all configurations of a seed: the
-- defaults, seed, device, quick, out, configs, and whatever `setup(settings)` adds.
-- `teardown(settings)` releases what setup made.
--
-- `deterministic = true` says that nothing depends on the seed; repeats are then refused.
-- `proportions` lists the metrics that lie between 0 and 1, so that their confidence
-- intervals stay there too: { "bytes_share", accuracy = "questions" }. The second form is
-- for shares of right answers, and names the metric or option that counts the questions;
-- such a mean gets an interval for shares (kvlab.statistics), and the row keeps the count
-- in `trials`. The results of single texts may be among the metrics, as `each = { score =
-- { 1, 0, … } }`; the row stores them beside the metrics, and `kvlab compare` then
-- compares text by text. `metrics` lists the names that every row must have, in the order
-- in which they are written. A metric called `note` is a text that says why a row cannot
-- be compared with the others, such as a budget that is exceeded: tables and plots mark
-- the row, and `kvlab compare` leaves it out. `table` and `plot` may be lists, or
-- functions that take the rows and settings, and return what text_table.text and plot.svg
-- take. `environment` = { device, description, driver, versions } is needed only when the
-- device is not the one that kv.device() opens.
--
-- The folder (--out=DIR, results/NAME, or results/NAME-quick with --quick) gets
-- results.jsonl, manifest.json, report.html, the plots and, with --csv, results.csv. If a
-- run finds all of its rows there, but its choice of rows differs from the run of the
-- manifest, all other files go into the subfolder `selection`.
-- A configuration that results.jsonl already holds is not run again, unless its row is
-- stale: one of the sources that it was computed from (the policy, the script, lua/, the
-- library, weights, captures; see kvlab.sources) has changed since. --set stale=keep
-- keeps stale rows and marks them; --set fresh=true starts over.
--
-- experiment.memo(keys, fn) returns fn(keys) and keeps it for configurations with the
-- same keys. A script that opens a file by itself names it with experiment.reads(path).
local ffi = require "ffi"
local json = require "kvlab.json"
local manifests = require "kvlab.experiment.manifest"
local grids = require "kvlab.experiment.grid"
local help = require "kvlab.experiment.help"
local kinds = require "kvlab.experiment.kinds"
local command_line = require "kvlab.command_line"
local plans = require "kvlab.experiment.plan"
local plots = require "kvlab.report.plot"
local progress = require "kvlab.experiment.progress"
local report = require "kvlab.report.report"
local files = require "kvlab.files"
local results = require "kvlab.experiment.results"
local secrets = require "kvlab.secrets"
local sorted = require "kvlab.sorted"
local sessions = require "kvlab.experiment.session"
local sources = require "kvlab.sources"
local shards = require "kvlab.experiment.sweep.shards"
local workers = require "kvlab.experiment.sweep.workers"
local text_table = require "kvlab.report.table"

local M = { kinds = kinds.kinds, expect_multiple = kinds.expect_multiple }

--- Returns fn(keys), and computes it only once for equal keys: for contexts that a model
-- has read, say, and that the next configurations need again. `fn` gets nothing but
-- `keys`, so they must hold everything that the value depends on. One value is kept for
-- each fn. If the value has a method `close`, memo calls it when a value for other keys
-- replaces it, and when the session ends.
---@param keys table<string, any>  what JSON can hold: { context = 4096, seed = 1 }
---@param fn fun(keys: table): any
---@return any
function M.memo(keys, fn)
  if type(keys) ~= "table" then
    error(("memo: keys is a %s, expected a table"):format(type(keys)), 2)
  elseif type(fn) ~= "function" then
    error(("memo: fn is a %s, expected a function"):format(type(fn)), 2)
  end
  local session = sessions.current()
  if not session then error("memo: expected a call from an experiment's `run`", 2) end
  return session:remember(keys, fn)
end

--- Declares that the rows of this experiment depend on a file that the script itself
-- reads.
---@param path string
function M.reads(path)
  if type(path) ~= "string" then
    error(("reads: path is a %s, expected a string"):format(type(path)), 2)
  end
  sources.keep(path)
end

--- Reads the rows of an experiment's results. From now on, the rows of this process
-- depend on them, as on any file that `reads` names.
---@param path string  the folder of the results, or a file of rows (.jsonl)
---@return {config: table, metrics: table}[]  empty if there is no such file
function M.rows(path)
  if type(path) ~= "string" then
    error(("rows: path is a %s, expected a string"):format(type(path)), 2)
  end
  M.reads(path:find "%.jsonl$" and path or path .. "/results.jsonl")
  return (results.read(path))
end

--- Records the outcome of each configuration that had no row: stores its row or reports
-- its failure. The configurations run in this process or in workers.
---@class kvlab.experiment.record
---@field failed integer
local Record = {}
Record.__index = Record

local function open_record(plan, store, missing, keeps_going)
  return setmetatable({ plan = plan, store = store, keeps_going = keeps_going, failed = 0,
                        finished = 0, line = progress.new(#missing) }, Record)
end

--- Returns a line that says how many rows there are and how to get the others.
function Record:explain()
  local there = 0
  for _, config in ipairs(self.plan.configs) do
    if self.store:find(config) then there = there + 1 end
  end
  return ("%d of %d rows are in %s; the same command goes on from there"):format(there,
    #self.plan.configs, self.store.path)
end

function Record:begin(config)
  self.line:show(self.finished, grids.describe(self.plan.grid, config))
end

function Record:row(row)
  self.store:append(row, self.plan.order)
  self.finished = self.finished + 1
end

--- Raises the failure of a configuration, which ends the run; with --keep-going, prints
-- it instead. The line of the script stands behind the words, which may be about what the
-- user typed.
function Record:failure(config, problem)
  problem = secrets.mask(tostring(problem))
  if problem:find("interrupted", 1, true) then error("interrupted", 0) end
  local at, what = problem:match "^(%S-%.lua:%d+): (.*)$"
  local words = ("%s\n  configuration %s%s"):format(what or problem,
    grids.describe(self.plan.grid, config), at and "\n  at " .. at or "")
  if not self.keeps_going then error(words .. "\n  " .. self:explain(), 0) end
  self.failed, self.finished = self.failed + 1, self.finished + 1
  self.line:clear()
  io.stderr:write(words, "\n")
end

--- Runs configurations in this process.
local function run_here(spec, plan, missing, record)
  local session = sessions.new(spec, plan)
  local ok, problem = pcall(function()
    for _, config in ipairs(missing) do
      record:begin(config)
      local done, row = session:run(config)
      if done then record:row(row) else record:failure(config, row) end
    end
  end)
  local closed, why = pcall(session.close, session)
  if ok and not closed then ok, problem = false, why end
  if not ok then error(problem, 0) end
end

--- Runs the missing configurations, here or in --jobs=N processes. If one fails, raises
-- an error that names it.
local function run_missing(spec, plan, store, missing, given)
  local record = open_record(plan, store, missing, given["keep-going"])
  local jobs = math.min(given.jobs or 1, #missing)
  local ok, problem = pcall(jobs > 1 and workers.run or run_here, spec, plan, missing,
    record, given)
  record.line:clear()
  if not ok and tostring(problem):find("interrupted", 1, true) then
    io.stderr:write("interrupted: ", record:explain(), "\n")
    error("interrupted", 0)
  end
  if not ok then error(problem, 0) end
  if record.failed > 0 then
    error(("%d configurations failed; %s"):format(record.failed, record:explain()), 0)
  end
end

--- Returns the rows of the plan that exist, in the plan's order.
local function rows_of_plan(plan, store)
  local rows = {}
  for _, config in ipairs(plan.configs) do rows[#rows + 1] = store:find(config) end
  return rows
end

local function as_list(value)
  return type(value) == "table" and value[1] == nil and { value } or value or {}
end

local function make_tables(plan, rows)
  if type(plan.table) == "function" then
    return as_list(plan.table(rows, plan.settings))
  end
  local tables = {}
  for i, view in ipairs(plan.table or {}) do
    tables[i] = view.front and text_table.front(rows, view)
      or text_table.pivot(rows, view)
  end
  return tables
end

--- Returns { plot =, svg =, file =, reason = } for every plot. A plot that cannot be
-- drawn has no svg, and `reason` says why. `file` has no ending.
local function make_plots(plan, rows)
  local described = {}
  if type(plan.plot) == "function" then
    described = as_list(plan.plot(rows, plan.settings))
  else
    for i, view in ipairs(plan.plot or {}) do
      described[i] = plots.lines(rows, view)
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
    drawn[i] = { plot = p, svg = svg, reason = reason, file = file }
  end
  return drawn
end

--- Writes the pictures into a folder, as SVG and in the other formats of the plan. A
-- picture of an earlier run in a format that this run does not draw is removed: it would
-- show other rows. Returns the names of the files, and why the first missing one could
-- not be drawn.
local function write_pictures(plan, pictures, folder)
  local names, reason = {}, nil
  for _, picture in ipairs(pictures) do
    reason = reason or picture.reason
    for format in pairs(plots.FORMATS) do
      os.remove(("%s/%s.%s"):format(folder, picture.file, format))
    end
    for _, format in ipairs(picture.svg and plan.formats or {}) do
      local name, content, why = picture.file .. "." .. format, picture.svg, nil
      if format ~= "svg" then content, why = plots.draw(picture.plot, format) end
      reason = reason or why
      if content then
        files.write(folder .. "/" .. name, content)
        names[#names + 1] = name
      end
    end
  end
  return names, reason
end

--- Says how many rows lack the cost that --over asks for.
local function explain_over(rows, over)
  local lacking = 0
  for _, row in ipairs(over and rows or {}) do
    lacking = lacking + (row.metrics[over] == nil and 1 or 0)
  end
  if lacking > 0 then
    io.write(("%d of %d rows have no %s: it was not counted when they were computed\n")
      :format(lacking, #rows, over))
  end
end

--- Prints the tables, writes the plots and the report into a folder, and prints where
-- everything is. Tables and plots show the means of repeats.
local function finish(plan, store, manifest, folder, given)
  local rows = rows_of_plan(plan, store)
  local axes, shown = plan.grid.axes, rows
  explain_over(rows, given.over)
  if plan.repeats > 1 then
    shown = results.summarise(rows, plan.proportions)
    axes = { { name = "seed" } }
    for i, axis in ipairs(plan.grid.axes) do axes[i + 1] = axis end
  end
  local full = text_table.of_rows(rows, axes, plan.order)
  local tables = make_tables(plan, shown)
  for _, t in ipairs(plan.table and tables or { full }) do
    io.write("\n", text_table.text(t))
  end
  local paths = { store.path, folder .. "/report.html" }
  if given.csv then
    paths[3] = folder .. "/results.csv"
    files.write(paths[3], text_table.csv(full))
  end
  local pictures = make_plots(plan, shown)
  local drawn, reason = write_pictures(plan, pictures, folder)
  for _, name in ipairs(drawn) do paths[#paths + 1] = folder .. "/" .. name end
  manifests.add_pictures(folder, manifest, drawn, rows)
  if reason then io.stderr:write(reason, "\n") end
  files.write(paths[2], report.html { title = plan.title, manifest = manifest,
    plots = pictures, tables = tables, rows = full })
  io.write("\n", table.concat(paths, "\n"), "\n")
  return { rows = rows, folder = plan.folder, paths = paths, tables = tables }
end

local function describe_run(plan, given)
  local env = plan.environment
  local axes = json.array {}
  for i, axis in ipairs(plan.grid.axes) do
    axes[i] = { name = axis.name, values = axis.values }
  end
  local library = package.loaded["kvlab.library"]
  local versions = { luajit = jit.version, kvlab_abi = library and library.C.kvl_abi() }
  local is_cpu = library and env.device == "cpu"
  for name, version in pairs(env.versions or {}) do versions[name] = version end
  return {
    name = plan.name, title = plan.title, seed = plan.settings.seed, device = env.device,
    isa = is_cpu and ffi.string(library.C.kvl_cpu_isa()) or nil,
    description = env.description, driver = env.driver, quick = plan.settings.quick,
    axes = axes, defaults = plan.grid.defaults, repeats = plan.repeats,
    configurations = #plan.configs, versions = versions, jobs = given.jobs,
    shard = plan.shard and ("%d/%d"):format(plan.shard.index, plan.shard.count),
    arguments = json.array(given.arguments or {}),
  }
end

--- Lists the sources of a row that have changed since it was computed; nil if none has.
local function changed_sources(row)
  if not row.made_by then return { "unknown sources (the row names none)" } end
  local changed = sources.changed(row.made_by)
  return changed[1] and changed or nil
end

--- Returns the sources that made these rows stale: "lua/policies/quest.lua, library".
local function list_changed(rows)
  local all = {}
  for _, row in ipairs(rows) do
    for _, name in ipairs(row.stale or {}) do all[name] = true end
  end
  return table.concat(sorted.keys(all), ", ")
end

--- Finds the plan's stale rows and marks each with the sources that have changed. Drops
-- these rows unless the plan keeps them. Prints a line about it, and returns how many
-- there are.
local function treat_stale(plan, store)
  local stale, configs = {}, {}
  for _, config in ipairs(plan.configs) do
    local row = store:find(config)
    local changed = row and changed_sources(row)
    if changed then
      row.stale = changed
      stale[#stale + 1], configs[#configs + 1] = row, config
    end
  end
  if #stale == 0 then return 0 end
  io.write(("%d of %d rows are stale and %s; changed since: %s\n"):format(#stale,
    #plan.configs, plan.keeps_stale and "kept" or "computed again", list_changed(stale)))
  if not plan.keeps_stale then store:drop(configs) end
  return #stale
end

--- Prints which sources have changed since merged rows were computed. Such rows are not
-- computed again, because the sweep may have run on another machine. They are marked as
-- stale only if the rows differ in their sources.
local function explain_origin(plan, store)
  local rows = rows_of_plan(plan, store)
  local mixed = results.mixed(rows)
  for _, row in ipairs(rows) do row.stale = changed_sources(row) end
  local list = list_changed(rows)
  if list ~= "" then io.write("changed since these rows were computed: ", list, "\n") end
  for _, row in ipairs(mixed[1] and {} or rows) do row.stale = nil end
end

--- Returns the configurations without a row. A shard also takes account of the rows in
-- the folder that all shards share: it runs their configurations only if they are stale.
local function find_missing(plan, store)
  local elsewhere, missing = {}, {}
  for _, row in ipairs(plan.shard and not plan.fresh and results.read(plan.root) or {}) do
    if plan.keeps_stale or not changed_sources(row) then
      elsewhere[results.key(row.config)] = true
    end
  end
  for _, config in ipairs(plan.configs) do
    if not store:find(config) and not elsewhere[results.key(config)] then
      missing[#missing + 1] = config
    end
  end
  return missing
end

--- Ends the run of a shard. It shows no tables; `sweep merge` shows those of all shards.
local function finish_shard(plan, store, manifest)
  manifests.finish(plan.folder, manifest)
  io.write(("shard %d of %d is complete: %s\n"):format(plan.shard.index, plan.shard.count,
    store.path))
  return { rows = rows_of_plan(plan, store), folder = plan.folder, paths = { store.path },
           tables = {} }
end

--- Returns the manifest of what this run shows, and the folder for its pictures, which is
-- the results' folder. If other runs have already computed all rows, the folder's
-- manifest stays; and if this run shows other rows than the folder's pictures, those
-- pictures stay, too.
local function describe_rows(plan, described, old, has_work)
  if has_work or not old or plan.shard then
    return manifests.write(plan.folder, described, old), plan.folder
  elseif manifests.is_same_selection(described, old) then
    old.shards = described.shards -- of a merge
    return old, plan.folder
  end
  local folder = plan.folder .. "/selection"
  files.make_folder(folder)
  io.write(("nothing was computed: the manifest and pictures of %s stay those of the run"
    .. " that computed the rows\n"):format(plan.folder))
  return manifests.write(folder, described, old), folder
end

--- Runs the missing configurations, or with --merge takes their rows over from the
-- shards; then shows all rows.
local function complete(spec, plan, store, given)
  local described, old = describe_run(plan, given), nil
  if not plan.fresh then old = manifests.check(plan.folder, described, given.merge) end
  local adopted = given.merge and shards.adopt(plan.root, store, described,
    plan.keeps_stale) or 0
  sources.begin()
  if given.merge then explain_origin(plan, store) else treat_stale(plan, store) end
  local missing = find_missing(plan, store)
  local works = not given.merge and #missing > 0
  if store.was_torn then io.write "dropped the last row, which was incomplete\n" end
  if store.repeated > 0 then
    io.write(("dropped %d rows that were there twice\n"):format(store.repeated))
  end
  if #store.rows > 0 then
    io.write(("%s %d of %d\n"):format(given.merge and "merged" or "resumed",
      #plan.configs - #missing, #plan.configs))
  end
  local manifest, folder = describe_rows(plan, described, #store.rows > 0 and old or nil,
    works or adopted > 0)
  if works then run_missing(spec, plan, store, missing, given) end
  store:arrange(plan.configs)
  if plan.shard then return finish_shard(plan, store, manifest) end
  if given.merge and #missing > 0 then -- the script's tables may need all rows
    local ok, problem = pcall(finish, plan, store, manifest, folder, given)
    if not ok then io.stderr:write("no tables yet: ", tostring(problem), "\n") end
    shards.explain_missing(plan, missing)
  end
  return finish(plan, store, manifest, folder, given)
end

local function execute(spec, plan, given)
  if plan.shard then shards.check_count(plan.root, plan.shard.count) end
  files.make_folder(plan.folder)
  local store = results.open(plan.folder, plan.fresh)
  local ok, answer = pcall(complete, spec, plan, store, given)
  store:close()
  if not ok then error(answer, 0) end
  return answer
end

--- Prints the configurations and ends the program, for --list.
local function list(plan)
  for _, config in ipairs(plan.configs) do
    local seed = plan.repeats > 1 and (" seed=%d"):format(config.seed) or ""
    io.write(grids.describe(plan.grid, config), seed, "\n")
  end
  os.exit(0, true)
end

--- Runs an experiment; see the head of this file.
---@param spec table
---@param given? kvlab.command_line  instead of the command line's
---@return {rows: table[], folder: string, paths: string[], tables: table[]}
function M.run(spec, given)
  given = given or command_line
  local ok, plan = pcall(plans.new, spec, given)
  if not ok then error(tostring(plan), plans.level(plan)) end
  if given.help then
    help.experiment(spec, plan)
    os.exit(0, true)
  end
  if given.list then list(plan) end
  if given.worker then workers.serve(spec, plan) end
  local answer
  ok, answer = pcall(execute, spec, plan, given)
  if not ok then error(answer, 0) end
  return answer
end

return M
