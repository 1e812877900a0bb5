--- The checker of option tables, by itself; option_tables_spec.lua tries who uses it.
local options = require "kvlab.options"

local KNOWN = {
  blocks = options.required(options.count), dtype = options.one_of("f32", "bf16"),
  eager = options.boolean, sizes = options.list_of(options.whole),
}

local function make(o)
  o = options.check("thing", o, KNOWN)
  return o
end

local function message(o)
  local ok, text = pcall(function() return make(o) end)
  assert.is_false(ok)
  return text
end

describe("options", function()
  it("gives back what is right", function()
    local o = { blocks = 3, dtype = "f32", eager = false, sizes = { 1, 2 } }
    assert.equal(o, make(o))
    assert.same({}, options.check("thing", nil, { a = options.any }))
  end)

  it("name the nearest to an unknown name, and all of them", function()
    assert.matches('thing: "blokcs" is no option, did you mean blocks%?; '
      .. "the options are blocks, dtype, eager, sizes$", message { blokcs = 3 })
    assert.matches("thing: 3 is no option; the options are", message { [3] = 1 })
  end)

  it("say what came and what was expected", function()
    assert.matches("thing: blocks is 0, expected a whole number >= 1$",
      message { blocks = 0 })
    assert.matches('thing: blocks is "7", expected', message { blocks = "7" })
    assert.matches('thing: dtype is "f33", expected one of f32, bf16$',
      message { blocks = 1, dtype = "f33" })
    assert.matches("thing: sizes is a table, expected a list, each a whole number >= 0$",
      message { blocks = 1, sizes = { 1, -1 } })
    assert.matches("thing: blocks is missing, expected a whole number >= 1$",
      message { dtype = "f32" })
    assert.matches("thing: options are 7, expected a table$", message(7))
  end)

  it("blame the line of the caller", function()
    local line = debug.getinfo(1, "l").currentline + 1
    local _, text = pcall(function() make { blokcs = 1 } end)
    assert.matches("options_spec.lua:" .. line .. ":", text, 1, true)
  end)

  it("take no number that is none", function()
    for _, kind in ipairs { "number", "integer", "share", "whole", "count",
                            "not_negative", "positive" } do
      assert.is_false(options[kind][2](0 / 0), kind)
      assert.is_false(options[kind][2]("1"), kind)
    end
    assert.is_false(options.whole[2](1.5))
    assert.is_false(options.within(1, 4)[2](5))
  end)
end)
