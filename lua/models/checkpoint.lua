--- A checkpoint: a folder as Hugging Face writes it, with config.json and the weights in
-- model.safetensors or in shards with an index, or a GGUF file (lua/models/gguf.lua).
--
--   local file = checkpoint.open "path/to/folder, file.gguf or smollm2"
--   local values = config.read(file.path, file.fields, { "llama" })
--   local norm = file.read("model.norm.weight", device, "bf16", { 256 })
--   local left = file.unread()      the name of a tensor that was not read, or nil
local arguments = require "kvlab.arguments"
local config = require "models.config"
local downloads = require "kvlab.downloads"
local fields_of = require "models.fields"
local files = require "kvlab.files"
local gguf = require "models.gguf"
local json = require "kvlab.json"
local kv = require "kvlab"
local library = require "kvlab.library"
local options = require "kvlab.options"
local quantization = require "models.quantization"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"
local words = require "kvlab.words"

local M = {}

local refuse = fields_of.refuse

--- The JSON object in the text of a file.
local function object_of(path, text)
  local ok, fields = pcall(json.decode, text)
  if not ok or type(fields) ~= "table" then
    error(("%s: %s"):format(path, ok and "no JSON object" or fields), 0)
  end
  return fields
end

--- Raises for a path with no model. problem: what is wrong, with the path.
local function refuse_path(path, problem)
  local names, hint = sorted.keys(downloads.CATALOGUE), ""
  if not path:find "/" then hint = words.hint(path, names, " Did you mean %s?") end
  for _, name in ipairs(files.real(path) and files.list(path) or {}) do
    if name:find "%.gguf$" then hint = (" %s holds %s."):format(path, name) end
  end
  error(("%s.%s A model is a folder with config.json and its weights, a file that ends "
    .. "with .gguf, or a name that %s get fetches: %s"):format(problem, hint,
    library.program, table.concat(names, ", ")), 0)
end

--- What open(path) returns. An error begins with the path and names no line of this file.
local function opened(open, path)
  local ok, file = pcall(open, path)
  if ok then return file end
  local why = tostring(file)
  error(why:sub(why:find(path, 1, true) or 1), 0)
end

--- Opens a GGUF file.
---@param path string
---@return kvlab.GGUF
function M.gguf(path)
  if not files.real(path) then
    refuse_path(path, path .. ": No such file or directory")
  end
  return opened(kv.gguf, path)
end

--- The fields of a folder's config.json, and its path for errors.
---@param folder string
---@return table fields
---@return string path
function M.config(folder)
  local path = folder .. "/config.json"
  local text, why = sources.read(path)
  if not text then refuse_path(folder, why) end
  return object_of(path, text), path
end

--- The one file of a folder's weights, as open_shards returns several.
local function open_single(folder)
  local file = opened(kv.safetensors, folder .. "/model.safetensors")
  return function() return file end, function() return file.names end
end

--- The shards of a folder's weights, as its index lists them.
---@return fun(name: string): kvlab.Safetensors  of  the file that has a tensor
---@return fun(): string[]  names  of all tensors: those of the index, and what else is in
--                                 the files that were opened
local function open_shards(folder, index_path, index)
  local map, shards = object_of(index_path, index).weight_map, {}
  if type(map) ~= "table" then
    refuse(index_path, "weight_map", map, "a table of tensors' files")
  end
  local function of(name)
    local shard = map[name] or error(("%s: no tensor \"%s\" in the index"):format(folder,
      name), 0)
    if type(shard) ~= "string" or shard:find "[/%z]" then
      refuse(folder, "shard of " .. name, shard, "a plain file name")
    end
    shards[shard] = shards[shard] or opened(kv.safetensors, folder .. "/" .. shard)
    return shards[shard]
  end
  return of, function()
    local names = sorted.keys(map)
    for _, shard in ipairs(sorted.keys(shards)) do
      for _, name in ipairs(shards[shard].names) do
        if map[name] ~= shard then names[#names + 1] = name .. " of " .. shard end
      end
    end
    return names
  end
end

--- The files of a folder's weights: of and names, see open_shards.
local function open_files(folder)
  local index_path = folder .. "/model.safetensors.index.json"
  local index = sources.read(index_path)
  if not index then return open_single(folder) end
  if files.real(folder .. "/model.safetensors") then
    error(folder .. " has both model.safetensors and model.safetensors.index.json, "
      .. "expected one of them", 0)
  end
  return open_shards(folder, index_path, index)
end

local FLOAT = { f32 = true, f16 = true, bf16 = true }

--- The weights of a folder. Its files are opened when the first tensor is read, so errors
-- of a config come first.
---@param folder string
---@param q? models.Quantization  of its config
---@return table  has, read and unread, see open
local function weights(folder, q)
  local seen, of, names = {}, nil, nil
  local function need()
    if not of then of, names = open_files(folder) end
  end
  local function read(name, device, dtype, shape)
    need()
    local file = of(name)
    local _, stored = file:describe(name)
    seen[name] = true
    if FLOAT[stored] then return file:read(name, device, dtype, shape) end
    if stored ~= "f8e4m3" or not q then
      refuse(file.path, ('tensor "%s"'):format(name), stored, stored == "f8e4m3"
        and "a float, or a quantization_config in config.json" or "a float")
    end
    seen[name .. q.suffix] = true
    return quantization.read(q, of, name, device, dtype, shape)
  end
  local function has(name)
    need()
    for _, other in ipairs(names()) do
      if other == name then return true end
    end
    return false
  end
  local function unread(is_left_out)
    need()
    for _, name in ipairs(names()) do
      local is_harmless = name:find "rotary_emb%.inv_freq$" -- as old versions wrote
        or q and (name:find "%.activation_scale$" or name:find "%.input_scale$")
      if not seen[name] and not is_harmless
        and not (is_left_out and is_left_out(name)) then return name end
    end
  end
  return { has = has, read = read, unread = unread }
end

--- The path of a checkpoint. A name without a slash that ./kvlab get knows, such as
-- "smollm2", is the file that it has fetched, unless a folder here has that name; raises
-- if it was not fetched. Any other name is a path already.
---@param name string
---@return string path
function M.find(name)
  if not downloads.CATALOGUE[name] or files.real(name) then return name end
  return downloads.find(name) or error(("%s is not on this machine; this fetches it: "
    .. "%s get %s"):format(name, library.program, name), 0)
end

---@class models.Checkpoint
---@field path string    where its fields stand, for errors
---@field fields table   as a config.json has them, with json.null
---@field gguf? table    of a GGUF file: what no config.json says, see gguf.config
---@field ends? integer|integer[]  tokens that end a text, of a generation_config.json,
--                                 which wins over the config
---@field has fun(name: string): boolean   whether it has a tensor
---@field read fun(name: string, device: kvlab.Device, dtype: string, shape: integer[]):
--              kvlab.Tensor  a tensor, cast to dtype; its shape is checked
---@field unread fun(is_left_out?: fun(name: string): boolean): string|nil  the name of a
--              tensor that was not read yet, that may change what the model computes, and
--              for which is_left_out(name) is not true

--- The tokens that end a text by a folder's generation_config.json; nil if it does not
-- say. The other fields say how transformers samples; in kvlab, requests say that.
local function ends_of(folder)
  local path = folder .. "/generation_config.json"
  local text = sources.read(path)
  local ends = text and object_of(path, text).eos_token_id
  if ends == nil or ends == json.null then return nil end
  if not config.ENDS[2](ends) then refuse(path, "eos_token_id", ends, config.ENDS[1]) end
  return ends
end

--- Opens a checkpoint.
---@param name string  a folder, a file that ends with .gguf, or a name as find takes it
---@return models.Checkpoint
function M.open(name)
  local folder = M.find(name)
  if folder:find "%.gguf$" then
    local file = M.gguf(folder)
    local fields, own = gguf.config(file)
    local opened_file = gguf.weights(file, fields)
    opened_file.path, opened_file.fields, opened_file.gguf = folder, fields, own
    return opened_file
  end
  local fields, path = M.config(folder)
  if sources.read(folder .. "/adapter_config.json") then
    error(folder .. " has an adapter_config.json, expected a whole model: merge the "
      .. "adapter into its weights first", 0)
  end
  local file = weights(folder, quantization.config(path, fields.quantization_config))
  file.path, file.fields, file.ends = path, fields, ends_of(folder)
  return file
end

--- The model_type of a checkpoint, in the words of a config.json.
---@param name string  see open
---@return string model_type
---@return string path  where it stands, for errors
function M.model_type(name)
  local path = M.find(name)
  if not path:find "%.gguf$" then
    local fields, where = M.config(path)
    return fields.model_type, where
  end
  local file = M.gguf(path)
  local fields = gguf.config(file)
  file:close()
  return fields.model_type, path
end

--- A checkpoint of random weights under any name. Norms are 1, biases are 0, and a
-- product with a matrix keeps the size of its input.
---@param fields table<string, any>  of a config.json
---@param seed integer
---@return models.Checkpoint
function M.random(fields, seed)
  if fields.quantization_config ~= nil and fields.quantization_config ~= json.null then
    refuse("config", "quantization_config", fields.quantization_config,
      "none: random weights are not quantised")
  end
  local drawn = 0
  local function read(name, device, dtype, shape)
    if #shape == 1 then
      return kv.full(device, dtype, shape, name:find "norm%.weight$" and 1 or 0)
    end
    drawn = drawn + 1
    return kv.randn(device, dtype, shape,
      { seed = seeds.derive(seed, drawn), std = shape[2] ^ -0.5 })
  end
  return { path = "config", fields = fields, read = read,
           has = function() return false end, unread = function() end }
end

--- Reads matrices (or biases) into one tensor, one below the other, so that one call
-- multiplies tokens with all of them.
---@param get fun(name: string, shape: integer[]): kvlab.Tensor
---@param names string[]
---@param rows integer[]      rows[i] are those of names[i]
---@param columns? integer    left out for biases
---@return kvlab.Tensor
function M.stack(get, names, rows, columns)
  if #rows ~= #names then
    options.fail(("checkpoint.stack: rows has %d numbers, expected %d, one for each name")
      :format(#rows, #names))
  end
  local loaded, total = {}, 0
  for i, name in ipairs(names) do
    loaded[i] = get(name, { rows[i], columns })
    total = total + rows[i]
  end
  local all = kv.tensor(loaded[1].device, loaded[1]:type(), { total, columns })
  local first = 0
  for i, part in ipairs(loaded) do
    all:narrow(first, rows[i]):copy_(part)
    first = first + rows[i]
    part:free()
  end
  return all
end

arguments.functions(M, "checkpoint", {
  config = { folder = options.string }, gguf = { path = options.string },
  find = { name = options.string }, open = { name = options.string },
  model_type = { name = options.string },
  random = { fields = options.table, seed = options.any_integer },
  stack = { get = options.callable, names = options.list_of(options.string, 1),
            rows = options.list_of(options.count),
            columns = options.optional(options.count) },
})

return M
