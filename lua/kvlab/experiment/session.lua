--- Runs configurations of an experiment one at a time: calls its setup, run and teardown.
--
-- Every seed starts afresh: setup and teardown run once per seed, and what a script keeps
-- for the next configuration, in `settings` or by experiment.memo, does not outlive the
-- seed. A configuration that fails ends its session in the same way, because what it left
-- half done would spoil later configurations.
--
-- The field `made_by` of a row names the sources that it was computed from
-- (kvlab.sources).
local is_finite = require("kvlab.number").is_finite
local json = require "kvlab.json"
local options = require "kvlab.options"
local secrets = require "kvlab.secrets"
local seeds = require "kvlab.seeds"
local sources = require "kvlab.sources"

local M = {}

local NAN = 0 / 0

local function fail(fmt, ...) error(fmt:format(...), 0) end

--- Checks metrics, and returns them as results.jsonl holds them: numbers, strings and
-- booleans, with NaN for every number that is not finite.
local function check_metrics(required, metrics)
  if type(metrics) ~= "table" then
    fail("run returned a %s, expected a table of metrics", type(metrics))
  end
  local checked = {}
  for name, value in pairs(metrics) do
    local kind = type(value)
    if type(name) ~= "string" then
      fail("metrics have the key %s, expected a name", tostring(name))
    end
    if name == "each" then value, kind = nil, "string" end -- see check_each
    if kind == "cdata" and tonumber(value) then -- a 64-bit integer
      value, kind = tonumber(value), "number"
    end
    if kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
      fail("metric %s is a %s, expected a number, a string or a boolean", name, kind)
    end
    checked[name] = (kind == "number" and not is_finite(value)) and NAN or value
  end
  if next(checked) == nil then fail "run returned no metrics" end
  for _, name in ipairs(required) do
    if checked[name] == nil then
      local names = {}
      for other in pairs(checked) do names[#names + 1] = other end
      table.sort(names)
      fail("metrics have no %s; there is %s", name, table.concat(names, ", "))
    end
  end
  return checked
end

local NUMBERS = options.list_of({ "a number or NaN", function(x)
  return type(x) == "number"
end }, 1)

--- Checks the lists of `each`, the results of every text by metric. Returns nil without
-- any.
local function check_each(each)
  if each == nil then return nil end
  if type(each) ~= "table" then
    fail("each is a %s, expected a table of lists by metric", type(each))
  end
  local checked = {}
  for name, list in pairs(each) do
    if type(name) ~= "string" or not NUMBERS[2](list) then
      fail("each.%s is %s, expected %s", tostring(name), options.shown(list), NUMBERS[1])
    end
    checked[name] = {}
    for i, x in ipairs(list) do checked[name][i] = is_finite(x) and x or NAN end
  end
  return checked
end

--- The number of 0/1 trials that each metric is a share of, if `proportions` names what
-- counts them. Returns nil if it is known for no metric.
local function count_trials(proportions, config, metrics)
  local trials = {}
  for metric, counter in pairs(proportions) do
    local count = metrics[counter] or config[counter]
    if type(metric) == "string" and metrics[metric] and options.count[2](count) then
      trials[metric] = count
    end
  end
  return next(trials) and trials or nil
end

local function copy(map)
  local other = {}
  for key, value in pairs(map) do other[key] = value end
  return other
end

--- Adds the stack to an error if the environment variable KVLAB_TRACEBACK is set.
local function keep_stack(problem)
  if os.getenv "KVLAB_TRACEBACK" and type(problem) == "string" then
    return debug.traceback(problem, 2)
  end
  return problem
end

---@class kvlab.session
---@field spec table
---@field plan kvlab.plan
---@field settings table|nil  what setup and run get for the present seed
---@field setup_used table<string, boolean>  the files that setup used
---@field memos table<string, {key: string, value: any, used: table}>
local Session = {}
Session.__index = Session

---@param spec table       see kvlab.experiment
---@param plan kvlab.plan
---@return kvlab.session
function M.new(spec, plan) return setmetatable({ spec = spec, plan = plan }, Session) end

--- Ends the session of the previous seed and begins one for this seed.
function Session:begin_seed(seed)
  if self.settings and self.settings.seed == seed then return end
  self:close()
  local settings = copy(self.plan.settings)
  settings.seed, settings.configs = seed, {}
  for _, config in ipairs(self.plan.configs) do
    if config.seed == seed then settings.configs[#settings.configs + 1] = config end
  end
  self.settings, self.setup_used, self.memos = settings, {}, {}
  if self.spec.setup then self.setup_used = sources.collect(self.spec.setup, settings) end
end

local current

--- Returns the session that is running a configuration now, or nil.
---@return kvlab.session|nil
function M.current() return current end

--- Returns fn(keys), computed once for equal keys; see experiment.memo.
function Session:remember(keys, fn)
  local ok, key = pcall(json.encode, keys)
  if not ok then error("memo: keys: " .. key, 3) end
  local info = debug.getinfo(fn, "S")
  local site = ("%s:%d"):format(info.source, info.linedefined)
  local memo = self.memos[site]
  if memo and memo.key == key then
    sources.use_all(memo.used)
    return memo.value
  end
  self:forget(site)
  local used, value = sources.collect(fn, keys)
  self.memos[site] = { key = key, value = value, used = used }
  return value
end

local function has_close(value)
  if type(value) ~= "table" then return false end
  return type(value.close) == "function"
end

--- Drops the memo of one function and closes its value.
function Session:forget(site)
  local memo = self.memos[site]
  self.memos[site] = nil
  if memo and has_close(memo.value) then memo.value:close() end
end

--- Adds the files that contain the experiment's functions to the set `used`.
local function add_script(spec, used)
  for _, value in pairs(spec) do
    local source = type(value) == "function" and debug.getinfo(value, "S").source
    local path = source and source:match "^@(.*)$"
    if path then used[path] = true end
  end
end

--- Runs one configuration. Returns true and its row, or false and the error.
---@param config table
---@return boolean ok, table|string row
function Session:run(config)
  local ok, row = xpcall(function()
    seeds.use(config.seed)
    self:begin_seed(config.seed)
    current = self
    local used, metrics = sources.collect(self.spec.run, copy(config), self.settings)
    current = nil
    for path in pairs(self.setup_used) do used[path] = true end
    add_script(self.spec, used)
    local checked = check_metrics(self.plan.required, metrics)
    return secrets.mask { config = config, made_by = sources.made_by(used),
      metrics = checked, each = check_each(metrics.each),
      trials = count_trials(self.plan.proportions, config, checked) }
  end, keep_stack)
  seeds.use(nil)
  if not ok then
    current = nil
    sources.stop()
    pcall(self.close, self) -- may fail for the same reason; the first error is reported
  end
  return ok, row
end

--- Ends the present seed: closes the memos and calls teardown, whose errors it raises.
function Session:close()
  local settings = self.settings
  if not settings then return end
  self.settings = nil
  for site in pairs(copy(self.memos)) do self:forget(site) end
  if self.spec.teardown then self.spec.teardown(settings) end
end

return M
