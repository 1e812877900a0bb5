--- e.scale: what attention multiplies q . k by, a constant of the kernels of a policy.
local kv = require "kvlab"
local expression = require "kvlab.kernel.expression.expression"
local place = require "kvlab.kernel.expression.place"

local e = kv.expr

--- The plan's expressions with no leaf called scale in them, as text.
local function texts(plan)
  local list = {}
  for i, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      assert.is_false(x.op == "leaf" and x.name == "scale")
    end)
    list[i] = tostring(root.node)
  end
  for _, value in ipairs(plan.query_values or {}) do
    expression.each(value.node, function(x)
      assert.is_false(x.op == "leaf" and x.name == "scale")
    end)
  end
  return list
end

local function options(scale)
  return { codec = "f32", group = 2, block_size = 4, head_dim = 16, layers = 1,
           kv_heads = 2, scale = scale }
end

describe("e.scale", function()
  local o = options(0.3)
  local product = (e.q * e.k):sum "dim":max("token", "head")

  it("is the number in every place that knows attention", function()
    local def = { bias = e.position * e.scale, log_weight = e.scale,
      mask = e.logit:gt(e.scale),
      emit = { mass = (e.weight * e.scale):sum "token":mean "head",
               late = e.where((e.query_position * e.scale):gt(2), e.weight, 0)
                 :sum "token":max "head" } }
    assert.same({ "max_head(max_token(sum_dim(q * k))) * 0.3" },
      texts(place.score(product * e.scale, {}, "x", o)))
    assert.same({ "f32(block) * 0.3" }, texts(place.map(e.block * e.scale, "x", o)))
    local hook = texts(place.hook(def, "x", o))
    assert.matches("index.* %* 0%.3 %+ 0%.3", hook[1])
    assert.matches("logit > 0%.3", hook[2])
    assert.matches("%* 0%.3", texts(place.emit("mass", def.emit.mass, "x", o))[1])
    texts(place.prompt(def, "x", o))
  end)

  it("is 1 / sqrt(head_dim) where nothing else is said", function()
    local plan = place.map(e.block * e.scale, "x", options())
    assert.same({ "f32(block) * 0.25" }, texts(plan))
  end)

  it("is no part of a summary, and no name of its fields", function()
    local function refused(summary, words)
      local ok, why = pcall(place.fields, summary, "policy x")
      assert.is_false(ok)
      assert.matches(words, why)
    end
    refused({ lo = e.k * e.scale }, "there is no scale in a summary, which knows k, ")
    refused({ scale = e.k }, "summary.scale: expressions have a scale of their own")
  end)

  it("and heads are numbers where a policy is attached", function()
    local p = kv.policy.define { name = "scaled", decode = true, score = product } {}
    for _, name in ipairs { "heads", "scale" } do
      local shape = { device = kv.device "cpu", layers = 1, blocks = 4, block_size = 4,
        kv_heads = 2, heads = 4, head_dim = 16, dtype = "f32", scale = 1 }
      shape[name] = {}
      local ok, why = pcall(kv.policy.attach, p, shape)
      assert.is_false(ok)
      assert.matches("attach: shape is a table, expected a shape as policy.init gets it",
        why)
    end
  end)

  it("is the option of the attention that a policy is attached to", function()
    local function run(scale, factor)
      local p = kv.policy.define { name = "scaled", decode = true, prefill = false,
        defaults = { blocks = 2, sink = 0, recent = 0, min_blocks = 0 },
        score = product * factor + e.block * (1 - factor),
        bias = (e.position - e.query_position) * factor } {}
      local cache = kv.cache { device = "cpu", layers = 1, blocks = 20, block_size = 4,
        kv_heads = 2, head_dim = 16, format = "f32" }
      local attention = kv.attention { cache = cache, heads = 4, decode_policy = p,
        scale = scale }
      local batch, seq = cache:batch { max_seqs = 1, max_tokens = 40 }, cache:sequence()
      attention:begin(batch:append({ seq }, { 39 }), true)
      local q = kv.randn("cpu", "f32", { 39, 4, 16 }, { seed = 1 })
      local k = kv.randn("cpu", "f32", { 39, 2, 16 }, { seed = 2 })
      local out = attention:forward(0, q, k, k):clone()
      attention:begin(batch:append({ seq }, { 1 }), false)
      local step = attention:forward(0, q["3:4"]:clone(), k["3:4"]:clone(),
        k["3:4"]:clone()):clone()
      cache:close()
      return kv.cat({ out, step }):list()
    end
    assert.same(run(0.3, 0.3), run(0.3, e.scale))
    assert.same(run(nil, 0.25), run(nil, e.scale))
    assert.not_same(run(nil, e.scale), run(0.3, e.scale))
  end)
end)
