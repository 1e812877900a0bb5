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
  -- Not `return text`: as a tail call, error("x") would have no line to blame.
  local chunk = loadstring(("%sreturn (function(...) return ... end)(%s\n)"):format(above,
    (text:gsub(";%s*$", ""))), name)
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
