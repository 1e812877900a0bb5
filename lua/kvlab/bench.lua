--- `kvlab bench [ID or file …]`: runs the cases of bench/*.lua and prints a line each,
-- with its share of a limit that is measured in the same run.
--
-- A bench file returns a function of `b` that calls b.case { id, name, … } for each of
-- its cases; see bench/attention.lua. A case is checked before it is timed, its inputs
-- are random, and the cache is flushed between repeats. Times are medians of at least 30.
local json = require "kvlab.json"
local kv = require "kvlab"
local library = require "kvlab.library"
local nearest = require "kvlab.nearest"

local M = {}

local REPEATS, GIB = 30, 1024 * 1024 * 1024
local BYTES_FLUSH = GIB / 2

---@class kvlab.Bench
local Bench = {}
Bench.__index = Bench

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

--- Read more memory than any cache of the device holds. (Writing would leave dirty lines,
-- whose way back to memory is then charged to what is timed.)
local function flush(self) self.flush_buffer:sum(0, self.flush_sum) end

--- Microseconds of one call of fn on the device, median of `repeats` after a warm-up.
-- warm: leave the caches as they are.
function Bench:time(fn, repeats, warm)
  local times = {}
  local from, to = self.device:open_event(), self.device:open_event()
  local stream = self.device:stream()
  fn()
  for i = 1, repeats or REPEATS do
    if not warm then flush(self) end
    from:record(stream)
    fn()
    to:record(stream)
    times[i] = from:elapsed_us(to)
  end
  from:close()
  to:close()
  return median(times)
end

--- GB/s of a read-only reduction over 2 GiB: the R of every bandwidth limit.
local function read_bandwidth(self)
  if not self.R then
    local bytes = 2 * GIB
    self.R = kv.scope(function()
      local x = kv.rand(self.device, "f32", { bytes / 4 })
      local out = kv.tensor(self.device, "f32", {})
      local us = self:time(function() x:sum(0, out) end, REPEATS, true)
      return bytes / us * 1e-3
    end)
    self:print_row { id = "R", name = "read-only reduction, 2 GiB", bytes = bytes,
                     us = bytes / self.R * 1e-3, gb_s = self.R }
  end
  return self.R
end

--- GB/s of one copy of 256 MiB from pinned host memory: the L of every link limit.
function Bench:link_bandwidth()
  if not self.L then
    local bytes = GIB / 4
    self.L = kv.scope(function()
      local far = kv.pinned(self.device, "u8", { bytes }):fill_(1)
      local near = kv.tensor(self.device, "u8", { bytes })
      return bytes / self:time(function() near:copy_(far) end, REPEATS, true) * 1e-3
    end)
    self:print_row { id = "L", name = "one copy of 256 MiB to the device", bytes = bytes,
                     us = bytes / self.L * 1e-3, gb_s = self.L }
  end
  return self.L
end

local LIMITS = { R = read_bandwidth, L = Bench.link_bandwidth }

local function format_row(row)
  local words = { ("%-5s %-52s %10.1f us"):format(row.id, row.name, row.us) }
  if row.gb_s then words[#words + 1] = ("%8.1f GB/s"):format(row.gb_s) end
  if row.of_limit then
    words[#words + 1] = ("%5.2f of %s"):format(row.of_limit, row.limit)
  end
  if row.note then words[#words + 1] = row.note end
  return table.concat(words, "  ")
end

local ORDER = { "id", "name", "us", "bytes", "gb_s", "limit", "of_limit", "note",
                "device" }

function Bench:print_row(row)
  row.device = self.device:description()
  print(self.json and json.encode(row, { order = ORDER }) or format_row(row))
  io.flush()
end

--- One case: id, name; run() does the work once; bytes it has to read and write, and
-- their limit R (memory, unless it says) or L (the link); or bound: microseconds that it
-- cannot beat; check() raises when the result is wrong; repeats; warm; note. Or us,
-- measured by the file itself.
function Bench:case(case)
  if self.wanted and not self.wanted[case.id] then return end
  kv.scope(function()
    local work = case.setup and case.setup(self) or case
    if work.check then work.check() end
    local us = work.us or self:time(work.run, case.repeats, case.warm)
    local row = { id = case.id, name = case.name, us = us, bytes = work.bytes,
                  note = work.note }
    if work.bytes then row.gb_s = work.bytes / us * 1e-3 end
    if work.bound then
      row.limit, row.of_limit = "bound", work.bound / us
    elseif work.bytes then
      row.limit = work.limit or "R"
      row.of_limit = row.gb_s / LIMITS[row.limit](self)
    end
    self:print_row(row)
  end)
end

local function bench_files()
  local files, dir = {}, library.paths.root .. "/bench"
  local list = io.popen(('ls "%s"/*.lua 2>/dev/null'):format(dir))
  for path in list:lines() do files[#files + 1] = path end
  list:close()
  return files
end

--- Run what the command line names: ids such as P1, or files; everything when it names
-- nothing. Returns the exit status.
---@param options kvlab.options
function M.main(options)
  local b = setmetatable({ device = kv.device(), json = options.json }, Bench)
  b.flush_buffer = kv.rand(b.device, "f32", { BYTES_FLUSH / 4 })
  b.flush_sum = kv.tensor(b.device, "f32", {})
  local files, known = {}, {}
  for _, word in ipairs(options.args) do
    if word:match "%.lua$" then files[#files + 1] = word
    else
      b.wanted = b.wanted or {}
      b.wanted[word] = true
    end
  end
  if #files == 0 then files = bench_files() end
  if not b.json then
    print(("device %s: %s"):format(b.device:name(), b.device:description()))
  end
  local case = Bench.case
  b.case = function(self, c)
    known[c.id] = true
    return case(self, c)
  end
  for _, path in ipairs(files) do assert(loadfile(path))()(b) end
  for id in pairs(b.wanted or {}) do
    if not known[id] then
      error(("no bench \"%s\"; there are %s"):format(id,
        table.concat(nearest.keys(known), ", ")), 0)
    end
  end
  return 0
end

return M
