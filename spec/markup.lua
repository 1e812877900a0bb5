--- Reads a page or a picture as a browser would, strictly: raises on a tag that is not
-- closed where it should be, an attribute without quotes or twice, a bare & or <, two
-- elements of one id, and a reference to an id that is not there.
local M = {}

-- HTML elements without content; an SVG element says it with "/>".
local VOID = { meta = true, br = true, img = true, link = true }
local RAW = { script = true, style = true } -- what is inside is no markup

local function fail(text, at, fmt, ...)
  local _, line = text:sub(1, at):gsub("\n", "")
  error(("line %d: %s"):format(line + 1, fmt:format(...)), 0)
end

local function check_text(text, from, to)
  local part = text:sub(from, to)
  for at, entity in part:gmatch "()&([^;%s&]*;?)" do
    if not (entity:match "^%a+;$" or entity:match "^#%d+;$") then
      fail(text, from + at, "&%s is no entity", entity)
    end
  end
end

--- The attributes of a tag's inside.
local function read_attributes(text, at, inside)
  local attributes, rest = {}, inside
  while rest:find "%S" do
    local name, quote, after = rest:match "^%s*([%w:_-]+)%s*=%s*([\"'])()"
    if not name then fail(text, at, "%q is no attribute", rest) end
    local value, stop = rest:match("^([^" .. quote .. "]*)" .. quote .. "()", after)
    if not value then fail(text, at, "%s has no second quote", name) end
    if attributes[name] then fail(text, at, "%s is there twice", name) end
    check_text(value, 1, -1)
    attributes[name], rest = value, rest:sub(stop)
  end
  return attributes
end

--- Where the tag that begins at `at` ends: a > inside of quotes is a letter.
local function find_end(text, at)
  local quote
  for i = at + 1, #text do
    local letter = text:sub(i, i)
    if quote then
      if letter == quote then quote = nil end
    elseif letter == "\"" or letter == "'" then
      quote = letter
    elseif letter == ">" then
      return i
    end
  end
  fail(text, at, "a tag does not end")
end

local function check_references(elements)
  local ids, outer = {}, {}
  for _, e in ipairs(elements) do
    local id = e.attributes.id
    if id and ids[id] then error(("two elements have the id %s"):format(id), 0) end
    if id then ids[id] = true end
  end
  for _, e in ipairs(elements) do
    for name, value in pairs(e.attributes) do
      local id = value:match "url%(#([^)]+)%)"
      if name:match "href$" or name == "src" then
        id = id or value:match "^#(.+)"
        if not id and not value:match "^data:" then outer[#outer + 1] = value end
      elseif value:match "url%([^#]" then
        outer[#outer + 1] = value
      end
      if id and not ids[id] then error(("there is no element #%s"):format(id), 0) end
    end
  end
  return outer
end

--- The elements in their order, and what they refer to outside of the text (addresses of
-- links, images, scripts and fonts).
---@param text string
---@return {name: string, attributes: table<string, string>}[] elements
---@return string[] outer
function M.read(text)
  local elements, stack, at = {}, {}, 1
  text = text:gsub("^<!doctype html>", ""):gsub("^<%?xml.-%?>", "")
  while true do
    local open = text:find("<", at, true)
    check_text(text, at, (open or 0) - 1)
    if not open then break end
    local close = find_end(text, open)
    local inside = text:sub(open + 1, close - 1)
    local name = inside:match "^/?([%w:]+)"
    if not name then fail(text, open, "<%s is no tag", inside:sub(1, 20)) end
    if inside:sub(1, 1) == "/" then
      local last = table.remove(stack)
      if last ~= name then fail(text, open, "</%s> closes %s", name, tostring(last)) end
    else
      local is_empty = inside:sub(-1) == "/"
      local words = inside:sub(#name + 1, is_empty and -2 or -1)
      elements[#elements + 1] = { name = name,
                                  attributes = read_attributes(text, open, words) }
      if RAW[name] then
        close = select(2, text:find("</" .. name .. ">", close, true))
          or fail(text, open, "%s does not end", name)
      elseif not is_empty and not VOID[name] then
        stack[#stack + 1] = name
      end
    end
    at = close + 1
  end
  if #stack > 0 then error(("%s is not closed"):format(stack[#stack]), 0) end
  return elements, check_references(elements)
end

return M
