--- The C library without the conveniences of Lua: what a C program relies on.
local ffi = require "ffi"
local kv = require "kvlab"
local C = kv.C

describe("status", function()
  it("has words for every value, and for none of its own", function()
    local seen = {}
    for status = 0, -8, -1 do
      local text = ffi.string(C.kvl_status_text(status))
      assert.is_nil(seen[text])
      assert.not_equal("unknown status", text)
      seen[text] = true
    end
    assert.equal("unknown status", ffi.string(C.kvl_status_text(-99)))
    assert.equal("ok", ffi.string(C.kvl_status_text(3)))
  end)

  it("stops every op while the interrupt flag is set", function()
    local t = kv.zeros(kv.device "cpu", "f32", { 4 })
    C.kvl_interrupt(1)
    local status = C.kvl_fill(t, 1)
    C.kvl_interrupt(0)
    assert.equal(C.KVL_ERR_INTERRUPTED, status)
    assert.equal(0, t:max():item())
  end)
end)

describe("device handle", function()
  it("is counted: tensors keep using it until the last close", function()
    local out = ffi.new "kvl_device *[1]"
    kv.check(C.kvl_device_open("cpu", out))
    assert.equal(kv.device "cpu", out[0])
    C.kvl_device_close(out[0])
    assert.equal(2, kv.full(kv.device "cpu", "f32", { 1 }, 2):item())
  end)
end)

describe("lent memory", function()
  it("is read and written in place and never freed", function()
    local memory = ffi.new("float[6]", { 1, 2, 3, 4, 5, 6 })
    local shape = ffi.new("int64_t[6]", { 2, 3 })
    local t = ffi.new "kvl_tensor"
    kv.check(C.kvl_tensor_wrap(kv.device "cpu", C.KVL_DTYPE_F32, 2, shape, memory, t))
    assert.same({ 2, 3 }, t:dims())
    local row = t:index(1)
    t:free()
    row:mul(10, row)
    row:free()
    assert.equal(3, memory[2])
    assert.equal(60, memory[5])
    assert.equal(C.KVL_ERR_INVALID,
      C.kvl_tensor_wrap(kv.device "cpu", C.KVL_DTYPE_F32, 2, shape, nil, t))
  end)
end)

describe("kvlab.h #slow", function()
  --- The example in the header's first comment, inside a main.
  local function example()
    local file = assert(io.open(kv.paths.header))
    local text = file:read "*a"
    file:close()
    local first, last = text:find "kvl_device %*dev;.-kvl_device_close%(dev%);"
    local body = text:sub(first, last):gsub("\n %*", "\n")
    return ("#include <stdio.h>\n#include \"kvlab.h\"\nint main(void) {\n%s\n}\n"):format(
      body)
  end

  for language, compiler in pairs { c = "gcc -std=c17 -xc", ["c++"] = "g++ -xc++" } do
    it("compiles and its example runs in " .. language, function()
      if os.execute(compiler:match "^%S+" .. " --version >/dev/null 2>&1") ~= 0
         or kv.paths.config == "hostile" or kv.paths.config == "bundle" then
        return pending "no compiler for this build"
      end
      local source, binary = os.tmpname(), os.tmpname()
      local file = assert(io.open(source, "w"))
      file:write(example())
      file:close()
      local command = ("%s -Wall -Werror -I'%s/runtime' -o %s %s -xnone '%s/libkvlab.so' "
        .. "-Wl,-rpath,'%s' 2>&1 && %s"):format(compiler, kv.paths.root, binary, source,
        kv.paths.library_dir, kv.paths.library_dir, binary)
      local pipe = io.popen(command)
      local output = pipe:read "*a"
      pipe:close()
      os.remove(source)
      os.remove(binary)
      assert.equal("", output)
    end)
  end
end)
