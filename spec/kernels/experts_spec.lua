--- kvl_experts against sums of products in double. A choice may be out of range, and a
-- row may choose an expert twice.
-- Tolerance: in f32, sums of k products, 2e-5. In 16 bits three numbers are rounded, each
-- by at most a step of a number of about 1: what lies between the two products, on a GPU
-- what an expert gives, and the result.
local S = require "spec.support"
local kv = require "kvlab"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"

--- Matrices [experts, rows, k] of a layer, such that products are about 1.
local function matrices(s, rows, k, seed)
  local w = S.randn(cpu, "f32", { s.experts, rows, k }, seed)
  return w:mul(1 / math.sqrt(k), w):cast(s.dtype)
end

local inputs = S.latest(function(s)
  local rng, chosen = S.rng(s.rows + s.experts), {}
  for i = 1, s.rows * s.active do
    local e = s.favours and rng(3) > 0 and s.favours or rng(s.experts)
    if s.strays and rng(4) == 0 then
      e = rng(2) == 0 and -1 - rng(9) or s.experts + rng(9)
    end
    chosen[i] = e
  end
  return {
    x = S.randn(cpu, s.dtype, { s.rows, s.k }, 1), list = chosen,
    before = S.randn(cpu, s.dtype, { s.rows, s.k }, 5),
    chosen = kv.from(cpu, "i32", { s.rows, s.active }, chosen),
    weights = S.randn(cpu, "f32", { s.rows, s.active }, 2),
    gate_up = matrices(s, 2 * s.inner, s.k, 3), down = matrices(s, s.k, s.inner, 4),
  }
end)

local function run(dev, s)
  local i, form = inputs(s), kv.C.KVL_LINEAR_PLAIN
  local out = S.poisoned(dev, s.dtype, { s.rows, s.k })
  if s.adds then out, form = i.before:clone():to(dev), kv.C.KVL_LINEAR_ADD end
  kv.check(kv.C.kvl_experts(i.x:to(dev), i.chosen:to(dev), i.weights:to(dev),
    i.gate_up:to(dev), i.down:to(dev), form, out))
  return out
end

--- The sum over columns of row r (from 0) of matrix e, times x from `at` on.
local function dot(w, first, x, at, k)
  local sum = 0
  for i = 1, k do sum = sum + w[first + i] * x[at + i] end
  return sum
end

local function want(s)
  local i = inputs(s)
  local x, gate_up, down = i.x:list(), i.gate_up:list(), i.down:list()
  local weights, before, out, between = i.weights:list(), i.before:list(), {}, {}
  for r = 0, s.rows - 1 do
    for c = 1, s.k do
      out[r * s.k + c] = s.adds and before[r * s.k + c] or 0
    end
    for j = 1, s.active do
      local e, weight = i.list[r * s.active + j], weights[r * s.active + j]
      if e >= 0 and e < s.experts then
        for n = 0, s.inner - 1 do
          local first = (e * 2 * s.inner + n) * s.k
          local gate = dot(gate_up, first, x, r * s.k, s.k)
          local up = dot(gate_up, first + s.inner * s.k, x, r * s.k, s.k)
          between[n + 1] = reference.round(s.dtype, gate / (1 + math.exp(-gate)) * up)
        end
        for c = 0, s.k - 1 do
          local at = r * s.k + c + 1
          out[at] = out[at]
            + weight * dot(down, (e * s.k + c) * s.inner, between, 0, s.inner)
        end
      end
    end
  end
  return out
end

local function tolerance(s)
  return s.dtype == "f32" and 2e-5 or (2 + s.active) * S.eps[s.dtype]
end

local function name_of(s)
  return ("%d of %d for %d rows of %d, %d between, %s%s%s%s"):format(s.active, s.experts,
    s.rows, s.k, s.inner, s.dtype, s.strays and ", some out of range" or "",
    s.favours and ", one of them liked" or "", s.adds and ", added" or "")
end

describe("experts", function()
  for n, dtype in ipairs { "f32", "f16", "bf16" } do
    for i, size in ipairs {
      { 1, 1, 8, 8, 8 }, { 1, 2, 8, 64, 64 }, { 3, 4, 5, 7, 3 }, { 16, 4, 64, 64, 64 },
      { 40, 3, 9, 128, 24 }, { 5, 2, 3, 33, 64 }, { 0, 2, 4, 8, 8 }, { 4, 0, 4, 8, 8 },
      { 4, 1, 4, 8, 0 }, { 300, 2, 4, 24, 16 },
    } do
      local rows, active, experts, k, inner = unpack(size)
      local s = { rows = rows, active = active, experts = experts, k = k, inner = inner,
                  dtype = dtype, strays = i % 2 == 1, adds = (i + n) % 3 == 0,
                  favours = i % 3 == 0 and experts - 1 }
      S.agrees(name_of(s), function(dev) return run(dev, s) end,
        function() return want(s) end, tolerance(s), tolerance(s))
    end
  end

  -- What kernels have for few and many rows of an expert, and for low and wide cuts of
  -- its matrices; the last cut of a matrix is not full. Hopper's own kernel does not take
  -- the last four.
  for i, size in ipairs { { 1, 4, 64, 512, 192 }, { 2, 8, 128, 256, 1088 },
                          { 16, 4, 64, 1088, 320 }, { 64, 4, 32, 576, 1600 },
                          { 100, 6, 16, 320, 4160 }, { 300, 4, 16, 1088, 832 },
                          { 700, 8, 8, 448, 2112 }, { 513, 2, 4, 4160, 448 },
                          { 2049, 1, 2, 192, 4800 }, { 300, 4, 8, 200, 120 },
                          { 64, 4, 16, 1000, 264 }, { 33, 2, 5, 72, 136 },
                          { 50, 3, 4, 36, 30 } } do
    local rows, active, experts, k, inner = unpack(size)
    for _, dtype in ipairs { "f16", "bf16" } do
      local s = { rows = rows, active = active, experts = experts, k = k, inner = inner,
                  dtype = dtype, strays = i % 2 == 0, adds = i % 4 > 1,
                  favours = i % 3 == 0 and 1 }
      S.it_on_gpu(name_of(s), function(cuda)
        S.close(run(cuda, s), run(cpu, s), tolerance(s), tolerance(s))
      end)
    end
  end

  S.each_device(function(dev)
    it("reads only experts that were chosen, on " .. dev:name(), function()
      local s = { rows = 9, active = 2, experts = 6, k = 64, inner = 64,
                  dtype = "bf16" }
      local i = inputs(s)
      local chosen = kv.full(dev, "i32", { s.rows, s.active }, 4)
      local function with(gate_up, down)
        local out = S.poisoned(dev, s.dtype, { s.rows, s.k })
        return kv.ops.experts(i.x:to(dev), chosen, i.weights:to(dev), gate_up, down, out)
      end
      local gate_up, down = i.gate_up:to(dev), i.down:to(dev)
      local before = with(gate_up, down):list()
      for e = 0, s.experts - 1 do
        if e ~= 4 then
          gate_up:index(e):fill_(0 / 0)
          down:index(e):fill_(0 / 0)
        end
      end
      S.equal(with(gate_up, down), before)
    end)

    it("are recorded in a graph, which follows the choice, on " .. dev:name(), function()
      local s = { rows = 16, active = 4, experts = 12, k = 128, inner = 64,
                  dtype = "f16" }
      local i = inputs(s)
      local chosen, out = i.chosen:to(dev), S.poisoned(dev, s.dtype, { s.rows, s.k })
      local x, weights = i.x:to(dev), i.weights:to(dev)
      local gate_up, down = i.gate_up:to(dev), i.down:to(dev)
      local function launch() kv.ops.experts(x, chosen, weights, gate_up, down, out) end
      local graph = kv.graph(launch, dev)
      for turn = 1, 3 do
        for n = 1, #i.list do i.list[n] = turn < 3 and (n * turn) % s.experts or 5 end
        chosen:copy_(kv.from(cpu, "i32", { s.rows, s.active }, i.list))
        out:fill_(0 / 0)
        graph:replay()
        local replayed = out:list()
        launch()
        S.equal(out, replayed)
      end
      graph:close()
    end)
  end)

  it("refuse what does not fit together", function()
    local s = { rows = 2, active = 1, experts = 3, k = 8, inner = 4, dtype = "f32" }
    local function refused(words, change)
      local i = {}
      for name, value in pairs(inputs(s)) do i[name] = value end
      i.out = S.poisoned(cpu, "f32", { 2, 8 })
      for name, value in pairs(change) do i[name] = value end
      S.fails(kv.C.kvl_experts(i.x, i.chosen, i.weights, i.gate_up, i.down,
        change.form or kv.C.KVL_LINEAR_PLAIN, i.out), "experts", words)
    end
    local function tensor(dtype, ...) return kv.full(cpu, dtype, { ... }, 0) end
    refused("gate_up has 9 rows an expert and down 4 columns, expected twice as many",
      { gate_up = tensor("f32", 3, 9, 8) })
    refused("chosen", { chosen = tensor("i64", 2, 1) })
    refused("weights", { weights = tensor("f32", 2, 2) })
    refused("down", { down = tensor("f32", 4, 8, 4) })
    refused("down", { down = tensor("f16", 3, 8, 4) })
    refused("gate_up has 0 experts, expected 1 to 4096",
      { gate_up = tensor("f32", 0, 8, 8), down = tensor("f32", 0, 8, 4) })
    refused("gate_up has 4097 experts, expected 1 to 4096",
      { gate_up = tensor("f32", 4097, 8, 8), down = tensor("f32", 4097, 8, 4) })
    refused("form is 2, expected KVL_LINEAR_PLAIN or _ADD", { form = 2 })
    refused("out shares memory with x", { out = inputs(s).x })
    S.raises("experts: chosen", kv.ops.experts, inputs(s).x, {}, nil, nil, nil)
  end)
end)
