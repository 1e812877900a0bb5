--- Turns typed text into a function.
local locals = require "kvlab.shell.repl.locals"

--- Texts that return the values of an expression; one of them compiles.
local function returning(text)
  -- Not `return text`: as a tail call, error("x") would have no line to blame. An index
  -- that fails is blamed on the line of the bracket behind it, so that stands in the same
  -- line, instead of a comment.
  local call = "return (function(...) return ... end)(" .. text:gsub(";?%s*$", "")
  return { call .. ")", call:gsub("%-%-[^\n]*$", "") .. ")", call .. "\n)" }
end

--- The function of an expression; nil for other texts. `before` comes in front of it.
local function of_expression(before, text, name, rewrite)
  for _, one in ipairs(returning(text)) do
    local whole = before .. one
    local chunk = loadstring(rewrite and rewrite(whole) or whole, name)
    if chunk then return chunk end
  end
end

--- The function of lines that end with a call, which returns the values of the call; nil
-- for other texts.
local function of_last_call(above, text, name)
  local at = #text
  while true do
    at = text:sub(1, at - 1):find "\n[^\n]*$"
    if not at then return nil end
    local first, last = text:sub(1, at), text:sub(at + 1)
    if last:find "^%s*[%a_]" and loadstring(first) and loadstring("return " .. last) then
      return of_expression(above .. first, last, name, locals.rewrite)
    end
  end
end

--- Text -> a function, or nil, a message and whether more lines could complete it. Line 1
-- of the text is line `first` of the chunk. The function returns the values of an
-- expression, or of a call in the last lines.
---@param text string
---@param name string  of the chunk
---@param first integer
---@param is_lasting? boolean  its locals become variables of the session
return function(text, name, first, is_lasting)
  local above = ("\n"):rep(first - 1)
  local chunk = of_expression(above, text, name)
    or is_lasting and of_last_call(above, text, name)
  if chunk then return chunk end
  local rewritten = is_lasting and locals.rewrite(text)
  chunk = rewritten and loadstring(above .. rewritten, name)
  if chunk then return chunk end
  local problem, as_value
  chunk, problem = loadstring(above .. text, name)
  as_value = select(2, loadstring("return " .. text, name))
  return chunk, problem, (problem and problem:find "'<eof>'$"
    or as_value and as_value:find "'<eof>'$") ~= nil
end
