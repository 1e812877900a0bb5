--- How many blocks of a trace's requests were there before, counted from the file's text:
-- no scheduler, no cache, no JSON library. With memory without limits that is what a
-- server must find, in whatever order it serves them: it computes each block once.
local M = {}

--- Blocks asked for and found: of each request the full 512-token blocks of all tokens
-- but its last; found: those before the first that no earlier request had.
---@param path string
---@param limit? integer  lines to read
function M.count(path, limit)
  local asked, found, seen, n = 0, 0, {}, 0
  for line in io.lines(path) do
    n = n + 1
    if limit and n > limit then break end
    local length = tonumber(line:match '"input_length": *(%d+)')
    local ids, missed = {}, false
    local list = line:match '"hash_ids": *%[([^%]]*)%]'
    for id in list:gmatch "%d+" do ids[#ids + 1] = id end
    for i = 1, math.floor((length - 1) / 512) do
      asked = asked + 1
      missed = missed or not seen[ids[i]]
      if not missed then found = found + 1 end
    end
    for i = 1, math.floor(length / 512) do seen[ids[i]] = true end
  end
  return asked, found
end

return M
