--- What may happen to a run: its disk is full, its process is killed or interrupted, its
-- store fails while it serves. Afterwards nothing is torn and nothing is wrong: another
-- run goes on from there to the same rows, answers are those of an undisturbed run, and a
-- store gives the right block or none.
--
-- Kills of single runs, workers and merges, at many more moments, are in
-- spec/lua/experiment/sweep/kill_spec.lua; those of writers of stores in
-- spec/runtime/store_kill_spec.lua (`kvlab test --tags=slow` on it kills 200); closed and
-- full standard streams in spec/standard_streams_spec.lua.
local ffi = require "ffi"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local process = require "kvlab.experiment.sweep.process"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

if not kv.paths.executable or support.is_hostile then return end
local serving = require "spec.serving"

local SIGINT, SIGKILL = 2, 9
local TOLERANCE = 1e-4 -- of K and V: f32 sums in another order, on values up to about 5
local q = files.shell_line

-- ---- experiments ----------------------------------------------------------------------

local EXPERIMENT = [[
local kv = require "kvlab"
local ffi = require "ffi"
ffi.cdef "int usleep(unsigned us);"
kv.experiment.run {
  name = "small", grid = { { "x", { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 } } },
  defaults = { us = 0 },
  run = function(c)
    ffi.C.usleep(tonumber(os.getenv "SPEC_US" or 0))
    return { y = c.x / 3, text = ("word "):rep(100) }
  end,
  table = { rows = "x", value = "y" },
}
]]

describe("an experiment", function()
  local folder, whole

  local function command(words, out)
    return q { kv.paths.executable, "run", folder .. "/script.lua", "--device=cpu",
      "--out=" .. out, unpack(words) }
  end

  --- Runs a shell command. Returns its status and what it printed.
  local function sh(text)
    local pipe = io.popen(("{ %s\n} 2>&1; echo $?"):format(text))
    local output, status = pipe:read "*a":match "^(.-)(%d+)\n$"
    pipe:close()
    return tonumber(status), output
  end

  local function rows(out) return files.read(out .. "/results.jsonl") or "" end

  --- What is in the folder is whole: rows of the undisturbed run, of which only the last
  -- may be cut; a manifest, and a report, or none. Returns how many whole rows there are.
  local function check(out)
    local count = 0
    for line in rows(out):gmatch "([^\n]*)\n" do
      assert(whole:find(line .. "\n", 1, true), line)
      count = count + 1
    end
    local manifest = files.read(out .. "/manifest.json")
    if manifest then assert.equal("small", json.decode(manifest).name) end
    local report = files.read(out .. "/report.html")
    if report then assert.matches("</html>%s*$", report) end
    return count
  end

  --- Another run goes on from what is there.
  local function goes_on(out)
    assert.equal(0, (sh(command({}, out))))
    assert.equal(whole, rows(out))
    check(out)
    assert.truthy(files.read(out .. "/report.html"))
  end

  lazy_setup(function()
    folder = temporary.folder()
    files.write(folder .. "/script.lua", EXPERIMENT)
    assert.equal(0, (sh(command({}, folder .. "/whole"))))
    whole = rows(folder .. "/whole")
  end)

  it("whose disk is full fails with words, and goes on elsewhere", function()
    local disk = folder .. "/disk"
    files.make_folder(disk)
    local mount = ("unshare -m sh -c 'mount -t tmpfs -o size=%%dk none %s && %%s'")
      :format(disk)
    local can_mount = sh(mount:format(4, "true")) == 0
    local failed, whole_rows = 0, {}
    for _, kib in ipairs { 4, 8, 12, 16, 20, 28, 200 } do
      local out = ("%s/full-%d"):format(folder, kib)
      local limit
      if can_mount then
        files.write(folder .. "/command", ("%s; status=$?; cp -R %s %s; exit $status\n")
          :format(command({}, disk), disk, out))
        limit = mount:format(kib, "sh " .. folder .. "/command")
      else -- the longest file instead
        limit = ("(trap '' XFSZ; ulimit -f %d; %s)"):format(2 * kib, command({}, out))
      end
      local status, output = sh(limit)
      if status ~= 0 then
        failed = failed + 1
        assert(output:find "No space left" or output:find "File too large", output)
        assert.equal(1, status)
      end
      whole_rows[#whole_rows + 1] = check(out)
      goes_on(out)
    end
    assert.is_true(failed >= 3, failed)
    assert.equal(12, whole_rows[#whole_rows])
    assert.is_true(whole_rows[1] < 12)
  end)

  for name, words in pairs { ["a run"] = {}, ["a sweep"] = { "--jobs=2" } } do
    for signal, how in pairs { [SIGINT] = "exit status 130", [SIGKILL] = "signal 9" } do
      it(("as %s that signal %d ends goes on"):format(name, signal), function()
        local out = ("%s/%s-%d"):format(folder, name:gsub(" ", "-"), signal)
        local child = process.spawn { "sh", "-c", ("SPEC_US=30000 exec %s >%s.log 2>&1")
          :format(command(words, out), out) }
        processes.wait_until(function() return rows(out):find "\n.*\n" end, "two rows")
        ffi.C.kill(child.pid, signal)
        assert.equal(how, child:close())
        local count = check(out)
        assert.is_true(count >= 2 and count < 12, count)
        if signal == SIGINT then
          local said = files.read(out .. ".log")
          assert.matches("interrupted: %d+ of 12 rows are in ", said)
        end
        goes_on(out)
      end)
    end
  end
end)

-- ---- servers --------------------------------------------------------------------------

describe("a server", function()
  local want, right = {}, {} -- outputs and contents of an undisturbed run, by round

  lazy_setup(function()
    for round = 0, serving.ROUNDS - 1 do
      local store = serving.store "memory:"
      want[round] = serving.serve(round)
      assert.same(want[round], serving.serve(round, store))
      right[round] = serving.contents(round, store, want[round])
      store:close()
    end
  end)

  --- Every block that the store has is right. Returns how many there are.
  local function check_store(store)
    local count = 0
    for round = 0, serving.ROUNDS - 1 do
      for key, numbers in pairs(serving.contents(round, store, want[round])) do
        support.close(numbers, right[round][key], TOLERANCE, 0, key)
        count = count + 1
      end
    end
    return count
  end

  --- Answers with the store are right, and so is what the store holds then.
  local function goes_on(store)
    for round = 0, serving.ROUNDS - 1 do
      assert.same(want[round], serving.serve(round, store))
    end
    return check_store(store)
  end

  for signal, how in pairs { [SIGINT] = "exit status 130", [SIGKILL] = "signal 9" } do
    it(("that signal %d ends leaves right blocks in its file"):format(signal), function()
      local rng = support.rng(signal)
      local folder = temporary.folder()
      for try = 1, 5 do
        local ready = ("%s/ready-%d"):format(folder, try)
        local child = process.spawn { "sh", "-c", ("exec %s >%s/log 2>&1"):format(q {
          kv.paths.executable, "run", kv.paths.root .. "/spec/serving.lua",
          "--device=cpu", "--set", "store=lmdb:" .. folder .. "/blocks", "--set",
          "ready=" .. ready }, folder) }
        processes.wait_until(function() return files.read(ready) end, "it serves")
        processes.sleep(rng(1000) * 2e-4)
        ffi.C.kill(child.pid, signal)
        assert.equal(how, child:close(), files.read(folder .. "/log"))
        local store = serving.store("lmdb:" .. folder .. "/blocks")
        check_store(store)
        assert.equal(0, store:stats().damaged)
        if try == 5 then assert.is_true(goes_on(store) > 100) end
        store:close()
      end
    end)
  end

  it("whose store's disk is full answers as without one", function()
    local folder = temporary.folder()
    local mounts = os.execute(("mount -t tmpfs -o size=200k none %s 2>/dev/null"):format(
      folder)) == 0
    if not mounts then return pending "no file system can be mounted here" end
    finally(function() os.execute("umount " .. folder) end)
    local store = serving.store("lmdb:" .. folder .. "/blocks")
    local count = goes_on(store)
    assert.is_true(store:stats().errors > 0)
    assert.matches("No space left", store:problem())
    assert.is_true(count > 0 and count < 200, count)
    assert.equal(0, store:stats().damaged)
    store:close()
  end)

  it("whose Redis server goes away and comes back answers as without one", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    local redis = processes.redis()
    finally(function() redis:stop() end)
    local store = serving.store(redis.url)
    for round = 0, serving.ROUNDS - 1 do
      local outputs = serving.serve(round, store, function(step)
        if step % 6 == 3 then redis:stop() end
        if step % 6 == 5 then redis:start() end
      end)
      assert.same(want[round], outputs)
      if redis:ask "ping" == nil then redis:start() end
    end
    assert.is_true(store:stats().errors > 0)
    processes.wait_until(function() return store:stats().records end, "it is back")
    assert.is_true(goes_on(store) > 100)
    store:close()
  end)

  it("whose Redis server answers something else answers as without one", function()
    for _, answer in ipairs { "$5\r\nhello\r\n", "+OK\r\n", "$-1\r\n", ":1\r\n",
        "-ERR it is broken\r\n", "*1\r\n$1\r\nx\r\n", "HTTP/1.1 400 No\r\n\r\n" } do
      local fake = processes.answering(answer)
      local store = serving.store(fake.url)
      assert.same(want[0], serving.serve(0, store))
      assert.same({}, serving.contents(0, store, want[0]), answer)
      store:close()
      fake:stop()
    end
  end)
end)
