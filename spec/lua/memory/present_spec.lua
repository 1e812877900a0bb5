--- A draft's step behind a hot cache reads what is on the device, and nothing else.
-- Tolerance: f32 sums of at most 400 products in another order, 2e-5.
local emitting = require "spec.models.emitting"
local kv = require "kvlab"
local reference = require "spec.reference.attention"
local support = require "spec.support"
local tiny = require "spec.models.tiny"

local SLOTS, SIZE, HEADS, KV_HEADS = 40, 4, 4, 2

local POLICIES = {
  quest = function() return kv.policy("quest", { ratio = 0.4, sink = 1, recent = 1 }) end,
  streaming_blocks = function() -- one list
    return kv.policy("streaming_blocks", { ratio = 0.5 })
  end,
  full = function() return kv.policy "full" end, -- no selection
  emitting = function() return emitting {} end,
}

--- An engine whose checks fill the hot cache with what Quest selects, and two sequences.
local function open(dev, policy, o)
  local model = tiny.attentive(dev)
  local s = { policy = policy, newest = {}, seqs = {},
    engine = model:engine {
      policy = kv.policy("quest", { ratio = 0.3, sink = 1, recent = 1 }),
      draft_policy = policy, blocks = 200, block_size = SIZE, chunk = 48, max_seqs = 2,
      max_blocks = 64, graph = o and o.graph,
      offload = { hot_slots = SLOTS, slots = 2, slot_blocks = 2,
                  hot_overlap = o and o.overlap } } }
  for i, length in ipairs { 150, 61 } do
    local prompt = {}
    for t = 1, length do prompt[t] = t * (13 + 4 * i) % 97 end
    s.seqs[i] = s.engine:sequence()
    s.newest[i] = s.engine:prefill(s.seqs[i], prompt):argmax():list()[1]
  end
  return s
end

--- Drafts of `count` tokens, of which `kept` are kept whether they are right or not.
local function round(s, count, kept)
  local e = s.engine
  e:draft(s.seqs, { count, count }, s.newest)
  local tokens, own = {}, count + 1
  for i = 1, 2 do
    tokens[#tokens + 1] = s.newest[i]
    for _ = 1, count do tokens[#tokens + 1] = 0 end
  end
  local says = e:verify(s.seqs, { own, own }, tokens, nil, { count, count }):argmax()
    :list()
  e:take_back { count - kept, count - kept }
  s.newest = { says[kept + 1], says[own + kept + 1] }
end

--- What a draft must not change: the slots, their counters, what crossed the link.
local function state(s)
  local tier, list = s.engine.cache.tier, {}
  local hot = tier.hot
  for _, name in ipairs { "slot_of", "block_of", "order", "counters" } do
    list[name] = table.concat(hot[name]:list(), " ")
  end
  list.to_device = tier:bytes()
  return list
end

--- Blocks of a list that a KV head has on the device; and how many were left out.
local function present(s, ctx, slot_of, row, head, blocks)
  local seq, kept, out = ctx.sequences[row + 1], {}, 0
  local ids = s.seqs[row + 1]:table()
  for _, block in ipairs(blocks) do
    local is_open = block == math.ceil(seq:length() / SIZE) - 1
    if is_open or slot_of[head * 200 + ids[block + 1] + 1] >= 0 then
      kept[#kept + 1] = block
    else
      out = out + 1
    end
  end
  return kept, out
end

--- Compares a layer's output in a draft with the reference; counts what was left out.
local function check_layer(s, ctx, selection, out)
  local e = s.engine
  local cache, layer, width = e.cache, ctx.layer, ctx.width
  local slot_of = cache.tier.hot.slot_of:index(layer):list()
  local lens, tables = ctx.lens:list(), ctx.tables:list()
  local lists = selection and selection:size(1) or 1
  local n, flat = selection and selection:size(2), selection and selection:list()
  local wanted, at = {}, 0
  for row = 0, 1 do
    for head = 0, KV_HEADS - 1 do
      local blocks = {}
      for i = 0, (n or math.ceil(lens[row + 1] / SIZE)) - 1 do
        local list = row * lists + (lists > 1 and head or 0)
        local block = flat and flat[list * n + i + 1] or i
        if block >= 0 then blocks[#blocks + 1] = block end
      end
      local kept, absent = present(s, ctx, slot_of, row, head, blocks)
      s.read, s.left_out = s.read + #kept, s.left_out + absent
      for i = 1, width do wanted[at + i] = kept[i] or -1 end
      at = at + width
    end
  end
  local want = reference.paged_attention {
    layout = { blocks = 200, kv_heads = KV_HEADS, block_size = SIZE, head_dim = 16 },
    q = ctx.query:list(), cache = cache:layer(layer):list(), tables = tables,
    lens = lens, max_blocks = width, heads = HEADS, scale = 0.25, causal = true,
    selection = wanted, selection_heads = KV_HEADS, max_selected = width }
  support.close(out:list(), want, 2e-5, 2e-5, "layer " .. layer)
  local emitted = s.policy.emitted
  if not emitted then return end
  local reads, of_row = emitted.reads:list(), KV_HEADS * width
  for row = 0, 1 do -- nothing is emitted of a block that was not read
    for head = 0, KV_HEADS - 1 do
      local is_read = {}
      for i = 1, width do
        local block = wanted[(row * KV_HEADS + head) * width + i]
        if block >= 0 then is_read[block] = true end
      end
      local mass = emitted.mass:index(row):index(head) -- by token
        :reshape { width, SIZE }:sum(1):list()
      for block = 0, width - 1 do
        local at_block = row * of_row + head * width + block + 1
        if is_read[block] then assert.is_true(reads[at_block] > 0)
        else assert.equal(0, mass[block + 1]) end
      end
    end
  end
end

describe("a draft's step behind a hot cache", function()
  support.each_device(function(dev)
    for _, name in ipairs(support.names(POLICIES)) do
      it(("by %s reads the blocks that are present on %s"):format(name, dev:name()),
        function()
          local s = open(dev, POLICIES[name]())
          s.read, s.left_out = 0, 0
          local selection
          local over = s.engine.attention.over
          function s.engine.attention.over(self, chosen, ctx, ...)
            selection = chosen
            return over(self, chosen, ctx, ...)
          end
          local forward = s.engine.attention.forward
          function s.engine.attention.forward(self, layer, q, k, v, out)
            out = forward(self, layer, q, k, v, out)
            if self.context.is_draft then
              check_layer(s, self.context, selection, out)
            end
            return out
          end
          for number = 1, 6 do round(s, 2 + number % 5, number % 3) end
          assert.is_true(s.read > 0 and s.left_out > 0,
            ("%d read, %d left out"):format(s.read, s.left_out))
          s.engine.cache:close()
        end)
    end

    it("fetches and evicts nothing on " .. dev:name(), function()
      for _, o in ipairs { {}, { graph = true }, { overlap = true } } do
        for _, name in ipairs(support.names(POLICIES)) do
          local s = open(dev, POLICIES[name](), o)
          round(s, 1, 0) -- the sequences' newest blocks come to the buffer
          local rng, draft = support.rng(3), s.engine.draft
          function s.engine.draft(...)
            local before = state(s)
            local drafted = draft(...)
            for what, value in pairs(state(s)) do
              assert.equal(before[what], value, what .. ", by " .. name)
            end
            return drafted
          end
          for _ = 1, 10 do -- takes back over the edges of blocks
            local count = 1 + rng(7)
            round(s, count, rng(count + 1))
          end
          assert.is_true(s.engine.cache.tier.hot:stats().evictions > 0)
          s.engine.cache:close()
        end
      end
    end)
  end)
end)
