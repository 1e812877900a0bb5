--- Every function of docs/api_lua.md that takes a table of options refuses names that it
-- does not know, with the nearest one that it knows, and values of the wrong type; the
-- error blames the line of the call. What the options are is read off the error itself,
-- and what a value must be off its words, so that the words are tried, too.
local kv = require "kvlab"
local rows = require "spec.lua.option_tables"
local sorted = require "kvlab.sorted"

local root = kv.paths.root
if not io.open(root .. "/tools/api.lua") then return end -- a bundle has no tools

-- ---- which functions take options -----------------------------------------------------

-- Parameters with tables that are no options.
local OTHER_TABLES = {
  shape = "of a cache, as policy.init gets it", values = "numbers", config = "a "
    .. "configuration of an experiment, or a config.json", policy = "a policy",
  outer = "a policy",
}
-- Parameters that are options whether their type is written down or not.
local NAMES = { o = true, opts = true, options = true, given = true, limits = true,
                call = true, view = true, want = true, def = true, spec = true }
-- Functions that check nothing, and say so.
local UNCHECKED = { ["Indexer:select_step"] = true }
-- Functions outside the API reference that are tried, too.
local UNDOCUMENTED = { ["json.encode"] = true, ["http connections"] = true }

--- Whether a type is that of one table, not of a list.
local function is_table(kind)
  return kind:find "^table$" or kind:find "^table[%s|]" or kind:find "^%b{}%f[%s%z]"
    or kind:find "^{[^}]*,$"
end

--- The parameters of one entry of the page that are options.
local function option_parameters(arguments, text)
  local found, kinds = {}, {}
  for name, kind in (text .. "\n"):gmatch "\n      ([%w_]+)%??: *([^\n]*)" do
    kinds[name] = kind
  end
  for name in arguments:gmatch "[%w_]+" do
    local kind = kinds[name]
    local takes = kind and is_table(kind) or not kind and NAMES[name]
    if takes and not OTHER_TABLES[name] then found[#found + 1] = name end
  end
  return found
end

--- The functions of the page that take options: name -> the parameter.
local function functions_with_options()
  local page = assert(loadfile(root .. "/tools/api.lua"))("api").lua_page()
  local found, count, waiting = {}, 0, {}
  local function close(text)
    for _, entry in ipairs(waiting) do
      for _, parameter in ipairs(option_parameters(entry.arguments, text)) do
        if not UNCHECKED[entry.name] then found[entry.name] = parameter end
      end
    end
    waiting = {}
  end
  local text = ""
  for line in page:gmatch "([^\n]*)\n" do
    local name, arguments = line:match "^(%a[%w_.]*:?[%w_]*)(%b())$"
    if name then
      if text ~= "" then close(text) end
      text, count = "", count + 1
      waiting[#waiting + 1] = { name = name, arguments = arguments }
    else
      text = text .. "\n" .. line
    end
  end
  close(text)
  return found, count
end

-- ---- what is wrong with a value -------------------------------------------------------

local thread = coroutine.create(function() end)
-- Patterns of what an error expects, and values that such an option must refuse. (Every
-- option refuses a thread.)
local RULED_OUT = {
  { "^0 %.%.%. 1", { -0.1, 1.5, "0.5", 0 / 0 } },
  { "^a whole number from (%S+) to (%S+)", { 1.5, "1", true } },
  { "^a whole number >= 1", { 0, 1.5, "1", {}, 2 ^ 53, 1 / 0, 0 / 0, 5LL } },
  { "^a whole number >= 0", { -1, 0.5, "1", {}, 2 ^ 53, 1 / 0, 0 / 0, 5LL } },
  { "^a whole number", { 0.5, "1", true, {}, -2 ^ 53, 1 / 0, 0 / 0, 5LL } },
  { "^a number > 0", { 0, -1, "1", 0 / 0 } },
  { "^a number >= 0", { -1, "1", 0 / 0 } },
  { "^a number", { "1", true, {} } },
  { "^true or false", { 1, "yes", {} } },
  { "^one of ", { "no such value", {} } },
  { "^a string or a function", { 7, true, {} } },
  { "^a string", { 7, true, {} } },
  { "^a table or a function", { 7, "x", true } },
  { "^a table", { 7, "x", true } },
  { "^a function", { 7, "x", true } },
  { "^a list", { 7, "x" } },
  { "^a tensor", { 7, "x", {} } },
  { "^a device or its name", { 7, true, {} } },
}

-- Whole numbers that C takes in 64 bits. It takes all others in 32.
local WIDE = { seed = true, offset = true, low = true, high = true, capacity = true,
               request = true }

local function is_wide(name) return WIDE[name] or name:find "^bytes_" ~= nil end

local function ruled_out(words)
  for _, entry in ipairs(RULED_OUT) do
    if words:find(entry[1]) then return entry[2] end
  end
  return {}
end

--- The words of the error of a call with good options and one more.
local function problem_of(row, name, value)
  local o = row.good()
  o[name] = value
  local ok, words = pcall(row.call, o)
  return not ok and tostring(words) or nil
end

--- An error's words without its position, which is a line of the row's call.
local function without_position(row, words)
  local line, rest = words:match "^[^\n]-spec/lua/option_tables%.lua:(%d+): (.*)$"
  assert.truthy(line, "the error blames another file: " .. words)
  local place = debug.getinfo(row.at or row.call, "S")
  line = tonumber(line)
  assert.is_true(line >= place.linedefined and line <= place.lastlinedefined, words)
  return rest
end

--- The names of the options, as the error for one that there is not lists them.
local function options_of(row)
  local words = problem_of(row, "no_such_option", 1)
  assert.truthy(words, "an unknown name is taken")
  local what, list = without_position(row, words):match(
    '^(.-): "no_such_option" is no option.-; the options are (.*)$')
  assert.truthy(list, words)
  local names = {}
  for name in list:gmatch "[%w_]+" do names[#names + 1] = name end
  return names, what
end

local function check_misspelt(row, names)
  for _, name in ipairs(names) do
    local words = without_position(row, problem_of(row, name .. "_", 1) or "")
    local hint = #name > 1 and (", did you mean %s?"):format(name) or ""
    local expected = ('"%s_" is no option%s;'):format(name, hint)
    assert.truthy(words:find(expected, 1, true), words)
  end
end

local function check_mistyped(row, what, names)
  for _, name in ipairs(names) do
    local function refused(value)
      local words = problem_of(row, name, value)
      assert.truthy(words, ("%s takes %s"):format(name, tostring(value)))
      words = without_position(row, words)
      local at = words:match(("^(.-): %s is "):format(name))
      assert.truthy(at and what:sub(1, #at) == at, words)
      return words:match ", expected (.*)$"
    end
    local words = refused(thread)
    for _, value in ipairs(ruled_out(words)) do refused(value) end
    if words:find "^a whole number" and not is_wide(name) then
      assert.truthy(refused(2 ^ 31):find("2^31", 1, true) or words:find " from ")
    end
  end
end

-- ---- the specs ------------------------------------------------------------------------

describe("tables of options", function()
  local functions, documented = functions_with_options()

  it("are tried for every function of the API reference that takes one", function()
    assert.is_true(documented > 300)
    for _, name in ipairs(sorted.keys(functions)) do
      assert.truthy(rows[name], ("%s takes options (%s), which no row of "
        .. "option_tables.lua tries"):format(name, functions[name]))
    end
    for _, name in ipairs(sorted.keys(rows)) do
      assert.truthy(functions[name:match "^%S+"] or UNDOCUMENTED[name], name
        .. " is no function of the API reference that takes options")
    end
  end)

  for _, name in ipairs(sorted.keys(rows)) do
    local row = rows[name]

    it("of " .. name .. " are taken when they are right", function()
      row.call(row.good())
    end)

    it("of " .. name .. " are refused when misspelt or mistyped", function()
      local names, what = options_of(row)
      check_misspelt(row, names)
      check_mistyped(row, what, names)
    end)

    it("of " .. name .. " are all that the row gives, and more", function()
      local known = {}
      for _, option in ipairs(options_of(row)) do known[option] = true end
      for option in pairs(row.good()) do assert.truthy(known[option], option) end
    end)
  end

  it("are checked in no place that is not tried here", function()
    local tried, options = {}, 0
    for _, name in ipairs(sorted.keys(rows)) do
      local ok, names, what = pcall(options_of, rows[name])
      if ok then tried[what], options = true, options + #names end
    end
    local list = io.popen(("grep -rhE 'options?\\.check\\(\"' '%s/lua'"):format(root))
    for line in list:lines() do
      local what = line:match 'check%("([^"]+)"'
      assert.truthy(tried[what] or line:find "^%s*%-%-", line)
    end
    list:close()
    assert.is_true(options >= 400, ("%d options"):format(options))
  end)
end)
