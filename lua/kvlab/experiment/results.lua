--- Reads and writes results.jsonl. Each line is the row of one finished configuration:
-- {"config": {...}, "metrics": {...}, "made_by": {...}}. made_by maps the names of the
-- sources that the row was computed from to their hashes, see kvlab.sources. A row may
-- also have "each", lists with the result of every text, by metric, and "trials", the
-- number of 0/1 trials that a metric is a share of.
--
-- A row is written at once and flushed, so a killed process leaves whole rows and at most
-- one torn line at the end, which the next open cuts off. The process holds the folder's
-- .lock while the results are open, so that two processes never write to one folder. Two
-- processes on a file system without locks, or files that somebody joined, can still give
-- a configuration two rows: equal rows count once, different ones are an error. A metric
-- that is not finite is stored as null and read as NaN.
local ffi = require "ffi"
local files = require "kvlab.files" -- also declares fileno and fsync
local is_finite = require("kvlab.number").is_finite
local json = require "kvlab.json"
local secrets = require "kvlab.secrets"
local sorted = require "kvlab.sorted"
local statistics = require "kvlab.experiment.statistics"

ffi.cdef [[
int ftruncate(int fd, long length);
int flock(int fd, int operation);
]]
local C = ffi.C
local LOCK_EX, LOCK_NB, EWOULDBLOCK = 2, 4, 11
local NAN = 0 / 0

local M = {}

---@class kvlab.results
---@field path string
---@field rows table[]      the rows of the file: {config =, metrics =}
---@field lines string[]    their texts, without the newline
---@field was_torn boolean  the last line was incomplete and has been cut off
---@field repeated integer  lines that were there twice, and have been dropped
local results = {}
results.__index = results

--- Returns a text that identifies a configuration: equal configurations have equal texts.
-- Passwords in them do not count.
---@param config table
---@return string
function M.key(config) return json.encode(secrets.mask(config)) end

--- Returns the number of 0/1 trials that a metric is a share of, the smallest among these
-- rows; nil if a row does not say it.
---@param rows {trials: table<string, integer>|nil}[]
---@param metric string
---@return integer|nil
function M.trials(rows, metric)
  local least = math.huge
  for _, row in ipairs(rows) do
    local count = row.trials and row.trials[metric]
    if not is_finite(count) then return nil end
    least = math.min(least, count)
  end
  return least
end

--- Summarises one metric over repeats. Returns the mean and the interval of numbers; for
-- other values, the value if all repeats agree, else nil. `kind` is "bounded" for a
-- metric between 0 and 1, whose limits then lie there, too, and "share" for a share of
-- 0/1 trials; `trials` is their number for each value, if it is known.
local function summarise_metric(values, kind, trials)
  local is_number = true
  for _, value in ipairs(values) do is_number = is_number and type(value) == "number" end
  if is_number and kind == "share" then
    return statistics.share(values, trials)
  elseif is_number then
    local mean, low, high = statistics.interval(values)
    if not is_finite(mean) then return mean end -- a repeat lacks the metric
    if low and kind then low, high = math.max(low, 0), math.min(high, 1) end
    return mean, low, high
  end
  for _, value in ipairs(values) do
    if value ~= values[1] then return nil end
  end
  return values[1]
end

--- Joins the rows that differ only in the seed, the repeats of a configuration, into one:
-- { config =, metrics =, low =, high =, repeats = n }. The results are in the order of
-- the first repeats. `config` has no seed. `metrics` holds means; `low` and `high` hold
-- the limits of their 95 % confidence intervals, nil if there is only one row. A metric
-- that is not a number has no limits, and is kept if all repeats agree. Code that reads
-- config and metrics can read these rows too. A row is stale if one of its repeats is.
---@param rows {config: table, metrics: table}[]
---@param proportions? table<integer|string, string>  the metrics that lie between 0 and
---  1, as a list; accuracy = "questions" is a share of right answers; the rows' `trials`
---  say to how many questions
---@return {config: table, metrics: table, low: table, high: table, repeats: integer}[]
function M.summarise(rows, proportions)
  local groups, group_of, kinds = {}, {}, {}
  for key, name in pairs(proportions or {}) do
    if type(key) == "number" then kinds[name] = "bounded" else kinds[key] = "share" end
  end
  for _, row in ipairs(rows) do
    local config = {}
    for key, value in pairs(row.config) do config[key] = value end
    config.seed = nil
    local key = M.key(config)
    local group = group_of[key]
    if not group then
      group = { config = config, values = {}, rows = {}, repeats = 0 }
      group_of[key], groups[#groups + 1] = group, group
    end
    group.repeats, group.stale = group.repeats + 1, group.stale or row.stale
    group.rows[group.repeats] = row
    for name, value in pairs(row.metrics) do
      local values = group.values[name] or {}
      values[#values + 1], group.values[name] = value, values
    end
  end
  local summary = {}
  for i, group in ipairs(groups) do
    local row = { config = group.config, metrics = {}, low = {}, high = {},
                  repeats = group.repeats, stale = group.stale }
    for name, values in pairs(group.values) do
      row.metrics[name], row.low[name], row.high[name] = summarise_metric(values,
        kinds[name], M.trials(group.rows, name))
    end
    summary[i] = row
  end
  return summary
end

--- Returns the row that a line holds; raises if the line is not a row.
---@param line string
---@return {config: table, metrics: table}
function M.decode(line)
  local ok, row = pcall(json.decode, line)
  if not ok then error((row:gsub("^.*json.decode: ", "")), 0) end
  if type(row) ~= "table" or type(row.config) ~= "table"
    or type(row.metrics) ~= "table" then
    error("no config and metrics", 0)
  end
  for _, name in ipairs { "made_by", "each", "trials" } do
    if row[name] ~= nil and type(row[name]) ~= "table" then
      error(name .. " is not an object", 0)
    end
  end
  for name, value in pairs(row.metrics) do
    if value == json.null then row.metrics[name] = NAN end
  end
  return row
end

--- Reads the rows of a text: { rows =, lines =, index =: the place of each row by its
-- configuration, repeated =: how many rows came again, whole =: how many bytes are whole
-- lines }.
local function parse(text, path)
  local rows, lines, index, at = {}, {}, {}, 1
  local numbers, number = {}, 0 -- of the lines, from 1
  while true do
    local stop = text:find("\n", at, true)
    if not stop then break end
    local line = text:sub(at, stop - 1)
    local ok, row = pcall(M.decode, line)
    local is_torn = stop == #text and not pcall(json.decode, line)
    if is_torn then break end
    number = number + 1
    if not ok then
      error(("%s, line %d is damaged (%s): remove the line, or start again with"
        .. " --set fresh=true"):format(path, number, row), 0)
    end
    local key = M.key(row.config)
    local other = index[key]
    if other and lines[other] ~= line then
      error(("%s, lines %d and %d are different rows of the same configuration: remove"
        .. " one of them, or start again with --set fresh=true"):format(path,
        numbers[other], number), 0)
    elseif not other then
      local n = #rows + 1
      rows[n], lines[n], numbers[n], index[key] = row, line, number, n
    end
    at = stop + 1
  end
  return { rows = rows, lines = lines, index = index, repeated = number - #rows,
           whole = at - 1 }
end

--- Returns the sorted names of the sources whose versions differ between the rows. A row
-- that does not name its sources differs from one that does.
---@param rows {made_by: table<string, string>|nil}[]
---@return string[]
function M.mixed(rows)
  local first, mixed, with, without = {}, {}, false, false
  for _, row in ipairs(rows) do
    with, without = with or row.made_by ~= nil, without or row.made_by == nil
    for name, hash in pairs(row.made_by or {}) do
      first[name] = first[name] or hash
      if first[name] ~= hash then mixed[name] = true end
    end
  end
  if with and without then mixed["sources (some rows name none)"] = true end
  return sorted.keys(mixed)
end

--- Returns the rows and lines of another folder or of a file of rows (.jsonl), without a
-- row that is being written at the time. Returns empty lists if there is no file.
---@param folder string  or the path of the file
---@return table[] rows, string[] lines, integer repeated  rows that were there twice
function M.read(folder)
  local path = folder:find "%.jsonl$" and folder or folder .. "/results.jsonl"
  local found = parse(files.read(path) or "", path)
  return found.rows, found.lines, found.repeated
end

--- Locks a folder for this process until the returned file is closed. On a file system
-- without locks the folder stays unlocked.
local function lock(folder)
  local file, problem = io.open(folder .. "/.lock", "ae") -- e: not for started programs
  if not file then error(("results cannot be written: %s"):format(problem), 0) end
  if C.flock(C.fileno(file), LOCK_EX + LOCK_NB) ~= 0 and ffi.errno() == EWOULDBLOCK then
    file:close()
    error(folder .. "/results.jsonl is being written by another process; choose another"
      .. " --out=DIR", 0)
  end
  return file
end

function results:open_file()
  local problem
  self.file, problem = io.open(self.path, "a+e")
  if not self.file then error(("results cannot be written: %s"):format(problem), 0) end
end

--- Reads the rows of the file.
function results:load()
  local text = self.file:read "*a"
  local found = parse(text, self.path)
  self.rows, self.lines, self.index = found.rows, found.lines, found.index
  self.file:seek "end"
  return found.repeated, found.whole, #text
end

--- Cuts off a torn row, and drops rows that are there twice.
function results:repair()
  local repeated, whole, length = self:load()
  self.was_torn, self.repeated = whole < length, repeated
  if self.was_torn then C.ftruncate(C.fileno(self.file), whole) end
  self.file:seek "end"
  if repeated > 0 then self:rewrite(self.lines) end
end

--- Opens a folder's results, and makes the file if there is none.
---@param folder string
---@param fresh boolean|nil  discard the rows of the file
---@return kvlab.results
function M.open(folder, fresh)
  local self = setmetatable({ path = folder .. "/results.jsonl", lock = lock(folder),
                              synced = os.time() }, results)
  local ok, problem = pcall(function()
    self:open_file()
    if fresh then C.ftruncate(C.fileno(self.file), 0) end
    self:repair()
  end)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self
end

--- Returns the row of a configuration, or nil.
function results:find(config) return self.rows[self.index[M.key(config)]] end

--- Adds a row to the file, as `line`; raises if the file has a row of its configuration.
---@param row {config: table, metrics: table}
---@param line string
function results:append_line(row, line)
  local key = M.key(row.config)
  if self.index[key] then error(self.path .. " already has a row of " .. key, 0) end
  local ok, problem = self.file:write(line, "\n")
  if ok then ok, problem = self.file:flush() end
  if not ok then error(("%s: %s"):format(self.path, problem), 0) end
  if os.time() ~= self.synced then -- at most once a second: it may take milliseconds
    C.fsync(C.fileno(self.file))
    self.synced = os.time()
  end
  local n = #self.rows + 1
  self.rows[n], self.lines[n], self.index[key] = row, line, n
end

--- Adds a row to the file. `order` is the order of the keys.
function results:append(row, order)
  self:append_line(row, json.encode(row, { order = order }))
end

--- Replaces all lines of the file in one step.
function results:rewrite(lines)
  files.write(self.path, table.concat(lines, "\n") .. (#lines > 0 and "\n" or ""))
  self.file:close()
  self:open_file()
  self:load()
end

--- Sorts the rows of `configs` into the order of `configs`; other rows stay in place.
---@param configs table[]
function results:arrange(configs)
  local wanted, places = {}, {}
  for _, config in ipairs(configs) do
    local i = self.index[M.key(config)]
    if i then wanted[#wanted + 1], places[#places + 1] = i, i end
  end
  table.sort(places)
  local lines, is_same = {}, true
  for i, line in ipairs(self.lines) do lines[i] = line end
  for k, place in ipairs(places) do
    is_same = is_same and place == wanted[k]
    lines[place] = self.lines[wanted[k]]
  end
  if not is_same then self:rewrite(lines) end
end

--- Takes over rows of another folder. They replace rows of the same configurations.
-- Returns how many are new or different.
---@param rows table[]
---@param lines string[]
---@return integer
function results:adopt(rows, lines)
  local all, index, changed = {}, {}, 0
  for i, line in ipairs(self.lines) do all[i] = line end
  for key, i in pairs(self.index) do index[key] = i end
  for k, row in ipairs(rows) do
    local key = M.key(row.config)
    local i = index[key] or #all + 1
    if all[i] ~= lines[k] then changed = changed + 1 end
    all[i], index[key] = lines[k], i
  end
  if changed > 0 then self:rewrite(all) end
  return changed
end

--- Drops the rows of some configurations.
---@param configs table[]
function results:drop(configs)
  local dropped, lines = {}, {}
  for _, config in ipairs(configs) do
    local i = self.index[M.key(config)]
    if i then dropped[i] = true end
  end
  if next(dropped) == nil then return end
  for i, line in ipairs(self.lines) do
    if not dropped[i] then lines[#lines + 1] = line end
  end
  self:rewrite(lines)
end

--- Writes everything to the disk, closes the file and unlocks the folder.
function results:close()
  if self.file then
    self.file:flush()
    C.fsync(C.fileno(self.file))
    self.file:close()
  end
  if self.lock then self.lock:close() end
  self.file, self.lock = nil, nil
end

return M
