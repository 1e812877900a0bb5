--- What is closed raises in every use, may be closed once more, and takes nothing else
-- with it. What changes something for the time of a call refuses to be left half way.
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local raises = support.raises

--- Closes `object` twice; every method of it then raises `words`.
local function check_closed(object, words, methods, close)
  close = close or "close"
  object[close](object)
  object[close](object)
  for _, method in ipairs(methods) do
    raises(words, function() return object[method](object) end)
  end
end

support.each_device(function(dev)
  local function open(offload)
    return kv.cache { device = dev, format = "f32", layers = 2, blocks = 8,
      block_size = 16, kv_heads = 2, head_dim = 64, offload = offload }
  end

  describe("a closed thing on " .. dev:name(), function()
    it("raises and may be closed again: cache", function()
      for _, offload in ipairs { false, {}, { hot_slots = 4 } } do
        local cache = open(offload or nil)
        local seq, batch = cache:sequence(), cache:batch { max_tokens = 16 }
        local layer = cache.layer
        check_closed(cache, "the cache is closed",
          { "layer", "blocks_free", "sequence", "batch", "copy_blocks", "bytes_token" })
        raises("the cache is closed", layer, cache, 0)
        raises("the cache is closed", batch.append, batch, { seq }, { 1 })
        seq:close()
      end
    end)

    it("raises and may be closed again: host tier", function()
      local cache = open {}
      check_closed(cache.tier, "the host tier is closed", { "bytes", "trace", "spans",
        "readers", "place", "begin", "append", "appended", "load_to_slot_layer",
        "wait_slot_layer", "kv_for_slot", "decode_buffer" })
      cache:close()
    end)

    it("raises and may be closed again: hot cache", function()
      local cache = open { hot_slots = 4 }
      check_closed(cache.tier.hot, "the hot cache is closed", { "reset", "reset_counts",
        "use_priority", "append", "drop", "attend", "bring_ahead", "join", "stats" })
      cache:close()
    end)

    it("raises and may be closed again: stream", function()
      local stream, event = dev:open_stream(), dev:open_event()
      check_closed(stream, "the stream is closed", { "sync" })
      raises("the stream is closed", stream.wait, stream, event)
      raises("the stream is closed", event.record, event, stream)
      raises("the stream is closed", dev.with_stream, dev, stream, function() end)
      assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
    end)

    it("raises and may be closed again: event", function()
      local event, other, stream = dev:open_event(), dev:open_event(), dev:stream()
      check_closed(event, "the event is closed", { "sync", "done" })
      raises("the event is closed", event.record, event, stream)
      raises("the event is closed", stream.wait, stream, event)
      raises("the event is closed", event.elapsed_us, event, other)
      raises("the event is closed", other.elapsed_us, other, event)
      other:close()
    end)

    it("raises and may be closed again: graph", function()
      local x = kv.zeros(dev, "f32", { 4 })
      local graph = kv.graph(function() x:fill_(1) end, dev)
      graph:replay()
      check_closed(graph, "the graph is closed", { "replay" })
      assert.same({ 1, 1, 1, 1 }, x:list())
    end)

    it("raises and may be closed again: safetensors file", function()
      local head = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
      local file = kv.safetensors(temporary.file(string.char(#head) .. ("\0"):rep(7)
        .. head .. ("\0"):rep(4)))
      local t = file:read("a", dev)
      check_closed(file, "the safetensors file is closed", { "has", "describe", "read" })
      assert.same({ 0 }, t:list())
    end)

    it("raises and may be closed again: GGUF file", function()
      local file = kv.gguf(kv.paths.root .. "/spec/data/gguf/types.gguf")
      local t = file:read("F32", dev)
      check_closed(file, "the GGUF file is closed", { "has", "describe", "read" })
      assert.equal(1024, #t:list())
    end)

    it("raises and may be closed again: tensor", function()
      local t = kv.ones(dev, "f32", { 2, 2 })
      local view = t:index(1)
      check_closed(t, "closed", { "data", "list", "clone", "exp" }, "free")
      raises("data: the tensor is closed", t.data, t)
      assert.same({ 1, 1 }, view:list())
    end)

    it("is the current stream: the default one takes its place", function()
      local outer, inner = dev:open_stream(), dev:open_stream()
      dev:with_stream(outer, function()
        assert.equal(outer, dev:stream())
        dev:with_stream(inner, function() outer:close() end)
        assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
      end)
      local default = dev:stream()
      default:close() -- it lives with the device
      assert.equal(default, dev:stream())
      raises("the stream is closed", outer.sync, outer)
      inner:close()
    end)
  end)

  describe("a call that changes something for its time, on " .. dev:name(), function()
    local function yields() coroutine.yield() end

    local function check_yield(name, call)
      local thread = coroutine.create(call)
      local ok, why = coroutine.resume(thread)
      assert.is_false(ok)
      local words = name .. ": the function yielded, expected it to return"
      assert.truthy(why:find(words, 1, true))
    end

    it("refuses a yield: scope and lasting", function()
      check_yield("scope", function() kv.scope(yields) end)
      check_yield("lasting", function() kv.lasting(yields) end)
      local t
      kv.scope(function() t = kv.ones(dev, "f32", { 1 }) end)
      raises("closed", t.list, t)
      assert.same({ 1 }, kv.ones(dev, "f32", { 1 }):list())
    end)

    it("refuses a yield: with_stream", function()
      local stream, default = dev:open_stream(), dev:stream()
      check_yield("with_stream", function() dev:with_stream(stream, yields) end)
      assert.equal(default, dev:stream())
      stream:close()
    end)

    it("refuses a yield: graph", function()
      check_yield("graph", function() kv.graph(yields, dev) end)
      assert.equal(0, kv.C.kvl_device_is_recording(dev))
    end)

    it("returns results and raises errors in a coroutine as elsewhere", function()
      local results = { coroutine.wrap(function()
        return kv.scope(function(a, b) return b, nil, a end, 1, 2)
      end)() }
      assert.same({ 2, nil, 1 }, results)
      raises("of its own", coroutine.wrap(function()
        kv.scope(error, "of its own")
      end))
    end)
  end)

  describe("arguments on " .. dev:name(), function()
    it("are whole numbers where rows are counted", function()
      local t = kv.zeros(dev, "f32", { 4 })
      raises("narrow: start is 0.7, expected a whole number", t.narrow, t, 0.7, 1)
      raises("narrow: length is 1.5, expected a whole number", t.narrow, t, 0, 1.5)
      raises("narrow: length is nil, expected a whole number", t.narrow, t, 0)
      raises("index: i is 0.5, expected a whole number", t.index, t, 0.5)
    end)

    it("of a cache name the formats that it may have", function()
      raises('cache: format is "i32", expected one of f32, f16, bf16, f8e4m3, int8',
        kv.cache, { device = dev, format = "i32", layers = 1, blocks = 1, block_size = 16,
          kv_heads = 1, head_dim = 64 })
    end)

    it("of safetensors are a path", function()
      raises("safetensors: path is nil, expected a string", kv.safetensors, nil)
      raises("safetensors: path is 3, expected a string", kv.safetensors, 3)
    end)

    it("of append are sequences, each once, with a count of tokens each", function()
      local cache = open()
      local batch, a, b = cache:batch { max_tokens = 16 }, cache:sequence(),
        cache:sequence()
      for words, arguments in pairs {
        ["append: count 2 is -299999, expected a whole number >= 0"] =
          { { a, b }, { 3, -299999 } },
        ["append: sequence 1 would have 18750 blocks"] =
          { { a, b }, { 300000, -299999 } },
        ["append: count 1 is 1.5, expected a whole number >= 0"] = { { a }, { 1.5 } },
        ["append: count 1 is nan, expected a whole number >= 0"] = { { a }, { 0 / 0 } },
        ['append: count 1 is "2", expected a whole number >= 0'] = { { a }, { "2" } },
        ["append: 1 counts, expected one for each of 2 sequences"] = { { a, b }, { 1 } },
        ["append: sequence 2 is nil, expected a sequence"] =
          { { a, nil, b }, { 1, 1, 1 } },
        ["append: sequence 2 is listed twice, expected once"] = { { a, a }, { 1, 1 } },
        ["append: sequence 1 is a table, expected a sequence"] = { { {} }, { 1 } },
        ["append: seqs is nil, expected a table"] = {},
        ["append: counts is 1, expected a table"] = { { a }, 1 },
        ["append: 1 tokens, expected 2, as many as counts add up to"] =
          { { a }, { 2 }, { 1 } },
        ["append: token 1 is 0.5, expected a whole number"] = { { a }, { 1 }, { 0.5 } },
        ["append: tokens is 5, expected a table"] = { { a }, { 1 }, 5 },
      } do
        raises(words, batch.append, batch, unpack(arguments, 1, 3))
      end
      assert.equal(0, a:length() + b:length())
      batch:append({ a, b }, { 2, 3 }, { 1, 2, 3, 4, 5 })
      assert.same({ 1, 2, 3, 4, 5 }, batch.tokens:list())
      cache:close()
    end)

    it("of scores have query heads", function()
      local tables, lens = kv.zeros(dev, "i32", { 1, 4 }), kv.full(dev, "i32", { 1 }, 16)
      local summary = kv.zeros(dev, "f32", { 8, 2, 2, 64 })
      local q, scores = kv.zeros(dev, "f32", { 1, 0, 64 }), kv.zeros(dev, "f32",
        { 1, 2, 4 })
      support.fails(kv.C.kvl_score_minmax(q, summary, tables, lens, 16, 0, scores),
        "heads is 0, expected 1 or more, a multiple of kv_heads = 2")
      support.fails(kv.C.kvl_score_mean(q, kv.zeros(dev, "f32", { 8, 2, 64 }), tables,
        lens, 16, 0, scores), "heads is 0")
      support.fails(kv.C.kvl_score_max_qk(q, kv.zeros(dev, "f32", { 8, 2, 2, 16, 64 }),
        nil, tables, lens, 0, scores), "heads is 0")
    end)

    it("of select are scores and a budget", function()
      local cache, tensor = open(), kv.zeros(dev, "f32", { 64 })
      local batch, seq = cache:batch { max_tokens = 32 }, cache:sequence()
      local attention = kv.attention { cache = cache, heads = 2, max_seqs = 1,
        decode_policy = kv.policy "quest" }
      for _, is_prefill in ipairs { true, false } do
        local tokens = is_prefill and 20 or 1
        batch:append({ seq }, { tokens })
        attention:begin(batch, is_prefill)
        local ctx = attention.context
        ctx:begin_layer(0, kv.zeros(dev, "f32", { tokens, 2, 64 }), cache:layer(0))
        local scores = ctx:new_scores()
        scores:fill_(0)
        for _, bad in ipairs { tensor, {}, 5, "all" } do
          raises("select: budget is", ctx.select, ctx, scores, bad)
          raises("budget is", ctx.select_nearest, ctx, {}, bad)
          raises("budget is", ctx.expect, ctx, scores, bad, 1)
          raises("budget is", ctx.trim, ctx, scores, 0.5, bad, scores)
          raises("budget is", kv.policy.budget_blocks, bad, 4)
        end
        raises("scores are nil, expected f32 [1, 2 or 1, 8]", ctx.select, ctx, nil,
          kv.policy.recent(1))
        ctx:select(scores, kv.policy.recent(1))
      end
      cache:close()
    end)

    it("of a step are a batch of the same cache, after begin", function()
      local cache, other = open(), open()
      local batch, seq = other:batch { max_tokens = 32 }, other:sequence()
      local attention = kv.attention { cache = cache, heads = 2, max_seqs = 1 }
      local row = kv.zeros(dev, "f32", { 1, 2, 64 })
      raises("forward: no step has begun", attention.forward, attention, 0, row, row, row)
      raises("begin: batch is a table, expected a batch that was appended to",
        attention.begin, attention, batch, true)
      batch:append({ seq }, { 1 })
      raises("begin: batch belongs to another cache", attention.begin, attention, batch,
        true)
      raises("begin: batch is nil", attention.begin, attention, nil, true)
      cache:close()
      other:close()
    end)

    it("of a tally are a step that has begun and a layer that is there", function()
      local cache = open()
      local attention = kv.attention { cache = cache, heads = 2, max_seqs = 1 }
      local batch, seq, other = cache:batch { max_tokens = 32 }, cache:sequence(),
        cache:sequence()
      batch:append({ seq }, { 20 })
      attention:begin(batch, true)
      local tally, ctx = kv.tally(attention.shape), attention.context
      raises("tally: begin was not called", tally.load, tally, ctx)
      local values = kv.zeros(dev, "f32", { 2, 1 })
      raises("tally: layer is 9, expected 0 ... " .. cache.layers - 1, tally.put, tally,
        seq, 9, values)
      raises("put: values is 5, expected a tensor", tally.put, tally, seq, 0, 5)
      raises("put: self is nil, expected a tally; call it as object:method(...)",
        tally.put)
      tally:inherit(other, seq) -- other has no numbers, so seq gets none
      assert.equal(1, tally:due(ctx, 2))
      cache:close()
    end)

    it("that are lists have no holes", function()
      local store = kv.store("memory:", { block_size = 2, model = "m" })
      raises("keys: tokens is a table, expected a list", store.keys, store,
        { 1, nil, 3, 4 })
      store:close()
    end)

    it("blame the line of the caller where a part of kvlab passes them on", function()
      local shape = { device = dev, layers = 1, blocks = 4, block_size = 4, heads = 2,
                      kv_heads = 1, head_dim = 32 }
      local line = debug.getinfo(1, "l").currentline + 2
      local ok, why = pcall(function()
        local _ = kv.landmarks(shape, { index = "random", dim = 7 })
      end)
      assert.is_false(ok)
      assert.truthy(why:find(line .. ": index_cache: dim is 7, expected one of 32, 64", 1,
        true), why)
    end)
  end)
end)
