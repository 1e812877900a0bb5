local ffi = require "ffi"
local kv = require "kvlab"
local C = kv.C

local function pool_of(blocks, block_size, watermark)
  local out = ffi.new "kvl_pool *[1]"
  kv.check(C.kvl_pool_open(blocks, block_size, watermark or 0, out))
  return ffi.gc(out[0], C.kvl_pool_close)
end

local function sequence_of(pool)
  local out = ffi.new "kvl_sequence *[1]"
  kv.check(C.kvl_sequence_open(pool, out))
  return ffi.gc(out[0], C.kvl_sequence_close)
end

local function fork_of(seq)
  local out = ffi.new "kvl_sequence *[1]"
  kv.check(C.kvl_sequence_fork(seq, out))
  return ffi.gc(out[0], C.kvl_sequence_close)
end

--- Append counts[i] tokens to seqs[i]: status, places, copies.
local function append(seqs, counts)
  local n, total = #seqs, 0
  local handles, tokens = ffi.new("kvl_sequence *[?]", n), ffi.new("int32_t[?]", n)
  for i = 1, n do
    handles[i - 1], tokens[i - 1] = seqs[i], counts[i]
    total = total + math.max(counts[i], 0)
  end
  local places = ffi.new("int64_t[?]", total + 1)
  local copies = ffi.new("int32_t[?]", 2 * n)
  local status = C.kvl_sequences_append(handles, tokens, n, places, copies)
  local list = {}
  for i = 0, total - 1 do list[i + 1] = tonumber(places[i]) end
  return status, list, copies
end

local function table_of(seq, width)
  local row, list = ffi.new("int32_t[?]", width), {}
  kv.check(C.kvl_sequence_table(seq, row, width))
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
    assert.equal(C.KVL_ERR_INVALID, C.kvl_sequence_table(seq, ffi.new "int32_t[1]", 1))
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
