--- Every field of a config.json, changed (tools/hf_fields.py): kvlab gives the logits
-- that transformers gives, or refuses the folder and names the field. Tolerance: f32
-- against f32, as in llama_spec.lua.
local config = require "models.config"
local families = require "models.families"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"
local support = require "spec.support"
local temporary = require "spec.temporary"

local DATA = kv.paths.root .. "/spec/data/"
local FOLDERS = { qwen3 = "qwen3_window", gemma3_text = "gemma3",
                  deepseek_v2 = "deepseek_v2_groups" }
local TOLERANCE = 2e-4

-- Fields of which some values are refused, though transformers computes something with
-- them: it ignores them, or kvlab has no such kernel, or the value is no sensible one.
local REFUSED = {
  "_sliding_window_pattern", "add_cross_attention", "attention_bias",
  "attn_logit_softcapping", "auto_map", "decoder_sparse_step", "eos_token_id",
  "final_logit_softcapping", "first_k_dense_replace", "head_dim", "hidden_act",
  "hidden_activation", "index_topk", "intermediate_size", "is_causal",
  "is_encoder_decoder",
  "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias",
  "mlp_only_layers", "moe_layer_freq", "n_group", "norm_topk_prob", "num_experts",
  "num_experts_per_tok", "num_mtp_layers", "num_nextn_predict_layers",
  "original_max_position_embeddings", "partial_rotary_factor", "pruned_heads",
  "qk_head_dim", "query_pre_attn_scalar", "rms_norm_eps", "rope_interleave",
  "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta",
  "routed_scaling_factor", "scoring_func", "shared_expert_intermediate_size",
  "sliding_window", "sliding_window_pattern", "sliding_window_size", "topk_group",
  "topk_method", "use_bidirectional_attention", "use_mrope", "use_sliding_window",
}

local function read(path) return json.decode(assert(files.read(path))) end

local goldens = read(DATA .. "hf_fields.json")

--- Six logits of the last token and two of the 21st, from `row(i)`, a token's logits.
local function excerpt(row, last)
  local a, b = row(last), row(21)
  return { a[1], a[2], a[3], a[4], a[5], a[6], b[1], b[2] }
end

local function are_near(a, b)
  for i = 1, #b do
    local difference = math.abs(a[i] - b[i])
    if difference ~= difference or difference > TOLERANCE * (1 + math.abs(b[i])) then
      return false
    end
  end
  return true
end

--- Whether two configs of models are the same, but for where they stand and how many
-- tokens they suggest.
local function are_same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for k, v in pairs(a) do
    if k ~= "path" and k ~= "context" and not are_same(v, b[k]) then return false end
  end
  for k in pairs(b) do if a[k] == nil then return k == "path" or k == "context" end end
  return true
end

local Case = {}
Case.__index = Case

--- A folder with the weights of a family's small model.
local function open(family)
  local source = DATA .. "hf/" .. (FOLDERS[family] or family)
  local self = setmetatable({ family = family, folder = temporary.folder(),
    known = config.FAMILIES[family], config = read(source .. "/config.json") }, Case)
  assert(os.execute(("ln -s '%s/model.safetensors' '%s'"):format(source, self.folder))
    == 0)
  local golden = read(source .. "/golden.json")
  self.tokens = golden.tokens
  self.logits = excerpt(function(i) return golden.logits[i] end, #golden.tokens)
  self.base = self:load({}).config
  return self
end

--- Loads the folder with a change; the model, or nil and the error.
function Case:load(change)
  local changed = {}
  for name, value in pairs(self.config) do changed[name] = value end
  for name, value in pairs(change) do
    if value == "absent" then changed[name] = nil else changed[name] = value end
  end
  -- A file that is written again over an old one goes to the disk when it is closed.
  os.remove(self.folder .. "/config.json")
  local file = assert(io.open(self.folder .. "/config.json", "w"))
  file:write(json.encode(changed))
  file:close()
  local ok, model = pcall(families.load, self.folder, { device = "cpu", dtype = "f32" })
  if ok then return model end
  return nil, (tostring(model):gsub("^.*/config%.json: ", ""))
end

--- Raises unless a model gives these logits; the base's if its config is the base's.
function Case:check(model, change, logits)
  if are_same(model.config, self.base) then
    if are_near(self.logits, logits) then return end
    error(("%s: %s changes nothing"):format(self.family, json.encode(change)), 0)
  end
  local engine = model:engine { blocks = 16 }
  local all = engine:prefill_all(engine:sequence(), self.tokens)
  local got = excerpt(function(i) return all:index(i - 1):list() end, #self.tokens)
  if not are_near(got, logits) then
    error(("%s: %s gives other logits"):format(self.family, json.encode(change)), 0)
  end
end

--- The field that an error begins with; the error has to name a field that was changed.
function Case:named(change, why)
  for name in pairs(change) do
    if why:find(name, 1, true) then return why:match "^[%w_]+" end
  end
  error(("%s: %s is refused with: %s"):format(self.family, json.encode(change), why), 0)
end

--- Calls fn(change) for each change with an outcome. nth: of a family, which takes four
-- values of a field, of which the last is the first of the next family.
local function each(found, fn, nth)
  for name, values in pairs(found.single) do
    local some = nth and support.one_each(values, 3 * nth + 2, 4) or values
    for _, value in ipairs(some) do fn { [name] = value } end
  end
  for _, change in ipairs(found.several) do fn(change) end
end

--- The only field of a change, and its value; nil if there are several.
local function single(change)
  local name, value = next(change)
  if next(change, name) == nil then return name, value end
end

for nth, family in ipairs(config.NAMES) do
  describe("the config of " .. family .. " #release", function()
    local of, found = nil, goldens[family]

    local function is_harmless(change)
      local name = single(change)
      return name and of.known[name] and of.known[name].harmless
    end

    before_each(function() of = of or open(family) end)

    it("has all fields of the family's class", function()
      for _, name in ipairs(found.fields) do assert.truthy(of.known[name], name) end
    end)

    it("is not changed by a field that is harmless", function()
      local values, most = {}, 0
      for _, kind in ipairs { "=", "!" } do
        each(found[kind], function(change)
          if is_harmless(change) then
            local name, value = single(change)
            values[name] = values[name] or {}
            table.insert(values[name], value)
            most = math.max(most, #values[name])
          end
        end)
      end
      assert.is_true(most > 5)
      for i = 1, most do -- one value of every field
        local change = {}
        for name, list in pairs(values) do change[name] = list[i] end
        of:check(assert(of:load(change)), change, of.logits)
      end
    end)

    it("gives the logits of transformers, or the field is refused", function()
      local function case(change, logits)
        -- how many tokens are read, and how, is the affair of a policy
        if single(change) == "index_topk" then logits = of.logits end
        if is_harmless(change) and logits == of.logits then return end
        local model, why = of:load(change)
        if model then return of:check(model, change, logits) end
        local name = of:named(change, why)
        if why:find("no such field", 1, true) and not why:find "^rope" then
          assert.is_nil(of.known[name])
          assert.truthy(change[name] ~= nil)
        else
          REFUSED[name] = (REFUSED[name] or 0) + 1
        end
      end
      each(found["="], function(change) case(change, of.logits) end, nth)
      for _, row in ipairs(found["#"]) do case(row[1], row[2]) end
    end)

    it("is refused where transformers refuses it", function()
      each(found["!"], function(change)
        if is_harmless(change) then return end
        local model, why = of:load(change)
        if not model then
          return why:find("tensor \"", 1, true) or of:named(change, why)
        end
        local _, value = single(change)
        assert.is_true(value == json.null or type(value) == "table"
          and next(value) == nil, json.encode(change)) -- null and [] say nothing
        of:check(model, change, of.logits)
      end, nth)
    end)
  end)
end

describe("docs/models.md #release", function()
  if not files.real(kv.paths.root .. "/tools/fields.lua") then return end -- a bundle

  it("has the table of fields as they are", function()
    local is, wanted = assert(loadfile(kv.paths.root .. "/tools/fields.lua"))("fields")
      .page()
    assert.is_true(is == wanted, "./kvlab run tools/fields.lua writes it anew")
  end)
end)

describe("what is refused though transformers computes it #release", function()
  it("is of these fields", function()
    local names = {}
    for _, name in ipairs(sorted.keys(REFUSED)) do
      if type(name) == "string" then names[#names + 1] = name end
    end
    assert.same(names, { unpack(REFUSED) })
  end)
end)
