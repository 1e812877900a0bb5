--- What `kvlab run SCRIPT --help` prints: the comment at the head of the script and, for
-- an experiment, its axes, settings and metrics, and the values that --quick sets. The
-- script runs up to experiment.run, which prints them in place of computing rows. A
-- script that does not call experiment.run is not run at all.
local files = require "kvlab.files"
local sorted = require "kvlab.sorted"

local M = {}

local WIDTH = 90

--- The comment at the head of a Lua file, without its dashes: "" if there is none.
local function head_of(text)
  local lines = {}
  for line in text:gmatch "([^\n]*)\n" do
    local words = line:match "^%-%-+ ?(.*)$"
    if not words then break end
    lines[#lines + 1] = words .. "\n"
  end
  return table.concat(lines)
end

local function write_entry(name, width, words)
  local line, indent = ("  %-" .. width .. "s "):format(name), (" "):rep(width + 3)
  for i, word in ipairs(words) do
    if i < #words then word = word .. "," end
    if #line + 1 + #word > WIDTH and i > 1 then
      io.write(line, "\n")
      line = indent
    end
    line = line .. " " .. word
  end
  io.write(line, "\n")
end

local function as_words(value)
  local words = {}
  for i, item in ipairs(type(value) == "table" and value or { value }) do
    words[i] = tostring(item)
  end
  return words
end

--- Writes a title and lines of names with their values, if there are any.
local function write_section(title, names, value_of, width)
  if #names == 0 then return end
  io.write("\n", title, "\n")
  for _, name in ipairs(names) do write_entry(name, width, as_words(value_of(name))) end
end

--- Writes the axes, settings and metrics of an experiment, after --quick and --set.
---@param spec table       see kvlab.experiment
---@param plan kvlab.plan  made from it
function M.experiment(spec, plan)
  local grid, width, axes = plan.grid, #"repeats", {}
  for _, name in ipairs(grid.names) do width = math.max(width, #name) end
  for i, axis in ipairs(grid.axes) do axes[i] = axis.name end
  io.write(("\n%s: %s\n"):format(plan.name, plan.title))
  write_section("axes: --set NAME=VALUE,VALUE runs only these values", axes,
    function(name) return grid.axis_of[name].values end, width)
  local settings = sorted.keys(grid.defaults)
  settings[#settings + 1] = not spec.deterministic and "repeats" or nil
  write_section("settings: --set NAME=VALUE changes one", settings, function(name)
    local value, kind = grid.defaults[name], (spec.kinds or {})[name]
    if name == "repeats" then return plan.repeats end
    return kind and ("%s (%s)"):format(tostring(value), kind[1]) or value
  end, width)
  local quick = spec.quick or {}
  write_section("--quick puts these in their place", sorted.keys(quick),
    function(name) return quick[name] end, width)
  if spec.metrics then
    io.write "\n"
    write_entry("metrics", width, spec.metrics)
  end
  io.write(("\n%d rows in %s\n"):format(#plan.configs, plan.folder),
    "The options of every script: kvlab help run\n")
end

--- Prints the help of a script. For an experiment the work is done by experiment.run,
-- which ends the program.
---@param path string
---@param chunk function  the script, loaded
---@return integer        # the exit status
function M.script(path, chunk)
  local text = assert(files.read(path))
  io.write(("usage: kvlab run %s [options]\n\n"):format(path), head_of(text))
  if text:gsub("%-%-[^\n]*", ""):find("experiment%.run%f[^%w_]") then chunk() end
  io.write("\nThis script is no experiment: it has no axes and no settings that kvlab ",
    "knows.\nThe options of every script: kvlab help run\n")
  return 0
end

return M
