local ffi = require "ffi"
local json = require "kvlab.json"

describe("json", function()
  it("keeps every digit of a double", function()
    assert.equal("0.30000000000000004", json.encode(0.1 + 0.2))
    for _, x in ipairs { 0.1 + 0.2, 1 / 3, 2 ^ 53, 5e-324, 1.79e308, -1e-7 } do
      assert.equal(x, json.decode(json.encode { x })[1])
    end
  end)

  it("writes whole numbers as integers", function()
    assert.equal("[512, -3, 9007199254740992, 0]", json.encode { 512, -3, 2 ^ 53, 0 })
    assert.equal("[9007199254740993, 18446744073709551615]",
      json.encode { ffi.new("int64_t", 2 ^ 53) + 1, ffi.new("uint64_t", 0) - 1 })
  end)

  it("writes NaN and the infinities as null", function()
    local text = json.encode { 0 / 0, math.huge, -math.huge }
    assert.equal("[null, null, null]", text)
    assert.equal(json.null, json.decode(text)[1])
  end)

  it("sorts keys, those in `order` first", function()
    local value = { b = 1, a = true, z = "x", m = { y = 1, b = 2 } }
    assert.equal('{"a": true, "b": 1, "m": {"b": 2, "y": 1}, "z": "x"}',
      json.encode(value))
    assert.equal('{"z": "x", "m": {"y": 1, "b": 2}, "a": true, "b": 1}',
      json.encode(value, { order = { "z", "m", "y" } }))
  end)

  it("escapes what a string must not hold", function()
    assert.equal([["<script>\"'\\\n\u0000\u001f\u007f/é"]],
      json.encode "<script>\"'\\\n\0\31\127/é")
    for _, text in ipairs { "<script>\"'", "a\0b\\\t\127", "é→", "", "\\u0041" } do
      assert.equal(text, json.decode(json.encode { text })[1])
    end
  end)

  it("tells arrays from objects", function()
    assert.equal("{}", json.encode {})
    assert.equal("[]", json.encode(json.array {}))
    assert.equal('{"a": [], "b": {}}', json.encode { a = json.array {}, b = {} })
  end)

  it("indents on request, short lists on one line", function()
    assert.equal('{\n  "a": [1, 2],\n  "b": {\n    "c": 1\n  }\n}',
      json.encode({ a = { 1, 2 }, b = { c = 1 } }, { indent = "  " }))
  end)

  it("refuses what JSON cannot hold and says where it is", function()
    local loop = {}
    loop.loop = loop
    assert.error_matches(function() json.encode { a = { b = print } } end,
      "value.a.b is a function")
    assert.error_matches(function() json.encode { 1, 2, x = 3 } end, "list items and")
    assert.error_matches(function() json.encode { [2] = 1 } end, "has the key 2")
    assert.error_matches(function() json.encode(loop) end, "nested too deeply")
  end)

  it("reports the line and column of damage", function()
    assert.error_matches(function() json.decode "{\"a\": 1,\n  x}" end,
      "line 2, column 3: Expected object key")
    assert.error_matches(function() json.decode "" end, "line 1, column 1")
    assert.error_matches(function() json.decode "[NaN]" end, "column 2")
    assert.error_matches(function() json.decode "[1] x" end, "column 5")
  end)
end)
