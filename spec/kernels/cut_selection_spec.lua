--- Exact: only whole numbers.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"

local OUTPUTS = { "logical", "physical", "open_logical", "open_slots" }

--- Some of each sequence's blocks, ascending, and after them, where there is room, one
-- past the last (which is passed over), -1 padded.
local function selection_of(rng, c)
  local flat = {}
  for _, len in ipairs(c.lens) do
    local n = math.ceil(len / c.block_size)
    for _ = 1, c.heads do
      local first = #flat
      for b = 0, n - 1 do
        if rng(4) > 0 and #flat < first + c.max_selected then flat[#flat + 1] = b end
      end
      if #flat < first + c.max_selected and rng(3) == 0 then flat[#flat + 1] = n end
      for i = #flat + 1, first + c.max_selected do flat[i] = -1 end
    end
  end
  return flat
end

--- The inputs of a case as flat lists. The open blocks are the last few of a sequence,
-- all of them, or none.
local function prepare(c)
  if c.opens then return c end
  local rng = support.rng(c.seed)
  c.tables = support.block_table(rng, c.lens, c.block_size, c.max_blocks, 25000)
  c.opens = {}
  for s, len in ipairs(c.lens) do
    local n = math.ceil(len / c.block_size)
    c.opens[2 * s - 1] = math.max(0, n - rng(4))
    c.opens[2 * s] = 3 * s
  end
  c.heads = c.heads or 1
  if c.max_selected then c.selection = selection_of(rng, c) end
  return c
end

local function shapes(c)
  local passes = { c.passes, #c.lens, c.heads, c.n }
  local open = { #c.lens, c.heads, c.n_open }
  return { logical = passes, physical = passes, open_logical = open, open_slots = open }
end

local function cut(dev, c)
  prepare(c)
  local t = {
    selection = c.selection
      and kv.from(dev, "i32", { #c.lens, c.heads, c.max_selected }, c.selection) or nil,
    tables = kv.from(dev, "i32", { #c.lens, c.max_blocks }, c.tables),
    lens = kv.from(dev, "i32", { #c.lens }, c.lens),
    opens = kv.from(dev, "i32", { #c.lens, 2 }, c.opens),
  }
  for name, shape in pairs(shapes(c)) do t[name] = support.poisoned(dev, "i32", shape) end
  local call = ffi.new("kvl_cut", { block_size = c.block_size })
  for name, tensor in pairs(t) do call[name] = tensor end
  kv.check(kv.C.kvl_cut_selection(call))
  return t
end

local function expected(c)
  local rows, out = #c.lens * c.heads, {}
  for name, shape in pairs(shapes(c)) do
    local count = 1
    for _, size in ipairs(shape) do count = count * size end
    out[name] = {}
    for i = 1, count do out[name][i] = -1 end
  end
  for row = 0, rows - 1 do
    local s = math.floor(row / c.heads)
    local blocks = math.ceil(c.lens[s + 1] / c.block_size)
    local first_open, first_slot = c.opens[2 * s + 1], c.opens[2 * s + 2]
    local closed, open = 0, 0
    for i = 0, (c.selection and c.max_selected or blocks) - 1 do
      local block = c.selection and c.selection[row * c.max_selected + i + 1] or i
      local exists = block >= 0 and block < blocks
      if exists and block < first_open and closed < c.passes * c.n then
        local pass, place = math.floor(closed / c.n), closed % c.n
        local at = (pass * rows + row) * c.n + place + 1
        out.logical[at] = block
        out.physical[at] = c.tables[s * c.max_blocks + block + 1]
        closed = closed + 1
      elseif exists and block >= first_open and open < c.n_open then
        open = open + 1
        out.open_logical[row * c.n_open + open] = block
        out.open_slots[row * c.n_open + open] = first_slot + block - first_open
      end
    end
  end
  return out
end

local function every_block(passes, n, n_open)
  return { lens = { 0, 1, 16, 17, 300, 64 }, block_size = 16, max_blocks = 21,
    passes = passes, n = n, n_open = n_open }
end
local function selected(heads, passes, n, n_open)
  return { lens = { 90, 0, 33, 160 }, block_size = 8, max_blocks = 20, heads = heads,
    max_selected = 19, passes = passes, n = n, n_open = n_open }
end

local topics = {
  { "cuts every block of each sequence",
    every_block(5, 4, 4), every_block(1, 30, 4), every_block(19, 1, 3),
    { lens = { 5 }, block_size = 1, max_blocks = 5, passes = 2, n = 3, n_open = 3 } },
  { "cuts a selection, shared or per KV head",
    selected(1, 4, 5, 4), selected(4, 3, 7, 4), selected(8, 20, 1, 3) },
  { "drops what does not fit",
    every_block(2, 3, 1), selected(3, 2, 4, 1), selected(3, 1, 1, 2) },
  { "takes sizes of 0",
    { lens = {}, block_size = 16, max_blocks = 4, passes = 2, n = 3, n_open = 2 },
    every_block(0, 4, 3), every_block(3, 0, 3), every_block(4, 5, 0),
    selected(2, 0, 0, 3) },
  { "cuts many rows of long selections",
    { lens = { 4000, 3999, 1, 2500, 4000, 77, 3000, 4000 }, block_size = 1,
      max_blocks = 4000, heads = 8, max_selected = 4000, passes = 9, n = 500,
      n_open = 8 } },
}
local seed = 0
for _, topic in ipairs(topics) do
  for i = 2, #topic do
    seed = seed + 1
    topic[i].seed = seed
  end
end

describe("cutting a selection for a ring", function()
  for _, topic in ipairs(topics) do
    support.it_on_cpu(topic[1], function(dev)
      for i = 2, #topic do
        local got, want = cut(dev, topic[i]), expected(topic[i])
        for _, name in ipairs(OUTPUTS) do
          support.equal(got[name], want[name], ("%s of case %d"):format(name, i - 1))
        end
      end
    end)
    support.it_on_gpu(topic[1], function(cuda, cpu)
      for i = 2, #topic do
        local got, want = cut(cuda, topic[i]), cut(cpu, topic[i])
        for _, name in ipairs(OUTPUTS) do
          support.equal(got[name], want[name], ("%s of case %d"):format(name, i - 1))
        end
      end
    end)
  end
end)
