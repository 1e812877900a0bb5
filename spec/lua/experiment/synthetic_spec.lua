--- Random attention: what a seed decides, and that other seeds share nothing of it.
local kv = require "kvlab"

local function open(seed)
  local s = kv.synthetic { device = "cpu", shape = "small", layers = 3, context = 64,
                           dtype = "f32", chunk = 4, seed = seed }
  s:sequence(40)
  return s
end

--- The numbers of a synthetic: its queries, its keys, and the KV of each layer.
local function drawn(seed)
  local s, parts = open(seed), {}
  parts.q, parts.k = s.q:list(), s.k:list()
  for layer = 0, 2 do parts["layer " .. layer] = s.cache:layer(layer):list() end
  s:turn(0.5, 1)
  parts.turned = s.q:list()
  s.cache:close()
  return parts
end

describe("random attention", function()
  it("draws the same numbers from the same seed", function()
    assert.same(drawn(5), drawn(5))
  end)

  it("draws nothing twice, and nothing that a neighbouring seed draws", function()
    local where = {}
    for seed = 0, 3 do
      for name, numbers in pairs(drawn(seed)) do
        local start = ("%.9g %.9g %.9g"):format(numbers[1], numbers[2], numbers[3])
        assert.is_nil(where[start],
          ("%s of seed %d is %s"):format(name, seed, where[start] or ""))
        where[start] = ("%s of seed %d"):format(name, seed)
      end
    end
  end)

  it("turns queries by other noise for another seed", function()
    local function noise(seed)
      local s = open(seed)
      s.q:fill_(0)
      s:turn(math.pi / 2, 1)
      return s.q:list()
    end
    assert.not_same(noise(0), noise(1))
    assert.same(noise(1), noise(1))
  end)
end)
