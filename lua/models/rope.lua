--- Rotary embeddings: how a config describes them, and the frequencies that they turn
-- with. The kinds are those of Hugging Face's rope_type: default, linear, dynamic, yarn
-- and llama3. longrope and proportional are refused.
-- Source  transformers 5, modeling_rope_utils.py; YaRN: Peng et al. 2023,
--         arXiv:2309.00071
local checkpoint = require "models.checkpoint"
local json = require "kvlab.json"

local refuse = checkpoint.refuse
local M = {}

-- What each kind needs besides rope_theta.
local FIELDS = {
  default = {}, linear = { "factor" }, dynamic = { "factor" },
  yarn = { "original_max_position_embeddings" },
  llama3 = { "factor", "low_freq_factor", "high_freq_factor",
             "original_max_position_embeddings" },
}

-- Numbers that YaRN may have.
local OF_YARN = { "factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
                  "mscale_all_dim" }

--- The tables that describe a rotation, as one without nulls.
local function merged(path, raw, tables)
  local rope = {}
  for _, name in ipairs(tables) do
    local fields = raw[name] ~= json.null and raw[name] or nil
    if fields and type(fields) ~= "table" then refuse(path, name, fields, "a table") end
    for k, v in pairs(fields or {}) do
      if v ~= json.null then rope[k] = v end
    end
  end
  return rope
end

local function check_yarn(path, raw, rope)
  -- Without a factor of its own, YaRN stretches to max_position_embeddings.
  rope.factor = rope.factor or checkpoint.positive(path, raw, "max_position_embeddings")
    / rope.original_max_position_embeddings
  for _, name in ipairs(OF_YARN) do
    if rope[name] then checkpoint.positive(path, rope, name) end
  end
end

--- Checks what a config says about rotary embeddings. transformers turns whole heads in
-- these families, whatever partial_rotary_factor says.
---@param path string    where the config stands, for errors
---@param raw table      the config
---@param tables? string[]  its tables about them, the later ones win (rope_scaling and
--                          rope_parameters)
---@param theta? number  the base if the config has none (10000)
---@param context? integer  tokens that "dynamic" stretches to
---@return table rope    for frequencies
function M.check(path, raw, tables, theta, context)
  local rope = merged(path, raw, tables or { "rope_scaling", "rope_parameters" })
  rope.rope_theta = rope.rope_theta or raw.rope_theta or theta or 10000
  rope.kind = rope.rope_type or rope.type or "default"
  if not FIELDS[rope.kind] then
    refuse(path, "rope_type", rope.kind, "default, linear, dynamic, yarn or llama3")
  end
  checkpoint.positive(path, rope, "rope_theta")
  if rope.kind == "yarn" and not rope.original_max_position_embeddings then
    rope.original_max_position_embeddings = raw.original_max_position_embeddings
      or raw.max_position_embeddings
  end
  for _, name in ipairs(FIELDS[rope.kind]) do checkpoint.positive(path, rope, name) end
  if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor then
    refuse(path, "high_freq_factor", rope.high_freq_factor,
      ("more than low_freq_factor, %g"):format(rope.low_freq_factor))
  elseif rope.kind == "yarn" then
    check_yarn(path, raw, rope)
  elseif rope.kind == "dynamic" then
    rope.trained = checkpoint.count(path, raw, "max_position_embeddings")
    rope.context = math.max(context or 0, rope.trained)
  end
  local share = raw.partial_rotary_factor or rope.partial_rotary_factor or 1
  if share ~= 1 then
    refuse(path, "partial_rotary_factor", share, "1: these models turn whole heads")
  end
  return rope
end

--- Llama 3.1: low frequencies are divided by `factor`, those between the two wavelengths
-- change smoothly.
local function llama3(rope, f)
  local wavelength = 2 * math.pi / f
  local smooth = (rope.original_max_position_embeddings / wavelength
    - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
  smooth = math.max(0, math.min(1, smooth))
  return (1 - smooth) * f / rope.factor + smooth * f
end

--- The pairs of a head between which YaRN goes over from whole frequencies to ones that
-- are divided by `factor`: those that turn beta_fast and beta_slow times in the length
-- that the model was trained with.
local function yarn_range(rope, dim)
  local function pair(turns)
    return dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
      / (2 * math.log(rope.rope_theta))
  end
  local low, high = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
  if rope.truncate ~= false then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, dim - 1)
  return low, low == high and high + 0.001 or high
end

local function yarn_scale(factor, mscale)
  return factor <= 1 and 1 or 0.1 * mscale * math.log(factor) + 1
end

--- What YaRN multiplies the turned q and k with.
local function yarn_attention(rope)
  if rope.attention_factor then return rope.attention_factor end
  if rope.mscale and rope.mscale_all_dim then
    return yarn_scale(rope.factor, rope.mscale)
      / yarn_scale(rope.factor, rope.mscale_all_dim)
  end
  return yarn_scale(rope.factor, 1)
end

--- The frequencies of the dim / 2 pairs of a head, 1 / theta^(2i/dim) unless they are
-- stretched, and a factor for the scale of attention.
--
-- "dynamic" has a base that depends on the length of the text. transformers takes the
-- length of the longest text so far, and leaves the keys that it has cached as they are,
-- so that its results depend on how a text was cut. Here the length is the one that
-- M.check was told, from the first token on.
---@param rope table       as check returned it
---@param dim integer
---@param factors? number[]  a GGUF file may have what each frequency is divided by
---@return number[] frequencies
---@return number factor   1 but for YaRN
function M.frequencies(rope, dim, factors)
  local list, kind, theta = {}, rope.kind, rope.rope_theta
  local low, high
  if kind == "yarn" then low, high = yarn_range(rope, dim) end
  if kind == "dynamic" then
    theta = theta * (rope.factor * rope.context / rope.trained - (rope.factor - 1))
      ^ (dim / (dim - 2))
  end
  for i = 0, dim / 2 - 1 do
    local f = theta ^ (-2 * i / dim)
    if kind == "linear" then
      f = f / rope.factor
    elseif kind == "llama3" then
      f = llama3(rope, f)
    elseif kind == "yarn" then
      local ramp = math.max(0, math.min(1, (i - low) / (high - low)))
      f = ramp * f / rope.factor + (1 - ramp) * f
    end
    list[i + 1] = factors and f / factors[i + 1] or f
  end
  return list, kind == "yarn" and yarn_attention(rope) ^ 2 or 1
end

return M
