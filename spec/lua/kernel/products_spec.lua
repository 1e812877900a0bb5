--- Sums over dim that are matrix products: which ones are found, and that kernels compute
-- them as the reference says, numbers that are not finite included. More of them:
-- ./kvlab run spec/random_kernels.lua --set place=products --set target=emulated
local compiler = require "kvlab.kernel.run.compiler"
local cuda_products = require "kvlab.kernel.print.cuda_products"
local emulation = require "spec.emulation"
local expressions = require "spec.expressions"
local files = require "kvlab.files"
local kv = require "kvlab"
local nvrtc = require "kvlab.kernel.run.nvrtc"
local print_cuda = require "kvlab.kernel.print.cuda"
local support = require "spec.support"

local e = kv.expr
local TOLERANCE = 1e-4
local BOUNDS = { lo = e.k:min "token", hi = e.k:max "token" }
local MEAN = { mean = e.k:mean "token" }

local FOUND = {
  { "the dot product of a query and a row", (e.q * e.mean):sum "dim":max "head", MEAN },
  { "that of every key", (e.q * e.k):sum "dim":logsumexp "token":mean "head" },
  { "of values", (e.v * e.q):sum "dim":max("token", "head") },
  { "Quest's bound", e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head", BOUNDS },
  { "the bound from below", e.min(e.hi * e.q, e.lo * e.q):sum "dim":max "head", BOUNDS },
  { "a bound of stored rows", e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head",
    { lo = BOUNDS.lo:store "bf16", hi = BOUNDS.hi:store "bf16" } },
  { "a factor for each dimension",
    (e.q * e.const("f32", "w", "dim") * e.mean):sum "dim":max "head", MEAN },
  { "a sum of several products",
    (e.q * e.lo * 0.5 - e.hi * e.q:relu() / 3):sum "dim":max "head", BOUNDS },
  { "two of them in one score",
    ((e.q * e.hi):sum "dim" - (e.q * e.lo):sum "dim"):max "head", BOUNDS },
  { "other fields beside them", ((e.q * e.mean):sum "dim" + e.n):max "head",
    { mean = MEAN.mean, n = e.tokens } },
}

local LEFT = {
  { "a bound whose rows have no known order",
    e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head",
    { lo = e.k:min "token", hi = e.v:max "token" } },
  { "a bound of different factors", e.max(e.q * e.lo, -e.q * e.hi):sum "dim":max "head",
    BOUNDS },
  { "rows of two dtypes",
    ((e.q * e.lo):sum "dim" - (e.q * e.hi):sum "dim"):max "head",
    { lo = BOUNDS.lo:store "bf16", hi = BOUNDS.hi:store "f16" } },
  { "rows of blocks and of tokens",
    ((e.q * e.lo):sum "dim" - (e.q * e.k):sum "dim"):max("token", "head"), BOUNDS },
  { "what is no product", (e.q - e.mean):abs():sum "dim":max "head", MEAN },
  { "a product of rows", (e.q * e.lo * e.hi):sum "dim":max "head", BOUNDS },
  { "rows beside a product",
    ((e.q * e.mean):sum "dim" / (e.mean * e.mean):sum "dim"):max "head", MEAN },
  { "a product without a query", (e.mean * 2):sum "dim" + e.block, MEAN },
}

describe("a sum over dim", function()
  local function is_product(case, o)
    o = o or {}
    o.summary, o.format = case[3], o.format or "bf16"
    return case[2]:source("cuda", o):find("expression_products.cuh", 1, true) ~= nil
  end

  for _, case in ipairs(FOUND) do
    it("is a matrix product: " .. case[1], function()
      for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
        assert.is_true(is_product(case, { format = dtype }))
      end
    end)
  end
  for _, case in ipairs(LEFT) do
    it("is none: " .. case[1], function() assert.is_false(is_product(case)) end)
  end

  it("is left where rows are not whole pieces of 16 bytes", function()
    assert.is_true(is_product(FOUND[1], { head_dim = 72 }))
    assert.is_false(is_product(FOUND[1], { head_dim = 36 }))
    assert.is_false(is_product(FOUND[2], { head_dim = 72, format = "f8e4m3" }))
  end)

  it("is left on GPUs without such tensor cores, or with little shared memory", function()
    local kernels = {}
    local usual = print_cuda.print
    print_cuda.print = function(plan, target)
      for _, one in ipairs { "sm_75", "sm_80", "sm_86", "sm_90a", "sm_120" } do
        local text = usual(plan, one)
        kernels[one] = text:find("expression_products.cuh", 1, true) ~= nil
      end
      return usual(plan, target)
    end
    local ok, why = pcall(function()
      FOUND[4][2]:source("cuda", { summary = BOUNDS, format = "f32", head_dim = 256 })
    end)
    print_cuda.print = usual
    assert.is_true(ok, why)
    assert.same({ sm_75 = false, sm_80 = true, sm_86 = false, sm_90a = true,
                  sm_120 = false }, kernels)
  end)

  it("knows of each architecture what kernels/cuda/architecture.cuh says", function()
    local text = files.read(kv.paths.root .. "/kernels/cuda/architecture.cuh")
    local count = 0
    for number, block, sm in text:gmatch "{(%d+), (%d+), (%d+), %d+}," do
      assert.same({ tonumber(block), tonumber(sm) },
        cuda_products.limits_of("sm_" .. number))
      assert.same(cuda_products.limits_of("sm_" .. number),
        cuda_products.limits_of("compute_" .. number))
      count = count + 1
    end
    assert.equal(6, count)
  end)

  it("is compiled in CUDA, without a GPU", function()
    if support.is_hostile then return pending(support.SAME_PROGRAMS) end
    if not nvrtc.open() then return pending "NVRTC is not here" end
    for i = 1, #FOUND, support.is_full and 1 or 5 do -- each takes a second
      local case, dtype = FOUND[i], ({ "f32", "f16", "bf16", "f8e4m3" })[i % 4 + 1]
      local o = { summary = case[3], format = dtype, group = i, head_dim = 48 + 16 * i }
      for k, target in ipairs { "sm_80", "sm_90a" } do
        if support.is_full or i % 2 == k % 2 then
          local image, why = nvrtc.compile(case[2]:source("cuda", o), target)
          assert.is_string(image, why)
        end
      end
    end
  end)
end)

--- How the score of a seed differs from the reference, in words.
local function difference(dev, target, seed, is_wild)
  local o = expressions.products_shape(seed, is_wild)
  o.id = ("%d, wild: %s"):format(seed, tostring(is_wild))
  local cache = expressions.cache(dev, o, seed)
  local def = expressions.random_products(seed, is_wild)
  local p = expressions.attach(cache, def, target)
  if p.summary then expressions.update(cache, p) end
  local why = expressions.difference(expressions.score(cache, p),
    expressions.expected(cache, p, expressions.resolved(p)), TOLERANCE)
  return why and ("seed %d: %s\n%s"):format(seed, why, tostring(def.score))
end

--- Cases of random kernels. Compiling takes longest, so only --full runs all those that
-- are compiled.
local function random_cases(dev, target, count, count_wild)
  if target ~= "lua" and not support.is_full then
    count, count_wild = count / 2, math.floor(count_wild / 2)
  end
  for seed = 1, count do
    it(("random products %d"):format(seed), function()
      local why = difference(dev, target, seed)
      assert.is_nil(why, why)
    end)
  end
  for seed = 1, count_wild do
    it(("numbers that are not finite %d"):format(seed), function()
      local why = difference(dev, target, seed, true)
      assert.is_nil(why, why)
    end)
  end
end

describe("products in Lua #release", function() random_cases("cpu", "lua", 20, 10) end)

describe("products in C", function()
  if not compiler.find() then return pending "there is no C compiler" end
  random_cases("cpu", nil, 20, 10)
end)

describe("products in CUDA, run on the CPU", function()
  if emulation.problem() then return pending(emulation.problem()) end
  for i = 1, support.is_full and 3 or 1 do
    it(("random products %d"):format(i), function()
      emulation.with(function()
        for seed = 8 * i - 7, support.is_full and 8 * i or 8 * i - 3 do
          local why = difference("cpu", "emulated", seed)
          assert.is_nil(why, why)
        end
      end)
    end)
  end
  it("numbers that are not finite", function()
    emulation.with(function()
      for seed = 10, support.is_full and 25 or 13 do
        local why = difference("cpu", "emulated", seed, true)
        assert.is_nil(why, why)
      end
    end)
  end)
end)

describe("products in CUDA #gpu", function() random_cases("cuda", nil, 30, 15) end)
