--- Tallies: numbers of sequences, whatever batch they are in.
local kv = require "kvlab"
local support = require "spec.support"

local SHAPE = { layers = 2, kv_heads = 2, max_blocks = 70 }

local function check(dev)
  local shape = { device = dev }
  for key, value in pairs(SHAPE) do shape[key] = value end

  --- What a tally needs of a context: a step of some sequences.
  local number = 0
  local function step(tally, sequences, width)
    number = number + 1
    local ctx = { seqs = #sequences, sequences = sequences, width = width or 5, layer = 1,
                  shape_number = number, new_scores = function() end }
    tally:begin(ctx)
    return ctx
  end
  local function sequence() return { state = {}, handle = true } end
  local function row(base, n)
    local list = {}
    for i = 1, 2 * n do list[i] = base + i end
    return kv.from(dev, "f32", { 2, n }, list)
  end

  it("belongs to a sequence and a layer, in any batch and width", function()
    local tally = kv.tally(shape, nil, 7)
    local a, b = sequence(), sequence()
    tally:put(a, 1, row(10, 3))
    tally:put(b, 1, row(20, 3))
    local ctx = step(tally, { b, a }, 4)
    support.equal(tally:load(ctx), { 21, 22, 23, 7, 24, 25, 26, 7,
                                     11, 12, 13, 7, 14, 15, 16, 7 })
    tally.values:add(100, tally.values)
    tally:store(ctx)
    ctx = step(tally, { a }, 2)
    support.equal(tally:load(ctx), { 111, 112, 114, 115 })
    ctx.layer = 0
    support.equal(tally:load(ctx), { 7, 7, 7, 7 })
    tally:put(a, 1, row(0, 1), true)
    ctx.layer = 1
    support.equal(tally:load(ctx), { 112, 112, 116, 115 })
  end)

  it("has as many numbers of a sequence as it is told, whatever its width", function()
    local tally = kv.tally(shape, 2, 7, 3)
    local a, b = sequence(), sequence()
    tally:put(a, 1, row(10, 2))
    local ctx = step(tally, { b, a }, 60)
    support.equal(tally:load(ctx), { 7, 7, 7, 7, 7, 7, 11, 12, 7, 13, 14, 7 })
    -- b gets the second row of what is made, a keeps its own
    local made = kv.arange(dev, "f32", 12):reshape { 2, 2, 3 }
    local chosen = tally:choose(ctx, made, kv.from(dev, "i32", { 1, 3 }))
    support.equal(chosen, { 6, 7, 8, 9, 10, 11, 11, 12, 7, 13, 14, 7 })
    support.equal(tally:load(step(tally, { b }, 1)), { 6, 7, 8, 9, 10, 11 })
    support.raises("per is 0, expected", kv.tally, shape, 2, 7, 0)
  end)

  it("stores the values that it is given, and counts without a load", function()
    local tally = kv.tally(shape, nil, 7)
    local a, b = sequence(), sequence()
    tally:put(a, 1, row(10, 3))
    local ctx = step(tally, { b, a }, 2)
    tally:count(ctx, kv.from(dev, "f32", { 2, 2, 2 }, { 1, 2, 3, 4, 5, 6, 7, 8 }))
    support.equal(tally:load(ctx), { 8, 9, 10, 11, 16, 18, 21, 23 })
    tally:count(ctx, kv.from(dev, "f32", { 2, 1, 2 }, { 1, 2, 3, 4 })) -- for all heads
    support.equal(tally:load(ctx), { 9, 11, 11, 13, 19, 22, 24, 27 })
    ctx = step(tally, { a }, 1)
    tally:store(ctx, kv.from(dev, "f32", { 1, 2, 1 }, { 5, 6 }))
    support.equal(tally:load(step(tally, { a }, 3)), { 5, 22, 13, 6, 27, 16 })
    support.raises("store: values is [2, 2], expected [1, 2, 3]", tally.store, tally,
      ctx, kv.full(dev, "f32", { 2, 2 }, 1))
    support.raises("update_rows: values is i32 [2, 3], expected f32", tally.store, tally,
      ctx, kv.full(dev, "i32", { 1, 2, 3 }, 1))
  end)

  it("is as it was after more sequences than it had room for", function()
    local tally, all = kv.tally(shape, 1), {}
    for i = 1, 40 do
      all[i] = sequence()
      tally:put(all[i], 1, kv.full(dev, "f32", { 1, 2 }, i))
    end
    for i = 1, 40 do
      support.equal(tally:load(step(tally, { all[i] }, 3)), { i, i, 0 })
    end
  end)

  it("gives the rows of closed sequences to others, as new", function()
    local tally = kv.tally(shape)
    for i = 1, 100 do
      local seq = sequence()
      support.equal(tally:load(step(tally, { seq }, 1)), { 0, 0 })
      tally:put(seq, 1, row(i, 1))
      seq.handle = nil
    end
    assert.equal(16, tally.row_count)
  end)

  it("is copied when its sequence is forked, and is its own from then on", function()
    local tally = kv.tally(shape)
    local a, b = sequence(), sequence()
    tally:put(a, 1, row(10, 2))
    tally:inherit(a, b)
    tally:put(a, 1, row(50, 2))
    support.equal(tally:load(step(tally, { b, a }, 2)),
      { 11, 12, 13, 14, 51, 52, 53, 54 })
  end)

  it("is renewed for the sequences that are due", function()
    local tally = kv.tally(shape, 1)
    local a, b = sequence(), sequence()
    local due = {}
    for i = 1, 7 do -- b comes at the third step
      local ctx = step(tally, i < 3 and { a } or { a, b }, 1)
      due[i] = tally:due(ctx, 3)
      tally:renew(ctx, function() return kv.full(dev, "f32", { ctx.seqs, 1, 1 }, i) end)
      if i >= 3 then
        support.equal(tally:load(ctx), { i - (i - 1) % 3, i - i % 3 })
      end
    end
    assert.same({ 1, 0, 1, 1, 0, 1, 1 }, due)
  end)

  it("foresees what those will be renewed with that are due soon", function()
    for ahead = 0, 4 do
      local tally = kv.tally(shape, 1)
      local a, b = sequence(), sequence()
      for i = 1, 9 do -- b comes at the third step
        local ctx = step(tally, i < 3 and { a } or { a, b }, 1)
        tally:due(ctx, 4, ahead)
        local function make() return kv.full(dev, "f32", { ctx.seqs, 1, 1 }, i) end
        tally:renew(ctx, make)
        local want, any, ages = {}, false, { (i - 1) % 4, i >= 3 and (i - 3) % 4 or nil }
        for s, age in ipairs(ages) do
          local is_soon = age > 0 and 4 - age <= ahead
          want[s], any = is_soon and i or i - age, any or is_soon
        end
        local got = tally:foresee(ctx, make)
        if any then support.equal(got, want) else assert.is_nil(got) end
        for s, age in ipairs(ages) do want[s] = i - age end
        support.equal(tally:load(ctx), want, "what is kept")
      end
    end
  end)

  it("finds its places again after a step that failed while it began", function()
    local tally = kv.tally(shape, nil, 7)
    local a, b = sequence(), sequence()
    tally:put(a, 1, row(10, 2))
    tally:put(b, 1, row(20, 2))
    local ctx = step(tally, { a, a }, 2)
    -- what is left to do raises once the first of two sequences was looked at
    local fails = setmetatable({ a }, { __index = function(_, i)
      if i == 2 then error "interrupted" end
    end })
    fails[1] = b
    local later = { seqs = 2, sequences = fails, width = 2, layer = 1,
                    shape_number = ctx.shape_number,
                    new_scores = function() end }
    support.raises("interrupted", tally.begin, tally, later)
    later.sequences = { b, a }
    tally:begin(later)
    support.equal(tally:load(later), { 21, 22, 23, 24, 11, 12, 13, 14 })
  end)

  it("forgets when it is reset", function()
    local tally = kv.tally(shape)
    local a = sequence()
    tally:put(a, 1, row(10, 2))
    tally:reset()
    support.equal(tally:load(step(tally, { a }, 2)), { 0, 0, 0, 0 })
  end)
end

describe("tally", function() support.each_device(check) end)
