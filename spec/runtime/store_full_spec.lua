--- A store in a file that cannot grow, because its disk is full or the size of files is
-- limited, says so in one line, and keeps what it has.
local files = require "kvlab.files"
local kv = require "kvlab"
local temporary = require "spec.temporary"

local SCRIPT = [[
local kv = require "kvlab"
local path = kv.command_line.set.path
local store = kv.store("lmdb:" .. path, { block_size = 4, model = "m" })
local cache = kv.cache { device = "cpu", layers = 1, blocks = 64, kv_heads = 2,
                         block_size = 4, head_dim = 64, format = "f32" }
local tokens = {}
for i = 1, 256 do tokens[i] = i end
local keys, n = store:keys(tokens)
for i = 0, n - 1 do
  local ok, why = store:put_block(keys[i], 0, cache:layer(0), i)
  if not ok then print(i > 0, store:find(keys, n, 1) == i, why) break end
end
store:close()
]]

describe("a store in a file that cannot grow", function()
  if not kv.paths.executable then return end

  it("says what happened, and keeps its records", function() -- 201: no whole page
    local script, path = temporary.file(SCRIPT, "full.lua"), temporary.path "blocks.lmdb"
    local pipe = io.popen("trap '' XFSZ; ulimit -f 201; " .. files.shell_line {
      kv.paths.executable, "run", "--device=cpu", script, "--set", "path=" .. path }
      .. " 2>&1")
    local text = pipe:read "*a"
    pipe:close()
    assert.matches("^true\ttrue\tlmdb store: /%S+: put: a page was not written whole "
      .. "%(Input/output error%): the disk is full", text)
  end)

  -- a disk of its own, where the system lets anybody mount one
  local mounts = "unshare -rm sh -c 'mount -t tmpfs -o size=64k none %s%s' 2>&1"
  if os.execute(mounts:format("/mnt", "")) ~= 0 then return end
  it("cannot be made on a full disk", function()
    local script = temporary.file([[
      print(pcall(require("kvlab").store, "lmdb:/mnt/blocks.lmdb"))]], "open.lua")
    local pipe = io.popen(mounts:format("/mnt", " && head -c 65536 /dev/zero > /mnt/all; "
      .. files.shell_line { kv.paths.executable, "run", "--device=cpu", script }))
    local text = pipe:read "*a"
    pipe:close()
    assert.matches("^false\t%S+: lmdb store: /mnt/blocks.lmdb: No space left on device",
      text)
  end)
end)
