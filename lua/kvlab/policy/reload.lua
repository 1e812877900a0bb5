--- kv.reload: reads a module's file again in a running session.
local hint = require("kvlab.words").hint
local sorted = require "kvlab.sorted"

--- Reads the file of a module again, such as a policy that was just edited. From then on
-- `require` and `kv.policy` give the new module. Objects that were made before keep the
-- old code: an attached policy stays unchanged, with its summaries, until a new one is
-- opened and attached in its place. If the file has an error, the old module stays and
-- the error is raised. Modules that declare C types (most of kvlab.*) cannot be read
-- twice.
---@param name string  as for require: "policies.quest"
---@return any         # what the module returns
return function(name)
  if type(name) ~= "string" then
    error(("name is a %s, expected that of a module"):format(type(name)), 2)
  end
  local before = package.loaded[name]
  if before == nil and not package.searchpath(name, package.path) then
    local names = sorted.keys(package.loaded)
    for _, policy in ipairs(require("kvlab.policy.policy").names()) do
      names[#names + 1] = "policies." .. policy
    end
    error(("no module \"%s\"%s"):format(name,
      hint(name, names, "; did you mean \"%s\"?")), 2)
  end
  package.loaded[name] = nil
  local ok, result = pcall(require, name)
  if not ok then
    package.loaded[name] = before
    error((tostring(result):gsub("^error loading module [^\n]*\n%s*", "")), 2)
  end
  return result
end
