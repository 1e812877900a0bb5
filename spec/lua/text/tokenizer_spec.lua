--- kv.tokenizer: what it takes and returns, streams and stop strings, long texts and
-- wrong ones.
local files = require "kvlab.files"
local goldens = require "spec.lua.text.goldens"
local json = require "kvlab.json"
local kv = require "kvlab"
local temporary = require "spec.temporary"
local traces = require "spec.traces"

local REPLACEMENT = "\239\191\189"

local function of(name) return kv.tokenizer(goldens.folder .. "/" .. name .. ".json") end

--- All that a stream gives out, part by part.
local function parts_of(stream, ids)
  local parts = {}
  for i, id in ipairs(ids) do parts[i] = stream:push(id) end
  parts[#parts + 1] = stream:finish()
  return parts
end

--- The tokens of the bytes of a text, in a tokenizer of bytes.
local function bytes_of(t, text)
  local letters, ids = require "kvlab.text.letters", {}
  for i = 1, #text do ids[i] = assert(t:id_of(letters.of_byte[text:sub(i, i)])) end
  return ids
end

describe("a tokenizer", function()
  local gpt2, llama2 = of "gpt2", of "llama2"

  it("knows its tokens", function()
    assert.equal(gpt2:id_of "<|im_end|>", gpt2.size - 2)
    assert.equal("<extra>", gpt2:token_of(gpt2.size - 1))
    assert.is_nil(gpt2:token_of(gpt2.size))
    assert.is_nil(gpt2:id_of "no such token")
    assert.equal(" the", gpt2:bytes_of(gpt2:id_of "Ġthe"))
    assert.equal("\n", llama2:bytes_of(llama2:id_of "<0x0A>"))
    assert.is_true(gpt2.specials[gpt2:id_of "<s>"])
  end)

  it("finds special tokens only when asked to, others always", function()
    local text = "a<|im_end|>b<extra>"
    local plain, special = gpt2:encode(text), gpt2:encode(text, { special = true })
    assert.equal(gpt2:id_of "<extra>", plain[#plain])
    assert.equal(gpt2:id_of "<|im_end|>", special[2])
    assert.equal(4, #special)
    assert.is_true(#plain > 6)
    assert.equal(text, gpt2:decode(plain))
    assert.equal("ab<extra>", gpt2:decode(special))
    assert.equal(text, gpt2:decode(special, { special = true }))
  end)

  it("begins a text as its files say, or as it is asked", function()
    assert.equal(1, llama2:encode("a")[1])
    assert.not_equal(1, llama2:encode("a", { bos = false })[1])
    assert.same({ 1 }, llama2:encode "")
    assert.same({}, gpt2:encode "")
    assert.error_matches(function() gpt2:encode("a", { bos = true }) end,
      "encode: bos is true, but .*gpt2.json names no such token")
  end)

  it("takes special tokens from tokenizer_config.json", function()
    local folder = temporary.folder()
    files.write(folder .. "/tokenizer.json", files.read(goldens.folder .. "/gpt2.json"))
    files.write(folder .. "/tokenizer_config.json", json.encode {
      bos_token = "<s>", eos_token = { content = "</s>" }, add_bos_token = true })
    local t = kv.tokenizer(folder)
    assert.same({ gpt2:id_of "<s>", gpt2:id_of "</s>" }, { t.bos, t.eos })
    assert.equal(t.bos, t:encode("a")[1])
    assert.equal(t.eos, t:encode("a", { eos = true })[3])
    files.write(folder .. "/tokenizer_config.json", json.encode { add_bos_token = true })
    assert.error_matches(function() kv.tokenizer(folder) end,
      "tokenizer_config.json: add_bos_token is true, but bos_token is none")
  end)

  it("takes bytes that are not UTF-8 as U+FFFD, one for each mistake", function()
    for bytes, count in pairs { ["\255"] = 1, ["\195"] = 1, ["\227\129"] = 1,
      ["\227\129\227\129"] = 2, ["\237\160\128"] = 3, ["\240\159\152"] = 1,
      ["\192\128"] = 2, ["\244\144\128\128"] = 4, ["\226\40\161"] = 2 } do
      local text = gpt2:decode(gpt2:encode("a" .. bytes .. "z"))
      assert.equal(count, select(2, text:gsub(REPLACEMENT, "")), ("%q"):format(bytes))
    end
  end)

  it("decodes bytes as they are when asked to", function()
    local ids = bytes_of(gpt2, "a\227\129b\255")
    assert.equal("a" .. REPLACEMENT .. "b" .. REPLACEMENT, gpt2:decode(ids))
    assert.equal("a\227\129b\255", gpt2:decode(ids, { bytes = true }))
  end)

  it("refuses ids that are none, and says which there are", function()
    for _, id in ipairs { gpt2.size, 2 ^ 31 - 1 } do
      assert.error_matches(function() gpt2:decode { 1, id } end,
        "token id " .. ("%.14g"):format(id):gsub("%+", "%%+") .. " is none of "
        .. ".*gpt2.json, expected 0 ... " .. gpt2.size - 1)
    end
    for _, ids in ipairs { { -1 }, { 0.5 }, { "1" }, { 0 / 0 }, { 2 ^ 31 } } do
      assert.error_matches(function() gpt2:decode(ids) end, "ids is a table, exp")
    end
    assert.error_matches(function() gpt2:stream():push(-1) end, "push: id is %-1, exp")
  end)
end)

describe("a stream", function()
  local gpt2, llama2 = of "gpt2", of "llama2"

  it("gives out whole characters", function()
    local parts = parts_of(gpt2:stream(), bytes_of(gpt2, "aé日🙂z"))
    assert.same({ "a", "", "é", "", "", "日", "", "", "", "🙂", "z", "" }, parts)
  end)

  it("writes U+FFFD as soon as bytes cannot become a character", function()
    local parts = parts_of(gpt2:stream(), bytes_of(gpt2, "\227a\255\240\159b\195"))
    local r = REPLACEMENT
    assert.same({ "", r .. "a", r, "", "", r .. "b", "", r }, parts)
  end)

  it("leaves out the space that begins a text, once", function()
    local ids = llama2:encode("  a b", { bos = false })
    assert.equal("  a b", table.concat(parts_of(llama2:stream(), ids)))
    local with_bos = llama2:encode "a"
    assert.equal("a", table.concat(parts_of(llama2:stream(), with_bos)))
    assert.equal("<s> a", table.concat(parts_of(llama2:stream { special = true },
      with_bos)))
  end)

  it("is what decode returns, however texts are cut", function()
    local rng = require("spec.support").rng(3)
    for _, t in ipairs { gpt2, llama2, of "llama3" } do
      for _ = 1, 200 do
        local ids = {}
        for i = 1, rng(12) do ids[i] = rng(t.size) end
        local options = { special = rng(2) == 0 }
        assert.equal(t:decode(ids, options),
          table.concat(parts_of(t:stream(options), ids)))
      end
    end
  end)

  it("ends before a stop string, which may span tokens", function()
    local stream = gpt2:stream { stop = { "STOP", "\n\n" } }
    local parts = parts_of(stream, bytes_of(gpt2, "one STstSTOP two"))
    assert.equal("one STst", table.concat(parts))
    assert.equal("STOP", stream.stopped)
    assert.equal("", stream:push(bytes_of(gpt2, "x")[1]))
    stream = gpt2:stream { stop = { "STOP", "\n\n" } }
    assert.equal("a\nb ST", table.concat(parts_of(stream, bytes_of(gpt2, "a\nb ST"))))
    assert.is_nil(stream.stopped)
  end)

  it("holds back no more than may become a stop string", function()
    local stream = gpt2:stream { stop = { "abab!" } }
    assert.same({ "", "", "", "", "ab", "", "abab" },
      parts_of(stream, bytes_of(gpt2, "ababab")))
    stream = gpt2:stream { stop = { "é", "日本" } }
    assert.same({ "", "è", "", "", "", "日x", "" }, parts_of(stream,
      bytes_of(gpt2, "è日x")))
  end)

  it("takes the stop string that begins first, then the longest", function()
    for _, case in ipairs { { "xab", { "b", "ab" }, "x", "ab" },
      { "xabc", { "ab", "abc" }, "x", "ab" }, { "xyz", { "z", "y" }, "x", "y" } } do
      local stream = gpt2:stream { stop = case[2] }
      local text = table.concat(parts_of(stream, bytes_of(gpt2, case[1])))
      assert.same({ case[3], case[4] }, { text, stream.stopped })
    end
    local stops = require("kvlab.text.stream").stops { "ab", "abc" }
    assert.same({ "x", "abc" }, { stops:push "xabcd", stops.found })
  end)

  it("refuses stop strings that no text can have", function()
    for _, stop in ipairs { { "" }, { "\255" }, { 7 }, "x" } do
      assert.error_matches(function() gpt2:stream { stop = stop } end,
        "stream: stop is .*, expected a list, each a string of UTF%-8")
    end
  end)
end)

describe("long texts", function()
  it("of one word, of spaces and of one letter come back", function()
    for _, name in ipairs { "gpt2", "llama2", "across", "llama3" } do
      local t = of(name)
      for _, text in ipairs { ("a"):rep(30000), (" "):rep(30000), ("the"):rep(10000),
        ("日本"):rep(5000), ("\n"):rep(10000), ("é\255"):rep(1000) } do
        local ids = t:encode(text)
        assert.equal((text:gsub("\255", REPLACEMENT)), t:decode(ids))
      end
    end
  end)

  it("are merged as short ones are", function()
    local t, letters = of "gpt2", {}
    local rng = require("spec.support").rng(5)
    for i = 1, 400 do letters[i] = ("etaoinshrdlu"):sub(rng(12) + 1, -1):sub(1, 1) end
    local word = table.concat(letters)
    -- By the definition: merge the pair of the lowest rank, the leftmost, until none is.
    local model = goldens.read("gpt2").model
    local rank, symbols = {}, letters
    for i, merge in ipairs(model.merges) do
      rank[type(merge) == "table" and merge[1] .. " " .. merge[2] or merge] = i
    end
    while true do
      local best, at = math.huge, nil
      for i = 1, #symbols - 1 do
        local r = rank[symbols[i] .. " " .. symbols[i + 1]] or math.huge
        if r < best then best, at = r, i end
      end
      if not at then break end
      symbols[at] = symbols[at] .. table.remove(symbols, at + 1)
    end
    local wanted = {}
    for i, symbol in ipairs(symbols) do wanted[i] = model.vocab[symbol] end
    assert.same(wanted, t:encode(word))
  end)

  it("that are too long are refused", function()
    local text = ("x"):rep(2 ^ 27 + 1)
    assert.error_matches(function() of("gpt2"):encode(text) end,
      "encode: text is 134217729 bytes, expected 134217728 or fewer")
  end)

  it("are encoded by compiled code", function()
    local t, text = of "gpt2", table.concat(goldens.texts())
    local aborts, formed = traces.aborts_of(function()
      for _ = 1, 5 do t:encode(text) end
    end)
    -- Of the loops over merges, LuaJIT also tries longer forms, for some of which it has
    -- too few registers; the loops themselves are compiled.
    local others = {}
    for _, text_of_abort in ipairs(aborts) do
      if not text_of_abort:find "register coalescing" then
        others[#others + 1] = text_of_abort
      end
    end
    assert.same({}, others)
    assert.is_true(#aborts * 5 < formed)
  end)

  it("keep a bounded number of words", function()
    local t, words = of "gpt2", {}
    for i = 1, 70000 do words[i] = ("%x"):format(i * 7919) end
    local text = table.concat(words, " ")
    local ids = t:encode(text)
    assert.is_true(t.bpe.kept_count <= 2 ^ 16)
    assert.equal(text, t:decode(ids))
    assert.same(ids, t:encode(text))
  end)
end)
