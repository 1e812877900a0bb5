local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local N = 4 * 1024 * 1024

local function check(dev)
  describe("stream on " .. dev:name(), function()
    it("runs its work in order", function()
      local stream = dev:open_stream()
      local x = dev:with_stream(stream, function()
        local t = kv.full(dev, "f32", { N }, 1)
        for _ = 1, 20 do t:add(1, t) end
        return t
      end)
      stream:sync()
      assert.equal(21, x:narrow(N - 1, 1):item())
      stream:close()
    end)

    it("waits for an event of another stream", function()
      local a, b, event = dev:open_stream(), dev:open_stream(), dev:open_event()
      local x = kv.zeros(dev, "f32", { N })
      dev:sync()
      for round = 1, 5 do
        dev:with_stream(a, function()
          for _ = 1, 10 do x:add(1, x) end
        end)
        event:record(a)
        b:wait(event)
        local y = dev:with_stream(b, function() return x:mul(2) end)
        b:sync()
        assert.equal(20 * round, y:narrow(N - 1, 1):item())
      end
      a:close()
      b:close()
      event:close()
    end)

    it("waits for the record that was made before, whatever is recorded later", function()
      local busy, idle, reader = dev:open_stream(), dev:open_stream(), dev:open_stream()
      local x, event = kv.zeros(dev, "f32", { N }), dev:open_event()
      dev:sync()
      for round = 1, 5 do
        dev:with_stream(busy, function()
          for _ = 1, 10 do x:add(1, x) end
        end)
        event:record(busy)
        reader:wait(event)
        for _ = 1, 100 do event:record(idle) end -- these complete before it
        local y = dev:with_stream(reader, function() return x:narrow(N - 1, 1) * 2 end)
        reader:sync()
        assert.equal(20 * round, y:item())
      end
      for _, stream in ipairs { busy, idle, reader } do stream:close() end
      event:close()
    end)

    it("times the work between two events", function()
      local stream, from, to = dev:open_stream(), dev:open_event(), dev:open_event()
      local x = kv.zeros(dev, "f32", { N })
      dev:sync()
      local begin = kv.C.kvl_clock_ns()
      from:record(stream)
      dev:with_stream(stream, function()
        for _ = 1, 10 do x:add(1, x) end
      end)
      to:record(stream)
      to:sync()
      local host_us = tonumber(kv.C.kvl_clock_ns() - begin) / 1e3
      assert.is_true(to:done())
      local us = from:elapsed_us(to)
      assert.is_true(us > 1 and us < 1.01 * host_us + 1) -- two clocks
      stream:close()
    end)

    it("refuses what is no stream or event", function()
      local event, stream = dev:open_event(), dev:open_stream()
      assert.has_error(function() event:record(nil) end)
      assert.has_error(function() stream:wait(nil) end)
      assert.has_error(function() event:elapsed_us(nil) end)
    end)

    it("counts a never recorded event as complete, and cannot time it", function()
      local event, stream = dev:open_event(), dev:open_stream()
      assert.is_true(event:done())
      stream:wait(event)
      event:sync()
      assert.has_error(function() event:elapsed_us(event) end)
    end)

    it("does not give memory to a new tensor while another stream reads it", function()
      local reader = dev:open_stream()
      for round = 1, 20 do
        local source = kv.full(dev, "f32", { N }, round)
        local written = dev:open_event()
        written:record(dev:stream())
        reader:wait(written)
        local copy = dev:with_stream(reader, function()
          local t = kv.zeros(dev, "f32", { N })
          for _ = 1, 4 do t:add(source, t) end
          return t
        end)
        source:free()
        local other = kv.full(dev, "f32", { N }, -1) -- takes the freed memory
        dev:sync()
        assert.equal(4 * round, copy:min():item())
        assert.equal(-1, other:max():item())
        copy:free()
        other:free()
      end
      reader:close()
    end)

    it("keeps the current stream after an error inside with_stream", function()
      local stream, before = dev:open_stream(), dev:stream()
      assert.has_error(function()
        dev:with_stream(stream, function() error "no" end)
      end)
      assert.equal(before, dev:stream())
      stream:close()
    end)

    it("refuses more streams than it has room for", function()
      local streams = {}
      local ok, why = pcall(function()
        for i = 1, 100 do streams[i] = dev:open_stream() end
      end)
      for _, stream in ipairs(streams) do stream:close() end
      assert.is_false(ok)
      assert.truthy(why:find "streams are open", why)
    end)
  end)
end

support.each_device(check)

describe("device", function()
  it("is the same when asked for again", function()
    assert.equal(kv.device "cpu", kv.device "cpu")
    assert.equal("cpu", kv.device("cpu"):name())
  end)

  it("refuses names it does not know", function()
    for _, name in ipairs { "gpu", "cuda:", "cuda:x", "", "cpu:0" } do
      local ok, why = pcall(kv.device, name)
      assert.is_false(ok)
      assert.truthy(why:find "expected \"cpu\"" or why:find "cuda", why)
    end
  end)

  it("says why there is no CUDA device", function()
    local ok, why = kv.cuda_available()
    if not ok then assert.truthy(why:find "cuda") end
  end)

  it("loads no plug-in where there is no driver", function()
    if pcall(ffi.load, "libcuda.so.1") then return pending "a driver is here" end
    assert.matches("driver", select(2, kv.cuda_available()))
    local maps = io.open("/proc/self/maps"):read "*a"
    assert.is_nil(maps:find("libkvlab_cuda", 1, true))
  end)
end)
