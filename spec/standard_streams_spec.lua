--- Standard streams that are closed or full: an error and a status, and no other file is
-- taken for them.
local files = require "kvlab.files"
local kv = require "kvlab"
local temporary = require "spec.temporary"

if not kv.paths.executable then return end

local SCRIPT = [[
local kv = require "kvlab"
kv.experiment.run {
  name = "small", grid = { { "x", { 1, 2 } } }, run = function(c)
    io.stdout:write "printed\n"
    io.stdout:flush()
    return { y = c.x }
  end,
  table = { rows = "x", value = "y" },
}
print(("a line that is printed\n"):rep(tonumber(kv.command_line.args[1] or 1)))
]]

describe("a standard stream", function()
  local folder

  before_each(function()
    folder = temporary.folder()
    files.write(folder .. "/script.lua", SCRIPT)
  end)

  --- Runs the script. Returns its status and what it wrote to stderr.
  local function run(redirection, words)
    local line = files.shell_line { kv.paths.executable, "run", folder .. "/script.lua",
      "--device=cpu", "--out=" .. folder .. "/out", unpack(words or {}) }
    local problems = folder .. "/problems"
    local pipe = io.popen(("sh -c '%s 2>%s %s'; echo $?"):format(line, problems,
      redirection))
    local status = pipe:read "*a":match "(%d+)\n$"
    pipe:close()
    return tonumber(status), files.read(problems)
  end

  local function rows()
    local text = files.read(folder .. "/out/results.jsonl")
    local _, count = text:gsub("[^\n]*\n", function(line)
      assert.matches("^{.*}\n$", line)
    end)
    return count
  end

  it("that is full makes the status 1", function()
    for _, lines in ipairs { 1, 5000 } do
      local status, problems = run(">/dev/full", { tostring(lines) })
      assert.matches("kvlab: standard output cannot be written", problems)
      assert.equal(1, status)
    end
    assert.equal(2, rows())
  end)

  for name, redirection in pairs { stdout = ">&-", stdin = "<&-", stderr = "2>&-",
    ["all of them"] = "<&- >&- 2>&-" } do
    it("that is closed is no file of the experiment: " .. name, function()
      local status, problems = run(redirection)
      assert.equal(2, rows())
      assert.truthy(files.read(folder .. "/out/manifest.json"):find "^{.*}\n$")
      assert.equal(redirection:find ">&%-" and redirection ~= "2>&-" and 1 or 0, status,
        problems)
    end)
  end

  it("that is closed for output is reported", function()
    local _, problems = run ">&-"
    assert.matches("standard output cannot be written: Bad file descriptor", problems)
  end)
end)
