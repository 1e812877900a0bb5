--- Tolerances: those of mqa_cases. Logits of quantised keys and queries differ from those
-- of the values that were quantised by up to 1e-3, in the measure of DeepGEMM's tests.
local kv = require "kvlab"
local mqa = require "spec.kernels.mqa_cases"
local reference = require "spec.reference.index"
local support = require "spec.support"

local cases = {}
local function add(rows, heads, dim, tokens, o)
  local c = o or {}
  c.rows, c.heads, c.dim, c.tokens, c.seed = rows, heads, dim, tokens, 20 * #cases
  c.columns, c.dtype = c.columns or tokens, c.dtype or "f32"
  cases[#cases + 1] = c
end
add(0, 8, 32, 5)
add(3, 8, 32, 0)
add(1, 1, 32, 1)
for _, heads in ipairs { 1, 3, 8, 16, 24, 32, 40, 64 } do
  add(3, heads, ({ 32, 64, 128 })[1 + heads % 3], 67)
end
for _, dim in ipairs { 32, 64, 128 } do
  add(7, 16, dim, 131, { dtype = "bf16" })
  add(19, 8, dim, 200, { ranges = "ragged" })
end
add(5, 64, 128, 300, { ranges = "ragged" })
add(9, 32, 64, 300, { ranges = "ragged", dtype = "bf16" })
add(4, 8, 64, 90, { columns = 61 })
add(4, 8, 64, 61, { columns = 90 })

--- Rows of causal sequences, empty, past either end, or everything.
local function ranges(c)
  local starts, ends, rng = {}, {}, support.rng(c.seed + 7)
  for r = 1, c.rows do
    starts[r], ends[r] = -1, c.tokens + 3
    if c.ranges then
      starts[r] = rng(c.tokens)
      ends[r] = ({ starts[r], starts[r] - 2, c.tokens - 1, starts[r] + 1,
                   rng(c.tokens + 9) })[1 + rng(5)]
    end
  end
  return starts, ends
end

local inputs = support.latest(function(c)
  local i = mqa.inputs(c.rows, c.heads, c.dim, c.tokens, c.seed, c.whole)
  i.starts, i.ends = ranges(c)
  return i
end)

local function run(dev, c, first, rows)
  local i = inputs(c)
  first, rows = first or 0, rows or c.rows
  local function part(t) return t:narrow(first, rows):to(dev) end
  local out = mqa.poisoned(dev, c.dtype, rows, c.columns)
  kv.check(kv.C.kvl_mqa_logits(part(i.q), part(i.weights), i.k:to(dev), i.scales:to(dev),
    part(kv.from("cpu", "i32", { c.rows }, i.starts)),
    part(kv.from("cpu", "i32", { c.rows }, i.ends)), out))
  return out
end

local function check(c, got, share, what)
  local i = inputs(c)
  local most, scales = math.min(c.tokens, c.columns), i.scales:list()
  mqa.check(i, got, c.dtype, share,
    function(r) return math.max(i.starts[r + 1], 0) end,
    function(r) return math.min(i.ends[r + 1], most) end,
    function(_, j) return j * c.dim, scales[j + 1] end, what)
end

--- Chunks of rows give the bits of the whole, and so does a range of keys on its own.
local function check_pieces(dev, c)
  local whole, i = run(dev, c), inputs(c)
  local got, step = {}, 3
  for first = 0, c.rows - 1, step do
    for _, x in ipairs(run(dev, c, first, math.min(step, c.rows - first)):list()) do
      got[#got + 1] = x
    end
  end
  support.equal(got, whole, "chunks of rows")
  local from, n = 64, c.tokens - 64
  local out = mqa.poisoned(dev, c.dtype, c.rows, n)
  local starts, ends = {}, {}
  for r = 1, c.rows do starts[r], ends[r] = i.starts[r] - from, i.ends[r] - from end
  kv.check(kv.C.kvl_mqa_logits(i.q:to(dev), i.weights:to(dev),
    i.k:to(dev):narrow(from, n), i.scales:to(dev):narrow(from, n),
    kv.from(dev, "i32", { c.rows }, starts), kv.from(dev, "i32", { c.rows }, ends), out))
  local want, list = {}, whole:list()
  for r = 0, c.rows - 1 do
    for j = from, c.tokens - 1 do want[#want + 1] = list[r * c.columns + j + 1] end
  end
  support.equal(out, want, "a range of keys")
end

local pieces = { rows = 11, heads = 16, dim = 64, tokens = 300, columns = 300, seed = 5,
                 dtype = "f32", ranges = "ragged" }
local pieces64 = { rows = 11, heads = 64, dim = 128, tokens = 300, columns = 300,
                   seed = 6, dtype = "bf16", ranges = "ragged" }

describe("logits of an indexer", function()
  support.it_on_cpu("are weighted sums of relu(q . k), in their ranges", function(dev)
    for i, c in ipairs(cases) do check(c, run(dev, c), mqa.CPU, ("case %d"):format(i)) end
  end)

  support.it_on_cpu("are the same bits in pieces", function(dev)
    check_pieces(dev, pieces)
    check_pieces(dev, pieces64)
  end)

  support.it_on_cpu("of quantised rows are near those of the rows", function(dev)
    local rows, heads, dim, tokens = 8, 16, 128, 96
    local q = support.randn(dev, "bf16", { rows, heads, dim }, 1)
    local k = support.randn(dev, "bf16", { tokens, dim }, 2)
    local weights = support.randn(dev, "f32", { rows, heads }, 3)
    local q8, q_scales = kv.ops.quantise_rows(q)
    local k8, k_scales = kv.ops.quantise_rows(k)
    local starts = kv.zeros(dev, "i32", { rows })
    local ends = kv.full(dev, "i32", { rows }, tokens)
    local got = kv.ops.mqa_logits(q8, weights * q_scales, k8, k_scales, starts, ends,
      mqa.poisoned(dev, "f32", rows, tokens)):list()
    local qs, ks, ws, want = q:list(), k:list(), weights:list(), {}
    for r = 0, rows - 1 do
      for j = 0, tokens - 1 do
        want[#want + 1] = reference.logit(qs, ws, r, heads, dim, ks, j * dim, 1)
      end
    end
    local difference = reference.difference(got, want)
    assert.is_true(difference < 1e-3 and difference > 1e-5, tostring(difference))
  end)

  support.it_on_cpu("let a NaN through", function(dev)
    local i = mqa.inputs(1, 8, 32, 3, 4)
    i.k:index(1):fill_(0 / 0)
    local got = kv.ops.mqa_logits(i.q, i.weights, i.k, i.scales,
      kv.from(dev, "i32", { 1 }, { 0 }), kv.from(dev, "i32", { 1 }, { 3 }),
      mqa.poisoned(dev, "f32", 1, 3)):list()
    assert.is_true(got[1] == got[1] and got[2] ~= got[2] and got[3] == got[3])
  end)

  it("have words for what does not fit", function()
    local i = mqa.inputs(2, 8, 32, 5, 1)
    local cpu, C = kv.device "cpu", kv.C
    local at, out = kv.zeros(cpu, "i32", { 2 }), kv.zeros(cpu, "f32", { 2, 5 })
    support.fails(C.kvl_mqa_logits(i.q, i.weights, i.k:reshape { 10, 16 }, i.scales, at,
      at, out), "k is", "dim=32")
    support.fails(C.kvl_mqa_logits(i.q, i.weights, i.k, i.scales, at, at:narrow(0, 1),
      out), "ends", "rows=2")
    support.fails(C.kvl_mqa_logits(i.q, i.weights, i.k, i.scales, at, at,
      out:cast "f16"), "logits", "f32|bf16")
    local many = mqa.inputs(2, 65, 32, 5, 1)
    support.fails(C.kvl_mqa_logits(many.q, many.weights, i.k, i.scales, at, at, out),
      "65 heads", "1 ... 64")
    local wide = kv.zeros(cpu, "f8e4m3", { 2, 8, 48 })
    support.fails(C.kvl_mqa_logits(wide, i.weights, i.k, i.scales, at, at, out),
      "dim is 48", "32, 64 or 128")
  end)
end)

describe("logits of an indexer on CUDA #gpu", function()
  support.it_on_gpu("agree with the reference", function(cuda)
    for i, c in ipairs(cases) do
      check(c, run(cuda, c), mqa.CUDA, ("case %d"):format(i))
    end
  end)

  support.it_on_gpu("are the same bits in pieces", function(cuda)
    check_pieces(cuda, pieces)
    check_pieces(cuda, pieces64)
  end)

  support.it_on_gpu("of whole numbers are the CPU's bits", function(cuda, cpu)
    for n, heads in ipairs { 8, 16, 24, 32, 64 } do
      for _, dim in ipairs { 32, 64, 128 } do
        local c = { rows = 70, heads = heads, dim = dim, tokens = 1500, columns = 1500,
                    seed = 30 * n, dtype = "f32", ranges = "ragged", whole = true }
        support.equal(run(cuda, c), run(cpu, c), ("%d heads of %d"):format(heads, dim))
      end
    end
  end)

  support.it_on_gpu("differ from the CPU's by less than 5e-6 in the original's measure",
    function(cuda, cpu)
      local c = { rows = 64, heads = 64, dim = 128, tokens = 4096, columns = 4096,
                  seed = 8, dtype = "f32" }
      local difference = reference.difference(run(cuda, c):list(), run(cpu, c):list())
      assert.is_true(difference < 5e-6, tostring(difference))
    end)
end)
