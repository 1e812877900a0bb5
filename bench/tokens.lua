--- Attention over listed tokens, as an indexer selects them (E9): 2048 tokens a row, 32
-- query heads on 8 KV heads of 128. The tokens are chosen at random, for decode from
-- 131072 tokens, for prefill from half as many. Limit: K and V of every entry of every
-- list, read at the read bandwidth of the same run. Rows of a prompt can be faster,
-- because the L2 holds the tokens that they share. The cache is bf16; two rows: f8e4m3.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local KV_HEADS, BLOCK, DIM = paged.KV_HEADS, paged.BLOCK, paged.DIM

--- Compares the heads of KV head g of a row with attention over gathered tokens.
local function check_row(w, row, g)
  kv.scope(function()
    local tokens = w.listed:reshape { w.q:size(0), -1 }:index(row)
    local number = tokens / BLOCK
    local block = w.tables:index(0):reshape { -1, 1 }:gather_rows(number)
      :reshape(number:dims())
    local first = (block * (2 * KV_HEADS) + g) * BLOCK + (tokens - number * BLOCK)
    local function gather(half)
      return w.cache:reshape { -1, DIM }:gather_rows(first + half * KV_HEADS * BLOCK)
        :cast "f32"
    end
    local want = paged.attend(paged.group_rows(w.q, row, g), gather(0), gather(1))
    paged.expect("token attention", paged.group_rows(w.out, row, g), want, 0.02)
  end)
end

--- A list of k random tokens out of `tokens` for each of `rows` rows: one row for each of
-- so many sequences, which have the same blocks, or the rows of one prompt.
local function listed(rows, k, tokens, dtype, is_prompt)
  dtype = dtype or "bf16"
  return function(b)
    local dev, w, blocks = b.device, {}, math.ceil(tokens / BLOCK)
    local seqs = is_prompt and 1 or rows
    w.cache = paged.random_memory(dev, dtype, blocks)
    w.q = kv.randn(dev, "bf16", { rows, paged.HEADS, DIM }, { seed = 2 })
    w.listed = kv.randint(dev, "i32", { rows, 1, k }, { seed = 3, low = 0,
                                                        high = tokens })
    local _, order = kv.rand(dev, "f32", { 1, blocks }, { seed = 4 }):sort()
    w.tables = kv.zeros(dev, "i32", { seqs, 1 }) + order
    w.lens = kv.full(dev, "i32", { seqs }, tokens)
    w.starts = is_prompt and kv.from(dev, "i32", { 2 }, { 0, rows }) or nil
    w.causal = false -- a row of the prompt, too, may list any token
    w.out = kv.full(dev, "bf16", { rows, paged.HEADS, DIM }, 0 / 0)
    local function run() kv.ops.step.paged_attention(w) end
    local all, token = rows * k, KV_HEADS * DIM * 2 * (dtype == "bf16" and 2 or 1)
    local note
    local read = kv.scope(function() -- a token in two lists is read once
      local index = w.listed:reshape { -1 }
      return kv.zeros(dev, "f32", { tokens, 1 }):scatter_rows_(index,
        kv.ones(dev, "f32", { all, 1 })):sum():item()
    end)
    if all > 2 * read then
      note = ("the lists have %.0f times as many bytes"):format(all / read)
    end
    return { run = run, bytes = read * token, note = note,
      check = function()
        run()
        check_row(w, 0, 0)
        check_row(w, rows - 1, KV_HEADS - 1)
      end }
  end
end

return function(b)
  local k, context = math.min(2048, b:shrunk(16384)), b:shrunk(131072)
  for _, rows in ipairs { 1, 16, 64 } do
    b:case { id = "E9", name = ("%d tokens each for %d rows of decode"):format(k, rows),
             setup = listed(rows, k, context) }
  end
  for _, rows in ipairs { 16, 64 } do
    b:case { id = "E9", name = ("%d tokens each for %d rows of decode, f8 KV"):format(k,
      rows), setup = listed(rows, k, context, "f8e4m3") }
  end
  local rows = b:shrunk(4096)
  b:case { id = "E9", name = ("%d tokens each for %d rows of a prompt of %d"):format(k,
    rows, context / 2), setup = listed(rows, k, context / 2, "bf16", true) }
end
