--- One form for constructors: you call a noun to make the thing that it names. If the
-- noun has further functions, it is a table, and this file makes the table callable:
-- `kv.policy "quest"` beside `kv.policy.names()`.

---@param noun table
---@param make function  makes one; also found as getmetatable(noun).make
---@return table noun
return function(noun, make)
  -- A tail call leaves no frame, so that errors blame the caller's line.
  return setmetatable(noun, { make = make,
    __call = function(_, ...) return make(...) end })
end
