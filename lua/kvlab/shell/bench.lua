--- `kvlab bench [ID, file or limit …]` runs the cases of bench/*.lua and prints one line
-- for each. The line says how the case compares with its target, and with a limit of the
-- machine that is measured in the same run.
--
-- A bench file returns a function of `b` that calls b:case { id, name, … } for each of
-- its cases; see Bench:case, and Bench:walk for walks, which look for cliffs. A case is
-- checked before it is timed. Its inputs are random and its outputs are poisoned. Times
-- are medians of at least 30 repeats, measured by events on the device.
--
-- Two things are kept out of a time. The first is the host's work. Before each repeat, a
-- read of 512 MiB empties the L2 (170 us on an H100), and what the host does during that
-- read does not count. If the host takes longer, the row says so. The second is what ran
-- before. The driver clears freed memory in the background, at some 300 GB/s (on an H100,
-- decoding 1 x 32K takes 64 us for 28 ms after 8 GiB were freed, and 56 us later), and
-- clocks rise after a pause. So the work first runs untimed for SETTLE_US.
local json = require "kvlab.json"
local kv = require "kvlab"
local library = require "kvlab.library"
local hint = require("kvlab.words").hint
local median = require("kvlab.experiment.statistics").median
local real = require("kvlab.files").real
local sorted = require "kvlab.sorted"

package.path = library.paths.root .. "/?.lua;" .. package.path -- require "bench.lib.host"
local host = require "bench.lib.host"
local limits = require "bench.lib.limits"
local plain = require "bench.lib.plain"
local walk = require "bench.lib.walk"

local M = {}

local REPEATS, SETTLE_US, MIB = 31, 100e3, 1024 * 1024

---@class kvlab.Bench
---@field device kvlab.Device
---@field kind string         cpu or cuda
---@field shrink integer      contexts are divided by it; 1 on a GPU, see Bench:shrunk
local Bench = {}
Bench.__index = Bench

-- ---- time -----------------------------------------------------------------------------

--- Reads more memory than any cache of the device holds. (Writing would leave dirty lines
-- in the cache, and writing them back would count in the time of the next call.)
function Bench:flush() self.flush_buffer:sum(0, self.flush_sum) end

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

--- Calls fn untimed until settle_us have passed.
function Bench:settle(fn)
  local start = clock_us()
  repeat
    fn()
    self.device:sync()
  until clock_us() - start >= self.settle_us
end

--- Calls fn `repeats` times, without a warm-up. Returns the median of the microseconds
-- that a call takes on the device, and the median of those that it takes on the host.
-- warm: do not flush the caches before each call.
function Bench:sample(fn, repeats, warm)
  local times, hosts = {}, {}
  local from, to = self.device:open_event(), self.device:open_event()
  local stream = self.device:stream()
  for i = 1, repeats do
    local start = clock_us()
    if not warm then self:flush() end
    from:record(stream)
    fn()
    to:record(stream)
    hosts[i] = clock_us() - start
    times[i] = from:elapsed_us(to)
  end
  from:close()
  to:close()
  return median(times), median(hosts)
end

--- Like sample, but with at least 30 calls. First runs fn untimed until clocks and memory
-- have settled.
function Bench:time(fn, repeats, warm)
  self:settle(warm and fn or function()
    self:flush()
    fn()
  end)
  return self:sample(fn, math.max(repeats or REPEATS, 30), warm)
end

--- The size that is used for a context or batch of n: smaller on the CPU and with
-- --quick.
function Bench:shrunk(n) return math.max(1, math.floor(n / self.shrink)) end

--- Returns the limit `name` (R, T, F or L) in GB/s or TFLOP/s. It is measured and printed
-- at its first use, R once for each number of bytes.
---@param bytes? integer    of R; see limits.lua
---@param written? integer
---@param again? boolean    measure it once more; the faster one counts
function Bench:limit(name, bytes, written, again)
  local key = bytes and ("%s %.0f %.0f"):format(name, bytes, written or 0) or name
  local known = self.limits[key]
  if not known or again then
    local row = kv.scope(limits[name], self, bytes, written)
    row.id = name
    local rate = row.bytes and row.bytes / row.us * 1e-3 or row.flops / row.us * 1e-6
    self.limits[key] = math.max(rate, known or 0)
    self:print_row(row)
  end
  return self.limits[key]
end

-- ---- rows -----------------------------------------------------------------------------

local ORDER = {
  "id", "name", "us", "bytes", "flops", "gb_s", "tflop_s", "limit", "limit_rate",
  "of_limit", "target_us", "target_tflop_s", "target_of_limit", "reached", "points",
  "cliffs", "ratio", "at", "trend_us", "beside", "note", "defect", "error", "device",
  "commit", "date", "all",
}

local function format_row(row)
  local words = { ("%-8s %-58s"):format(row.id, row.name) }
  local function add(format, ...) words[#words + 1] = format:format(...) end
  if row.us then add("%10.1f us", row.us) end
  if row.gb_s then add("%7.1f GB/s", row.gb_s) end
  if row.tflop_s then
    add(row.tflop_s < 10 and "%7.3f TFLOP/s" or "%7.1f TFLOP/s", row.tflop_s)
  end
  if row.of_limit then add("%5.3f of %s", row.of_limit, row.limit) end
  local verdict = row.defect and "not judged" or row.reached and "reached" or "MISSED"
  if row.target_us then add("target %g us %s", row.target_us, verdict) end
  if row.target_tflop_s then add("target %g TFLOP/s %s", row.target_tflop_s, verdict) end
  if row.target_of_limit then add("target %.3f %s", row.target_of_limit, verdict) end
  if row.points then
    add("%3d points, %2d above %g, the highest %.2f at %s", row.points, row.cliffs,
      walk.STANDS_OUT, row.ratio, row.at)
  end
  if row.beside then
    add("%.2f x the %.1f us that %s allows", row.ratio, row.trend_us, row.beside)
  end
  if row.note then add("%s", row.note) end
  if row.defect then add("DEFECT OF THE BENCH: %s", row.defect) end
  if row.error then add("FAILED: %s", row.error) end
  return table.concat(words, "  ")
end

function Bench:print_row(row)
  if row.us and row.bytes then row.gb_s = row.bytes / row.us * 1e-3 end
  if row.us and row.flops then row.tflop_s = row.flops / row.us * 1e-6 end
  row.device, row.commit, row.date = self.description, self.commit, self.date
  self.write((self.json and json.encode(row, { order = ORDER }) or format_row(row))
    .. "\n")
end

--- Registers a case:
--   id, name
--   setup    function(b) that makes the inputs and returns the work:
--     check    function that raises when the result is wrong
--     run      function that does the work once; or us, the time, if setup measured it
--     bytes    that the work reads and writes, each of them once; may be missing
--     written  how many of these bytes it writes; default: few
--     flops    of the work; may be missing
--     limit    R (a plain read of as many bytes; with `written`, a plain read and write),
--              L (the link; the CPU has none, and its rows no limit), T (bf16 GEMM) or F
--              (fp8 GEMM) of this run, or none; default: R if bytes are given, else T
--     bound    the least possible time in microseconds, in place of a limit
--     repeats, warm  see Bench:time
--     note     text at the end of the row
--   target   { of_limit = }, { us = } or { tflop_s = }; not judged with --quick
--   on       cpu or cuda: the case and its target are for that device only; default: the
--            case is for both, its target for cuda
function Bench:case(case)
  case.on_both, case.on = not case.on, case.on or "cuda"
  self.cases[#self.cases + 1] = case
end

--- Registers a walk, which looks for cliffs (bench/lib/walk.lua). It runs only when its
-- id or its file is named:
--   id, name
--   axes     a list of axes { name, value, … }; values are numbers or texts. apart:
--            points that differ on this axis are not compared
--   skip     function(at): true if there is no such point; at has a value for each axis;
--            may be missing
--   make     function(b, at) that makes the inputs of a point and returns the work, as
--            the setup of a case does: check, run, and bytes or flops or both
function Bench:walk(one)
  one.on_both, one.is_walk = true, true
  self.cases[#self.cases + 1] = one
end

local function set_target(self, row, target)
  if not target or self.quick then return end
  row.target_us, row.target_of_limit = target.us, target.of_limit
  row.target_tflop_s = target.tflop_s
  row.reached = row.us <= (target.us or math.huge)
    and (row.of_limit or math.huge) >= (target.of_limit or 0)
    and (row.flops or 0) / row.us * 1e-6 >= (target.tflop_s or 0)
end

--- The share of its limit that a row reaches. A share above 1 is an error: either the
-- limit was measured too low, which a second measurement may correct, or the case counts
-- bytes or flops that it does not need.
local function set_share(self, row, work)
  row.limit = work.limit or (work.bytes and "R" or "T")
  local is_rate = row.limit == "R" or row.limit == "L"
  local reached = is_rate and work.bytes / row.us * 1e-3 or work.flops / row.us * 1e-6
  local bytes = row.limit == "R" and work.bytes or nil
  row.limit_rate = self:limit(row.limit, bytes, work.written)
  if reached > row.limit_rate and not self.quick then
    row.limit_rate = self:limit(row.limit, bytes, work.written, true)
  end
  row.of_limit = reached / row.limit_rate
end

local function row_of(self, case)
  local work, note = case.setup(self), nil
  if work.check then work.check() end
  local us = work.us
  if not us then
    local host_us
    us, host_us = self:time(work.run, work.repeats, work.warm)
    if self.kind == "cuda" and not work.warm and host_us > self.flush_us then
      note = ("includes some of the %.0f us that the host took"):format(host_us)
    end
  end
  local row = { id = case.id, name = case.name, us = us, bytes = work.bytes,
                flops = work.flops, note = work.note or note }
  if work.bound then
    row.limit, row.of_limit = "bound", work.bound / us
  elseif (work.bytes or work.flops) and work.limit ~= "none"
    and not (work.limit == "L" and self.kind == "cpu") then
    set_share(self, row, work)
  end
  if not self.quick and (row.of_limit or 0) > 1 then
    row.defect = ("%.3f of %s cannot be; the limit or what the case counts is wrong")
      :format(row.of_limit, row.limit)
  else
    set_target(self, row, case.on == self.kind and case.target)
  end
  return row
end

--- Calls fn(...) and frees what it made. Returns its result, or nil and why it failed.
function Bench:attempt(fn, ...)
  local ok, result = pcall(kv.scope, fn, ...)
  collectgarbage()
  if ok then return result end
  if kv.C.kvl_interrupted() ~= 0 then error(result, 0) end
  return nil, tostring(result):match "[^\n]*"
end

--- Runs a case and prints its row, also if it fails. Returns whether it passed its check
-- and stayed below its limit.
function Bench:run(case)
  if case.is_walk then
    local ok = walk.run(self, case)
    self.device:trim()
    return ok
  end
  local row, why = self:attempt(row_of, self, case)
  self.device:trim()
  row = row or { id = case.id, name = case.name, error = why }
  self:print_row(row)
  return not row.error and not row.defect
end

-- ---- the command ----------------------------------------------------------------------

--- The path of bench/WORD.lua; nil if there is no such file.
local function own_file(word)
  local path = ("%s/bench/%s.lua"):format(library.paths.root, word)
  local file = word:match "^[%w_]+$" and io.open(path)
  if not file then return nil end
  file:close()
  return path
end

--- What the command line asks for: paths of files, and a set of ids (nil: all ids). A
-- file of bench/ may be named without its folder and ending.
local function parse(args)
  local files, ids = {}, nil
  for _, word in ipairs(args) do
    local own = own_file(word)
    if own or word:match "%.lua$" then
      files[#files + 1] = own or word
    else
      ids = ids or {}
      ids[word] = true
    end
  end
  if #files == 0 then files = host.lines(('ls "%s"/bench/*.lua'):format(
    library.paths.root)) end
  return files, ids
end

--- Raises where a setting is none that kvlab's own bench files read. Other files may
-- read settings of any name.
local function check_settings(given, files)
  local ours = real(library.paths.root .. "/bench")
  for _, path in ipairs(files) do
    if real(path:match "^(.*)/" or ".") ~= ours then return end
  end
  for _, name in ipairs(sorted.keys(given)) do
    if name ~= "lmdb" and name ~= "redis" then
      error(("bench: no setting %s, expected lmdb=FILE or redis=URL"):format(name),
        0)
    end
  end
end

--- Raises unless every id that was asked for exists and is for this device.
local function check_ids(self, ids)
  local known, here = { R = true, T = true, F = true, L = true }, {}
  for _, case in ipairs(self.cases) do
    known[case.id] = true
    if case.on_both or case.on == self.kind then here[case.id] = true end
  end
  for id in pairs(ids) do
    if not known[id] then
      local names, words = sorted.keys(known), sorted.keys(known)
      for _, file in ipairs(host.lines(('ls "%s/bench"'):format(library.paths.root))) do
        words[#words + 1] = file:match "^([%w_]+)%.lua$"
      end
      error(("no bench \"%s\"%s; there are %s, and files of bench/"):format(id,
        hint(id, words, " (did you mean %s?)"), table.concat(names, ", ")), 0)
    elseif not here[id] and not limits[id] then
      error(("bench %s is not for the %s; --device=NAME selects another device")
        :format(id, self.kind), 0)
    end
  end
end

local function list(self)
  for _, case in ipairs(self.cases) do
    if self.json then
      self.write(json.encode({ id = case.id, name = case.name }, { order = ORDER })
        .. "\n")
    else
      self.write(("%-8s %s\n"):format(case.id, case.name))
    end
  end
end

local function open(options, write)
  local dev = kv.device(options.device)
  local b = setmetatable({
    device = dev, kind = dev:is_cpu() and "cpu" or "cuda", json = options.json,
    quick = options.quick, cases = {}, limits = {}, description = dev:description(),
    commit = host.commit(library.paths.root), date = os.date "!%Y-%m-%d",
    write = write or function(text)
      io.write(text)
      io.flush()
    end,
  }, Bench)
  b.shrink = (b.kind == "cpu" and 16 or 1) * (b.quick and 16 or 1)
  b.settle_us = (b.kind == "cpu" or b.quick) and 0 or SETTLE_US
  return b
end

local function begin(self)
  local bytes = (self.quick and 16 or 512) * MIB
  self.flush_buffer = kv.rand(self.device, "f32", { bytes / 4 })
  self.flush_sum = kv.tensor(self.device, "f32", {})
  self.flush_us = self:time(function() self:flush() end, 30, true)
  local head = host.describe(self)
  if self.json then
    self.write(json.encode(head, { order = { "id", "device", "description" } }) .. "\n")
  else
    self.write(host.words(head))
  end
end

--- Runs what the command line names (ids such as P1, limits, files), or everything but
-- walks if it names nothing. Returns the exit status: 1 if a case failed, else 0.
---@param options kvlab.CommandLine
---@param write? fun(text: string)     in place of standard output
---@param complain? fun(text: string)  in place of standard error
function M.main(options, write, complain)
  local b = open(options, write)
  local files, ids = parse(options.args)
  check_settings(options.set, files)
  for _, path in ipairs(files) do
    local chunk, why = loadfile(path)
    if not chunk then error(why, 0) end
    chunk()(b)
  end
  if ids then check_ids(b, ids) end
  if options.list then
    list(b)
    return 0
  end
  begin(b)
  if ids and ids.R then
    for _, bytes in ipairs(plain.ladder(b)) do b:limit("R", bytes) end
  end
  for _, name in ipairs { "T", "F", "L" } do
    if ids and ids[name] then b:limit(name) end
  end
  local failed, is_all = {}, #options.args == 0
  for _, case in ipairs(b.cases) do
    local is_wanted = ids and ids[case.id] or not ids and not (case.is_walk and is_all)
    if is_wanted and (case.on_both or case.on == b.kind) and not b:run(case) then
      failed[#failed + 1] = case.id
    end
  end
  if #failed == 0 then return 0 end
  complain = complain or function(text) io.stderr:write(text) end
  complain(("kvlab: bench: %d failed: %s\n"):format(#failed, table.concat(failed, ", ")))
  return 1
end

return M
