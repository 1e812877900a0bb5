--- The plan of an experiment: checks its specification, applies --quick and --set, and
-- lists the configurations. Messages are raised without a position; kvlab.experiment
-- adds the line of the script.
local grids = require "kvlab.experiment.grid"
local nearest = require("kvlab.words").nearest
local options = require "kvlab.options"
local plots = require "kvlab.report.plot"
local sorted = require "kvlab.sorted"
local text_table = require "kvlab.report.table"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

local FIELDS = {
  name = options.required(options.string), title = options.string,
  grid = options.required(options.table), defaults = options.table,
  repeats = options.number, deterministic = options.boolean,
  proportions = options.table, quick = options.table, when = options.fn,
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

--- The device that rows name: what the script says, else what kv.device() opens, else (no
-- device was ever asked for) the CPU.
local function find_environment(given)
  if given then
    return options.check("experiment.environment", given, ENVIRONMENT, 0)
  end
  local device = package.loaded["kvlab.tensor.device"]
  if not device then return { device = "cpu" } end
  local dev = device.device()
  return { device = dev:name(), description = dev:description() }
end

--- `where` without values that --quick or --set took out of the grid: the axis's last
-- value stands in.
local function resolve_where(grid, where, what)
  local resolved = {}
  for name, value in pairs(where or {}) do
    local axis = grid.axis_of[name]
    if not axis then
      fail("%s: where names %s, which is no axis; did you mean %s?", what, tostring(name),
        nearest(tostring(name), grid.names))
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

--- A table's or plot's description against the grid: every axis with several values must
-- be placed, or rows would fall on each other.
local function check_view(grid, view, what)
  options.check(what, view, VIEWS[what], 0)
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
      fail("%s: %s is %s, which is no axis; did you mean %s?", what, key, name,
        nearest(name, grid.names))
    end
    if name then placed[name] = true end
  end
  local lines_along = what == "plot" and metrics[view.x] and 1 or 0 -- axes, not placed
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
    local title = view.title or view.y .. " by " .. view.x
    resolved.title = words == "" and title or ("%s (%s)"):format(title, words)
  else
    resolved.caption = view.caption
      or (words == "" and metric or metric .. " at " .. words)
  end
  return resolved
end

--- A table of a Pareto front, whose axes are those that `where` leaves.
local function check_front(grid, view)
  options.check("table", view, text_table.FRONT, 0)
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

--- nil, one description or a list of them -> a list, checked. Functions stay.
local function check_views(grid, given, what)
  if type(given) ~= "table" then return given end
  local views = {}
  for i, view in ipairs(given[1] and given or { given }) do
    if type(view) ~= "table" then
      fail("%s[%d] is a %s, expected a table", what, i, type(view))
    end
    views[i] = what == "table" and view.front and check_front(grid, view)
      or check_view(grid, view, what)
  end
  return views
end

--- The names of metrics that every row must have.
local function find_required(plan, spec)
  local required = { unpack(spec.metrics or {}) }
  for _, what in ipairs { "table", "plot" } do
    if type(plan[what]) == "table" then
      for _, view in ipairs(plan[what]) do
        required[#required + 1] = view[METRIC_OF[what]] or view.front
      end
    end
  end
  return required
end

--- The first of `n` repeats has the seed that was given; the others' follow from it and
-- their number alone, so that every configuration meets the same ones (policies can be
-- compared in pairs) and more repeats add to those that are there. 32 bits: experiments
-- add small numbers to a seed. (MurmurHash3's finaliser, which never makes two the same.)
local function seed_of(seed, n)
  if n == 1 then return seed end
  local x = (seed * 0x9e3779b1ULL + n) % 2 ^ 32
  for _, step in ipairs { { 16, 0x85ebca6bULL }, { 13, 0xc2b2ae35ULL }, { 16, 1ULL } } do
    x = bit.bxor(x, bit.rshift(x, step[1])) * step[2] % 2 ^ 32
  end
  return tonumber(x)
end

local function check_repeats(n, source)
  if type(n) ~= "number" or n < 1 or n % 1 ~= 0 then
    fail("%s repeats is %s, expected a whole number from 1", source, tostring(n))
  end
  return n
end

--- Applies --quick and --set; returns how many repeats there are, whether what the folder
-- holds is forgotten, and whether its stale rows are kept.
local function apply_options(spec, grid, given)
  local repeats, fresh = check_repeats(spec.repeats or 1, "experiment:"), false
  local keeps_stale = false
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
  if given.quick then apply(spec.quick or {}, "quick") end
  apply(given.set, "--set")
  return repeats, fresh, keeps_stale
end

--- Shard i of n has the i-th of n runs of neighbours, so that what one configuration
-- prepares serves the next, as it does without shards.
local function take_shard(configs, shard)
  local mine = {}
  local first = math.floor((shard.index - 1) * #configs / shard.count) + 1
  for i = first, math.floor(shard.index * #configs / shard.count) do
    mine[#mine + 1] = configs[i]
  end
  return mine
end

---@class kvlab.plan
---@field name string
---@field title string
---@field root string           where the results go, in the end
---@field folder string         where this run's go: the root, or a folder of the shard
---@field shard {index: integer, count: integer}|nil
---@field fresh boolean         forget what the folder holds
---@field keeps_stale boolean   rows whose sources have changed stay, and are marked
---@field grid kvlab.grid
---@field repeats integer
---@field configs table[]       every configuration (of the shard), in order
---@field order string[]        the keys of a row, in order
---@field proportions string[]  metrics that lie between 0 and 1, and so their intervals
---@field required string[]     metrics that every row must have
---@field environment {device: string, description: string|nil, driver: string|nil}
---@field settings table        what setup and run get: the defaults, seed, device, quick,
---  out, configs; of an emulated link, link_gbps and link_us
---@field table table[]|function|nil
---@field plot table[]|function|nil

--- Checks a specification and applies the command line to it.
---@param spec table             see kvlab.experiment
---@param given kvlab.CommandLine
---@return kvlab.plan
function M.new(spec, given)
  options.check("experiment", spec, FIELDS, 0)
  if not spec.name:match "^[%w_][%w_.-]*$" then
    fail("experiment: name is %q, expected letters, digits, _ - and .", spec.name)
  end
  local grid = grids.new(spec.grid, spec.defaults)
  grid.metrics = spec.metrics or {}
  local repeats, fresh, keeps_stale = apply_options(spec, grid, given)
  local root = given.out
    or "results/" .. spec.name .. (given.quick and "-quick" or "")
  local plan = {
    name = spec.name, title = spec.title or spec.name, grid = grid, repeats = repeats,
    fresh = fresh, keeps_stale = keeps_stale, root = root,
    proportions = spec.proportions or {},
    folder = root, shard = given.shard,
    environment = given.environment or find_environment(spec.environment),
    table = check_views(grid, spec.table, "table"),
    plot = check_views(grid, spec.plot, "plot"),
    order = { "config", "metrics", "made_by", unpack(grid.names) }, configs = {},
  }
  local fixed = { device = plan.environment.device, link_gbps = given["link-gbps"],
                  link_us = given["link-us"] }
  for n = 1, repeats do
    fixed.seed = seed_of(given.seed, n)
    for _, config in ipairs(grids.configurations(grid, fixed, spec.when)) do
      plan.configs[#plan.configs + 1] = config
    end
  end
  if repeats > 1 and spec.deterministic then
    fail("repeats is %d, expected 1: nothing in %s depends on the seed", repeats,
      spec.name)
  end
  if #plan.configs == 0 then fail("experiment: `when` leaves no configuration") end
  if plan.shard then
    plan.folder = ("%s/shards/%d-of-%d"):format(root, plan.shard.index, plan.shard.count)
    plan.configs = take_shard(plan.configs, plan.shard)
  end
  plan.required = find_required(plan, spec)
  for _, name in ipairs { "device", "seed", "link_gbps", "link_us" } do
    plan.order[#plan.order + 1] = name
  end
  for _, name in ipairs(spec.metrics or {}) do plan.order[#plan.order + 1] = name end
  plan.settings = { seed = given.seed, device = fixed.device, out = plan.folder,
                    quick = given.quick, configs = plan.configs,
                    link_gbps = fixed.link_gbps, link_us = fixed.link_us }
  for name, value in pairs(grid.defaults) do plan.settings[name] = value end
  return plan
end

return M
