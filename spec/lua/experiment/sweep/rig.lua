--- Runs sweeps as a user does: the executable, on a small experiment in a folder of its
-- own.
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local M = {
  executable = (package.loaded["kvlab.paths"] or {}).executable,
  folder = nil, -- of the test
}

-- 3 seeds x 10 x 2 rows. SPEC_US is how long one takes at least; none ends while there is
-- the file that SPEC_GATE names; SPEC_SHOW names a variable of the environment that rows
-- show. Two ways to fail are settings: `bad` raises, `deadly` is a kill -9 as long as the
-- folder `once` is not there; `after` = "raise" fails in teardown.
local SCRIPT = [[
local ffi = require "ffi"
ffi.cdef "int usleep(unsigned us); int getpid(void); int kill(int pid, int signal);"
local function run(c, settings)
  ffi.C.usleep(tonumber(os.getenv "SPEC_US" or 0))
  local gate = os.getenv "SPEC_GATE"
  while gate and io.open(gate) do ffi.C.usleep(10000) end
  if c.a == c.bad then error "it is bad" end
  -- Of processes that come at the same time, mkdir succeeds in one.
  if c.a == c.deadly and os.execute(("mkdir '%s' 2>/dev/null"):format(c.once)) == 0 then
    ffi.C.kill(ffi.C.getpid(), 9)
  end
  settings.count = settings.count + 1
  return { x = c.a / 3 + c.seed, nothing = 0 / 0, word = c.b, ok = true,
           shown = os.getenv(os.getenv "SPEC_SHOW" or "") or "" }
end
require("kvlab.experiment.experiment").run {
  name = "spec", title = "A sweep", repeats = 3,
  grid = { { "a", A }, { "b", { "u", "v" } } },
  defaults = { bad = 0, deadly = 0, once = "", after = "" },
  environment = { device = os.getenv "SPEC_DEVICE" or "cpu", description = "a spec" },
  setup = function(settings) settings.count = 0 end,
  run = run,
  teardown = function(settings) if settings.after == "raise" then error "torn" end end,
  table = { rows = "a", columns = "b", value = "x" },
}
]]

--- Makes the folder and script.lua in it, with `n` values of a.
function M.make(n)
  M.folder = temporary.folder()
  local values = {}
  for i = 1, n or 10 do values[i] = i end
  files.write(M.folder .. "/script.lua",
    (SCRIPT:gsub("{ \"a\", A }", "{ \"a\", { " .. table.concat(values, ", ") .. " } }")))
end

--- Runs a shell command in the folder, with kvlab for the executable; returns its status
-- and all that it printed.
function M.sh(command)
  local pipe = io.popen(("cd '%s' && kvlab() { '%s' \"$@\"; }; { %s\n} 2>&1; echo $?")
    :format(M.folder, M.executable, command))
  local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
  pipe:close()
  return tonumber(status), output
end

--- The same, which must go well; returns what it printed.
function M.ok(command)
  local status, output = M.sh(command)
  if status ~= 0 then error(("%s: status %d\n%s"):format(command, status, output), 2) end
  return output
end

function M.read(name) return assert(files.read(M.folder .. "/" .. name), name) end

--- How many rows a folder holds.
function M.count(name)
  local _, count = M.read(name .. "/results.jsonl"):gsub("\n", "")
  return count
end

function M.has(words, text)
  if not text:find(words, 1, true) then
    error(("%q is not in %q"):format(words, text), 2)
  end
end

return M
