--- What specs write is gone when they end, however they end.
local files = require "kvlab.files"
local kv = require "kvlab"
local temporary = require "spec.temporary"

local SPEC = [[
local temporary = require "spec.temporary"
local files = require "kvlab.files"
local outer
setup(function() outer = temporary.folder() end)
local function check(ends)
  return function()
    files.write(temporary.folder() .. "/a file", "text")
    assert.equal("text", files.read(temporary.file "text"))
    files.write(outer .. "/another", "text")
    local parent = outer:match "^(.*)/"
    assert.equal(3, #files.list(parent)) -- none of an earlier spec
    ends()
  end
end
it("passes", check(function() end))
it("fails", check(function() assert.equal(1, 2) end))
it("raises", check(function() error "what it raises" end))
]]

describe("a temporary folder", function()
  it("is gone at the end of a spec that passed, failed or raised", function()
    if not kv.paths.executable then return pending "no executable" end
    local spec, parent = temporary.file(SPEC, "ends_spec.lua"), temporary.folder()
    local pipe = io.popen(("TMPDIR=%s %s 2>&1"):format(files.shell_line { parent },
      files.shell_line { kv.paths.executable, "test", "--device=cpu", spec }))
    local output = pipe:read "*a"
    pipe:close()
    assert.matches("\n1 passed, 2 failed\n$", output)
    assert.same({}, files.list(parent))
  end)

  it("is what specs use", function()
    local FREE = { ["option_tables.lua"] = true, ["fuzz.lua"] = true,
                   ["emulation.lua"] = true, -- these three run without specs, too
                   ["temporary_spec.lua"] = true }
    for _, path in ipairs(files.find(kv.paths.root .. "/spec", ".lua")) do
      local text = files.read(path)
      local makes = text:find "os%.tmpname" or text:find "mktemp"
      assert(not makes or FREE[path:match "[^/]*$"], path)
    end
  end)
end)
