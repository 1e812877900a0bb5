--- Devices, streams and events.
--
-- `kv.device "cpu"` is a handle that lives as long as the program; asking again gives the
-- same one. Work goes to the device's current stream; `dev:with_stream(stream, fn)`
-- changes it for the time of a call.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local library = require "kvlab.library"
local command_line = require "kvlab.command_line"
local options = require "kvlab.options"
local protected = require "kvlab.protected"

local C, check, argument = library.C, library.check, options.argument
local M = {}

local out_device = ffi.new "kvl_device *[1]"
local out_stream = ffi.new "kvl_stream *[1]"
local out_event = ffi.new "kvl_event *[1]"
local out_us = ffi.new "double[1]"
local stats = ffi.new "kvl_device_stats"

local device_t, stream_t = ffi.typeof "kvl_device *", ffi.typeof "kvl_stream *"
local event_t = ffi.typeof "kvl_event *"

--- Whether a value is a device.
---@return boolean
function M.is_device(value)
  return type(value) == "cdata" and ffi.istype(device_t, value)
end

-- ---- closed handles -------------------------------------------------------------------

-- Handles of streams, events and graphs are pointers, whose fields Lua cannot set. So a
-- closed one is remembered here.
local closed = setmetatable({}, { __mode = "k" })

--- Raises if a handle is closed, and returns it otherwise.
---@param kind string  "stream"
local function alive(handle, kind)
  if closed[handle] then options.fail(("the %s is closed"):format(kind)) end
  return handle
end

--- Closes a handle that ffi.gc would close; a closed handle stays as it is. Ctrl-C comes
-- only before or after, so that a handle is closed exactly if it is recorded as closed.
local function close(handle, by)
  if closed[handle] then return end
  C.kvl_interrupt_hold(1)
  closed[handle] = true
  by(ffi.gc(handle, nil))
  C.kvl_interrupt_hold(-1)
end

M.alive, M.close = alive, close

--- Open streams by their address. The device's current stream is looked up here, so that
-- it is the same handle that open_stream returned, and is closed when that handle is.
local streams = setmetatable({}, { __mode = "v" })

local function address(pointer) return tonumber(ffi.cast("intptr_t", pointer)) end

local STREAM = { "a stream", function(x)
  return type(x) == "cdata" and ffi.istype(stream_t, x)
end }
local EVENT = { "an event", function(x)
  return type(x) == "cdata" and ffi.istype(event_t, x)
end }

--- Checks an argument that is a stream, and is open.
function M.stream_argument(what, stream)
  return alive(argument(what, "stream", stream, STREAM), "stream")
end
local stream_argument = M.stream_argument

local function event_argument(what, name, event)
  return alive(argument(what, name, event, EVENT), "event")
end

-- ---- devices --------------------------------------------------------------------------

local open_devices = {}

local function open(name, level)
  local dev = open_devices[name]
  if dev then return dev end
  -- The link is set before the device is opened, so that its description mentions it.
  if name == "cpu" and command_line["link-gbps"] then
    check(C.kvl_cpu_link(command_line["link-gbps"], command_line["link-us"]),
      (level or 1) + 1)
  end
  local status = C.kvl_device_open(name, out_device)
  if status < 0 and level == 0 then error(ffi.string(C.kvl_last_error()), 0) end
  check(status, (level or 1) + 1)
  dev = out_device[0]
  open_devices[name] = dev
  open_devices[dev:name()] = dev
  return dev
end

--- The open devices, in the order of their names.
---@return kvlab.Device[]
function M.opened()
  local list = {}
  for name, dev in pairs(open_devices) do
    if name == dev:name() then list[#list + 1] = dev end -- skips aliases: cuda for cuda:0
  end
  table.sort(list, function(a, b) return a:name() < b:name() end)
  return list
end

--- Returns true if "cuda" can be opened: the plug-in was built and a GPU is present. The
-- second result is the reason if not.
---@return boolean, string|nil
function M.cuda_available()
  local ok, why = pcall(open, "cuda")
  return ok, not ok and why or nil
end

--- Opens a device by name: "cpu", "cuda", "cuda:1". "auto" is cuda if there is one, and
-- else cpu. nil is the device of --device. A device is returned as it is. With
-- --link-gbps only the CPU can be opened.
---@param name? string|kvlab.Device
---@return kvlab.Device
function M.device(name)
  if M.is_device(name) then return name end
  local level = name and 2 or 0 -- no line of the script is to blame for --device
  name = name or command_line.device
  if name == "auto" then name = M.cuda_available() and "cuda" or "cpu" end
  if type(name) ~= "string" then
    options.fail(("device is %s, expected a device or its name"):format(
      options.shown(name)))
  end
  local dev = open(name, level)
  if command_line["link-gbps"] and not dev:is_cpu() then
    error("--link-gbps emulates a link on the cpu; the device is " .. dev:name(), level)
  end
  return dev
end

--- The methods of a device.
M.methods = {
  --- "cpu" or "cuda:0"
  name = function(self) return ffi.string(C.kvl_device_name(self)) end,
  description = function(self) return ffi.string(C.kvl_device_description(self)) end,
  is_cpu = function(self) return C.kvl_device_is_cpu(self) == 1 end,
  --- Waits for everything launched on this device.
  sync = function(self) check(C.kvl_device_sync(self)) end,
  --- Gives cached memory back.
  trim = function(self) check(C.kvl_device_trim(self)) end,
  --- Limits how many bytes of free memory in pieces above 32 MiB stay cached for reuse;
  -- 0: none. At first it is half of the device's memory, on the CPU a quarter.
  limit_cache = function(self, bytes)
    argument("limit_cache", "bytes", bytes, options.any_whole)
    check(C.kvl_device_limit_cache(self, bytes))
  end,
  --- Forgets the peak that stats() tells, and counts a new one from here.
  reset_peak = function(self) check(C.kvl_device_reset_peak(self)) end,
  --- Counts of bytes (see kvlab.DeviceStats), and allocations and launches so far.
  stats = function(self)
    check(C.kvl_device_stats_get(self, stats))
    local t = {}
    for _, key in ipairs { "bytes_live", "bytes_live_peak", "bytes_cached",
                           "bytes_reserved", "bytes_pinned",
                           "bytes_total", "bytes_free", "allocations", "launches" } do
      t[key] = tonumber(stats[key])
    end
    return t
  end,
  --- Opens a new stream, whose work runs beside that of other streams.
  open_stream = function(self)
    local stream = protected.open(C.kvl_stream_close, out_stream, C.kvl_stream_open, self,
      out_stream)
    streams[address(stream)] = stream
    return stream
  end,
  --- The stream that work goes to now.
  stream = function(self)
    local current = C.kvl_device_stream(self)
    return streams[address(current)] or current
  end,
  --- The stream that is current if no other was chosen.
  default_stream = function(self)
    C.kvl_interrupt_hold(1)
    local current = C.kvl_device_stream(self)
    C.kvl_device_use_stream(self, nil)
    local default = C.kvl_device_stream(self)
    C.kvl_device_use_stream(self, current)
    C.kvl_interrupt_hold(-1)
    return default
  end,
  --- Calls fn(...) with `stream` current, then restores the previous stream, even on an
  -- error. fn may not yield.
  with_stream = function(self, stream, fn, ...)
    local n, given = select("#", ...), { ... } -- first: see protected.lua
    argument("with_stream", "fn", fn, options.fn)
    local before = self:stream()
    stream = stream_argument("with_stream", stream)
    C.kvl_interrupt_hold(1)
    local status, results = C.kvl_device_use_stream(self, stream), nil
    if status >= 0 then
      results = protected.call("with_stream", fn, n, given)
      if closed[before] then before = nil end -- fn closed it: the default stream
      C.kvl_device_use_stream(self, before)
    end
    C.kvl_interrupt_hold(-1)
    check(status)
    if not results[1] then error(results[2], 0) end
    return unpack(results, 2, results.n)
  end,
  --- Opens a new event. Record it on a stream; other streams or the host can wait for it.
  open_event = function(self)
    return protected.open(C.kvl_event_close, out_event, C.kvl_event_open, self, out_event)
  end,
}

ffi.metatype("kvl_device", {
  __index = M.methods,
  __tostring = function(self) return "device " .. self:name() end,
})

ffi.metatype("kvl_stream", {
  __index = arguments.receivers({
    --- Waits for everything launched on this stream.
    sync = function(self) check(C.kvl_stream_sync(alive(self, "stream"))) end,
    --- Makes later work on this stream wait for `event`. The host does not wait.
    wait = function(self, event)
      event_argument("wait", "event", event)
      check(C.kvl_stream_wait_event(alive(self, "stream"), event))
    end,
    --- Waits for its work and closes it; once is enough. The default stream stays open.
    close = function(self)
      if streams[address(self)] == self then close(self, C.kvl_stream_close) end
    end,
  }, STREAM[1], STREAM[2]),
})

ffi.metatype("kvl_event", {
  __index = arguments.receivers({
    --- Marks the end of the work that is on `stream` now.
    record = function(self, stream)
      stream_argument("record", stream)
      check(C.kvl_event_record(alive(self, "event"), stream))
    end,
    sync = function(self) check(C.kvl_event_sync(alive(self, "event"))) end,
    done = function(self) return check(C.kvl_event_done(alive(self, "event"))) == 1 end,
    --- Microseconds from this event to a later one.
    elapsed_us = function(self, later)
      event_argument("elapsed_us", "later", later)
      check(C.kvl_event_elapsed_us(alive(self, "event"), later, out_us))
      return out_us[0]
    end,
    close = function(self) close(self, C.kvl_event_close) end,
  }, EVENT[1], EVENT[2]),
})

return M
