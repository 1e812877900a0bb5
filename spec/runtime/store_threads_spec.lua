--- Stores under eight threads, and when memory is missing.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local C, fails, sh = kv.C, support.fails, processes.sh
local out_store = ffi.new "kvl_store *[1]"

describe("a store under eight threads", function()
  local folder
  lazy_setup(function() folder = temporary.folder() end)
  local server

  after_each(function()
    if server then server:stop() end
    server = nil
  end)

  local function hammer(url, capacity, rounds, pid)
    if not support.runs_sanitized then return pending(support.SANITIZED) end
    local root = kv.paths.root
    local source = root .. "/spec/runtime/store_threads.c"
    if not processes.has "gcc" or not files.read(root .. "/runtime/store/store.c") then
      return pending "no compiler, or no sources"
    end
    local program = folder .. "/threads"
    if not files.read(program) then
      sh(("cd '%s/runtime' && gcc -std=gnu17 -g -O1 -fsanitize=thread -I. -I../build "
        .. "-o '%s' '%s' store/*.c core/status.c -llmdb -lhiredis -lpthread")
        :format(root, program, source))
    end
    local pipe = io.popen(("TSAN_OPTIONS=halt_on_error=1 '%s' '%s' %d %d %s 2>&1; "
      .. "echo $?"):format(program, url, capacity, rounds, pid or ""))
    local output = pipe:read "*a"
    pipe:close()
    assert.equal("0\n", output)
  end

  it("keeps its promises in memory", function() hammer("memory:", 300000, 3000) end)
  it("keeps them in a file", function()
    hammer("lmdb:" .. temporary.path(), 300000, 400)
  end)
  it("keeps them in a Redis server", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    server = processes.redis()
    hammer(server.url, 0, 400)
  end)
  it("keeps them when the server is killed", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    server = processes.redis()
    hammer(server.url, 0, 400, server.pid)
  end)
end)

describe("a failed allocation", function()

  --- try() with its n-th allocation failing, for every n; it succeeds in the end.
  local function fail_each(try)
    local failures = 0
    for n = 1, 50 do
      kv.check(C.kvl_fail_allocation(n))
      local status = try()
      kv.check(C.kvl_fail_allocation(0))
      if status >= 0 then return failures end
      failures = failures + 1
      fails(status, "no host memory for ")
    end
    error "it never succeeds"
  end

  it("leaves a store as it was", function()
    if not support.is_hostile then return pending "not a hostile build" end
    local server = processes.has "redis-server" and processes.redis()
    local lmdb = "lmdb:" .. temporary.path()
    for _, url in ipairs { "memory:", lmdb, server and server.url } do
      assert.is_true(fail_each(function()
        return C.kvl_store_open(url, 0, 0, out_store)
      end) > 0)
      C.kvl_store_close(out_store[0])
      local s = cases.open(url)
      for i = 1, 9 do
        fail_each(function() return s:put(i, 0, 1000, i) end)
      end
      for i = 1, 9 do s:holds(i, 0, 1000, i) end
      s:close()
    end
    if server then server:stop() end
  end)
end)
