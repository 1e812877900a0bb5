--- One sequence of random tokens through one layer, prefilled in chunks and decoded,
-- whose queries, keys and values a spec can compute with.
local kv = require "kvlab"

local M = {}

M.SHAPE = { heads = 4, kv_heads = 2, head_dim = 8, block_size = 4 }

--- `policy` opened, `chunks` of the prompt, `steps` decoded. Returns q[t][head],
-- k[t][head] and v[t][head], lists of numbers; policy, attention, seq, cache; and of the
-- last step out (a flat list) and selection (nil: all).
function M.play(policy, chunks, steps)
  local s, dev = M.SHAPE, kv.device "cpu"
  local cache = kv.cache { device = dev, layers = 1, blocks = 32, format = "f32",
    block_size = s.block_size, kv_heads = s.kv_heads, head_dim = s.head_dim }
  local attention = kv.attention { cache = cache, heads = s.heads,
                                   decode_policy = policy }
  local run = { policy = policy, attention = attention, seq = cache:sequence(),
                cache = cache, q = {}, k = {}, v = {} }
  attention.probe = { observe = function(_, _, _, selection)
    run.selection = selection and selection:clone()
  end }
  local function draw(rows, heads, kind)
    local t = kv.randn(dev, "f32", { rows, heads, s.head_dim },
      { seed = 10 * #run.q + kind })
    local flat, into = t:list(), run[({ "q", "k", "v" })[kind]]
    for i = 0, rows - 1 do
      local token = {}
      for h = 0, heads - 1 do
        local at = (i * heads + h) * s.head_dim
        token[h + 1] = { unpack(flat, at + 1, at + s.head_dim) }
      end
      into[#into + 1] = token
    end
    return t
  end
  local batch = cache:batch()
  local function step(n, is_prefill)
    batch:append({ run.seq }, { n })
    attention:begin(batch, is_prefill)
    local k, v = draw(n, s.kv_heads, 2), draw(n, s.kv_heads, 3)
    run.out = attention:forward(0, draw(n, s.heads, 1), k, v):list()
  end
  for _, n in ipairs(chunks) do step(n, true) end
  for _ = 1, steps do step(1, false) end
  return run
end

function M.dot(a, b)
  local sum = 0
  for d = 1, #a do sum = sum + a[d] * b[d] end
  return sum
end

--- The mean of some vectors.
function M.mean(list)
  local mean = {}
  for d = 1, #list[1] do
    mean[d] = 0
    for _, x in ipairs(list) do mean[d] = mean[d] + x[d] / #list end
  end
  return mean
end

--- Keys of a block (from 0) of a KV head (from 1).
function M.keys_of(run, block, kv_head)
  local keys, size = {}, M.SHAPE.block_size
  for t = block * size + 1, math.min((block + 1) * size, #run.k) do
    keys[#keys + 1] = run.k[t][kv_head]
  end
  return keys
end

--- exp(x - max) / sum
function M.softmax(scores)
  local top, sum, weights = math.max(unpack(scores)), 0, {}
  for i, x in ipairs(scores) do
    weights[i] = math.exp(x - top)
    sum = sum + weights[i]
  end
  for i in ipairs(weights) do weights[i] = weights[i] / sum end
  return weights
end

--- The numbers that a tally has for the first n blocks of the run's sequence: flat, KV
-- head after KV head.
function M.tallied(run, tally, n)
  local ctx, flat = run.attention.context, {}
  ctx.layer, ctx.sequences = 0, { run.seq }
  tally:begin(ctx)
  local all, heads = tally:load(ctx):list(), tally.heads
  for head = 0, heads - 1 do
    for b = 1, n do flat[#flat + 1] = all[head * ctx.width + b] end
  end
  return flat
end

return M
