--- Kernels of source text: what a call checks, what it launches, and what errors say.
local compiler = require "kvlab.kernel.run.compiler"
local files = require "kvlab.files"
local kv = require "kvlab"
local nvrtc = require "kvlab.kernel.run.nvrtc"
local temporary = require "spec.temporary"
local traces = require "spec.traces"

local HERE = debug.getinfo(1, "S").short_src

local function scale_rows(more)
  local o = {
    name = "scale_rows",
    arguments = { "x f32 [rows, dim]", "by f32 [rows]", "unit f32",
                  "out f32 [rows, dim] written" },
    c = [[
      void scale_rows(const float *x, const float *by, float unit, float *out,
                      int64_t rows, int64_t dim) {
      #pragma omp parallel for
        for (int64_t i = 0; i < rows * dim; i++) out[i] = x[i] * by[i / dim] * unit;
      }]],
    cuda = [[
      void scale_rows(const float *x, const float *by, float unit, float *out,
                      int64_t rows, int64_t dim) {
        const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
        if (i < rows * dim) out[i] = x[i] * by[i / dim] * unit;
      }]],
    grid = function(n) return math.ceil(n.rows * n.dim / 256) end,
  }
  for key, value in pairs(more or {}) do o[key] = value end
  return kv.kernel.source(o)
end

--- Numbers of both kinds, an optional tensor, sizes that are given, shared memory.
local function mixed()
  return kv.kernel.source {
    name = "mixed",
    arguments = { "x bf16 [n, 4]", "bias f32 [4] optional", "first i32", "step i64",
                  "out i64 [n] written" },
    c = [[
      static float of(uint16_t x) {
        uint32_t bits = (uint32_t)x << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
      }
      void mixed(const uint16_t *x, const float *bias, int32_t first, int64_t step,
                 int64_t *out, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
          float sum = 0;
          for (int k = 0; k < 4; k++) sum += of(x[i * 4 + k]) + (bias ? bias[k] : 0);
          out[i] = (int64_t)sum + first + step * i;
        }
      }]],
    cuda = [[
      void mixed(const uint16_t *x, const float *bias, int32_t first, int64_t step,
                 int64_t *out, int64_t n) {
        extern __shared__ float sums[];
        const int i = threadIdx.x;
        sums[i] = 0;
        for (int k = 0; k < 4; k++)
          sums[i] += from_bf16(x[i * 4 + k]) + (bias ? bias[k] : 0);
        out[i] = (int64_t)sums[i] + first + step * i;
      }]],
    grid = 1, block = function(n) return n.n end, shared = function(n) return 4 * n.n end,
  }
end

local function refused(words, fn, ...)
  local ok, why = pcall(fn, ...)
  assert.is_false(ok)
  assert.equal(words, why)
end

--- The same, where the call is made on a line of this file, which is blamed.
local function blamed(words, kernel, ...)
  local n, list = select("#", ...), { ... }
  local line
  local ok, why = pcall(function()
    line = debug.getinfo(1, "l").currentline + 1
    local _ = kernel(unpack(list, 1, n))
  end)
  assert.is_false(ok)
  assert.equal(("%s:%d: %s"):format(HERE, line, words), why)
end

local function run_on(dev)
  local x = kv.from(dev, "f32", { { 1, 2, 3 }, { 4, 5, 6 } })
  local by = kv.from(dev, "f32", { 10, 100 })

  it("computes, and makes what it writes", function()
    assert.same({ 5, 10, 15, 200, 250, 300 }, scale_rows()(x, by, 0.5):list())
    local out = kv.zeros(dev, "f32", { 2, 3 })
    assert.equal(out.ptr, scale_rows()(x, by, 2, out).ptr)
    assert.same({ 20, 40, 60, 800, 1000, 1200 }, out:list())
  end)

  it("takes numbers of every kind, and tensors that may be missing", function()
    local rows = kv.from(dev, "bf16", { { 1, 2, 3, 4 }, { -1, 0, 0, 0 } })
    local bias = kv.from(dev, "f32", { 10, 0, 0, 0 })
    local kernel = mixed()
    assert.same({ 20 + 7, 9 + 107 }, kernel(rows, bias, 7, 100):list())
    assert.same({ 10 + 7, -1 + 107 }, kernel(rows, nil, 7, 100LL):list())
    assert.same({ 10 - 3, -1 - 3 + 2 ^ 40 }, kernel(rows, nil, -3, 2 ^ 40):list())
  end)

  it("takes tensors without elements", function()
    local none = scale_rows()(kv.zeros(dev, "f32", { 0, 3 }), kv.zeros(dev, "f32", { 0 }),
      1)
    assert.same({ 0, 3 }, none:dims())
  end)

  it("is recorded by a graph and replayed", function()
    local kernel, out = scale_rows(), kv.zeros(dev, "f32", { 2, 3 })
    local from = x:clone()
    kernel(from, by, 1, out)
    local g = kv.graph(function() kernel(from, by, 1, out) end, dev)
    out:fill_(0)
    g:replay()
    assert.same({ 10, 20, 30, 400, 500, 600 }, out:list())
    from:fill_(1)
    g:replay()
    assert.same({ 10, 10, 10, 100, 100, 100 }, out:list())
    g:close()
  end)

  it("runs on the current stream, and keeps its tensors until it has ended", function()
    local device, kernel = kv.device(dev), scale_rows()
    local side, event = device:open_stream(), device:open_event()
    local out = kv.zeros(dev, "f32", { 2, 3 })
    device:sync()
    device:with_stream(side, function()
      local part = x:mul(2)
      for _ = 1, 20 do
        kernel(part, by, 1, out)
        part:free()
        part = x:mul(2)
      end
      event:record(side)
    end)
    device:stream():wait(event)
    assert.same({ 20, 40, 60, 800, 1000, 1200 }, out:list())
    side:close()
    event:close()
  end)

  it("compiles: a call aborts no trace", function()
    local kernel, out = scale_rows(), kv.zeros(dev, "f32", { 2, 3 })
    kernel(x, by, 1, out) -- the first call compiles
    jit.flush()
    local aborts, formed = traces.aborts_of(function()
      for _ = 1, 1000 do kernel(x, by, 1, out) end
    end)
    assert.same({}, aborts)
    assert.is_true(formed > 0)
  end)

  it("works after a call that was refused", function()
    local kernel = scale_rows()
    for _ = 1, 3 do
      assert.is_false(pcall(kernel, x, x, 1))
      assert.same({ 5, 10, 15, 200, 250, 300 }, kernel(x, by, 0.5):list())
    end
  end)

  it("refuses every call once it is closed", function()
    local kernel = scale_rows():compile(dev)
    kernel(x, by, 1)
    kernel:close()
    kernel:close()
    blamed("scale_rows: the kernel is closed", kernel, x, by, 1)
    refused(("%s: the kernel is closed"):format "scale_rows", function()
      local ok, why = pcall(kernel.compile, kernel, dev)
      error((ok and "" or why:gsub("^.*: scale_rows", "scale_rows")), 0)
    end)
    assert.same({ 5, 10, 15, 200, 250, 300 }, scale_rows()(x, by, 0.5):list())
  end)
end

describe("a kernel of source text", function()
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  run_on "cpu"

  local x = kv.from("cpu", "f32", { { 1, 2, 3 }, { 4, 5, 6 } })
  local by = kv.from("cpu", "f32", { 10, 100 })

  it("names the argument that is wrong, and blames the line of the call", function()
    local kernel, closed = scale_rows(), kv.zeros("cpu", "f32", { 2 })
    closed:free()
    blamed("scale_rows: x is missing, expected f32 [rows, dim]", kernel)
    blamed("scale_rows: x is 3, expected a tensor", kernel, 3)
    blamed("scale_rows: x is f32 [2], expected f32 [rows, dim]", kernel, by, by, 1)
    blamed("scale_rows: x is i32 [2, 3], expected f32 [rows, dim]", kernel,
      x:cast "i32", by, 1)
    blamed("scale_rows: by is f32 [3], expected f32 [rows=2]", kernel, x,
      kv.zeros("cpu", "f32", { 3 }), 1)
    blamed("scale_rows: by is closed, expected a tensor", kernel, x, closed, 1)
    blamed("scale_rows: unit is nil, expected a number", kernel, x, by)
    blamed("scale_rows: unit is f32 [2], expected a number", kernel, x, by, by)
    blamed("scale_rows: out is f32 [3, 2], expected f32 [rows=2, dim=3]", kernel, x, by,
      1, kv.zeros("cpu", "f32", { 3, 2 }))
    blamed("scale_rows: 5 arguments, expected 4", kernel, x, by, 1, nil, 2)
  end)

  it("names the dimension's sizes that were bound before, and no others", function()
    local kernel = kv.kernel.source { name = "square", arguments = { "x f32 [n, n]" },
      c = "void square(const float *x, int64_t n) {}" }
    kernel(kv.zeros("cpu", "f32", { 3, 3 }))
    blamed("square: x is f32 [2, 3], expected f32 [n, n]", kernel, x)
  end)

  it("names numbers that do not fit", function()
    local kernel, rows = mixed(), kv.zeros("cpu", "bf16", { 2, 4 })
    blamed("mixed: x is bf16 [2, 3], expected bf16 [n, 4]", kernel,
      kv.zeros("cpu", "bf16", { 2, 3 }), nil, 1, 1)
    blamed("mixed: first is 0.5, expected a whole number, i32", kernel, rows, nil, 0.5, 1)
    blamed("mixed: first is 2147483648, expected a whole number, i32", kernel, rows, nil,
      2 ^ 31, 1)
    blamed("mixed: first is a cdata, expected a whole number, i32", kernel, rows, nil,
      1LL, 1)
    blamed("mixed: step is inf, expected a whole number, i64", kernel, rows, nil, 1,
      1 / 0)
  end)

  it("needs a tensor that tells what it is to make", function()
    local kernel = kv.kernel.source { name = "fill", arguments = { "n i64",
      "x f32 [size] written", "y f32 [size] optional" },
      c = "void fill(int64_t n, float *x, const float *y, int64_t size) {}" }
    blamed("fill: x is missing, expected f32 [size]: no other tensor tells the device",
      kernel, 1)
    assert.same({ 3 }, kernel(1, nil, kv.zeros("cpu", "f32", { 3 })):dims())
  end)

  it("shows the compiler's words with the lines of the user's file", function()
    local line = debug.getinfo(1, "l").currentline + 4
    local kernel = kv.kernel.source { name = "broken", arguments = { "x f32 [n]" },
      c = [[
        void broken(const float *x, int64_t n) {
          return 3 +;
        }]] }
    local ok, why = pcall(kernel, by)
    assert.is_false(ok)
    assert.matches("broken: it cannot be compiled: .- failed: ", why)
    assert.truthy(why:find(("%s:%d:"):format(HERE, line), 1, true), why)
    ok, why = pcall(kernel, by) -- and again
    assert.is_false(ok)
    assert.truthy(why:find(("%s:%d:"):format(HERE, line), 1, true), why)
    assert.same({ 5, 10, 15, 200, 250, 300 }, scale_rows()(x, by, 0.5):list())
  end)

  it("counts the lines of a text that no file has from 1", function()
    local text = { "void made(const float *x, int64_t n) {", "  return 3 +;", "}" }
    local kernel = kv.kernel.source { name = "made", arguments = { "x f32 [n]" },
      c = table.concat(text, "\n") }
    local ok, why = pcall(kernel, by)
    assert.is_false(ok)
    assert.truthy(why:find("made.c:2:", 1, true), why)
  end)

  it("has parameters that the compiler compares with its arguments", function()
    local kernel = kv.kernel.source { name = "wrong", arguments = { "x f32 [n]" },
      c = "void wrong(const int *x, int64_t n) {}" }
    local ok, why = pcall(kernel, by)
    assert.is_false(ok)
    assert.matches("wrong: it cannot be compiled: ", why)
  end)

  it("names an argument whatever comes in its place", function()
    local kernel, good = mixed(), { kv.zeros("cpu", "bf16", { 2, 4 }),
      kv.zeros("cpu", "f32", { 4 }), 1, 2 }
    local names = { "x", "bias", "first", "step", "out" }
    local wrong = { true, "x", {}, print, coroutine.create(print), 0.5, -1 / 0, 0 / 0,
      1e300, kv.zeros("cpu", "f8e4m3", { 2, 4 }), kv.zeros("cpu", "bf16", { 2, 4, 1 }),
      kv.zeros("cpu", "i64", {}), kv.device "cpu", io.stdout }
    for at, name in ipairs(names) do
      for _, value in ipairs(wrong) do
        local given = { good[1], good[2], good[3], good[4] }
        given[at] = value
        local ok, why = pcall(function()
          local _ = kernel(given[1], given[2], given[3], given[4], given[5])
        end)
        assert.is_false(ok, name .. " = " .. tostring(value))
        local line = debug.getinfo(1, "l").currentline - 3
        assert.equal(("%s:%d: mixed: %s is "):format(HERE, line, name),
          why:match "^.-%d+: mixed: %w+ is ")
      end
    end
  end)

  it("says that no compiler is there", function()
    local find = compiler.find
    compiler.find = function() return nil end
    local kernel = kv.kernel.source { name = "alone", arguments = { "x f32 [n]" },
      c = "void alone(const float *x, int64_t n) {} // " .. temporary.path() }
    local ok, why = pcall(kernel, by)
    compiler.find = find
    assert.is_false(ok)
    assert.matches("alone: it cannot be compiled: there is no C compiler: install gcc, "
      .. "or name one in CC$", why)
    kernel(by)
  end)

  it("says that it has no text for a device", function()
    blamed("scale_rows: it has no C text, expected one to run on cpu",
      kv.kernel.source { name = "scale_rows", arguments = { "x f32 [a, b]" },
        cuda = "void scale_rows(const float *x, int64_t a, int64_t b) {}", grid = 1 }, x)
  end)

  it("is compiled once, wherever its text stands", function()
    local compile, count = compiler.compile, 0
    compiler.compile = function(...)
      count = count + 1
      return compile(...)
    end
    local path = temporary.path()
    local text = ("void once(const float *x, int64_t n) {} // %s"):format(path)
    for above = 0, 2 do
      files.write(path, ("\n"):rep(above) .. ([[local kv = require "kvlab"
        return kv.kernel.source { name = "once", arguments = { "x f32 [n]" },
          c = "%s" }]]):format(text))
      dofile(path):compile "cpu"
    end
    compiler.compile = compile
    assert.equal(1, count)
  end)

  it("is refused when its arguments make no sense", function()
    local function wrong(words, more)
      local ok, why = pcall(scale_rows, more)
      assert.is_false(ok)
      assert.equal(words, (why:gsub("^[^:]*:%d+: ", "")))
    end
    wrong('scale_rows: argument "x", expected "name dtype [dimensions]" or "name dtype"',
      { arguments = { "x" } })
    wrong('scale_rows: argument "x f32 n", expected "name dtype [dimensions]" or "name '
      .. 'dtype"', { arguments = { "x f32 n" } })
    wrong("scale_rows: argument x is of dtype float, expected one of f32 f16 bf16 f8e4m3 "
      .. "i32 i64 u8 u64", { arguments = { "x float [n]" } })
    wrong("scale_rows: argument x is of dtype f16, expected f32, i32 or i64 of a number",
      { arguments = { "x f16" } })
    wrong('scale_rows: x has a dimension "2n", expected a name or a size',
      { arguments = { "x f32 [2n]" } })
    wrong('scale_rows: x is "write", expected written or optional',
      { arguments = { "x f32 [n] write" } })
    wrong("scale_rows: two arguments have the name x",
      { arguments = { "x f32 [n]", "x i32" } })
    wrong("scale_rows: n is an argument and a dimension, expected two names",
      { arguments = { "x f32 [n]", "n i32" } })
    wrong("scale_rows: it has no tensor, expected one, which tells the device",
      { arguments = { "n i32" } })
    wrong("scale_rows: x has 7 dimensions, expected at most 6",
      { arguments = { "x f32 [a, b, c, d, e, f, g]" } })
    local many = {}
    for i = 1, 64 do many[i] = ("x%d f32 [n]"):format(i) end
    wrong("scale_rows: 64 arguments and 1 dimensions, expected at most 64 together",
      { arguments = many })
    wrong('kernel.source: name is "two words", expected the name of a function in C',
      { name = "two words" })
    local ok, why = pcall(kv.kernel.source, { name = "x", arguments = { "x f32 [n]" } })
    assert.is_false(ok)
    assert.matches("c and cuda are missing, expected a text for one of them$", why)
    ok, why = pcall(kv.kernel.source, { name = "x", arguments = { "x f32 [n]" },
      cuda = "" })
    assert.is_false(ok)
    assert.matches("grid is missing, expected one with a cuda text$", why)
  end)

  it("is compiled by NVRTC, which needs no GPU", function()
    if not nvrtc.open() then return pending "NVRTC is not here" end
    for _, kernel in ipairs { scale_rows(), mixed() } do
      local image, why = nvrtc.compile(kernel:source "cuda", "sm_90a")
      assert.is_string(image, why)
    end
    local line = debug.getinfo(1, "l").currentline + 4
    local kernel = kv.kernel.source { name = "broken", arguments = { "x f32 [n]" },
      grid = 1, cuda = [[
        void broken(const float *x, int64_t n) {
          return 3 +;
        }]] }
    local _, why = nvrtc.compile(kernel:source "cuda", "sm_90a")
    assert.truthy(why:find(("%s(%d)"):format(HERE, line), 1, true), why)
  end)
end)

describe("a kernel of source text in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  run_on "cuda"

  it("names a device that its tensors do not share, and a grid that is none", function()
    local x = kv.zeros("cuda", "f32", { 2, 3 })
    blamed("scale_rows: by is on cpu, expected cuda:0 like the tensors before it",
      scale_rows(), x, kv.zeros("cpu", "f32", { 2 }), 1)
    local by = kv.zeros("cuda", "f32", { 2 })
    blamed("scale_rows: grid gives 1.5, nil, nil, expected one to three whole numbers "
      .. ">= 0", scale_rows { grid = function() return 1.5 end }, x, by, 1)
    blamed("scale_rows: block gives 2000, expected a whole number from 1 to 1024",
      scale_rows { block = function() return 2000 end }, x, by, 1)
    blamed("scale_rows: shared gives -1, expected bytes, a whole number >= 0",
      scale_rows { shared = function() return -1 end }, x, by, 1)
  end)
end)
