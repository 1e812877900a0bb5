--- Nothing from Lua crashes the process: every public function gets arguments of every
-- kind, at random, and either works or raises.
local kv = require "kvlab"
local methods = require("kvlab.tensor").methods
local support = require "spec.support"

local CALLS = 20000
local DTYPES = { "f32", "f16", "bf16", "i32", "i64", "u8", "u64", "f8e4m3" }
local MAKERS = { "tensor", "full", "zeros", "ones", "arange", "randn", "rand", "randint",
                 "from", "cache", "attention" }

--- Everything public that takes arguments, in a fixed order; not data(), which hands
-- out a raw pointer.
local function functions()
  local list = {}
  local function add(prefix, t)
    for name, fn in pairs(t) do
      if name ~= "data" then list[#list + 1] = { name = prefix .. name, fn = fn } end
    end
  end
  add("tensor:", methods)
  add("ops.", kv.ops)
  for _, name in ipairs(MAKERS) do list[#list + 1] = { name = name, fn = kv[name] } end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

local function any_value(rng, dev)
  local function tensor()
    local dims = {}
    for i = 1, rng(4) do dims[i] = rng(5) end
    return kv.zeros(dev, DTYPES[1 + rng(#DTYPES)], dims)
  end
  local kinds = {
    function() return nil end, function() return rng(10) - 5 end,
    function() return "x" end,
    function() return {} end, function() return { rng(3), rng(3) } end,
    function() return 0 / 0 end, function() return true end, function() return dev end,
    function() return 2 ^ 40 end, function() return DTYPES[1 + rng(#DTYPES)] end,
    tensor, tensor, tensor,
    function()
      local closed = tensor()
      closed:free()
      return closed
    end,
  }
  return kinds[1 + rng(#kinds)]()
end

describe("misuse", function()
  it("raises or works, whatever the arguments are", function()
    local list, rng, dev = functions(), support.rng(7), kv.device "cpu"
    local worked, raised = 0, 0
    for _ = 1, CALLS do
      local args = {}
      for i = 1, 6 do args[i] = any_value(rng, dev) end
      local ok = pcall(list[1 + rng(#list)].fn, unpack(args, 1, 6))
      if ok then worked = worked + 1 else raised = raised + 1 end
    end
    assert.is_true(worked > 100 and raised > 100)
    assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
  end)
end)
