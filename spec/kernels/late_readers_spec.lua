--- On a GPU, kernels begin before the kernels ahead of them have ended, but write nothing
-- until then (kernels/cuda/programmatic.cuh; tools/early_writes.lua checks their PTX).
-- Here a copy waits for a product of some 60 us, and then reads memory that was freed in
-- the meantime: it is the workspace of the op behind it, which has long begun.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local HEADS, BLOCKS, ROUNDS = 2, 8, 20

local function words_of(bits) return math.floor(bits / 32) + 1 end

--- The words of hot_resolve's workspace (temporary_bytes in hot_resolve.cuh): of one KV
-- head, and where those begin that it clears first.
local function words(slots)
  local first = BLOCKS + 2 * slots
  return first + words_of(slots) + 6 * words_of(BLOCKS), first
end

local function struct(ctype, tensors)
  local s = ffi.new(ctype)
  for name, tensor in pairs(tensors) do s[name] = tensor end
  return s
end

--- A hot cache of so many slots a KV head, and a call that selects its first blocks.
local function resolve_of(dev, slots)
  local function index(rows, ...) return kv.full(dev, "i32", { HEADS, rows, ... }, -1) end
  local order, blocks = {}, {}
  for i = 0, HEADS * slots - 1 do order[i + 1] = i % slots end
  for i = 1, BLOCKS do blocks[i] = i - 1 end
  local function list(...) return kv.full(dev, "i32", { ... }, -1) end
  local tensors = { memory = kv.zeros(dev, "f32", { slots, 2, HEADS, 1, 8 }),
    slot_of = index(slots + BLOCKS), block_of = index(slots),
    order = kv.from(dev, "i32", { HEADS, slots }, order),
    counters = kv.zeros(dev, "i64", { 5 }) }
  local call = { selection = kv.from(dev, "i32", { 1, 1, BLOCKS }, blocks),
    tables = kv.from(dev, "i32", { 1, BLOCKS }, blocks), slots = list(1, HEADS, BLOCKS),
    miss_from = list(1, HEADS, BLOCKS), miss_to = list(1, HEADS, BLOCKS) }
  local hot, resolve = struct("kvl_hot", tensors), struct("kvl_resolve", call)
  return function()
    kv.check(kv.C.kvl_hot_resolve(hot, resolve))
    return tensors, call -- which live as long as this function
  end
end

--- Reads what the workspace was before, in the words that are cleared first.
local function check(dev, slots, name)
  local all, first = words(slots)
  local resolve = resolve_of(dev, slots)
  local x = support.randn(kv.device "cpu", "bf16", { 1, 4096 }, 4):to(dev)
  local weight = kv.full(dev, "bf16", { 32768, 4096 }, 0.5)
  local y, read = kv.full(dev, "bf16", { 1, 32768 }, 0), {}
  for head = 1, HEADS do read[head] = kv.zeros(dev, "f32", { all - first }) end
  resolve()
  dev:sync()
  dev:trim()
  local function step()
    local before = kv.tensor(dev, "f32", { HEADS * all })
    before:fill_(1)
    kv.ops.linear(x, weight, y, "plain")
    for head = 1, HEADS do
      local part = before:narrow((head - 1) * all + first, all - first)
      kv.check(kv.C.kvl_unary(kv.C.KVL_UNARY_NEG, part, read[head]))
      part:free()
    end
    before:free()
    resolve()
  end
  local function wrong(run)
    local count = 0
    for _ = 1, ROUNDS do
      for head = 1, HEADS do read[head]:fill_(0) end
      run()
      dev:sync()
      for head = 1, HEADS do
        if read[head]:min():item() ~= -1 or read[head]:max():item() ~= -1 then
          count = count + 1
          break
        end
      end
    end
    return count
  end
  local eager = wrong(step)
  local reserved = dev:stats().bytes_reserved
  step()
  assert.equal(reserved, dev:stats().bytes_reserved) -- the workspace is what was freed
  local graph = kv.graph(step, dev)
  local replayed = wrong(function() graph:replay() end)
  graph:close()
  assert.equal(("0 of %d steps wrong, 0 replayed"):format(ROUNDS),
    ("%d of %d steps wrong, %d replayed"):format(eager, ROUNDS, replayed), name)
end

describe("memory that is read late #gpu", function()
  for _, slots in ipairs { 30000, 60000, 120000 } do
    local name = ("is left alone by hot_resolve over %d slots"):format(slots)
    support.it_on_gpu(name, function(dev) check(dev, slots, name) end)
  end
end)
