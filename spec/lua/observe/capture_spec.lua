--- The committed capture (spec/data/capture) against attention in double precision over
-- its queries and keys, against this repository's own forward pass of the same model, and
-- replayed under policies.
-- Tolerance: q, k, v and out are bf16, which transformers rounded once each; attention
-- weights, which PyTorch may round too, are 2^-9 apart at most: 2% of the values' size.
-- A forward pass in bf16 beside one in f32: 3% of the queries' length.
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local files = require "kvlab.files"
local support = require "spec.support"
local temporary = require "spec.temporary"

local FOLDER = kv.paths.root .. "/spec/data/capture"

--- softmax(scale q.k) v over the tokens up to and including t; flat lists.
local function attend(c, t, head, layer)
  local dim, kv_head = c.head_dim, math.floor(head * c.kv_heads / c.heads)
  local scores, top, sum, out = {}, -math.huge, 0, {}
  local q_at = (t * c.heads + head) * dim
  for s = 0, t do
    local at, dot = (s * c.kv_heads + kv_head) * dim, 0
    for d = 1, dim do dot = dot + layer.q[q_at + d] * layer.k[at + d] end
    scores[s] = dot * c.scale
    top = math.max(top, scores[s])
  end
  for d = 1, dim do out[d] = 0 end
  for s = 0, t do
    local weight = math.exp(scores[s] - top)
    sum = sum + weight
    local at = (s * c.kv_heads + kv_head) * dim
    for d = 1, dim do out[d] = out[d] + weight * layer.v[at + d] end
  end
  for d = 1, dim do out[d] = out[d] / sum end
  return out
end

local function lists_of(layer)
  local lists = {}
  for name, t in pairs(layer) do lists[name] = t:list() end
  return lists
end

describe("capture", function()
  it("holds the attention of the model: queries as they attended, causally", function()
    local c = kv.capture(FOLDER)
    assert.same({ 2, 320, 4, 2, 16, "bf16" },
      { #c.layers, c.tokens, c.heads, c.kv_heads, c.head_dim, c.dtype })
    for i = 1, #c.layers do
      local layer = lists_of(c:layer(i, kv.device "cpu"))
      for _, t in ipairs { 0, 1, 150, 319 } do
        for head = 0, c.heads - 1 do
          local at = (t * c.heads + head) * c.head_dim
          local got = { unpack(layer.out, at + 1, at + c.head_dim) }
          support.close(got, attend(c, t, head, layer), 0.02, 0.01,
            ("layer %d, token %d, head %d"):format(i, t, head))
        end
      end
    end
  end)

  it("holds what the model's forward pass here gives to attention", function()
    local c = kv.capture(FOLDER)
    local manifest = json.decode(files.read(FOLDER .. "/manifest.json"))
    local model = llama.load(kv.paths.root .. "/" .. c.model,
      { device = "cpu", dtype = "f32" })
    local engine, queries = model:engine { blocks = 32 }, {}
    engine.attention.hooks = { attention_finished = function(ctx)
      queries[ctx.layer + 1] = ctx.query:clone():list()
    end }
    engine:prefill(engine:sequence(), manifest.token_ids)
    for i, got in ipairs(queries) do
      local want = c:layer(i, kv.device "cpu").q:list()
      local squares, off = 0, 0
      for n = 1, #want do
        squares, off = squares + want[n] ^ 2, off + (got[n] - want[n]) ^ 2
      end
      assert.is_true(off < 1e-3 * squares, ("layer %d: %g"):format(i, off / squares))
    end
  end)

  it("says what is wrong with a folder", function()
    local folder = temporary.folder()
    local function problem()
      local ok, words = pcall(kv.capture, folder)
      assert.is_false(ok)
      return words
    end
    assert.matches("there is no .*/manifest.json", problem())
    files.write(folder .. "/manifest.json", "{ nonsense")
    assert.matches("is no JSON object, expected a manifest", problem())
    files.write(folder .. "/manifest.json", '{"format": "kvlab capture 9"}')
    assert.matches('of format kvlab capture 9, expected .*"kvlab capture 1"', problem())
    files.write(folder .. "/manifest.json",
      '{"format": "kvlab capture 1", "dtype": "float64"}')
    assert.matches("dtype is float64, expected float32", problem())
  end)
end)

local function check(dev)
  describe("replay on " .. dev:name(), function()
    local replay
    setup(function()
      replay = kv.capture(FOLDER):replay { device = dev, decode = 6, block_size = 8 }
    end)
    teardown(function() replay:close() end)

    local function run(name, options)
      local probe, model_error = replay:run(kv.policy(name, options),
        kv.probe)
      return probe:metrics(), model_error
    end

    it("gives what the model gave, with full attention and a budget of all", function()
      local all = { ratio = 1 }
      for name, options in pairs { full = false, quest = all, h2o_blocks = all } do
        local metrics, model_error = run(name, options or nil)
        assert.is_true(model_error < 0.004, name .. " " .. model_error)
        assert.near(1, metrics.attention_mass, 1e-5)
        assert.is_true(metrics.output_error < 1e-5)
      end
    end)

    it("holds the budget of a policy that evicts, from its prompt on", function()
      for _, name in ipairs { "tova", "snapkv", "streaming" } do
        local metrics, model_error = run(name, { ratio = 1 })
        assert.is_true(model_error < 0.004, name .. " " .. model_error)
        assert.equal(1, metrics.held_share)
        metrics, model_error = run(name, { blocks = 10 })
        assert.is_true(model_error > 0.1, name .. " " .. model_error)
        -- of 315 ... 320 tokens
        local held = name == "snapkv" and 83.5 or 80
        assert.near(held / 317.5, metrics.held_share, 1e-9)
      end
      local metrics, model_error = run "full"
      assert.is_true(model_error < 0.004)
      assert.equal(1, metrics.held_share)
    end)

    it("attends with the capture's scale", function()
      local capture = replay.capture
      local scale = capture.scale
      capture.scale = 2 * scale
      local _, model_error = run("full")
      capture.scale = scale
      assert.is_true(model_error > 0.1)
    end)

    it("loses attention with the budget, and the oracle least", function()
      local before = 2
      for _, ratio in ipairs { 1, 0.5, 0.25, 0.1 } do
        local o = { ratio = ratio, min_blocks = 0 }
        local best, model_error = run("oracle", o)
        assert.is_true(best.attention_mass < before)
        assert.is_true(best.attention_mass >= run("random", o).attention_mass)
        assert.is_true(ratio == 1 or math.abs(model_error - best.output_error) < 0.01)
        before = best.attention_mass
      end
    end)

    it("begins anew each time, with policies that watch the prompt and others", function()
      local first = {}
      for round = 1, 2 do
        for _, name in ipairs { "snapkv_blocks", "quest", "h2o_blocks", "gsa_on_device",
                                 "keydiff_blocks" } do
          local metrics = run(name, { ratio = 0.3, min_blocks = 0 })
          first[name] = first[name] or metrics
          if round == 2 then assert.same(first[name], metrics) end
        end
      end
      assert.is_true(first.snapkv_blocks.attention_mass
        ~= first.h2o_blocks.attention_mass)
    end)

    it("gives its own number of tokens back, and takes no other", function()
      local record = replay:run(kv.policy("quest", { blocks = 3 }), kv.record)
      assert.equal(6, #record.steps)
      assert.equal(40, record.steps[6].blocks)
      for _, decode in ipairs { 0, 320, 1.5 } do
        assert.error_matches(function()
          replay.capture:replay { device = dev, decode = decode }
        end, "expected a whole number from 1 to 319")
      end
    end)
  end)
end

support.each_device(check)
