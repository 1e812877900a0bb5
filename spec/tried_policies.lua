--- The policies that a spec tries: all that kv.policy.names lists, or the one whose file
-- `kvlab test policy FILE` names. That verb runs the specs whose names have the tag
-- #policy, in the files that lua/kvlab/shell/cli.lua lists.
local kv = require "kvlab"
local rig = require "spec.rig"

local M = {}

--- The name of the one policy that is tried, or nil.
M.own = nil

local path = kv.command_line.policy
if path then M.own = require "kvlab.shell.policy_file"(path) end

--- The names of the policies to try, without those that evict tokens.
---@param phase string|nil  "prefill" or "decode": only those that select in it
---@return string[]
function M.names(phase)
  local names = {}
  for _, name in ipairs(M.own and { M.own } or kv.policy.names(phase)) do
    local policy = kv.policy(name)
    if not policy.evict and (not phase or policy[phase]) then names[#names + 1] = name end
  end
  return names
end

--- The names of the policies to try that evict tokens. Without duo, which needs to know a
-- model's heads; it has a spec of its own.
---@return string[]
function M.evicting()
  local names = {}
  for _, name in ipairs(kv.policy.names "evict") do
    if name ~= "duo" then names[#names + 1] = name end
  end
  if not M.own then return names end
  return kv.policy(M.own).evict and { M.own } or {}
end

--- Whether a policy selects or attends in its own way, and so may read every block
-- without a selection.
function M.may_read_all(name)
  local policy, plain = kv.policy(name), kv.policy "block_mean"
  return policy.select_blocks ~= plain.select_blocks
    or policy.compute_decode ~= plain.compute_decode
end

--- Whether a graph can record the policy. Some know only after init.
function M.is_eager(name)
  local its_rig = rig.new(kv.device "cpu", { policy = name })
  local is_eager = its_rig.policy.eager
  its_rig.cache:close()
  return is_eager or false
end

return M
