--- tools/precompile.lua: what a bundle carries is what shipped policies look for.
local compiler = require "kvlab.kernel.run.compiler"
local files = require "kvlab.files"
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local temporary = require "spec.temporary"
require "spec.support" -- it chooses how kernels are compiled

local TOOL = kv.paths.root .. "/tools/precompile.lua"
local executable = (package.loaded["kvlab.paths"] or {}).executable
if not executable or not io.open(TOOL) then return end -- a bundle has no tools

--- The exit status and all output of the tool, with kernels that are compiled as those of
-- specs.
local function run(words)
  local script = temporary.file(("require('kvlab.kernel.run.compiler').level = %q\n"
    .. "dofile %q"):format(compiler.level, TOOL), "script.lua")
  local pipe = io.popen(("%s %s 2>&1; echo $?"):format(files.shell_line { executable,
    "run", script, "--device=cpu" }, words))
  local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
  pipe:close()
  return tonumber(status), output
end

--- The names of the kernels that a policy opens on the CPU.
local function names_of(name)
  local names, open, cpu = {}, kernel.open, kv.device "cpu"
  local p = kv.policy(name)
  kernel.open = function(plan, dev)
    names[#names + 1] = kernel.name_of(kernel.print(plan, kernel.target(cpu)),
      kernel.target(cpu))
    return open(plan, dev)
  end
  local ok, why = pcall(policy.attach, p, { device = cpu, layers = 2, blocks = 8,
    kv_heads = 2, heads = 8, head_dim = 64, block_size = 16, dtype = "f32",
    max_blocks = 8, scale = 1 })
  kernel.open = open
  if not ok then error(why, 0) end
  return names
end

describe("tools/precompile.lua", function()
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end

  it("compiles the kernels that shipped policies open", function()
    local out = temporary.path "compiled"
    files.make_folder(out)
    local status, text = run(("--set out=%s --set arch= --set isa=%s --set dtype=f32 "
      .. "--set block_size=16 --set head_dim=64 --set group=4"):format(out,
      kernel.target(kv.device "cpu")))
    assert.equal(0, status, text)
    local found = 0
    for _, name in ipairs(policy.names()) do
      local x = kv.policy(name).expressions
      if x.fields or x.score or x.attention or next(x.maps) then
        for _, kept in ipairs(names_of(name)) do
          assert.is_truthy(files.read(out .. "/" .. kept), name)
          found = found + 1
        end
      end
    end
    assert.is_true(found > 0)
  end)

  it("says what is missing", function()
    local status, text = run ""
    assert.equal(1, status)
    assert.matches("--set out=DIR is missing", text, 1, true)
    status, text = run "--set out=/nowhere --set head_dim=64,65"
    assert.equal(1, status)
    assert.matches("precompile: head_dim is 65, expected some of 64, 128, 256", text, 1,
      true)
  end)
end)
