--- The small cached LM of the PagedAttention seed: what it caches, and that decoding
-- continues a prefill.
local small_lm = require "models.small_lm"
local support = require "spec.support"

local function new(dev, o)
  o = o or {}
  return small_lm.new { device = dev, vocab_size = 1024, embed_dim = 128, num_heads = 4,
                        seed = 7, block_size = o.block_size }
end

local function check(dev)
  describe("small cached lm on " .. dev:name(), function()
    it("caches K and V of every token it has read", function()
      local lm = new(dev)
      local probs = lm:forward { 11, 500, 3, 1023 }
      assert.same({ 1024 }, probs:dims())
      assert.is_true(math.abs(probs:sum():item() - 1) < 1e-5)
      for n = 4, 6 do
        local k, v = lm:cached()
        assert.same({ n, 128 }, k:dims())
        assert.same({ n, 128 }, v:dims())
        lm:forward { probs:argmax():item() }
      end
    end)

    it("draws no weights that another seed draws", function()
      local where = {}
      for seed = 0, 3 do
        local lm = small_lm.new { device = dev, vocab_size = 16, embed_dim = 16,
                                  num_heads = 4, seed = seed }
        for _, name in ipairs { "q", "k", "v", "o", "to_vocab" } do
          for _, part in ipairs { "weight", "bias" } do
            local numbers = lm[name][part]:list()
            local scaled = ("%.6g"):format(numbers[1] / numbers[2])
            assert.is_nil(where[scaled], ("%s of %s, seed %d"):format(part, name, seed))
            where[scaled] = true
          end
        end
      end
    end)

    it("has cached nothing before it has read anything", function()
      local k, v = new(dev):cached()
      assert.same({ 0, 128 }, k:dims())
      assert.same({ 0, 128 }, v:dims())
    end)

    it("decodes to what one pass over everything gives", function()
      local tokens = {}
      for i = 1, 40 do tokens[i] = (i * 37) % 1024 end
      for _, block_size in ipairs { 3, 4, 16 } do
        for cut = 1, #tokens - 1, 13 do
          local whole = new(dev)
          local split = new(dev, { block_size = block_size })
          local want = whole:forward(tokens)
          local head = {}
          for i = 1, cut do head[i] = tokens[i] end
          local got = split:forward(head)
          for i = cut + 1, #tokens do got = split:forward { tokens[i] } end
          support.close(got, want, 1e-6, 1e-4, "cut at " .. cut)
          local k = split:cached()
          support.close(k, (whole:cached()), 1e-5, 1e-5, "K")
        end
      end
    end)
  end)
end

support.each_device(check)

describe("options of small_lm", function()
  local function message(o)
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, text = pcall(function() small_lm.new(o) end)
    assert.is_false(ok)
    assert.truthy(text:find("small_lm_spec.lua:" .. line .. ":", 1, true), text)
    return text
  end

  it("are refused by name and type, and when one is missing", function()
    assert.matches('"num_haeds" is no option, did you mean num_heads%?',
      message { vocab_size = 10, embed_dim = 8, num_haeds = 2 })
    assert.matches("vocab_size is 0, expected a whole number >= 1",
      message { vocab_size = 0, embed_dim = 8, num_heads = 2 })
    assert.matches("num_heads is missing", message { vocab_size = 10, embed_dim = 8 })
    assert.matches("embed_dim is 8, expected a multiple of num_heads = 3",
      message { vocab_size = 10, embed_dim = 8, num_heads = 3 })
  end)
end)
