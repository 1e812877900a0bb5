--- Token ids equal those of the package `tokenizers`, and so does the text that is
-- decoded from them: tokenizers of many kinds, on texts in many scripts, on random
-- characters, and on bytes that are not UTF-8. tools/tokenizer_goldens.py writes the
-- goldens, and says how to compare larger ones.
local goldens = require "spec.lua.text.goldens"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"
local unicode = require "kvlab.text.unicode"

local function tokenizer_of(case)
  local file = goldens.read(case.file)
  for key, value in pairs(case.patch) do
    if key == "model" then
      for name, x in pairs(value) do file.model[name] = x end
    else
      file[key] = value
    end
  end
  return kv.tokenizer(temporary.file(json.encode(file), "tokenizer.json"))
end

describe("a tokenizer", function()
  local texts = goldens.texts()
  for _, case in ipairs(support.cases(goldens.read("goldens").cases)) do
    it("encodes and decodes as tokenizers does: " .. case.name, function()
      local _, why = unicode.open()
      if why then return pending(why) end
      local count = goldens.compare(tokenizer_of(case), texts, case.rows)
      assert.is_true(count > 1000)
      goldens.report(case.name, count)
    end)
  end
end)
