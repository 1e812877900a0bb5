--- Weights in FP8 (tools/fp8_goldens.py): a model computes with its weights times their
-- scales, whatever the form of the scales and whether blocks are cut off. The goldens are
-- in float64; tolerance: f32 sums, as in llama_spec.lua.
local families = require "models.families"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local DATA = kv.paths.root .. "/spec/data/fp8/"
local NAMES = { "block", "flat", "even", "experts", "tensor", "rows", "compressed_tensor",
                "compressed_channel", "compressed_block" }

local function read(path) return json.decode(assert(files.read(path))) end

support.each_device(function(dev)
  for _, name in ipairs(NAMES) do
    it(("are multiplied out: %s on %s"):format(name, dev:name()), function()
      local golden, want = read(DATA .. name .. "/golden.json"), {}
      for _, row in ipairs(golden.logits) do
        for _, x in ipairs(row) do want[#want + 1] = x end
      end
      local model = families.load(DATA .. name, { device = dev, dtype = "f32" })
      local engine = model:engine { blocks = 4 }
      local got = engine:prefill_all(engine:sequence(), golden.tokens)
      support.close(got:narrow(#golden.tokens - 4, 4), want, 2e-4, 2e-4, name)
    end)
  end
end)

describe("weights in FP8", function()
  --- A copy of a model, its config or tensors changed by change(config, tensors).
  local function changed(name, change)
    local folder, tensors = temporary.folder(), {}
    local file = kv.safetensors(DATA .. name .. "/model.safetensors")
    for _, tensor in ipairs(file.names) do tensors[tensor] = file:read(tensor, "cpu") end
    local config = read(DATA .. name .. "/config.json")
    change(config, tensors)
    files.write(folder .. "/config.json", json.encode(config))
    kv.safetensors.save(folder .. "/model.safetensors", tensors)
    return folder
  end

  local function refused(words, name, change)
    support.raises(words, families.load, changed(name, change), { device = "cpu" })
  end

  local Q = "model.layers.0.self_attn.q_proj.weight"

  it("are refused without a quantization_config", function()
    refused("\" is f8e4m3, expected a float, or a quantization_config in config.json",
      "block", function(config) config.quantization_config = nil end)
  end)

  it("are refused without scales, or with scales of another shape", function()
    refused(("no tensor \"%s_scale_inv\""):format(Q), "block",
      function(_, tensors) tensors[Q .. "_scale_inv"] = nil end)
    refused(("tensor \"%s_scale_inv\" is f32 [1, 1], expected a float [2, 2]"):format(Q),
      "block", function(_, tensors)
        tensors[Q .. "_scale_inv"] = kv.full("cpu", "f32", { 1, 1 }, 1)
      end)
    refused("is u8 [2, 2], expected a float [2, 2]", "block", function(_, tensors)
      tensors[Q .. "_scale_inv"] = kv.zeros("cpu", "u8", { 2, 2 })
    end)
    refused("expected a float [48, 1]", "rows", function(_, tensors)
      tensors[Q .. "_scale"] = kv.full("cpu", "f32", { 1, 48 }, 1)
    end)
  end)

  it("are refused with scales that no weight has", function()
    refused(("tensor \"%s_scale_inv\" is no part of llama"):format(Q), "block",
      function(_, tensors) tensors[Q] = kv.zeros("cpu", "f32", { 48, 48 }) end)
  end)

  it("are refused where the config says that they are not quantised", function()
    refused(("tensor \"%s\" is f8e4m3, expected another type"):format(Q), "block",
      function(config)
        config.quantization_config.modules_to_not_convert = { Q:match "^(.*)%.weight$" }
      end)
  end)

  it("are refused with a config that asks for something else", function()
    for words, set in pairs {
      ["quant_method is gptq, expected fp8, fbgemm_fp8 or compressed-tensors"] =
        { quant_method = "gptq" },
      ["weight_block_size is a table, expected a list of two"] =
        { weight_block_size = { 32 } },
      ["fmt is e5m2, expected e4m3"] = { fmt = "e5m2" },
      ["group_size is 128, but fp8 has no such field"] = { group_size = 128 },
    } do
      refused("quantization_config: " .. words, "block", function(config)
        for name, value in pairs(set) do config.quantization_config[name] = value end
      end)
    end
    for words, set in pairs {
      ["num_bits is 4, expected 8"] = { num_bits = 4 },
      ["type is int, expected float"] = { type = "int" },
      ["strategy is group, expected one of tensor, channel, block"] =
        { strategy = "group" },
      ["group_size is 128, expected null"] = { group_size = 128 },
      ["block_structure is nil, expected a list of two"] = { strategy = "block" },
    } do
      refused(words, "compressed_channel", function(config)
        local group = config.quantization_config.config_groups.group_0
        for name, value in pairs(set) do group.weights[name] = value end
      end)
    end
    refused("kv_cache_scheme is a table, expected null", "compressed_channel",
      function(config) config.quantization_config.kv_cache_scheme = { num_bits = 8 } end)
  end)

  it("give the same numbers in one strip of rows and in several", function()
    local quantization = require "models.quantization"
    local rows, columns = 1100, 40
    local weight = kv.randn("cpu", "f32", { rows, columns }, { seed = 3, std = 50 })
      :cast "f8e4m3"
    local scales = kv.rand("cpu", "f32", { 35, 2 }, { seed = 4 })
    local path = temporary.path() .. ".safetensors"
    kv.safetensors.save(path, { w = weight, w_scale = scales })
    local file, config = kv.safetensors(path), { suffix = "_scale", rows = 32,
                                                 columns = 24, plain = {} }
    local got = quantization.read(config, function() return file end, "w",
      kv.device "cpu", "f32", { rows, columns }):list()
    local numbers, by = weight:cast("f32"):list(), scales:list()
    for i = 0, rows - 1 do
      for j = 0, columns - 1 do
        local scale = by[math.floor(i / 32) * 2 + math.floor(j / 24) + 1]
        local at = i * columns + j + 1
        -- the product of an 8-bit and a 24-bit number is exact in double
        if math.abs(got[at] - numbers[at] * scale) > 6e-8 * math.abs(got[at]) then
          error(("row %d, column %d"):format(i, j), 0)
        end
      end
    end
  end)
end)
