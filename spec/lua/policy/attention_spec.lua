--- The equalities of attention over a paged cache: any chunking, any block size, prefill
-- or decode, give the same outputs. Tolerance: f32, sums in another order.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local raises = support.raises
local TOLERANCE = 3e-6

local function slopes(dev)
  local list = {}
  for h = 1, rig.SHAPE.heads do list[h] = 2 ^ -h end
  return kv.from(dev, "f32", list)
end

-- What attention may be beside plain.
local KINDS = {
  ["a window"] = { window = 21 }, ["a soft cap"] = { soft_cap = 0.4 },
  ["an f8e4m3 cache"] = { format = "f8e4m3" },
  ["all three"] = { window = 21, soft_cap = 0.4, format = "f8e4m3" },
  ["an int8 cache"] = { format = "int8" },
  ["a window and a cap over int8"] = { window = 21, soft_cap = 0.4, format = "int8" },
}

--- A copy of options, with more.
local function merged(...)
  local all = {}
  for _, options in ipairs { ... } do
    for key, value in pairs(options) do all[key] = value end
  end
  return all
end

local function close(got, want, what)
  support.close(got, want, TOLERANCE, TOLERANCE, what)
end

--- Steps of a decode with options that must not matter.
local function same_steps(dev, o, other, what)
  local want, got = rig.decode(dev, o), rig.decode(dev, merged(o, other))
  for i, step in ipairs(want.steps) do close(got.steps[i].out, step.out, what) end
end

--- Chunked = whole, decode after prefill = prefill, full budget = dense, offloaded =
-- resident; and not what plain attention gives.
local function equalities(dev, with)
  local prompt = merged({ length = 150 }, with)
  local whole = rig.prefill(dev, prompt)
  assert.has_error(function()
    support.close(rig.prefill(dev, { length = 150 }), whole, 1e-3, 1e-3)
  end)
  for _, chunk in ipairs { 1, 15, 64 } do
    close(rig.prefill(dev, merged(prompt, { chunk = chunk })), whole, "chunk " .. chunk)
  end
  local size = with.format == "int8" and 24 or 5
  close(rig.prefill(dev, merged(prompt, { block_size = size })), whole, "block_size")
  local ends = { chunk = 1, decode_tail = true }
  close(rig.prefill(dev, merged(prompt, ends)), whole, "decode")
  for _, offload in ipairs { { slots = 1, slot_blocks = 1 }, { slots = 3 } } do
    close(rig.prefill(dev, merged(prompt, { chunk = 40, offload = offload })), whole,
      "prefill through the ring")
  end
  local o = merged({ lengths = { 1, 16, 33, 100 }, steps = 5, policy = "quest",
                     options = { ratio = 0.4 } }, with)
  for _, offload in ipairs { { slots = 2, slot_blocks = 1 }, { hot_slots = 320 },
                             { hot_slots = 320, hot_overlap = true } } do
    same_steps(dev, o, { offload = offload }, "decode from host memory")
  end
  o.options = { ratio = 1 }
  same_steps(dev, o, { policy = "full", options = {} }, "a full budget")
end

local function check(dev)
  describe("attention on " .. dev:name(), function()
    it("does not depend on how a prompt is cut into chunks", function()
      local whole = rig.prefill(dev, { length = 150 })
      for _, chunk in ipairs { 1, 15, 16, 64 } do
        local cut = rig.prefill(dev, { length = 150, chunk = chunk })
        support.close(cut, whole, TOLERANCE, TOLERANCE, "chunk " .. chunk)
      end
    end)

    it("decodes what a prefill computes", function()
      local whole = rig.prefill(dev, { length = 50 })
      local decoded = rig.prefill(dev, { length = 50, chunk = 1, decode_tail = true })
      support.close(decoded, whole, TOLERANCE, TOLERANCE)
    end)

    it("does not depend on the block size", function()
      local whole = rig.prefill(dev, { length = 100 })
      for _, size in ipairs { 3, 8, 32 } do
        local other = rig.prefill(dev, { length = 100, chunk = 33, block_size = size })
        support.close(other, whole, TOLERANCE, TOLERANCE, "block_size " .. size)
      end
    end)

    it("biases by distance with ALiBi, in prefill as in decode", function()
      local plain = rig.prefill(dev, { length = 40 })
      local o = { length = 40, alibi = slopes(dev) }
      local whole = rig.prefill(dev, o)
      assert.has_error(function() support.close(whole, plain, 1e-3, 1e-3) end)
      o.chunk, o.decode_tail = 1, true
      support.close(rig.prefill(dev, o), whole, TOLERANCE, TOLERANCE)
    end)

    for name, with in pairs(KINDS) do
      it("keeps these equalities with " .. name, function() equalities(dev, with) end)
    end
  end)
end

support.each_device(check)

describe("attention", function()
  local dev = kv.device "cpu"
  local cache = kv.cache { device = dev, layers = 1, blocks = 8, block_size = 4,
                           kv_heads = 2, head_dim = 8, format = "f32" }

  it("refuses a policy in a phase that it does not declare", function()
    raises("quest does not select in prefill", kv.attention,
      { cache = cache, heads = 4, prefill_policy = kv.policy "quest" })
  end)

  it("refuses heads that are no multiple of kv_heads", function()
    raises("heads is 3, expected a multiple of kv_heads = 2", kv.attention,
      { cache = cache, heads = 3 })
  end)

  it("refuses queries with other heads, and appends nothing", function()
    local attention, batch = kv.attention { cache = cache, heads = 4 }, cache:batch()
    local seq = cache:sequence()
    local k = kv.ones(dev, "f32", { 3, 2, 8 })
    cache:layer(0):fill_(7)
    batch:append({ seq }, { 3 })
    attention:begin(batch, true)
    for words, dims in pairs { ["q is [3, 8, 8]"] = { 3, 8, 8 },
                               ["q is [3, 4, 16]"] = { 3, 4, 16 },
                               ["q is [12, 8]"] = { 12, 8 } } do
      raises(words .. ", expected [tokens, 4, 8]: its heads and head_dim",
        attention.forward, attention, 0, kv.zeros(dev, "f32", dims), k, k)
    end
    assert.equal(7, cache:layer(0):max():item())
    assert.equal(7, cache:layer(0):min():item())
    attention:forward(0, kv.zeros(dev, "f32", { 3, 4, 8 }), k, k)
    assert.equal(1, cache:layer(0):min():item())
    seq:close()
  end)

  it("refuses a decode step in which a sequence has no new token", function()
    local attention = kv.attention { cache = cache, heads = 4 }
    local batch = cache:batch()
    batch:append({ cache:sequence(), cache:sequence() }, { 2, 0 })
    raises("begin: sequence 2 has no new token, expected one or more in a decode step",
      attention.begin, attention, batch, false)
  end)

  it("refuses tables that are wider than its max_blocks", function()
    local attention = kv.attention { cache = cache, heads = 4, max_blocks = 3 }
    local batch, seq = cache:batch { max_blocks = 4 }, cache:sequence()
    batch:append({ seq }, { 1 })
    raises("begin: the batch's tables have 4 columns, expected at most the attention's "
      .. "max_blocks = 3", attention.begin, attention, batch, true)
    seq:close()
  end)

  it("refuses a draft tree in a prefill, with ALiBi and with a window", function()
    local batch = cache:batch()
    batch:append({ cache:sequence() }, { 3 }, nil, { 0, 1, 1 })
    local function refuses(lacks, o, is_prefill)
      o.cache, o.heads = cache, 4
      local attention = kv.attention(o)
      raises("begin: the batch has a draft tree, which " .. lacks .. " does not go with",
        attention.begin, attention, batch, is_prefill)
    end
    refuses("a prefill step", {}, true)
    refuses("a window", { window = 4 }, false)
    refuses("a window", { window = { 4 } }, false)
    refuses("ALiBi", { alibi = kv.zeros(dev, "f32", { 4 }) }, false)
  end)

  it("takes back only what the last decode step of several tokens appended", function()
    local attention = kv.attention { cache = cache, heads = 4 }
    local batch, seq = cache:batch(), cache:sequence()
    local function take_back(...) attention:take_back(...) end
    local none = "take_back: the last step was none that decoded several tokens"
    raises(none, take_back, { 0 })
    batch:append({ seq }, { 3 })
    attention:begin(batch, true)
    raises(none, take_back, { 1 })
    batch:append({ seq }, { 2 })
    attention:begin(batch, false)
    local only = "expected 0 ... 2, the new tokens of the sequence"
    raises("take_back: count 1 is 3, " .. only, take_back, { 3 })
    raises("take_back: count 1 is 0.5, " .. only, take_back, { 0.5 })
    raises("take_back: count 1 is nil, " .. only, take_back, {})
    seq:truncate(4)
    raises("take_back: sequence 1 has 4 tokens, expected 5, as at the end of the step",
      take_back, { 1 })
    seq:truncate(0)
    batch:append({ seq }, { 5 })
    attention:begin(batch, false)
    take_back { 2 }
    assert.equal(3, seq:length())
    raises(none, take_back, { 1 })
  end)

  it("shows late policies what is cached", function()
    local batch, seq = cache:batch(), cache:sequence()
    local function step(attention, n, seed)
      batch:append({ seq }, { n })
      attention:begin(batch, n > 1)
      local function draw(heads, kind)
        return kv.randn(dev, "f32", { n, heads, 8 }, { seed = seed + kind })
      end
      return attention:forward(0, draw(4, 1), draw(2, 2), draw(2, 3))
    end
    local o = { blocks = 2 }
    local early = kv.attention { cache = cache, heads = 4,
                                 decode_policy = kv.policy("quest", o) }
    step(early, 18, 10)
    local late = kv.attention { cache = cache, heads = 4,
                                decode_policy = kv.policy("quest", o) }
    late:adopt { seq }
    local want = step(early, 1, 20)
    seq:truncate(18)
    support.equal(step(late, 1, 20), want)
  end)
end)

describe("batch", function()
  local cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 8,
                           block_size = 4, kv_heads = 1, head_dim = 8 }

  it("names the limit that an append breaks, and changes nothing", function()
    local batch = cache:batch { max_seqs = 2, max_tokens = 10, max_blocks = 2 }
    local a, b, c = cache:sequence(), cache:sequence(), cache:sequence()
    raises("3 sequences, expected at most max_seqs = 2", batch.append, batch, { a, b, c },
      { 1, 1, 1 })
    raises("11 tokens, expected at most max_tokens = 10", batch.append, batch, { a, b },
      { 5, 6 })
    raises("sequence 1 would have 3 blocks", batch.append, batch, { a }, { 9 })
    assert.equal(0, a:length())
    a:close()
    raises("closed", batch.append, batch, { a }, { 1 })
    local other = kv.cache { device = kv.device "cpu", layers = 1, blocks = 8,
                             block_size = 4, kv_heads = 1, head_dim = 8 }
    raises("another cache", batch.append, batch, { other:sequence() }, { 1 })
  end)

  it("says which blocks got tokens and how many are valid in each", function()
    local batch, seq = cache:batch(), cache:sequence()
    batch:append({ seq }, { 6 })
    assert.same({ 4, 2 }, batch.block_tokens:list())
    batch:append({ seq }, { 3 })
    assert.same({ 4, 1 }, batch.block_tokens:list())
    assert.same({ 6, 7, 8 }, batch.positions:list())
    local blocks = seq:table()
    assert.same({ blocks[2], blocks[3] }, batch.blocks:list())
    assert.same({ 9 }, batch.lens:list())
    assert.same({ 0, 3 }, batch.starts:list())
  end)
end)
