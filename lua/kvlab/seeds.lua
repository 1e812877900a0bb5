--- Seeds: which seed is in force, and other seeds that are derived from it. `--seed` is
-- in force unless an experiment computes a row; then it is the seed of that row.
local command_line = require "kvlab.command_line"

local M = {}

local of_row -- the seed of the row that an experiment computes

--- Puts the seed of a row in force; nil: that of the command line.
---@param seed? integer
function M.use(seed) of_row = seed end

--- The seed in force: what a policy's option `seed` is unless it is given.
---@return integer
function M.current() return of_row or command_line.seed end

--- The n-th seed that is derived from a seed; seeds of neighbouring n, or of neighbouring
-- seeds, have nothing in common. A hash to 32 bits (MurmurHash3's finaliser), because
-- users add small numbers to a seed.
---@param seed integer
---@param n integer
---@return integer
function M.derive(seed, n)
  local x = (seed * 0x9e3779b1ULL + n) % 2 ^ 32
  for _, step in ipairs { { 16, 0x85ebca6bULL }, { 13, 0xc2b2ae35ULL }, { 16, 1ULL } } do
    x = bit.bxor(x, bit.rshift(x, step[1])) * step[2] % 2 ^ 32
  end
  return tonumber(x)
end

return M
