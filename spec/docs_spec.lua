--- README.md and docs/*.md do not lie: their code blocks run, print what the page shows,
-- and the files that they name are there.
--
--   ```lua          pasted into a REPL, one for each page, one block after another; they
--                   also compile as one script
--   ```sh           run in a folder with a `kvlab` that is built
--   ```repl         "[1] 1 + 1" is typed, the lines after it are what comes back
--   ```text         right after one of them: what it prints; "…" stands for anything
--   <!-- as: FILE -->       before a block: it is a piece of FILE (and pasted)
--   <!-- file: FILE -->     the reader saves it as FILE: it runs from there (and pasted)
--   <!-- not run: WHY -->   what it calls is checked: verbs, options and files exist
--   <!-- needs: MODEL -->   before a shell or REPL block: it is run where ./kvlab get has
--                           fetched the model, as specs tagged #model are
--
-- Names between backticks in the text are there: files, kv.X, kvl_x and Class:method. So
-- are the pages, headings and pictures that links lead to.
local anchors = require "spec.anchors"
local cache_folder = require "kvlab.cache_folder"
local doc_blocks = require "spec.doc_blocks"
local files = require "kvlab.files"
local help = require "kvlab.shell.repl.help"
local kv = require "kvlab"
local support = require "spec.support"

local root = kv.paths.root
if not io.open(root .. "/README.md") then return end -- a bundle has no docs
-- The pages say the same in every build, and each call on them has specs that a hostile
-- build runs.
if support.is_hostile then return end

local LANGUAGES = { lua = true, sh = true, repl = true, text = true, c = true }
local scratch

--- Everything that `kvlab help` names: verbs and options, "run" and "--device".
local known

local function read_help()
  local pipe = io.popen(("'%s/kvlab' help"):format(root)) -- a bundle has no build options
  local manual = pipe:read "*a"
  pipe:close()
  known = {}
  for verb in manual:gmatch "\n  (%l+) " do known[verb] = true end
  for option in manual:gmatch "%-%-[%l-]+" do known[option] = true end
end

--- Verbs, options and files that a line of shell names are there.
local function check_command(line)
  local words = (" " .. line):match "%s%./kvlab%f[%s%z](.*)" or ""
  words = words:gsub("%s#.*", ""):gsub("%s[|>&;].*", ""):gsub("'[^']*'", "")
  local verb = words:match "^%s+(%l+)"
  assert.is_true(not verb or known[verb], ("there is no verb %s"):format(verb))
  for option in words:gmatch "%f[%S]%-%-[%l-]+" do
    assert.is_true(known[option], ("there is no option %s"):format(option))
  end
  for path in words:gmatch "%f[%S][%l_]+/[%w_/.*-]+" do
    local is_made = path:find "^results/"
    assert.is_true(is_made ~= nil or scratch:has(path), ("there is no %s"):format(path))
  end
end

local function compare(block, output)
  output = ("\n" .. output):gsub("\n%d+/%d+  [^\n]*", "") -- progress of a slow run
  if block.output and not doc_blocks.matches(output, block.output) then
    error(("%s:%d prints\n%s\nthe page shows\n%s"):format(block.page, block.line, output,
      block.output), 0)
  end
end

--- Pastes the Lua of a page into a REPL. An error names the page's line.
local function paste_lua(page, blocks, count)
  scratch:write(page, doc_blocks.script(blocks, count, true))
  local status, output = scratch:sh("./kvlab repl --device=cpu <" .. page)
  assert.equal(0, status, output)
  output = output:gsub("%f[^\n\1%z]stdin:(%d+:)", page .. ":%1") -- as a script names it
  local at = 1
  for part in output:gmatch "([^\1]*)\1" do
    compare(blocks[at], part)
    at = at + 1
  end
end

--- The line that gives a block the real cache folder, if it needs a model from there or
-- runs specs, which compile many kernels.
local function cache_of(block)
  if not block.needs and not block.text:find "kvlab test" then return "" end
  return ("export XDG_CACHE_HOME='%s'\n"):format(cache_folder.path():match "^(.*)/")
end

local function run_sh(block)
  local status, output = scratch:sh(cache_of(block) .. "rm -rf results\n" .. block.text)
  assert.equal(0, status, output)
  compare(block, output)
end

--- Types what stands after the prompts; no input may fail.
local function run_repl(block)
  local inputs, shown = {}, {}
  for line in block.text:gmatch "[^\n]+" do
    local input = line:match "^%[%d+%] (.*)"
    if input then inputs[#inputs + 1] = input else shown[#shown + 1] = line end
  end
  scratch:write("typed", table.concat(inputs, "\n"))
  local status, output = scratch:sh(cache_of(block) .. "./kvlab repl --device=cpu <typed")
  assert.equal(0, status, output)
  block.output = table.concat(shown, "\n")
  compare(block, output)
end

local function check_piece(block)
  local file = assert(io.open(root .. "/" .. block.as))
  local text = file:read "*a"
  file:close()
  assert.is_true(text:find(block.text, 1, true) ~= nil,
    ("this is not in %s, or not any more"):format(block.as))
end

--- Saves a block under a name that is not taken.
local function save(block)
  assert.is_false(scratch:has(block.file), block.file .. " is there already")
  scratch:write(block.file, block.text)
end

-- ---- names ----------------------------------------------------------------------------

local FOLDERS = { lua = true, runtime = true, kernels = true, spec = true, docs = true,
                  bench = true, notes = true, tools = true }

local function read_api()
  local file = assert(io.open(root .. "/docs/api_lua.md"))
  local text = file:read "*a"
  file:close()
  return text
end

--- Whether what a page names is there; nil: it is not a name of ours.
local function is_there(name, api)
  if FOLDERS[name:match "^(%l+)/[%w_./*-]+$"] then
    local path = root .. "/" .. name
    return files.real(path) ~= nil or name:find("*", 1, true) ~= nil
      and os.execute(("ls -d '%s'/%s >/dev/null 2>&1"):format(root, name)) == 0
  elseif name:find "^kvl_%l" then
    return (help.text(name:match "^[%w_]+", {})) ~= nil
  elseif name:find "^kv%.%l" then
    local value = kv
    for key in name:match "^kv([%w_.]+)":gmatch "[%w_]+" do
      value = type(value) == "table" and value[key] or nil
    end
    return value ~= nil
  elseif name:find "^%u%w*:%l[%w_]*$" then
    return api:find("\n" .. name .. "(", 1, true) ~= nil
  end
end

--- The names between backticks outside of code blocks that are not there.
local function missing_names(lines)
  local missing, api, inside = {}, read_api(), false
  for i, line in ipairs(lines) do
    if line:find "^```" then inside = not inside end
    for name in (inside and "" or line):gmatch "`([^`]+)`" do
      if is_there(name, api) == false then
        missing[#missing + 1] = ("line %d: %s"):format(i, name)
      end
    end
  end
  return table.concat(missing, "\n")
end

local anchors_of = {} -- by the path of a page

--- The links of a page that lead nowhere.
local function broken_links(page, lines)
  local broken = {}
  for _, target in ipairs(anchors.links(lines)) do
    local path, anchor = target:match "^([^#]*)#?(.*)$"
    local other = path == "" and page or (page:match "^.*/" or "") .. path
    local file = io.open(root .. "/" .. other)
    if file then file:close() end
    if file and anchor ~= "" and not anchors_of[other] then
      anchors_of[other] = anchors.of(path == "" and lines
        or select(2, doc_blocks.read(root, other)))
    end
    if not file or anchor ~= "" and not anchors_of[other][anchor] then
      broken[#broken + 1] = target
    end
  end
  return table.concat(broken, "\n")
end

--- Specs of one page.
local function describe_page(page)
  local blocks, lines = doc_blocks.read(root, page)
  local pasted, scripts = {}, {} -- the Lua; without what stands in files
  for _, block in ipairs(blocks) do
    local name = ("line %d, %s"):format(block.line, block.language or "?")
    if not LANGUAGES[block.language] then
      it(name, function() error "a block begins with ```lua, sh, repl, text or c" end)
    elseif block.as then
      it(name .. " is a piece of " .. block.as, function() check_piece(block) end)
    elseif block.not_run then
      it(name .. " is not run", function()
        for line in block.text:gmatch "[^\n]+" do check_command(line) end
        pending(block.not_run)
      end)
    elseif block.file then
      it(name .. " is saved", function() save(block) end)
    end
    if block.language == "lua" and not block.not_run then
      pasted[#pasted + 1] = block
      if not (block.as or block.file) then scripts[#scripts + 1] = block end
    end
  end
  it("names what is there", function() assert.equal("", missing_names(lines)) end)
  it("has links that lead somewhere", function()
    assert.equal("", broken_links(page, lines))
  end)
  if #pasted > 0 then
    it("has Lua that can be pasted", function() paste_lua(page, pasted, #lines) end)
    it("has Lua that is one script", function()
      assert(loadstring(doc_blocks.script(scripts, #lines), "@" .. page))
    end)
  end
  for _, block in ipairs(blocks) do
    local run = ({ sh = run_sh, repl = run_repl })[block.language]
    if run and not (block.as or block.file or block.not_run) then
      local tag = block.needs and " #model" or ""
      it(("line %d, %s runs%s"):format(block.line, block.language, tag), function()
        run(block)
      end)
    end
  end
end

describe("links of pages", function()
  it("lead to headings by the names that GitHub gives them", function()
    local lines = { "# What a policy reads", "## kvlab/tensor/ops.lua",
      "## `kvl_a`, kvl_b", "```", "# no heading", "```", "## What a policy reads",
      "## Größe: 3 × 4?" }
    for _, name in ipairs { "what-a-policy-reads", "kvlabtensoropslua", "kvl_a-kvl_b",
        "what-a-policy-reads-1", "größe-3--4" } do
      assert.is_true(anchors.of(lines)[name], name)
    end
    assert.is_nil(anchors.of(lines)["no-heading"])
  end)

  it("are told when they lead nowhere", function()
    assert.equal("#no\nno.md\nstore.md#no", broken_links("docs/store.md", { "# Yes",
      "[a](#yes) [b](#no) [c](no.md) [d](store.md) [e](store.md#no)",
      "`[f](code)` [g](https://example.org/#x)" }))
  end)
end)

describe("docs/README.md", function()
  it("leads to every page", function()
    local _, lines = doc_blocks.read(root, "docs/README.md")
    local has = {}
    for _, target in ipairs(anchors.links(lines)) do has["docs/" .. target] = true end
    for _, page in ipairs(doc_blocks.pages(root)) do
      assert.is_true(has[page] or not page:find "^docs/%l", page)
    end
  end)
end)

describe("docs", function()
  setup(function()
    scratch = doc_blocks.scratch(kv.paths)
    scratch:sh "rm docs/*.md" -- links; the scripts of the pages go there
    -- Of spec/policies, only the specs that go through all policies stay: the other files
    -- have nothing to run for the policies of the pages.
    scratch:sh "cd spec/policies; rm $(grep -L 'tried[.]names' *_spec.lua)"
    -- Here `kvlab test policy` runs the contract alone; spec/lua/shell/new_spec.lua runs
    -- everything that it runs.
    scratch:sh [[cd spec; for file in $(grep -lR '#policy' lua models); do
      rm $file; echo > $file; done]]
    read_help()
  end)

  for _, page in ipairs(doc_blocks.pages(root)) do
    describe(page, function() describe_page(page) end)
  end
end)
