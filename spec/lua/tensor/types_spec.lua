--- lua/kvlab/tensor/types.lua, by which editors know tensors and devices, lists what is
-- there, and no more.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

--- The fields of each class: class -> name -> type.
local function read_classes(text)
  local classes, fields = {}, nil
  for line in text:gmatch "[^\n]+" do
    local class = line:match "^%-%-%-@class ([%w_.]+)"
    if class then
      fields = {}
      classes[class] = fields
    end
    local name, kind = line:match "^%-%-%-@field ([%w_]+) (%S+)"
    if name then
      assert(not fields[name], name)
      fields[name] = kind
    end
  end
  return classes
end

--- Names of fields that are methods: of a function type, or of an alias of one.
local function methods_of(fields, text)
  local list = {}
  for name, kind in pairs(fields) do
    if kind:find "^fun%(" or text:find("@alias " .. kind .. " fun(", 1, true) then
      list[name] = true
    end
  end
  return sorted.keys(list)
end

describe("types.lua", function()
  local text = assert(files.read(kv.paths.root .. "/lua/kvlab/tensor/types.lua"))
  local classes = read_classes(text)
  local dev = kv.device "cpu"
  local t = kv.zeros(dev, "f32", { 2 })

  it("has every method of tensors and devices", function()
    for class, methods in pairs {
      ["kvlab.Tensor"] = require("kvlab.tensor.tensor").methods,
      ["kvlab.Device"] = require("kvlab.tensor.device").methods,
    } do
      assert.same(sorted.keys(methods), methods_of(classes[class], text))
    end
  end)

  it("has no field that is not there", function()
    local stream, event = dev:open_stream(), dev:open_event()
    local graph = kv.graph(function() t:fill_(1) end, dev)
    for class, value in pairs {
      ["kvlab.Tensor"] = t, ["kvlab.Shape"] = t.shape,
      ["kvlab.Device"] = dev, ["kvlab.Stream"] = stream,
      ["kvlab.Event"] = event, ["kvlab.Graph"] = graph,
      ["kvlab.DeviceStats"] = dev:stats(), ["kvlab.Budget"] = ffi.new "kvl_budget",
      ["kvlab.BlockKey"] = ffi.new "kvl_key",
    } do
      for name in pairs(classes[class]) do
        assert.is_true(value[name] ~= nil, class .. "." .. name)
      end
      classes[class] = nil
    end
    assert.same({}, sorted.keys(classes))
    graph:close()
    event:close()
    stream:close()
  end)

  it("has every field of the device's statistics", function()
    local fields = read_classes(text)["kvlab.DeviceStats"]
    assert.same(sorted.keys(dev:stats()), sorted.keys(fields))
  end)
end)
