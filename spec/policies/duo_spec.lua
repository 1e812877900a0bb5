local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local LAYERS, HEADS, SIZE = 2, 3, 4

--- A file of 24_heads's rows: lost[layer][head].
local function file_of(lost)
  local lines = {}
  for layer, row in ipairs(lost) do
    for head, x in ipairs(row) do
      lines[#lines + 1] = json.encode { config = { layer = layer - 1, head = head - 1 },
                                        metrics = { lost = x } }
    end
  end
  local path = temporary.folder() .. "/heads.jsonl"
  files.write(path, table.concat(lines, "\n") .. "\n")
  return path
end

local LOST = { { 0.1, 0.3, 0 }, { 0.2, 0, -0.1 } }

local function attend(dev, o)
  local cache = kv.cache { device = dev, format = "f32", layers = LAYERS, blocks = 40,
    block_size = SIZE, kv_heads = HEADS, head_dim = 8, tables = "head" }
  return kv.attention { cache = cache, heads = HEADS, decode_policy = kv.policy("duo", o),
                        max_seqs = 1, max_blocks = 20 }, cache
end

describe("duo", function()
  support.each_device(function(dev)
    it("holds everything in the heads without which most is lost", function()
      local path = file_of(LOST)
      for ratio, whole in pairs { [0.5] = { { 1, 1, 0 }, { 1, 0, 0 } },
          [0.17] = { { 0, 1, 0 }, { 1, 0, 0 } }, [0.16] = { { 0, 1, 0 }, { 0, 0, 0 } },
          [0] = { { 0, 0, 0 }, { 0, 0, 0 } }, [0.8] = { { 1, 1, 1 }, { 1, 1, 0 } } } do
        local attention, cache = attend(dev, { heads = path, ratio = ratio, sink = 1,
                                               recent = 3 })
        local batch, seq = cache:batch { max_seqs = 1, max_tokens = 64,
          max_blocks = 20 }, cache:sequence()
        for step, n in ipairs { 41, 1, 1 } do
          batch:append({ seq }, { n }, nil, nil, nil, step > 1)
          attention:begin(batch, step == 1, step == 1 and { true } or nil)
          for layer = 0, LAYERS - 1 do
            local function draw() return kv.randn(dev, "f32", { n, HEADS, 8 }) end
            attention:forward(layer, draw(), draw(), draw())
          end
        end
        for layer, row in ipairs(whole) do
          for head, is_whole in ipairs(row) do
            assert.equal(is_whole == 1 and 43 or 5 * SIZE, seq:held(layer - 1, head - 1))
          end
        end
        cache:close()
      end
    end)
  end)

  it("says what is wrong with its file", function()
    local cpu = kv.device "cpu"
    support.raises('heads is "no/such/file.jsonl", expected a folder', attend, cpu,
      { heads = "no/such/file.jsonl" })
    support.raises("blocks is given, expected ratio, a number", attend, cpu,
      { heads = file_of(LOST), blocks = 3 })
    support.raises("ratio is a list or a tensor, expected a number", attend, cpu,
      { heads = file_of(LOST), ratio = { 1, 0 } })
    support.raises("has 2 heads, expected 2 layers of 3 KV heads", attend, cpu,
      { heads = file_of { { 1 }, { 2 } } })
    support.raises("is of layer 0, head 3, expected 2 layers of 3 KV", attend, cpu,
      { heads = file_of { { 0, 0, 0, 1 }, { 0, 0 } } })
    support.raises('lost is "x", expected a number', attend, cpu,
      { heads = file_of { { 0, "x", 0 }, { 0, 0, 1 } } })
  end)
end)
