--- Compiles the kernels of the shipped policies' expressions and the plain read of the
-- bench, for a bundle to carry, so that these policies run at full speed, and the bench
-- knows its limit, where there is no compiler and no NVRTC. No GPU is needed. A machine
-- that can compile also runs every other shape and policy.
--
--   ./kvlab run tools/precompile.lua --set out=DIR --set arch=80,90a
--
-- out: the folder; arch: the GPU architectures, "" for none. Which shapes: SHAPES below,
-- on the CPU for every instruction set. To compile fewer, name some of them:
-- --set isa=avx2 --set dtype=bf16,f32 --set head_dim=64.
local cache = require "kvlab.kernel.run.cache"
local compiler = require "kvlab.kernel.run.compiler"
local kernel = require "kvlab.kernel.run.kernel"
local kernel_hook = require "kvlab.kernel.run.hook"
local kv = require "kvlab"
local named = require "kvlab.named"
local nvrtc = require "kvlab.kernel.run.nvrtc"
local policy = require "kvlab.policy.policy"
local sorted = require "kvlab.sorted"
local source_text = require "kvlab.kernel.print.source_text"

named.finds_own = false

local set = kv.command_line.set
local out = set.out or error("precompile: --set out=DIR is missing", 0)

local SHAPES = { block_size = { 16, 64 }, head_dim = { 64, 128, 256 },
                 group = { 1, 4, 8 }, dtype = { "bf16", "f16", "f32", "f8e4m3" },
                 isa = sorted.keys(compiler.LANES) }

for field, all in pairs(SHAPES) do
  local known, chosen = {}, {}
  for _, value in ipairs(all) do known[tostring(value)] = value end
  for word in tostring(set[field] or ""):gmatch "[^,]+" do
    chosen[#chosen + 1] = known[word]
      or error(("precompile: %s is %s, expected some of %s"):format(field, word,
        table.concat(all, ", ")), 0)
  end
  if chosen[1] then SHAPES[field] = chosen end
end

local count, failed, done = 0, 0, {}

--- Compiles a source for a target, unless the same was compiled before.
local function make_source(what, source, target)
  local name = kernel.name_of(source, target)
  if done[name] then return end
  done[name] = true
  local image, why = kernel.compile(source, target)
  if image and cache.keep(name, image, out) then
    count = count + 1
    return
  end
  failed = failed + 1
  io.stderr:write(("%s for %s: %s\n"):format(what, target,
    why or out .. " cannot be written to"))
end

local function make(plan, target)
  make_source(plan.what, kernel.print(plan, target), target)
end

local targets = { cpu = SHAPES.isa, gpu = {} }
if not nvrtc.open() and (set.arch or "") ~= "" then
  io.stderr:write "there is no NVRTC: no kernels for GPUs\n"
else
  for arch in (set.arch or ""):gmatch "[^,]+" do
    local virtual = arch:match "^(%d+):" -- 80:90, code of sm_80 that runs on sm_90
    targets.gpu[#targets.gpu + 1] = virtual and "compute_" .. virtual or "sm_" .. arch
  end
end

--- The dtypes of queries over a cache of a dtype.
local function queries(dtype)
  return dtype == "f8e4m3" and { "bf16", "f16" } or { dtype }
end

local function make_everywhere(plan, p)
  local x = p.expressions.attention or {}
  for _, target in ipairs(targets.cpu) do make(plan, target) end
  for _, target in ipairs(targets.gpu) do
    if plan.place ~= "hook" then make(plan, target) end
    for _, q in ipairs(plan.place == "hook" and queries(plan.dtype) or {}) do
      plan.q_dtype = q
      for _, phase in ipairs { "decode", "prefill" } do
        plan.is_prefill = phase == "prefill"
        plan.keeps = next(x.emit or {}) ~= nil and phase == "decode"
        local is_used = phase == "decode" or x.bias or x.mask or x.log_weight
        if p[phase] and is_used then make(plan, target) end
      end
    end
  end
end

--- Attaches a policy to a shape, which opens its kernels, and compiles what it opens.
local function attach(name, shape)
  local p, open = kv.policy(name), kernel.open
  kernel.chosen = "lua"
  kernel.open = function(plan, dev)
    make_everywhere(plan, p)
    return open(plan, dev)
  end
  local ok, why = pcall(kv.scope, function()
    policy.attach(p, shape)
    kernel_hook.emitters(p.prefill and p or {}, p) -- opens those of a prefill
  end)
  kernel.chosen, kernel.open = nil, open
  if not ok then error(why, 0) end
end

local function has_expressions(p)
  local x = p.expressions
  return x.fields or x.score or x.attention or next(x.maps)
end

for _, name in ipairs(policy.names()) do
  if has_expressions(kv.policy(name)) then
    for _, block_size in ipairs(SHAPES.block_size) do
      for _, head_dim in ipairs(SHAPES.head_dim) do
        for _, group in ipairs(SHAPES.group) do
          for _, dtype in ipairs(SHAPES.dtype) do
            attach(name, { device = kv.device "cpu", layers = 1, blocks = 4, kv_heads = 1,
              heads = group, head_dim = head_dim, block_size = block_size, dtype = dtype,
              max_blocks = 4, scale = 1 })
          end
        end
      end
    end
  end
end
package.path = kv.paths.root .. "/?.lua;" .. package.path
local plain = require "bench.lib.plain".kernel()
for _, target in ipairs(targets.cpu) do
  make_source(plain.name, source_text.whole(plain, "c", '1 ""'), target)
end
for _, target in ipairs(targets.gpu) do
  make_source(plain.name, source_text.whole(plain, "cuda", '1 ""'), target)
end
print(("%d kernels in %s"):format(count, out))
if failed > 0 then os.exit(1) end
