--- results.jsonl: one finished configuration a line, each exactly
-- {"config": {...}, "metrics": {...}}.
--
-- A row is one write, flushed at once, so a kill leaves whole rows and at most one torn
-- line at the end, which the next open cuts off. The file is locked while it is open: two
-- processes do not write to one folder. A metric that is not finite is stored as null and
-- reads as NaN.
local ffi = require "ffi"
local json = require "kvlab.json"
local statistics = require "kvlab.statistics"

ffi.cdef [[
int fileno(void *stream);
int fsync(int fd);
int ftruncate(int fd, long length);
int flock(int fd, int operation);
int mkdir(const char *path, unsigned mode);
]]
local C = ffi.C
local LOCK_EX, LOCK_NB = 2, 4
local NAN = 0 / 0

local M = {}

---@class kvlab.results
---@field path string
---@field rows table[]      what the file holds: {config =, metrics =}
---@field was_torn boolean  the last line was cut off
local results = {}
results.__index = results

--- A configuration's identity: equal configurations have equal texts.
---@param config table
---@return string
function M.key(config) return json.encode(config) end

--- One metric of repeats: mean and interval of numbers; of others what they agree on.
local function summarise_metric(values)
  local is_number = true
  for _, value in ipairs(values) do is_number = is_number and type(value) == "number" end
  if is_number then return statistics.interval(values) end
  for _, value in ipairs(values) do
    if value ~= values[1] then return nil end
  end
  return values[1]
end

--- The rows of every configuration that was repeated (that differ in the seed alone) as
-- one, in the order of the first: { config =, metrics =, low =, high =, repeats = n }.
-- `config` has no seed, `metrics` holds means, `low` and `high` the limits of their 95 %
-- confidence intervals (nil of one row, and of what is no number). What is no number stays
-- where all repeats agree. So whatever reads config and metrics reads these rows, too.
---@param rows {config: table, metrics: table}[]
---@return {config: table, metrics: table, low: table, high: table, repeats: integer}[]
function M.summarise(rows)
  local groups, group_of = {}, {}
  for _, row in ipairs(rows) do
    local config = {}
    for key, value in pairs(row.config) do config[key] = value end
    config.seed = nil
    local key = M.key(config)
    local group = group_of[key]
    if not group then
      group = { config = config, values = {}, repeats = 0 }
      group_of[key], groups[#groups + 1] = group, group
    end
    group.repeats = group.repeats + 1
    for name, value in pairs(row.metrics) do
      local values = group.values[name] or {}
      values[#values + 1], group.values[name] = value, values
    end
  end
  local summary = {}
  for i, group in ipairs(groups) do
    local row = { config = group.config, metrics = {}, low = {}, high = {},
                  repeats = group.repeats }
    for name, values in pairs(group.values) do
      row.metrics[name], row.low[name], row.high[name] = summarise_metric(values)
    end
    summary[i] = row
  end
  return summary
end

--- Makes a folder and those above it; there is no harm in one that exists.
---@param folder string
function M.make_folder(folder)
  for at in (folder .. "/"):gmatch "()/" do
    local part = folder:sub(1, at - 1)
    if part ~= "" then C.mkdir(part, tonumber("777", 8)) end
  end
end

---@param path string
---@return string|nil  # nil when it cannot be read
function M.read_file(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- Writes a file in one step: readers see the old text or the new one.
---@param path string
---@param text string
function M.write_file(path, text)
  local file, problem = io.open(path .. ".part", "wb")
  if not file then error(problem, 0) end
  local ok
  ok, problem = file:write(text)
  file:close()
  if ok then ok, problem = os.rename(path .. ".part", path) end
  if not ok then error(problem, 0) end
end

local function is_row(row)
  return type(row) == "table" and type(row.config) == "table"
    and type(row.metrics) == "table"
end

--- The rows of a text and how many of its bytes are whole lines.
local function parse(text, path)
  local rows, at, number = {}, 1, 0
  while true do
    local stop = text:find("\n", at, true)
    if not stop then break end
    number = number + 1
    local ok, row = pcall(json.decode, text:sub(at, stop - 1))
    local is_last = stop == #text
    if not ok and is_last then break end
    if not ok or not is_row(row) then
      error(("%s, line %d is damaged (%s): remove the line, or start again with"
        .. " --set fresh=true"):format(path, number, ok and "no config and metrics"
        or row:gsub("^.*json.decode: ", "")), 0)
    end
    for name, value in pairs(row.metrics) do
      if value == json.null then row.metrics[name] = NAN end
    end
    rows[#rows + 1] = row
    at = stop + 1
  end
  return rows, at - 1
end

--- Opens a folder's results, making the file when it is not there.
---@param folder string
---@param fresh boolean  forget what is there
---@return kvlab.results
function M.open(folder, fresh)
  local path = folder .. "/results.jsonl"
  local file, problem = io.open(path, "a+e") -- e: programs that are started do not get it
  if not file then error(("results cannot be written: %s"):format(problem), 0) end
  local fd = C.fileno(file)
  if C.flock(fd, LOCK_EX + LOCK_NB) ~= 0 then
    file:close()
    error(path .. " is being written by another process; choose another --out=DIR", 0)
  end
  if fresh then C.ftruncate(fd, 0) end
  file:seek "set"
  local text = file:read "*a"
  local ok, rows, whole = pcall(parse, text, path)
  if not ok then
    file:close()
    error(rows, 0)
  end
  if whole < #text then C.ftruncate(fd, whole) end
  file:seek "end"
  local index = {}
  for _, row in ipairs(rows) do index[M.key(row.config)] = row end
  return setmetatable({ path = path, rows = rows, was_torn = whole < #text, file = file,
                        index = index, synced = os.time() }, results)
end

--- The row of a configuration, or nil.
function results:find(config) return self.index[M.key(config)] end

--- Adds a row to the file. `order` is the order of the keys.
---@param row {config: table, metrics: table}
---@param order string[]
function results:append(row, order)
  local text = json.encode(row, { order = order }) .. "\n"
  local ok, problem = self.file:write(text)
  if ok then ok, problem = self.file:flush() end
  if not ok then error(("%s: %s"):format(self.path, problem), 0) end
  if os.time() ~= self.synced then -- at most once a second: it may take milliseconds
    C.fsync(C.fileno(self.file))
    self.synced = os.time()
  end
  self.rows[#self.rows + 1] = row
  self.index[M.key(row.config)] = row
end

function results:close()
  if not self.file then return end
  self.file:flush()
  C.fsync(C.fileno(self.file))
  self.file:close()
  self.file = nil
end

return M
