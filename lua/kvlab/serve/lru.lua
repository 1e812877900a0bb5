--- A set of keys in the order of their last use.
local M = {}

---@class kvlab.Lru
---@field count integer
---@field oldest any|nil   the key that was used least recently
---@field newest any|nil
local Lru = {}
Lru.__index = Lru

---@return kvlab.Lru
function M.new()
  return setmetatable({ count = 0, newer = {}, older = {}, there = {} }, Lru)
end

function Lru:has(key) return self.there[key] ~= nil end

--- Adds a key that is not in the set, as the newest.
function Lru:add(key)
  local last = self.newest
  if last ~= nil then
    self.newer[last], self.older[key] = key, last
  else
    self.oldest = key
  end
  self.newest, self.there[key] = key, true
  self.count = self.count + 1
end

--- Removes a key that is in the set.
function Lru:remove(key)
  local before, after = self.older[key], self.newer[key]
  if before ~= nil then self.newer[before] = after else self.oldest = after end
  if after ~= nil then self.older[after] = before else self.newest = before end
  self.older[key], self.newer[key], self.there[key] = nil, nil, nil
  self.count = self.count - 1
end

--- Makes a key that is in the set the newest.
function Lru:touch(key)
  if self.newest == key then return end
  self:remove(key)
  self:add(key)
end

return M
