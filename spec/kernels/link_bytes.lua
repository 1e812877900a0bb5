--- What the op that `fn` launches takes over the emulated link of the CPU device: bytes
-- to the device, bytes to the host.
--
-- A link of a byte a millisecond is kept busy in one direction, for more than an hour of
-- its modelled time, which no op computes for: what goes the same way ends so many
-- milliseconds after that transfer.
local kv = require "kvlab"
local support = require "spec.support"

local BUSY = 2 ^ 22              -- bytes, so milliseconds

local function behind(dev, from, to, fn)
  local begin, finish, stream = dev:open_event(), dev:open_event(), dev:stream()
  local busy = dev:open_stream()
  begin:record(stream)
  dev:with_stream(busy, function() to:copy_(from) end)
  fn()
  finish:record(stream)
  local bytes = math.max(0, begin:elapsed_us(finish) / 1e3 - BUSY)
  busy:close() -- not before: closing waits for the transfer, and such waits count
  return math.floor(bytes + 0.5)
end

return function(dev, fn)
  local here, pinned = kv.ones(dev, "u8", { BUSY }), kv.pinned(dev, "u8", { BUSY })
  pinned:copy_(here)
  local function bytes(from, to)
    return support.with_link(1e-6, 0, behind, dev, from, to, fn)
  end
  return bytes(pinned, here), bytes(here, pinned)
end
