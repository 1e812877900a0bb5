--- The small kernels between the matrix products of a step, with Llama-8B's shapes: a
-- prefill chunk of 8192 tokens and a decode step of 64. Limit: a plain kernel that
-- reads and writes as many bytes, in the same run.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local HEADS, KV_HEADS, DIM, BLOCK = paged.HEADS, paged.KV_HEADS, paged.DIM, paged.BLOCK
local HIDDEN, INNER = 4096, 14336

local function random(b, seed, ...)
  return kv.randn(b.device, "bf16", { ... }, { seed = seed })
end

local function rmsnorm(n)
  return function(b)
    local x, weight = random(b, 1, n, HIDDEN), random(b, 2, HIDDEN)
    local residual = kv.zeros(b.device, "bf16", { n, HIDDEN })
    local out = kv.full(b.device, "bf16", { n, HIDDEN }, 0 / 0)
    return { bytes = 4 * x:bytes(), written = 2 * x:bytes(),
      run = function() kv.ops.rmsnorm(x, weight, 1e-5, out, residual) end,
      check = function()
        kv.ops.rmsnorm(x, weight, 1e-5, out, residual)
        local last = x:narrow(n - 1, 1):cast "f32"
        local rms = (last * last):mean(1):reshape({ 1, 1 }):sqrt()
        local want = last / rms * weight:cast "f32"
        paged.expect("rmsnorm", out:narrow(n - 1, 1), want, 0.01)
        paged.expect("residual", residual:narrow(n - 1, 1), last, 0)
      end }
  end
end

local function rope(n)
  return function(b)
    local q, list = random(b, 1, n, HEADS, DIM), {}
    for i = 0, DIM / 2 - 1 do list[i + 1] = 500000 ^ (-2 * i / DIM) end
    local inv_freq = kv.from(b.device, "f32", list)
    local positions = kv.arange(b.device, "i32", n)
    return { bytes = 2 * q:bytes(), written = q:bytes(),
      run = function() kv.ops.rope(q, positions, inv_freq) end,
      check = function()
        local before = q:index(n - 1):index(0):list()
        kv.ops.rope(q, positions, inv_freq)
        local after = q:index(n - 1):index(0):list()
        for i = 1, DIM / 2 do
          local angle = (n - 1) * list[i]
          local x, y = before[i], before[i + DIM / 2]
          local want = x * math.cos(angle) - y * math.sin(angle)
          assert(math.abs(after[i] - want) <= 0.02 * (math.abs(x) + math.abs(y)) + 1e-3,
            "rope is off")
        end
      end }
  end
end

local function silu_mul(n)
  return function(b)
    local gate, up = random(b, 1, n, INNER), random(b, 2, n, INNER)
    local out = kv.full(b.device, "bf16", { n, INNER }, 0 / 0)
    return { bytes = 3 * gate:bytes(), written = gate:bytes(),
      run = function() kv.ops.silu_mul(gate, up, out) end,
      check = function()
        kv.ops.silu_mul(gate, up, out)
        local g, u = gate:narrow(n - 1, 1):cast "f32", up:narrow(n - 1, 1):cast "f32"
        paged.expect("silu_mul", out:narrow(n - 1, 1), g:silu() * u, 0.01)
      end }
  end
end

local function append(n)
  return function(b)
    local k, v = random(b, 1, n, KV_HEADS, DIM), random(b, 2, n, KV_HEADS, DIM)
    local cache = kv.full(b.device, "bf16", { 2 * n / BLOCK, 2, KV_HEADS, BLOCK, DIM },
      0 / 0)
    local blocks = paged.random_tables("cpu", { 2 * n }):list()
    local places = {}
    for i = 0, n - 1 do
      places[i + 1] = blocks[math.floor(i / BLOCK) + 1] * BLOCK + i % BLOCK
    end
    places = kv.from(b.device, "i64", places)
    return { bytes = 2 * (k:bytes() + v:bytes()) + places:bytes(),
      written = k:bytes() + v:bytes(),
      run = function() kv.ops.append_kv(k, v, places, cache) end,
      check = function()
        kv.ops.append_kv(k, v, places, cache)
        local last = kv.from(b.device, "i32", { 1 }, { blocks[n / BLOCK] })
        local got = paged.gather(cache, last, 1, 1, BLOCK):narrow(BLOCK - 1, 1)
        paged.expect("V", got, v:index(n - 1):narrow(1, 1):cast "f32", 0)
      end }
  end
end

local function block_minmax(n)
  return function(b)
    local cache = paged.random_memory(b.device, "bf16", n)
    local blocks = paged.random_tables(b.device, { n * BLOCK }):reshape { n }
    local tokens = kv.full(b.device, "i32", { n }, BLOCK)
    local summary = kv.full(b.device, "bf16", { n, 2, KV_HEADS, DIM }, 0 / 0)
    local function run()
      kv.check(kv.C.kvl_block_minmax(cache, nil, blocks, tokens, nil, summary))
    end
    return { run = run, bytes = cache:bytes() / 2 + summary:bytes(),
      written = summary:bytes(), check = function()
      run()
      local last = kv.from(b.device, "i32", { 1 }, { n - 1 })
      local keys = paged.gather(cache, last, KV_HEADS - 1, 0, BLOCK)
      local got = summary:index(n - 1)
      local function row(half) return got:index(half):index(KV_HEADS - 1) end
      paged.expect("min", row(0), keys:min(0), 0)
      paged.expect("max", row(1), keys:max(0), 0)
    end }
  end
end

local function merge(n)
  return function(b)
    local x, y = random(b, 1, n, HEADS, DIM), random(b, 2, n, HEADS, DIM)
    local lse_x = kv.randn(b.device, "f32", { n, HEADS }, { seed = 3 })
    local lse_y = kv.randn(b.device, "f32", { n, HEADS }, { seed = 4 })
    local out = kv.full(b.device, "bf16", { n, HEADS, DIM }, 0 / 0)
    local lse = kv.full(b.device, "f32", { n, HEADS }, 0 / 0)
    local function run()
      kv.check(kv.C.kvl_merge_attention(x, lse_x, y, lse_y, out, lse))
    end
    return { run = run, bytes = 3 * (x:bytes() + lse:bytes()),
      written = x:bytes() + lse:bytes(), check = function()
      run()
      local function last(t) return t:index(n - 1):reshape({ HEADS, -1 }):cast "f32" end
      local ex, ey = last(lse_x):exp(), last(lse_y):exp()
      local want = (last(x) * ex + last(y) * ey) / (ex + ey)
      paged.expect("merge", out:index(n - 1), want, 0.01)
      paged.expect("lse", lse:index(n - 1):reshape { HEADS, 1 }, (ex + ey):log(), 1e-4)
    end }
  end
end

return function(b)
  for _, row in ipairs {
    { "E1", "rmsnorm with residual", rmsnorm }, { "E2", "rope of q", rope },
    { "E3", "silu_mul", silu_mul }, { "E4", "append of K and V", append },
    { "E6", "merge of two attentions", merge },
  } do
    for _, tokens in ipairs { 8192, 64 } do
      local n = math.max(BLOCK, b:shrunk(tokens))
      b:case { id = row[1], name = ("%s, %d tokens"):format(row[2], n),
               setup = row[3](n) }
    end
  end
  local n = b:shrunk(8192)
  b:case { id = "E5", name = ("min and max of %d blocks"):format(n),
           setup = block_minmax(n) }
end
