--- Exact: a division and a rounding, which every device does alike.
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, dims in ipairs { { 0, 64 }, { 1, 128 }, { 7, 1 }, { 3, 5, 32 }, { 2, 33 },
                          { 130, 64 }, { 4, 1000 }, { 3, 0 } } do
    cases[#cases + 1] = { dtype = dtype, dims = dims }
  end
end

local function input(c)
  return support.randn(kv.device "cpu", c.dtype, c.dims, 3)
end

local function run(dev, x, is_ue8m0)
  local dims = x:dims()
  local out = support.poisoned(dev, "f8e4m3", dims)
  dims[#dims] = nil
  local scales = support.poisoned(dev, "f32", dims)
  kv.check(kv.C.kvl_quantise_rows(x:to(dev), is_ue8m0 or 0, out, scales))
  return out, scales
end

--- Rows next to nothing, at the least amax, with NaN and infinity, and of zeros.
local function odd_rows()
  local rows, inf, nan = {}, math.huge, 0 / 0
  for _, row in ipairs { { 0, -0.0, 1e-5, -1e-5 }, { 1e-4, 5e-5, -1e-4, 0 },
                         { nan, 3, -7, 0 }, { inf, 1, -inf, nan },
                         { 448, -448, 1, 2 ^ -9 }, { 1e38, -3e38, 1, 0 } } do
    for _, x in ipairs(row) do rows[#rows + 1] = x end
  end
  return kv.from("cpu", "f32", { 6, 4 }, rows)
end

describe("quantising rows", function()
  support.it_on_cpu("divides each by its largest over 448", function(dev)
    for i, c in ipairs(cases) do
      local x = input(c)
      local out, scales = run(dev, x)
      local list, dim, want, want_scales = x:list(), c.dims[#c.dims], {}, {}
      for row = 0, tonumber(scales.count) - 1 do
        local values, scale = reference.quantise(list, row * dim, dim)
        for _, v in ipairs(values) do want[#want + 1] = v end
        want_scales[row + 1] = scale
      end
      support.equal(out, want, ("case %d"):format(i))
      support.equal(scales, want_scales, ("scales of case %d"):format(i))
    end
  end)

  support.it_on_cpu("keeps NaN and divides by no less than 1e-4 / 448", function(dev)
    local out, scales = run(dev, odd_rows())
    local nan = 0 / 0
    local got = scales:list()
    support.close({ got[1], got[2], got[3], got[5], got[6] },
      { 1e-4 / 448, 1e-4 / 448, 7 / 448, 1, 3e38 / 448 }, 0, 1e-7)
    assert.equal(math.huge, got[4])
    local values = out:list()
    support.equal({ unpack(values, 5, 12) }, { 448, 224, -448, 0, nan, 192, -448, 0 })
    support.equal({ unpack(values, 13, 20) }, { nan, 0, nan, nan, 448, -448, 1, 2 ^ -9 })
  end)

  --- Rows whose scales lie next to powers of two.
  local function rows_near_powers()
    local rows = {}
    for e = -24, 40, 4 do
      for _, step in ipairs { -2 ^ -15, 0, 2 ^ -15, 100 } do
        local most = (448 + step) * 2 ^ e
        for _, x in ipairs { most, -most / 3, most / 700, 0 } do rows[#rows + 1] = x end
      end
    end
    return kv.from("cpu", "f32", { #rows / 4, 4 }, rows)
  end

  support.it_on_cpu("rounds scales of UE8M0 up to powers of two", function(dev)
    local inputs = { rows_near_powers() }
    for _, c in ipairs(cases) do inputs[#inputs + 1] = input(c) end
    for i, x in ipairs(inputs) do
      local out, scales = run(dev, x, 1)
      local list, got, got_scales, dim = x:list(), out:list(), scales:list(), x:size(-1)
      for row = 0, #got_scales - 1 do
        local most = 1e-4
        for d = 1, dim do most = math.max(most, math.abs(list[row * dim + d])) end
        local mantissa, exponent = math.frexp(most / 448) -- mantissa in [0.5, 1)
        local scale = 2 ^ (mantissa == 0.5 and exponent - 1 or exponent)
        assert.equal(scale, got_scales[row + 1], ("scale %d of case %d"):format(row, i))
        for d = row * dim + 1, row * dim + dim do -- to 3 bits of mantissa, or 2^-9
          local y = list[d] / scale
          local _, e = math.frexp(y)
          local unit = 2 ^ math.max(e - 4, -9)
          local down = math.floor(y / unit)
          local rest = y / unit - down
          if rest > 0.5 or rest == 0.5 and down % 2 == 1 then down = down + 1 end
          assert.equal(down * unit, got[d], ("number %d of case %d"):format(d, i))
        end
      end
    end
  end)

  it("has words for what does not fit", function()
    local cpu = kv.device "cpu"
    local x, out = kv.zeros(cpu, "f32", { 3, 8 }), kv.zeros(cpu, "f8e4m3", { 3, 8 })
    support.fails(kv.C.kvl_quantise_rows(x, 0, out, kv.zeros(cpu, "f32", { 4 })),
      "scales", "[4]", "[3]")
    support.fails(kv.C.kvl_quantise_rows(x, 0, x, kv.zeros(cpu, "f32", { 3 })), "out",
      "f8e4m3")
    support.fails(kv.C.kvl_quantise_rows(x, 0, kv.zeros(cpu, "f8e4m3", { 4, 8 }),
      kv.zeros(cpu, "f32", { 3 })), "out", "[3, 8]")
  end)
end)

describe("quantising rows on CUDA #gpu", function()
  support.it_on_gpu("gives the CPU's bits", function(cuda, cpu)
    local function same(x, what)
      local out, scales = run(cuda, x)
      local want, want_scales = run(cpu, x)
      support.equal(out, want, what)
      support.equal(scales, want_scales, "scales of " .. what)
    end
    for i, c in ipairs(cases) do same(input(c), ("case %d"):format(i)) end
    same(odd_rows(), "odd rows")
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      same(support.randn(cpu, dtype, { 5000, 128 }, 9), dtype)
    end
  end)
end)
