--- A graph replays what was recorded: the same launches on the same memory, for whatever
-- the device's arrays hold by then.
local ffi = require "ffi"
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"
local synthetic = require "kvlab.experiment.synthetic"

local raises = support.raises

--- Ops over a few long rows, which a GPU cuts into pieces and joins through workspaces,
-- and a product over a long dimension, which cuBLAS may sum in parts. run() launches all;
-- results() waits for the device, returns each output's bytes and poisons the outputs.
local function long_rows(dev, seed)
  local function randn(i, ...)
    return kv.randn(dev, "f32", { ... }, { seed = 10 * seed + i })
  end
  local x, a, b = randn(1, 2, 2 ^ 18), randn(2, 64, 2 ^ 13), randn(3, 2 ^ 13, 64)
  local columns = x:reshape { 2 ^ 17, 4 }
  local function poisoned(dtype, ...) return support.poisoned(dev, dtype, { ... }) end
  local outs = { poisoned("f32", 2), poisoned("f32", 4), poisoned("i32", 2),
                 poisoned("f32", 2, 2 ^ 18), poisoned("f32", 64, 64) }
  local work = {}
  function work.run()
    x:sum(1, outs[1])
    columns:sum(0, outs[2])
    x:argmax(outs[3])
    x:softmax(1, outs[4])
    a:matmul(b, outs[5])
  end
  function work.results()
    dev:sync()
    local bytes = {}
    for i, out in ipairs(outs) do
      local host = out:to "cpu"
      bytes[i] = ffi.string(host:data(), tonumber(host.count) * 4)
      out:fill_(i == 3 and -77 or 0 / 0)
    end
    dev:sync()
    return bytes
  end
  return work
end

local function check(dev)
  describe("a graph on " .. dev:name(), function()
    it("runs nothing while it is recorded, and everything at each replay", function()
      local x = kv.zeros(dev, "f32", { 1000 })
      local graph = kv.graph(function() x:add(1, x) end, dev)
      assert.equal(0, x:max():item())
      for i = 1, 3 do
        graph:replay()
        assert.equal(i, x:min():item())
      end
      graph:close()
    end)

    it("keeps the memory of its temporaries", function()
      local x, out = kv.rand(dev, "f32", { 5000 }, { seed = 1 }), nil
      local function work() out = ((x * 2) + x):exp():softmax() end
      work()
      local want = out:list()
      local graph = kv.graph(work, dev)
      local others = {}
      for i = 1, 20 do others[i] = kv.full(dev, "f32", { 5000 }, i) end
      graph:replay()
      support.equal(out, want)
      for i = 1, 20 do assert.equal(i, others[i]:min():item()) end
      collectgarbage()
      graph:replay()
      support.equal(out, want)
      graph:close()
    end)

    it("keeps the memory that it uses until it is closed, whoever frees it", function()
      support.collect()
      local before = dev:stats().bytes_live
      local a, out = kv.full(dev, "f32", { 640 }, 7), kv.zeros(dev, "f32", { 640 })
      local also = kv.zeros(dev, "f32", { 640 })
      local graph = kv.graph(function()
        a:add(1, out)
        also:copy_(a)
      end, dev)
      for _, t in ipairs { a, out, also } do t:free() end
      local others = {}
      for i = 1, 6 do others[i] = kv.zeros(dev, "f32", { 640 }) end
      graph:replay()
      for i = 1, 6 do assert.equal(0, others[i]:max():item(), i) end
      graph:close()
      for i = 1, 6 do others[i]:free() end
      support.collect()
      assert.equal(before, dev:stats().bytes_live)
    end)

    it("reuses the memory of large temporaries while it is recorded", function()
      local x = kv.ones(dev, "f32", { 10 * 1024 * 1024 })
      local out = kv.tensor(dev, "f32", { 10 * 1024 * 1024 })
      local function work()
        local at = x:add(1)
        for _ = 1, 6 do
          local next_at = at:add(1)
          at:free()
          at = next_at
        end
        at:add(1, out)
        at:free()
      end
      dev:trim()
      local before = dev:stats().allocations
      local graph = kv.graph(work, dev)
      assert.equal(before + 2, dev:stats().allocations)
      local others = kv.full(dev, "f32", { 10 * 1024 * 1024 }, 5)
      graph:replay()
      assert.equal(9, out:min():item())
      assert.equal(5, others:max():item())
      graph:close()
    end)

    it("follows work that forks to another stream and joins again", function()
      local side, forked, joined = dev:open_stream(), dev:open_event(), dev:open_event()
      local a, b = kv.zeros(dev, "f32", { 300 }), kv.zeros(dev, "f32", { 300 })
      local main = dev:stream()
      local function work()
        a:add(1, a)
        forked:record(main)
        side:wait(forked)
        dev:with_stream(side, function() a:mul(10, b) end)
        joined:record(side)
        main:wait(joined)
        b:add(a, a)
      end
      local graph = kv.graph(work, dev)
      graph:replay() -- a = 1, b = 10, a = 11
      assert.equal(11, a:max():item())
      graph:replay() -- a = 12, b = 120, a = 132
      assert.equal(132, a:min():item())
      graph:close()
      side:close()
    end)

    it("shares no workspace with eager work on a stream that it forks to", function()
      local side, forked, joined = dev:open_stream(), dev:open_event(), dev:open_event()
      local main, recorded, eager = dev:stream(), long_rows(dev, 1), long_rows(dev, 2)
      local function fork()
        forked:record(main)
        side:wait(forked)
        dev:with_stream(side, function() for _ = 1, 4 do recorded.run() end end)
        joined:record(side)
        main:wait(joined)
      end
      local function beside() for _ = 1, 4 do eager.run() end end
      fork()
      local want_recorded = recorded.results()
      dev:with_stream(side, beside)
      local want_eager = eager.results()
      local graph = kv.graph(fork, dev)
      for round = 1, 20 do
        graph:replay()
        dev:with_stream(side, beside)
        local got_recorded, got_eager = recorded.results(), eager.results()
        for i = 1, #want_eager do -- not assert.equal, which would print megabytes
          local where = ("round %d, output %d "):format(round, i)
          assert.is_true(got_recorded[i] == want_recorded[i], where .. "of the replay")
          assert.is_true(got_eager[i] == want_eager[i], where .. "of the eager work")
        end
      end
      graph:close()
      side:close()
    end)

    it("refuses what needs the host, and leaves the device usable", function()
      local x = kv.ones(dev, "f32", { 4 })
      for _, work in ipairs { function() x:sum():item() end, function() x:list() end,
                              function() kv.from(dev, "f32", { 1 }) end,
                              function() dev:sync() end,
                              function() kv.graph(function() end, dev) end } do
        raises("graph is being recorded", kv.graph, work, dev)
        assert.equal(4, x:sum():item())
      end
      raises("boom", kv.graph, function()
        x:add(1, x)
        error "boom"
      end, dev)
      assert.equal(4, x:sum():item())
      raises("graph: fn is 7, expected a function", kv.graph, 7)
    end)

    it("is replayed on the stream that it was recorded on", function()
      local x = kv.zeros(dev, "f32", { 4 })
      local graph, side = kv.graph(function() x:add(1, x) end, dev), dev:open_stream()
      raises("another stream", dev.with_stream, dev, side, graph.replay, graph)
      graph:close()
      side:close()
    end)

    it("replays a whole decode step while lengths grow, as eager steps do", function()
      for _, offload in ipairs { false, { hot_slots = 200 },
                                 { hot_slots = 200, hot_overlap = true } } do
        for _, name in ipairs { "full", "quest", "topk", "streaming_blocks" } do
          local function run(recorded)
            local s = synthetic { device = dev, shape = "small", context = 512,
              block_size = 16, max_seqs = 2, max_blocks = 20, dtype = "f32",
              decode_policy = kv.policy(name,
                name ~= "full" and { ratio = 0.5, min_blocks = 0 } or nil),
              offload = offload or nil, fixed_width = true }
            local seqs = { s:sequence(70), s:sequence(150) }
            local outs, graph = {}, nil
            for i = 1, 40 do
              s:begin_decode(seqs)
              if i == 3 and recorded then
                graph = kv.graph(function() s:layers_of_step() end, dev)
              end
              if graph then graph:replay() else s:layers_of_step() end
              outs[i] = s.out:list()
            end
            if graph then graph:close() end
            s:close()
            return outs
          end
          local eager, replayed = run(false), run(true)
          for i = 1, #eager do support.equal(replayed[i], eager[i], name .. " " .. i) end
        end
      end
    end)

    it("refuses a ring, whose loads depend on lengths", function()
      local r = rig.new(dev, { offload = { slots = 2 } })
      local seq = r.cache:sequence()
      r.batch:append({ seq }, { 1 })
      r.attention:begin(r.batch, false)
      local q = kv.zeros(dev, "f32", { 1, rig.SHAPE.heads, rig.SHAPE.head_dim })
      local k = kv.zeros(dev, "f32", { 1, rig.SHAPE.kv_heads, rig.SHAPE.head_dim })
      local out = kv.zeros(dev, "f32", q:dims())
      raises("A hot cache can", kv.graph, function()
        r.attention:forward(0, q, k, k, out)
      end, dev)
      r.cache:close()
    end)
  end)
end

support.each_device(check)
