--- The verb `new`: writes a working policy, eviction or experiment, to begin from.
--
--   kvlab new policy NAME       ./policies/NAME.lua
--   kvlab new eviction NAME     ./evictions/NAME.lua
--   kvlab new experiment NAME   ./experiments/NAME.lua
--
-- With --path=DIR it writes into DIR. The templates are new_policy.txt, new_eviction.txt
-- and new_experiment.txt, in which NAME stands for the name.
local files = require "kvlab.files"
local named = require "kvlab.named"

local M = {}

local HERE = debug.getinfo(1, "S").source:match "^@(.*)new%.lua$"

-- What to type next.
local NEXT = {
  policy = "kvlab test policy %s   holds it to what every policy owes\n"
    .. "kvlab time quest,%s   times it beside quest\n",
  eviction = 'offload = { hot_slots = 512, evict = "NAME" }   is how a cache gets it\n',
  experiment = "kvlab run %s --quick   runs a small version\n",
}

--- The kinds of files that can be written.
M.KINDS = { "policy", "eviction", "experiment" }

--- Where each kind lies.
M.FOLDERS = { policy = "policies", eviction = "evictions", experiment = "experiments" }

--- Writes a template. Raises when the file exists, or the name is not valid.
---@param kind string   one of KINDS
---@param name string
---@param root string   the folder with policies/, evictions/ and experiments/
function M.main(kind, name, root)
  local is_experiment = kind == "experiment"
  if not name:find(is_experiment and "^[%w_]+$" or "^[%a_][%w_]*$") then
    error(("new: the name is \"%s\", expected letters, digits and _%s"):format(name,
      is_experiment and "" or ", and no digit first"), 0)
  end
  local folder = ("%s/%s"):format(root, M.FOLDERS[kind])
  local path = ("%s/%s.lua"):format(folder, name)
  if files.read(path) then error(("new: %s exists"):format(path), 0) end
  local other = kind ~= "experiment" and named.path_of(M.FOLDERS[kind], name)
  if other then
    error(("new: there is %s %s already, %s; choose another name"):format(
      kind == "policy" and "a policy" or "an eviction", name, other), 0)
  end
  files.make_folder(folder)
  local template = assert(files.read(("%snew_%s.txt"):format(HERE, kind)))
  files.write(path, (template:gsub("NAME", name)))
  io.write(path, "\n", (NEXT[kind]:gsub("%%s", function() return path end)
    :gsub("NAME", name)))
  return 0
end

return M
