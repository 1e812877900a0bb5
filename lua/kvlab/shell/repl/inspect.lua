--- How the REPL shows a value: nested tables to a depth, cycles by their path, tensors
-- inside tables in one line; in colours when the terminal has them.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local sorted = require "kvlab.sorted"

local M = {}

local DEPTH, ITEMS = 3, 100 -- nesting shown, entries of one table shown
local COLOURS = { string = "32", number = "36", boolean = "33", ["nil"] = "33",
                  ["function"] = "35", cdata = "35", userdata = "35", thread = "35",
                  note = "2", key = "", warning = "33", error = "31", title = "1" }

--- Whether to colour what goes to a terminal: not with NO_COLOR (https://no-color.org).
---@return boolean
function M.wants_colour()
  local refused = os.getenv "NO_COLOR"
  return not (refused and refused ~= "") and os.getenv "TERM" ~= "dumb"
end

--- Text in the colour of a kind of value; "note" is dim, "title" bold.
---@param text string
---@param kind string
---@param is_coloured boolean
---@return string
function M.paint(text, kind, is_coloured)
  local code = COLOURS[kind]
  if not is_coloured or code == "" then return text end
  return ("\27[%sm%s\27[0m"):format(code, text)
end

--- The columns of a text without its colours, one for each UTF-8 character.
local function width(text)
  return #text:gsub("\27%[[%d;]*m", ""):gsub("[\128-\191]", "")
end

local function is_name(key)
  return type(key) == "string" and key:find "^[%a_][%w_]*$" ~= nil
end

local paths = package.loaded["kvlab.paths"]
local root = paths and paths.root .. "/" or ""

--- A path as it is named inside the project.
---@param path string
---@return string
function M.inside_root(path)
  return path:sub(1, #root) == root and path:sub(#root + 1) or path
end

--- "bf16 [4, 64] on cpu": a tensor in a few words.
---@param t kvlab.Tensor
---@return string
function M.tensor_words(t)
  if t.storage == nil then return "closed tensor" end
  return ("%s [%s] on %s"):format(t:type(), table.concat(t:dims(), ", "), t.device:name())
end

--- "function at lua/kvlab/tensor/ops.lua:14"
local function function_words(f)
  local info = debug.getinfo(arguments.own(f), "S")
  if info.what == "C" then return tostring(f) end
  return ("function at %s:%d"):format(M.inside_root(info.source:gsub("^[@=]", "")),
    info.linedefined)
end

local function is_tensor(value)
  local tensor = package.loaded["kvlab.tensor.tensor"]
  return tensor and tensor.is_tensor(value)
end

local function cdata_words(value)
  return is_tensor(value) and M.tensor_words(value) or (tostring(value):gsub("\n", " "))
end

--- A value that is no table, as one entry of a table.
local function leaf(value, is_coloured)
  local kind = type(value)
  local text
  if kind == "string" then
    text = ("%q"):format(value):gsub("\\\n", "\\n"):gsub("%c", function(c)
      return ("\\%d"):format(c:byte())
    end)
  elseif kind == "function" then
    text = function_words(value)
  elseif kind == "cdata" then
    text = cdata_words(value)
  else
    text = tostring(value)
  end
  return M.paint(text, kind, is_coloured)
end

local render

--- The entries of a table as texts, at most ITEMS of them, and whether it is a plain list
-- of scalars.
local function entries(t, path, depth, o)
  local texts, left_out, is_plain = {}, 0, true
  local function add(key_text, key, value)
    if #texts >= ITEMS then
      left_out = left_out + 1
      return
    end
    local child = type(key) == "number" and ("%s[%s]"):format(path, tostring(key))
      or path .. "." .. tostring(key)
    texts[#texts + 1] = key_text .. render(value, child, depth + 1, o)
  end
  local length = #t
  for i = 1, length do
    is_plain = is_plain and type(t[i]) ~= "table"
    add("", i, t[i])
  end
  for _, key in ipairs(sorted.keys(t)) do
    local is_listed = type(key) == "number" and key >= 1 and key <= length
      and key % 1 == 0
    if not is_listed then
      is_plain = false
      add((is_name(key) and key or "[" .. leaf(key, false) .. "]") .. " = ", key, t[key])
    end
  end
  if left_out > 0 then
    texts[#texts + 1] = M.paint(("… %d more"):format(left_out), "note", o.colour)
  end
  return texts, is_plain
end

--- Texts side by side, as many to a line as fit.
local function fill(texts, room)
  local lines, line, used = {}, {}, 0
  for _, text in ipairs(texts) do
    local wide = width(text) + 2
    if used + wide > room and used > 0 then
      lines[#lines + 1] = table.concat(line, ", ") .. ","
      line, used = {}, 0
    end
    line[#line + 1], used = text, used + wide
  end
  lines[#lines + 1] = table.concat(line, ", ")
  return table.concat(lines, "\n")
end

local function render_table(t, path, depth, o)
  if o.open[t] then return M.paint("<cycle: " .. o.open[t] .. ">", "note", o.colour) end
  local meta = debug.getmetatable(t)
  if meta and rawget(meta, "__tostring") then return tostring(t) end
  if t == package.loaded.kvlab then t.load_all() end
  if next(t) == nil then return "{}" end
  if depth >= DEPTH then
    return M.paint("{…}", "note", o.colour)
  end
  o.open[t] = path
  local texts, is_plain = entries(t, path, depth, o)
  o.open[t] = nil
  local one_line = "{ " .. table.concat(texts, ", ") .. " }"
  local room = o.columns - 2 * depth
  if not one_line:find "\n" and width(one_line) <= room - 16 then return one_line end
  local body = is_plain and fill(texts, room - 2) or table.concat(texts, ",\n")
  return "{\n  " .. body:gsub("\n", "\n  ") .. "\n}"
end

function render(value, path, depth, o)
  if type(value) == "table" then return render_table(value, path, depth, o) end
  return leaf(value, o.colour)
end

--- The text of a value.
---@param value any
---@param o {colour: boolean, columns: integer}
---@return string
function M.text(value, o)
  if type(value) == "string" then return value end
  if type(value) == "cdata" then return tostring(value) end
  return render(value, "_", 0, { colour = o.colour, columns = o.columns, open = {} })
end

--- What a value is and how large, for a list of variables: two short texts.
---@param value any
---@return string kind, string size
function M.summary(value)
  local kind = type(value)
  if kind == "cdata" then
    if not is_tensor(value) then
      return tostring(ffi.typeof(value)):match "ctype<(.*)>", ""
    elseif value.storage == nil then return "closed tensor", "" end
    return "tensor " .. M.tensor_words(value), M.bytes(value:bytes())
  elseif kind == "table" then
    return kind, ("%d entries"):format(#sorted.keys(value))
  elseif kind == "string" then
    return kind, ("%d bytes"):format(#value)
  elseif kind == "function" then
    return function_words(value), ""
  end
  return kind, tostring(value)
end

--- 64 KiB, 1.5 GiB.
---@param n number
---@return string
function M.bytes(n)
  local unit = 1
  local units = { "bytes", "KiB", "MiB", "GiB", "TiB" }
  while n >= 1024 and unit < #units do n, unit = n / 1024, unit + 1 end
  return ("%.4g %s"):format(n, units[unit])
end

return M
