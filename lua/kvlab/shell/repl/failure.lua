--- What the REPL prints about an error: the user's line, the message, and the calls that
-- led there, without the REPL's own calls.
local house = require "kvlab.house"
local inspect = require "kvlab.shell.repl.inspect"
local secrets = require "kvlab.secrets"

local M = {}

local FRAMES = 8 -- shown at most

--- Line `number` of a file or of an input.
local function read_line(info, sources)
  local source = sources[info.short_src]
  if source then return source[info.currentline] end
  local file = info.source:sub(1, 1) == "@" and io.open(info.source:sub(2))
  if not file then return nil end
  local line
  for _ = 1, info.currentline do line = file:read "*l" end
  file:close()
  return line
end

local function is_repl(info) return info.source:find "/lua/kvlab/shell/repl/" ~= nil end

---@class kvlab.failure
---@field message string
---@field at string|nil     "[3]:1", the user's position
---@field line string|nil   the user's line
---@field calls string[]    "lua/kvlab/tensor/tensor.lua:107 in full", innermost first

--- The position and text of a stack frame: where it is, and how that is written.
local function place(info, raised)
  local where = ("%s:%d"):format(info.short_src, info.currentline)
  local blamed = raised:sub(1, #where + 2) == where .. ": "
  return inspect.inside_root(where), blamed and raised:sub(#where + 3) or nil
end

--- Finds the position with which a message begins if no running call has it: the error
-- was caught and raised again, or it is about a line that ran earlier, such as the line
-- that built an expression. A position in an input is the place of the error; a position
-- in kvlab's files is shown as one more call. Any other stays in the message.
local function use_carried(failure, sources)
  local name, number, rest = failure.message:match "^([^\n]-):(%d+): (.*)$"
  if not name then return end
  if sources[name] then
    failure.at, failure.message = name .. ":" .. number, rest
    failure.line = sources[name][tonumber(number)]
  elseif house.has("@" .. name) then
    failure.message = rest
    table.insert(failure.calls, 1, inspect.inside_root(name) .. ":" .. number)
  end
end

--- The message handler for xpcall that makes a kvlab.failure of what was raised.
---@param sources table<string, string[]>  lines of inputs by chunk name
---@return fun(raised: any): kvlab.failure
function M.handler(sources)
  return function(raised)
    if type(raised) ~= "string" then
      raised = inspect.text(raised, { colour = false, columns = 80 })
    end
    local failure, level = { message = raised, calls = {} }, 2
    while true do
      local info = debug.getinfo(level, "Sln")
      if not info or is_repl(info) then break end
      if info.what ~= "C" then
        local where, rest = place(info, raised)
        failure.message = rest or failure.message
        -- the calls that found the mistake in that line would not help its author
        if rest and not house.has(info.source) then failure.calls = {} end
        if not failure.at and not house.has(info.source) then
          failure.at, failure.line = where, read_line(info, sources)
        end
        local name = info.name and info.what ~= "main" and " in " .. info.name or ""
        table.insert(failure.calls, where .. name)
      end
      level = level + 1
    end
    use_carried(failure, sources)
    return failure
  end
end

--- Writes it to standard error; text (of a syntax error) as it is.
---@param failure kvlab.failure|string
---@param is_coloured boolean
function M.print(failure, is_coloured)
  local function paint(text) return inspect.paint(text, "error", is_coloured) end
  if type(failure) == "string" then
    io.stderr:write(paint(failure), "\n")
    return
  end
  local at = failure.at and failure.at .. ": " or ""
  io.stderr:write(at, paint(secrets.mask(failure.message)), "\n")
  if failure.line then
    io.stderr:write("    ", secrets.mask((failure.line:gsub("^%s+", ""))), "\n")
  end
  if #failure.calls == 1 and failure.at then return end
  for i, call in ipairs(failure.calls) do
    if i > FRAMES then
      io.stderr:write("  … ", #failure.calls - FRAMES, " more\n")
      break
    end
    io.stderr:write(inspect.paint("  " .. call, "note", is_coloured), "\n")
  end
end

return M
