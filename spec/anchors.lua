--- Headings and links of Markdown pages. The name of a heading's anchor is made as GitHub
-- makes it: letters become small, all but letters, digits, - and _ goes, a space becomes
-- a hyphen, and a name that was there before gets a number.
local M = {}

--- The lines of a page that are in no code block and no comment.
local function text_lines(lines)
  local list, is_code, is_comment = {}, false, false
  for _, line in ipairs(lines) do
    if line:find "^```" then is_code = not is_code end
    if not is_code and line:find "^<!%-%-" then is_comment = true end
    if not is_code and not is_comment and not line:find "^```" then
      list[#list + 1] = line
    end
    if line:find "%-%->%s*$" then is_comment = false end
  end
  return list
end

--- The anchor of a heading. used: the names that the page has so far, which it adds to.
---@param heading string
---@param used table<string, integer>
---@return string
function M.name(heading, used)
  local name = heading:lower():gsub("[^%w%-_ \128-\255]", "")
  for _, symbol in ipairs { "×", "·", "–", "…", "≡", "→" } do
    name = name:gsub(symbol, "")
  end
  name = name:gsub(" ", "-")
  local count = used[name]
  used[name] = (count or 0) + 1
  return count and ("%s-%d"):format(name, count) or name
end

--- The anchors of a page, as keys.
---@param lines string[]
---@return table<string, boolean>
function M.of(lines)
  local anchors, used = {}, {}
  for _, line in ipairs(text_lines(lines)) do
    local heading = line:match "^#+ (.-)%s*$"
    if heading then anchors[M.name(heading, used)] = true end
  end
  return anchors
end

--- The targets of a page's links, without those that lead to other sites.
---@param lines string[]
---@return string[]
function M.links(lines)
  local links = {}
  local text = table.concat(text_lines(lines), "\n"):gsub("`[^`\n]*`", "")
  for target in text:gmatch "%]%(([^)%s]+)%)" do
    if not target:find "^%a+:" then links[#links + 1] = target end
  end
  return links
end

return M
