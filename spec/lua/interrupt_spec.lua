--- Ctrl-C in any instruction of what changes the current stream or scope for the time of
-- a call leaves the stream and the scope from before, and no transaction open.
local kv = require "kvlab"

local C = kv.C
local dev = kv.device "cpu"

--- Calls fn() with an interrupt at its nth instruction, or the first after it at which
-- the executable's hook would raise. `own`: the error of fn, if it raises; if an
-- interrupt comes while that error is raised, Lua makes it an error in error handling.
-- Returns whether fn raised, and what.
local function interrupted(n, fn, own)
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
    local done, problem = pcall(fn)
    is_over = true
    if not done then error(problem, 0) end
  end)
  debug.sethook()
  jit.on()
  assert(ok or why == "interrupted" or own and (why == own
    or why == "error in error handling"), why)
  return not ok, why
end

--- Calls fn(n) for n from 1 on, until the interrupt comes after what fn does.
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

  it("leaves the scope from before one that fails in a coroutine", function()
    local function fail() error("the function fails", 0) end
    at_every_instruction(function(n)
      local came, why, t
      kv.scope(function()
        came, why = interrupted(n, function()
          local _, problem = coroutine.resume(coroutine.create(kv.scope), fail)
          error(problem, 0)
        end, "the function fails")
        t = kv.zeros(dev, "f32", { 1 })
      end)
      assert.has_error(function() t:list() end)
      assert.equal(0, C.kvl_interrupt_hold(0))
      return came and why ~= "the function fails"
    end)
  end)

  for _, raises in ipairs { false, true } do
    local what = raises and "that fails" or "that succeeds"
    it("leaves no transaction open, and nothing half done, of one " .. what, function()
      local cache = kv.cache { device = dev, layers = 1, kv_heads = 1, head_dim = 4,
        block_size = 4, blocks = 4 }
      at_every_instruction(function(n)
        local is_changed, is_undone, forgotten = false, false, 0
        local entry = { forget = function() forgotten = forgotten + 1 end,
                        undo = function() is_changed, is_undone = false, true end }
        local came, why = interrupted(n, function()
          cache:transaction(function()
            cache.journal:note(entry)
            is_changed = true
            if raises then error("the change fails", 0) end
          end)
        end, "the change fails")
        came = came and why ~= "the change fails"
        assert.is_false(cache.journal.is_open)
        assert.equal(0, cache.journal.depth)
        assert.equal(0, cache.journal.count)
        assert.equal(forgotten == 1 and not is_undone, is_changed)
        assert.equal((is_changed or is_undone) and 1 or 0, forgotten)
        return came
      end)
      cache:close()
    end)
  end

  it("leaves a sequence open or closed", function()
    local cache = kv.cache { device = dev, layers = 1, kv_heads = 1, head_dim = 4,
      block_size = 4, blocks = 4 }
    at_every_instruction(function(n)
      local seq = cache:sequence()
      seq:extend(5)
      local came = interrupted(n, function() seq:close() end)
      assert.equal(seq.handle and 2 or 4, cache:blocks_free())
      seq:close()
      assert.equal(4, cache:blocks_free())
      return came
    end)
    cache:close()
  end)

  it("leaves no graph that is being recorded", function()
    at_every_instruction(function(n)
      local came = interrupted(n, function() kv.graph(function() end, dev):close() end)
      assert.equal(0, C.kvl_device_is_recording(dev))
      return came
    end)
  end)
end)
