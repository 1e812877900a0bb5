--- What `?name` prints: the doc comment above the function or value in the sources, so
-- that no text is written twice. Lua functions are found by debug.getinfo, C functions
-- in kvlab.h.
local arguments = require "kvlab.arguments"
local inspect = require "kvlab.shell.repl.inspect"
local library = require "kvlab.library"
local named = require "kvlab.named"
local hint = require("kvlab.words").hint
local sorted = require "kvlab.sorted"

local M = {}

---@param path string
---@return string[]|nil lines
function M.read_lines(path)
  local file = io.open(path)
  if not file then return nil end
  local lines = {}
  for line in file:lines() do lines[#lines + 1] = line end
  file:close()
  return lines
end

local function is_comment(line) return line and line:find "^%s*%-%-" ~= nil end

--- A block of Lua comment lines as text: without dashes, @param as a list.
local function comment_text(lines, first, last)
  local out = {}
  for i = first, last do
    local text = lines[i]:gsub("^%s*%-%-+ ?", "")
    text = text:gsub("^@param%s+(%S+)%s+", "  %1: "):gsub("^@return%s+", "  returns ")
      :gsub("^@field%s+(%S+)%s+", "  .%1: "):gsub("^@class%s+", "class ")
    if not lines[i]:find "^%-%-%s*%-%-%-%- " then out[#out + 1] = text end
  end
  return table.concat(out, "\n")
end

--- The comment block that ends right above a line. A function made in a loop has it above
-- the loop, or above a line or two of preparation.
---@param lines string[]
---@param line integer
---@return string|nil
function M.comment_above(lines, line)
  local last = line - 1
  for _ = 1, 3 do
    if is_comment(lines[last]) or not (lines[last] or ""):find "%S"
       or lines[last]:find "^%s*end" then break end
    last = last - 1
  end
  if not is_comment(lines[last]) then return nil end
  local first = last
  while is_comment(lines[first - 1]) do first = first - 1 end
  return comment_text(lines, first, last)
end

--- The comment at the head of a file.
---@param lines string[]
---@return string|nil
function M.head_comment(lines)
  local last = 0
  while is_comment(lines[last + 1]) do last = last + 1 end
  return last > 0 and comment_text(lines, 1, last) or nil
end

-- ---- Lua ------------------------------------------------------------------------------

--- What runs when a value is called: a function, or the constructor of a noun such as
-- kv.policy; nil of anything else.
---@param value any
---@return function|nil
function M.function_of(value)
  if type(value) == "function" then return arguments.own(value) end
  local mt = type(value) == "table" and getmetatable(value)
  local make = mt and rawget(mt, "make")
  return make and arguments.own(make) or nil
end

--- "name(a, b)" of a Lua function.
---@param name string
---@param f function
---@return string
function M.signature(name, f)
  local words, i = {}, 1
  f = arguments.own(f)
  while debug.getlocal(f, i) do
    words[i] = debug.getlocal(f, i)
    i = i + 1
  end
  if debug.getinfo(f, "u").isvararg then words[i] = "..." end
  return ("%s(%s)"):format(name, table.concat(words, ", "))
end

local function of_function(name, f)
  f = arguments.own(f)
  local info = debug.getinfo(f, "S")
  local path = info.source:match "^@(.*)"
  if info.what == "C" or not path then
    return name .. ": a " .. (info.what == "C" and "built-in function" or
      "function typed at " .. info.short_src .. ":" .. info.linedefined)
  end
  local lines = M.read_lines(path)
  local doc = lines and M.comment_above(lines, info.linedefined)
  return ("%s\n%s\n%s:%d"):format(M.signature(name, f), doc or "(has no comment)",
    inspect.inside_root(path), info.linedefined)
end

--- The names of a table's functions in one paragraph.
local function list_functions(t)
  local names = {}
  for _, key in ipairs(sorted.keys(t)) do
    if type(t[key]) == "function" then names[#names + 1] = key end
  end
  if #names == 0 then return "" end
  return "\nfunctions: " .. table.concat(names, " "):gsub(
    ("[^ ]* ?"):rep(8), "%0\n  "):gsub("%s+$", "")
end

--- A table that is a module: the head of its file and its functions.
local function of_module(name, t)
  for module, value in pairs(package.loaded) do
    local path = value == t and package.searchpath(module, package.path)
    if path then
      local lines = M.read_lines(path)
      return ("%s\n%s%s"):format(M.head_comment(lines) or name, inspect.inside_root(path),
        list_functions(t))
    end
  end
  return name .. ": a table" .. list_functions(t)
end

-- ---- policies -------------------------------------------------------------------------

--- A policy's options with their defaults, "blocks=8 min_blocks=0".
local function options_text(name)
  local policy, words = require "kvlab.policy.policy"(name), {}
  for i, key in ipairs(policy.options) do
    words[i] = ("%s=%s"):format(key, tostring(policy[key]))
  end
  return table.concat(words, " ")
end

local function of_policy(name)
  local path = named.path_of("policies", name)
  local lines = path and M.read_lines(path)
  return lines and ('%s\noptions  %s\nkv.policy "%s"  %s'):format(
    M.head_comment(lines) or name, options_text(name), name, inspect.inside_root(path))
end

--- The first sentence of a file's head, without the name that it may begin with.
local function first_sentence(lines)
  local head = (M.head_comment(lines) or ""):gsub("\n%u%l+  .*", ""):gsub("\n", " ")
  return ((head:match "^(.-%.)%s" or head):gsub("^%u[%w -]-:%s*", ""))
end

--- Every policy with a line about it.
local function list_policies()
  local out = {}
  for i, name in ipairs(require("kvlab.policy.policy").names()) do
    local path = named.path_of("policies", name)
    out[i] = ("%-14s %s"):format(name, first_sentence(M.read_lines(path)))
  end
  out[#out + 1] = '?NAME tells more; kv.policy "NAME" makes one; '
    .. "?kv.policy is how to write one"
  return table.concat(out, "\n")
end

-- ---- C --------------------------------------------------------------------------------

local headers

--- The headers' lines: { path = from the root, lines }.
local function read_headers()
  if headers then return headers end
  headers = {}
  for i, path in ipairs(library.headers) do
    headers[i] = M.read_lines(path)
    headers[i].path = path:sub(#library.paths.root + 2)
  end
  return headers
end

--- The names in the headers that kv.C has: functions and enum values.
---@return string[]
function M.c_names()
  local names, seen = {}, {}
  for _, lines in ipairs(read_headers()) do
    for _, line in ipairs(lines) do
      for name in line:gmatch "%f[%w_](kvl_[%w_]+)%(" do seen[name] = true end
      for name in line:gsub("/%*.*", ""):gmatch "%f[%w_](KVL_[%w_]+)" do
        seen[name] = not name:find "_H$" or nil
      end
    end
  end
  for name in pairs(seen) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- First and last line of the declaration of a name in a header, or nil.
local function find_declaration(lines, name)
  for i, line in ipairs(lines) do
    local is_prototype = line:find("^[%w_ %*]-%f[%w_]" .. name .. "%(")
    local is_type = line:find("^typedef .*%f[%w_]" .. name .. "%f[^%w_]")
    if is_prototype or is_type then
      local last, depth = i, 0
      repeat
        for brace in lines[last]:gmatch "[{}]" do
          depth = depth + (brace == "{" and 1 or -1)
        end
        local code = lines[last]:gsub("/%*.-%*/", "")
        last = last + 1
      until depth == 0 and code:find ";" or last > #lines
      return i, last - 1
    end
  end
end

local function of_header(lines, name)
  local first, last = find_declaration(lines, name)
  if not first then return nil end
  local top = first
  while (lines[top - 1] or ""):find "%S" and not lines[top - 1]:find "%*/$"
    or (lines[top - 1] or ""):find "^%S.*;%s*/%*.*%*/$" do top = top - 1 end
  if (lines[top - 1] or ""):find "%*/$" then
    repeat top = top - 1 until lines[top]:find "^/%*" or top == 1
  else
    top = first
  end
  return ("%s\n%s:%d"):format(table.concat(lines, "\n", top, last), lines.path, first)
end

local function of_c(name)
  for _, lines in ipairs(read_headers()) do
    local text = of_header(lines, name)
    if text then return text end
  end
end

-- ---- names ----------------------------------------------------------------------------

--- The value that a dotted name stands for in a table; nil when there is none.
local function resolve(name, place)
  local value = place
  for part in name:gmatch "[^.:]+" do
    if value == place then -- a session's variables warn when one is missing
      value = rawget(place, part)
    elseif type(value) == "table" or type(value) == "cdata" then
      local ok, field = pcall(function(v) return v[part] end, value)
      value = ok and field or nil
    else
      return nil
    end
  end
  return value
end

--- Where names are looked for, with what is written before them.
local function places(environment)
  local kv = require "kvlab"
  return { { "", environment }, { "", _G }, { "kv.", kv }, { "kv.ops.", kv.ops },
           { "tensor:", require("kvlab.tensor.tensor").methods },
           { "device:", require("kvlab.tensor.device").methods } }
end

local function nothing(name, environment)
  local names = {}
  require("kvlab").load_all()
  for _, place in ipairs(places(environment)) do
    for key in pairs(place[2]) do names[#names + 1] = tostring(key) end
  end
  for _, more in ipairs { require("kvlab.policy.policy").names(), M.c_names() } do
    for _, key in ipairs(more) do names[#names + 1] = key end
  end
  table.sort(names)
  return nil, ("nothing is called %s%s"):format(name, hint(name:match "[^.:]*$", names))
end

--- The doc of a value that has a name.
local function of_value(name, value)
  if type(value) == "function" then return of_function(name, value) end
  local make = M.function_of(value)
  if make then return of_module(name, value) .. "\n\n" .. of_function(name, make) end
  if type(value) == "table" then return of_module(name, value) end
  return ("%s: %s"):format(name, (inspect.summary(value)))
end

--- Methods of a tensor or device: a list of all, or one of them.
local function of_methods(kind, method)
  local methods = require("kvlab.tensor." .. kind).methods
  if method == "" then
    local maker = of_function("kv." .. kind, require("kvlab")[kind])
    return maker .. list_functions(methods):gsub("functions:", "methods:")
  end
  return methods[method] and of_function(kind .. ":" .. method, methods[method])
end

--- The doc of a name: of a policy, of something in the session, in kv, kv.ops or among
-- the methods of a tensor or device, or of the C library.
---@param name string         kv.randn, tensor:topk, quest, kvl_topk, policy
---@param environment table   the session's variables
---@return string|nil text, string|nil reason
function M.text(name, environment)
  name = name:gsub("[(%s].*", "")
  if name == "policy" or name == "policies" then return list_policies() end
  local c_name = name:match "^kv%.C%.(.*)" or name:match "^kvl_[%w_]+$"
  if c_name then
    local text = of_c(c_name)
    if text then return text end
  end
  local kind, method = name:match "^(%l+)[.:]?(.*)$"
  if kind == "tensor" or kind == "device" then
    local text = of_methods(kind, method)
    if text then return text end
  end
  for i, place in ipairs(places(environment)) do
    local value = resolve(name, place[2])
    if value ~= nil then return of_value(place[1] .. name, value) end
    local policy = i == 2 and name:find "^[%w_]+$" and of_policy(name)
    if policy then return policy end
  end
  return nothing(name, environment)
end

return M
