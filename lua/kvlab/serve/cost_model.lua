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
local json = require "kvlab.json"
local library = require "kvlab.library"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"

local C = library.C
local M = {}

local not_negative = options.required(options.not_negative)
local positive = options.required(options.positive)
local KNOWN = {
  us_per_token_prefill = not_negative, us_decode_base = not_negative,
  us_per_kv_block = not_negative, us_per_prefill_block = not_negative,
  link_gbps = positive, link_us = not_negative, bytes_block = positive,
  origin = options.string,
}

-- ---- from a bench ---------------------------------------------------------------------

-- The run that docs/performance.md calls the main one.
local H100 = library.paths.root .. "/bench/results/20261121-h100-310ad36.jsonl"

-- The rows that are needed: id, name (nil: any) and what is read from it.
local ROWS = {
  decode = { "P13", "decode step, 32 layers of 4096, 1 x 1024, replayed", "us" },
  read = { "P1", "paged decode, 16 x 32768", "gb_s" },
  attend = { "P5", "prefill, causal, 16384", "tflop_s" },
  multiply = { "T", nil, "tflop_s" }, link = { "L", nil, "gb_s" },
}
local GEMM_SHARE, LINK_US = 0.8, 10 -- assumed, not measured

--- What a results file of `kvlab bench --json` measured: the numbers of ROWS by name, and
-- where they come from, in words.
local function measured(path)
  local text = sources.read(path)
  if not text then
    options.fail(("cost_model: %s cannot be read; `kvlab bench P1 P5 P13 T L --json` "
      .. "prints such a file"):format(path))
  end
  local found, head = {}, {}
  for line in text:gmatch "[^\n]+" do
    local ok, row = pcall(json.decode, line)
    if not ok or type(row) ~= "table" then
      options.fail(("cost_model: %s is no file of `kvlab bench --json`"):format(path))
    end
    if row.id == "header" then head = row end
    for name, want in pairs(ROWS) do
      if row.id == want[1] and (not want[2] or row.name == want[2]) then
        found[name] = row[want[3]]
      end
    end
  end
  for _, name in ipairs(sorted.keys(ROWS)) do
    local want = ROWS[name]
    if type(found[name]) ~= "number" then
      options.fail(("cost_model: %s has no row %s%s with %s"):format(path, want[1],
        want[2] and ", " .. want[2] or "", want[3]))
    end
  end
  return found, ("%s, commit %s, %s"):format(head.description or "an unknown device",
    head.commit or "unknown", head.date or "no date")
end

local runs = {} -- by path

--- The cost of Llama-8B in bf16, for blocks of `block_size` tokens, from a run of the
-- bench on one GPU. A decode step costs what P13 took with 1K of context. KV is read as
-- fast as in P1. Causal attention of a prefill runs as P5 did over 16K. The matrix
-- products of a prefill have 6.98e9 weights, 2 flops each, and run at 0.8 (assumed) of
-- T. The link is L; its latency of 10 us is assumed. KV of a token: 32 layers * 2 * 8 KV
-- heads * 128 * 2 bytes.
---@param block_size integer
---@param path string  a file of `kvlab bench --json` with the rows P1, P5, P13, T and L
---@return table cost  as kv.cost_model takes it; origin: device, commit and date
function M.llama_8b(block_size, path)
  if not runs[path] then runs[path] = { measured(path) } end
  local rate, origin = runs[path][1], runs[path][2]
  local bytes = 32 * 2 * 8 * 128 * 2 * block_size
  return {
    us_per_token_prefill = 2 * 6.98e9 / (GEMM_SHARE * rate.multiply * 1e6),
    us_decode_base = rate.decode, us_per_kv_block = bytes / (rate.read * 1e3),
    us_per_prefill_block = 4 * 32 * 128 * 32 * block_size / (rate.attend * 1e6),
    link_gbps = rate.link, link_us = LINK_US, bytes_block = bytes, origin = origin,
  }
end

--- llama_8b of one H100 80GB, from bench/results/20261121-h100-310ad36.jsonl.
---@param block_size integer
---@return table cost
function M.llama_8b_h100(block_size) return M.llama_8b(block_size, H100) end

---@class kvlab.CostModel
local CostModel = {}
CostModel.__index = CostModel

--- A cost model made of these numbers, all of which must be given.
---@param o table  us_per_token_prefill, us_decode_base, us_per_kv_block,
--                 us_per_prefill_block, link_gbps, link_us, bytes_block; origin: where
--                 the numbers are from, in words, which may be missing
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
    origin = "steps of an engine on " .. cache.device:description(),
  }
end

--- The kind of an engine of a model.
M.ENGINE = options.like("an engine of a model", "model", "attention", "cache", "chunk",
  "sequence")
--- The kind of a cost model.
M.COST_MODEL = options.like("a cost model", "prefill_us")

arguments.functions(M, "cost_model", { llama_8b_h100 = { block_size = options.count },
  llama_8b = { block_size = options.count, path = options.string },
  calibrate = { engine = M.ENGINE } })
arguments.methods(CostModel, "a cost model", {
  prefill_us = { n = options.whole, block_size = options.count },
  prefill_attention_us = { n = options.whole, before = options.whole,
                           block_size = options.count },
})

return constructor(M, arguments.of("cost_model", new, {
  level = options.optional(options.whole) }))
