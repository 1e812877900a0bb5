--- Rotary embeddings: how a config describes them, and the frequencies of their
-- rotations. The kinds are those of Hugging Face's rope_type: default, linear, dynamic,
-- yarn and llama3. longrope and proportional are refused.
-- Source  transformers 5, modeling_rope_utils.py; YaRN: Peng et al. 2023,
--         arXiv:2309.00071
local fields = require "models.fields"
local options = require "kvlab.options"

local known, nullable, required = fields.known, fields.nullable, fields.required
local positive, refuse = fields.positive, fields.refuse
local M = {}

--- What the base of the rotation may be.
M.THETA = { "a number above 1, at most 1e+15", function(x)
  return type(x) == "number" and x > 1 and x <= 1e15
end }

local NUMBER = positive(1e6)

-- The fields of each kind besides those of ALL. transformers rotates whole heads in these
-- families, whatever partial_rotary_factor says.
local ALL = {
  rope_type = known(options.string), type = known(options.string),
  rope_theta = known(M.THETA), partial_rotary_factor = nullable(fields.only(1)),
  finetuned = fields.harmless "training",
}
local KINDS = {
  default = {}, linear = { factor = required(NUMBER) },
  dynamic = { factor = required(NUMBER) },
  yarn = {
    factor = { kind = NUMBER, required = true, null = true },
    original_max_position_embeddings = known(fields.COUNT),
    attention_factor = nullable(NUMBER), beta_fast = nullable(NUMBER, 32),
    beta_slow = nullable(NUMBER, 1), mscale = nullable(NUMBER),
    mscale_all_dim = nullable(NUMBER), truncate = nullable(fields.BOOLEAN, true),
  },
  llama3 = {
    factor = required(NUMBER), low_freq_factor = required(NUMBER),
    high_freq_factor = required(NUMBER),
    original_max_position_embeddings = known(fields.COUNT),
  },
}
for _, kind in pairs(KINDS) do
  for name, field in pairs(ALL) do kind[name] = field end
end

--- The table of a config that describes its rotation, and its name: rope_scaling wins
-- over rope_parameters if it says anything, as in transformers.
---@param values table  of a config, see config.read
---@return table given
---@return string name
function M.given(values)
  local scaling = values.rope_scaling
  if scaling and next(scaling) ~= nil then return scaling, "rope_scaling" end
  return values.rope_parameters or {}, "rope_parameters"
end

--- Checks what a config says about a rotation.
---@param path string    where it stands, for errors
---@param given table    the table that describes it, with json.null
---@param o table        theta: the base if the table has none; max_position_embeddings;
--                       original_max_position_embeddings of the config itself, which
--                       wins; context: tokens that "dynamic" stretches to
---@return table rope    for frequencies
function M.check(path, given, o)
  local kind = given.rope_type or given.type or "default"
  if not KINDS[kind] then
    refuse(path, "rope_type", kind, "default, linear, dynamic, yarn or llama3")
  elseif given.type and given.type ~= kind then
    refuse(path, "type", given.type, "that of rope_type, " .. kind)
  end
  local rope = fields.read(path, "rope_type " .. kind, given, KINDS[kind])
  rope.kind, rope.rope_theta = kind, rope.rope_theta or o.theta
  local trained = o.original_max_position_embeddings
    or rope.original_max_position_embeddings
  if kind == "llama3" then
    if not trained then
      refuse(path, "original_max_position_embeddings", nil, "a number > 0")
    elseif rope.high_freq_factor <= rope.low_freq_factor then
      refuse(path, "high_freq_factor", rope.high_freq_factor,
        ("more than low_freq_factor, %g"):format(rope.low_freq_factor))
    end
  elseif kind == "yarn" then
    trained = trained or o.max_position_embeddings
    -- Without a factor of its own, YaRN stretches to max_position_embeddings.
    rope.is_inferred = rope.factor == nil
    rope.factor = rope.factor or o.max_position_embeddings / trained
  elseif kind == "dynamic" then
    trained = o.max_position_embeddings
    rope.context = math.max(o.context or 0, trained)
  end
  rope.trained = trained
  return rope
end

--- Llama 3.1: low frequencies are divided by `factor`, those between the two wavelengths
-- change smoothly.
local function llama3(rope, f)
  local wavelength = 2 * math.pi / f
  local smooth = (rope.trained / wavelength
    - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
  smooth = math.max(0, math.min(1, smooth))
  return (1 - smooth) * f / rope.factor + smooth * f
end

--- The pairs of a head between which YaRN changes from unchanged frequencies to
-- frequencies divided by `factor`: the pairs that rotate beta_fast and beta_slow times
-- within the length that the model was trained with.
local function yarn_range(rope, dim)
  local function pair(turns)
    return dim * math.log(rope.trained / (turns * 2 * math.pi))
      / (2 * math.log(rope.rope_theta))
  end
  local low, high = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
  if rope.truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, dim - 1)
  return low, low == high and high + 0.001 or high
end

local function yarn_scale(factor, mscale)
  return factor <= 1 and 1 or 0.1 * mscale * math.log(factor) + 1
end

--- The factor by which YaRN multiplies the rotated q and k.
local function yarn_attention(rope)
  if rope.attention_factor then return rope.attention_factor end
  if rope.mscale and rope.mscale_all_dim then
    return yarn_scale(rope.factor, rope.mscale)
      / yarn_scale(rope.factor, rope.mscale_all_dim)
  end
  return yarn_scale(rope.factor, 1)
end

--- The factor by which DeepSeek multiplies the scale of attention, besides the factor of
-- the rotated q and k. 1 unless YaRN has mscale_all_dim.
---@param path string  where it stands, for errors
---@param rope table   as check returned it
---@return number
function M.scale_factor(path, rope)
  if rope.kind ~= "yarn" or not rope.mscale_all_dim then return 1 end
  if rope.is_inferred then
    refuse(path, "factor", nil, "a number > 0, because there is mscale_all_dim")
  end
  return yarn_scale(rope.factor, rope.mscale_all_dim) ^ 2
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
