--- What an experiment is going to do: its specification checked, --quick and --set
-- applied, the configurations listed. Messages are raised without a position:
-- kvlab.experiment adds the line of the script.
local grids = require "kvlab.grid"
local nearest = require "kvlab.nearest"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

-- field = the types it may have; "nil" where it may be left out
local FIELDS = {
  name = "string", title = "string nil", grid = "table", defaults = "table nil",
  quick = "table nil", when = "function nil", environment = "table nil",
  metrics = "table nil", setup = "function nil", run = "function",
  teardown = "function nil", table = "table function nil", plot = "table function nil",
}
local VIEWS = {
  table = {
    rows = "string", columns = "string nil", value = "string", where = "table nil",
    format = "string nil", caption = "string nil",
  },
  plot = {
    x = "string", y = "string", series = "string nil", panel = "string nil",
    where = "table nil", logx = "boolean nil", logy = "boolean nil",
    xpow2 = "boolean nil", style = "table nil", title = "string nil",
    xlabel = "string nil", ylabel = "string nil", ymin = "number nil",
    ymax = "number nil",
  },
}
local AXES_OF = { table = { "rows", "columns" }, plot = { "x", "series", "panel" } }
local METRIC_OF = { table = "value", plot = "y" }
local ENVIRONMENT = {
  device = "string", description = "string nil", driver = "string nil",
  versions = "table nil",
}

--- A table's fields against a list of their types.
local function check_fields(given, fields, what)
  local names = nearest.keys(fields)
  for name in pairs(given) do
    if not fields[name] then
      fail("%s has no field %s; did you mean %s? There is %s", what, tostring(name),
        nearest.find(tostring(name), names), table.concat(names, ", "))
    end
  end
  for _, name in ipairs(names) do
    local kind = type(given[name])
    if not (" " .. fields[name] .. " "):find(" " .. kind .. " ", 1, true) then
      fail("%s: %s is %s, expected a %s", what, name,
        kind == "nil" and "missing" or "a " .. kind,
        (fields[name]:gsub(" nil", ""):gsub(" ", " or a ")))
    end
  end
end

--- The device that rows name: what the script says, else what kv.device() opens, else (no
-- device was ever asked for) the CPU.
local function find_environment(given)
  if given then
    check_fields(given, ENVIRONMENT, "experiment: environment")
    return given
  end
  local device = package.loaded["kvlab.device"]
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
        nearest.find(tostring(name), grid.names))
    end
    local is_there = false
    for _, other in ipairs(axis.values) do is_there = is_there or other == value end
    resolved[name] = is_there and value or axis.values[#axis.values]
  end
  return resolved
end

local function describe_where(where)
  local words = {}
  for _, name in ipairs(nearest.keys(where)) do
    words[#words + 1] = ("%s = %s"):format(name, tostring(where[name]))
  end
  return table.concat(words, ", ")
end

--- A table's or plot's description against the grid: every axis with several values must
-- be placed, or rows would fall on each other.
local function check_view(grid, view, what)
  check_fields(view, VIEWS[what], what)
  local resolved, placed = {}, {}
  for key, value in pairs(view) do resolved[key] = value end
  resolved.where = resolve_where(grid, view.where, what)
  for name in pairs(resolved.where) do placed[name] = true end
  for _, key in ipairs(AXES_OF[what]) do
    local name = view[key]
    if name and not grid.axis_of[name] then
      fail("%s: %s is %s, which is no axis; did you mean %s?", what, key, name,
        nearest.find(name, grid.names))
    end
    if name then placed[name] = true end
  end
  for _, axis in ipairs(grid.axes) do
    if #axis.values > 1 and not placed[axis.name] then
      fail("%s: axis %s has %d values; place it in %s or where", what, axis.name,
        #axis.values, table.concat(AXES_OF[what], ", "))
    end
  end
  local words = describe_where(resolved.where)
  local metric = view[METRIC_OF[what]]
  resolved.where_text = words
  resolved.caption = view.caption or (words == "" and metric or metric .. " at " .. words)
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
    views[i] = check_view(grid, view, what)
  end
  return views
end

--- The names of metrics that every row must have.
local function find_required(plan, spec)
  local required = { unpack(spec.metrics or {}) }
  for _, what in ipairs { "table", "plot" } do
    if type(plan[what]) == "table" then
      for _, view in ipairs(plan[what]) do
        required[#required + 1] = view[METRIC_OF[what]]
      end
    end
  end
  return required
end

---@class kvlab.plan
---@field name string
---@field title string
---@field folder string         where the results go
---@field fresh boolean         forget what the folder holds
---@field grid kvlab.grid
---@field configs table[]       every configuration, in order
---@field order string[]        the keys of a row, in order
---@field required string[]     metrics that every row must have
---@field environment {device: string, description: string|nil, driver: string|nil}
---@field settings table        what setup and run get: the defaults, seed, device, quick,
---  out, configs; of an emulated link, link_gbps and link_us
---@field table table[]|function|nil
---@field plot table[]|function|nil

--- Checks a specification and applies the command line to it.
---@param spec table             see kvlab.experiment
---@param options kvlab.options
---@return kvlab.plan
function M.new(spec, options)
  if type(spec) ~= "table" then
    fail("experiment.run takes a table, not a %s", type(spec))
  end
  check_fields(spec, FIELDS, "experiment")
  if not spec.name:match "^[%w_][%w_.-]*$" then
    fail("experiment: name is %q, expected letters, digits, _ - and .", spec.name)
  end
  local grid = grids.new(spec.grid, spec.defaults)
  if options.quick then
    for _, key in ipairs(nearest.keys(spec.quick or {})) do
      grids.override(grid, key, spec.quick[key], "quick")
    end
  end
  local fresh = false
  for _, key in ipairs(nearest.keys(options.set)) do
    if key == "fresh" then
      fresh = options.set.fresh
      if type(fresh) ~= "boolean" then fail("--set fresh takes true or false") end
    else
      grids.override(grid, key, options.set[key], "--set")
    end
  end

  local environment = find_environment(spec.environment)
  local link_gbps, link_us = options["link-gbps"], options["link-us"]
  local plan = {
    name = spec.name, title = spec.title or spec.name, grid = grid, fresh = fresh,
    folder = options.out or "results/" .. spec.name .. (options.quick and "-quick" or ""),
    environment = environment,
    configs = grids.configurations(grid, { device = environment.device,
      seed = options.seed, link_gbps = link_gbps, link_us = link_us }, spec.when),
    table = check_views(grid, spec.table, "table"),
    plot = check_views(grid, spec.plot, "plot"),
    order = { "config", "metrics", unpack(grid.names) },
  }
  if #plan.configs == 0 then fail("experiment: `when` leaves no configuration") end
  plan.required = find_required(plan, spec)
  for _, name in ipairs { "device", "seed", "link_gbps", "link_us" } do
    plan.order[#plan.order + 1] = name
  end
  for _, name in ipairs(spec.metrics or {}) do plan.order[#plan.order + 1] = name end
  plan.settings = { seed = options.seed, device = environment.device, out = plan.folder,
                    quick = options.quick, configs = plan.configs,
                    link_gbps = link_gbps, link_us = link_us }
  for name, value in pairs(grid.defaults) do plan.settings[name] = value end
  return plan
end

return M
