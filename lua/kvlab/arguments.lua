--- Checks single arguments of functions and methods before they run. A file says once, at
-- its end, what each of its documented functions expects, by the parameter's name:
--
--   arguments.methods(Tally, "a tally", {
--     put = { seq = objects.sequence, layer = options.whole, values = kinds.tensor },
--   })
--   arguments.functions(M, "table", { where = { rows = ROWS } })
--
-- A wrong argument raises "put: layer is nil, expected a whole number >= 0" on the
-- caller's line. A method that is called with `.` in place of `:` raises as well. A check
-- is one comparison and allocates nothing, so functions that run in every step can have
-- checks, too. Tables of options are checked by kvlab.options.
local options = require "kvlab.options"

local M = {}

local SOURCE = debug.getinfo(1, "S").source -- so that errors are not blamed on this file
local own = setmetatable({}, { __mode = "k" }) -- checked function -> the function that it
                                               -- checks arguments for

--- The function that a checked function calls, which has the source lines and the
-- comment; a function without checks is returned as it is.
---@param fn function
---@return function
function M.own(fn) return own[fn] or fn end

--- The names of a function's parameters, and whether `...` comes after them.
local function parameters(fn)
  local names, info = {}, debug.getinfo(fn, "u")
  for i = 1, info.nparams do names[i] = debug.getlocal(fn, i) end
  return names, info.isvararg
end

local function refuse(what, name, value, known)
  options.fail(("%s: %s %s"):format(what, name, options.problem(value, known[name])))
end

--- The text of a function that checks and then calls fn. The call is a tail call, so it
-- adds no frame, and fn sees the same caller as without the check. Objects of the class
-- itself (not of a derived class) are recognised by one comparison.
local function text_of(names, is_vararg, known, has_class)
  local list, tests, checks = {}, { "fn, what, known, class, getmetatable, refuse" }, {}
  for i, name in ipairs(names) do
    list[i], tests[i + 1] = "p" .. i, "is_" .. i
    if known[name] then
      local is_self = has_class and name == "self"
      checks[#checks + 1] = ("if %snot is_%d(p%d) then refuse(what, %q, p%d, known) end")
        :format(is_self and "getmetatable(p1) ~= class and " or "", i, i, name, i)
    end
  end
  if is_vararg then list[#list + 1] = "..." end
  local arguments = table.concat(list, ", ")
  return ("local %s = ...\nreturn function(%s)\n%s\nreturn fn(%s)\nend"):format(
    table.concat(tests, ", "), arguments, table.concat(checks, "\n"), arguments)
end

--- A function that checks its arguments and then does what fn does.
---@param what string  the function, as errors begin: "put"
---@param fn function
---@param known table<string, kvlab.OptionKind>  by the names of fn's parameters
---@param class? table  of self, if self is checked
---@return function
function M.of(what, fn, known, class)
  local names, is_vararg = parameters(fn)
  local tests, has = {}, {}
  for i, name in ipairs(names) do
    tests[i], has[name] = known[name] and known[name][2] or false, true
  end
  for name in pairs(known) do
    if not has[name] then error(("%s has no parameter %s"):format(what, name), 2) end
  end
  local text = text_of(names, is_vararg, known, class ~= nil)
  local make = assert(loadstring(text, SOURCE))
  local checked = make(fn, what, known, class, getmetatable, refuse,
    unpack(tests, 1, #tests))
  own[checked] = fn
  return checked
end

--- Replaces functions of a table by checked ones.
---@param functions table
---@param prefix string  what errors begin with: "table", then a dot and the name
---@param all table<string, table<string, kvlab.OptionKind>>
function M.functions(functions, prefix, all)
  for name, known in pairs(all) do
    local what = prefix == "" and name or prefix .. "." .. name
    functions[name] = M.of(what, functions[name], known)
  end
end

--- Whether an object's class is `class` or is derived from it. Raises for an object that
-- is closed.
local function is_of(object, class)
  if type(object) ~= "table" then return false end
  local _ = object[class] -- a closed object raises whatever is read
  local own_class = getmetatable(object)
  while own_class do
    if own_class == class then return true end
    local parent = getmetatable(own_class)
    own_class = parent and (parent.__index == class and class or parent)
  end
  return false
end

--- Replaces the methods of a class by checked ones: those in `all` check these arguments,
-- and every method checks that it is called on an object of the class.
---@param class table
---@param words string  "a tally"
---@param all table<string, table<string, kvlab.OptionKind>>
function M.methods(class, words, all)
  local self = { words .. "; call it as object:method(...)", function(x)
    return is_of(x, class)
  end }
  for name in pairs(all) do
    if not class[name] then error(("%s has no method %s"):format(words, name), 2) end
  end
  for name, fn in pairs(class) do
    if type(fn) == "function" and name:sub(1, 2) ~= "__" then
      local known = {}
      for parameter, kind in pairs(all[name] or {}) do known[parameter] = kind end
      known.self = parameters(fn)[1] == "self" and self or nil
      if next(known) then class[name] = M.of(name, fn, known, class) end
    end
  end
end

--- Replaces the methods of a C type by ones that check what they are called on.
---@param methods table<string, function>
---@param words string  "a tensor"
---@param is fun(x: any): boolean
---@return table methods
function M.receivers(methods, words, is)
  local kind = { words .. "; call it as object:method(...)", is }
  for name, fn in pairs(methods) do
    local first = parameters(fn)[1]
    methods[name] = M.of(name, fn, { [first] = kind })
  end
  return methods
end

return M
