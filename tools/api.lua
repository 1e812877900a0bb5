--- Writes the API reference: docs/api_lua.md from the comments of the Lua sources, and
-- docs/api_c.md from runtime/base.h and runtime/kvlab.h. spec/api_spec.lua fails when
-- they are out of date.
--
--   ./kvlab run tools/api.lua        writes both
local arguments = require "kvlab.arguments"
local files = require "kvlab.files"
local help = require "kvlab.shell.repl.help"
local kv = require("kvlab").load_all()
local library = require "kvlab.library"
local sorted = require "kvlab.sorted"

local root = kv.paths.root
package.path = root .. "/?.lua;" .. package.path
local anchors = require "spec.anchors"
local M = {}

-- The chapters of the Lua page, which list files of lua/. Scripts reach their functions
-- through kv, or, in a chapter with `required`, by requiring the module by its path.
local CHAPTERS = {
  { "Tensors", { "kvlab/init", "kvlab/library", "kvlab/tensor/tensor",
    "kvlab/tensor/shape", "kvlab/tensor/arithmetic", "kvlab/tensor/device",
    "kvlab/tensor/graph", "kvlab/tensor/safetensors", "kvlab/tensor/gguf",
    "kvlab/tensor/npy" } },
  { "Ops", { "kvlab/tensor/ops", "kvlab/tensor/vllm" } },
  { "KV memory", { "kvlab/memory/cache", "kvlab/memory/sequence",
    "kvlab/memory/batch", "kvlab/memory/formats", "kvlab/memory/resident",
    "kvlab/memory/host_tier", "kvlab/memory/hot_cache",
    "kvlab/memory/store", "kvlab/memory/prefetch" } },
  { "Policies and attention", { "kvlab/policy/policy", "kvlab/policy/attention",
    "kvlab/policy/context", "kvlab/policy/summary", "kvlab/policy/hash",
    "kvlab/policy/tally", "kvlab/policy/queries", "kvlab/policy/sampling", "kvlab/policy/split",
    "kvlab/policy/budget", "kvlab/policy/eviction", "kvlab/policy/reload" } },
  { "Kernels from Lua", { "kvlab/kernel/expression/expression",
    "kvlab/kernel/run/kernel",
    "kvlab/kernel/run/show", "kvlab/kernel/run/map", "kvlab/kernel/run/source" } },
  { "Observers", { "kvlab/observe/probe", "kvlab/observe/record",
    "kvlab/observe/capture" } },
  { "Indexer", { "kvlab/index/index_cache", "kvlab/index/indexer",
    "kvlab/index/prefix_chunks", "kvlab/index/landmarks", "kvlab/index/compressed" } },
  { "Serving", { "kvlab/serve/serve", "kvlab/serve/request", "kvlab/serve/generate",
    "kvlab/serve/model", "kvlab/http/server", "kvlab/serve/cost_model",
    "kvlab/serve/trace", "kvlab/serve/replay" } },
  { "Text", { "kvlab/text/tokenizer", "kvlab/text/stream" } },
  { "Tasks", { "kvlab/task/task", "kvlab/task/writer", "kvlab/task/texts",
    "kvlab/task/scores", "kvlab/task/longbench" } },
  { "Models", { "models/engine", "models/families", "models/llama", "models/gemma",
    "models/deepseek", "models/checkpoint", "models/small_lm", "models/recall/exam",
    "models/reading" }, required = true },
  { "Experiments", { "kvlab/experiment/experiment", "kvlab/command_line",
    "kvlab/report/plot", "kvlab/report/heat_map", "kvlab/report/table",
    "kvlab/report/timeline", "kvlab/experiment/statistics",
    "kvlab/experiment/kinds", "kvlab/experiment/synthetic" } },
}

-- ---- Lua ------------------------------------------------------------------------------

--- The names of all functions that scripts can reach: function -> "kv.ops.rmsnorm".
local function reachable()
  local names = {}
  local function add(prefix, t)
    for _, key in ipairs(sorted.keys(t)) do
      local f = help.function_of(t[key])
      if f then names[f] = names[f] or prefix .. key end
    end
  end
  add("kv.", kv)
  for _, key in ipairs(sorted.keys(kv)) do
    if type(kv[key]) == "table" then add("kv." .. key .. ".", kv[key]) end
  end
  for _, module in ipairs { "tensor.tensor", "tensor.device", "kernel.expression.expression" } do
    add(module:match "[^.]*$" .. ":", require("kvlab." .. module).methods)
  end
  for _, chapter in ipairs(CHAPTERS) do
    for _, module in ipairs(chapter.required and chapter[2] or {}) do
      local value = require((module:gsub("/", ".")))
      if type(value) == "table" then add(module:match "[^/]*$" .. ".", value) end
    end
  end
  return names
end

--- A function's signature as it is called: for a method "tensor:topk(k)", without self.
local function called(name, f)
  local text = help.signature(name, f)
  if name:find ":" then text = text:gsub("%(%w+,? ?", "(", 1) end
  return text
end

--- The functions of a file that scripts can reach: line -> { signature, … }.
local function functions_of(path, names)
  local found = {}
  for f, name in pairs(names) do
    local info = debug.getinfo(arguments.own(f), "S")
    if info.source == "@" .. path then
      local at = found[info.linedefined] or {}
      found[info.linedefined] = at
      at[#at + 1] = called(name, f)
      table.sort(at)
    end
  end
  return found
end

--- Adds the methods of a file's classes, such as "function Cache:layer(layer)". Methods
-- without a comment are internal and left out.
local function add_methods(lines, found)
  for i, line in ipairs(lines) do
    local class, method = line:match "^function (%u%w*):([%w_]+)%("
    if class and help.comment_above(lines, i) then
      local text = table.concat(lines, " ", i, math.min(i + 2, #lines))
      local listed = text:match "%(.-%)":gsub("%s+", " ")
      found[i] = { class .. ":" .. method .. listed }
    end
  end
end

--- Adds the classes whose fields are documented: the line after the class's comment ->
-- its name.
local function add_classes(lines, found)
  for i, line in ipairs(lines) do
    local class = line:match "^%-%-%-@class ([%w_.]+)"
    if class and (lines[i + 1] or ""):find "^%-%-%-@field" then
      local last = i
      while (lines[last + 1] or ""):find "^%-%-" do last = last + 1 end
      found[last + 1] = { class }
    end
  end
end

local function indent(text) return "    " .. text:gsub("\n", "\n    ") end

--- One file: its head and its functions, in the order of the source.
local function file_text(module, names, out)
  local path = ("%s/lua/%s.lua"):format(root, module)
  local lines = help.read_lines(path)
  local found, order = functions_of(path, names), {}
  add_methods(lines, found)
  add_classes(lines, found)
  for line in pairs(found) do order[#order + 1] = line end
  table.sort(order)
  out("### " .. module .. ".lua\n")
  out("```text\n" .. (help.head_comment(lines) or "") .. "\n```\n")
  if #order == 0 then return end
  out "```text"
  for _, line in ipairs(order) do
    out(table.concat(found[line], "\n"))
    local text = help.comment_above(lines, line) or "(has no comment)"
    out(indent((text:gsub("^class [^\n]*\n?", ""))))
  end
  out "```\n"
end

local function writer()
  local text = {}
  return function(line) text[#text + 1] = line end, text
end

--- The page with its contents after the introduction: a line for each chapter, with links
-- to what is in it. `text` begins with the introduction.
local function with_contents(text)
  local used, contents = {}, { "## Contents\n" }
  anchors.name(text[1]:match "^# ([^\n]*)", used)
  anchors.name("Contents", used)
  for i = 2, #text do
    local level, title = text[i]:match "^(##+) ([^\n]*)"
    if level then
      local link = ("[%s](#%s)"):format(title:gsub("^kvlab/", ""):gsub("%.lua$", ""),
        anchors.name(title, used))
      if level == "##" then
        contents[#contents + 1] = ("- **%s**"):format(link)
      else
        contents[#contents + 1] = ("  - %s"):format(link)
      end
    end
  end
  contents[#contents + 1] = ""
  table.insert(text, 2, table.concat(contents, "\n"))
  return table.concat(text, "\n")
end

--- The Lua page.
---@return string
function M.lua_page()
  local out, text = writer()
  out [[
# The Lua API

`./kvlab run tools/api.lua` generates this page from the comments of the sources; in the
REPL, `?name` shows the same text. A `?` after a parameter means that it may be left out.
If `out` is left out, the function makes a new tensor. Misuse raises an error that names
the argument, what it was and what was expected. Functions that call the C library have
the shapes, dtypes and errors that `docs/api_c.md` states.
]]
  local names = reachable()
  for _, chapter in ipairs(CHAPTERS) do
    out("## " .. chapter[1] .. "\n")
    for _, module in ipairs(chapter[2]) do file_text(module, names, out) end
  end
  return with_contents(text)
end

-- ---- C --------------------------------------------------------------------------------

--- The names that a piece of the header declares, in order.
local function declared(code)
  local names, seen = {}, {}
  for _, pattern in ipairs { "(kvl_[%w_]+)%(", "typedef %w+ (kvl_[%w_]+)",
                             "} (kvl_[%w_]+);" } do
    for name in code:gsub("/%*.-%*/", ""):gmatch(pattern) do
      if not seen[name] then names[#names + 1], seen[name] = name, true end
    end
  end
  return names
end

--- Cuts the part of a header between the ffi marks into pieces and adds them to `pieces`.
-- A piece begins at a comment at the margin, or after a blank line.
local function add_pieces(header, pieces)
  local is_new = true
  for line in header:match "/%* ffi:begin.-\n(.-)/%* ffi:end":gmatch "([^\n]*)\n" do
    if is_new or line:find "^/%*" then pieces[#pieces + 1] = {} end
    is_new = line == ""
    table.insert(pieces[#pieces], not is_new and line or nil)
  end
end

--- The C page.
---@return string
function M.c_page()
  local pieces = {}
  for _, path in ipairs(library.headers) do
    add_pieces(assert(files.read(path)), pieces)
  end
  local out, text = writer()
  out [[
# The C API

`./kvlab run tools/api.lua` generates this page from `runtime/base.h` and
`runtime/kvlab.h`, piece by piece. Unless it says otherwise, a function returns a negative
`kvl_status` if it fails; `kvl_last_error()` then returns the message. Out parameters come
last, and a function that fails does not change them.
]]
  out "## Constants and types that kernels know, too\n"
  for _, lines in ipairs(pieces) do
    local title = (lines[1] or ""):match "^/%* %-%-%-%- (.-) %-+ %*/$"
    if title then
      out("## " .. title:gsub("^%l", string.upper) .. "\n")
      table.remove(lines, 1)
    end
    local piece = table.concat(lines, "\n")
    local names = declared(piece)
    if #names > 0 then out("### " .. table.concat(names, ", ") .. "\n") end
    if piece ~= "" then out("```c\n" .. piece .. "\n```\n") end
  end
  return with_contents(text)
end

local function write(name, text)
  local file = assert(io.open(root .. "/docs/" .. name, "w"))
  file:write(text)
  file:close()
end

if ... ~= "api" then -- run, not loaded by its spec
  write("api_lua.md", M.lua_page())
  write("api_c.md", M.c_page())
end

return M
