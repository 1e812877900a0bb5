--- What a rendering may cost. A template is a program that somebody else wrote: what it
-- computes and writes is counted, and too much of it is an error before memory or time
-- run out.
local rest = require("kvlab.slices").rest

local M = {}

M.STEPS = 2 ^ 22   -- values that are computed; 256 bytes of text count as one
M.BYTES = 2 ^ 27   -- of one text, as many as a tokenizer takes
M.DEPTH = 200      -- of nested calls, blocks and values

local steps

--- Begins to count anew.
function M.start() steps = 0 end

--- Counts steps.
---@param n integer
function M.spend(n)
  steps = steps + n
  if steps > M.STEPS then
    error(("takes more than %d steps"):format(M.STEPS), 0)
  end
end

--- Lets a task wait for its next slice. Others may render in the meantime.
function M.rest()
  local mine = steps
  rest()
  steps = mine
end

--- Counts a text that is about to be made.
---@param bytes integer
function M.write(bytes)
  if bytes > M.BYTES then
    error(("makes a text of more than %d bytes"):format(M.BYTES), 0)
  end
  M.spend(1 + math.floor(bytes / 256))
end

M.start()

return M
