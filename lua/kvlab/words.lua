--- Spelling for error messages: the known name that is nearest to a misspelt one.
local M = {}

local LETTERS_MOST = 64 -- of a word; no name is as long, and the time grows with both
                        -- lengths

--- Edit distance: letters to insert, delete or replace, and neighbours to swap.
local function distance(a, b)
  local before, row = {}, {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local above = row
    row = { [0] = i }
    for j = 1, #b do
      local x, y = a:byte(i), b:byte(j)
      row[j] = math.min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x == y and 0 or 1))
      if i > 1 and j > 1 and x == b:byte(j - 1) and y == a:byte(i - 1) then
        row[j] = math.min(row[j], before[j - 2] + 1)
      end
    end
    before = above
  end
  return row[#b]
end

--- The name in `names` with the smallest edit distance to `word`; the first of equals.
---@param word string
---@param names string[]
---@return string|nil name      nil when there are no names
---@return integer|nil distance
function M.nearest(word, names)
  local best, best_distance
  word = word:sub(1, LETTERS_MOST)
  for _, name in ipairs(names) do
    local d = distance(word, name)
    if not best or d < best_distance then best, best_distance = name, d end
  end
  return best, best_distance
end

--- What an error adds for a word that is misspelt: "; did you mean quest?", or nothing
-- where more than a third of the letters differ.
---@param word any
---@param names string[]
---@param form? string  of the hint, "; did you mean %s?"
---@return string
function M.hint(word, names, form)
  if type(word) ~= "string" then return "" end
  local near, far = M.nearest(word, names)
  if not near or far > math.max(#word, #near) / 3 then return "" end
  return (form or "; did you mean %s?"):format(near)
end

return M
