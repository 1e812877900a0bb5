-- Tolerance: in f32, sums of k products, 1e-5. In f16 and bf16 there are up to three
-- roundings, each of which may differ by a step: of h after the norm, of y where it is
-- computed on its own first, and of the result. Results here are about 1.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local NUMBER = { plain = kv.C.KVL_LINEAR_PLAIN, add = kv.C.KVL_LINEAR_ADD,
                 swiglu = kv.C.KVL_LINEAR_SWIGLU }

local function silu(x) return x / (1 + math.exp(-x)) end

--- The inputs of a case: weights so small that y is about 1.
local inputs = S.latest(function(s)
  local weight = S.randn(cpu, "f32", { s.n, s.k }, 2)
  weight:mul(1 / math.sqrt(s.k), weight)
  return {
    x = S.randn(cpu, s.dtype, { s.rows, s.k }, 1), weight = weight:cast(s.dtype),
    norm = s.extras and S.randn(cpu, s.norm_dtype or s.dtype, { s.k }, 3),
    bias = s.extras and S.randn(cpu, s.dtype, { s.n }, 4),
    before = S.randn(cpu, s.out or s.dtype, { s.rows, s.outputs }, 5),
  }
end)

local function run(dev, s)
  local i = inputs(s)
  local out = s.form == "add" and i.before:clone():to(dev)
    or S.poisoned(dev, s.out or s.dtype, { s.rows, s.outputs })
  kv.check(kv.C.kvl_linear(i.x:to(dev), i.norm and i.norm:to(dev) or nil, 1e-5,
    i.weight:to(dev), i.bias and i.bias:to(dev) or nil, NUMBER[s.form], out))
  return out
end

local function want(s)
  local i = inputs(s)
  local h, before, out = i.x:list(), i.before:list(), {}
  if i.norm then
    h = reference.map(function(v) return reference.round(s.dtype, v) end,
      reference.rmsnorm(h, i.norm:list(), 1e-5))
  end
  local y = reference.matmul(h, i.weight:list(),
    { batch = 1, m = s.rows, n = s.n, k = s.k, transposed = true })
  local bias = i.bias and i.bias:list()
  for r = 0, s.rows - 1 do
    local function at(j) return y[r * s.n + j] + (bias and bias[j] or 0) end
    for j = 1, s.outputs do
      local place = r * s.outputs + j
      if s.form == "swiglu" then
        out[place] = silu(at(j)) * at(j + s.outputs)
      else
        out[place] = at(j) + (s.form == "add" and before[place] or 0)
      end
    end
  end
  return out
end

local function case(s)
  s.outputs = s.form == "swiglu" and s.n / 2 or s.n
  local rel = s.dtype == "f32" and 1e-5 or 4 * S.eps[s.dtype]
  S.agrees(("%s: %d x %d by %d, %s into %s%s"):format(s.form, s.rows, s.k, s.n, s.dtype,
    s.out or s.dtype, s.extras and ", normalised, with a bias" or ""),
    function(dev) return run(dev, s) end, function() return want(s) end, 2 * rel, rel)
end

describe("linear", function()
  local shapes = {}
  for _, form in ipairs { "plain", "add", "swiglu" } do
    for _, size in ipairs { { 1, 32, 8 }, { 1, 1056, 66 }, { 2, 576, 34 },
                            { 4, 4096, 130 }, { 3, 40, 6 }, { 5, 64, 20 },
                            { 49, 32, 10 }, { 0, 8, 4 }, { 1, 1, 2 }, { 8, 4096, 66 },
                            { 1, 14336, 12 }, { 7, 14336, 12 }, { 9, 192, 130 },
                            { 16, 576, 66 }, { 17, 128, 34 }, { 30, 4096, 98 },
                            { 33, 192, 610 }, { 64, 576, 66 }, { 80, 320, 258 },
                            { 97, 64, 1030 }, { 128, 576, 34 }, { 129, 64, 20 } } do
      for _, dtype in ipairs { "f32", "f16", "bf16" } do
        for _, extras in ipairs { false, true } do
          shapes[#shapes + 1] = { form = form, rows = size[1], k = size[2], n = size[3],
                                  dtype = dtype, extras = extras }
        end
      end
    end
    shapes[#shapes + 1] = { form = form, rows = 2, k = 96, n = 24, dtype = "bf16",
                            out = "f32", norm_dtype = "f32", extras = true }
  end
  for _, c in ipairs(S.sample(shapes)) do case(c) end

  for at, o in ipairs { { 0 }, { 1 }, { 1, joined = true }, { 3 }, { 8 }, { 49 }, { 64 },
                        { 65 }, { 90 }, { 130, sizes = { 16, 0, 6 } } } do
    local rows = o[1]
    local sizes = o.sizes or at % 2 == 0 and { 12, 4, 6 } or { 16, 8, 24 }
    local n = sizes[1] + sizes[2] + sizes[3]
    for turn, dtype in ipairs { "f32", "bf16", "bf16", "bf16" } do
      local out = turn == 3 and "f32" or dtype
      local last = turn == 4 and "f32" or out -- of the last part
      local s = { form = "plain", rows = rows, k = 64, n = n, outputs = n, dtype = dtype,
                  out = out, extras = (rows + turn) % 2 == 1 }
      local rel = dtype == "f32" and 1e-5 or 4 * S.eps.bf16
      local name = ("%d rows of %s in parts of %s, %s and %s, %d columns%s"):format(rows,
        dtype, out, out, last, n, o.joined and ", joined" or "")
      S.agrees(name, function(dev)
        local i, parts, gathered = inputs(s), {}, {}
        -- Several rows: a tensor for each part. One row, joined: the parts follow each
        -- other in memory, and the op takes them for one.
        local row, first = S.poisoned(dev, out, { n }), 0
        for p, size in ipairs(sizes) do
          parts[p] = o.joined and row:narrow(first, size):reshape { 1, size }
            or S.poisoned(dev, p == #sizes and last or out, { rows, size })
          first = first + size
        end
        kv.ops.linear(i.x:to(dev), i.weight:to(dev), parts, "plain",
          i.norm and i.norm:to(dev) or nil, 1e-5, i.bias and i.bias:to(dev) or nil)
        for r = 0, rows - 1 do
          for _, part in ipairs(parts) do
            for _, y in ipairs(part:index(r):list()) do gathered[#gathered + 1] = y end
          end
        end
        return gathered
      end, function() return want(s) end, 2 * rel, rel)
    end
  end

  -- Frozen weights are read while the kernels before still run; x and out must not be.
  for _, rows in ipairs { 1, 4, 8, 16, 50, 128 } do
    for _, form in ipairs { "add", "swiglu" } do
      local s = { form = form, rows = rows, k = 512, n = 600, dtype = "bf16",
                  extras = true, outputs = form == "swiglu" and 300 or 600 }
      S.agrees(("%s: %d rows right after they are written, frozen weights"):format(form,
        rows), function(dev)
        local i = inputs(s)
        local weight = i.weight:to(dev):freeze()
        local norm, bias = i.norm:to(dev), i.bias:to(dev)
        local half, before, out = i.x:to(dev):mul(0.5), i.before:to(dev), nil
        for _ = 1, 3 do -- back to back
          out = form == "add" and before:clone()
            or S.poisoned(dev, "bf16", { rows, s.outputs })
          kv.ops.linear(half:add(half), weight, out, form, norm, 1e-5, bias)
        end
        return out
      end, function() return want(s) end, 8 * S.eps.bf16, 4 * S.eps.bf16)
    end
  end

  for rows = 1, 3 do
    for _, extras in ipairs { false, true } do
      local s = { form = "plain", rows = rows, k = 40, n = 22, outputs = 22,
                  dtype = "bf16", extras = extras }
      S.agrees(("views that begin anywhere: %d rows%s"):format(rows,
        extras and ", normalised, with a bias" or ""), function(dev)
        local i = inputs(s)
        local function view(x) -- two bytes after a multiple of 16
          local room = S.poisoned(dev, "bf16", { tonumber(x.count) + 1 })
          local flat = room:narrow(1, tonumber(x.count)):copy_(x:reshape { -1 })
          return flat:reshape(x:dims())
        end
        local out = view(S.poisoned(dev, "bf16", { rows, 22 }))
        kv.ops.linear(view(i.x), view(i.weight), out, "plain",
          i.norm and view(i.norm) or nil, 1e-5, i.bias and view(i.bias) or nil)
        return out
      end, function() return want(s) end, 8 * S.eps.bf16, 4 * S.eps.bf16)
    end
  end

  S.it_on_cpu("goes panel by panel through many rows", function()
    local s = { form = "swiglu", rows = 2100, k = 16, n = 8, outputs = 4, dtype = "f32",
                extras = true }
    S.close(run(cpu, s), want(s), 2e-5, 1e-5)
  end)

  S.each_device(function(dev)
    it("gives the same for weights that are frozen: " .. dev:name(), function()
      -- products that depend on each other, so that each begins before its input is there
      local n = dev:is_cpu() and 2048 or 4096
      local function chain(is_frozen)
        local x = S.randn(dev, "bf16", { 1, n }, 1)
        local weights = {}
        for i = 1, 4 do
          local w = S.randn(dev, "f32", { n, n }, 1 + i):mul(1 / 64)
          weights[i] = w:cast "bf16"
          if is_frozen then weights[i]:freeze() end
        end
        for _ = 1, dev:is_cpu() and 1 or 8 do
          for i = 1, 4 do
            local out = S.poisoned(dev, "bf16", { 1, n })
            kv.ops.linear(x, weights[i], out, "plain")
            x = out
          end
        end
        return x
      end
      S.equal(chain(false), chain(true))
    end)

    it("keeps NaN and infinity in their own row: " .. dev:name(), function()
      local x = S.randn(cpu, "bf16", { 2, 64 }, 1):clone()
      x:index(1):fill_(0 / 0)
      local weight = S.randn(cpu, "bf16", { 24, 64 }, 2):clone()
      weight:index(7):fill_(1 / 0)
      local out = S.poisoned(dev, "f32", { 2, 24 })
      kv.ops.linear(x:to(dev), weight:to(dev), out, "plain")
      local list = out:list()
      for j = 1, 24 do
        assert.equal(j == 8, list[j] ~= list[j] or math.abs(list[j]) == math.huge)
        assert.is_true(list[24 + j] ~= list[24 + j])
      end
    end)
  end)

  it("refuses shapes, forms and memory that do not fit", function()
    local function zeros(...) return kv.zeros(cpu, "f32", { ... }) end
    local x, w, out = zeros(2, 8), zeros(6, 8), zeros(2, 6)
    local function call(form, o, norm, eps, bias)
      return kv.C.kvl_linear(x, norm, eps or 1e-5, w, bias, NUMBER[form] or form, o)
    end
    S.fails(call("plain", zeros(2, 5)), "linear", "out has 5 columns", "6 rows",
      "as many columns as rows")
    S.fails(call("swiglu", out), "out has 6 columns", "half as many")
    S.fails(call(3, out), "form is 3", "KVL_LINEAR_PLAIN")
    S.fails(call("plain", out, zeros(7)), "norm is f32 [7]", "k=8")
    S.fails(call("plain", out, zeros(8), -1), "eps is -1")
    S.fails(call("plain", out, nil, 0, zeros(5)), "bias is f32 [5]")
    S.fails(kv.C.kvl_linear(x, nil, 0, zeros(8, 8), nil, 1, x),
      "out shares memory with x")
    S.raises("linear: form is \"adds\", expected one of", kv.ops.linear, x, w, out,
      "adds")
    local one, five = zeros(2, 1), zeros(2, 5)
    S.raises("out has 3 columns and weight 6 rows", kv.ops.linear, x, w,
      { one, one:clone(), one:clone() }, "plain")
    S.raises("out[2] is 3, expected a tensor", kv.ops.linear, x, w, { one, 3 }, "plain")
    S.raises("outs[1] is bf16 [2, 5], expected f32", kv.ops.linear, x, w,
      { one, five:cast "bf16" }, "plain")
    local three = zeros(2, 3)
    S.raises("out shares memory with another out", kv.ops.linear, x, w,
      { three, three }, "plain")
    S.raises("out has 6 tensors, expected 1 to 5", kv.ops.linear, x, w,
      { one, one, one, one, one, one }, "plain")
    S.raises("out is a list, expected a tensor for form \"add\"", kv.ops.linear, x, w,
      { one, five }, "add")
    S.fails(kv.C.kvl_linear_parts(x, nil, 0, w, nil, nil, 1), "linear_parts",
      "outs has 0 tensors")
    S.raises("outs[1] is frozen", kv.ops.linear, x, w, { one, five:freeze() }, "plain")
  end)
end)
