--- Who asks a context for scores or a selection owns what he gets until the layer is
-- over: policies that combine two of them.
local kv = require "kvlab"

--- Attention over 40 tokens of one sequence, decoded once with `def`'s functions.
local function decode(def)
  def.name, def.decode, def.prefill = "two", true, false
  def.defaults = { blocks = 4 }
  local cache = kv.cache { device = "cpu", format = "f32", layers = 2, blocks = 32,
    block_size = 4, kv_heads = 2, head_dim = 8 }
  local attention = kv.attention { cache = cache, heads = 4, max_seqs = 2,
    decode_policy = kv.policy.define(def)() }
  local batch, seqs = cache:batch { max_seqs = 2, max_tokens = 64 }, {}
  for i, length in ipairs { 40, 22 } do
    seqs[i] = cache:sequence()
    local q = kv.randn("cpu", "f32", { length, 4, 8 }, { seed = i })
    local k = kv.randn("cpu", "f32", { length, 2, 8 }, { seed = 10 + i })
    batch:append({ seqs[i] }, { length })
    attention:begin(batch, true)
    for layer = 0, 1 do attention:forward(layer, q, k, k) end
  end
  for step = 1, 3 do
    batch:append(seqs, { 1, 1 })
    attention:begin(batch, false)
    local q = kv.randn("cpu", "f32", { 2, 4, 8 }, { seed = 20 + step })
    local k = kv.randn("cpu", "f32", { 2, 2, 8 }, { seed = 30 + step })
    for layer = 0, 1 do attention:forward(layer, q, k, k) end
  end
  cache:close()
end

local function bounds(self, shape)
  self.bounds, self.means = kv.summary.minmax(shape), kv.summary.mean(shape)
end
local function update(self, ev)
  self.bounds:update(ev)
  self.means:update(ev)
end

describe("what a context gives", function()
  it("keeps two scores apart", function()
    local calls = 0
    decode {
      init = bounds, on_prefill_offload = update, on_decode_offload = update,
      score = function(self, ctx)
        calls = calls + 1
        local a = kv.ops.score_minmax(ctx.query, self.bounds, ctx)
        local alone = a:clone()
        local b = kv.ops.score_mean(ctx.query, self.means, ctx)
        local c = kv.ops.score_max_qk(ctx.query, ctx)
        local d, e = ctx:ramp(0, 1), ctx:ramp(5, 7)
        assert.same(alone:list(), a:list())
        assert.are_not.same(a:list(), b:list())
        assert.are_not.same(b:list(), c:list())
        assert.are_not.same(d:list(), e:list())
        local sum, want, b_list = (a + b):list(), alone:list(), b:list()
        for i = 1, #want do
          want[i] = want[i] + b_list[i]
          if want[i] == want[i] and math.abs(want[i]) < math.huge then
            assert.is_true(math.abs(want[i] - sum[i]) < 1e-5)
          end
        end
        return a
      end,
    }
    assert.equal(6, calls)
  end)

  it("keeps two selections and their marks apart", function()
    decode {
      init = bounds, on_prefill_offload = update, on_decode_offload = update,
      select_blocks = function(self, ctx)
        local by_bound, n = ctx:select(kv.ops.score_minmax(ctx.query, self.bounds, ctx),
          self.budget)
        local before, counts = by_bound:list(), n:list()
        local marks = ctx:mark(by_bound)
        local marked = marks:list()
        local newest = ctx:select(ctx:new_scores():arange_(), self.budget)
        local again = ctx:mark(newest)
        assert.same(before, by_bound:list())
        assert.same(counts, n:list())
        assert.same(marked, marks:list())
        assert.are_not.same(marked, again:list())
        marks:fill_(0)
        assert.same(marked, ctx:mark(by_bound):list())
        return by_bound, n
      end,
    }
  end)

  it("gives the same memory again in the next layer, and takes no more", function()
    local places, calls = {}, 0
    decode {
      score = function(_, ctx)
        local a, b = ctx:new_scores(), ctx:new_scores()
        for i, scores in ipairs { a, b } do
          places[i] = places[i] or tostring(scores.ptr)
          assert.equal(places[i], tostring(scores.ptr))
        end
        calls = calls + 1
        return a:fill_(0)
      end,
    }
    assert.equal(6, calls)
    assert.are_not.equal(places[1], places[2])
  end)

  it("is refused where it is none of its own", function()
    decode {
      score = function(_, ctx)
        local foreign = kv.zeros("cpu", "i32", { 2, 2, 4 })
        assert.error_matches(function() ctx:mark(foreign) end,
          "mark: expected a selection that this context made")
        assert.error_matches(function() ctx:new_scores(3) end,
          "scores are for 3 heads, expected 1 or kv_heads = 2")
        return ctx:new_scores():fill_(0)
      end,
    }
  end)
end)
