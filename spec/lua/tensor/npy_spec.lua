--- Files of NumPy, written here byte by byte: the specs need no Python.
local files = require "kvlab.files"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local raises = support.raises
local cpu = kv.device "cpu"

local function header(text, version)
  local length = string.char(#text % 256, math.floor(#text / 256))
  if version and version > 1 then length = length .. "\0\0" end
  return "\147NUMPY" .. string.char(version or 1, 0) .. length .. text
end

local function load(bytes) return kv.npy.load(temporary.file(bytes), cpu) end

local PLAIN = "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2), }\n"

local function check(dev)
  describe("npy on " .. dev:name(), function()
    for _, dtype in ipairs { "f32", "f16", "i32", "i64", "u8", "u64" } do
      it("reads what it wrote: " .. dtype, function()
        for _, shape in ipairs { {}, { 1 }, { 0, 3 }, { 70001 }, { 3, 5, 1, 2 },
                                 { 1, 1, 2, 1, 2, 3 } } do
          local values = kv.randint(cpu, "i64", shape, { seed = 3, high = 200 }):list()
          local t = kv.from(cpu, dtype, shape, values):to(dev)
          local path = temporary.path()
          kv.npy.save(path, t)
          local back = kv.npy.load(path, dev)
          assert.equal(dtype, back:type())
          assert.equal(dev, back.device)
          assert.same(shape, back:dims())
          support.equal(back, t)
          local text = files.read(path)
          assert.equal(0, (#text - t:bytes()) % 64)
          assert.equal("\n", text:sub(#text - t:bytes(), #text - t:bytes()))
        end
      end)
    end

    it("refuses dtypes that npy does not have", function()
      local t = kv.zeros(dev, "bf16", { 2 })
      raises("save: t is bf16, which npy does not have: cast it to f32", kv.npy.save,
        "/dev/null", t)
      raises("save: t is f8e4m3", kv.npy.save, "/dev/null", t:cast "f8e4m3")
      raises("save: t is nil, expected a tensor", kv.npy.save, "x")
      raises("save: path is 3, expected a string", kv.npy.save, 3, t)
      local closed = kv.zeros(dev, "f32", { 2 })
      closed:free()
      raises("save: t is closed", kv.npy.save, "/dev/null", closed)
    end)
  end)
end

support.each_device(check)

describe("npy", function()
  it("writes what NumPy writes", function()
    local path = temporary.path()
    kv.npy.save(path, kv.from(cpu, "i32", { 1, -2 }))
    local text = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }"
    local pad = (" "):rep(117 - #text)
    assert.equal("\147NUMPY\1\0\118\0" .. text .. pad .. "\n"
      .. "\1\0\0\0\254\255\255\255", files.read(path))
  end)

  it("reads every version of the format, and booleans", function()
    local data = "\1\0\0\0\2\0\0\0\3\0\0\0\255\255\255\255"
    for version = 1, 3 do
      assert.same({ 1, 2, 3, -1 }, load(header(PLAIN, version) .. data):list())
    end
    local flags = load(header "{'shape': (3,), 'descr': '|b1', 'fortran_order': False}"
      .. "\1\0\1")
    assert.equal("u8", flags:type())
    assert.same({ 1, 0, 1 }, flags:list())
  end)

  it("refuses other files, types and orders, and damaged ones", function()
    local data = ("\0"):rep(16)
    raises("is no npy file", load, "")
    raises("is no npy file", load, "\147NUMP")
    raises("is no npy file", load, ("x"):rep(100))
    raises("has 15 bytes of data, expected 16", load, header(PLAIN) .. data:sub(2))
    raises("has 17 bytes of data, expected 16", load, header(PLAIN) .. data .. "x")
    raises("ends within its header", load, header(PLAIN):sub(1, 30))
    raises("has a header of", load, "\147NUMPY\2\0\255\255\255\255" .. data)
    raises("holds '<f8', expected one of", load, header(PLAIN:gsub("<i4", "<f8")) .. data)
    raises("holds '>i4'", load, header(PLAIN:gsub("<i4", ">i4")) .. data)
    raises("is in Fortran's order", load, header(PLAIN:gsub("False", "True")) .. data)
    raises("header without descr", load, header "{'descr': '<i4'}" .. data)
    raises("has 7 dims", load, header(PLAIN:gsub("2, 2", "1, 1, 1, 1, 1, 1, 1")) .. data)
    raises("expected 4000000000000000000000", load,
      header(PLAIN:gsub("2, 2", "1000000000, 1000000000000")) .. data)
    raises("npy: /nowhere/x.npy", kv.npy.load, "/nowhere/x.npy")
    raises("is no npy file", kv.npy.load, "/")
    raises("load: path is nil, expected a string", kv.npy.load)
  end)

  it("leaves the old file where the new one cannot be written", function()
    raises("/nowhere/x.npy", kv.npy.save, "/nowhere/x.npy", kv.zeros(cpu, "f32", { 1 }))
  end)
end)
