--- A checkpoint: a folder as Hugging Face writes it, with config.json and the weights in
-- model.safetensors or in shards with an index, or a GGUF file (lua/models/gguf.lua).
--
--   local fields, path, read = checkpoint.open "path/to/folder, file.gguf or smollm2"
--   local layers = checkpoint.count(path, fields, "num_hidden_layers")
--   local norm = read("model.norm.weight", device, "bf16", { 256 })
local arguments = require "kvlab.arguments"
local downloads = require "kvlab.downloads"
local gguf = require "models.gguf"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local options = require "kvlab.options"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"

local M = {}

--- Raises for a field that a family cannot run. path: where it stands.
function M.refuse(path, field, got, expected)
  error(("%s: %s is %s, expected %s"):format(path, field, tostring(got), expected), 0)
end

local SIZE_MAX = 2 ^ 24 -- of anything that a config counts

--- The field of a config that has to be a whole number from 1 to SIZE_MAX.
---@return integer
function M.count(path, fields, name)
  local value = fields[name]
  if type(value) ~= "number" or not (value >= 1 and value <= SIZE_MAX)
    or value % 1 ~= 0 then
    M.refuse(path, name, value, ("a whole number from 1 to %d"):format(SIZE_MAX))
  end
  return value
end

--- The field of a config that has to be a number > 0.
---@return number
function M.positive(path, fields, name)
  local value = fields[name]
  if type(value) ~= "number" or not (value > 0 and value < math.huge) then
    M.refuse(path, name, value, "a number > 0")
  end
  return value
end

--- The JSON object in the text of a file, without its nulls.
local function object_of(path, text)
  local ok, fields = pcall(json.decode, text)
  if not ok or type(fields) ~= "table" then
    error(("%s: %s"):format(path, ok and "no JSON object" or fields), 0)
  end
  for key, value in pairs(fields) do
    if value == json.null then fields[key] = nil end
  end
  return fields
end

--- Raises for a path with no model. problem: what is wrong, with the path.
local function refuse_path(path, problem)
  local hint = ""
  for _, name in ipairs(files.real(path) and files.list(path) or {}) do
    if name:find "%.gguf$" then hint = (" %s holds %s."):format(path, name) end
  end
  error(("%s.%s A model is a folder with config.json and its weights, a file that ends "
    .. "with .gguf, or a name that ./kvlab get fetches: %s"):format(problem, hint,
    table.concat(sorted.keys(downloads.CATALOGUE), ", ")), 0)
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

--- The function that gives the file of a tensor: the one file, or a shard of the index.
local function open_files(folder)
  local index_path = folder .. "/model.safetensors.index.json"
  local index = sources.read(index_path)
  if not index then
    local file = opened(kv.safetensors, folder .. "/model.safetensors")
    return function() return file end
  end
  local map, shards = object_of(index_path, index).weight_map, {}
  if type(map) ~= "table" then
    M.refuse(index_path, "weight_map", map, "a table of tensors' files")
  end
  return function(name)
    local shard = map[name] or error(("%s: no tensor \"%s\" in the index"):format(folder,
      name), 0)
    if type(shard) ~= "string" or shard:find "[/%z]" then
      M.refuse(folder, "shard of " .. name, shard, "a plain file name")
    end
    shards[shard] = shards[shard] or opened(kv.safetensors, folder .. "/" .. shard)
    return shards[shard]
  end
end

--- Opens the weights of a folder.
---@param folder string
---@return function read  read(name, device, dtype, shape): a tensor, cast to dtype; its
--                        shape is checked
function M.weights(folder)
  local file_of = open_files(folder)
  return function(name, ...) return file_of(name):read(name, ...) end
end

--- The path of a checkpoint. A name without a slash that ./kvlab get knows, such as
-- "smollm2", is the file that it has fetched, unless a folder here has that name; raises
-- if it was not fetched. Any other name is a path already.
---@param name string
---@return string path
function M.find(name)
  if not downloads.CATALOGUE[name] or files.real(name) then return name end
  return downloads.find(name) or error(("%s is not on this machine; this fetches it: "
    .. "./kvlab get %s"):format(name, name), 0)
end

--- Opens a checkpoint.
---@param name string  a folder, a file that ends with .gguf, or a name as find takes it
---@return table fields     as a config.json has them
---@return string path      where they stand, for errors
---@return function read    see weights
---@return function|nil unread  of a GGUF file: the name of a tensor that was not read yet
function M.open(name)
  local path = M.find(name)
  if not path:find "%.gguf$" then
    local fields, where = M.config(path)
    return fields, where, M.weights(path)
  end
  local file = M.gguf(path)
  local fields = gguf.config(file)
  return fields, path, gguf.weights(file, fields)
end

--- The model_type of a checkpoint, in the words of a config.json.
---@param name string  see open
---@return string
function M.model_type(name)
  local path = M.find(name)
  if not path:find "%.gguf$" then return (M.config(path)).model_type end
  local file = M.gguf(path)
  local fields = gguf.config(file)
  file:close()
  return fields.model_type
end

--- Random weights under any name, read like those of a folder. Norms are 1, biases are 0,
-- and a product with a matrix keeps the size of its input.
---@param seed integer
---@return function read
function M.random_weights(seed)
  local drawn = 0
  return function(name, device, dtype, shape)
    if #shape == 1 then
      return kv.full(device, dtype, shape, name:find "norm" and 1 or 0)
    end
    drawn = drawn + 1
    return kv.randn(device, dtype, shape,
      { seed = seeds.derive(seed, drawn), std = shape[2] ^ -0.5 })
  end
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

local FIELD = { fields = options.table, name = options.string }
arguments.functions(M, "checkpoint", {
  count = FIELD, positive = FIELD, config = { folder = options.string },
  gguf = { path = options.string },
  weights = { folder = options.string }, find = { name = options.string },
  open = { name = options.string }, model_type = { name = options.string },
  random_weights = { seed = options.integer },
  stack = { get = options.callable, names = options.list_of(options.string, 1),
            rows = options.list_of(options.count),
            columns = options.optional(options.count) },
})

return M
