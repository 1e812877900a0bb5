--- The executor of a server without a model. Steps take the time of a cost model, and a
-- clock of its own advances by them, so long traces replay in seconds and give the same
-- result in every run. Blocks come from a real pool, without memory. The store is a set
-- of block keys with a size limit, in the order of their last use, behind a modelled
-- link.
local ffi = require "ffi"
local library = require "kvlab.library"
local lru = require "kvlab.serve.lru"
local cache = require "kvlab.memory.cache"
local cost_model = require "kvlab.serve.cost_model"
local link_model = require "kvlab.serve.link_model"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Simulator
---@field memory table    see kvlab.cache.pool
---@field bytes_block number
local Simulator = {}
Simulator.__index = Simulator

local FRESH = 2 ^ 52 -- keys of blocks that no trace names; they count down from here

--- o: cost, blocks, block_size, store_blocks (0: no store; math.huge: no limit),
-- prefetch_workers, max_pending_prefetch, max_seqs, max_tokens
function M.new(o)
  local cost = cost_model(o.cost)
  local self = setmetatable({
    cost = cost, memory = cache.pool(o.blocks, o.block_size), now_us = 0,
    bytes_block = cost.bytes_block, store = lru.new(), store_blocks = o.store_blocks,
    fresh = FRESH, store_evictions = 0, stored = 0,
    handles = ffi.new("kvl_sequence *[?]", o.max_seqs),
    counts = ffi.new("int32_t[?]", o.max_seqs),
    places = ffi.new("int64_t[?]", o.max_tokens + o.max_seqs),
    copies = ffi.new("int32_t[?]", 2 * o.max_seqs),
  }, Simulator)
  self.link = link_model.new {
    workers = o.prefetch_workers, max_pending = o.max_pending_prefetch,
    bytes_us = cost.link_gbps * 1000, us_latency = cost.link_us,
    begin = function(task) return self:find(task.request, task.first, task.last) end,
  }
  return self
end

function Simulator:now() return self.now_us end

local function go_on(self, us)
  self.now_us = self.now_us + us
  self.link:advance(self.now_us)
end

--- Advances the clock to `us`.
function Simulator:sleep_until(us) go_on(self, math.max(0, us - self.now_us)) end

-- ---- keys and store -------------------------------------------------------------------

--- Gives a request the keys of its trace, whose hash blocks may be larger than a block.
function Simulator:admit_keys(r, o)
  local ids, size = o.hash_ids or {}, self.memory.block_size
  local parts = (o.hash_block or size) / size
  if parts < 1 or parts % 1 ~= 0 then
    error(("request: hash_block is %d, expected a multiple of block_size = %d"):format(
      o.hash_block, size), 3)
  end
  for i = 1, math.min(math.floor(r.prompt_length / size), #ids * parts) do
    r.block_hashes[i] = ids[math.ceil(i / parts)] * parts + (i - 1) % parts
  end
  for i = #r.block_hashes + 1, math.floor(r.prompt_length / size) do self:key(r, i) end
end

--- The key of a full block. It is unique unless the trace gives it to other blocks.
function Simulator:key(r, i)
  local key = r.block_hashes[i]
  if not key then
    self.fresh = self.fresh - 1
    key = self.fresh
    r.block_hashes[i] = key
  end
  return key
end

--- How many of the blocks first ... last the store has, without a gap.
function Simulator:find(r, first, last)
  for i = first, last do
    if not self.store:has(r.block_hashes[i]) then return i - first end
  end
  return math.max(0, last - first + 1)
end

--- Called when a block has been computed: puts it into the store, which may forget other
-- blocks.
function Simulator:put(r, i)
  local store, key = self.store, r.block_hashes[i]
  if self.store_blocks == 0 then return end
  if store:has(key) then return store:touch(key) end
  store:add(key)
  self.stored = self.stored + 1
  if store.count > self.store_blocks then
    store:remove(store.oldest)
    self.store_evictions = self.store_evictions + 1
  end
end

-- ---- prefetch -------------------------------------------------------------------------

--- Starts to bring `count` blocks of a request, beginning with block `first`. Returns a
-- ticket, or nil, "full".
function Simulator:submit(r, first, count, priority)
  for i = first, first + count - 1 do self.store:touch(r.block_hashes[i]) end
  return self.link:submit { request = r, first = first, last = first + count - 1,
                            priority = priority, bytes_block = self.bytes_block }
end

--- The blocks that a ticket has loaded; nil until it is done.
function Simulator.poll(_, ticket)
  return ticket.state == "complete" and ticket or nil
end

function Simulator:wait(ticket)
  if ticket.state ~= "complete" then self.now_us = self.link:finish(ticket) end
end

function Simulator:cancel(ticket) self.link:cancel(ticket) end

function Simulator.reprioritise(_, r, priority) r.prefetch_task.priority = priority end

-- ---- steps ----------------------------------------------------------------------------

function Simulator.arrived() return true end -- there are no policies here
function Simulator.begin() end
function Simulator.finished() end

local function append(self, list)
  local n = #list
  for i = 1, n do
    local r = list[i]
    self.handles[i - 1], self.counts[i - 1] = r.seq.handle, r.num_scheduled_tokens
  end
  check(C.kvl_sequences_append(self.handles, self.counts, n, 0, self.places, self.copies))
end

--- The counters of the link and of the store.
function Simulator:stats()
  local out = { stored = self.stored, evictions = self.store_evictions,
                records = self.store.count }
  for name, value in pairs(self.link.stats) do out[name] = value end
  return out
end

--- Computes a step: only its time passes, since there are no tokens.
function Simulator:run(plan)
  local cost, size = self.cost, self.memory.block_size
  local tokens, us = #plan.decode, 0
  for _, r in ipairs(plan.decode) do
    local blocks = r.selected_blocks and #r.selected_blocks
      or math.ceil(r.num_tokens / size)
    us = us + cost.us_per_kv_block * blocks
  end
  for _, r in ipairs(plan.prefill) do
    local n = r.num_scheduled_tokens
    tokens = tokens + n
    us = us + cost:prefill_attention_us(n, r.num_computed_tokens, size)
  end
  append(self, plan.decode)
  append(self, plan.prefill)
  for _, r in ipairs(plan.decode) do r.is_computed = true end
  for _, r in ipairs(plan.prefill) do r.is_computed = true end
  us = us + math.max(cost.us_decode_base, cost.us_per_token_prefill * tokens)
  go_on(self, us)
  return us
end

return M
