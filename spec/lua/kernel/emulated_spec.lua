--- Kernels that are printed in CUDA, run on the CPU (spec/emulation.lua), so that they
-- are compared with the reference where there is no GPU, too. More of them:
-- ./kvlab run spec/random_kernels.lua --set target=emulated
local emulation = require "spec.emulation"
local expressions = require "spec.expressions"
local bit = require "bit"
local ffi = require "ffi"
local hooks = require "spec.hooks"
local kv = require "kvlab"
local maps = require "spec.maps"
local support = require "spec.support"

local TOLERANCE = 1e-4

--- How the score and the summary of a seed differ from the reference, in words.
local function difference(seed)
  local cache = expressions.cache("cpu", expressions.shape(seed), seed)
  local p = expressions.attach(cache, (expressions.random(seed)), "emulated")
  if p.summary then expressions.update(cache, p) end
  return expressions.difference(expressions.score(cache, p),
    expressions.expected(cache, p, expressions.resolved(p)), TOLERANCE)
end

describe("a kernel in CUDA, run on the CPU", function()
  if emulation.problem() then return pending(emulation.problem()) end

  local function emulated(title, fn)
    it(title, function() emulation.with(fn) end)
  end

  for seed = 1, support.is_full and 6 or 3 do -- a compiler takes a second for each
    emulated(("computes random expressions %d"):format(seed), function()
      local why = difference(seed)
      assert.is_nil(why, why)
    end)
  end
  for seed = 1, support.is_full and 3 or 2 do
    emulated(("computes random map %d"):format(seed), function()
      local why = maps.random_difference("cpu", "emulated", seed)
      assert.is_nil(why, why)
    end)
    emulated(("emits of attention %d"):format(seed), function()
      local why = hooks.differs("cpu", "emulated", seed + 2, hooks.random(seed + 2),
        hooks.shape(seed + 2))
      assert.is_nil(why, why)
    end)
  end

  local e = kv.expr
  local PROMPTS = {
    { dtype = "bf16", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 64,
      alibi = true, soft_cap = 3, parts = true },
    { dtype = "f8e4m3", q_dtype = "bf16", group = 20, block_size = 12, head_dim = 48,
      selects = true, window = 30, scaled = { 2, 0.5 } },
    { dtype = "f32", group = 2, block_size = 160, head_dim = 24 },
    { dtype = "f16", q_dtype = "f16", group = 70, block_size = 1, head_dim = 72,
      lens = { 9, 20 } },
    { dtype = "int8", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 80,
      window = 30 },
  }
  for i, case in ipairs(PROMPTS) do
    emulated(("emits of a prefill %d"):format(i), function()
      local o = { kv_heads = 2, blocks = 40, lens = { 170, 45 }, rows = { 80, 1 } }
      for key, value in pairs(case) do o[key] = value end
      local def = { name = "known", decode = true, prefill = true, complete = false,
        defaults = { weight = 2 }, select_blocks = function() end, init = hooks.init,
        bias = e.logit * -0.25 + e.input "mix", mask = (e.position % 7):ne(3),
        emit = { mass = e.weight:sum "token":mean "head", tokens = e.tokens,
                 far = (e.weight * (e.query_position - e.position)):max("token", "head"),
                 by_token = e.weight:mean "head",
                 most = e.weight:max("head", "query"),
                 mix = e.input "mix" * e.param "weight" } }
      local sums, why = def.emit, nil
      def.emit = { newest = e.where(e.query_position:ge(e.length - 40), e.weight, 0)
        :sum "token":mean "head", odd = e.where((e.query_position % 2):eq(0), 0, 1),
        last = e.where(e.query_index:ge(e.length - 40), e.weight, 0):sum "head" }
      for k, emit in ipairs { sums, def.emit } do -- one of them, unless --full
        def.emit = emit
        if support.is_full or i % 2 == k % 2 then
          why = why or hooks.differs("cpu", "emulated", i, def, o)
        end
      end
      assert.is_nil(why, why)
    end)
  end

  emulated("emits by token in a decode step", function()
    for i, case in ipairs { { dtype = "f32", group = 4, block_size = 16, head_dim = 32 },
                            { dtype = "bf16", group = 3, block_size = 40, head_dim = 16,
                              selects = true, window = 30 } } do
      local o = { kv_heads = 2, blocks = 40, lens = { 0, 37, 80 } }
      for key, value in pairs(case) do o[key] = value end
      local def = { name = "known", decode = true, complete = false, init = hooks.init,
        select_blocks = function() end,
        emit = { mass = e.weight:mean "head", most = e.weight:max("head", "query") } }
      local why = hooks.differs("cpu", "emulated", i, def, o)
      assert.is_nil(why, why)
    end
  end)

  --- The status of a launch of one thread block of 64 threads, and what it wrote.
  local function run(body)
    local image, why = emulation.compile(([[
      #include "cuda/expression.cuh"
      enum { THREADS = 64 };
      struct arguments { float *out; };
      extern "C" __global__ void kvl_code(const __grid_constant__ arguments args) {
        const int lane = threadIdx.x %% 32;
        float x = (float)threadIdx.x;
        %s
        args.out[threadIdx.x] = x;
      }]]):format(body))
    local cpu, out = kv.device "cpu", ffi.new "kvl_code *[1]"
    assert(image, why)
    kv.check(kv.C.kvl_code_open(cpu, "one", image, #image, out))
    local t = kv.zeros(cpu, "f32", { 64 })
    local words = ffi.new("int64_t[4]", 0, 1, 1, 1)
    local grid = ffi.new("kvl_grid", 1, 1, 1, 64)
    ffi.cast("void **", words)[0] = t.ptr
    local status = kv.C.kvl_code_launch(out[0], cpu, words, 32,
      ffi.new("kvl_tensor *[1]", { t }), 1, grid)
    return status, t:list()
  end

  it("exchanges values between the lanes of each warp", function()
    local status, list = run "x = __shfl_xor_sync(ALL_LANES, x, 5); __syncthreads();"
    assert.equal(0, status)
    for i = 0, 63 do assert.equal(bit.bxor(i, 5), list[i + 1]) end
  end)

  it("ends where lanes of a warp have parted", function()
    assert.is_true(run "if (lane < 7) x = __shfl_xor_sync(ALL_LANES, x, 1);" < 0)
    assert.is_true(run "if (lane < 7) __syncthreads();" < 0)
    assert.is_true(run "if (threadIdx.x < 32) __syncthreads();" < 0)
  end)
end)
