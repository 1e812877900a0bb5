--- The products of one layer of Llama-8B's shape, with its norms, SwiGLU and residuals,
-- for the rows of decode steps, drafts and prompts (L1). Several layers with weights of
-- their own are recorded in a graph and replayed, so that a layer's weights are not in
-- the L2, and its kernels start as in a step of a model. Time, bytes and flops are a
-- layer's. Limit: a plain read of its weights, or for many rows its flops. L2: the logits
-- of Llama-3's vocabulary by themselves.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local HIDDEN, INNER, KV = 4096, 14336, 1024
local LAYERS, REPLAYS, EPS = 4, 31, 1e-5

local function random(b, seed, n, k)
  return kv.randn(b.device, "bf16", { n, k }, { seed = seed, std = k ^ -0.5 }):freeze()
end

local function layer(rows)
  return function(b)
    local hidden, inner, few = b:shrunk(HIDDEN), b:shrunk(INNER), b:shrunk(KV)
    local layers, bytes = {}, 0
    for i = 1, LAYERS do
      local w = { qkv = random(b, 4 * i, hidden + 2 * few, hidden),
                  o = random(b, 4 * i + 1, hidden, hidden),
                  gate_up = random(b, 4 * i + 2, 2 * inner, hidden),
                  down = random(b, 4 * i + 3, hidden, inner) }
      for _, weight in pairs(w) do bytes = bytes + weight:bytes() end
      w.norm = kv.randn(b.device, "bf16", { hidden }, { seed = 100 + i, std = 0.5 })
      layers[i] = w
    end
    local function buffer(n) return kv.full(b.device, "bf16", { rows, n }, 0 / 0) end
    local first = kv.randn(b.device, "bf16", { rows, hidden }, { seed = 1 })
    local x, q, k, v, between = buffer(hidden), buffer(hidden), buffer(few), buffer(few),
      buffer(inner)
    local linear = kv.ops.linear
    local function run()
      x:copy_(first)
      for _, w in ipairs(layers) do
        linear(x, w.qkv, { q, k, v }, "plain", w.norm, EPS)
        linear(q, w.o, x, "add")
        linear(x, w.gate_up, between, "swiglu", w.norm, EPS)
        linear(between, w.down, x, "add")
      end
    end
    local function check()
      run()
      local r = rows - 1
      local h = first:narrow(r, 1):cast "f32"
      local function by(y, weight) return y:cast("bf16"):matmul_t(weight):cast "f32" end
      local function normalised(y, norm)
        return y / ((y * y):mean(1):reshape { 1, 1 } + EPS):sqrt() * norm:cast "f32"
      end
      for _, w in ipairs(layers) do
        local part = by(normalised(h, w.norm), w.qkv):reshape { hidden + 2 * few }
        h = h + by(part:narrow(0, hidden):reshape { 1, hidden }, w.o)
        local pair = by(normalised(h, w.norm), w.gate_up):reshape { 2 * inner }
        local gate, up = pair:narrow(0, inner), pair:narrow(inner, inner)
        h = h + by((gate:silu() * up):reshape { 1, inner }, w.down)
      end
      paged.expect("the last row", x:narrow(r, 1), h, 0.05)
    end
    check()
    local step = run
    if b.kind == "cuda" then
      local graph = kv.graph(run, b.device)
      step = function() graph:replay() end
    end
    local us = b:time(step, REPLAYS)
    local few_rows = rows <= 256 -- then the weights take longer than the products
    return { us = us / LAYERS, bytes = few_rows and bytes / LAYERS or nil,
             flops = not few_rows and rows * bytes / LAYERS or nil }
  end
end

local function logits(rows)
  return function(b)
    local hidden, vocabulary = b:shrunk(HIDDEN), b:shrunk(128256)
    local weight = random(b, 1, vocabulary, hidden)
    local x = kv.randn(b.device, "bf16", { rows, hidden }, { seed = 2 })
    local out = kv.full(b.device, "bf16", { rows, vocabulary }, 0 / 0)
    local function run() kv.ops.linear(x, weight, out, "plain") end
    return { run = run, bytes = weight:bytes() + x:bytes() + out:bytes(),
      check = function()
        run()
        local last = x:narrow(rows - 1, 1):cast "f32"
        paged.expect("the last row", out:narrow(rows - 1, 1),
          last:matmul_t(weight:cast "f32"), 0.02)
      end }
  end
end

return function(b)
  for _, rows in ipairs { 1, 4, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64, 80, 128, 256,
                          4096 } do
    b:case { id = "L1", setup = layer(rows),
             name = ("the products of a layer, rows: %d"):format(rows) }
  end
  for _, rows in ipairs { 1, 16, 17, 32, 33, 64 } do
    b:case { id = "L2", setup = logits(rows), name = ("logits, rows: %d"):format(rows) }
  end
end
