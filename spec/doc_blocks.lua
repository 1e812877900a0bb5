--- The code blocks of README.md and docs/*.md, and a place to run them in. docs_spec.lua
-- says what each kind of block has to do.
local temporary = require "spec.temporary"
local M = {}

local function lines_of(path)
  local lines = {}
  for line in io.lines(path) do lines[#lines + 1] = line end
  return lines
end

---@class spec.DocBlock
---@field page string        "docs/store.md"
---@field line integer       of its first line
---@field language string    lua, sh, repl, text, …
---@field text string
---@field output string|nil  of the text block that comes right after it
---@field as string|nil      <!-- as: FILE -->: the block is a piece of this file
---@field file string|nil    <!-- file: FILE -->: the reader saves it under this name
---@field not_run string|nil <!-- not run: WHY -->
---@field needs string|nil   <!-- needs: MODEL -->

--- Reads one page.
---@param root string
---@param page string   its path inside the project
---@return spec.DocBlock[] blocks, string[] lines
function M.read(root, page)
  local lines, blocks, told, open, last = lines_of(root .. "/" .. page), {}, {}, nil, nil
  for i, line in ipairs(lines) do
    local key, value = line:match "^<!%-%- (%l[%l ]*): (.-) %-%->$"
    if open and line == "```" then
      open.text = table.concat(lines, "\n", open.line, i - 1)
      if open.language == "text" and last then last.output = open.text end
      last, open = open.language ~= "text" and open or nil, nil
    elseif not open and line:find "^```" then
      open = { page = page, line = i + 1, language = line:match "^```(%S*)$",
               as = told.as, file = told.file, not_run = told["not run"],
               needs = told.needs }
      blocks[#blocks + 1], told = open, {}
    elseif not open and key then
      told[key] = value
    elseif not open and line ~= "" then
      told, last = {}, nil
    end
  end
  return blocks, lines
end

--- The pages of the project, README.md first.
---@return string[]
function M.pages(root)
  local pages = { "README.md" }
  local list = io.popen(("cd '%s' && LC_ALL=C ls docs/*.md"):format(root))
  for page in list:lines() do pages[#pages + 1] = page end
  list:close()
  return pages
end

-- What a terminal sends around a paste.
local PASTE_BEGIN, PASTE_END = "\27[200~", "\27[201~"

--- A page's Lua blocks as one script, in which every line has the number that it has on
-- the page. It prints a byte 1 after each block.
---@param blocks spec.DocBlock[]
---@param count integer   lines of the page
---@param is_pasted? boolean  each block is one paste, for a REPL
---@return string
function M.script(blocks, count, is_pasted)
  local out = {}
  for i = 1, count do out[i] = "" end
  for _, block in ipairs(blocks) do
    local i = block.line
    for line in (block.text .. "\n"):gmatch "(.-)\n" do
      out[i], i = line, i + 1
    end
    if is_pasted then
      out[block.line] = PASTE_BEGIN .. out[block.line]
      out[i - 1] = out[i - 1] .. PASTE_END
    end
    out[i] = 'do io.write "\\1" end' -- where the fence is
  end
  return table.concat(out, "\n")
end

--- Whether text is what a page shows: "…" stands for anything.
---@return boolean
function M.matches(text, shown)
  local function trim(s)
    return (s:gsub("[ \t]+\n", "\n"):gsub("%s+$", ""):gsub("^\n+", ""))
  end
  local pattern = trim(shown):gsub("[%^%$%(%)%%%.%[%]%*%+%-%?]", "%%%0"):gsub("…", ".-")
  return trim(text):find("^" .. pattern .. "$") ~= nil
end

-- ---- the place ------------------------------------------------------------------------

---@class spec.Scratch
---@field folder string
local Scratch = {}
Scratch.__index = Scratch

local function first_line(command)
  local pipe = io.popen(command)
  local line = pipe:read "*l"
  pipe:close()
  return line
end

--- A folder in which `./kvlab VERB …` runs this build without building: a bundle whose
-- files are links into the project.
---@param paths table   kv.paths
---@return spec.Scratch
function M.scratch(paths)
  local self = setmetatable({ folder = temporary.folder() }, Scratch)
  local root = first_line(("cd '%s' && pwd"):format(paths.root))
  local _, output = self:sh(([[
    cp -Rs '%s/lua' '%s/spec' '%s/bench' .
    [ ! -d '%s/docs' ] || cp -Rs '%s/docs' . # a bundle has none
    ln -s '%s/kernels' kernels
    mkdir bin lib runtime tools
    cp '%s/kvlab' '%s/VERSION' .
    cp '%s'/runtime/*.h runtime; cp '%s/tools/setup.sh' tools
    cp "$(readlink -f '%s')" bin/kvlab; ln -s '%s/libkvlab.so' lib]])
    :format(root, root, root, root, root, root, root, root, root, root, paths.executable
      or paths.library_dir .. "/kvlab", paths.library_dir))
  assert(output == "", output)
  return self
end

--- Runs a shell script in it; its status and all that it printed.
---@return integer status, string output
function Scratch:sh(script)
  self:write(".script", script)
  local pipe = io.popen(("cd '%s' && HOME=$PWD timeout 300 sh -eu .script 2>&1; "
    .. "echo \"status $?\""):format(self.folder))
  local output, status = pipe:read "*a":match "^(.-)status (%d+)\n$"
  pipe:close()
  return tonumber(status), output
end

function Scratch:write(name, text)
  local file = assert(io.open(self.folder .. "/" .. name, "w"))
  file:write(text, "\n")
  file:close()
end

--- Whether a path is there; it may hold wildcards.
function Scratch:has(path)
  return self:sh(("set -- %s; [ -e \"$1\" ]"):format(path)) == 0
end

return M
