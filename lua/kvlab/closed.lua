--- Closed objects: every use of one raises "the NAME is closed", but closing it once more
-- does nothing.
local fail = require("kvlab.options").fail

local function nothing() end

--- The metatable of closed objects of one name, made at the first one.
local classes = {}
local function class_of(name)
  local words = ("the %s is closed"):format(name)
  local class = { __index = function(_, key)
    if key == "close" then return nothing end
    return fail(words)
  end, __newindex = function() fail(words) end }
  classes[name] = class
  return class
end

--- Turns `object`, whose memory and handles are given back already, into a closed one.
-- Its fields are dropped, so the collector can free what they held.
---@param object table
---@param name string   what it is: "cache"
return function(object, name)
  for key in pairs(object) do object[key] = nil end
  return setmetatable(object, classes[name] or class_of(name))
end
