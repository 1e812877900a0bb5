--- `:plot`: a tensor (or a list of numbers) as a line or a heat map, or any plot of
-- kvlab.plot, kvlab.timeline and kvlab.record, in the terminal or in a file.
local plot = require "kvlab.report.plot"

local M = {}

--- Numbers, rows and columns of what is to be drawn; a vector has one row.
local function to_matrix(value)
  local tensor = require "kvlab.tensor.tensor"
  if type(value) == "table" and type(value[1]) == "number" then
    return value, 1, #value
  elseif not tensor.is_tensor(value) then
    error((":plot draws tensors, lists of numbers and plots, given a %s"):format(
      type(value)), 0)
  elseif value.ndim < 1 or value.ndim > 2 then
    error((":plot draws 1 or 2 dims, given %d: t:index(0) is a part of t"):format(
      value.ndim), 0)
  elseif value.count == 0 then
    error(":plot has nothing to draw: the tensor is empty", 0)
  end
  local is_matrix = value.ndim == 2
  return value:list(), is_matrix and value:size(0) or 1, value:size(-1)
end

local function is_plot(value)
  return type(value) == "table" and type(value.panels or value.boxes) == "table"
end

local function line_plot(values, title)
  local rows = {}
  for i, y in ipairs(values) do
    rows[i] = { config = { i = i - 1 }, metrics = { y = y } }
  end
  return plot.lines(rows, { x = "i", y = "y", title = title, xlabel = "index",
                            ylabel = "value" })
end

local function to_plot(value, title)
  local values, rows, columns = to_matrix(value)
  return rows == 1 and line_plot(values, title)
    or plot.heat_map { panels = { { values = values } }, rows = rows, columns = columns,
                       title = title }
end

--- Draws a value.
---@param value any
---@param path? string  ends in .svg, .pdf or .png; nil: the terminal
---@param title string
---@param o {columns: integer, colour: boolean}
function M.draw(value, path, title, o)
  local p = is_plot(value) and value or to_plot(value, title)
  local text, reason
  if path then
    text, reason = plot.write(p, path)
    text = text and text .. "\n"
  else
    text, reason = plot.text(p, o.columns - 1, nil, o.colour)
  end
  if not text then error(reason, 0) end
  io.stdout:write(text)
end

return M
