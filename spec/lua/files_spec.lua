--- Folders are listed as they are. Whatever writes a file on a full disk says so, and
-- leaves no half file.
local files = require "kvlab.files"
local kv = require "kvlab"
local temporary = require "spec.temporary"

describe("a file on a full disk", function()
  it("is an error that names it", function()
    -- a link, so that no mistake harms /dev
    local full = temporary.folder() .. "/full.svg"
    assert.equal(0, os.execute("ln -s /dev/full " .. full))
    local words = full .. " cannot be written: No space left on device"
    for _, text in ipairs { "a", ("a"):rep(2 ^ 17) } do
      for name, write in pairs { write = files.write, append = files.append } do
        local ok, why = pcall(write, full, text)
        assert.is_false(ok, name)
        assert.equal(words, why)
      end
    end
    local row = { timestamp = 0, input_length = 1, output_length = 1, hash_ids = { 1 } }
    assert.has_error(function() kv.trace.write(full, { row }) end,
      "trace.write: " .. words)
    local ok, why = pcall(require("kvlab.shell.repl.picture").draw, { 1, 2, 3 },
      full, "numbers", { columns = 80 })
    assert.is_false(ok)
    assert.equal(words, why)
  end)

  it("leaves the old one as it was, and nothing beside it", function()
    local folder = temporary.folder()
    local path, script = folder .. "/file", folder .. "/script.lua"
    files.write(path, "old")
    files.write(script, [[
      local files = require "kvlab.files"
      print(pcall(files.write, "]] .. path .. [[", ("a"):rep(2 ^ 17)))
      print(pcall(files.write_pieces, "]] .. path .. [[", function()
        error("no piece", 0)
      end))
    ]])
    local pipe = io.popen("trap '' XFSZ; ulimit -f 64; " .. files.shell_line {
      kv.paths.executable, "run", "--device=cpu", script } .. " 2>&1")
    local said = pipe:read "*a"
    pipe:close()
    assert.equal("false\t" .. path .. " cannot be written: File too large\n"
      .. "false\tno piece\n", said)
    assert.same({ "file", "script.lua" }, files.list(folder))
    assert.equal("old", files.read(path))
  end)
end)

describe("a folder", function()
  local folder

  before_each(function()
    folder = temporary.folder()
    files.make_folder(folder .. "/b/.c")
    for _, name in ipairs { "a.lua", "b/.c/d.lua", "b/two\nlines.lua", "b/e.lua.part",
                            "-f.lua", ".lua" } do
      files.write(folder .. "/" .. name, "")
    end
    assert.equal(0, os.execute(("ln -s . '%s/self'; ln -s a.lua '%s/g.lua'"):format(
      folder, folder)))
  end)

  it("has its names, sorted, whatever they are", function()
    assert.same({ "-f.lua", ".lua", "a.lua", "b", "g.lua", "self" }, files.list(folder))
  end)

  it("has the files below it, and follows no links but one to itself", function()
    local found = { "/-f.lua", "/.lua", "/a.lua", "/b/.c/d.lua", "/b/two\nlines.lua" }
    for _, root in ipairs { folder, folder .. "/self" } do
      local paths = {}
      for i, path in ipairs(found) do paths[i] = root .. path end
      assert.same(paths, files.find(root, ".lua"))
    end
  end)

  it("that is none has no names and no files", function()
    for _, none in ipairs { folder .. "/none", folder .. "/a.lua" } do
      assert.same({}, files.list(none))
      assert.same({}, files.find(none, ".lua"))
    end
  end)
end)
