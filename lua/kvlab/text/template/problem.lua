--- Raises what is wrong with a template, or with what it does. Whoever renders it adds
-- the line.
---@param why string  a format, whose values follow
return function(why, ...) error(why:format(...), 0) end
