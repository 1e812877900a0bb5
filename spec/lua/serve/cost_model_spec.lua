--- A cost model from a results file of the bench.
local json = require "kvlab.json"
local kv = require "kvlab"
local raises = require("spec.support").raises
local temporary = require "spec.temporary"

local ROWS = {
  { id = "header", description = "a GPU", commit = "abc1234", date = "2026-11-22" },
  { id = "T", name = "GEMM", us = 1, tflop_s = 698 },
  { id = "L", name = "one copy", us = 1, gb_s = 50 },
  { id = "P1", name = "paged decode, 16 x 32768", us = 1, gb_s = 2000 },
  { id = "P1", name = "paged decode, 2 x 16", us = 1, gb_s = 1 },
  { id = "P5", name = "prefill, causal, 16384", us = 1, tflop_s = 500 },
  { id = "P13", name = "decode step, 32 layers of 4096, 1 x 1024, replayed", us = 5000 },
}

--- A file of these rows without the one of an id.
local function file_without(id)
  local lines = {}
  for _, row in ipairs(ROWS) do
    if row.id ~= id then lines[#lines + 1] = json.encode(row) end
  end
  return temporary.file(table.concat(lines, "\n") .. "\n")
end

describe("cost model", function()
  it("takes what the bench measured, and says where it is from", function()
    local cost = kv.cost_model.llama_8b(16, file_without "none")
    local bytes = 2 * 2 ^ 20 -- of a block of 16 tokens
    assert.equal(5000, cost.us_decode_base)
    assert.equal(bytes, cost.bytes_block)
    assert.equal(bytes / 2000e3, cost.us_per_kv_block)
    assert.equal(50, cost.link_gbps)
    local us = 2 * 6.98e9 / (0.8 * 698e6)
    assert.is_true(math.abs(cost.us_per_token_prefill - us) < 1e-9)
    assert.equal(4 * 32 * 128 * 32 * 16 / 500e6, cost.us_per_prefill_block)
    local model = kv.cost_model(cost)
    assert.equal("a GPU, commit abc1234, 2026-11-22", model.origin)
    assert.is_true(model:prefill_us(10000, 16) > 2e5)
  end)

  it("of an H100 is that of a run in bench/results", function()
    local cost = kv.cost_model.llama_8b_h100(16)
    assert.matches("^NVIDIA H100 80GB HBM3, .*, commit 310ad36, 2026%-11%-21$",
      cost.origin)
    local h200 = kv.cost_model.llama_8b(16, kv.paths.root
      .. "/bench/results/20261122-h200-b6e8a63.jsonl")
    assert.is_true(h200.us_decode_base < cost.us_decode_base)
  end)

  it("names a file that is missing, and a row that is missing in it", function()
    raises("/nonexistent.jsonl cannot be read; `kvlab bench P1 P5 P13 T L --json`",
      kv.cost_model.llama_8b, 16, "/nonexistent.jsonl")
    for id, words in pairs { T = "no row T with tflop_s", L = "no row L with gb_s",
        P1 = "no row P1, paged decode, 16 x 32768 with gb_s",
        P5 = "no row P5, prefill, causal, 16384 with tflop_s", P13 = "no row P13, " } do
      raises(words, kv.cost_model.llama_8b, 16, file_without(id))
    end
    raises("is no file of `kvlab bench --json`", kv.cost_model.llama_8b, 16,
      temporary.file "nothing of this kind\n")
    raises("llama_8b: path is nil, expected", kv.cost_model.llama_8b, 16)
    local ok, why = pcall(function()
      kv.cost_model.llama_8b(16, "/nonexistent.jsonl") -- this line is blamed
    end)
    assert.is_false(ok)
    assert.matches("cost_model_spec.lua:%d+: ", why)
  end)
end)
