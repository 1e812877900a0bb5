--- Weights in FP8 (E4M3) with scales: what a config's quantization_config says about
-- them, and reading them. A weight is its 8-bit number times the scale of its block, and
-- is computed when it is read, so a model computes in the dtype that it is loaded as.
-- Activations are not quantised, whatever the config says about them.
--
--   fp8                 weight_scale_inv, a number for each block of weight_block_size
--                       (the last ones may be cut off) or, without one, for a tensor
--   fbgemm_fp8          weight_scale, a number for each row
--   compressed-tensors  weight_scale, a number for a tensor, a row or a block
--
-- Source  transformers 5.23, quantization_config.py and integrations/finegrained_fp8.py;
--         DeepSeek-V3 Technical Report, arXiv:2412.19437
local fields = require "models.fields"
local kv = require "kvlab"
local options = require "kvlab.options"

local known, nullable, only = fields.known, fields.nullable, fields.only
local harmless, refuse = fields.harmless, fields.refuse
local M = {}

-- ---- the config -----------------------------------------------------------------------

local BLOCK = { "a list of two whole numbers >= 1", function(x)
  return options.list_of(fields.COUNT)[2](x) and #x == 2
end }
local NAMES = nullable(options.list_of(options.string))
local ACTIVATIONS = "activations, which are not quantised"

local METHODS = {
  fp8 = {
    quant_method = known(options.string),
    weight_block_size = nullable(BLOCK, { 128, 128 }),
    fmt = known(only "e4m3"), scale_fmt = known(options.one_of("float", "ue8m0")),
    expert_dtype = known(only "fp8"), modules_to_not_convert = NAMES,
    ignored_layers = NAMES, modules_to_convert = nullable(fields.nothing "not read"),
    activation_scheme = harmless(ACTIVATIONS), dequantize = harmless "always done",
  },
  fbgemm_fp8 = {
    quant_method = known(options.string), modules_to_not_convert = NAMES,
    activation_scale_ub = harmless(ACTIVATIONS),
  },
  ["compressed-tensors"] = {
    quant_method = known(options.string), config_groups = fields.required(fields.TABLE),
    format = known(options.one_of("float-quantized", "naive-quantized")),
    quantization_status = known(only "compressed"), ignore = NAMES,
    kv_cache_scheme = nullable(fields.nothing "a cache in FP8 has no scales here"),
    sparsity_config = nullable(fields.nothing "weights are dense"),
    transform_config = nullable(fields.nothing "weights are not rotated"),
    global_compression_ratio = harmless "size", version = harmless "where it comes from",
  },
}

local GROUP = {
  weights = fields.required(fields.TABLE),
  format = METHODS["compressed-tensors"].format,
  targets = harmless "tensors tell themselves", input_activations = harmless(ACTIVATIONS),
  output_activations = nullable(fields.nothing "outputs are not quantised"),
}

local WEIGHTS = {
  num_bits = fields.required(only(8)), type = fields.required(only "float"),
  strategy = fields.required(options.one_of("tensor", "channel", "block")),
  block_structure = nullable(BLOCK), symmetric = known(only(true)),
  dynamic = known(only(false)), group_size = nullable(fields.nothing "no groups"),
  actorder = nullable(fields.nothing "no order of columns"),
  observer = harmless "training", observer_kwargs = harmless "training",
  scale_dtype = harmless "tensors tell themselves", zp_dtype = harmless "no zero points",
}

--- Rows and columns of a block of compressed-tensors.
local function compressed_block(path, values)
  local name, group = next(values.config_groups)
  if not name or next(values.config_groups, name) or type(group) ~= "table" then
    refuse(path, "config_groups", values.config_groups, "a table of one group")
  end
  path = ("%s: %s"):format(path, name)
  local weights = fields.read(path, "weights", fields.read(path, "a group", group,
    GROUP).weights, WEIGHTS)
  if weights.strategy ~= "block" then
    return weights.strategy == "channel" and 1 or math.huge, math.huge
  elseif not weights.block_structure then
    refuse(path, "block_structure", nil, BLOCK[1])
  end
  return unpack(weights.block_structure)
end

---@class models.Quantization
---@field suffix string   of the tensor with the scales of a weight
---@field rows number     of a block; math.huge: all
---@field columns number
---@field plain table<string, boolean>  modules that are said not to be quantised

--- What a config says about quantised weights.
---@param path string        where it stands, for errors
---@param given table|nil    its quantization_config
---@return models.Quantization|nil
function M.config(path, given)
  if type(given) ~= "table" then return nil end
  path = path .. ": quantization_config"
  local method = METHODS[given.quant_method]
    or refuse(path, "quant_method", given.quant_method,
      "fp8, fbgemm_fp8 or compressed-tensors")
  local values = fields.read(path, given.quant_method, given, method)
  local q = { suffix = "_scale", rows = 1, columns = math.huge, plain = {} }
  if given.quant_method == "fp8" then
    q.suffix = "_scale_inv"
    q.rows, q.columns = unpack(values.weight_block_size or { math.huge, math.huge })
  elseif given.quant_method == "compressed-tensors" then
    q.rows, q.columns = compressed_block(path, values)
  end
  for _, name in ipairs(values.modules_to_not_convert or values.ignored_layers
    or values.ignore or {}) do
    q.plain[name] = true
  end
  return q
end

-- ---- weights --------------------------------------------------------------------------

local ROWS = 512 -- multiplied out at once

--- i32 [count]: floor((first + i) / size) for i = 0 ... count - 1
local function blocks_of(device, first, count, size)
  local list = {}
  for i = 1, count do list[i] = math.floor((first + i - 1) / size) end
  return kv.from(device, "i32", { count }, list)
end

--- f32 scales of a weight by row of blocks: [n, columns], or [n, 1] if they are the same
-- for all columns.
local function read_scales(q, file, name, device, rows, columns)
  local down = math.ceil(rows / math.min(rows, q.rows))
  local across = math.ceil(columns / math.min(columns, q.columns))
  local shape, stored = file:describe(name)
  local is_float = stored == "f32" or stored == "bf16" or stored == "f16"
  local count = 1
  for _, size in ipairs(shape) do count = count * size end
  if not is_float or count ~= down * across or (shape[1] or 1) ~= down then
    refuse(file.path, ('tensor "%s"'):format(name), ("%s [%s]"):format(stored,
      table.concat(shape, ", ")), ("a float [%d, %d]"):format(down, across))
  end
  local scales = file:read(name, device, "f32"):reshape { down, across }
  if across == 1 then return scales end
  local wide = scales:transpose(0, 1):gather_rows(blocks_of(device, 0, columns,
    q.columns))
  return wide:transpose(0, 1)
end

--- Reads a weight in FP8 and multiplies it with its scales.
---@param q models.Quantization
---@param file_of fun(name: string): kvlab.Safetensors  the file that has a tensor
---@param name string
---@param device kvlab.Device
---@param dtype string
---@param shape integer[]  [rows, columns]
---@return kvlab.Tensor
function M.read(q, file_of, name, device, dtype, shape)
  local file, rows, columns = file_of(name), shape[1], shape[2]
  if not columns or q.plain[name:gsub("%.weight$", "")] then
    refuse(file.path, ('tensor "%s"'):format(name), "f8e4m3", columns
      and "another type: quantization_config says that it is not quantised" or "a float")
  end
  local weight = file:read(name, device, nil, shape)
  local scales = read_scales(q, file_of(name .. q.suffix), name .. q.suffix, device, rows,
    columns)
  local out = kv.tensor(device, dtype, { rows, columns })
  for first = 0, rows - 1, ROWS do
    local n = math.min(ROWS, rows - first)
    local part = weight:narrow(first, n):cast "f32"
    local by = scales:gather_rows(blocks_of(device, first, n, q.rows))
    part:mul(by, part)
    part:cast(dtype, out:narrow(first, n))
    part:free()
    by:free()
  end
  weight:free()
  return out
end

return M
