local kv = require "kvlab"
local support = require "spec.support"

local LAYERS, HEADS, KV_HEADS, DIM, SIZE = 2, 4, 2, 8, 4

local function run(dev, policy, tables, steps, each)
  local cache = kv.cache { device = dev, format = "f32", layers = LAYERS, blocks = 64,
    block_size = SIZE, kv_heads = KV_HEADS, head_dim = DIM, tables = tables }
  local attention = kv.attention { cache = cache, heads = HEADS, decode_policy = policy,
                                   max_seqs = 1, max_blocks = 40 }
  local batch = cache:batch { max_seqs = 1, max_tokens = 64, max_blocks = 40 }
  local seq, outs, seed = cache:sequence(), {}, 0
  local function draw(n, heads)
    seed = seed + 1
    return kv.randn(dev, "f32", { n, heads, DIM }, { seed = seed })
  end
  attention.hooks = { attention_begin = function(ctx)
    if each and not ctx.is_prefill then each(ctx, seq) end
  end }
  for step = 0, steps do
    local n = step == 0 and 57 or 1
    batch:append({ seq }, { n }, nil, nil, nil, step > 0 and policy.evict ~= nil)
    attention:begin(batch, step == 0, step == 0 and { true } or nil)
    for layer = 0, LAYERS - 1 do
      local out = attention:forward(layer, draw(n, HEADS), draw(n, KV_HEADS),
        draw(n, KV_HEADS))
      if step > 0 then outs[#outs + 1] = out:list() end
    end
  end
  cache:close()
  return outs
end

--- The bounds of a sequence's blocks over the `most` largest dimensions of its group's
-- queries: by KV head, a list by block.
local function bounds_of(ctx, i, most)
  local held = ctx:held(ctx.layer, i)
  local keys, q, group = ctx:keys(ctx.layer, i, held), ctx.query:index(i),
    ctx.heads / ctx.kv_heads
  local by_head = {}
  for head = 0, ctx.kv_heads - 1 do
    local k, sizes, order, list = keys:index(head):list(), {}, {}, {}
    for d = 1, DIM do
      order[d], sizes[d] = d, 0
      for g = 0, group - 1 do
        sizes[d] = sizes[d] + math.abs(q:index(head * group + g):list()[d])
      end
    end
    table.sort(order, function(a, b) return sizes[a] > sizes[b] end)
    for block = 0, math.ceil(held / SIZE) - 1 do
      local best = -math.huge
      for g = 0, group - 1 do
        local row, sum = q:index(head * group + g):list(), 0
        for r = 1, most do
          local d, low, high = order[r], math.huge, -math.huge
          for t = block * SIZE, math.min(held, (block + 1) * SIZE) - 1 do
            low, high = math.min(low, k[t * DIM + d]), math.max(high, k[t * DIM + d])
          end
          sum = sum + math.max(row[d] * low, row[d] * high)
        end
        best = math.max(best, sum)
      end
      list[block] = best
    end
    by_head[head] = list
  end
  return by_head
end

--- The blocks that a budget of `blocks` gives: sink, recent and the best.
local function best_of(bounds, blocks, sink, recent)
  local n, order, chosen = #bounds + 1, {}, {}
  for block = 0, n - 1 do
    order[block + 1] = block
    if block < sink or block >= n - recent then bounds[block] = math.huge end
  end
  table.sort(order, function(a, b)
    if bounds[a] ~= bounds[b] then return bounds[a] > bounds[b] end
    return a < b
  end)
  for i = 1, math.min(blocks, n) do chosen[i] = order[i] end
  table.sort(chosen)
  return chosen
end

describe("rocketkv", function()
  support.each_device(function(dev)
    for _, tables in ipairs { "layer", "head" } do
      it("selects by bounds over the largest dimensions, tables by " .. tables, function()
        local policy = kv.policy("rocketkv", { blocks = 4, spare = 2, dims = 0.5,
          min_blocks = 0, window = 8 })
        local select_blocks, compared = policy.select_blocks, 0
        function policy:select_blocks(ctx)
          local selection, counts = select_blocks(self, ctx)
          for i = 0, ctx.seqs - 1 do
            local bounds = bounds_of(ctx, i, DIM / 2)
            for head = 0, ctx.kv_heads - 1 do
              local want = best_of(bounds[head], 4, 1, 2)
              local list = selection:index(i):index(head):list()
              assert.same(want, { unpack(list, 1, #want) })
              compared = compared + 1
            end
          end
          return selection, counts
        end
        run(dev, policy, tables, 9)
        assert.equal(9 * LAYERS * KV_HEADS, compared)
      end)

      it("holds of the prompt what snapkv holds, tables by " .. tables, function()
        local function held(name, o)
          local list = {}
          run(dev, kv.policy(name, o), tables, 3, function(ctx, seq)
            for head = 0, KV_HEADS - 1 do
              list[#list + 1] = seq:held(ctx.layer, head)
            end
            list[#list + 1] = ctx:positions():list()
          end)
          return list
        end
        local function same(o, rocket)
          o.window, rocket.window, rocket.min_blocks = 8, 8, 0
          assert.same(held("snapkv", o), held("rocketkv", rocket))
        end
        same({ ratio = 0.5 }, { ratio = 0.125 })
        same({ ratio = 0.6 }, { ratio = 0.2, spare = 3 })
        same({ blocks = 12 }, { blocks = 4, spare = 3 })
        same({ ratio = { 0.4, 1 } }, { ratio = { 0.1, 0.9 } })
      end)

      it("is quest where all is held and all dimensions count, tables by " .. tables,
        function()
          local o = { ratio = 0.4, min_blocks = 0 }
          local want = run(dev, kv.policy("quest", o), tables, 5)
          o.spare, o.dims = 3, 1
          assert.same(want, run(dev, kv.policy("rocketkv", o), tables, 5))
        end)
    end
  end)

  local function definition(o)
    local all = { name = "mine", decode = true, own_bytes = 0, prompt_only = true,
      defaults = { ratio = 0.5 }, evict = function() end,
      score = function(_, ctx) return ctx:new_scores(1):arange_() end }
    for key, value in pairs(o) do all[key] = value end
    return all
  end

  it("is of a kind that only evicts after prompts", function()
    local def = definition {}
    def.prompt_only = nil
    support.raises("policy mine has evict and score, expected prompt_only = true",
      kv.policy.define, def)
    support.raises("expected a call of kv.policy.hold", kv.attention, { heads = 1,
      cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 8, block_size = 4,
                         kv_heads = 1, head_dim = 8, tables = "head" },
      decode_policy = kv.policy.define(definition {})() })
    for name, why in pairs { snapkv = false,
        quest = "hold is given quest, expected two policies with evict",
        tova = "expected two policies with evict, and prompt_only, as it selects" } do
      local make = kv.policy.define(definition {
        init = function(self) kv.policy.hold(self, name, { ratio = 0.5 }) end })
      local cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 8,
        block_size = 4, kv_heads = 1, head_dim = 8, tables = "head" }
      local function attend()
        kv.attention { cache = cache, heads = 1, decode_policy = make() }
      end
      if why then support.raises(why, attend) else attend() end
    end
  end)
end)
