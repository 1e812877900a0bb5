-- Tolerance: a mean, a sum of squares, a root and two products in f32, of numbers about 1
-- around a mean of 3: 2e-6; f16 and bf16 add half a step.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

local function inputs(dtype, weight_dtype, rows, dim)
  return S.randn(cpu, dtype, { rows, dim }, 1):add(3):cast(dtype),
    S.randn(cpu, weight_dtype, { dim }, 2), S.randn(cpu, weight_dtype, { dim }, 3)
end

--- LayerNorm in Lua's numbers.
local function want(x, weight, bias, rows, dim, eps)
  local out = {}
  for r = 0, rows - 1 do
    local mean, square = 0, 0
    for i = 1, dim do mean = mean + x[r * dim + i] / dim end
    for i = 1, dim do square = square + (x[r * dim + i] - mean) ^ 2 / dim end
    for i = 1, dim do
      out[r * dim + i] = (x[r * dim + i] - mean) / math.sqrt(square + eps) * weight[i]
        + bias[i]
    end
  end
  return out
end

describe("layernorm", function()
  for _, size in ipairs { { 1, 1 }, { 3, 37 }, { 5, 128 }, { 16, 256 }, { 130, 1000 },
                          { 2, 4096 }, { 2, 5001 }, { 0, 8 } } do
    for _, dtypes in ipairs { { "f32", "f32" }, { "bf16", "bf16" }, { "f16", "f32" } } do
      local rows, dim, dtype = size[1], size[2], dtypes[1]
      local text = ("%dx%d %s, weight %s"):format(rows, dim, dtype, dtypes[2])
      local rel = 2e-6 + (dtype == "f32" and 0 or 2 * S.eps[dtype])
      local function expected()
        local x, weight, bias = inputs(dtype, dtypes[2], rows, dim)
        return want(x:list(), weight:list(), bias:list(), rows, dim, 1e-5)
      end
      S.agrees("normalises " .. text, function(dev)
        local x, weight, bias = inputs(dtype, dtypes[2], rows, dim)
        local out = S.poisoned(dev, dtype, { rows, dim })
        return kv.ops.layernorm(x:to(dev), weight:to(dev), bias:to(dev), 1e-5, out)
      end, expected, 4e-6 + (dtype == "f32" and 0 or S.eps[dtype]), rel)
      S.agrees("normalises in place " .. text, function(dev)
        local x, weight, bias = inputs(dtype, dtypes[2], rows, dim)
        x = x:clone():to(dev)
        kv.ops.layernorm(x, weight:to(dev), bias:to(dev), 1e-5, x)
        return x
      end, expected, 4e-6 + (dtype == "f32" and 0 or S.eps[dtype]), rel)
    end
  end

  S.agrees("takes rows that begin anywhere", function(dev)
    local x, weight, bias = inputs("bf16", "bf16", 3, 40)
    local room = S.poisoned(dev, "bf16", { 121 })
    local own = room:narrow(1, 120):copy_(x:reshape { 120 }):reshape { 3, 40 }
    return kv.ops.layernorm(own, weight:to(dev), bias:to(dev), 1e-5)
  end, function()
    local x, weight, bias = inputs("bf16", "bf16", 3, 40)
    return want(x:list(), weight:list(), bias:list(), 3, 40, 1e-5)
  end, S.eps.bf16, 2 * S.eps.bf16)

  S.it_on_cpu("refuses what does not fit", function()
    local x, w = kv.zeros(cpu, "f32", { 2, 8 }), kv.ones(cpu, "f32", { 8 })
    S.raises("bias is f32 [4], expected f32 [dim=8]", kv.ops.layernorm, x, w,
      kv.zeros(cpu, "f32", { 4 }), 1e-5)
    S.raises("eps is -1, expected >= 0", kv.ops.layernorm, x, w, w, -1)
    S.raises("bias is nil, expected a tensor", kv.ops.layernorm, x, w, nil, 1e-5)
  end)
end)
