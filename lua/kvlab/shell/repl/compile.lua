--- Turns typed text into a function.
local locals = require "kvlab.shell.repl.locals"

--- Text -> a function, or nil, a message and whether more lines could complete it. Line 1
-- of the text is line `first` of the chunk.
---@param text string
---@param name string  of the chunk
---@param first integer
---@param is_lasting? boolean  its locals become variables of the session
return function(text, name, first, is_lasting)
  local above = ("\n"):rep(first - 1)
  -- Not `return text`: as a tail call, error("x") would have no line to blame. An index
  -- that fails is blamed on the line of the bracket behind it, so that stands in the same
  -- line, instead of a comment.
  local call = above .. "return (function(...) return ... end)("
    .. text:gsub(";?%s*$", "")
  local chunk = loadstring(call .. ")", name)
    or loadstring(call:gsub("%-%-[^\n]*$", "") .. ")", name)
    or loadstring(call .. "\n)", name)
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
