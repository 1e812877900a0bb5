--- The resident tier: KV memory lies on the device, and attention reads it where it is.
--
-- A memory tier says where the KV memory of a cache lies and how a step reaches it. This
-- is the interface of every tier, also of host_tier.lua:
--   name                            in words, for people: "device"
--   is_resident                     KV memory can be read directly, at the device's speed
--   ARRAYS                          the arrays that it adds to the layout of a batch
--                                   (batch.lua)
--   allocate(dims)                  the cache's memory, [layers, blocks, ...page]
--   expect_limits(seqs, tokens)     raises when a batch may be too large for it
--   place(batch)                    a batch was appended to: fill its arrays
--   begin(batch, is_prefill)        a step starts
--   append(layer, q, k, v, batch, inv_freq)    write K and V of a layer, rotated where
--                                   inv_freq is given; returns the memory on the device
--                                   that has the new tokens, and i32 [touched], where
--   appended(layer)                 the policies have seen them
--   undone()                        the step that began last did not happen
--   replayed()                      a graph computed the step that began last
--   readers(attention, through)     who attends in prefill and in decode:
--                                   reader:attend(attention, selection, ctx, out, lse,
--                                   hook, emitters), by attention:attend_part. A prefill
--                                   may have emitters, which are hooks: then the reader
--                                   reads the same K once more, for emitter:add_part
--   before_copy(layer, to)          whole blocks are about to be copied in KV memory
--   written(first, layers, blocks)  something else is about to write blocks of KV memory
--   count_read(bytes)               a kernel reads the cache's memory where it lies
--   bytes()                         that crossed the link: to the device, to the host
--   close()
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Resident
local Resident = { name = "device", is_resident = true, ARRAYS = {} }
Resident.__index = Resident

---@param cache kvlab.Cache
function M.new(cache) return setmetatable({ cache = cache }, Resident) end

function Resident:allocate(dims)
  return tensor.tensor(self.cache.device, self.cache.format.memory, dims)
end

function Resident:append(layer, q, k, v, batch, inv_freq)
  local cache, memory = self.cache, self.cache:layer(layer)
  if inv_freq then
    cache.format:rope_append(layer, q, k, v, batch.positions, inv_freq, batch.places,
      memory)
  else
    cache.format:append(layer, k, v, batch.places, memory)
  end
  return memory, batch.blocks
end

local direct = {}
function direct:attend(attention, selection, ctx, out, lse, hook, emitters)
  out = attention:attend_part(ctx, hook, ctx.cache, selection, nil, out, lse)
  for i = 1, emitters and #emitters or 0 do
    emitters[i]:add_part(ctx, lse, ctx.cache, selection, nil)
  end
  return out
end

function Resident:readers() return direct, direct end

function Resident:count_read() end
function Resident:bytes() return 0, 0 end

function Resident:expect_limits() end
function Resident:place() end
function Resident:begin() end
function Resident:appended() end
function Resident:undone() end
function Resident:replayed() end
function Resident:before_copy() end
function Resident:written() end
function Resident:close() end

return M
