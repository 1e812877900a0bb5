--- Reads the path of a request: decodes its escapes, and refuses what no path here has.
local problem = require "kvlab.http.problem"
local regex = require "kvlab.text.regex"

local function wrong(words)
  problem.wrong(nil, "the path " .. words, "invalid_path")
end

local function byte(hex) return string.char(tonumber(hex, 16)) end

--- The path that a client means.
---@param sent string  as it came, without what follows a "?"
---@return string
return function(sent)
  local plain = sent:gsub("%%%x%x", "")
  if plain:find("%", 1, true) then
    wrong "has a % that two hexadecimal digits do not follow"
  end
  local path = sent:gsub("%%(%x%x)", byte)
  if path:find "[%z\1-\31\127]" then wrong "has control characters" end
  if regex.invalid_at(path) then wrong "is not UTF-8" end
  return path
end
