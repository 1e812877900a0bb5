local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"
local C = kv.C

local function pool_of(blocks, block_size, watermark)
  local out = ffi.new "kvl_pool *[1]"
  kv.check(C.kvl_pool_open(blocks, block_size, watermark or 0, out))
  return ffi.gc(out[0], C.kvl_pool_close)
end

local function sequence_of(pool, layers, heads)
  local out = ffi.new "kvl_sequence *[1]"
  kv.check(C.kvl_sequence_open(pool, layers or 1, heads or 1, out))
  return ffi.gc(out[0], C.kvl_sequence_close)
end

local function fork_of(seq)
  local out = ffi.new "kvl_sequence *[1]"
  kv.check(C.kvl_sequence_fork(seq, out))
  return ffi.gc(out[0], C.kvl_sequence_close)
end

--- Append counts[i] tokens to seqs[i]: status, places, copies.
local function append(seqs, counts, replaces)
  local n, total = #seqs, 0
  local handles, tokens = ffi.new("kvl_sequence *[?]", n), ffi.new("int32_t[?]", n)
  for i = 1, n do
    handles[i - 1], tokens[i - 1] = seqs[i], counts[i]
    total = total + math.max(counts[i], 0)
  end
  local places = ffi.new("int64_t[?]", total + 1)
  local copies = ffi.new("int32_t[?]", 2 * n)
  local status = C.kvl_sequences_append(handles, tokens, n, replaces or 0, places, copies)
  local list = {}
  for i = 0, total - 1 do list[i + 1] = tonumber(places[i]) end
  return status, list, copies
end

local function table_of(seq, width)
  local row, list = ffi.new("int32_t[?]", width), {}
  kv.check(C.kvl_sequence_table(seq, 0, row, width))
  for i = 0, width - 1 do list[i + 1] = row[i] end
  return list
end

local function close(seq) C.kvl_sequence_close(ffi.gc(seq, nil)) end

describe("block pool", function()
  it("refuses sizes that make no sense", function()
    local out = ffi.new "kvl_pool *[1]"
    for _, bad in ipairs { { 0, 16, 0 }, { 4, 0, 0 }, { 4, 4097, 0 }, { 4, 16, 4 },
                           { 4, 16, -1 }, { 2 ^ 30, 4096, 0 } } do
      assert.equal(C.KVL_ERR_INVALID, C.kvl_pool_open(bad[1], bad[2], bad[3], out))
    end
    assert.truthy(ffi.string(C.kvl_last_error()):find "2%^31 tokens")
  end)

  it("counts what is held, the most at once, and what evictions gave back", function()
    local pool, stats = pool_of(8, 2), ffi.new "kvl_pool_stats"
    local function counts()
      kv.check(C.kvl_pool_stats_get(pool, stats))
      return { tonumber(stats.blocks_held), tonumber(stats.blocks_peak),
               tonumber(stats.blocks_evicted) }
    end
    assert.same({ 0, 0, 0 }, counts())
    local seq, other = sequence_of(pool), sequence_of(pool)
    append({ seq }, { 7 })
    assert.same({ 4, 4, 0 }, counts())
    kv.check(C.kvl_sequence_truncate(seq, 2))
    assert.same({ 1, 4, 0 }, counts())
    kv.check(C.kvl_pool_reset_peak(pool))
    assert.same({ 1, 1, 0 }, counts())
    append({ seq, other }, { 6, 99 }) -- refused; the first of the two had its blocks
    assert.same({ 1, 4, 0 }, counts())
    append({ seq }, { 8 })
    local before = ffi.new "kvl_sequence *[1]"
    local kept, caps = ffi.new("int32_t[1]", 3), ffi.new("int32_t[1]", 4)
    kv.check(C.kvl_sequence_keep(seq, kept, caps, before))
    assert.same({ 7, 7, 0 }, counts()) -- 5, and 2 for what stays
    C.kvl_sequence_close(before[0])
    assert.same({ 2, 7, 3 }, counts())
    close(seq)
    assert.same({ 0, 7, 3 }, counts())
  end)

  it("keeps its watermark free", function()
    local pool = pool_of(4, 2, 1)
    local seq = sequence_of(pool)
    assert.equal(C.KVL_ERR_NO_BLOCKS, (append({ seq }, { 8 })))
    assert.equal(0, C.kvl_sequence_length(seq))
    assert.equal(0, (append({ seq }, { 6 })))
    assert.equal(1, C.kvl_pool_blocks_free(pool))
  end)

  it("outlives its handle while sequences hold it", function()
    local pool = pool_of(4, 2)
    local seq = sequence_of(pool)
    C.kvl_pool_close(ffi.gc(pool, nil))
    assert.equal(0, (append({ seq }, { 3 })))
    assert.equal(2, C.kvl_sequence_blocks(seq))
  end)
end)

describe("sequence", function()
  it("maps tokens to places in order, through its block table", function()
    local pool = pool_of(8, 4)
    local a, b = sequence_of(pool), sequence_of(pool)
    local _, places = append({ a, b }, { 6, 3 })
    assert.same({ 0, 1, 2, 3, 4, 5, 8, 9, 10 }, places)
    local _, more = append({ a, b }, { 3, 2 })
    assert.same({ 6, 7, 12, 11, 16 }, more)
    assert.same({ 0, 1, 3, -1 }, table_of(a, 4))
    assert.equal(9, C.kvl_sequence_length(a))
  end)

  it("shares every block with its fork and gives them back once", function()
    local pool = pool_of(8, 4)
    local a = sequence_of(pool)
    append({ a }, { 8 })
    local b = fork_of(a)
    assert.equal(2, C.kvl_pool_block_refs(pool, 0))
    assert.equal(6, C.kvl_pool_blocks_free(pool))
    close(a)
    assert.equal(6, C.kvl_pool_blocks_free(pool))
    close(b)
    assert.equal(8, C.kvl_pool_blocks_free(pool))
  end)

  it("copies a shared partial block when it grows, and only then", function()
    local pool = pool_of(8, 4)
    local a = sequence_of(pool)
    append({ a }, { 6 })
    local b = fork_of(a)
    local n, places, copies = append({ b }, { 1 })
    assert.equal(1, n)
    assert.same({ 1, 2 }, { copies[0], copies[1] })
    assert.same({ 10 }, places)
    assert.same({ 0, 1 }, table_of(a, 2))
    assert.same({ 0, 2 }, table_of(b, 2))
    assert.equal(0, (append({ a }, { 1 }))) -- alone now: in place
    local c = fork_of(a)
    append({ a }, { 1 })
    assert.equal(0, (append({ fork_of(a) }, { 1 }))) -- full last block: nothing to copy
    assert.equal(7, C.kvl_sequence_length(c))
  end)

  it("copies for all but one of several forks that grow together", function()
    local pool = pool_of(16, 4)
    local a = sequence_of(pool)
    append({ a }, { 5 })
    local b, c = fork_of(a), fork_of(a)
    local n = append({ a, b, c }, { 1, 1, 1 })
    assert.equal(2, n)
    local last = {}
    for _, seq in ipairs { a, b, c } do last[table_of(seq, 2)[2]] = true end
    local distinct = 0
    for _ in pairs(last) do distinct = distinct + 1 end
    assert.equal(3, distinct)
  end)

  it("takes back everything when one of a batch finds no block", function()
    local pool = pool_of(6, 4)
    local a = sequence_of(pool)
    append({ a }, { 6 })
    local b, c = fork_of(a), sequence_of(pool)
    local before = { table_of(a, 2), table_of(b, 2), C.kvl_pool_blocks_free(pool) }
    local status = append({ b, a, c }, { 3, 1, 100 })
    assert.equal(C.KVL_ERR_NO_BLOCKS, status)
    assert.truthy(ffi.string(C.kvl_last_error()):find "25 wanted")
    assert.same(before, { table_of(a, 2), table_of(b, 2), C.kvl_pool_blocks_free(pool) })
    assert.equal(6, C.kvl_sequence_length(b))
    assert.equal(2, C.kvl_pool_block_refs(pool, 1))
  end)

  it("refuses negative counts and lengths", function()
    local seq = sequence_of(pool_of(4, 4))
    assert.equal(C.KVL_ERR_INVALID, (append({ seq }, { -1 })))
    append({ seq }, { 5 })
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_truncate(seq, 6))
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_truncate(seq, -1))
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_table(seq, 0, ffi.new "int32_t[1]", 1))
  end)

  it("frees the blocks past a truncation", function()
    local pool = pool_of(8, 4)
    local seq = sequence_of(pool)
    append({ seq }, { 13 })
    kv.check(C.kvl_sequence_truncate(seq, 4))
    assert.equal(7, C.kvl_pool_blocks_free(pool))
    kv.check(C.kvl_sequence_truncate(seq, 0))
    assert.equal(8, C.kvl_pool_blocks_free(pool))
  end)

  it("takes over full blocks that are held elsewhere", function()
    local pool = pool_of(8, 4)
    local a, b = sequence_of(pool), sequence_of(pool)
    append({ a }, { 10 })
    kv.check(C.kvl_pool_hold(pool, 0))
    kv.check(C.kvl_pool_hold(pool, 1))
    close(a)
    assert.equal(6, C.kvl_pool_blocks_free(pool))
    kv.check(C.kvl_sequence_share(b, ffi.new("int32_t[2]", 0, 1), 2))
    assert.equal(8, C.kvl_sequence_length(b))
    assert.same({ 0, 1, -1 }, table_of(b, 3))
    assert.equal(2, C.kvl_pool_block_refs(pool, 1))
    local _, places = append({ b }, { 1 }) -- goes on behind them, and never into them
    assert.same({ 8 }, places)
    kv.check(C.kvl_sequence_truncate(b, 7))
    local copied, more, copies = append({ b }, { 1 })
    assert.same({ 1, 1, 2 }, { copied, copies[0], copies[1] })
    assert.same({ 11 }, more)
    kv.check(C.kvl_pool_release(pool, 1))
    assert.equal(6, C.kvl_pool_blocks_free(pool))
  end)

  it("refuses to share or hold what nobody holds, and at odd lengths", function()
    local pool = pool_of(4, 4)
    local a, b = sequence_of(pool), sequence_of(pool)
    append({ a }, { 4 })
    local function refuses(words, status)
      assert.equal(C.KVL_ERR_INVALID, status)
      local said = ffi.string(C.kvl_last_error())
      assert.truthy(said:find(words, 1, true), said)
    end
    local function share(seq, n, ...)
      return C.kvl_sequence_share(seq, ffi.new("int32_t[4]", { ... }), n)
    end
    refuses("block 3 is free", share(b, 2, 0, 3))
    refuses("block is 4", share(b, 2, 0, 4))
    refuses("n is -1", share(b, -1))
    assert.equal(0, C.kvl_sequence_length(b))
    assert.equal(1, C.kvl_pool_block_refs(pool, 0))
    assert.equal(0, share(b, 0))
    append({ b }, { 1 })
    refuses("1 tokens, expected a multiple of block_size = 4", share(b, 1, 0))
    refuses("block 2 is free", C.kvl_pool_hold(pool, 2))
    refuses("block 2 is free", C.kvl_pool_release(pool, 2))
    refuses("block is -1", C.kvl_pool_hold(pool, -1))
  end)

  it("loses and doubles no block in a long random life", function()
    local pool, size = pool_of(64, 4), 4
    local live, state = {}, 1
    local function rng(n)
      state = (state * 48271) % 2147483647
      return state % n
    end
    for _ = 1, 3000 do
      local what = rng(5)
      if what == 0 or #live == 0 then live[#live + 1] = sequence_of(pool)
      elseif what == 1 then live[#live + 1] = fork_of(live[1 + rng(#live)])
      elseif what == 2 and #live > 1 then close(table.remove(live, 1 + rng(#live)))
      elseif what == 3 then
        local seq = live[1 + rng(#live)]
        C.kvl_sequence_truncate(seq, rng(C.kvl_sequence_length(seq) + 1))
      else append({ live[1 + rng(#live)] }, { rng(20) }) end
    end
    local refs, used = {}, 0
    for _, seq in ipairs(live) do
      local n = C.kvl_sequence_blocks(seq)
      assert.equal(math.ceil(C.kvl_sequence_length(seq) / size), n)
      for _, block in ipairs(table_of(seq, n)) do refs[block] = (refs[block] or 0) + 1 end
    end
    for block = 0, 63 do
      assert.equal(refs[block] or 0, C.kvl_pool_block_refs(pool, block))
      used = used + (refs[block] and 1 or 0)
    end
    assert.equal(64 - used, C.kvl_pool_blocks_free(pool))
  end)

  it("takes back an append, and the shared block comes back for its copy", function()
    local pool = pool_of(8, 4)
    local a = sequence_of(pool)
    append({ a }, { 6 })
    local b = fork_of(a)
    local before, free = table_of(a, 3), C.kvl_pool_blocks_free(pool)
    local pairs_made, _, copies = append({ a, b }, { 5, 1 })
    assert.equal(1, pairs_made)
    kv.check(C.kvl_pool_hold(pool, copies[0]))
    local seqs = ffi.new("kvl_sequence *[2]", a, b)
    local lengths = ffi.new("int32_t[2]", 6, 8)
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequences_rewind(seqs, lengths, 2, copies, 1))
    assert.equal(11, C.kvl_sequence_length(a))
    lengths[1] = 6
    kv.check(C.kvl_sequences_rewind(seqs, lengths, 2, copies, 1))
    kv.check(C.kvl_pool_release(pool, copies[0]))
    assert.same(before, table_of(a, 3))
    assert.same(before, table_of(b, 3))
    assert.equal(free, C.kvl_pool_blocks_free(pool))
    assert.equal(2, C.kvl_pool_block_refs(pool, before[2]))
  end)
end)

-- ---- tables by layer and head ---------------------------------------------------------

local LAYERS, HEADS = 3, 2

--- The tables of a sequence, and the tokens that each holds, by cut.
local function cuts_of(seq, width)
  local list = {}
  for cut = 0, LAYERS * HEADS - 1 do
    local row, table_row = ffi.new("int32_t[?]", width), {}
    kv.check(C.kvl_sequence_table(seq, cut, row, width))
    for i = 0, width - 1 do table_row[i + 1] = row[i] end
    list[cut] = { table_row, C.kvl_sequence_held(seq, cut) }
  end
  return list
end

--- Appends to sequences with tables by layer and head: status, places, copies.
local function append_cuts(seqs, counts, replaces)
  local n, total = #seqs, 0
  local handles, tokens = ffi.new("kvl_sequence *[?]", n), ffi.new("int32_t[?]", n)
  for i = 1, n do
    handles[i - 1], tokens[i - 1], total = seqs[i], counts[i], total + counts[i]
  end
  local places = ffi.new("int64_t[?]", LAYERS * HEADS * total + 1)
  local copies = ffi.new("int32_t[?]", 2 * n * LAYERS * HEADS)
  local status = C.kvl_sequences_append(handles, tokens, n, replaces or 0, places, copies)
  return status, places, copies
end

describe("a sequence with tables by layer and head", function()
  it("has pages of its own in every cut, and places in them", function()
    local rng, size = support.rng(3), 4
    local pool = pool_of(400, size)
    local seqs = { sequence_of(pool, LAYERS, HEADS), sequence_of(pool, LAYERS, HEADS) }
    for _ = 1, 20 do
      local counts = { rng(7), rng(7) }
      local total = counts[1] + counts[2]
      local status, places = append_cuts(seqs, counts)
      assert.equal(0, status)
      local owner, at = {}, 0
      for layer = 0, LAYERS - 1 do
        for i, seq in ipairs(seqs) do
          local cuts, length = cuts_of(seq, 64), C.kvl_sequence_length(seq)
          for head = 0, HEADS - 1 do
            local row, held = unpack(cuts[layer * HEADS + head])
            assert.equal(length, held)
            for b = 1, math.ceil(held / size) do
              assert.is_nil(owner[row[b]])
              owner[row[b]] = true
            end
            for t = 0, counts[i] - 1 do
              local index = held - counts[i] + t
              assert.equal(row[math.floor(index / size) + 1] * size + index % size,
                tonumber(places[at + t]))
            end
            at = at + counts[i]
          end
        end
      end
      assert.equal(LAYERS * HEADS * total, at)
    end
  end)

  it("shares every page with its fork, and copies the open ones of all cuts", function()
    local pool = pool_of(100, 4)
    local a = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ a }, { 6 })
    local b = fork_of(a)
    assert.equal(100 - 12, C.kvl_pool_blocks_free(pool))
    local before, at_a = cuts_of(b, 4), cuts_of(a, 4)
    local pairs_of, _, copies = append_cuts({ b }, { 1 })
    assert.equal(LAYERS * HEADS, pairs_of)
    local after = cuts_of(b, 4)
    for cut = 0, LAYERS * HEADS - 1 do
      assert.equal(before[cut][1][1], after[cut][1][1])
      assert.equal(before[cut][1][2], copies[2 * cut])
      assert.equal(after[cut][1][2], copies[2 * cut + 1])
    end
    assert.same(at_a, cuts_of(a, 4))
    close(b)
    close(a)
    assert.equal(100, C.kvl_pool_blocks_free(pool))
  end)

  it("grows in all cuts or in none, and so do all sequences of an append", function()
    local pool = pool_of(30, 4)
    local a, b = sequence_of(pool, LAYERS, HEADS), sequence_of(pool, LAYERS, HEADS)
    append_cuts({ a, b }, { 6, 3 }) -- 12 + 6 pages
    local fork = fork_of(a)
    local want = { cuts_of(fork, 8), cuts_of(b, 8) }
    -- the fork takes 6 copies, and b needs 12 pages more, of which 6 are left
    assert.equal(C.KVL_ERR_NO_BLOCKS, (append_cuts({ fork, b }, { 1, 6 })))
    assert.same(want, { cuts_of(fork, 8), cuts_of(b, 8) })
    assert.equal(12, C.kvl_pool_blocks_free(pool))
    assert.equal(LAYERS * HEADS, (append_cuts({ fork, b }, { 1, 1 })))
  end)

  it("refuses a cut that it does not have", function()
    local seq = sequence_of(pool_of(8, 4), LAYERS, HEADS)
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_held(seq, 6))
    local row = ffi.new "int32_t[1]"
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_table(seq, -1, row, 1))
    assert.truthy(ffi.string(C.kvl_last_error()):find "cut is %-1, expected 0 ... 5")
  end)
end)

describe("the tables on a device", function()
  -- What updates write to, as the device would have it.
  local function device_of(seqs, width)
    local out = ffi.new "kvl_tables *[1]"
    kv.check(C.kvl_tables_open(LAYERS, HEADS, seqs, width, out))
    local d = { handle = ffi.gc(out[0], C.kvl_tables_close), entries = {}, width = width,
                seqs = seqs }
    --- Brings them up to date, `room` entries at a time. Returns how many were sent.
    function d:update(list, room)
      local handles, sent = ffi.new("kvl_sequence *[?]", #list), 0
      local where, to = ffi.new("int32_t[?]", room), ffi.new("int32_t[?]", room)
      for i, seq in ipairs(list) do handles[i - 1] = seq end
      repeat
        local n = kv.check(C.kvl_tables_update(self.handle, handles, #list, where, to,
          room))
        for i = 0, n - 1 do self.entries[where[i]] = to[i] end
        sent = sent + n
      until n < room
      return sent
    end
    function d:check(list)
      for s, seq in ipairs(list) do
        for cut = 0, LAYERS * HEADS - 1 do
          local row, held = unpack(cuts_of(seq, self.width)[cut])
          local layer, head = math.floor(cut / HEADS), cut % HEADS
          local at = ((layer * self.seqs + s - 1) * HEADS + head) * self.width
          for b = 1, math.ceil(held / 4) do
            assert.equal(row[b], self.entries[at + b - 1])
          end
        end
      end
    end
    return d
  end

  it("are those of the sequences after any changes, which alone are sent", function()
    local rng = support.rng(5)
    local pool = pool_of(2000, 4)
    local d, seqs = device_of(3, 64), {}
    for i = 1, 3 do seqs[i] = sequence_of(pool, LAYERS, HEADS) end
    for _ = 1, 200 do
      local kind, i = rng(6), 1 + rng(#seqs)
      if kind == 0 and C.kvl_sequence_length(seqs[i]) > 0 then
        kv.check(C.kvl_sequence_truncate(seqs[i], rng(C.kvl_sequence_length(seqs[i]))))
      elseif kind == 1 then
        local fork = fork_of(seqs[i])
        close(seqs[1 + i % 3])
        seqs[1 + i % 3] = fork
      elseif kind == 2 then
        seqs[1], seqs[i] = seqs[i], seqs[1]
      else
        local counts = {}
        for s, seq in ipairs(seqs) do
          counts[s] = C.kvl_sequence_length(seq) < 240 and rng(9) or 0
        end
        assert.is_true(append_cuts(seqs, counts) >= 0)
      end
      d:update(seqs, 1 + rng(90))
      d:check(seqs)
      assert.equal(0, d:update(seqs, 10))
    end
    local blocks = C.kvl_sequence_blocks(seqs[1])
    append_cuts({ seqs[1] }, { 4 })
    assert.is_true(d:update(seqs, 100) <= LAYERS * HEADS * 2)
    assert.equal(blocks + 1, C.kvl_sequence_blocks(seqs[1]))
    C.kvl_tables_forget(d.handle)
    d.entries = {}
    d:update(seqs, 7)
    d:check(seqs)
  end)

  it("refuse sequences that are cut in another way, or are too long", function()
    local pool = pool_of(100, 4)
    local d, other = device_of(1, 2), sequence_of(pool)
    local handles, room = ffi.new("kvl_sequence *[1]", other), ffi.new "int32_t[4]"
    assert.equal(C.KVL_ERR_INVALID,
      C.kvl_tables_update(d.handle, handles, 1, room, room, 4))
    local long = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ long }, { 9 })
    handles[0] = long
    assert.equal(C.KVL_ERR_INVALID,
      C.kvl_tables_update(d.handle, handles, 1, room, room, 4))
    assert.matches("3 x 2 tables of up to 3 blocks, expected 3 x 2 of at most 2",
      ffi.string(C.kvl_last_error()))
  end)
end)

-- ---- eviction -------------------------------------------------------------------------

local CUTS = LAYERS * HEADS

local function ints(list)
  local out = ffi.new("int32_t[?]", #list)
  for i, x in ipairs(list) do out[i - 1] = x end
  return out
end

--- Evicts: kept and caps are numbers for all cuts, or lists.
-- Returns the status, and what the sequence held before.
local function keep(seq, kept, caps)
  local k, c, before = {}, {}, ffi.new "kvl_sequence *[1]"
  for i = 1, CUTS do
    k[i] = type(kept) == "table" and kept[i] or kept
    c[i] = type(caps) == "table" and caps[i] or caps
  end
  local status = C.kvl_sequence_keep(seq, ints(k), ints(c), before)
  return status, status == 0 and ffi.gc(before[0], C.kvl_sequence_close) or nil
end

--- The same, for good.
local function evict(seq, kept, caps)
  local status, before = keep(seq, kept, caps)
  if before then close(before) end
  return status
end

local function held_of(seq)
  local list = {}
  for cut = 0, CUTS - 1 do list[cut + 1] = C.kvl_sequence_held(seq, cut) end
  return list
end

--- Every page has as many references as tables name it, and the others are free.
local function check_owners(pool, pages, seqs)
  local refs, taken = {}, 0
  for _, seq in ipairs(seqs) do
    for cut = 0, CUTS - 1 do
      local n = C.kvl_sequence_blocks(seq) + 1
      local row = ffi.new("int32_t[?]", n)
      for i = 0, kv.check(C.kvl_sequence_table(seq, cut, row, n)) - 1 do
        refs[row[i]] = (refs[row[i]] or 0) + 1
      end
    end
  end
  for page, n in pairs(refs) do
    taken = taken + 1
    assert.equal(n, C.kvl_pool_block_refs(pool, page))
  end
  assert.equal(pages - taken, C.kvl_pool_blocks_free(pool))
end

describe("a sequence whose tokens are evicted", function()
  it("is what it was when the eviction is taken back", function()
    local pool = pool_of(80, 4)
    local seq = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ seq }, { 20 })
    evict(seq, { 20, 12, 12, 12, 12, 12 }, 24)
    append_cuts({ seq }, { 1 }, 1)
    local want, held, free = cuts_of(seq, 8), held_of(seq), C.kvl_pool_blocks_free(pool)
    local _, before = keep(seq, { 21, 5, 13, 5, 5, 5 }, { 21, 5, 13, 5, 5, 5 })
    append_cuts({ seq }, { 1 }, 1) -- full cuts: nothing is shared with `before`
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_restore(seq, before))
    local handles, lengths = ffi.new("kvl_sequence *[1]", seq), ints { 21 }
    kv.check(C.kvl_sequences_rewind(handles, lengths, 1, nil, 0))
    kv.check(C.kvl_sequence_restore(seq, before))
    close(before)
    assert.same(want, cuts_of(seq, 8))
    assert.same(held, held_of(seq))
    assert.equal(free, C.kvl_pool_blocks_free(pool))
  end)

  it("is copied where others hold its open block, however they came to it", function()
    local pool = pool_of(20, 4)
    local seq = sequence_of(pool)
    append({ seq }, { 6 })
    kv.check(C.kvl_pool_hold(pool, 1))
    local n, places = append({ seq }, { 1 })
    assert.equal(1, n)
    assert.equal(2 * 4 + 2, places[1])
  end)

  it("has fresh pages for what it keeps, and gives the others back", function()
    local pool = pool_of(60, 4)
    local seq = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ seq }, { 20 })
    local before = cuts_of(seq, 8)
    local status, old = keep(seq, { 8, 20, 3, 8, 8, 1 }, { 8, 24, 8, 8, 8, 8 })
    assert.equal(0, status)
    assert.equal(60 - 30 - (2 + 1 + 2 + 2 + 1), C.kvl_pool_blocks_free(pool))
    close(old)
    local after = cuts_of(seq, 8)
    assert.same({ 8, 20, 3, 8, 8, 1 }, held_of(seq))
    assert.equal(60 - (2 + 5 + 1 + 2 + 2 + 1), C.kvl_pool_blocks_free(pool))
    assert.same(before[1], after[1]) -- it keeps everything
    assert.is_false(pcall(assert.same, before[0][1], after[0][1]))
    assert.equal(20, C.kvl_sequence_length(seq))
  end)

  it("holds no more than its caps in decode, and all of a prompt", function()
    local pool = pool_of(100, 4)
    local seq = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ seq }, { 20 })
    evict(seq, { 8, 8, 6, 8, 8, 8 }, { 8, 8, 8, 8, 8, 2 ^ 31 - 1 })
    assert.equal(3, C.kvl_sequence_grown(seq, 1, 1)) -- of the last cut
    assert.equal(4, C.kvl_sequence_grown(seq, 5, 0))
    for step = 1, 4 do
      local status, places = append_cuts({ seq }, { 1 }, 1)
      assert.equal(0, status)
      assert.same({ 8, 8, math.min(8, 6 + step), 8, 8, 8 + step }, held_of(seq))
      assert.equal(-1, tonumber(places[0])) -- another token's place
      assert.equal(step <= 2, places[2] >= 0)
      assert.is_true(places[5] >= 0)
    end
    assert.equal(C.KVL_ERR_INVALID, (append_cuts({ seq }, { 2 }, 1)))
    assert.matches("tokens is 2, expected 1: each takes the place",
      ffi.string(C.kvl_last_error()))
    assert.equal(0, (append_cuts({ seq }, { 5 }, 0))) -- of a prompt
    assert.same({ 13, 13, 13, 13, 13, 17 }, held_of(seq))
    assert.equal(29, C.kvl_sequence_length(seq))
    -- back to where the prompt began, but no further: tokens were replaced
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_truncate(seq, 23))
    assert.equal(0, C.kvl_sequence_truncate(seq, 24))
    assert.same({ 8, 8, 8, 8, 8, 12 }, held_of(seq))
    local _, places = append_cuts({ seq }, { 1 }, 1)
    assert.equal(-1, tonumber(places[0]))
    assert.equal(0, C.kvl_sequence_truncate(seq, 0))
    assert.equal(100, C.kvl_pool_blocks_free(pool))
    append_cuts({ seq }, { 9 }, 1) -- it begins anew, without caps
    assert.same({ 9, 9, 9, 9, 9, 9 }, held_of(seq))
  end)

  it("refuses to keep what it does not hold, and pages that are not there", function()
    local pool = pool_of(40, 4)
    local seq = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ seq }, { 20 }) -- 30 of 40 pages
    for _, bad in ipairs { { 0, 8 }, { 21, 24 }, { 8, 7 } } do
      assert.equal(C.KVL_ERR_INVALID, evict(seq, bad[1], bad[2]))
    end
    local before = cuts_of(seq, 8)
    assert.equal(C.KVL_ERR_NO_BLOCKS, evict(seq, 8, 8)) -- 12 pages
    assert.same(before, cuts_of(seq, 8))
    assert.equal(0, evict(seq, 4, 8))
  end)

  it("writes to no page that a fork has, before it has its own", function()
    local pool = pool_of(60, 4)
    local seq = sequence_of(pool, LAYERS, HEADS)
    append_cuts({ seq }, { 12 })
    evict(seq, 8, 8)
    local fork = fork_of(seq)
    for _, one in ipairs { seq, fork } do
      assert.equal(C.KVL_ERR_INVALID, (append_cuts({ one }, { 1 }, 1)))
      assert.matches("unshare the sequence first", ffi.string(C.kvl_last_error()))
    end
    local copies = ffi.new("int32_t[?]", 2 * CUTS * 2)
    assert.equal(5, C.kvl_sequence_unshare(fork, copies, 5))
    assert.equal(CUTS * 2 - 5, C.kvl_sequence_unshare(fork, copies, 50))
    for _, one in ipairs { seq, fork } do
      assert.equal(0, (append_cuts({ one }, { 1 }, 1)))
    end
    check_owners(pool, 60, { seq, fork })
  end)

  it("keeps the count of pages right in random steps", function()
    local rng, pages = support.rng(11), 600
    local pool = pool_of(pages, 4)
    local seqs = { sequence_of(pool, LAYERS, HEADS) }
    local steps, failed = support.is_full and 1e5 or 5000, 0
    local stats, evicted, most = ffi.new "kvl_pool_stats", 0, 0
    local function free() return C.kvl_pool_blocks_free(pool) end
    for step = 1, steps do
      local kind, i = rng(20), 1 + rng(#seqs)
      local seq = seqs[i]
      local length = C.kvl_sequence_length(seq)
      if kind == 0 and #seqs < 4 then
        seqs[#seqs + 1] = fork_of(seq)
      elseif kind == 1 and #seqs > 1 then
        close(table.remove(seqs, i))
      elseif kind == 2 then
        C.kvl_sequence_truncate(seq, rng(length + 1)) -- or is refused
      elseif kind < 6 and length > 0 then
        local kept, caps = {}, {}
        for cut, held in ipairs(held_of(seq)) do
          kept[cut] = 1 + rng(held)
          caps[cut] = kept[cut] + rng(10)
        end
        local before = free()
        if evict(seq, kept, caps) < 0 then failed = failed + 1 end
        evicted = evicted + free() - before
      elseif kind == 6 then
        local held, before = held_of(seq), nil -- an eviction that is undone
        if length > 0 then
          local list = {}
          for cut = 1, CUTS do list[cut] = rng(2) == 0 and held[cut] or 1 end
          before = select(2, keep(seq, list, 2 ^ 20))
        end
        if before then
          append_cuts({ seq }, { 3 }) -- what follows is undone first
          if C.kvl_sequence_length(seq) > length then
            kv.check(C.kvl_sequence_truncate(seq, length))
          end
          kv.check(C.kvl_sequence_restore(seq, before))
          close(before)
        end
        assert.same(held, held_of(seq))
        assert.equal(length, C.kvl_sequence_length(seq))
      elseif kind == 7 then
        local copies = ffi.new("int32_t[?]", 2 * 700)
        if C.kvl_sequence_unshare(seq, copies, 700) < 0 then
          close(seq)
          seqs[i] = sequence_of(pool, LAYERS, HEADS)
        end
      else
        local counts, replaces = {}, rng(2)
        for s = 1, #seqs do counts[s] = replaces == 1 and 1 or rng(9) end
        if append_cuts(seqs, counts, replaces) < 0 then
          failed = failed + 1
          if C.kvl_pool_blocks_free(pool) < 60 then C.kvl_sequence_truncate(seq, 0) end
        end
      end
      if step % 50 == 0 then check_owners(pool, pages, seqs) end
      kv.check(C.kvl_pool_stats_get(pool, stats))
      most = math.max(most, pages - free())
      assert.equal(pages - free(), tonumber(stats.blocks_held))
      assert.equal(evicted, tonumber(stats.blocks_evicted))
      assert.is_true(stats.blocks_peak >= most and stats.blocks_peak <= pages)
    end
    assert.is_true(failed > 0 and failed < steps / 2, failed)
    for _, seq in ipairs(seqs) do close(seq) end
    assert.equal(pages, C.kvl_pool_blocks_free(pool))
  end)
end)
