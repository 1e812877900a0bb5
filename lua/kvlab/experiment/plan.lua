--- The plan of an experiment: checks its specification, applies --quick and --set, and
-- lists the configurations. Errors are raised without a position. kvlab.experiment adds
-- the line of the script to those that are the script's fault.
local costs = require "kvlab.experiment.costs"
local grids = require "kvlab.experiment.grid"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local plots = require "kvlab.report.plot"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local text_table = require "kvlab.report.table"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

local ByUser = { __tostring = function(self) return self.problem end }

--- Calls fn(...), whose errors are then those of the command line, not of the script.
local function by_user(fn, ...)
  local ok, problem = pcall(fn, ...)
  if not ok then error(setmetatable({ problem = problem }, ByUser), 0) end
  return problem
end

--- The level at which to raise an error of M.new: 0 for a mistake in the command line, 2
-- for one in the script that called the caller.
---@return integer
function M.level(problem) return getmetatable(problem) == ByUser and 0 or 2 end

local FIELDS = {
  name = options.required(options.string), title = options.string,
  grid = options.required(options.table), defaults = options.table,
  kinds = options.table,
  repeats = options.number, deterministic = options.boolean,
  proportions = options.table, quick = options.table, when = options.fn,
  check = options.fn,
  environment = options.table, metrics = options.table, setup = options.fn,
  run = options.required(options.fn), teardown = options.fn,
  table = options.either(options.table, options.fn),
  plot = options.either(options.table, options.fn),
}
local VIEWS = { table = text_table.PIVOT, plot = plots.LINES }
local AXES_OF = { table = { "rows", "columns" }, plot = { "x", "series", "panel" } }
local METRIC_OF = { table = "value", plot = "y" }
local ENVIRONMENT = { device = options.required(options.string),
                      description = options.string, driver = options.string,
                      versions = options.table }

--- Returns the device that rows name: the one that the script gives, else the one that
-- kv.device() opens. If the script never asked for a device, it is the CPU.
local function find_environment(given)
  if given then
    return options.check("experiment.environment", given, ENVIRONMENT, 0)
  end
  local device = package.loaded["kvlab.tensor.device"]
  if not device then return { device = "cpu" } end
  local dev = device.device()
  return { device = dev:name(), description = dev:description() }
end

--- Returns a copy of `where`. A value that --quick or --set took out of the grid is
-- replaced by the last value of its axis.
local function resolve_where(grid, where, what)
  local resolved = {}
  for name, value in pairs(where or {}) do
    local axis = grid.axis_of[name]
    if not axis then
      fail("%s: where names %s, which is no axis%s", what, tostring(name),
        hint(name, grid.names))
    end
    local is_there = false
    for _, other in ipairs(axis.values) do is_there = is_there or other == value end
    resolved[name] = is_there and value or axis.values[#axis.values]
  end
  return resolved
end

local function describe_where(where)
  local words = {}
  for _, name in ipairs(sorted.keys(where)) do
    words[#words + 1] = ("%s = %s"):format(name, tostring(where[name]))
  end
  return table.concat(words, ", ")
end

--- Checks the description of a table or plot against the grid, and returns a copy with a
-- title or caption. Every axis with several values must have a place, or several rows
-- would share a cell or a point.
local function check_view(grid, view, what, over)
  options.check(what, view, VIEWS[what], 0)
  view = costs.chosen(view, over)
  local resolved, placed = {}, {}
  for key, value in pairs(view) do resolved[key] = value end
  resolved.where = resolve_where(grid, view.where, what)
  for name in pairs(resolved.where) do placed[name] = true end
  local metrics = {}
  for _, name in ipairs(grid.metrics) do metrics[name] = true end
  for _, key in ipairs(AXES_OF[what]) do
    local name = view[key]
    local is_metric = what == "plot" and key == "x" and metrics[name]
    if name and not grid.axis_of[name] and not is_metric then
      fail("%s: %s is %s, which is no axis%s", what, key, name, hint(name, grid.names))
    end
    if name then placed[name] = true end
  end
  -- with a metric on x, the line itself runs along one axis that has no other place
  local lines_along = what == "plot" and metrics[view.x] and 1 or 0
  for _, axis in ipairs(grid.axes) do
    local is_told = #axis.values < 2 or grids.is_told(axis, placed)
    if not is_told then lines_along = lines_along - 1 end
    if not is_told and lines_along < 0 then
      fail("%s: axis %s has %d values; place it in %s or where", what, axis.name,
        #axis.values, table.concat(AXES_OF[what], ", "))
    end
  end
  local words, metric = describe_where(resolved.where), view[METRIC_OF[what]]
  if what == "plot" then
    local title = view.title
      or (view.ylabel or view.y) .. " by " .. (view.xlabel or view.x)
    title = title:gsub("{over}", costs.words(view.x) or "{over}")
      :gsub("{([%w_]+)}", grid.defaults)
    resolved.title = words == "" and title or ("%s (%s)"):format(title, words)
  else
    if view.beside then metric = ("%s (%s)"):format(metric, view.beside) end
    resolved.caption = view.caption
      or (words == "" and metric or metric .. " at " .. words)
  end
  return resolved
end

--- Checks the description of a Pareto front's table. Its axes are those that have several
-- values and are not in `where`.
local function check_front(grid, view, over)
  options.check("table", view, text_table.FRONT, 0)
  view = costs.chosen(view, over)
  local resolved = { where = resolve_where(grid, view.where, "table"), axes = {} }
  for key, value in pairs(view) do resolved[key] = resolved[key] or value end
  for _, axis in ipairs(grid.axes) do
    if #axis.values > 1 and resolved.where[axis.name] == nil then
      resolved.axes[#resolved.axes + 1] = axis.name
    end
  end
  local words = describe_where(resolved.where)
  resolved.caption = view.caption or ("Pareto front of %s over %s%s"):format(view.front,
    view.over, words == "" and "" or " at " .. words)
  return resolved
end

--- Checks one description, or a list of them, and returns a list. Returns nil and
-- functions as they are.
local function check_views(grid, given, what, over)
  if type(given) ~= "table" then return given end
  local views = {}
  for i, view in ipairs(given[1] and given or { given }) do
    if type(view) ~= "table" then
      fail("%s[%d] is a %s, expected a table", what, i, type(view))
    end
    views[i] = what == "table" and view.front and check_front(grid, view, over)
      or check_view(grid, view, what, over)
  end
  return views
end

--- Returns the names of the metrics that every row must have.
local function find_required(plan, spec)
  local required = { unpack(spec.metrics or {}) }
  for _, what in ipairs { "table", "plot" } do
    if type(plan[what]) == "table" then
      for _, view in ipairs(plan[what]) do
        required[#required + 1] = view[METRIC_OF[what]] or view.front
        required[#required + 1] = view.beside
      end
    end
  end
  return required
end

--- Returns the seed of repeat n. The first repeat has the given seed; the seed of another
-- depends only on the given seed and n. So all configurations get the same seeds, and
-- policies can be compared in pairs. A run with more repeats can also use the rows of a
-- run with fewer. Seeds have 32 bits because experiments add small numbers to them.
-- MurmurHash3's finaliser makes them; it never gives two repeats the same seed.
local function seed_of(seed, n) return n == 1 and seed or seeds.derive(seed, n) end

local function check_repeats(n, source)
  if type(n) ~= "number" or n < 1 or n % 1 ~= 0 then
    fail("%s repeats is %s, expected a whole number from 1", source, tostring(n))
  end
  return n
end

--- Applies --quick and --set. Returns the number of repeats, whether to discard the
-- folder's rows, and whether to keep its stale rows.
local function apply_options(spec, grid, given)
  local repeats, fresh = check_repeats(spec.repeats or 1, "experiment:"), false
  local keeps_stale = false
  grid.takes_repeats = not spec.deterministic
  local function apply(values, source)
    for _, key in ipairs(sorted.keys(values)) do
      if key == "repeats" then
        repeats = check_repeats(values.repeats, source)
      elseif key == "fresh" and source == "--set" then
        fresh = values.fresh
        if type(fresh) ~= "boolean" then fail("--set fresh takes true or false") end
      elseif key == "stale" and source == "--set" then
        if values.stale ~= "keep" then
          fail("--set stale is %s, expected keep", tostring(values.stale))
        end
        keeps_stale = true
      else
        grids.override(grid, key, values[key], source)
      end
    end
  end
  for _, word in ipairs(given.args or {}) do -- others are the script's own affair
    local key = word:match "^([%w_]+)="
    if key == "repeats" or grid.axis_of[key] or grid.defaults[key] ~= nil then
      by_user(fail, "%s is no option, expected --set %s", word, word)
    end
  end
  if given.quick then apply(spec.quick or {}, "quick") end
  by_user(apply, given.set, "--set")
  return repeats, fresh, keeps_stale
end

--- The formats of pictures that --formats asks for; svg comes first and is always there.
local function formats_of(given)
  local formats = { "svg" }
  if given and #given == 0 then fail "--formats is empty, expected svg, pdf or png" end
  for _, format in ipairs(given or {}) do
    if not plots.FORMATS[format] then
      fail("--formats is %s, expected svg, pdf or png, with commas", format)
    end
    if format ~= "svg" then formats[#formats + 1] = format end
  end
  return formats
end

--- Raises unless `proportions` is as results.summarise takes it.
local function check_proportions(given)
  for key, name in pairs(given or {}) do
    if type(name) ~= "string" then
      fail("experiment: proportions has %s for %s, expected a name of a metric, or"
        .. " metric = what counts its trials", options.shown(name), tostring(key))
    end
  end
end

--- Returns the configurations of a shard: the i-th of n parts of the list. They are
-- neighbours, so what one configuration prepares serves the next, as without shards.
local function take_shard(configs, shard)
  local mine = {}
  local first = math.floor((shard.index - 1) * #configs / shard.count) + 1
  for i = first, math.floor(shard.index * #configs / shard.count) do
    mine[#mine + 1] = configs[i]
  end
  return mine
end

--- Raises for a value of an axis or a default that is not of its kind.
---@param kinds table<string, kvlab.OptionKind>
local function check_kinds(kinds, grid)
  for _, name in ipairs(sorted.keys(kinds)) do
    local axis = grid.axis_of[name]
    for _, value in ipairs(axis and axis.values or { grid.defaults[name] }) do
      if not kinds[name][2](value) then
        fail("%s %s", name, options.problem(value, kinds[name]))
      end
    end
  end
end

--- Raises for the first configuration that the experiment refuses, before any has run.
local function check_configs(check, plan)
  for _, config in ipairs(check and plan.configs or {}) do
    local ok, why = pcall(check, config)
    if not ok then
      why = tostring(why):gsub("^%S-%.lua:%d+: ", "")
      fail("%s\n  configuration %s", why, grids.describe(plan.grid, config))
    end
  end
end

---@class kvlab.plan
---@field name string
---@field title string
---@field root string           the folder of the results of all shards
---@field folder string         the folder of this run's results: the root, or the shard's
---@field shard {index: integer, count: integer}|nil
---@field fresh boolean         discard the folder's rows
---@field keeps_stale boolean   keep rows whose sources have changed, and mark them
---@field grid kvlab.grid
---@field repeats integer
---@field configs table[]       every configuration (of the shard), in order
---@field order string[]        the keys of a row, in order
---@field proportions table    metrics that lie between 0 and 1, as results.summarise
---  takes them
---@field required string[]     metrics that every row must have
---@field environment {device: string, description: string|nil, driver: string|nil}
---@field settings table        what setup and run get: the defaults, seed, device, quick,
---  out, configs; over: the cost that --over asks for (costs.lua); also isa if --isa
---  gives it, link_gbps and link_us if a link is emulated
---@field table table[]|function|nil
---@field plot table[]|function|nil

--- Checks an experiment's specification and applies the command line to it.
---@param spec table             see kvlab.experiment
---@param given kvlab.CommandLine
---@return kvlab.plan
function M.new(spec, given)
  options.check("experiment", spec, FIELDS, 0)
  if not spec.name:match "^[%w_][%w_.-]*$" then
    fail("experiment: name is %q, expected letters, digits, _ - and .", spec.name)
  end
  check_proportions(spec.proportions)
  local grid = grids.new(spec.grid, spec.defaults)
  grid.metrics = spec.metrics or {}
  local repeats, fresh, keeps_stale = apply_options(spec, grid, given)
  by_user(check_kinds, spec.kinds or {}, grid)
  local root = given.out
    or "results/" .. spec.name .. (given.quick and "-quick" or "")
  if given.over then by_user(costs.check, given.over, spec.name, grid.metrics) end
  local plan = {
    name = spec.name, title = spec.title or spec.name, grid = grid, repeats = repeats,
    fresh = fresh, keeps_stale = keeps_stale, root = root,
    formats = by_user(formats_of, given.formats),
    proportions = spec.proportions or {},
    folder = root, shard = given.shard,
    environment = given.environment or find_environment(spec.environment),
    table = check_views(grid, spec.table, "table", given.over),
    plot = check_views(grid, spec.plot, "plot", given.over),
    order = { "config", "metrics", "each", "trials", "made_by", unpack(grid.names) },
    configs = {},
  }
  local fixed = { device = plan.environment.device, isa = given.isa,
                  link_gbps = given["link-gbps"], link_us = given["link-us"] }
  for n = 1, repeats do
    fixed.seed = seed_of(given.seed, n)
    for _, config in ipairs(grids.configurations(grid, fixed, spec.when)) do
      plan.configs[#plan.configs + 1] = config
    end
  end
  if repeats > 1 and spec.deterministic then
    by_user(fail, "repeats is %d, expected 1: nothing in %s depends on the seed", repeats,
      spec.name)
  end
  if #plan.configs == 0 then fail("experiment: `when` leaves no configuration") end
  if plan.shard then
    plan.folder = ("%s/shards/%d-of-%d"):format(root, plan.shard.index, plan.shard.count)
    plan.configs = take_shard(plan.configs, plan.shard)
  end
  by_user(check_configs, spec.check, plan)
  plan.required = find_required(plan, spec)
  for _, name in ipairs { "device", "isa", "seed", "link_gbps", "link_us" } do
    plan.order[#plan.order + 1] = name
  end
  for _, name in ipairs(spec.metrics or {}) do plan.order[#plan.order + 1] = name end
  plan.settings = { seed = given.seed, device = fixed.device, out = plan.folder,
                    isa = fixed.isa, quick = given.quick, configs = plan.configs,
                    link_gbps = fixed.link_gbps, link_us = fixed.link_us,
                    over = given.over or costs.NAMES[1] }
  for name, value in pairs(grid.defaults) do plan.settings[name] = value end
  return plan
end

return M
