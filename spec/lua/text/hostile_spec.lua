--- Wrong, cut off and changed tokenizer files: the error names the file and the field,
-- and blames the caller's line; nothing hangs.
local files = require "kvlab.files"
local goldens = require "spec.lua.text.goldens"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local DEEP = ("["):rep(5000)

--- The file of a golden, changed.
local function changed(name, change)
  local file = goldens.read(name)
  return temporary.file(json.encode(change(file) or file), "tokenizer.json")
end

describe("a wrong tokenizer.json #release", function()
  local function refused(name, words, change)
    local path = changed(name, change)
    local ok, problem = pcall(function()
      local t = kv.tokenizer(path)
      return t
    end)
    assert.is_false(ok, words)
    local here = problem:match "hostile_spec.lua:%d+: tokenizer: (.*)"
    assert.truthy(here, problem)
    assert.equal(path .. ": " .. words, here)
  end

  it("is named with the field and its value", function()
    refused("gpt2", "model.type is \"Unigram\", expected \"BPE\"; nothing else is "
      .. "supported",
      function(f) f.model.type = "Unigram" end)
    refused("gpt2", "model.dropout is 0.1, expected 0; nothing else is supported",
      function(f) f.model.dropout = 0.1 end)
    refused("gpt2", "model.end_of_word_suffix is \"</w>\", expected \"\"; nothing else "
      .. "is supported", function(f) f.model.end_of_word_suffix = "</w>" end)
    refused("gpt2", "model.unk_token is \"<x>\", which is not in model.vocab",
      function(f) f.model.unk_token = "<x>" end)
    refused("gpt2", "model.flavour is a field that is not known",
      function(f) f.model.flavour = "BPE" end)
    refused("gpt2", "model is nil, expected an object", function(f) f.model = nil end)
    refused("gpt2", "decoder is nil, expected an object",
      function(f) f.decoder = json.null end)
    refused("gpt2", "added_tokens[0].id is -1, expected a whole number from 0 to "
      .. "16777215",
      function(f) f.added_tokens[1].id = -1 end)
    refused("gpt2", "added_tokens[0].id is 5, which is the token \"&\" already",
      function(f) f.added_tokens[1].id = 5 end)
    refused("gpt2", "added_tokens[0].id is 700, but model.vocab has \"a\" as 64",
      function(f) f.added_tokens[1].content = "a" end)
    refused("gpt2", "added_tokens is \"x\", expected a list, or nil",
      function(f) f.added_tokens = "x" end)
    refused("gpt2", "extra is a field that is not known", function(f) f.extra = 1 end)
  end)

  it("is named with the entry of its vocabulary and merges", function()
    refused("gpt2", "model.vocab has the id 64 twice, for \"a\" and \"b\"",
      function(f) f.model.vocab.b = 64 end)
    refused("gpt2", "model.vocab[\"a\"] is 1.5, expected a whole number from 0 to "
      .. "16777215",
      function(f) f.model.vocab.a = 1.5 end)
    refused("gpt2", "model.vocab[\"a\"] is \"1\", expected a whole number from 0 to "
      .. "16777215", function(f) f.model.vocab.a = "1" end)
    refused("gpt2", "model.merges[2] has the token \"xyz\", which is not in model.vocab",
      function(f) f.model.merges[3] = { "xyz", "a" } end)
    refused("gpt2", "model.merges[1] has the token \"zqa\", which is not in model.vocab",
      function(f) f.model.vocab.zq, f.model.merges[2] = 9999, "zq a" end)
    refused("gpt2", "model.merges[0] is a table, expected two tokens",
      function(f) f.model.merges[1] = { "a" } end)
    refused("gpt2", "model.merges[0] is \"a b c\", expected two tokens",
      function(f) f.model.merges[1] = "a b c" end)
    refused("gpt2", "model.merges is a table, expected a list",
      function(f) f.model.merges = { x = 1 } end)
  end)

  it("is named with what is not supported in its steps", function()
    refused("gpt2", "pre_tokenizer.type is \"Punctuation\", expected one of ByteLevel, "
      .. "CharDelimiterSplit, Digits, Metaspace, Sequence, Split, WhitespaceSplit",
      function(f) f.pre_tokenizer = { type = "Punctuation" } end)
    refused("gpt2", "pre_tokenizer.pretokenizers[1] comes after ByteLevel, which is the "
      .. "last", function(f)
      f.pre_tokenizer.pretokenizers[2] = { type = "Digits", individual_digits = true }
    end)
    refused("gpt2", "normalizer.type is \"Lowercase\", expected one of NFC, NFD, NFKC, "
      .. "NFKD, Prepend, Replace, Sequence, Strip",
      function(f) f.normalizer = { type = "Lowercase" } end)
    refused("llama2", "decoder.decoders[3].stop is 1, expected 0; nothing else is "
      .. "supported",
      function(f) f.decoder.decoders[4].stop = 1 end)
    refused("llama2", "decoder.type is \"WordPiece\", expected one of ByteFallback, "
      .. "ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip",
      function(f) f.decoder = { type = "WordPiece" } end)
    refused("llama2", "post_processor.type is \"BertProcessing\", expected one of "
      .. "ByteLevel, Sequence, TemplateProcessing",
      function(f) f.post_processor = { type = "BertProcessing" } end)
    refused("llama2", "post_processor.special_tokens.<s> is nil, expected an object",
      function(f) f.post_processor.special_tokens = { x = 1 } end)
  end)

  it("is named with the part of a regular expression that is not supported", function()
    local function with(expression, words)
      refused("llama3", ("pre_tokenizer.pretokenizers[0].pattern.Regex the regular "
        .. "expression %q %s"):format(expression, words), function(f)
        f.pre_tokenizer.pretokenizers[1].pattern.Regex = expression
      end)
    end
    with("a\\bc", "has \\b, which is not supported")
    with("[a[b]]", "has [ inside of a class, which is not supported")
    with("[a&&b]", "has && inside of a class, which is not supported")
    with("[^\\S]", "has \\S inside of a class, which is not supported")
    with("\\p{Greek}", "has \\p{Greek}, which is not supported")
    with("(?m:a)", "has the group (?m:, which is not supported")
    with("(?<name>a)", "has the group (?<n, which is not supported")
    with("a{2}+", "has a + after braces, which is not supported")
    with("[a", "has a class without its ], which is not supported")
    with("a)", "is wrong: unmatched closing parenthesis")
    with("(a", "is wrong: missing closing parenthesis")
    with("*", "is wrong: quantifier does not follow a repeatable item")
  end)

  it("is named when it is no JSON, or is not there", function()
    local function problem_of(text)
      local path = temporary.file(text, "tokenizer.json")
      local _, problem = pcall(kv.tokenizer, path)
      return (tostring(problem):gsub(path:gsub("%W", "%%%0"), "FILE"))
    end
    assert.truthy(problem_of("{\n  x"):find("FILE: line 2, column 3", 1, true))
    assert.truthy(problem_of(""):find("FILE: ", 1, true))
    assert.truthy(problem_of("7"):find("FILE: is no JSON object", 1, true))
    assert.truthy(problem_of(DEEP):find("FILE: ", 1, true))
    local folder = temporary.folder()
    assert.error_matches(function() kv.tokenizer(folder) end,
      "is no tokenizer.json and no folder with one")
    assert.error_matches(function() kv.tokenizer "no.gguf" end,
      "that of a GGUF file is kv.tokenizer(kv.gguf(path).metadata)", 1, true)
    assert.error_matches(function() kv.tokenizer "smollm2" end,
      'that of a model is kv.model("smollm2").tokenizer', 1, true)
    assert.error_matches(function() kv.tokenizer(7) end,
      "source is 7, expected a path or a table of GGUF metadata")
  end)
end)

describe("changed tokenizer files #release", function()
  --- Loads a text as a file, and uses the tokenizer if there is one.
  local function try(text, name)
    local path = temporary.file(text, "tokenizer.json")
    local ok, t = pcall(kv.tokenizer, path)
    if not ok then
      assert.truthy(tostring(t):find("tokenizer: " .. path .. ": ", 1, true),
        name .. ": " .. tostring(t))
      return 0
    end
    local sample = "It's 12345 <s>日本 é\n\n\t x\255"
    local fine, ids = pcall(t.encode, t, sample, { special = true })
    if not fine then
      assert.truthy(tostring(ids):find "regular expression .* cannot be matched",
        name .. ": " .. tostring(ids))
      return 1
    end
    t:decode(ids)
    return 1
  end

  for _, base in ipairs { "gpt2", "llama2" } do
    it("of any kind are taken or refused with their name: " .. base, function()
      local text = files.read(goldens.folder .. "/" .. base .. ".json")
      local rng = support.rng(7)
      local taken, rounds = 0, support.is_hostile and 20 or support.is_full and 150 or 75
      for round = 1, rounds do
        local at = 1 + rng(#text)
        taken = taken + try(text:sub(1, at), "cut " .. at)
        local letters = {}
        for _ = 1, 1 + rng(3) do letters[#letters + 1] = string.char(rng(256)) end
        at = 1 + rng(round % 2 == 0 and #text or 2500)
        taken = taken + try(text:sub(1, at) .. table.concat(letters)
          .. text:sub(at + 1 + rng(4)), "changed " .. at)
      end
      assert.is_true(taken > 0 and taken < rounds * 2)
    end)

    it("with other values in their fields are taken or refused: " .. base, function()
      local rng, original = support.rng(11), files.read(goldens.folder .. "/" .. base
        .. ".json")
      local VALUES = { json.null, true, false, 0, -1, 1.5, 1e300, "", "x", "\255", {},
                       { 1 }, { x = 1 }, { json.null } }
      local taken, refused_count = 0, 0
      for round = 1, support.is_hostile and 20 or support.is_full and 300 or 150 do
        local file = json.decode(original)
        local at = file
        for _ = 1, 1 + rng(5) do -- some table inside
          local keys = {}
          for key, value in pairs(at) do
            if type(value) == "table" and key ~= "vocab" then keys[#keys + 1] = key end
          end
          if #keys == 0 then break end
          table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
          at = at[keys[1 + rng(#keys)]]
        end
        local keys = {}
        for key in pairs(at) do keys[#keys + 1] = key end
        table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
        local key = keys[1 + rng(#keys)]
        if key ~= nil then at[key] = VALUES[1 + rng(#VALUES)] end
        local ok, text = pcall(json.encode, file)
        if ok then
          local is_taken = try(text, ("round %d, field %s"):format(round, tostring(key)))
          taken, refused_count = taken + is_taken, refused_count + 1 - is_taken
        end
      end
      assert.is_true(taken > 0 and refused_count > 0)
    end)
  end
end)

describe("without PCRE2 #release", function()
  it("a tokenizer says which package has it", function()
    assert.truthy(require("kvlab.text.regex").version():find "^1%d")
    -- A process of its own, in which no library can be opened.
    local script = temporary.file([[
      local ffi = require "ffi"
      local load = ffi.load
      ffi.load = function(name, ...)
        if name:find "pcre2" then error "no" end
        return load(name, ...)
      end
      local kv = require "kvlab"
      print(pcall(kv.tokenizer, kv.command_line.args[1]))
    ]], "script.lua")
    local pipe = io.popen(files.shell_line { kv.paths.executable, "run", script,
      goldens.folder .. "/gpt2.json" } .. " 2>&1")
    local output = pipe:read "*a"
    pipe:close()
    assert.truthy(output:find("PCRE2 is not here: libpcre2-8.so.0, which splits text "
      .. "into words; it is the Debian package libpcre2-8-0", 1, true), output)
  end)
end)
