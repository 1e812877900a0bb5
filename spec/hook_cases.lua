--- The cases of bias, mask, log_weight and emit against attention by the book.
-- Tolerances: spec/hooks.lua. Compiling a hook takes seconds, so several files, which run
-- side by side, share them.
local busted = require "busted"
local hooks = require "spec.hooks"
local kv = require "kvlab"
local support = require "spec.support"

local e = kv.expr

local slope = e.const("f32", "slope", "layer", "kv_head", "head")
local KNOWN = {
  alibi = { bias = slope * (e.position - e.query_position) },
  soft_cap = { bias = (e.logit / 5):tanh() * 5 - e.logit },
  strided = { mask = (e.position % 3):eq(0):bor((e.query_position - e.position):lt(4)) },
  weighted = { log_weight = e.input "mix" * 0.5,
               mask = e.block:eq(1):bnot():bor(e.length:lt(20)) },
  -- logits are multiples of 1 / 8, and a GPU, which has them in base 2, is off by 2^-23
  all = { bias = slope + e.layer - e.blocks / 100, mask = e.logit:lt(30.06),
          log_weight = e.param "weight" * e.kv_head + e.block },
  -- of the keys with NaN in V, of which some heads of a group see none
  hidden = { mask = (e.position % 4):eq(1):bnot():bor(slope:lt(0.25)) },
  none_seen = { mask = e.position:lt(0) },
  mass = { emit = { mass = e.weight:sum "token":mean "head",
                    most = e.weight:max("token", "head") } },
  last = { bias = e.input "mix", mask = (e.position % 2):eq(0),
           emit = { last = e.weight:gt(0.05):any("token", "head"):where(e.query_position,
                      -1),
                    far = (e.weight * (e.length - e.index)):sum "token":max "head" } },
  -- only the prompt's last queries count; the others add nothing
  newest = { bias = e.input "mix" / 4, log_weight = slope,
             emit = { votes = e.where(e.query_index:ge(e.length - 5), e.weight, 0)
                        :sum "token":mean "head",
                      odd = ((e.query_position % 2):eq(0):where(0, e.weight) * 2)
                        :max("token", "head"):abs() } },
  -- the newer a query, the more its attention counts; weights of queries have other types
  fading = { emit = { mass = ((e.param "weight" / 4) ^ (e.length - 1 - e.query_index)
                        * e.weight):sum "token":mean "head",
                      few = e.where((e.query_position % 3):eq(0):band(
                          e.length:gt(20)), e.weight, 0):sum("token", "head"),
                      sum = (e.weight * (e.query_position * 2 + e.kv_head))
                        :max("token", "head") + (e.query_position - 3) * e.block } },
  -- a number for each token, and the maximum over the queries of a prompt
  by_token = { bias = e.input "mix" / 4,
               emit = { mass = e.weight:mean "head",
                        share = (e.weight / (e.weight:sum "token" + 1)):max "head",
                        place = e.index + e.query_index * e.kv_head } },
  most = { mask = (e.position % 5):ne(1),
           emit = { most = e.weight:max "head":max "query",
                    mass = e.weight:sum "token":mean "head":max "query",
                    far = (e.index - e.query_index):cast "f32":max "query",
                    last = e.where(e.query_index:ge(e.length - 3), e.weight, -math.huge)
                      :max("token", "head", "query"),
                    sum = e.weight:sum("head", "query") } },
  newest_most = { emit = { votes = e.where(e.query_position:ge(e.length - 5), e.weight,
                             -math.huge):mean("head", "token"):max "query",
                           odd = e.where((e.query_index % 2):eq(0), -math.huge,
                             e.weight):max("head", "query") } },
  shares = { emit = { mean = e.weight:mean "token":sum "head", tokens = e.tokens } },
}

local function define(name)
  local def = { name = "known", decode = true, prefill = true, complete = false,
    defaults = { weight = 2 }, select_blocks = function() end, init = hooks.init }
  for key, value in pairs(KNOWN[name]) do def[key] = value end
  return def
end

local CASES = {
  { dtype = "f32", group = 4, block_size = 16, head_dim = 32 },
  { dtype = "f16", q_dtype = "f16", group = 1, block_size = 8, head_dim = 64,
    selects = true },
  { dtype = "bf16", q_dtype = "bf16", group = 3, block_size = 4, head_dim = 40,
    window = 9 },
  { dtype = "f8e4m3", group = 16, block_size = 16, head_dim = 16, selects = true,
    scaled = { 2, 0.5 } },
  { dtype = "f8e4m3", q_dtype = "bf16", group = 4, block_size = 8, head_dim = 128 },
  { dtype = "f32", group = 2, block_size = 16, head_dim = 32, rows = { 3, 40, 7, 1 } },
  { dtype = "f16", q_dtype = "f16", group = 5, block_size = 8, head_dim = 48,
    rows = { 1, 2, 30, 1 }, window = 11, selects = true },
  { dtype = "bf16", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 64,
    rows = { 1, 70, 37, 1 }, parts = true },
  { dtype = "f8e4m3", q_dtype = "f16", group = 8, block_size = 4, head_dim = 32,
    rows = { 1, 33, 1, 1 }, scaled = { 2, 0.5 }, alibi = true },
  { dtype = "f32", group = 1, block_size = 80, head_dim = 24, rows = { 1, 70, 5, 1 },
    soft_cap = 3, alibi = true },
  { dtype = "bf16", q_dtype = "f32", group = 2, block_size = 12, head_dim = 16,
    rows = { 1, 70, 30, 1 }, selects = true, parts = true, soft_cap = 5 },
  -- those of the tensor cores of Hopper
  { dtype = "bf16", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 128,
    rows = { 0, 40, 7, 1 } },
  { dtype = "f8e4m3", q_dtype = "f16", group = 2, block_size = 8, head_dim = 64,
    rows = { 0, 40, 37, 1 }, selects = true, scaled = { 2, 0.5 } },
  { dtype = "f8e4m3", q_dtype = "bf16", group = 3, block_size = 16, head_dim = 192,
    rows = { 0, 9, 1, 1 }, window = 20 },
  { dtype = "f16", q_dtype = "f16", group = 5, block_size = 5, head_dim = 96,
    rows = { 0, 30, 2, 1 }, window = 11, selects = true },
  { dtype = "int8", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 80,
    selects = true },
  { dtype = "int8", group = 2, block_size = 8, head_dim = 128, rows = { 0, 40, 7, 1 },
    window = 30 },
  { dtype = "bf16", q_dtype = "bf16", group = 20, block_size = 16, head_dim = 72,
    selects = true },
  { dtype = "f8e4m3", q_dtype = "f16", group = 33, block_size = 8, head_dim = 48,
    scaled = { 2, 0.5 } },
  -- listed tokens
  { dtype = "bf16", q_dtype = "bf16", group = 4, block_size = 16, head_dim = 128,
    listed = true, window = 30 },
  { dtype = "f32", group = 3, block_size = 5, head_dim = 40, listed = true, alibi = true,
    rows = { 1, 30, 2, 1 } },
  { dtype = "f8e4m3", q_dtype = "f16", group = 20, block_size = 8, head_dim = 48,
    listed = true, scaled = { 2, 0.5 }, soft_cap = 4 },
  { dtype = "int8", q_dtype = "bf16", group = 4, block_size = 8, head_dim = 128,
    listed = true, window = 30 },
  { dtype = "int8", q_dtype = "f16", group = 20, block_size = 16, head_dim = 144,
    listed = true, soft_cap = 4 },
}

-- Values that are the first numbers of their keys.
local LATENTS = {
  { dtype = "f32", group = 5, block_size = 8, head_dim = 40, value_dim = 24 },
  { dtype = "bf16", q_dtype = "bf16", kv_heads = 1, group = 16, block_size = 16,
    head_dim = 576, value_dim = 512, selects = true },
  { dtype = "f8_latent", q_dtype = "bf16", group = 3, block_size = 8, head_dim = 48,
    value_dim = 32, rows = { 1, 30, 2, 1 }, window = 11 },
  { dtype = "f16", q_dtype = "f16", group = 20, block_size = 16, head_dim = 72,
    value_dim = 64, listed = true, soft_cap = 4 },
  { dtype = "f8_latent", q_dtype = "f16", kv_heads = 1, group = 20, block_size = 64,
    head_dim = 576, value_dim = 512, alibi = true },
  { dtype = "bf16", q_dtype = "bf16", group = 70, block_size = 8, head_dim = 64,
    value_dim = 64, rows = { 0, 20, 3, 1 }, selects = true, parts = true },
  { dtype = "f8_latent", q_dtype = "bf16", kv_heads = 1, group = 6, block_size = 16,
    head_dim = 576, value_dim = 512, rows = { 1, 30, 2, 1 } },
  { dtype = "f16", q_dtype = "f16", kv_heads = 1, group = 40, block_size = 8,
    head_dim = 128, value_dim = 96 },
}
for _, o in ipairs(LATENTS) do CASES[#CASES + 1] = o end

local function words(o)
  return ("%s queries, %s, group %d, block %d, head_dim %d%s%s%s%s"):format(
    o.q_dtype or "f32", o.dtype, o.group, o.block_size, o.head_dim,
    o.value_dim and (", values of %d"):format(o.value_dim) or "",
    o.rows and ", prefill" or "", o.window and ", window" or "",
    o.selects and ", selection" or o.listed and ", listed" or "")
end

-- Every known one meets every kind of shape; its seed is which of CASES.
local known = {}
for _, name in ipairs(support.names(KNOWN)) do
  for i, o in ipairs(CASES) do
    known[#known + 1] = { known = name, seed = i, dtype = o.dtype, q_dtype = o.q_dtype,
      is_prefill = o.rows ~= nil, selects = o.selects, parts = o.parts, alibi = o.alibi,
      has_window = o.window ~= nil, has_cap = o.soft_cap ~= nil, is_wide = o.group > 8,
      has_scales = o.scaled ~= nil }
  end
end
known = support.sample(known)

local STEP = 7 -- has no factor with how many shapes there are, so it leaves none out
assert(#CASES % STEP ~= 0)

-- Of those, what is compiled takes long: every known one, with shapes that are spread
-- over all, so that int8, scales and parts meet what is emitted in a prefill. With a GPU,
-- where each shape has other code, every shape as well.
local few, names = {}, support.names(KNOWN)
local most = kv.cuda_available() and math.max(#CASES, #names) or #names
for i = 1, most do
  few[i] = { known = names[(i - 3) % #names + 1], seed = STEP * i % #CASES + 1 }
end
-- What a prefill emits once had room for 256 numbers of a key.
for i, o in ipairs(CASES) do
  if o.rows and o.head_dim > 256 then few[#few + 1] = { known = "mass", seed = i } end
end

local M = {}

--- Describes the known ones.
---@param dev string
---@param target? string  the printer; nil: the device's
---@param o? table        all: with every kind of shape (as --full does);
--                        phase: "decode" or "prefill" alone
function M.known(dev, target, o)
  o = o or {}
  for _, one in ipairs((o.all or support.is_full) and known or few) do
    local name, i = one.known, one.seed
    local phase = CASES[i].rows and "prefill" or "decode"
    if not o.phase or o.phase == phase then
      busted.it(("%s: %s"):format(name, words(CASES[i])), function()
        local shape = { kv_heads = 2, blocks = 40, lens = { 0, 70, 37, 1 },
                        poison = name == "hidden", id = name .. i }
        for key, value in pairs(CASES[i]) do shape[key] = value end
        local why = hooks.differs(dev, target, i, define(name), shape)
        if why then error(why, 0) end
      end)
    end
  end
end

--- Describes random expressions.
function M.random(dev, target, count)
  for seed = 1, count do
    busted.it(("random expressions %d"):format(seed), function()
      local o = hooks.shape(seed)
      o.id = "random " .. seed
      local why = hooks.differs(dev, target, seed, hooks.random(seed), o)
      if why then error(why, 0) end
    end)
  end
end

return M
