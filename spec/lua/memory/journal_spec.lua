--- What a step changes is provisional until it is over: which entries are undone, taken
-- back and forgotten when, each once.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local raises = support.raises

describe("the journal", function()
  local cache = kv.cache { device = "cpu", layers = 1, kv_heads = 1, head_dim = 4,
    block_size = 4, blocks = 4 }
  local journal, said = cache.journal, {}

  --- An entry that says what is called; by_token: it knows take_back.
  local function entry(name, by_token)
    local function say(what) said[#said + 1] = what .. " " .. name end
    return {
      undo = function() say "undo" end, forget = function() say "forget" end,
      take_back = by_token and function(_, first, own, kept)
        say(("rows %d+%d keep %d of"):format(first, own, kept))
      end or nil,
    }
  end
  local function note(name, by_token) journal:note(entry(name, by_token)) end
  local function expect(want)
    local got = table.concat(said, ", ")
    said = {}
    assert.equal(want, got)
  end
  local function transaction(fn) cache:transaction(fn) end

  it("keeps what a step of several tokens changed until the next step", function()
    local step, other = {}, {}
    transaction(function()
      journal:begin(step, true)
      note("length")
      note("number", true)
    end)
    expect "forget length"
    assert.is_true(journal.is_open)
    note("late", true) -- of a step that no transaction holds together
    transaction(function() journal:begin(other, false) end)
    expect ""
    assert.is_false(journal.is_open)
    journal:take_back(step, { 1, 4 }, { 3, 2 }, { 2, 0 })
    expect("rows 1+3 keep 1 of late, rows 1+3 keep 1 of number, "
      .. "forget late, forget number")
    journal:begin(step, true)
    note("guess", true)
    journal:begin(step, false)
    expect "forget guess"
  end)

  it("undoes what was taken back, and steps one inside the other", function()
    local step, other = {}, {}
    raises("the end", transaction, function()
      journal:begin(step, true)
      note("a", true)
      raises("inside", transaction, function()
        journal:begin(other, true)
        note("b", true)
        error "inside"
      end)
      expect "undo b, forget b"
      assert.equal(0, #other)
      journal:take_back(step, { 1 }, { 2 }, { 2 })
      expect "rows 1+2 keep 0 of a"
      journal:begin(step, true)
      note("c", true)
      error "the end"
    end)
    expect "undo c, forget c, undo a, forget a"
    assert.equal(0, #step)
    journal:begin(step, false)
    expect ""
  end)

  it("goes on where an undo fails", function()
    raises("the step fails\n  and it could not be taken back: the undo fails",
      transaction, function()
        note("first")
        local broken = entry("broken")
        broken.undo = function() error("the undo fails", 0) end
        journal:note(broken)
        error("the step fails", 0)
      end)
    expect "forget broken, undo first, forget first"
  end)
end)

support.each_device(function(dev)
  describe("a tally in a decode step of several tokens on " .. dev:name(), function()
    --- A rig whose policy counts `times` times a layer.
    local function counting(times)
      return rig.new(dev, { policy = kv.policy.define {
        name = "counting", decode = true, defaults = { ratio = 0.5 },
        init = function(self, shape) self.counts = kv.tally(shape) end,
        step_begin = function(self, ctx) self.counts:begin(ctx) end,
        select_blocks = function(self, ctx)
          local selection, counts = ctx:select(self.counts:load(ctx), self.budget)
          for _ = 1, times do self.counts:count(ctx, ctx:mark(selection)) end
          return selection, counts
        end,
      } {} })
    end

    it("is stored once for each layer", function()
      local its_rig = counting(2)
      rig.play(dev, { rig = its_rig }, { { "prefill", 1, 90 }, { "decode", 1 } })
      raises("tally: layer 0 is stored twice in a step of several tokens, expected once",
        rig.play, dev, { rig = its_rig },
        { { "prefill", 1, 90 }, { "verify", { 3 }, 1 } })
      its_rig.cache:close()
    end)

    it("cannot take back what only a graph of one's own knows", function()
      local its_rig, s = counting(1), rig.SHAPE
      local attention, seq = its_rig.attention, its_rig.cache:sequence()
      local function step(counts)
        its_rig.batch:append({ seq }, counts)
        attention:begin(its_rig.batch, false)
      end
      local q = kv.randn(dev, "f32", { 3, s.heads, s.head_dim }, { seed = 1 })
      local k = kv.randn(dev, "f32", { 3, s.kv_heads, s.head_dim }, { seed = 2 })
      local out = kv.zeros(dev, "f32", { 3, s.heads, s.head_dim })
      local function layers()
        for layer = 0, s.layers - 1 do attention:forward(layer, q, k, k, out) end
      end
      step { 3 }
      layers()
      attention:take_back { 3 }
      step { 3 }
      local graph = kv.graph(layers, dev)
      step { 3 }
      graph:replay()
      raises("take_back: a policy has a tally, and a graph that no engine recorded "
        .. "computed the step, expected forward or an engine's graph",
        attention.take_back, attention, { 1 })
      step { 3 }
      layers()
      attention:take_back { 1 }
      graph:close()
      its_rig.cache:close()
    end)
  end)
end)
