local arguments = require "kvlab.arguments"
local options = require "kvlab.options"
local support = require "spec.support"

local function new_class()
  local Box = {}
  Box.__index = Box
  function Box:put(n, name) return self, n, name end
  function Box.bytes() return 7 end
  function Box:all(...) return select("#", ...), ... end
  return Box
end

describe("arguments", function()
  it("are passed on as they are, nil at the end and behind it too", function()
    local fn = arguments.of("f", function(a, b) return a, b, 3 end, { a = options.any })
    assert.same({ 1, nil, 3 }, { fn(1) })
    local Box = new_class()
    arguments.methods(Box, "a box", { all = {} })
    local box = setmetatable({}, Box)
    assert.equal(2, (box:all(nil, nil)))
  end)

  it("are named with what came and what was expected, on the caller's line", function()
    local fn = arguments.of("f", function(a, b) return a, b end,
      { a = options.whole, b = options.optional(options.string) })
    assert.equal(1, (fn(1)))
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, why = pcall(function() fn(1, 2) end)
    assert.is_false(ok)
    assert.truthy(why:find("arguments_spec.lua:" .. line
      .. ": f: b is 2, expected a string, or nil", 1, true), why)
  end)

  it("leave no frame, so a function finds its caller", function()
    local fn = arguments.of("f", function(a) error("no " .. a, 2) end,
      { a = options.string })
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, why = pcall(function() fn "x"; return 1 end)
    assert.is_false(ok)
    assert.truthy(why:find("arguments_spec.lua:" .. line .. ": no x", 1, true), why)
  end)

  it("have the names of the parameters: another name is an error", function()
    support.raises("f has no parameter c", function()
      arguments.of("f", function(a) return a end, { c = options.any })
    end)
    support.raises("a box has no method take", function()
      arguments.methods(new_class(), "a box", { take = {} })
    end)
  end)

  it("of a method begin with its object, of the class or a class derived from it",
    function()
      local Box = new_class()
      arguments.methods(Box, "a box", { put = { n = options.whole } })
      local Big = setmetatable({}, { __index = Box })
      Big.__index = Big
      local Blue = setmetatable({}, Box)
      Blue.__index = Blue
      for _, class in ipairs { Box, Big, Blue } do
        local box = setmetatable({}, class)
        local got, n, name = box:put(2, "x")
        assert.equal(box, got)
        assert.same({ 2, "x" }, { n, name })
      end
      local box = setmetatable({}, Box)
      support.raises("put: self is 2, expected a box; call it as object:method(...)",
        function() box.put(2) end)
      support.raises("put: self is a table, expected a box",
        function() box.put({}, 2) end)
      support.raises("put: n is -1, expected a whole number >= 0",
        function() box:put(-1) end)
      assert.equal(7, Box.bytes())
    end)

  it("are checked by functions that keep their source for help", function()
    local function fn(a) return a end
    local checked = arguments.of("f", fn, { a = options.any })
    assert.equal(fn, arguments.own(checked))
    assert.equal(fn, arguments.own(fn))
  end)
end)

describe("an entry", function()
  it("is that of a list, or an error with the range of the index", function()
    local list = { [0] = "a", "b" }
    assert.equal("b", options.entry("put", "layer", list, 1))
    for _, i in ipairs { 2, -1, 0.5, 0 / 0, "x", {} } do
      support.raises("expected 0 ... 1", function()
        options.entry("put", "layer", list, i)
      end)
    end
    support.raises("put: layer is nil, expected 0 ... 1", function()
      options.entry("put", "layer", list, nil)
    end)
  end)
end)
