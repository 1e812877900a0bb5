--- The completions that Tab offers for the text before the cursor: fields and methods of
-- live values, names inside strings that a call takes (policies, models, dtypes, formats,
-- devices, modules, files), and the options of the policy that is being opened.
local downloads = require "kvlab.downloads"
local files_of = require "kvlab.files"
local help = require "kvlab.shell.repl.help"
local library = require "kvlab.library"
local pages = require "kvlab.tensor.pages"
local sorted = require "kvlab.sorted"

local M = {}

local KEYWORDS = { "and", "break", "do", "else", "elseif", "end", "false", "for",
  "function", "goto", "if", "in", "local", "nil", "not", "or", "repeat", "return", "then",
  "true", "until", "while" }

--- Those of `names` that begin with `stem`, sorted, each once.
local function matching(names, stem)
  local found, seen = {}, {}
  for _, name in ipairs(names) do
    if type(name) == "string" and name:sub(1, #stem) == stem and not seen[name] then
      seen[name] = true
      found[#found + 1] = name
    end
  end
  table.sort(found)
  return found
end

-- ---- strings --------------------------------------------------------------------------

--- The string that is open at the end of the text: what stands before it and its content;
-- nil when none is.
local function open_string(text)
  local quote, start
  local i = 1
  while i <= #text do
    local c = text:sub(i, i)
    if quote then
      if c == "\\" then i = i + 1 elseif c == quote then quote = nil end
    elseif c == '"' or c == "'" then
      quote, start = c, i
    elseif text:sub(i, i + 1) == "--" then
      return nil
    end
    i = i + 1
  end
  if quote then return text:sub(1, start - 1), text:sub(start + 1), quote end
end

local function dtypes() return sorted.keys(library.dtypes) end

local function formats() return pages.NAMES end
local function policies() return require("kvlab.policy.policy").names() end
local function evictions() return require("kvlab.policy.eviction").names() end
local function devices() return { "auto", "cpu", "cuda", "cuda:0" } end

--- Names of Lua modules in lua/kvlab and in the folders beside it.
local function modules()
  local names = { "kvlab" }
  for _, folder in ipairs { "kvlab", "policies", "splits", "priorities",
                            "evictions", "models" } do
    for _, file in ipairs(files_of.list(library.paths.root .. "/lua/" .. folder)) do
      local name = file:match "^(.*)%.lua$"
      if name then names[#names + 1] = folder .. "." .. name end
    end
  end
  return names
end

--- Files and folders that a path begins.
local function files(stem)
  local folder, start = stem:match "^(.*/)(.-)$"
  folder, start = folder or "", start or stem
  local line = files_of.shell_line { "ls", "-Ap", "--", folder == "" and "." or folder }
  local list, names = io.popen(line .. " 2>/dev/null"), {}
  for name in list:lines() do
    if start ~= "" or name:sub(1, 1) ~= "." then names[#names + 1] = folder .. name end
  end
  list:close()
  return matching(names, folder .. start)
end

--- Models that ./kvlab get can fetch, and paths.
local function models(stem)
  local names = stem ~= "" and files(stem) or {}
  for name in pairs(downloads.CATALOGUE) do names[#names + 1] = name end
  return names
end

-- What may stand in a string, by what stands before it.
local EXPECTED = {
  { "kv%.model%s*%(?%s*$", models },
  { "kv%.policy%s*%(?%s*$", policies }, { "policy%s*=%s*$", policies },
  { "kv%.eviction%s*%(?%s*$", evictions }, { "evict%s*=%s*$", evictions },
  { "format%s*=%s*$", formats }, { "codec%s*=%s*$", formats },
  { "dtype%s*=%s*$", dtypes }, { ":cast%s*%(?%s*$", dtypes },
  { "dtype_bytes%s*%(?%s*$", dtypes },
  { "kv%.[%l_]+%s*%([^(),]*,%s*$", dtypes }, -- kv.randn(dev, "
  { "device%s*%(?%s*$", devices }, { "device%s*=%s*$", devices },
  { ":to%s*%(?%s*$", devices }, { "kv%.[%l_]+%s*%(%s*$", devices },
  { "require%s*%(?%s*$", modules }, { "kv%.reload%s*%(?%s*$", modules },
}

local function in_string(before, stem, quote)
  for _, expected in ipairs(EXPECTED) do
    if before:find(expected[1]) then
      return stem, matching(expected[2](stem), stem), quote
    end
  end
  local paths = files(stem)
  local is_folder = #paths == 1 and paths[1]:sub(-1) == "/"
  return stem, paths, not is_folder and quote or nil
end

-- ---- options, fields, names -----------------------------------------------------------

--- Options of the policy whose table is open: kv.policy("quest", { ra
local function policy_options(text)
  local name, inside = text:match "kv%.policy%s*%(%s*['\"]([%w_]+).%s*,%s*{([^{}]*)$"
  local stem = inside and (" " .. inside):match "[%s,]([%a_]*)$"
  local ok, policy = pcall(require "kvlab.policy.policy", name)
  if not stem or not ok then return nil end
  local names = { "ratio", "tokens", "blocks", "split", unpack(policy.options) }
  return stem, matching(names, stem), " = "
end

local METHODS = {
  tensor = function() return require("kvlab.tensor.tensor").methods end,
  device = function() return require("kvlab.tensor.device").methods end,
}

local function is_device(value)
  return tostring(require("ffi").typeof(value)):find "kvl_device" ~= nil
end

--- The names that may follow `value.` or `value:`.
local function fields(value, separator)
  local names = {}
  local function add(t)
    for key, field in pairs(t) do
      if separator == "." or type(field) == "function" then names[#names + 1] = key end
    end
  end
  if value == library.C then return help.c_names() end
  if type(value) == "string" then add(string)
  elseif require("kvlab.tensor.tensor").is_tensor(value) then add(METHODS.tensor())
  elseif type(value) == "cdata" and is_device(value) then add(METHODS.device())
  elseif type(value) == "table" then
    if value == require "kvlab" then value.load_all() end
    add(value)
    local meta = getmetatable(value)
    local class = type(meta) == "table" and meta.__index
    if type(class) == "table" then add(class) end
  end
  return names
end

--- The value of a path like a.b or t:narrow's t, without calling anything.
local function walk(path, environment)
  local value, is_first = environment, true
  for name in path:gmatch "[%a_][%w_]*" do
    if is_first then
      value = rawget(environment, name)
      if value == nil then value = rawget(_G, name) end
    elseif type(value) == "table" then
      value = value[name]
    else
      return nil
    end
    is_first = false
  end
  return value
end

local function globals(environment)
  local names = { unpack(KEYWORDS) }
  for key in pairs(environment) do names[#names + 1] = key end
  for key in pairs(_G) do names[#names + 1] = key end
  return names
end

--- The documented names after `?`.
local function topics(environment)
  local names = globals(environment)
  for _, name in ipairs(policies()) do names[#names + 1] = name end
  for _, name in ipairs { "policy", "tensor", "device" } do names[#names + 1] = name end
  for _, name in ipairs(help.c_names()) do names[#names + 1] = name end
  return names
end

--- Candidates for the word before the cursor.
---@param before string       the line up to the cursor
---@param environment table   the session's variables
---@param commands string[]   names after `:`
---@return string stem, string[] candidates, string|nil suffix  what follows the only one
function M.candidates(before, environment, commands)
  local command = before:match "^%s*:(%w*)$"
  if command then return command, matching(commands, command), " " end
  local text, stem, quote = open_string(before)
  if text then return in_string(text, stem, quote) end
  local options_stem, options, suffix = policy_options(before)
  if options_stem then return options_stem, options, suffix end
  local path, separator, field = before:match "([%a_][%w_%.]*)([.:])([%w_]*)$"
  if path then
    if METHODS[path] and before:find "^%s*%?" then
      return field, matching(sorted.keys(METHODS[path]()), field)
    end
    return field, matching(fields(walk(path, environment), separator), field)
  end
  stem = before:match "[%a_]?[%w_]*$"
  if before:find "[.:]%s*$" then return "", {} end
  if before:find "^%s*%?%s*[%w_]*$" then
    return stem, matching(topics(environment), stem)
  end
  if before:find "^%s*%$" then
    stem = before:match "[^%s$]*$"
    return stem, files(stem)
  end
  if stem == "" then return "", {} end
  return stem, matching(globals(environment), stem)
end

return M
