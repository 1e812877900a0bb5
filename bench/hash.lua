--- Choosing blocks by hashes. P7 is the fused selection of 30% of the blocks by 64-bit
-- hashes, with a row for each KV head of each sequence. P8 is Hamming scores of token
-- hashes.
local ffi = require "ffi"
local kv = require "kvlab"
local paged = require "bench.lib.paged"
local tensor = require "kvlab.tensor.tensor"

local KV_HEADS, DIM, BLOCK, GROUP = paged.KV_HEADS, paged.DIM, paged.BLOCK, paged.GROUP

--- Random u64 of any shape, and the tensor that holds their memory.
local function random_words(dev, shape, seed)
  local count = 2
  for _, size in ipairs(shape) do count = count * size end
  local halves = kv.randint(dev, "i32", { count },
    { seed = seed, low = -2 ^ 31, high = 2 ^ 31 - 1 })
  return tensor.wrap(dev, "u64", shape, halves.ptr), halves -- halves must live as long
end

--- Hashes, tables in random order and lengths for `seqs` sequences of `blocks` blocks.
local function inputs(dev, seqs, heads, blocks, words, is_token)
  local lens = {}
  for i = 1, seqs do lens[i] = blocks * BLOCK end
  local tables, count = paged.random_tables(dev, lens)
  local shape = { count, heads, words }
  if is_token then table.insert(shape, 3, BLOCK) end
  local hashes, memory = random_words(dev, shape, 1)
  return { tables = tables, lens = kv.from(dev, "i32", { seqs }, lens), hashes = hashes,
           memory = memory }
end

-- ---- P7 -------------------------------------------------------------------------------

local function nearest(given, q, planes, budget, selection)
  local call = ffi.new "kvl_hamming"
  call.q, call.planes, call.hashes = q, planes, given.hashes
  call.tables, call.lens, call.selection = given.tables, given.lens, selection
  call.budget, call.block_size = budget, BLOCK
  return function() kv.check(kv.C.kvl_select_hamming(call)) end
end

--- Compares sequence s with the CPU, which selects by another program.
local function check_sequence(given, q, planes, budget, selection, s)
  local cpu = kv.device "cpu"
  kv.scope(function()
    local function one(t) return t:narrow(s, 1):to(cpu) end
    local there = { hashes = given.hashes:to(cpu), tables = one(given.tables),
                    lens = one(given.lens) }
    local shape = selection:dims()
    shape[1] = 1
    local want = kv.full(cpu, "i32", shape, -1)
    nearest(there, one(q), planes:to(cpu), budget, want)()
    local got, list = selection:index(s):list(), want:list()
    for i = 1, #list do
      assert(got[i] == list[i], ("sequence %d: place %d is %d, expected %d"):format(s,
        i - 1, got[i], list[i]))
    end
  end)
end

local function select(seqs, heads, blocks)
  return function(b)
    local dev = b.device
    local given = inputs(dev, seqs, heads, blocks, 1, false)
    local q = kv.randn(dev, "bf16", { seqs, heads * GROUP, DIM }, { seed = 2 })
    local planes = kv.hash.planes { device = dev, bits = 64, head_dim = DIM }
    local budget = ffi.new("kvl_budget", 0.3, 0, 0, 1, 2)
    local k = kv.policy.budget_blocks(budget, blocks)
    local selection = kv.full(dev, "i32", { seqs, heads, k }, -1)
    local run = nearest(given, q, planes, budget, selection)
    return {
      run = run, bytes = given.hashes:bytes() + given.tables:bytes() + selection:bytes(),
      check = function()
        run()
        check_sequence(given, q, planes, budget, selection, 0)
        check_sequence(given, q, planes, budget, selection, seqs - 1)
      end,
    }
  end
end

-- ---- P8 -------------------------------------------------------------------------------

--- Compares the first and last sequence with the CPU.
local function check_scores(given, q, scores)
  local cpu = kv.device "cpu"
  for _, s in ipairs { 0, q:size(0) - 1 } do
    kv.scope(function()
      local function one(t) return t:narrow(s, 1):to(cpu) end
      local want = kv.tensor(cpu, "f32", one(scores):dims())
      kv.check(kv.C.kvl_score_hamming(one(q), given.hashes:to(cpu), one(given.tables),
        one(given.lens), BLOCK, want))
      assert((one(scores) - want):abs():max():item() == 0, "the scores differ")
    end)
  end
end

local function score(seqs, len)
  return function(b)
    local dev, blocks = b.device, len / BLOCK
    local given = inputs(dev, seqs, KV_HEADS, blocks, 2, true)
    local q, memory = random_words(dev, { seqs, KV_HEADS, 2 }, 3)
    local scores = kv.full(dev, "f32", { seqs, KV_HEADS, blocks }, 0 / 0)
    local function run()
      kv.check(kv.C.kvl_score_hamming(q, given.hashes, given.tables, given.lens, BLOCK,
        scores))
      return memory
    end
    return { run = run, bytes = given.hashes:bytes() + scores:bytes(), check = function()
      run()
      check_scores(given, q, scores)
    end }
  end
end

return function(b)
  for _, row in ipairs { { 1, 1, 8192, 8 }, { 8, 8, 8192, 15 }, { 8, 8, 65536, 45 } } do
    local n = b:shrunk(row[3])
    b:case { id = "P7", target = { us = row[4] }, setup = select(row[1], row[2], n),
             name = ("hash select, %d x %d blocks"):format(row[1] * row[2], n) }
  end
  local len = math.max(BLOCK, b:shrunk(32768))
  b:case { id = "P8", name = ("scores of 128-bit token hashes, 16 x %d"):format(len),
           setup = score(16, len), target = { of_limit = 0.8 } }
end
