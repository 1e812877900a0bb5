--- Cases of topk_transform and topk_merge: rows of logits of many kinds, with windows and
-- transforms. `on(dev, c)` makes a case's tensors.
local ffi = require "ffi"
local kv = require "kvlab"
local S = require "spec.support"

local M = {}

local INF, NAN = math.huge, 0 / 0
local MIXED = { NAN, -INF, INF, 1, -1, 0, -0.0, 1e-40, -1e-40, 3e38 }

--- Kinds of logits: fn(rng, i) of column i.
M.kinds = {
  distinct = function(rng) return rng(1000000) / 7 - 70000 end,
  few = function(rng) return rng(4) - 2 end,
  equal = function() return 0.25 end,
  ["-inf"] = function() return -INF end,
  nan = function() return NAN end,
  zeros = function(_, i) return i % 2 == 0 and 0 or -0.0 end,
  mixed = function(rng) return MIXED[rng(#MIXED) + 1] end,
  rising = function(_, i) return i end,
  falling = function(_, i) return -i end,
  -- equal but for the last bits: one bin of any coarse histogram
  clustered = function(_, i) return 1 + (i * 7919 % 65521) * 2 ^ -23 end,
  -- a few large ones in a sea of equal numbers
  sparse = function(rng) return rng(50) == 0 and rng(1000) or -1 end,
}

--- Fill in what a case leaves out. c: rows, n, k, kind, dtype (f32), windows (starts
-- too), full (lens = n), to (paged, ragged, nil), seed.
M.make = S.latest(function(c)
  local rng = S.rng(c.rows * 31 + c.n * 7 + c.k + (c.seed or 0))
  local made = { rows = c.rows, n = c.n, k = c.k, dtype = c.dtype or "f32", lens = {},
                 logits = {} }
  for i = 0, c.rows * c.n - 1 do
    made.logits[i + 1] = M.kinds[c.kind](rng, c.n > 0 and i % c.n or 0)
  end
  made.logits = kv.from("cpu", made.dtype, { c.rows, c.n }, made.logits):list()
  if c.windows then made.starts = {} end
  for r = 1, c.rows do
    if c.windows then made.starts[r] = rng(c.n + 3) - 1 end
    local most = c.n - (c.windows and math.max(made.starts[r], 0) or 0) + 2
    made.lens[r] = c.full and c.n or rng(5) == 0 and rng(3) - 1 or rng(math.max(most, 1))
  end
  if c.to == "ragged" then
    made.transform = { offsets = {} }
    for r = 1, c.rows do made.transform.offsets[r] = rng(100000) end
  elseif c.to then
    local size, sequences = 1 + rng(20), c.to == "paged" and c.rows or 3
    local width = math.max(1, math.ceil(c.n / size) - rng(2)) -- the last block may lack
    local t = { tables = {}, sequences = sequences, width = width, block_size = size }
    for i = 1, sequences * width do t.tables[i] = rng(20) == 0 and -1 or rng(5000) end
    if c.to == "shared" then -- sequences that rows name, one of them wrongly
      t.row_sequence = {}
      for r = 1, c.rows do t.row_sequence[r] = rng(sequences + 1) - rng(2) end
    end
    made.transform = t
  end
  return made
end)

--- logits, starts, lens, transform as the library takes them; and what keeps them alive.
function M.on(dev, c)
  local made = M.make(c)
  local function ints(list, ...)
    return list and kv.from(dev, "i32", { ... }, list) or nil
  end
  local t, call, keep = made.transform, nil, {}
  if t then
    call = ffi.new "kvl_transform"
    keep.tables = ints(t.tables, t.sequences or 0, t.width or 0)
    keep.row_sequence = ints(t.row_sequence, c.rows)
    keep.offsets = ints(t.offsets, c.rows)
    call.tables, call.row_sequence, call.offsets = keep.tables, keep.row_sequence,
      keep.offsets
    call.block_size = t.block_size or 0
  end
  return kv.from(dev, made.dtype, { c.rows, c.n }, made.logits),
    ints(made.starts, c.rows), ints(made.lens, c.rows), call, keep
end

--- Whole rows, windows, transforms, ties, sizes of 0 and 1.
function M.small()
  local cases = {}
  for _, kind in ipairs(S.names(M.kinds)) do
    for _, size in ipairs { { 5, 40, 7 }, { 4, 300, 300 }, { 9, 700, 100 } } do
      for _, to in ipairs { "indices", "paged", "shared", "ragged" } do
        cases[#cases + 1] = { kind = kind, rows = size[1], n = size[2], k = size[3],
          to = to ~= "indices" and to or nil, windows = #cases % 2 == 0,
          dtype = #cases % 3 == 0 and "bf16" or "f32" }
      end
    end
  end
  for _, size in ipairs { { 0, 8, 4 }, { 3, 0, 4 }, { 3, 8, 0 }, { 1, 1, 1 }, { 2, 5, 9 },
                          { 1, 2049, 1 }, { 1, 3000, 2999 } } do
    cases[#cases + 1] = { kind = "few", rows = size[1], n = size[2], k = size[3],
                          full = size[2] > 1 }
  end
  return cases
end

--- Rows that are long, and k of 2048: more than 16384 candidates in one bin.
function M.long()
  local cases = {}
  for _, kind in ipairs(S.names(M.kinds)) do
    cases[#cases + 1] = { kind = kind, rows = 2, n = 20000, k = 2048, full = true }
  end
  cases[#cases + 1] = { kind = "clustered", rows = 1, n = 70000, k = 2048, full = true }
  cases[#cases + 1] = { kind = "clustered", rows = 1, n = 30000, k = 5000,
                        windows = true, dtype = "bf16" }
  return cases
end

return M
