--- An lmdb store's file as specs see it: its path, a fresh one for each spec, and what is
-- in it, read and changed by LMDB itself.
local ffi = require "ffi"
local cases = require "spec.runtime.store_cases"
local temporary = require "spec.temporary"

local M = {
  path = nil, -- of the present spec's file
}

ffi.cdef [[
typedef struct { size_t mv_size; void *mv_data; } MDB_val;
int mdb_env_create(void **env);
int mdb_env_set_maxdbs(void *env, unsigned n);
int mdb_env_open(void *env, const char *path, unsigned flags, unsigned mode);
void mdb_env_close(void *env);
int mdb_txn_begin(void *env, void *parent, unsigned flags, void **txn);
int mdb_txn_commit(void *txn);
int mdb_dbi_open(void *txn, const char *name, unsigned flags, unsigned *dbi);
int mdb_get(void *txn, unsigned dbi, MDB_val *key, MDB_val *value);
int mdb_put(void *txn, unsigned dbi, MDB_val *key, MDB_val *value, unsigned flags);
]]
local lmdb = ffi.load "liblmdb.so.0"
local NOSUBDIR, CREATE = 0x4000, 0x40000

local function val(text) return ffi.new("MDB_val", #text, ffi.cast("void *", text)) end

--- Returns the path of a file that is not there yet, which is M.path from now on.
function M.fresh()
  M.path = temporary.path "blocks"
  return M.path
end

--- Opens the file as a store.
function M.open(capacity) return cases.open("lmdb:" .. M.path, capacity) end

--- edit(get, put) with functions over the strings of one tree of the file.
function M.edit(tree, edit)
  local env, txn, dbi = ffi.new "void *[1]", ffi.new "void *[1]", ffi.new "unsigned[1]"
  assert(lmdb.mdb_env_create(env) == 0)
  assert(lmdb.mdb_env_set_maxdbs(env[0], 4) == 0)
  assert(lmdb.mdb_env_open(env[0], M.path, NOSUBDIR, 438) == 0)
  assert(lmdb.mdb_txn_begin(env[0], nil, 0, txn) == 0)
  assert(lmdb.mdb_dbi_open(txn[0], tree, CREATE, dbi) == 0)
  local function get(key)
    local value = ffi.new "MDB_val"
    assert(lmdb.mdb_get(txn[0], dbi[0], val(key), value) == 0)
    return ffi.string(value.mv_data, value.mv_size)
  end
  local function put(key, value)
    assert(lmdb.mdb_put(txn[0], dbi[0], val(key), val(value), 0) == 0)
  end
  edit(get, put)
  assert(lmdb.mdb_txn_commit(txn[0]) == 0)
  lmdb.mdb_env_close(env[0])
end

--- What a record of part 0 is filed under.
function M.name_of(i) return ffi.string(cases.key(i), 16) .. "\0\0\0\0" end

--- The text with a bit of one byte changed.
function M.flipped(text, at)
  local byte = bit.bxor(text:byte(at + 1), 16)
  return text:sub(1, at) .. string.char(byte) .. text:sub(at + 2)
end

return M
