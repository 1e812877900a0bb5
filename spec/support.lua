--- What the kernel specs share: devices and instruction sets to run on, comparing with a
-- tolerance, poisoned outputs, random inputs and random block tables.
--
-- One list of cases serves both devices: `it_on_cpu` checks it against the reference for
-- every instruction set, `it_on_gpu` checks CUDA against the CPU.
local busted = require "busted"
local ffi = require "ffi"
local kv = require "kvlab"

local M = {}

local NAN = 0 / 0

--- A hostile build: its checks make kernels several times slower.
M.is_hostile = kv.C.kvl_fail_allocation(0) == 0

ffi.cdef [[
int memcmp(const void *a, const void *b, size_t bytes);
void *malloc(size_t bytes);
void free(void *memory);
]]

-- ---- many numbers ---------------------------------------------------------------------

--- Numbers in one piece of memory, read and written like a list: a[1] ... a[#a]. Lists of
-- millions would keep the collector busy.
local NUMBER = { f64 = "double", f32 = "float", i32 = "int32_t", i64 = "int64_t",
                 u8 = "uint8_t", u64 = "uint64_t" }
local numbers_of = {}

-- Memory by its bytes, each a power of two, that numbers have given back. The system
-- takes longer to give new pages than the specs take to fill them. A hostile build frees
-- it, so that it sees leaks, and has no room that is not asked for, so that it sees what
-- is written behind the end.
local given_back = {}

local function give_back(a)
  if M.is_hostile then return ffi.C.free(a.values) end
  table.insert(given_back[tonumber(a.room)], ffi.cast("void *", a.values))
end

for dtype, number in pairs(NUMBER) do
  local members = "struct { size_t count, room; " .. number .. " *values; }"
  numbers_of[dtype] = ffi.metatype(members, {
    __index = function(a, i) return tonumber(a.values[i - 1]) end,
    __newindex = function(a, i, x) a.values[i - 1] = x end,
    __len = function(a) return tonumber(a.count) end,
    __gc = give_back,
  })
end

-- The collector does not see this memory, so it runs after so many bytes of it.
local BYTES_UNSEEN, unseen = 2 ^ 27, 0

--- n numbers of a dtype, or of f64; they are not initialised.
local function new_numbers(n, dtype)
  local room = math.max(n, 1) * ffi.sizeof(NUMBER[dtype])
  if not M.is_hostile then room = 2 ^ math.ceil(math.log(room, 2)) end
  unseen = unseen + room
  if unseen > BYTES_UNSEEN then
    collectgarbage()
    unseen = room
  end
  given_back[room] = given_back[room] or {}
  local memory = table.remove(given_back[room]) or ffi.C.malloc(room)
  assert(memory ~= nil, "no memory for numbers")
  return numbers_of[dtype](n, room, memory)
end

local function are_numbers(x)
  for _, ctype in pairs(numbers_of) do
    if ffi.istype(ctype, x) then return true end
  end
  return false
end

--- n numbers that are all `value`.
function M.filled(n, value)
  local a = new_numbers(n, "f64")
  for i = 0, n - 1 do a.values[i] = value end
  return a
end

--- The elements of a tensor as t:list() has them, to be read only: written, they would be
-- rounded to its dtype. Waits for the device.
local function elements(t)
  local source = numbers_of[t:type()] and t or t:cast "f32"
  local a = new_numbers(tonumber(t.count), source:type())
  kv.check(kv.C.kvl_tensor_read(source, a.values, source:bytes()))
  return a
end

--- The elements of a tensor, as f64.
function M.numbers(t)
  local read = elements(t)
  local a = new_numbers(#read, "f64")
  for i = 0, #a - 1 do a.values[i] = read.values[i] end
  return a
end

--- A tensor of numbers (or of a list).
function M.from(dev, dtype, shape, a)
  if type(a) == "table" then return kv.from(dev, dtype, shape, a) end
  local t = kv.tensor(dev, numbers_of[dtype] and dtype or "f32", shape)
  assert(tonumber(t.count) == #a)
  local host = new_numbers(#a, t:type())
  for i = 0, #a - 1 do host.values[i] = a.values[i] end
  kv.check(kv.C.kvl_tensor_write(t, host.values, t:bytes()))
  return numbers_of[dtype] and t or t:cast(dtype)
end

-- ---- instruction sets and devices -----------------------------------------------------

function M.isa() return ffi.string(kv.C.kvl_cpu_isa()) end

--- The instruction sets that this build and this machine have.
function M.isas()
  local now, found = M.isa(), {}
  for _, isa in ipairs { "plain", "avx2", "avx512" } do
    if kv.C.kvl_cpu_use_isa(isa) >= 0 then found[#found + 1] = isa end
  end
  kv.check(kv.C.kvl_cpu_use_isa(now))
  return found
end

local FASTEST = M.isas()[#M.isas()]

--- Define `name` once per instruction set; `fn(device)` runs with it in use.
function M.it_on_cpu(name, fn)
  for _, isa in ipairs(M.isas()) do
    busted.it(name .. " (" .. isa .. ")", function()
      local before = M.isa()
      kv.check(kv.C.kvl_cpu_use_isa(isa))
      local ok, why = pcall(fn, kv.device "cpu")
      kv.check(kv.C.kvl_cpu_use_isa(before))
      if not ok then error(why, 0) end
    end)
  end
end

--- Why a spec is pending in a hostile build that builds programs of its own.
M.SAME_PROGRAMS = "its programs are the same in every build: release runs them"

--- The values of a case's fields as text, those of a list one by one: "lens=17".
local function values_in(c, prefix, found)
  for field, value in pairs(c) do
    local name = type(field) == "number" and prefix or prefix .. tostring(field)
    if type(value) == "table" then values_in(value, name, found)
    elseif field ~= "seed" then found[#found + 1] = name .. "=" .. tostring(value) end
  end
  return found
end

--- Every pair of values that a case has, as text, or with `alone` every value, and each
-- with the dtype; a field that only other cases have counts as "field=nil".
local function pairs_in(c, fields, alone)
  local values, found = values_in(c, "", {}), {}
  for _, field in ipairs(fields) do
    if c[field] == nil then values[#values + 1] = field .. "=nil" end
  end
  table.sort(values)
  for i = 1, #values do
    for j = i, #values do
      local pair = values[i] .. " " .. values[j]
      local is_one = i == j or not alone or (" " .. pair):find(" dtype=", 1, true)
      if is_one then found[#found + 1] = pair end
    end
  end
  return found
end

--- Whether every combination is asked for: `./kvlab test --full`, or KVLAB_TEST_FULL in
-- the environment of stock busted.
M.is_full = require("kvlab.command_line").full or os.getenv "KVLAB_TEST_FULL" ~= nil

--- Programs that a spec builds with sanitizers of their own take seconds: a hostile build
-- runs them, and --full does.
M.runs_sanitized = M.is_hostile or M.is_full
M.SANITIZED = "a program under sanitizers: a hostile build and --full run it"

-- Kernels are compiled at -Og, which takes half of the time, because specs run each of
-- them a few times only. They are compiled as they ship, at -O3, in
-- spec/lua/kernel/shipped_spec.lua, in programs that specs start, and with --full.
if not M.is_full then require("kvlab.kernel.run.compiler").level = "-Og" end

--- A sample of a table of cases, in which any two values of two fields still come
-- together where they do in the table; all of them if that is asked for. The case with
-- most pairs that no other has brought is taken, the first of equals, until none is left;
-- so the sample depends on the table alone. Seeds do not count. alone: every value comes
-- with every dtype, but with whatever other values.
function M.sample(list, alone)
  if M.is_full then return list end
  local sample, is_taken, seen, found, fields = {}, {}, {}, {}, {}
  for _, c in ipairs(list) do
    for field in pairs(c) do fields[field] = type(field) == "string" or nil end
  end
  fields = M.names(fields)
  for i, c in ipairs(list) do found[i] = pairs_in(c, fields, alone) end
  repeat
    local best, most = nil, 0
    for i = 1, #list do
      local new = 0
      for _, pair in ipairs(found[i]) do new = new + (seen[pair] and 0 or 1) end
      if new > most then best, most = i, new end
    end
    for _, pair in ipairs(best and found[best] or {}) do seen[pair] = true end
    if best then is_taken[best] = true end
  until not best
  for i, c in ipairs(list) do if is_taken[i] then sample[#sample + 1] = c end end
  return sample
end

--- A sample for the instruction set that is in use. The best one has a sample as above,
-- the others, whose code is the same source in other widths, meet every value with every
-- dtype.
function M.sample_for_isa(list)
  local isas = M.isas()
  return M.sample(list, M.isa() ~= isas[#isas])
end

--- What a build runs of a table of cheap cases: all of them, or in a hostile build a
-- sample.
function M.cases(list) return M.is_hostile and M.sample(list) or list end

--- What is run of a list for the i-th of many: in a hostile build one that all come to in
-- turn, with --full all of it, else `most` neighbours of that one, if `most` is given.
function M.one_each(list, i, most)
  if M.is_full or not (most or M.is_hostile) then return list end
  local some = {}
  for k = 1, M.is_hostile and 1 or math.min(most, #list) do
    some[k] = list[(i + k - 1) % #list + 1]
  end
  return some
end

--- Define `name` for the GPU; `fn(cuda, cpu)`. Pending without one.
function M.it_on_gpu(name, fn)
  if not kv.cuda_available() then return busted.pending(name .. " #gpu") end
  busted.it(name .. " #gpu", function() fn(kv.device "cuda", kv.device "cpu") end)
end

local function values_of(x)
  local is_list = type(x) == "table" and not x.list or are_numbers(x)
  return is_list and x or elements(x)
end

--- Whether two lists are numbers of one type, and the same bytes.
local function same_bytes(a, b)
  for dtype, ctype in pairs(numbers_of) do
    if ffi.istype(ctype, a) then
      return ffi.istype(ctype, b)
        and ffi.C.memcmp(a.values, b.values, #a * ffi.sizeof(NUMBER[dtype])) == 0
    end
  end
end

--- Raise unless every |got[i] - want[i]| <= abs + rel * |want[i]|. Infinities and NaNs
-- must match. got, want: tensors, flat lists or numbers of the same length.
function M.close(got, want, abs, rel, what)
  got, want = values_of(got), values_of(want)
  if #got ~= #want then
    error(("%s: %d elements, expected %d"):format(what or "result", #got, #want), 2)
  end
  if same_bytes(got, want) then return end
  for i = 1, #want do
    local g, w = got[i], want[i]
    local same = g == w or (g ~= g and w ~= w)
      or math.abs(g - w) <= abs + (rel or 0) * math.abs(w)
    if not same then
      error(("%s: element %d of %d is %.9g, expected %.9g (off by %.3g)"):format(
        what or "result", i - 1, #want, g, w, math.abs(g - w)), 2)
    end
  end
end

function M.equal(got, want, what)
  return M.close(got, want, 0, 0, what)
end

--- make, for specs of all instruction sets: the first one calls it, and after the last
-- one nothing is kept.
function M.for_all_isas(make)
  local made
  return function()
    local now, isas = made or { make() }, M.isas()
    made = M.isa() ~= isas[#isas] and now or nil
    return unpack(now)
  end
end

--- Define `name` on both devices: run(dev) gives a tensor, close to want() on the CPU;
-- CUDA gives the CPU's within the same tolerance.
function M.agrees(name, run, want, abs, rel)
  want = M.for_all_isas(want)
  M.it_on_cpu(name, function(dev) M.close(run(dev), want(), abs, rel) end)
  M.it_on_gpu(name, function(cuda, cpu) M.close(run(cuda), run(cpu), abs, rel) end)
end

--- How far a number may move when it is stored: half a step, relative.
M.eps = { f32 = 2 ^ -24, f16 = 2 ^ -11, bf16 = 2 ^ -8, f8e4m3 = 2 ^ -4 }

--- fn must raise, and the message must hold every one of these words.
function M.refuses(fn, ...)
  local ok, message = pcall(fn)
  if ok then error("nothing was refused", 2) end
  for _, word in ipairs { ... } do
    if not tostring(message):find(word, 1, true) then
      error(("the message lacks %q:\n  %s"):format(word, tostring(message)), 2)
    end
  end
end

--- fn(...) must raise, and the message must hold `words`.
function M.raises(words, fn, ...)
  local ok, message = pcall(fn, ...)
  if ok then error("nothing was raised", 2) end
  if not tostring(message):find(words, 1, true) then
    error(("the message lacks %q:\n  %s"):format(words, tostring(message)), 2)
  end
end

--- Define the specs of fn(device) for the CPU and, where there is one, for a GPU.
function M.each_device(fn)
  fn(kv.device "cpu")
  busted.describe("#gpu", function()
    if kv.cuda_available() then fn(kv.device "cuda") end
  end)
end

--- A call into the library must have failed, in words that hold every one of these.
function M.fails(status, ...)
  M.refuses(function() kv.check(status) end, ...)
end

--- A tensor that no op may leave as it is: NaN, or -77 in integers (77 unsigned).
function M.poisoned(dev, dtype, shape)
  local value = NAN
  if dtype == "i32" or dtype == "i64" then value = -77 end
  if dtype == "u8" or dtype == "u64" then value = 77 end
  return kv.full(dev, dtype, shape, value)
end

--- Normal random values in any float dtype, the same for the same seed.
function M.randn(dev, dtype, shape, seed)
  local before = M.isa()
  kv.check(kv.C.kvl_cpu_use_isa(FASTEST)) -- all give the same numbers: random_spec.lua
  local drawn = kv.randn(dev, "f32", shape, { seed = seed })
  kv.check(kv.C.kvl_cpu_use_isa(before))
  return drawn:cast(dtype)
end

--- `n` numbers in 0.25 ... 4 as f32 has them: the scales of an f8e4m3 cache.
function M.scales(n, seed)
  local rng, list = M.rng(seed), {}
  for i = 1, n do list[i] = 2 ^ (rng(401) / 100 - 2) end
  return kv.from(kv.device "cpu", "f32", { n }, list):list()
end

--- In a hostile build: fails one allocation after the other of open(), until it needs no
-- more of them than could fail. Each failure must speak of memory.
function M.fails_each_allocation(open, most)
  for n = 1, most do
    kv.check(kv.C.kvl_fail_allocation(n))
    local ok, opened = pcall(open)
    kv.check(kv.C.kvl_fail_allocation(0))
    if ok then
      assert(n > 10, "nothing could fail")
      return opened:close()
    end
    assert(opened:find "memory", opened)
  end
  error "it never opened"
end

--- Pages of a codec that packs numbers, with `values`, f32 [blocks, 2, kv_heads,
-- block_size, head_dim]: the memory, its format, and what it holds, a tensor like values.
local function packed_pages(codec, values, value_dim)
  local dev, dims = values.device, values:dims()
  local blocks, _, heads, size, dim = unpack(dims)
  local format = kv.format { codec = codec, kv_heads = heads, block_size = size,
                             head_dim = dim, value_dim = value_dim }
  local memory = kv.zeros(dev, "u8", { blocks,
    tonumber(kv.C.kvl_format_bytes_page(format)) })
  local halves = values:transpose(0, 1)
  local function rows(half) -- as tokens
    return halves:index(half):transpose(1, 2):reshape { blocks * size, heads, dim }
  end
  kv.ops.append_kv(rows(0), not value_dim and rows(1) or nil,
    kv.arange(dev, "i64", blocks * size), memory, format)
  local held = halves:clone()
  kv.ops.read_blocks(memory, kv.arange(dev, "i32", blocks), held:index(0),
    not value_dim and held:index(1) or nil, format)
  return memory, format, held:transpose(0, 1)
end

--- Pages of int8.
function M.int8_pages(values) return packed_pages("int8", values) end

--- Pages of f8_latent: the keys of `values`, whose first value_dim numbers are values.
function M.f8_latent_pages(values, value_dim)
  return packed_pages("f8_latent", values, value_dim)
end

--- The format of pages like `cache`, [blocks, 2, kv_heads, block_size, head_dim], with
-- these scales.
function M.format_of(cache, k_scale, v_scale)
  return kv.format { codec = cache:type(), kv_heads = cache:size(2),
    block_size = cache:size(3), head_dim = cache:size(4), k_scale = k_scale,
    v_scale = v_scale }
end

--- The same as cache.format is: of every layer.
function M.formats_of(cache, k_scale, v_scale)
  local one = M.format_of(cache, k_scale, v_scale)
  return { name = cache:type(), dtype = cache:type(), of = function() return one end,
           scales = function() return k_scale, v_scale end }
end

--- k [tokens, kv_heads, head_dim] as a cache of this dtype holds it, as flat numbers;
-- scales: by KV head, of an f8e4m3 cache.
function M.stored(k, dtype, scales)
  local shape = { 1, k:size(1), 1 }
  if scales then k = k:cast "f32" / kv.from(kv.device "cpu", "f32", shape, scales) end
  return M.numbers(k:cast(dtype))
end

--- A small generator of whole numbers: rng(n) is in 0 ... n - 1.
function M.rng(seed)
  local state = (seed * 7919 + 12345) % 2147483647
  return function(n)
    state = (state * 48271) % 2147483647
    return math.floor(state / 2147483647 * n)
  end
end

--- The keys of a table of names, sorted: `pairs` has another order in every process.
function M.names(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- `count` different whole numbers of 0 ... n - 1 in random order.
function M.distinct(rng, count, n)
  local all = {}
  for i = 1, n do all[i] = i - 1 end
  for i = 1, count do
    local j = i + rng(n - i + 1)
    all[i], all[j] = all[j], all[i]
  end
  for i = count + 1, n do all[i] = nil end
  return all
end

--- A flat [#lens, max_blocks] table of different physical blocks out of `blocks`, -1
-- past each sequence's last one.
function M.block_table(rng, lens, block_size, max_blocks, blocks)
  local flat, used, need = {}, 0, 0
  for _, len in ipairs(lens) do need = need + math.ceil(len / block_size) end
  local free = M.distinct(rng, need, blocks)
  for _, len in ipairs(lens) do
    local n = math.ceil(len / block_size)
    for b = 1, max_blocks do
      if b <= n then used = used + 1 end
      flat[#flat + 1] = b <= n and free[used] or -1
    end
  end
  return flat
end

--- Random K and V of the valid tokens, as their dtype holds them, and NaN in all others.
-- pages_of: makes pages of a format that packs numbers.
local function draw_pages(p, dtype, seed, pages_of)
  local layout, cpu = p.layout, kv.device "cpu"
  local size, dim, half = layout.block_size, layout.head_dim, 2 * layout.kv_heads
  local all, from = M.filled(layout.blocks * half * size * dim, NAN), 0
  local drawn
  if pages_of then
    drawn = M.numbers(select(3, pages_of(M.randn(cpu, "f32", { layout.blocks, 2,
      layout.kv_heads, size, dim }, seed))))
  else
    local total = 0
    for _, len in ipairs(p.lens) do total = total + len end
    drawn = M.numbers(M.randn(cpu, dtype, { math.max(1, total), half, dim }, seed))
  end
  for s, len in ipairs(p.lens) do
    for b = 0, math.ceil(len / size) - 1 do
      local bytes = math.min(size, len - b * size) * dim * 8
      for lane = 0, half - 1 do
        local to = (p.tables[(s - 1) * p.max_blocks + b + 1] * half + lane) * size * dim
        ffi.copy(all.values + to, drawn.values + (pages_of and to or from), bytes)
        from = from + bytes / 8
      end
    end
  end
  return all
end

--- Paged KV memory with random K and V in the valid tokens of every sequence and NaN in
-- all others, its blocks in random order.
--  c  lens, block_size, and optionally kv_heads (1), head_dim (64), dtype (f32),
--     extra (1: table columns that no sequence needs), seed
-- Returns { layout, lens, tables, max_blocks, cache (flat numbers), on(dev) }, where
-- on(dev) gives the tensors cache, tables and lens.
function M.paged(c)
  local rng = M.rng(c.seed or 1)
  local most, total = 0, 0
  for _, len in ipairs(c.lens) do
    local n = math.ceil(len / c.block_size)
    most, total = math.max(most, n), total + n
  end
  local p = { lens = c.lens, max_blocks = most + (c.extra or 1), layout = {
    blocks = total + 2, kv_heads = c.kv_heads or 1, block_size = c.block_size,
    head_dim = c.head_dim or 64 } }
  local layout, dtype = p.layout, c.dtype or "f32"
  p.tables = M.block_table(rng, c.lens, c.block_size, p.max_blocks, layout.blocks)
  local shape = { layout.blocks, 2, layout.kv_heads, layout.block_size, layout.head_dim }
  local packs = dtype == "int8" or dtype == "f8_latent"
  local function pages_of(values)
    if dtype == "int8" then return M.int8_pages(values) end
    return M.f8_latent_pages(values, c.value_dim)
  end
  p.cache = draw_pages(p, dtype, c.seed or 1, packs and pages_of)
  --- The memory, tables and lengths, and the format of what packs numbers.
  function p.on(dev)
    local memory, format
    if packs then
      memory, format = pages_of(M.from(dev, "f32", shape, p.cache))
    else
      memory = M.from(dev, dtype, shape, p.cache)
    end
    return memory, kv.from(dev, "i32", { #p.lens, p.max_blocks }, p.tables),
      kv.from(dev, "i32", { #p.lens }, p.lens), format
  end
  return p
end

--- A list that names every block of `paged` and its valid tokens, with a -1 after each
-- sequence; of the first block, where there are more and not `all`, none of the tokens.
function M.named_blocks(paged, all)
  local blocks, tokens, size = {}, {}, paged.layout.block_size
  for s, len in ipairs(paged.lens) do
    for b = 0, math.ceil(len / size) - 1 do
      blocks[#blocks + 1] = paged.tables[(s - 1) * paged.max_blocks + b + 1]
      tokens[#tokens + 1] = math.min(size, len - b * size)
    end
    blocks[#blocks + 1], tokens[#tokens + 1] = -1, 1
  end
  if #tokens > 2 and not all then tokens[1] = 0 end
  return blocks, tokens
end

--- make, which remembers what it made last: a case is prepared once for both devices,
-- and those of all cases, which would fill a gigabyte, are not kept.
function M.latest(make)
  local case, made
  return function(c)
    if case ~= c then case, made = c, make(c) end
    return made
  end
end

--- make, which remembers what it made of every case, for all instruction sets: small
-- results of slow references.
function M.once(make)
  local made = {}
  return function(c)
    made[c] = made[c] or { make(c) }
    return unpack(made[c])
  end
end

--- Run fn(...) over an emulated link of the CPU device (kvl_cpu_link) and return its
-- results. After that, the link is again the one that the command line set. The
-- collector rests meanwhile: a hostile build overwrites freed memory, and that would take
-- modelled time whenever it happens.
function M.with_link(gb_s, us, fn, ...)
  local C, given = kv.C, kv.command_line
  kv.check(C.kvl_cpu_link(gb_s, us))
  collectgarbage "stop"
  local results = { pcall(fn, ...) }
  collectgarbage "restart"
  kv.check(C.kvl_cpu_link(given["link-gbps"] or 0, given["link-us"] or 0))
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2)
end

--- Free what nothing holds any more.
function M.collect()
  jit.flush() -- compiled code holds what it was compiled for
  collectgarbage()
  collectgarbage()
end

return M
