--- Ctrl-C in any instruction of what changes the current stream or scope for the time of
-- a call leaves the stream and the scope from before.
local kv = require "kvlab"

local C = kv.C
local dev = kv.device "cpu"

--- Calls fn() with an interrupt at its nth instruction, or the first after it at which
-- the executable's hook would raise. Returns whether it came.
local function interrupted(n, fn)
  local count, is_over = 0, false
  local function hook()
    count = count + 1
    if is_over or count < n or C.kvl_interrupt_hold(0) > 0 then return end
    debug.sethook()
    error("interrupted", 0)
  end
  jit.off()
  local ok, why = pcall(function()
    debug.sethook(hook, "", 1)
    fn()
    is_over = true
  end)
  debug.sethook()
  jit.on()
  assert(ok or why == "interrupted", why)
  return not ok
end

--- fn(n) for n from 1 until no interrupt comes inside any more.
local function at_every_instruction(fn)
  local n = 0
  repeat n = n + 1 until not fn(n)
  assert.is_true(n > 20, n)
  assert.equal(0, C.kvl_interrupt_hold(0))
end

describe("Ctrl-C", function()
  it("leaves the stream from before with_stream", function()
    local side, main = dev:open_stream(), dev:stream()
    at_every_instruction(function(n)
      local came = interrupted(n, function()
        dev:with_stream(side, function(x) return x end, 7)
      end)
      assert.equal(main, dev:stream())
      return came
    end)
    side:close()
  end)

  it("leaves the default stream as it is when somebody asks for it", function()
    local side = dev:open_stream()
    dev:with_stream(side, function()
      at_every_instruction(function(n)
        local came = interrupted(n, function() dev:default_stream() end)
        assert.equal(side, dev:stream())
        return came
      end)
    end)
    side:close()
  end)

  for _, name in ipairs { "scope", "lasting" } do
    it("leaves the scope from before kv." .. name, function()
      at_every_instruction(function(n)
        local came, t
        kv.scope(function()
          came = interrupted(n, function() kv[name](function() return 1 end) end)
          t = kv.zeros(dev, "f32", { 1 })
        end)
        assert.has_error(function() t:list() end) -- the scope has freed it
        return came
      end)
    end)
  end

  it("leaves no graph that is being recorded", function()
    at_every_instruction(function(n)
      local came = interrupted(n, function() kv.graph(function() end, dev):close() end)
      assert.equal(0, C.kvl_device_is_recording(dev))
      return came
    end)
  end)
end)
