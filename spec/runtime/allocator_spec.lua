--- The allocator: what is reused, what is cut and joined, what stays cached, what a
-- graph keeps; and that memory in use never overlaps, whatever is allocated, freed and
-- recorded.
local kv = require "kvlab"
local support = require "spec.support"

local MIB = 1024 * 1024
local is_hostile = support.is_hostile

--- Frees what earlier specs left, and gives all of it back.
local function fresh(dev)
  dev:sync()
  support.collect()
  dev:trim()
end

local function bytes(dev, n) return kv.tensor(dev, "u8", { n }) end

--- The i-th byte. (A view would keep the memory until it is collected.)
local function at(t, i)
  return kv.scope(function() return t:narrow(i, 1):item() end)
end

local function set_first(t, x)
  kv.scope(function() t:narrow(0, 1):fill_(x) end)
end

--- Runs fn with another limit of the cache.
local function with_limit(dev, limit, fn)
  dev:limit_cache(limit)
  local ok, why = pcall(fn)
  dev:limit_cache(dev:stats().bytes_total / (dev:is_cpu() and 4 or 2))
  assert(ok, why)
end

local function check(dev)
  describe("the allocator on " .. dev:name(), function()
    it("asks the device once for a temporary of any size in a loop", function()
      fresh(dev)
      for _, size in ipairs { 1, 31 * MIB, 32 * MIB, 32 * MIB + 1, 33 * MIB,
                              100 * MIB + 7, 700 * MIB } do
        bytes(dev, size):free()
        local before = dev:stats().allocations
        for _ = 1, 5 do bytes(dev, size):free() end
        assert.equal(before, dev:stats().allocations, size)
      end
      fresh(dev)
    end)

    it("asks the device rarely for a temporary that grows with every step", function()
      fresh(dev)
      local before = dev:stats().allocations
      local last, step = 250, 2
      if is_hostile then last, step = 66, 1 end -- it fills what it allocates
      for n = 34, last, step do bytes(dev, n * MIB):free() end
      local octaves = is_hostile and 1 or 3
      assert.is_true(dev:stats().allocations - before <= 16 * octaves + 2)
      fresh(dev)
    end)

    it("cuts a large free piece and joins what is free again", function()
      fresh(dev)
      bytes(dev, 160 * MIB):free()
      local before = dev:stats().allocations
      local a, b, c = bytes(dev, 40 * MIB), bytes(dev, 70 * MIB), bytes(dev, 50 * MIB)
      assert.equal(before, dev:stats().allocations)
      assert.equal(0, dev:stats().bytes_cached)
      b:free()
      assert.equal(70 * MIB, dev:stats().bytes_cached)
      dev:trim() -- its neighbours are in use
      assert.equal(70 * MIB, dev:stats().bytes_cached)
      a:free()
      bytes(dev, 108 * MIB):free() -- 40 and 70 MiB are one piece again
      c:free()
      bytes(dev, 160 * MIB):free()
      assert.equal(before, dev:stats().allocations)
      assert.equal(160 * MIB, dev:stats().bytes_cached)
      dev:trim()
      assert.equal(0, dev:stats().bytes_cached)
    end)

    it("joins pieces whatever the order in which they are freed", function()
      for _, order in ipairs { { 1, 2, 3 }, { 1, 3, 2 }, { 2, 1, 3 }, { 2, 3, 1 },
                               { 3, 1, 2 }, { 3, 2, 1 } } do
        fresh(dev)
        bytes(dev, 120 * MIB):free()
        local parts = {}
        for i = 1, 3 do parts[i] = bytes(dev, 40 * MIB) end
        for _, i in ipairs(order) do parts[i]:free() end
        local before = dev:stats().allocations
        bytes(dev, 120 * MIB):free()
        assert.equal(before, dev:stats().allocations)
      end
      fresh(dev)
      assert.equal(0, dev:stats().bytes_cached)
    end)

    it("does not cut what is more than a sixteenth of the device", function()
      if is_hostile then return pending "poisoning that much memory takes long" end
      fresh(dev)
      local size = math.ceil(dev:stats().bytes_total / 16 / MIB) * MIB + 128 * MIB
      bytes(dev, size):free()
      local small = bytes(dev, 40 * MIB) -- would keep all of it from going back
      assert.is_true(dev:stats().bytes_cached >= size)
      dev:trim()
      assert.equal(0, dev:stats().bytes_cached)
      small:free()
      fresh(dev)
    end)

    it("counts what tensors asked for as live, and what the device gave as reserved",
      function()
        fresh(dev)
        local before = dev:stats()
        local a = bytes(dev, 33 * MIB + 5)
        local now = dev:stats()
        assert.equal(before.bytes_live + 33 * MIB + 5, now.bytes_live)
        assert.equal(before.bytes_reserved + 34 * MIB, now.bytes_reserved)
        dev:reset_peak()
        local b = bytes(dev, 5)
        assert.equal(now.bytes_live + 512, dev:stats().bytes_live_peak)
        a:free()
        b:free()
        now = dev:stats()
        assert.equal(before.bytes_live, now.bytes_live)
        assert.equal(34 * MIB + 512, now.bytes_cached)
        assert.equal(before.bytes_reserved + 34 * MIB + 512, now.bytes_reserved)
        dev:trim()
        assert.equal(before.bytes_reserved, dev:stats().bytes_reserved)
      end)

    it("keeps as much as its limit, and gives back first what was freed first", function()
      fresh(dev)
      with_limit(dev, 150 * MIB, function()
        local list = {}
        for i, size in ipairs { 40, 48, 56, 64 } do list[i] = bytes(dev, size * MIB) end
        for i = 1, 3 do list[i]:free() end
        assert.equal((40 + 48 + 56) * MIB, dev:stats().bytes_cached)
        list[4]:free() -- 40 and 48 go
        assert.equal((56 + 64) * MIB, dev:stats().bytes_cached)
        dev:limit_cache(64 * MIB)
        assert.equal(64 * MIB, dev:stats().bytes_cached)
        dev:limit_cache(0)
        assert.equal(0, dev:stats().bytes_cached)
        bytes(dev, 40 * MIB):free()
        assert.equal(0, dev:stats().bytes_cached)
        bytes(dev, 32 * MIB):free()
        assert.equal(32 * MIB, dev:stats().bytes_cached)
      end)
      support.raises("limit_cache: bytes is -1, expected a whole number", dev.limit_cache,
        dev, -1)
      fresh(dev)
    end)

    it("keeps a piece whose neighbour is in use, whatever the limit", function()
      fresh(dev)
      bytes(dev, 120 * MIB):free()
      local a, b = bytes(dev, 60 * MIB), bytes(dev, 60 * MIB)
      a:free()
      with_limit(dev, 0, function()
        assert.equal(60 * MIB, dev:stats().bytes_cached)
        b:free()
        assert.equal(0, dev:stats().bytes_cached)
      end)
    end)

    it("leaves the pieces of a closed stream usable", function()
      fresh(dev)
      local stream = dev:open_stream()
      local a, b
      dev:with_stream(stream, function()
        bytes(dev, 120 * MIB):free()
        a, b = bytes(dev, 60 * MIB), bytes(dev, 60 * MIB)
        a:fill_(1)
        b:fill_(2)
      end)
      a:free()
      stream:close()
      assert.equal(2, at(b, 0))
      assert.equal(2, at(b, 60 * MIB - 1))
      b:free()
      fresh(dev)
      assert.equal(0, dev:stats().bytes_cached)
    end)

    it("gives back all that is free before it says that there is no room", function()
      fresh(dev)
      local keep = bytes(dev, 40 * MIB)
      bytes(dev, 200 * MIB):free()
      bytes(dev, 1000):free()
      assert.is_true(dev:stats().bytes_cached > 200 * MIB)
      support.raises("no memory on " .. dev:name(), bytes, dev, 2 ^ 44)
      assert.equal(0, dev:stats().bytes_cached)
      keep:free()
    end)

    it("lets a recording take what was free on its stream, and keeps that with the graph",
      function()
        fresh(dev)
        local n = 10 * MIB
        local x, out = kv.ones(dev, "f32", { n }), kv.tensor(dev, "f32", { n })
        local function work()
          local a = x:add(1)
          local b = a:add(1)
          a:free()
          local c = b:add(1) -- where a was
          b:free()
          c:add(1, out)
          c:free()
        end
        work()
        local before = dev:stats()
        assert.equal(80 * MIB, before.bytes_cached)
        local graph = kv.graph(work, dev)
        assert.equal(before.allocations, dev:stats().allocations)
        assert.equal(0, dev:stats().bytes_cached)
        local others = {}
        for i = 1, 3 do others[i] = kv.full(dev, "f32", { n }, 7) end
        out:fill_(0)
        graph:replay()
        assert.equal(5, out:min():item())
        for i = 1, 3 do assert.equal(7, others[i]:max():item()) end
        local small = dev:stats().bytes_cached -- what min and max left
        assert.is_true(small < 64 * 1024)
        graph:close()
        assert.equal(80 * MIB + small, dev:stats().bytes_cached)
        dev:trim()
        assert.equal(0, dev:stats().bytes_cached)
      end)

    it("cuts and joins while it records, and keeps what outlives that", function()
      fresh(dev)
      local x, kept = kv.ones(dev, "u8", { 50 * MIB }), nil
      bytes(dev, 160 * MIB):free()
      local graph = kv.graph(function()
        local a = kv.zeros(dev, "u8", { 50 * MIB })
        kept = kv.zeros(dev, "u8", { 50 * MIB })
        local c = kv.zeros(dev, "u8", { 60 * MIB })
        a:copy_(x)
        kept:copy_(a)
        c:free()
        a:free()
      end, dev)
      assert.equal(0, dev:stats().bytes_cached)
      local other = kv.full(dev, "u8", { 50 * MIB }, 9)
      graph:replay()
      dev:sync()
      graph:close() -- the piece of `kept` is still in use
      assert.equal(1, at(kept, 50 * MIB - 1))
      assert.equal(9, at(other, 0))
      assert.equal(110 * MIB, dev:stats().bytes_cached)
      kept:free()
      other:free()
      x:free()
      dev:trim()
      assert.equal(0, dev:stats().bytes_cached)
    end)

    -- Every live tensor holds a number of its own, which is read when it is freed. Each
    -- graph writes its number to what it kept, whatever was allocated since.
    local function fuzz(seed, steps)
      local rng = support.rng(seed)
      local streams = { dev:stream(), dev:open_stream() }
      local event = dev:open_event()
      local live, graphs, number, sum = {}, {}, 0, 0
      local function size()
        local kind = rng(4)
        if kind == 0 then return 1 + rng(5000) end
        if kind == 1 then return 1 + rng(3 * MIB) end
        local most = kind == 2 and 30 or support.is_full and 120 or 60
        return (20 + rng(most)) * MIB + rng(3) * 513
      end
      local function look(t, want, what)
        for _, i in ipairs { 0, math.floor(t.n / 2), t.n - 1 } do
          assert.equal(want, at(t.tensor, i), what)
        end
      end
      local function drop(i)
        local t = table.remove(live, i)
        sum = sum - t.n
        look(t, t.number, "a tensor")
        t.tensor:free()
      end
      local function join_streams() -- reads come from the first stream
        event:record(streams[2])
        streams[1]:wait(event)
      end
      local function add()
        number = number % 250 + 1
        local n = size()
        local t = { n = n, number = number }
        dev:with_stream(streams[1 + rng(2)], function()
          local temporary = bytes(dev, size()) -- freed at once, on the same stream
          set_first(temporary, 251)
          t.tensor = kv.full(dev, "u8", { n }, number)
          temporary:free()
        end)
        live[#live + 1] = t
        sum = sum + n
      end
      local function record()
        number = number % 250 + 1
        local g = { number = number, kept = { n = size() } }
        local held = number
        g.graph = kv.graph(function()
          g.kept.tensor = bytes(dev, g.kept.n)
          for _ = 1, 3 do
            local a, b = bytes(dev, size()), bytes(dev, size())
            set_first(a, 252)
            a:free()
            set_first(b, 253)
            b:free()
          end
          g.kept.tensor:fill_(held)
        end, dev)
        graphs[#graphs + 1] = g
      end
      for _ = 1, steps do
        local what = rng(20)
        join_streams()
        if what == 0 and #graphs < 3 then
          record()
        elseif what < 4 and #graphs > 0 then
          local g = graphs[1 + rng(#graphs)]
          g.kept.tensor:fill_(0)
          g.graph:replay()
          look(g.kept, g.number, "a graph's result")
        elseif what == 4 and #graphs > 0 then
          local g = table.remove(graphs, 1 + rng(#graphs))
          g.kept.tensor:fill_(g.number)
          g.graph:close()
          live[#live + 1] = { n = g.kept.n, number = g.number, tensor = g.kept.tensor }
          sum = sum + g.kept.n
        elseif what == 5 then
          dev:trim()
        elseif what == 6 then
          dev:limit_cache(rng(400) * MIB)
        elseif (what < 13 or sum > 600 * MIB) and #live > 0 then
          drop(1 + rng(#live))
        else
          add()
        end
        local stats = dev:stats()
        assert.is_true(stats.bytes_reserved >= stats.bytes_cached)
        assert.is_true(stats.bytes_cached >= 0)
      end
      join_streams()
      for _, g in ipairs(graphs) do
        g.graph:replay()
        look(g.kept, g.number, "a graph's result")
        g.graph:close()
        g.kept.tensor:free()
      end
      while #live > 0 do drop(#live) end
      streams[2]:close()
      event:close()
      dev:limit_cache(dev:stats().bytes_total / (dev:is_cpu() and 4 or 2))
    end

    it("never gives memory that is in use", function()
      for seed = 1, support.is_full and 6 or 2 do
        fresh(dev)
        local before = dev:stats()
        fuzz(seed, is_hostile and 60 or support.is_full and 200 or 150)
        fresh(dev)
        local after = dev:stats()
        assert.equal(0, after.bytes_cached)
        assert.equal(before.bytes_live, after.bytes_live)
        assert.equal(before.bytes_reserved, after.bytes_reserved)
      end
    end)

    it("loses nothing when any of its allocations fails", function()
      if not is_hostile then return pending "not a hostile build" end
      fresh(dev)
      local before = dev:stats()
      for n = 1, 12 do
        bytes(dev, 160 * MIB):free()
        kv.check(kv.C.kvl_fail_allocation(n))
        local ok, why = pcall(kv.scope, function()
          local a = bytes(dev, 40 * MIB)
          local b = bytes(dev, 300 * MIB)
          a:free()
          bytes(dev, 33 * MIB)
          b:free()
        end)
        kv.check(kv.C.kvl_fail_allocation(0))
        assert.is_true(ok or why:find "memory" ~= nil, why)
        fresh(dev)
        assert.equal(before.bytes_reserved, dev:stats().bytes_reserved)
        assert.equal(before.bytes_live, dev:stats().bytes_live)
      end
    end)
  end)
end

support.each_device(check)
