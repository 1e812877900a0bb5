--- What a step costs, for servers without a model. It is a roofline of the matrix
-- products, plus the attention.
--
--   step_us = max(us_decode_base, us_per_token_prefill * tokens)
--           + us_per_kv_block * (blocks that decoding requests read)
--           + us_per_prefill_block * sum over prefill tokens of the blocks they see
--   transfer_us = link_us + bytes_block / link_gbps            (1 GB/s: 1000 bytes a us)
--
-- tokens counts all tokens of the step; a block holds block_size tokens in all layers.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local C = require("kvlab.library").C
local options = require "kvlab.options"

local M = {}

local not_negative = options.required(options.not_negative)
local positive = options.required(options.positive)
local KNOWN = {
  us_per_token_prefill = not_negative, us_decode_base = not_negative,
  us_per_kv_block = not_negative, us_per_prefill_block = not_negative,
  link_gbps = positive, link_us = not_negative, bytes_block = positive,
}

--- Llama-8B in bf16 on one H100 80GB, for blocks of `block_size` tokens. Measured, from
-- docs/performance.md: a decode step takes 6.4 ms (P13, 1K of context); KV is read at
-- 0.99 of 3166 GB/s (P1); causal attention of a prefill runs at 617 TFLOP/s (P5). The
-- matrix products of a prefill have 6.98e9 weights, 2 flops each, and run at 0.8 of 792
-- TFLOP/s (792 is measured, 0.8 is assumed). The link is pinned host memory: 55 GB/s is
-- measured, 10 us is assumed. KV of a token: 32 layers * 2 * 8 KV heads * 128 * 2 bytes.
function M.llama_8b_h100(block_size)
  local bytes = 32 * 2 * 8 * 128 * 2 * block_size
  return {
    us_per_token_prefill = 2 * 6.98e9 / (0.8 * 792e6), us_decode_base = 6400,
    us_per_kv_block = bytes / (0.99 * 3166e3),
    us_per_prefill_block = 4 * 32 * 128 * 32 * block_size / 617e6,
    link_gbps = 55, link_us = 10, bytes_block = bytes,
  }
end

---@class kvlab.CostModel
local CostModel = {}
CostModel.__index = CostModel

--- A cost model made of these numbers; all of them must be given.
---@param o table  us_per_token_prefill, us_decode_base, us_per_kv_block,
--                 us_per_prefill_block, link_gbps, link_us, bytes_block
---@return kvlab.CostModel
local function new(o, level)
  options.check("cost_model", o, KNOWN, level)
  local self = {}
  for name in pairs(KNOWN) do self[name] = o[name] end
  return setmetatable(self, CostModel)
end

--- Microseconds of attention for a chunk of n prompt tokens behind `before` other tokens.
-- The tokens that the chunk's queries see add up to about n * (before + n / 2).
function CostModel:prefill_attention_us(n, before, block_size)
  return self.us_per_prefill_block * n * (before + n / 2) / block_size
end

--- Microseconds to prefill n tokens in one step on an idle server.
function CostModel:prefill_us(n, block_size)
  return math.max(self.us_decode_base, self.us_per_token_prefill * n)
    + self:prefill_attention_us(n, 0, block_size)
end

-- ---- calibration ----------------------------------------------------------------------

local function median_us(engine, times, fn)
  local list = {}
  for i = 1, times do
    local start = C.kvl_clock_ns()
    fn()
    engine.model.device:sync()
    list[i] = tonumber(C.kvl_clock_ns() - start) * 1e-3
  end
  table.sort(list)
  return list[math.ceil(times / 2)]
end

local CALIBRATE = { link_gbps = positive, link_us = not_negative,
                    context = options.count }

--- Measures the cost of an engine's steps: a decode step over a short and over a long
-- context, and a prefill chunk at the start and behind that context. It takes some 20
-- steps and `context` (2048) tokens of the engine's cache. The link is not measured; its
-- numbers must be given.
---@param engine models.Engine
---@param o table  link_gbps, link_us; context (2048)
---@return kvlab.CostModel
function M.calibrate(engine, o)
  options.check("cost_model.calibrate", o, CALIBRATE)
  local cache, n = engine.cache, engine.chunk
  local size, context = cache.block_size, o.context or 2048
  if context > size * cache.blocks then
    error(("cost_model.calibrate: context is %d, expected at most the %d tokens of the "
      .. "engine's cache"):format(context, size * cache.blocks), 2)
  end
  local tokens = {}
  for i = 1, context do tokens[i] = i % engine.model.config.vocab end
  local chunk = { unpack(tokens, 1, math.min(n, 512)) }
  local seq = engine:sequence()
  local function prefill_at(length)
    return median_us(engine, 3, function()
      seq:truncate(length)
      engine:prefill(seq, chunk)
    end)
  end
  local function decode_at(length)
    return median_us(engine, 5, function()
      seq:truncate(length)
      engine:decode({ seq }, { 0 })
    end)
  end
  local first = prefill_at(0)
  local short = decode_at(#chunk)
  seq:truncate(0)
  engine:prefill(seq, tokens)
  local long = decode_at(context)
  local behind = prefill_at(context)
  engine:finish(seq)
  local blocks = context / size
  local us_kv = math.max(0, (long - short) / (blocks - #chunk / size))
  local us_prefill_block = math.max(0, (behind - first) / (#chunk * blocks))
  local seen = us_prefill_block * #chunk * #chunk / 2 / size
  return new {
    us_decode_base = math.max(0, short - us_kv * #chunk / size),
    us_per_token_prefill = math.max(0, (first - seen) / #chunk),
    us_per_kv_block = us_kv, us_per_prefill_block = us_prefill_block,
    link_gbps = o.link_gbps, link_us = o.link_us,
    bytes_block = cache:bytes_token() * size * cache.kv_heads * cache.layers,
  }
end

--- The kind of an engine of a model.
M.ENGINE = options.like("an engine of a model", "model", "attention", "cache", "chunk")
--- The kind of a cost model.
M.COST_MODEL = options.like("a cost model", "prefill_us")

arguments.functions(M, "cost_model", { llama_8b_h100 = { block_size = options.count },
                                       calibrate = { engine = M.ENGINE } })
arguments.methods(CostModel, "a cost model", {
  prefill_us = { n = options.whole, block_size = options.count },
  prefill_attention_us = { n = options.whole, before = options.whole,
                           block_size = options.count },
})

return constructor(M, arguments.of("cost_model", new, {
  level = options.optional(options.whole) }))
