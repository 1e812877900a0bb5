--- The text that an expression becomes, for every place and target: it can be compiled.
local compiler = require "kvlab.kernel.run.compiler"
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local nvrtc = require "kvlab.kernel.run.nvrtc"
local show = require "kvlab.kernel.run.show"
local support = require "spec.support"

local e = kv.expr
local QUEST = { lo = e.k:min "token", hi = e.k:max "token" }

local CASES = {
  { "summary", e.k:mean "token" },
  { "summary", (e.k * e.const("f32", "planes", "bit", "dim")):sum "dim":gt(0):pack "bit",
    { sizes = { bit = 40 } } },
  { "score", (e.q * e.k):sum "dim":max("token", "head"), { format = "f8e4m3" } },
  { "score", e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head",
    { summary = QUEST, format = "bf16", group = 7, head_dim = 80, block_size = 32 } },
  { "score", e.k:sum("token", "dim"), { place = "score" } },
  { "map", e.input "x" * e.param "y" + e.block },
  { "map", e.length + 1, { place = "map" } },
  { "emit", e.weight:sum "token":mean "head" },
  { "prompt", (e.weight / e.tokens):sum "token":max "head",
    { place = "prompt", format = "bf16", group = 7, head_dim = 80, block_size = 32 } },
  { "prompt", e.where(e.query_position:ge(e.length - 32), e.weight, e.query_position * 0)
      :sum("token", "head"), { place = "prompt", format = "f8e4m3" } },
}

-- What is compiled, which takes a second: the last case of each place, or all of them.
local COMPILED = {}
for i, case in ipairs(CASES) do
  if support.is_full or (CASES[i + 1] or {})[1] ~= case[1] then
    COMPILED[#COMPILED + 1] = case
  end
end

describe("the source of an expression #release", function()
  it("is that of the place where it can stand", function()
    for _, case in ipairs(CASES) do
      local x, o = case[2], case[3] or {}
      assert.equal(case[1], o.place or show.place_of(x))
    end
  end)

  it("is compiled in C", function()
    if not compiler.find() then return pending "there is no C compiler" end
    local target = kernel.target(kv.device "cpu")
    for _, case in ipairs(COMPILED) do
      local image, why = compiler.compile(case[2]:source("c", case[3]), target)
      assert.is_string(image, why)
    end
  end)

  it("is compiled in CUDA, without a GPU", function()
    if not nvrtc.open() then return pending "NVRTC is not here" end
    for _, case in ipairs(COMPILED) do
      local image, why = nvrtc.compile(case[2]:source("cuda", case[3]), "sm_90a")
      assert.is_string(image, why)
    end
  end)

  it("is a chunk of Lua", function()
    for _, case in ipairs(CASES) do
      assert.is_function(assert(loadstring(case[2]:source("lua", case[3]))))
    end
  end)

  it("has the sizes that it is made for", function()
    assert.matches("TOKENS = 16, DIM = 128,", (e.k:mean "token"):source "cuda")
    assert.matches("TOKENS = 4, DIM = 64,", (e.k:mean "token"):source("cuda",
      { block_size = 4, head_dim = 64 }))
  end)

  it("is refused where something is not known", function()
    local function refused(words, ...)
      local ok, why = pcall(e.q.source, ...)
      assert.is_false(ok)
      assert.equal(words, (why:gsub("^[^:]*:%d+: ", "")))
    end
    refused('source: target is "ptx", expected one of c, cuda, lua', e.k, "ptx")
    refused("source: score: there is no field lo in the summary, and no summary",
      (e.q * e.lo):sum("dim", "head"), "c")
    refused("source: score: sum_dim(q) has dimensions [head], expected none: reduce it "
      .. "over head", e.q:sum "dim", "c")
    refused("source: sizes.bit is 0.5, expected a whole number >= 1", e.k, "c",
      { sizes = { bit = 0.5 } })
  end)
end)
