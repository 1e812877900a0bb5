--- Templates write what transformers' apply_chat_template writes, or are refused with the
-- line and the construct. tools/template_goldens.py makes the goldens; those of a folder
-- of templates are compared, too, by the variable KVLAB_TEMPLATE_GOLDENS, and counted:
--
--   KVLAB_TEMPLATE_GOLDENS=table.json ./kvlab test spec/lua/text/template_spec.lua
local chat = require "kvlab.text.chat"
local files = require "kvlab.files"
local json = require "kvlab.json"
local library = require "kvlab.library"
local read = require("kvlab.text.template.json").read
local template = require "kvlab.text.template.template"
local value = require "kvlab.text.template.value"

local NOW = os.time { year = 2026, month = 3, day = 5, hour = 14, min = 7, sec = 9 }

--- Renders a template, without positions in the errors.
local function render(source, vars)
  return (template.parse(source):render(vars or {}))
end

local function goldens(path)
  return json.decode(assert(files.read(path), path))
end

--- Calls fn while the time stands still.
local function then_(fn)
  local date = os.date
  os.date = function(form) return date(form, NOW) end -- luacheck: ignore
  local ok, problem = pcall(fn)
  os.date = date -- luacheck: ignore
  assert(ok, problem)
end

local function none(x) if x ~= json.null then return x end end

--- Compares all renderings of one template; returns how many are equal and refused.
local function compare(golden, name)
  local source, equal, refused = golden.templates[name], 0, 0
  local tokenizer = { name = name, template = source, templates = {},
                      special_texts = golden.tokens }
  local parses, parsed = pcall(template.parse, source)
  local reads = parses and parsed.names or {}
  for i, row in ipairs(golden.rows[name]) do
    local given = golden.chats[math.ceil(i / 2)]
    local variables = {}
    for key, x in pairs(given.variables) do
      if reads[key] then variables[key] = x end
    end
    local ok, text = pcall(chat.render, tokenizer, given.messages, {
      add_generation_prompt = i % 2 == 0, variables = variables,
      tools = reads.tools and none(given.tools) or nil })
    local where = ("%s, %s, prompt %s"):format(name, given.name, tostring(i % 2 == 0))
    if none(row) then assert.equal(row, text, where)
    else assert.is_false(ok, where)
    end
    equal, refused = equal + (ok and 1 or 0), refused + (ok and 0 or 1)
  end
  return equal, refused
end

local committed = goldens(library.paths.root .. "/spec/data/templates.json")

describe("a template #release", function()
  for name in pairs(committed.templates) do
    it("of the form " .. name .. " writes what transformers writes", function()
      then_(function()
        assert.equal(24, #committed.rows[name])
        local equal = compare(committed, name)
        assert.is_true(equal > 0)
      end)
    end)
  end

  it("has every construct that transformers has, or both refuse", function()
    then_(function()
      for _, row in ipairs(committed.constructs) do
        local vars, values = {}, read(committed.values)
        for _, key in ipairs(values.order) do vars[key.bytes] = value.get(values, key) end
        vars.messages = read '[{"role": "user", "content": "Hello"}]'
        vars.tools, vars.documents = value.NONE, value.NONE
        vars.add_generation_prompt = false
        for key, token in pairs(committed.tokens) do vars[key] = token end
        local ok, text = pcall(render, row[1], vars)
        if none(row[2]) then assert.equal(row[2], text, row[1])
        else assert.is_false(ok, row[1])
        end
      end
      assert.is_true(#committed.constructs > 130)
    end)
  end)

  local path = os.getenv "KVLAB_TEMPLATE_GOLDENS"
  local more = path and goldens(path) or { templates = {} }
  for name in pairs(more.templates) do
    it("of the folder writes what transformers writes: " .. name, function()
      then_(function() print(name, compare(more, name)) end)
    end)
  end
end)

describe("what kvlab does not have #release", function()
  local function refused(source, words, vars)
    assert.error_matches(function() render(source, vars) end, words)
  end

  it("is refused with its name and line", function()
    for source, words in pairs {
      ["\n\n{% include 'x' %}"] = "^line 3: the statement {%% include %%}, which kvlab",
      ["{% for x in y recursive %}{% endfor %}"] = "line 1: a loop that is recursive",
      ["a\n{{ 'x'|xmlattr }}"] = 'line 2: has the filter "xmlattr", which kvlab',
      ["{{ 'x' is filter }}"] = 'has the test "filter"',
      ["{{ 'x'.encode() }}"] = "reads the attribute encode of a str, which kvlab",
      ["{{ 'é'.isalpha() }}"] = "isalpha on letters outside ASCII",
      ["{{ 'straße'.upper() }}"] = 'upper case of "ß", which is not one letter',
      ["{{ lipsum() }}"] = "calls lipsum, which kvlab does not have",
      ["{{ ''.__class__ }}"] = "reads the attribute __class__",
      ["{% macro f() %}{{ kwargs }}{% endmacro %}{{ f() }}"] = "f with kwargs, which",
      ["{{ '<b>'|safe|upper }}"] = "with a text that is marked as safe",
      ["{{ '%c' % 65 }}"] = 'the format "%%c", which kvlab does not know',
      ["{{ strftime_now('%f') }}"] = 'the time as "%%f", which kvlab does not know',
      ["{{ 9007199254740993 }}"] = "the int .* beyond 2%^53",
      ["{{ 2 ** 60 }}"] = "beyond 2%^53",
      -- Jinja hides x from the whole template, for it is set at its top level
      ["{% for i in [1] %}{{ x }}{% endfor %}{% set x = 2 %}"] =
        "line 1: reads x in a block after which it is set",
      ["{{ 'x' if }}"] = "line 1: }} stands where a value was expected",
      ["{{ é }}"] = 'line 1: the character "é"',
    } do refused(source, words, { x = 1 }) end
  end)

  it("is no reason to refuse a template that does not come to it", function()
    assert.equal("b", render "{% if false %}{{ 'x'|xmlattr }}{% endif %}b")
  end)

  it("takes no more steps, bytes and depth than a text needs", function()
    for source, words in pairs {
      ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"] =
        "takes more than %d+ steps",
      ["{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        .. "{% set n.x = n.x + n.x %}{% endfor %}"] = "makes a text of more than",
      ["{{ 'x' * 10 ** 12 }}"] = "makes a text of more than",
      ["{{ [1] * 10 ** 12 }}"] = "takes more than %d+ steps",
      ["{{ 'x'.center(10 ** 12) }}"] = "makes a text of more than",
      ["{{ 'x\ny'|indent(10 ** 12) }}"] = "makes a text of more than",
      ["{{ [1]|tojson(indent=10 ** 12) }}"] = "makes a text of more than",
      ["{{ '%999999999s' % 1 }}"] = "the format",
      ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"] = "nested too deeply, or calls",
      ["{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}"
        .. "{% endfor %}{{ n.x }}"] = "nested too deeply",
      ["{{ range(10 ** 9) }}"] = "a range of more than 100000",
      [("{{ 1" .. (" + 1"):rep(100000) .. " }}")] = "stack overflow",
      [("{{ " .. ("("):rep(1000) .. (")"):rep(1000) .. " }}")] = "nested too deeply",
      [("{{ " .. ("-"):rep(1000) .. "1 }}")] = "nested too deeply",
      [("{% if 1 %}"):rep(1000)] = "nested too deeply",
    } do refused(source, words) end
  end)
end)

describe("the marks of a text #release", function()
  --- The parts of a text that messages say.
  local function said(source, content)
    local text, ranges = template.parse(source):render { x = value.of(content, "x") }
    local parts = {}
    for i, range in ipairs(ranges) do parts[i] = text:sub(range[1], range[2]) end
    return table.concat(parts, "|")
  end

  it("stay on what a message says, whatever a template does with it", function()
    for source, words in pairs {
      ["a{{ x }}b"] = " Hi é", ["{{ 'a' + x + 'b' }}"] = " Hi é",
      ["[{{ x | trim }}]"] = "Hi é", ["{{ x[1:3] }}x"] = "Hi",
      ["{{ x[::-1] }}x"] = "é iH ",
      ["{{ x.split('i')[0] }}i"] = " H", ["a{{ x|upper }}"] = " HI É",
      ["{{ x.replace('i', 'o') }}"] = " H| é", ["{{ 'aXb'.replace('X', x) }}"] = " Hi é",
      ["{{ [x]|tojson }}"] = '" Hi é"', ["{{ [x] }}"] = "' Hi é'",
      ["{{ '%s!' % x }}"] = " Hi é", ["{{ '{}!'.format(x) }}"] = " Hi é",
      ["{{ {'k': x} | tojson(indent=2) }}"] = '" Hi é"',
      ["{% set y %}a{{ x }}{% endset %}{{ y }}"] = " Hi é",
      ["{{ ['a', x]|join('-') }}"] = " Hi é",
      ["{% macro m(y) %}<{{ y }}>{% endmacro %}{{ m(x) }}"] = " Hi é",
      ["{% for c in x %}{{ c }}.{% endfor %}"] = " |H|i| |é",
      ["{{ x|indent }}{{ 'a' }}"] = " Hi é",
      ["{{ x|length }}{{ x == ' Hi é' }}"] = "", ["{{ {'a': 1}['a'] }}"] = "",
      ["{% if x %}yes{% endif %}"] = "",
    } do assert.equal(words, said(source, " Hi é"), source) end
  end)

  it("are on keys, too", function()
    assert.equal("k|v", said("{% for k, v in x.items() %}{{ k }}={{ v }}{% endfor %}",
      { k = "v" }))
  end)
end)

describe("a rendering in a task #release", function()
  local slices = require "kvlab.slices"
  local SOURCE = "{% for i in range(20000) %}{{ i }}{% endfor %}"

  it("waits for its slices, beside others, and counts its own steps", function()
    local tasks, done, slices_run = {}, 0, 0
    for i = 1, 3 do tasks[i] = slices.task(function() return render(SOURCE) end) end
    while done < 3 do
      for i = 3, 1, -1 do
        if tasks[i] then
          local is_done, ok, text = slices.run(tasks[i], 100)
          slices_run = slices_run + 1
          if is_done then
            assert.is_true(ok, text)
            assert.equal(render(SOURCE), text)
            tasks[i], done = false, done + 1
          end
        end
      end
    end
    assert.is_true(slices_run > 6)
  end)

  it("ends with what it is ended with", function()
    local task, why = slices.task(function()
      return chat.render({ name = "x", template = SOURCE, templates = {} },
        { { role = "user" } }, {})
    end), { "given up" }
    assert.is_false(slices.run(task, 0))
    assert.same({ true, false, why }, { slices.run(task, 0, why) })
  end)
end)

describe("a table of Lua #release", function()
  local function render_x(source, x) return render(source, { x = value.of(x, "x") }) end

  it("has no order of keys, so a template that reads it is refused", function()
    for _, source in ipairs { "{{ x|tojson }}", "{{ x }}", "{% for k in x %}{% endfor %}",
      "{{ x.items() }}", "{{ x|list }}", "{{ x.values() }}" } do
      assert.error_matches(function() render_x(source, { a = 1, b = 2 }) end,
        "reads the order of keys that a table of Lua does not have; give it as JSON text")
      assert.is_string(render_x(source, { a = 1 }))
    end
    for source, text in pairs {
      ["{{ x.a }}{{ x['b'] }}"] = "12", ["{{ x|length }}"] = "2",
      ["{{ x|dictsort }}"] = "[('a', 1), ('b', 2)]", ["{{ 'a' in x }}"] = "True",
      ["{{ x|tojson(sort_keys=true) }}"] = '{"a": 1, "b": 2}' } do
      assert.equal(text, render_x(source, { a = 1, b = 2 }))
    end
  end)

  it("is what JSON can hold", function()
    assert.equal('[1, 1.5, "a", true, null]', render_x("{{ x|tojson }}",
      { 1, 1.5, "a", true, json.null }))
    for words, x in pairs { ["x%[1%] is a function"] = { print },
      ["x has the key true"] = { [true] = 1 }, ["x has list items and the key a"] =
      { 1, a = 2 } } do
      assert.error_matches(function() value.of(x, "x") end, words)
    end
    local circle = {}
    circle.a = circle
    assert.error_matches(function() value.of(circle, "x") end, "nested too deeply")
  end)
end)

describe("JSON text #release", function()
  it("keeps the order of keys, and 1.0 apart from 1", function()
    local text = '{"b": 1.0, "a": [1, -0.5, 1e3, "\\u00e9\\ud83d\\ude00\\n", {}], "c":[]}'
    assert.equal('{"b": 1.0, "a": [1, -0.5, 1000.0, "é😀\\n", {}], "c": []}',
      render("{{ x|tojson }}", { x = read(text) }))
  end)

  it("is refused with its line where it is wrong", function()
    for _, text in ipairs { "", "{", "[1,]", "[1 2]", '{"a" 1}', "{a: 1}", '"a', '"\\x"',
      "01", "1.", "+1", "tru", "[1]]", "'a'", '"\\ud800"', '"a\nb"', "1e", "-", ".5",
      "1.e5", ("["):rep(1000), "9007199254740993" } do
      assert.is_false(pcall(read, text), text)
    end
    assert.error_matches(function() read '[1,\n 2' end, "line 2: has no , or ]")
  end)
end)
