--- How long it takes to compile the kernels of a policy (K4): from the expression to code
-- on the device, with the compiler and from a file of the cache. Nothing is launched, so
-- a row has no limit.
local ffi = require "ffi"
local kv = require "kvlab"
local cache = require "kvlab.kernel.run.cache"
local compiler = require "kvlab.kernel.run.compiler"
local kernel = require "kvlab.kernel.run.kernel"
local median = require("kvlab.experiment.statistics").median
local paged = require "bench.lib.paged"
local policy = require "kvlab.policy.policy"
local shipped = require "bench.lib.shipped"

local e = kv.expr
local REPEATS = 3
local out_code = ffi.new "kvl_code *[1]"

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

--- The median time of making a kernel's code again, with `image_of` its source.
local function time(b, one, image_of)
  local times = {}
  for i = 1, b.quick and 1 or REPEATS do
    local start = clock_us()
    local source = kernel.print(one.plan, one.target)
    local image = image_of(source, one.target)
    kv.check(kv.C.kvl_code_open(b.device, one.plan.what, image, #image, out_code))
    times[i] = clock_us() - start
    kv.C.kvl_code_close(out_code[0])
  end
  return median(times)
end

-- NVRTC keeps what it has compiled, so that no two sources here may be equal.
local count = 0
local function compiled(source, target)
  count = count + 1
  local name = ("kvl_bench_%.0f_%d"):format(clock_us(), count)
  local kind = compiler.LANES[target] and "" or 'extern "C" __device__ '
  local text = ("%s\n%sint %s = 1;\n"):format(source, kind, name)
  return assert(kernel.compile(text, target))
end

local function kept(source, target)
  return assert(cache.load(kernel.name_of(source, target)), "the cache has not kept it")
end

local function small_rig(b, group)
  return shipped.rig(b.device, { dtype = "bf16", query_dtype = "bf16",
    group = group or paged.GROUP, kv_heads = paged.KV_HEADS, block_size = paged.BLOCK,
    head_dim = paged.DIM, lens = { 64, 64 } })
end

--- The kernel of a summary or score in a case of shipped.lua.
local function of_case(case, what)
  return function(b)
    return shipped.kernel(case.expression(small_rig(b, case.group)), what)
  end
end

--- The kernel that a step of a phase compiles for a policy's hook or for what it emits.
local function of_hook(def, phase, place)
  return function(b)
    local dev, is_prefill = b.device, phase == "prefill"
    local whole = { name = "bench", decode = true, prefill = true, complete = false,
                    select_blocks = function() end }
    for key, value in pairs(def) do whole[key] = value end
    local p = policy.define(whole) {}
    p.slopes = kv.full(dev, "f32", { paged.KV_HEADS, paged.GROUP }, 0.1)
    local memory = kv.cache { device = dev, layers = 1, kv_heads = paged.KV_HEADS,
      head_dim = paged.DIM, block_size = paged.BLOCK, blocks = 8, format = "bf16" }
    local attention = kv.attention { cache = memory, heads = paged.HEADS, max_seqs = 1,
      prefill_policy = p, decode_policy = p }
    local seq, batch = memory:sequence(), memory:batch { max_seqs = 1, max_tokens = 64 }
    local tokens = is_prefill and 64 or 1
    attention:begin(batch:append({ seq }, { tokens }), is_prefill)
    local ctx = attention.context
    local q = kv.randn(dev, "bf16", { tokens, paged.HEADS, paged.DIM }, { seed = 1 })
    ctx:begin_layer(0, q, memory:layer(0))
    attention:over(nil, ctx)
    for _, one in ipairs(p.hook:kernels()) do
      -- A CPU has one kernel for both phases.
      local is_of_phase = place ~= "hook" or b.kind == "cpu"
        or one.plan.is_prefill == is_prefill
      if one.plan.place == place and is_of_phase then return one end
    end
    error(("no kernel of %s was compiled"):format(place))
  end
end

local function add(b, name, kernel_of)
  for _, device in ipairs { "cpu", "cuda" } do
    local function row(of, most_us, image_of)
      b:case { id = "K4", name = name .. of, on = device, target = { us = most_us },
        setup = function() return { us = time(b, kernel_of(b), image_of) } end }
    end
    row("", 5e5, compiled)
    row(", from the cache", 5e3, kept)
  end
end

return function(b)
  for _, case in ipairs(shipped.cases) do
    for _, what in ipairs { "summary", "score" } do
      if what == "score" and not case.no_score or what == "summary" and case.summary then
        add(b, ("%s, %s"):format(case.name, what), of_case(case, what))
      end
    end
  end
  local slope = e.const("f32", "slopes", "kv_head", "head")
  local bias = { bias = slope * (e.position - e.query_position) }
  local mass = { emit = { mass = e.weight:sum "token":mean "head" } }
  add(b, "ALiBi as a bias, decode", of_hook(bias, "decode", "hook"))
  add(b, "ALiBi as a bias, prefill", of_hook(bias, "prefill", "hook"))
  add(b, "mass by emit, attention", of_hook(mass, "decode", "hook"))
  add(b, "mass by emit, after it", of_hook(mass, "decode", "emit"))
end
