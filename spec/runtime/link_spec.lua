--- The emulated link of the CPU device: modelled time is exact where transfers make it.
local kv = require "kvlab"
local plans = require "kvlab.experiment.plan"
local support = require "spec.support"
local temporary = require "spec.temporary"

local C = kv.C
local dev = kv.device "cpu"
local KIB = 1024
local LONG_US = 1e9 -- a latency that no computation here takes

--- Define `name` with an emulated link on; fn gets streams that begin at one time.
local function it_with_link(name, gb_s, us, fn)
  it(name, function()
    local streams = { dev:open_stream(), dev:open_stream(), dev:open_stream() }
    local ok, why = pcall(support.with_link, gb_s, us, fn, unpack(streams))
    for _, stream in ipairs(streams) do stream:close() end
    if not ok then error(why, 0) end
  end)
end

local function mark(stream)
  local event = dev:open_event()
  event:record(stream)
  return event
end

--- To a nanosecond, in which clocks count; two roundings.
local function assert_us(want, got)
  if math.abs(got - want) > 0.002 then
    error(("%.3f us, expected %.3f"):format(got, want), 2)
  end
end

local function near(bytes) return kv.zeros(dev, "u8", { bytes }) end

local function far(bytes) return kv.pinned(dev, "u8", { bytes }):fill_(0) end

local function copy_on(stream, to, from)
  dev:with_stream(stream, function() to:copy_(from) end)
end

describe("emulated link", function()
  for _, kib in ipairs { 8, 64, 1024 } do
    it_with_link("takes latency and rate for " .. kib .. " KiB", 55, 10, function(s)
      local a, b = near(kib * KIB), far(kib * KIB)
      local want = 10 + kib * KIB / 55e3
      local begin = mark(s)
      copy_on(s, a, b)
      local there = mark(s)
      copy_on(s, b, a)
      assert_us(want, begin:elapsed_us(there))
      assert_us(want, there:elapsed_us(mark(s)))
    end)
  end

  it_with_link("carries one transfer at a time each way; latencies overlap", 50, 10,
    function(s, t, u)
      local begin = mark(s)
      local a, b = near(100000), far(100000)
      copy_on(s, a, b)
      copy_on(t, a, b)
      copy_on(u, b, a)
      local of_s, of_t, of_u = mark(s), mark(t), mark(u)
      assert_us(12, begin:elapsed_us(of_s))
      assert_us(14, begin:elapsed_us(of_t))
      assert_us(12, begin:elapsed_us(of_u))
    end)

  it_with_link("joins the clocks of streams that wait", 50, 10, function(s, t)
    local begin = mark(s)
    local a, b = near(100000), far(100000)
    copy_on(s, a, b)
    t:wait(mark(s))
    assert_us(12, begin:elapsed_us(mark(t)))
    copy_on(t, b, a)
    s:wait(begin) -- of the past: no effect
    assert_us(12, begin:elapsed_us(mark(s)))
    assert_us(24, begin:elapsed_us(mark(t)))
  end)

  it_with_link("lets compute go on beside a transfer", 1, 0, function(s)
    local x, a, b = kv.zeros(dev, "f32", { 1e6 }), near(2e6), far(2e6)
    dev:sync()
    local begin = mark(dev:stream())
    copy_on(s, a, b)
    local moved = mark(s)
    for _ = 1, 5 do x:add(1, x) end
    local computed = mark(dev:stream())
    dev:stream():wait(moved)
    local compute = begin:elapsed_us(computed)
    assert.is_true(compute > 0)
    assert_us(2000, begin:elapsed_us(moved))
    assert_us(math.max(2000, compute), begin:elapsed_us(mark(dev:stream())))
    assert.equal(5, x:min():item())
  end)

  it_with_link("takes what ops move", 1, 0, function(s)
    local host = kv.pinned(dev, "f32", { 4, 2, 1, 8, 16 }):fill_(1)
    local slots = kv.zeros(dev, "f32", { 4, 2, 1, 8, 16 })
    local from = kv.from(dev, "i32", { 1, 1, 3 }, { 2, 3, -1 })
    local to = kv.from(dev, "i32", { 1, 1, 3 }, { 0, 1, 2 })
    dev:sync()
    local begin = mark(s)
    dev:with_stream(s, function()
      kv.check(C.kvl_move_blocks(host, from, slots, to, nil, nil))
    end)
    assert_us(2 * 1024 / 1e3, begin:elapsed_us(mark(s)))
    assert.equal(2 * 256, slots:sum():item())
  end)

  it_with_link("has no part in what stays on one side, nor in what Lua reads", 1, LONG_US,
    function(s)
      local a, b = near(1000), far(1000)
      local begin = mark(s)
      dev:with_stream(s, function()
        near(1000):copy_(a)
        far(1000):copy_(b)
        assert.equal(6, kv.from(dev, "i32", { 3 }, { 1, 2, 3 }):sum():item())
        assert.equal(0, b:narrow(0, 1):item())
      end)
      assert.is_true(begin:elapsed_us(mark(s)) < LONG_US)
    end)

  it_with_link("begins nothing before the host asked for it", 50, 10, function(s, t, u)
    local begin = mark(s)
    local a, b = near(100000), far(100000)
    copy_on(s, a, b)
    s:sync()
    copy_on(t, a, b)
    local second = mark(t)
    second:sync()
    assert_us(12, begin:elapsed_us(mark(s)) - 12)
    assert_us(24, begin:elapsed_us(second))
    assert_us(24, begin:elapsed_us(mark(u)))
  end)

  it_with_link("times a graph at every replay", 50, 10, function(s, t)
    local a, b = near(100000), far(100000)
    local begin, forked, joined = dev:open_event(), dev:open_event(), dev:open_event()
    dev:with_stream(s, function()
      local graph = kv.graph(function()
        begin:record(s)
        forked:record(s)
        t:wait(forked)
        copy_on(t, b, a)
        copy_on(s, a, b)
        joined:record(t)
        s:wait(joined)
        copy_on(s, a, b)
      end, dev)
      for _ = 1, 3 do
        graph:replay()
        assert_us(24, begin:elapsed_us(mark(s)))
        assert_us(12, begin:elapsed_us(joined))
      end
      graph:close()
    end)
  end)

  it("does not compare times from before and after it was turned on or off", function()
    local stream = dev:open_stream()
    local events = { mark(stream) }
    support.with_link(0, 0, function()
      for i, gb_s in ipairs { 50, 60, 0 } do
        kv.check(C.kvl_cpu_link(gb_s, 0))
        events[i + 1] = mark(stream)
        support.raises("kvl_cpu_link was called", events[i].elapsed_us, events[i],
          events[i + 1])
      end
    end)
    stream:close()
  end)

  it("goes on from work that is under way, and off again to wall time", function()
    local stream = dev:open_stream()
    local x, b = kv.zeros(dev, "f32", { 2 ^ 20 }), far(4 * 2 ^ 20)
    dev:sync()
    local y = b:narrow(0, 4 * 2 ^ 20)
    support.with_link(0, 0, function()
      for round = 1, 4 do
        dev:with_stream(stream, function()
          for _ = 1, 10 do x:add(1, x) end
          kv.check(C.kvl_cpu_link(round % 2, LONG_US))
          for _ = 1, 10 do x:add(1, x) end
        end)
      end
      local begin = mark(stream)
      copy_on(stream, near(4 * 2 ^ 20), y)
      assert.is_true(begin:elapsed_us(mark(stream)) < LONG_US)
      assert.equal(80, x:min():item())
      assert.equal(80, x:max():item())
    end)
    stream:close()
  end)

  it("refuses speeds and latencies that make no sense", function()
    local nan, inf = 0 / 0, math.huge
    for _, gb_s in ipairs { -1, nan, inf, -inf, 1e-9 } do
      support.fails(C.kvl_cpu_link(gb_s, 0), "gb_s is", "expected 0 or")
    end
    for _, us in ipairs { -1, nan, inf, 1e10 } do
      support.fails(C.kvl_cpu_link(1, us), "us is", "expected 0 ...")
    end
  end)
end)

describe("--link-gbps and --link-us", function()
  --- What a script prints, on both streams, and its exit status.
  local function run(words, script)
    local name = temporary.file(script or "print 'it ran'")
    local pipe = io.popen(("'%s' run %s %s 2>&1; echo $?"):format(kv.paths.executable,
      words, name))
    local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
    pipe:close()
    return output, tonumber(status)
  end

  local it = kv.paths.executable and it or pending

  it("emulate a link that the device's description tells", function()
    local output = run("--device=cpu --link-gbps=55 --link-us=10",
      "print(require('kvlab').device():description())")
    assert.matches("threads, emulated link 55 GB/s %+ 10 us\n$", output)
    output = run("--device=cpu --link-gbps 0.5",
      "print(require('kvlab').device():description())")
    assert.matches("threads, emulated link 0.5 GB/s %+ 0 us\n$", output)
    output = run("--device=cpu", "print(require('kvlab').device():description())")
    assert.matches("threads\n$", output)
  end)

  it("are refused when they make no sense", function()
    for words, problem in pairs {
      ["--link-gbps=0"] = '--link-gbps is a number above 0; given "0"',
      ["--link-gbps=fast"] = '--link-gbps is a number above 0; given "fast"',
      ["--link-gbps=inf"] = '--link-gbps is a number above 0; given "inf"',
      ["--link-gbps=1 --link-us=-1"] = '--link-us is a number >= 0; given "-1"',
      ["--link-gbps=1 --link-us=nan"] = '--link-us is a number >= 0; given "nan"',
      ["--link-us=10"] =
        "--link-us, the latency of a link, needs --link-gbps=N, its speed",
    } do
      local output, status = run(words)
      assert.equal("kvlab: " .. problem .. "\n", output)
      assert.equal(2, status)
    end
  end)

  it("are refused on a GPU #gpu", function()
    local output, status = run("--device=cuda --link-gbps=55",
      "print(require('kvlab').device():description())")
    assert.matches("emulates a link on the cpu; the device is cuda:0", output)
    assert.equal(1, status)
  end)

  it("are part of an experiment's configurations when given, and only then", function()
    local spec = { name = "x", grid = {}, environment = { device = "cpu" },
                   run = function() return { y = 1 } end }
    local given = { seed = 0, set = {}, ["link-gbps"] = 55, ["link-us"] = 10 }
    assert.same({ { device = "cpu", seed = 0, link_gbps = 55, link_us = 10 } },
      plans.new(spec, given).configs)
    assert.same({ { device = "cpu", seed = 0 } },
      plans.new(spec, { seed = 0, set = {} }).configs)
  end)
end)
