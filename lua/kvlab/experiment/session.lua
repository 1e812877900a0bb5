--- Runs configurations of an experiment one at a time: its setup, run and teardown.
--
-- Every seed has a session of its own: setup and teardown run once for each, and what a
-- script keeps in `settings` for the next configuration never outlives its seed.
local M = {}

local NAN = 0 / 0

local function fail(fmt, ...) error(fmt:format(...), 0) end

--- The metrics as results.jsonl holds them: numbers, strings, booleans; NaN for what is
-- not finite.
local function check_metrics(required, metrics)
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

local function copy(map)
  local other = {}
  for key, value in pairs(map) do other[key] = value end
  return other
end

--- Keeps the stack of an error when KVLAB_TRACEBACK asks for it.
local function keep_stack(problem)
  if os.getenv "KVLAB_TRACEBACK" and type(problem) == "string" then
    return debug.traceback(problem, 2)
  end
  return problem
end

---@class kvlab.session
---@field spec table
---@field plan kvlab.plan
---@field settings table|nil  of the present seed
local Session = {}
Session.__index = Session

---@param spec table       see kvlab.experiment
---@param plan kvlab.plan
---@return kvlab.session
function M.new(spec, plan) return setmetatable({ spec = spec, plan = plan }, Session) end

function Session:begin_seed(seed)
  if self.settings and self.settings.seed == seed then return end
  self:close()
  local settings = copy(self.plan.settings)
  settings.seed, settings.configs = seed, {}
  for _, config in ipairs(self.plan.configs) do
    if config.seed == seed then settings.configs[#settings.configs + 1] = config end
  end
  self.settings = settings
  if self.spec.setup then self.spec.setup(settings) end
end

--- Runs one configuration: true and its row, or false and what went wrong.
---@param config table
---@return boolean ok, table|string row
function Session:run(config)
  return xpcall(function()
    self:begin_seed(config.seed)
    local metrics = self.spec.run(copy(config), self.settings) -- the row keeps its own
    return { config = config, metrics = check_metrics(self.plan.required, metrics) }
  end, keep_stack)
end

--- Ends the present seed. Raises what teardown raises.
function Session:close()
  local settings = self.settings
  self.settings = nil
  if settings and self.spec.teardown then self.spec.teardown(settings) end
end

return M
