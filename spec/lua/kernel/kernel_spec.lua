--- Kernels of expressions against the reference by the book, on every printer: random
-- ones, and those of known policies. Stated tolerance: 1e-4 of the larger number.
--
-- More of them: ./kvlab run spec/random_kernels.lua --set from=1 --set to=500
local expressions = require "spec.expressions"
local ffi = require "ffi"
local kv = require "kvlab"
local compiler = require "kvlab.kernel.run.compiler"
local support = require "spec.support"

local e = kv.expr
local TOLERANCE = 1e-4

local function check(dev, target, seed, def, o)
  local cache = expressions.cache(dev, o, seed)
  local p = expressions.attach(cache, def, target)
  if p.summary then expressions.update(cache, p) end
  local got = expressions.score(cache, p)
  local want = expressions.expected(cache, p, expressions.resolved(p))
  local why = expressions.difference(got, want, TOLERANCE)
  assert.is_nil(why, ("seed %d, %s: %s\n%s"):format(seed, o.dtype, why or "",
    tostring(def.score)))
end

--- LSH: bits of the mean key and of the group's mean query, and how many are equal.
local function hamming(bits)
  local planes = e.const("f32", "planes", "bit", "dim")
  local function hash(x) return (x * planes):sum "dim":gt(0.5):pack "bit" end
  return { name = "lsh", decode = true, summary = { hash = hash(e.k:sum "token") },
    score = bits - hash(e.q:sum "head"):bxor(e.hash):popcount():sum "word",
    init = function(p, shape)
      local list = expressions.table_(bits * shape.head_dim)
      p.planes = kv.from(shape.device, "f32", { bits, shape.head_dim }, list)
    end }
end

local KNOWN = {
  quest = { name = "quest", decode = true,
    summary = { lo = e.k:min "token", hi = e.k:max "token" },
    score = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head" },
  block_mean = { name = "block_mean", decode = true,
    summary = { mean = e.k:mean "token" }, score = (e.q * e.mean):sum "dim":mean "head" },
  mass = { name = "mass", decode = true,
    score = (e.q * e.k):sum "dim":logsumexp "token":mean "head" },
  max_pool = { name = "max_pool", decode = true,
    score = (e.q * e.k):sum "dim":max("token", "head") },
  streaming_blocks = { name = "streaming_blocks", decode = true,
    score = e.block / e.max(e.blocks - 1, 1) },
  lsh40 = hamming(40), lsh64 = hamming(64),
  stored = { name = "stored", decode = true,
    summary = { mean = (e.k:sum "token" * 0.25):store "f16", n = e.tokens,
      some = e.k:gt(1):any "dim":any "token" },
    score = e.where(e.some, (e.q * e.mean):sum "dim":max "head", -e.n:cast "f32") },
  per_layer = { name = "per_layer", decode = true,
    score = (e.const("f32", "slope", "layer", "kv_head", "head")
      * (e.q * e.q):sum "dim"):sum "head" + e.layer * 100 + e.kv_head,
    init = function(p, shape)
      p.slope = kv.from(shape.device, "f32", { 2, shape.kv_heads,
        shape.heads / shape.kv_heads }, expressions.table_(2 * shape.heads))
    end },
  words = { name = "words", decode = true,
    score = e.block:cast "u32":lshift(5):bxor(e.length:cast "u32"):band(0xFFF):cast "u64"
      :lshift(33):bnot():popcount() },
}

local function options(dtype, group, block_size, head_dim, value_dim)
  local o = { dtype = dtype, group = group, kv_heads = 2, block_size = block_size,
              head_dim = head_dim, value_dim = value_dim,
              lens = { 0, 2 * block_size + 3, 3 * block_size, 1 },
              blocks = 12, consts = {}, sizes = {} }
  local planes = function(bits)
    local list = expressions.table_(bits * head_dim)
    return function(at) return list[at.bit * head_dim + at.dim + 1] end
  end
  o.sizes_of = { lsh40 = { bit = 40, word = 2 }, lsh64 = { bit = 64, word = 2 } }
  o.consts_of = { lsh40 = { planes = planes(40) }, lsh64 = { planes = planes(64) },
    per_layer = { slope = function(at, env)
      local list = expressions.table_(4 * group)
      return list[(env.layer * 2 + env.kv_head) * group + at.head + 1]
    end } }
  if dtype == "f8e4m3" then o.scaled = { 2, 0.5 } end
  return o
end

-- dtype, group, block_size, head_dim, value_dim
local CASES = { { "f32", 1, 8, 16 }, { "bf16", 4, 16, 64 }, { "f16", 3, 4, 48 },
                { "f8e4m3", 2, 16, 32 }, { "bf16", 20, 8, 80 }, { "int8", 2, 16, 80 },
                { "f8_latent", 5, 16, 152, 144 } }

--- most: of the cases that one kernel meets, unless --full; all kernels meet all of them.
local function known_cases(dev, target, most)
  for i, name in ipairs(support.names(KNOWN)) do
    local def = KNOWN[name]
    for _, case in ipairs(support.one_each(CASES, i, most)) do
      local title = ("%s: %s, group %d, block %d, head_dim %d"):format(name, unpack(case))
      it(title, function()
        local o = options(unpack(case))
        o.sizes, o.consts = o.sizes_of[name], o.consts_of[name]
        o.id = title
        check(dev, target, 7, def, o)
      end)
    end
  end
end

local function random_cases(dev, target, from, to)
  for seed = from, to do
    it(("random expression %d"):format(seed), function()
      local o = expressions.shape(seed)
      o.id = "random " .. seed
      check(dev, target, seed, (expressions.random(seed)), o)
    end)
  end
end

describe("a kernel in Lua #release", function()
  known_cases("cpu", "lua")
  random_cases("cpu", "lua", 1, 40)
end)

describe("a kernel in C", function()
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  known_cases("cpu", nil, 1) -- a compiler takes longer than all else
  random_cases("cpu", nil, 1, support.is_hostile and 3 or 12)
end)

describe("code made at run time", function()
  local cpu, out = kv.device "cpu", ffi.new "kvl_code *[1]"
  local function open(image) return kv.C.kvl_code_open(cpu, "one", image, #image, out) end
  local function why() return ffi.string(kv.C.kvl_last_error()) end

  it("is refused where it is no library, or has no entry", function()
    assert.is_true(open "no library at all" < 0)
    assert.matches("^one on cpu: loading the image: ", why())
    assert.is_true(open "" < 0)
    assert.equal("one: its image is empty", why())
    if not compiler.find() then return pending "there is no C compiler" end
    local image = assert(compiler.compile("int other(void) { return 0; }", "plain"))
    assert.is_true(open(image) < 0)
    assert.matches("it has no function kvl_code", why())
  end)

  it("is launched with tensors of its device, and closed", function()
    if not compiler.find() then return pending "there is no C compiler" end
    local image = assert(compiler.compile([[
      __attribute__((visibility("default"))) int kvl_code(const void *a, void *queue) {
        (void)queue;
        *(*(float *const *)a) = 7;
        return 0;
      }]], "plain"))
    assert.equal(0, open(image))
    local code, t = out[0], kv.zeros(cpu, "f32", { 1 })
    local words, grid = ffi.new("int64_t[1]"), ffi.new("kvl_grid", 1, 1, 1, 1)
    ffi.cast("void **", words)[0] = t.ptr
    local list = ffi.new("kvl_tensor *[1]", { t })
    local function launch(size)
      return kv.C.kvl_code_launch(code, cpu, words, size, list, 1, grid)
    end
    assert.equal(0, launch(8))
    assert.same({ 7 }, t:list())
    assert.is_true(launch(4096) < 0)
    assert.matches("4096 bytes of arguments, expected at most 512", why())
    t:free()
    assert.is_true(launch(8) < 0)
    assert.matches("tensor 0 is closed", why())
    kv.C.kvl_code_close(code)
    kv.C.kvl_code_close(nil)
  end)
end)

describe("a kernel in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  known_cases("cuda")
  random_cases("cuda", nil, 1, 40)
end)
