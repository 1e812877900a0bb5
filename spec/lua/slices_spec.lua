--- Work in slices: it gives what it gives in one go, whatever else runs in between.
local goldens = require "spec.lua.text.goldens"
local json = require "kvlab.json"
local kv = require "kvlab"
local reader = require "kvlab.http.reader"
local regex = require "kvlab.text.regex"
local slices = require "kvlab.slices"
local support = require "spec.support"
local unicode = require "kvlab.text.unicode"

--- Runs functions in turns, in the shortest slices that there are. Returns the result of
-- each, and how many slices there were.
local function in_turns(fns)
  local tasks, results, left, count = {}, {}, #fns, 0
  for i, fn in ipairs(fns) do tasks[i] = slices.task(fn) end
  while left > 0 do
    for i = 1, #fns do
      if tasks[i] then
        count = count + 1
        local is_done, ok, result = slices.run(tasks[i], 0)
        if is_done then
          assert(ok, result)
          tasks[i], results[i], left = nil, result, left - 1
        end
      end
    end
  end
  return results, count
end

-- What random texts are made of: letters, digits, marks, Hangul in parts, ideographs,
-- emoji, white space, names of special tokens, characters newer than some tables.
local PIECES = { "a", "the", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "1", "2345", "é",
  "e\204\129", "\204\129\204\150", "\225\132\128\225\133\161\225\134\168", "日本", "か゛",
  "か\227\130\153", "ｶ\239\190\158", "👍🏽", "\u{200d}", "ﬁ", "①", "Å", "ß", "<s>", "</s>",
  "<|begin_of_text|>", "<|", "▁", "_", "!!!", "…", "\240\158\161\128", "\0" }

local function random_text(rng, count)
  local parts = {}
  for i = 1, count do parts[i] = PIECES[1 + rng(#PIECES)]:rep(1 + rng(3)) end
  return table.concat(parts)
end

describe("a task", function()
  it("waits only where its time is over, and goes on where it waited", function()
    local n = 0
    local function count() for _ = 1, 100 do n = n + 1; slices.rest() end return n end
    assert.is_true((slices.run(slices.task(count), 1e9)))
    assert.equal(100, n)
    local task, steps = slices.task(count), 0
    repeat steps = steps + 1 until slices.run(task, 0)
    assert.equal(101, steps)
    assert.equal(200, n)
  end)

  it("gives what it returns or raises, and ends with what it is given", function()
    local seven = slices.task(function() return 7 end)
    assert.same({ true, true, 7 }, { slices.run(seven, 9) })
    assert.same({ true, false, "no" }, { slices.run(slices.task(function()
      error("no", 0)
    end), 9) })
    local cleaned
    local task = slices.task(function()
      local ok, why = pcall(function() while true do slices.rest() end end)
      cleaned = not ok and why
      return "ended"
    end)
    slices.run(task, 0)
    assert.same({ true, true, "ended" }, { slices.run(task, 0, "stop") })
    assert.equal("stop", cleaned)
  end)

  it("does not wait inside of another coroutine, and rest outside of it is nothing",
    function()
    slices.rest()
    local seen
    local task = slices.task(function()
      for x in coroutine.wrap(function() slices.rest(); coroutine.yield(5) end) do
        seen = x
      end
      return true
    end)
    assert.same({ true, true, true }, { slices.run(task, 0) })
    assert.equal(5, seen)
  end)
end)

describe("text in slices", function()
  it("has the tokens that it has in one go, beside others", function()
    local rng, slice_count = support.rng(5), 0
    for _, name in ipairs { "gpt2", "llama2", "llama3" } do
      local t = kv.tokenizer(goldens.folder .. "/" .. name .. ".json")
      for round = 1, support.is_hostile and 1 or 4 do
        local texts, fns = { ("ab"):rep(3000 + round), (" "):rep(9000) .. "x",
          random_text(rng, 20), random_text(rng, 3000), random_text(rng, 3000) }, {}
        for i, text in ipairs(texts) do
          fns[i] = function() return t:encode(text, { special = true }) end
        end
        local results, count = in_turns(fns)
        slice_count = slice_count + count
        for i, fn in ipairs(fns) do assert.same(fn(), results[i]) end
      end
    end
    assert.is_true(slice_count > 500)
  end)

  it("is what other readers and writers make of it", function()
    local rng = support.rng(6)
    local function value(depth)
      local kind = rng(depth > 4 and 5 or 8)
      if kind == 0 then return json.null end
      if kind == 1 then return rng(2) == 1 end
      if kind == 2 then return (rng(2000) - 1000) / 8 * 10 ^ (rng(40) - 20) end
      if kind < 5 then return random_text(rng, rng(6)) end
      local out = kind == 5 and json.array {} or {}
      for i = 1, rng(6) do out[kind == 5 and i or "k" .. i] = value(depth + 1) end
      return out
    end
    for _ = 1, support.is_hostile and 20 or 300 do
      local text = json.encode(value(1), { indent = rng(2) == 1 and "  " or nil })
      local got = in_turns { function() return json.encode(reader.decode(text)) end }
      assert.equal(json.encode(reader.decode(text)), got[1])
      assert.same(json.decode(text), reader.decode(text))
    end
    local long = {}
    for i = 1, 5000 do long[i] = i % 7 == 0 and random_text(rng, 3) or i / 4 end
    local results, count = in_turns { function() return json.encode(long) end,
      function() return reader.decode(json.encode(long)) end }
    assert.equal(json.encode(long), results[1])
    assert.same(long, results[2])
    assert.is_true(count > 10)
  end)
end)

describe("the reader of requests", function()
  it("refuses what JSON is not, and what would be dropped, with line and column",
    function()
    for text, words in pairs {
      [""] = "line 1, column 1: expected a value", ["{"] = "expected the name of a field",
      ["[1,]"] = "line 1, column 4: expected a value", ["[1 2]"] = "expected , or ]",
      ["{}{}"] = "line 1, column 3: expected the end", ["01"] = "expected a value",
      ["1.e3"] = "column 2: expected the end", ["+1"] = "expected a value",
      ["nul"] = "expected a value", ["NaN"] = "expected a value",
      ["{1: 2}"] = "expected the name of a field", ['{"a" 1}'] = "expected :",
      ['{"a": 1 "b"}'] = "expected , or }", ['"a'] = "a string without its end",
      ['"a\nb"'] = "line 1, column 3: a control character in a string",
      ['"\\x"'] = "no such escape", ['"\\u12"'] = "expected four hexadecimal digits",
      ['"\\ud800"'] = "half of a character", ['"\\udc00\\ud800"'] = "half of a character",
      ['{"a": 1,\n "a": 1}'] = "line 2, column 2: this field is given twice",
      [("["):rep(65) .. ("]"):rep(65)] = "nested more than 64 deep",
      [("["):rep(1e5)] = "nested more than 64 deep",
    } do
      local ok, why = pcall(reader.decode, text)
      assert.is_false(ok, text)
      assert.truthy(why:find(words, 1, true), text .. ": " .. why)
    end
    local names = {}
    for i = 1, 1025 do names[i] = ('"k%d": 1'):format(i) end
    local many = "{" .. table.concat(names, ",") .. "}"
    assert.error_matches(function() reader.decode(many) end,
      "an object with more than 1024 fields")
    assert.equal("é👍\127\"/", reader.decode '"\\u00e9\\ud83d\\udc4d\127\\"\\/"')
    assert.equal(-0.5e3, reader.decode " -0.5E+3 ")
  end)
end)

describe("normal forms", function()
  local FORMS = { "NFC", "NFD", "NFKC", "NFKD" }

  it("of long texts are those of their parts in one go", function()
    local rng = support.rng(8)
    for _, name in ipairs(FORMS) do
      local form = unicode.normal_form(name)
      for _ = 1, 3 do
        -- Between these, no text is cut: each is short. So each is done in one go.
        local whole, parts = {}, {}
        for i = 1, 400 do
          local text = random_text(rng, 60)
          whole[i], parts[i] = text .. "\n", form(text) .. "\n"
        end
        assert.equal(table.concat(parts), form(table.concat(whole)))
      end
    end
  end)

  it("sort long runs of marks as they do short ones, in a time that does not explode",
    function()
    -- Classes 230, 220, 202, 240, 1; some that are two marks, of 129 and 130; one of 0.
    local MARKS = { "\u{301}", "\u{316}", "\u{327}", "\u{345}", "\u{334}", "\u{344}",
                    "\u{F73}", "\u{F81}", "\u{903}", "\u{20DD}" }
    local rng = support.rng(9)
    for _, name in ipairs(FORMS) do
      local form = unicode.normal_form(name)
      for _ = 1, 20 do
        local run = {}
        for i = 1, 40 + rng(200) do run[i] = MARKS[1 + rng(#MARKS)] end
        local text = "e" .. table.concat(run) .. "x"
        -- The order of marks of one class counts, and nothing else does: sorted here by
        -- hand, twenty at a time, until nothing changes.
        local now = text
        for _ = 1, 60 do
          local before = now
          for _, shift in ipairs { 0, 10 } do
            local letters, parts, n = {}, {}, 0
            for letter in unicode.characters(now) do letters[#letters + 1] = letter end
            parts[1] = table.concat(letters, "", 1, math.min(shift, #letters))
            for i = shift + 1, #letters, 20 do
              n = n + 1
              parts[n + 1] = unicode.normal_form(name:find "K" and "NFKD" or "NFD")(
                table.concat(letters, "", i, math.min(i + 19, #letters)))
            end
            now = table.concat(parts)
          end
          if now == before then break end
        end
        assert.equal(form(now), form(text))
      end
      local begin = os.clock()
      form("e" .. ("\u{301}\u{316}"):rep(50000))
      assert.is_true(os.clock() - begin < 5) -- it was 40 s
    end
  end)

  it("may be cut before each character that the cut is for", function()
    local starts, lib = regex.compile(unicode.STARTS), unicode.open()
    local decomposed = { unicode.normal_form "NFD", unicode.normal_form "NFKD" }
    local composes, checked = {}, 0
    local function is_rare(code) -- ideographs and syllables, which are all alike
      return code >= 0x3400 and code < 0xA000 or code >= 0xAC10 and code < 0xD7A0
        or code >= 0xD800 and code < 0xF900 or code >= 0x17000 and code < 0x1B000
        or code >= 0x20010 and code < 0x2F800
    end
    for code = 0x80, 0x2FA20 do
      if not is_rare(code) then
        local text, first = decomposed[1](unicode.encode(code)), true
        for letter in unicode.characters(text) do
          if not first then composes[letter] = true end
          first = false
        end
      end
    end
    for code = 0, 0x2FA20 do
      local text = not is_rare(code) and unicode.encode(code)
      if text and starts:find(text, #text, 0) == 0 then
        checked = checked + 1
        for _, form in ipairs(decomposed) do
          local letter = form(text):match "^[%z\1-\127\194-\244][\128-\191]*"
          local class = lib.utf8proc_get_property(unicode.code(letter))[1]
          if composes[letter] or class ~= 0 then
            error(("U+%04X cannot begin a part"):format(code))
          end
        end
      end
    end
    assert.is_true(checked > 20000)
  end)
end)
