local ffi = require "ffi"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

ffi.cdef "int memcmp(const void *a, const void *b, size_t bytes);"

local function u64(n)
  local bytes = {}
  for i = 1, 8 do
    bytes[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  return table.concat(bytes)
end

--- Write a file of header text and data; the length field may lie.
local function write(header, data, length)
  return temporary.file(u64(length or #header) .. header .. (data or ""))
end

local function open_error(header, data, length)
  local ok, why = pcall(kv.safetensors, write(header, data, length))
  assert.is_false(ok)
  return why
end

local function floats(...)
  local list = { ... }
  return ffi.string(ffi.new("float[?]", #list, list), 4 * #list)
end

local ENTRY = [["%s":{"dtype":"F32","shape":[%s],"data_offsets":[%d,%d]}]]
local function entry(name, shape, first, last)
  return ENTRY:format(name, shape, first, last)
end

describe("safetensors", function()
  it("reads tensors, in any order of keys and with metadata and padding", function()
    local header = '{"__metadata__":{"a":"b"},"y":{"shape":[2],"data_offsets":[4,12],'
      .. '"dtype":"F32"},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
      .. '"none":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]}}   '
    local path = write(header, floats(7, 1, 2))
    local file = kv.safetensors(path)
    assert.same({ "none", "x", "y" }, file.names)
    local cpu = kv.device "cpu"
    assert.same({ 1, 2 }, file:read("y", cpu):list())
    assert.equal(7, file:read("x", cpu):item())
    assert.same({ 0, 3 }, file:read("none", cpu):dims())
    assert.has_error(function() file:read("y", cpu, nil, { 3 }) end)
    local ok, why = pcall(file.read, file, "yy", cpu)
    assert.is_false(ok)
    assert.truthy(why:find 'no tensor "yy"')
    file:close()
    os.remove(path)
  end)

  it("names what is wrong with a damaged file", function()
    local good = entry("x", "1", 0, 4)
    local cases = {
      { "{" .. good .. "}", floats(1), 2 ^ 40, "header length" },
      { "{" .. good .. "}", floats(1), 8 + 2 ^ 60, "header length" },
      { "{" .. good .. "}", floats(1), 4, "header" },
      { "[" .. good .. "]", floats(1), nil, "expected '{'" },
      { "{" .. good .. "} x", floats(1), nil, "text after" },
      { "{" .. good .. "}", floats(1, 2), nil, "8 bytes of data" },
      { "{" .. good .. "}", "", nil, "outside" },
      { "{" .. good .. "," .. good .. "}", floats(1), nil, "overlap" },
      { "{" .. entry("x", "0", 0, 0) .. "," .. entry("x", "1", 0, 4) .. "}", floats(1),
        nil, "occurs twice" },
      { "{" .. good .. "," .. entry("y", "1", 2, 6) .. "}", floats(1, 2),
        nil, "overlap" },
      { "{" .. good .. "," .. entry("y", "1", 8, 12) .. "}", floats(1, 2, 3),
        nil, "hole" },
      { "{" .. entry("x", "2", 0, 4) .. "}", floats(1), nil, "need 8" },
      { "{" .. entry("x", "4611686018427387904,4611686018427387904", 0, 4) .. "}",
        floats(1), nil, "2^63" },
      { "{" .. entry("x", "99999999999999999999", 0, 4) .. "}", floats(1), nil, "2^63" },
      { "{" .. entry("x", "-1", 0, 4) .. "}", floats(1), nil, "whole number" },
      { "{" .. entry("x", "1.0", 0, 4) .. "}", floats(1), nil, "']'" },
      { "{" .. entry("x", "1,1,1,1,1,1,1", 0, 4) .. "}", floats(1), nil, "more than 6" },
      { "{" .. entry("x", "1", 4, 0) .. "}", floats(1), nil, "outside" },
      { '{"x":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}', floats(1),
        nil, "dtype" },
      { '{"x":{"dtype":"F32","shape":[1]}}', floats(1), nil, "missing" },
      { '{"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', floats(1),
        nil, "once each" },
      { '{"x', "", nil, "does not end" },
      { "{", "", nil, '\'"\'' },
      { "", "", nil, "'{'" },
    }
    for i, case in ipairs(cases) do
      local why = open_error(case[1], case[2], case[3])
      assert.truthy(why:find(case[4], 1, true), ("case %d: %s"):format(i, why))
    end
  end)

  it("names a file that is missing, too short or a folder", function()
    for path, words in pairs { ["/nonexistent/x"] = "No such file", ["/"] = "regular",
                               ["/dev/null"] = "regular" } do
      local ok, why = pcall(kv.safetensors, path)
      assert.is_false(ok)
      assert.truthy(why:find(words, 1, true), why)
    end
    local ok, why = pcall(kv.safetensors, temporary.file "")
    assert.is_false(ok)
    assert.truthy(why:find "at least 8", why)
  end)

  it("is refused when it changes while it is open", function()
    local n = 3000000 -- more than is read at once
    local data = ffi.string(ffi.new("uint8_t[?]", n), n)
    local header = '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
      .. ('"b":{"dtype":"U8","shape":[%d],"data_offsets":[8,%d]}}'):format(n - 8, n)
    for words, change in pairs {
      ["has 1000 bytes, expected"] = "truncate -s 1000 '%s'",
      ["has 0 bytes, expected"] = ": >'%s'",
      ["it was written to while it was open"] =
        "printf x | dd of='%s' conv=notrunc bs=1 seek=2000 2>/dev/null; touch -d @1 '%s'",
    } do
      local path = write(header, data)
      local pid = processes.fork(function() -- which would be killed
        local file = kv.safetensors(path)
        assert(os.execute((change:gsub("%%s", path))) == 0)
        for _, name in ipairs { "a", "b" } do
          local ok, why = pcall(file.read, file, name, kv.device "cpu")
          assert(not ok and why:find(path, 1, true) and why:find(words, 1, true), why)
        end
        file:close()
      end)
      assert.equal(0, processes.wait(pid), words)
    end
  end)

  it("reads tensors of any size and reads them again", function()
    for _, n in ipairs { 1, 23, 24, 25, 2 ^ 18 - 1, 2 ^ 18, 2 ^ 18 + 1, 600001 } do
      local numbers = ffi.new("float[?]", n)
      for i = 0, n - 1 do numbers[i] = i % 8191 end
      local header = "{" .. entry("x", n, 0, 4 * n) .. "}"
      local path = write(header, ffi.string(numbers, 4 * n))
      local file = kv.safetensors(path)
      for _ = 1, 2 do
        local t = file:read("x", kv.device "cpu")
        assert.equal(0, ffi.C.memcmp(t:data(), numbers, 4 * n))
      end
      file:close()
      os.remove(path)
    end
  end)

  it("survives every truncation and every damaged byte of a header", function()
    local header = "{" .. entry("x", "2", 0, 8) .. "," .. entry("y", "1", 8, 12) .. "}"
    local data = floats(1, 2, 3)
    for cut = 0, #header + 7 do
      local path = temporary.file((u64(#header) .. header):sub(1, cut))
      assert.is_false((pcall(kv.safetensors, path)))
    end
    for at = 1, #header do
      for _, byte in ipairs { 0, 34, 92, 255 } do
        local damaged = header:sub(1, at - 1) .. string.char(byte) .. header:sub(at + 1)
        local path = write(damaged, data)
        local ok, file = pcall(kv.safetensors, path)
        if ok then file:close() end
        os.remove(path)
      end
    end
  end)

  it("gives back everything when memory runs out at any place", function()
    if not support.is_hostile then
      return pending "only in a hostile build can allocations be made to fail"
    end
    local path = write("{" .. entry("x", "2", 0, 8) .. "," .. entry("y", "1", 8, 12)
      .. "}", floats(1, 2, 3))
    support.fails_each_allocation(function() return kv.safetensors(path) end, 100)
  end)

  support.each_device(function(dev)
    it("saves tensors of every dtype from " .. dev:name(), function()
      local path, tensors = temporary.path(), {}
      tensors["a \"quoted\" \\ name"] = kv.zeros(dev, "f32", {})
      for i, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3", "i32", "i64", "u8",
                               "u64" } do
        local values = kv.randint("cpu", "i32", { 3, i }, { seed = i, high = 100 }):list()
        tensors[dtype] = kv.from(dev, dtype, { 3, i }, values)
        tensors["none_" .. dtype] = kv.zeros(dev, dtype, { 0, i })
      end
      tensors.large = kv.randn(dev, "f32", { 600, 1001 }, { seed = 9 })
      kv.safetensors.save(path, tensors, { made_by = "a spec" })
      local file = kv.safetensors(path)
      assert.equal(18, #file.names)
      for name, t in pairs(tensors) do
        local shape, dtype = file:describe(name)
        assert.same(t:dims(), shape)
        assert.equal(t:type(), dtype)
        support.equal(file:read(name, dev), t)
      end
      file:close()
      local text = files.read(path)
      local length = text:byte(1) + 256 * text:byte(2)
      local header = json.decode(text:sub(9, 8 + length))
      assert.same({ made_by = "a spec" }, header.__metadata__)
      assert.equal(0, length % 8)
      assert.equal(nil, files.read(path .. ".part"))
      kv.safetensors.save(path, {})
      assert.same({}, kv.safetensors(path).names)
      os.remove(path)
    end)
  end)

  it("saves the bits that it read", function()
    local path = temporary.path()
    local odd = kv.tensor("cpu", "f32", { 4 })
    local bits = ffi.new("uint32_t[4]", 0x7fc00001, 0xffc12345, 0x80000000, 1)
    ffi.copy(odd:data(), bits, 16)
    kv.safetensors.save(path, { odd = odd })
    local back = kv.safetensors(path):read("odd", "cpu")
    assert.equal(0, ffi.C.memcmp(back:data(), bits, 16))
    os.remove(path)
  end)

  it("refuses to save what is not a table of open tensors", function()
    local t = kv.zeros("cpu", "f32", { 2 })
    local save, raises = kv.safetensors.save, support.raises
    raises("save: path is nil, expected a string", save)
    raises("save: tensors is nil, expected a table of tensors by name", save, "x")
    raises("save: tensors is a table, expected a table of tensors", save, "x", { t })
    raises("save: tensors is a table, expected a table of tensors", save, "x", { a = 1 })
    raises("save: metadata is a table, expected a table of strings", save, "x", { a = t },
      { n = 1 })
    raises("which the format reserves", save, "x", { __metadata__ = t })
    raises("/nowhere/x", save, "/nowhere/x", { a = t })
    t:free()
    raises("save: tensor \"a\" is closed", save, "x", { a = t })
  end)
end)
