--- A prefill that expands latents into the keys and values of heads gives what one gives
-- whose queries and results are multiplied with the matrices instead. The goldens of
-- transformers are an independent reference, in spec/models/deepseek_spec.lua.
-- Tolerance: f32, sums in another order; 16-bit numbers are rounded at other places.
local expansion = require "kvlab.policy.expansion"
local kv = require "kvlab"
local support = require "spec.support"

local KEY, VALUE, NOPE, HEADS, BLOCK = 48, 32, 24, 3, 8
local TURNED = KEY - VALUE
local TOKENS = 512 -- the most of all sequences
local TOLERANCE = { f32 = 3e-6, bf16 = 2e-2, f16 = 3e-3 }

local function draw(dev, dtype, shape, seed)
  return support.randn("cpu", "f32", shape, seed):mul(0.5):to(dev):cast(dtype)
end

--- What a layer makes of `tokens` new tokens, from number `first` on.
local function layer_of(dev, dtype, tokens, v_dim, seed)
  return { q = draw(dev, dtype, { tokens, HEADS, NOPE + TURNED }, seed),
           k = draw(dev, dtype, { tokens, 1, KEY }, seed + 1),
           matrices = { keys = draw(dev, dtype, { HEADS, NOPE, VALUE }, 100),
                        values = draw(dev, dtype, { HEADS, v_dim, VALUE }, 101) } }
end

--- The product of x [n, heads, from] and one matrix for each head, [n, heads, to].
local function by_head(x, matrix, transposes)
  local wide = x:transpose(0, 1)
  return (transposes and wide:matmul_t(matrix) or wide:matmul(matrix)):transpose(0, 1)
end

--- Attends in the form that the attention asks for.
local function forward(attention, given, is_expanded)
  local q, n, v_dim = given.q, given.q:size(0), given.matrices.values:size(1)
  assert.equal(is_expanded, attention:expands(given.matrices))
  if is_expanded then
    local out = support.poisoned(q.device, q:type(), { n, HEADS, v_dim })
    return attention:forward(0, q:clone(), given.k:clone(), nil, out, nil, given.matrices)
  end
  local absorbed = kv.tensor(q.device, q:type(), { n, HEADS, KEY })
  kv.check(kv.C.kvl_put_part(by_head(q:narrow(0, NOPE, 2), given.matrices.keys), 2, 0,
    absorbed))
  kv.check(kv.C.kvl_put_part(q:narrow(NOPE, TURNED, 2), 2, VALUE, absorbed))
  local out = attention:forward(0, absorbed, given.k:clone(), nil)
  return by_head(out, given.matrices.values, true)
end

--- Prefills sequences chunk by chunk; returns the results of every chunk.
-- o: dtype, format, v_dim, chunks: for each, the tokens of each sequence
local function prefill(dev, o, expand)
  local size = o.block_size or BLOCK
  local blocks = math.ceil(TOKENS / size) + #o.chunks[1]
  local cache = kv.cache { device = dev, format = o.format or o.dtype, layers = 1,
    blocks = blocks, block_size = size, kv_heads = 1, head_dim = KEY,
    value_dim = VALUE }
  local inv_freq = {}
  for i = 1, TURNED / 2 do inv_freq[i] = 0.5 ^ i end
  local attention = kv.attention { cache = cache, heads = HEADS, max_blocks = blocks,
    inv_freq = kv.from(dev, "f32", inv_freq), scale = 0.3, expand = expand }
  local seqs, results = {}, {}
  for i = 1, #o.chunks[1] do seqs[i] = cache:sequence() end
  local batch = cache:batch { max_seqs = #seqs, max_tokens = 256, max_blocks = blocks }
  for number, counts in ipairs(o.chunks) do
    local total = 0
    for i = 1, #counts do total = total + counts[i] end
    batch:append(seqs, counts)
    attention:begin(batch, true)
    results[number] = forward(attention, layer_of(dev, o.dtype, total, o.v_dim or 40,
      1000 * number), expand)
  end
  return results
end

local function agrees(dev, o)
  local want, got = prefill(dev, o, false), prefill(dev, o, true)
  local tolerance = TOLERANCE[o.dtype]
  for i, one in ipairs(want) do
    support.close(got[i]:cast "f32", one:cast("f32"):list(), tolerance, tolerance,
      ("chunk %d"):format(i))
  end
end

local CHUNKS = { { { 50 } }, { { 1 }, { 40 }, { 3 } }, { { 30, 17 }, { 9, 1 } },
                 { { 8, 0 }, { 0, 70 } } }

support.each_device(function(dev)
  describe("expanded latents on " .. dev:name(), function()
    it("give what absorbed queries give", function()
      for _, chunks in ipairs(CHUNKS) do
        for _, v_dim in ipairs { 40, 16 } do -- as long as a key, and shorter
          agrees(dev, { dtype = "f32", chunks = chunks, v_dim = v_dim })
        end
      end
    end)

    it("may be of any dtype and format, and in blocks of any size", function()
      for _, o in ipairs { { dtype = "bf16" }, { dtype = "f16" },
                           { dtype = "bf16", format = "f8_latent" },
                           { dtype = "f32", block_size = 1 },
                           { dtype = "bf16", block_size = 24 } } do
        o.chunks = { { 30, 17 }, { 9, 20 } }
        agrees(dev, o)
      end
    end)

    it("may be several pieces of a context, and parts of a chunk", function()
      local most = expansion.PIECE_BYTES
      expansion.PIECE_BYTES = 1 -- two tiles
      finally(function() expansion.PIECE_BYTES = most end)
      agrees(dev, { dtype = "f32", chunks = { { 250 }, { 200 }, { 40 } } })
      agrees(dev, { dtype = "bf16", chunks = { { 150, 90 }, { 31, 220 } }, v_dim = 16 })
    end)
  end)
end)

describe("which prefills expand latents", function()
  local cpu = kv.device "cpu"

  --- Whether a step of `count` tokens behind `before` others does, for DeepSeek's sizes.
  local function expands(before, count, o)
    o = o or {}
    local cache = kv.cache { device = cpu, layers = 1, blocks = 512, block_size = 16,
      format = "f32", kv_heads = 1, head_dim = 576, value_dim = 512, offload = o.offload }
    local attention = kv.attention { cache = cache, heads = 2, max_blocks = 512,
      expand = o.expand, prefill_policy = o.prefill_policy,
      decode_policy = o.decode_policy, window = o.window, soft_cap = o.soft_cap }
    local seq = cache:sequence()
    local batch = cache:batch { max_tokens = 4096, max_blocks = 512 }
    if before > 0 then batch:append({ seq }, { before }) end
    batch:append({ seq }, { count })
    attention:begin(batch, o.phase ~= "decode")
    local answer = attention:expands { keys = kv.zeros(cpu, "f32", { 2, 128, 512 }),
                                       values = kv.zeros(cpu, "f32", { 2, 128, 512 }) }
    cache:close()
    return answer
  end

  it("are those that it makes cheaper", function()
    assert.is_true(expands(0, 4000))
    assert.is_true(expands(4000, 2000))
    assert.is_false(expands(4000, 100))
    assert.is_false(expands(0, 200)) -- a query sees half of the keys only
    assert.is_true(expands(4000, 1, { expand = true }))
    assert.is_false(expands(4000, 2000, { expand = false }))
  end)

  it("are dense, and no decode steps", function()
    assert.is_false(expands(0, 1, { expand = true, phase = "decode" }))
    assert.is_false(expands(0, 4000, { prefill_policy = kv.policy("nsa",
      { granularity = "token", index = "random" }) }))
    assert.is_true(expands(0, 4000, { decode_policy = kv.policy "quest" }))
    assert.is_true(expands(0, 4000, { window = 0, soft_cap = 0 }))
    assert.is_false(expands(0, 4000, { window = 64 }))
    assert.is_false(expands(0, 4000, { soft_cap = 30 }))
  end)

  it("have no policy that changes attention, or emits of prompts", function()
    local e = kv.expr
    local hooked = kv.policy.define { name = "hooked", prefill = true, dense = true,
      complete = false, mask = e.position:ge(0), select_blocks = function() end }
    assert.is_false(expands(0, 4000, { prefill_policy = hooked {} }))
    local emitting = require "spec.models.emitting"
    assert.is_false(expands(0, 4000, { decode_policy = emitting {} }))
    support.raises("policies that change the attention of prompts, or emit", expands,
      0, 1, { expand = true, decode_policy = emitting {} })
  end)

  it("have their keys on the device", function()
    assert.is_false(expands(0, 4000, { offload = { max_tokens = 4096 } }))
    support.raises("expand is true, and the attention has KV in host memory, expected "
      .. "dense prefill over latents", expands, 0, 1,
      { offload = { max_tokens = 4096 }, expand = true })
    support.raises("has policy nsa, which selects in prefill", expands, 0, 1,
      { expand = true, prefill_policy = kv.policy("nsa",
        { granularity = "token", index = "random" }) })
    local plain = kv.cache { device = cpu, layers = 1, blocks = 4, block_size = BLOCK,
                             kv_heads = 1, head_dim = 8 }
    support.raises("has keys and values that are no latents", kv.attention,
      { cache = plain, heads = 1, expand = true })
  end)

  it("get matrices, queries and results that fit", function()
    local cache = kv.cache { device = cpu, layers = 1, blocks = 8, block_size = BLOCK,
      kv_heads = 1, head_dim = KEY, value_dim = VALUE, format = "f32" }
    local attention = kv.attention { cache = cache, heads = HEADS, expand = true }
    local seq, batch = cache:sequence(), cache:batch {}
    batch:append({ seq }, { 5 })
    attention:begin(batch, true)
    local given = layer_of(cpu, "f32", 5, 16, 1)
    local m = given.matrices
    support.raises("matrices.values is nil, expected a tensor [3, numbers, 32]",
      attention.expands, attention, { keys = m.keys })
    local function refused(words, q, out, matrices)
      support.raises(words, attention.forward, attention, 0, q, given.k, nil, out, nil,
        matrices or m)
    end
    local out = kv.tensor(cpu, "f32", { 5, HEADS, 16 })
    refused("q is", given.q:narrow(0, 8, 2), out)
    refused("out is nil", given.q, nil)
    refused("out is", given.q, kv.tensor(cpu, "f32", { 5, HEADS, 40 }))
    refused("matrices.values is f32 [1, 48, 32], expected a tensor [3, numbers, 32]",
      given.q, out, { keys = m.keys, values = m.values:reshape { 1, 48, 32 } })
    attention:forward(0, given.q, given.k, nil, out, nil, m)
    batch:append({ seq }, { 1 })
    attention:begin(batch, false)
    support.raises("matrices are given, but expands was false for this step",
      attention.forward, attention, 0, given.q:narrow(0, 1), given.k:narrow(0, 1), nil,
      out:narrow(0, 1), nil, m)
  end)
end)
