--- Tokenizers of GGUF metadata: ids equal those of the packages `sentencepiece` and
-- `tokenizers`.
local goldens = require "spec.lua.text.goldens"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

--- Metadata of a small tokenizer as GGUF has it.
local function small(changes)
  local letters = require "kvlab.text.letters"
  local metadata = {
    ["tokenizer.ggml.model"] = "gpt2", ["tokenizer.ggml.pre"] = "gpt-2",
    ["tokenizer.ggml.tokens"] = {}, ["tokenizer.ggml.merges"] = { "a b", "ab c" },
    ["tokenizer.ggml.token_type"] = {}, ["general.name"] = "small",
    ["tokenizer.ggml.bos_token_id"] = 258, ["tokenizer.ggml.eos_token_id"] = 259,
  }
  local tokens = metadata["tokenizer.ggml.tokens"]
  for byte = 0, 255 do tokens[byte + 1] = letters.of_byte[string.char(byte)] end
  for _, token in ipairs { "ab", "abc", "<s>", "</s>", "<user>" } do
    tokens[#tokens + 1] = token
  end
  for i = 1, #tokens do
    metadata["tokenizer.ggml.token_type"][i] = i <= 258 and 1 or i <= 260 and 3 or 4
  end
  for key, value in pairs(changes or {}) do
    if value == "none" then value = nil end
    metadata["tokenizer.ggml." .. key] = value
  end
  return metadata
end

--- The metadata of SmolLM2, which `./kvlab get smollm2` fetches; nil if it is not there.
local function smollm2()
  local home = os.getenv "XDG_CACHE_HOME" or (os.getenv "HOME" or "") .. "/.cache"
  local path = home .. "/kvlab/models/SmolLM2-135M-Instruct.Q4_1.gguf"
  local file = kv.gguf and io.open(path)
  if not file then return nil end
  file:close()
  return kv.gguf(path).metadata
end

describe("a tokenizer of GGUF metadata", function()
  local texts = goldens.texts()

  it("encodes with scores as sentencepiece does", function()
    local golden, count = goldens.read "sentencepiece", 0
    local t = kv.tokenizer {
      ["tokenizer.ggml.model"] = "llama", ["tokenizer.ggml.tokens"] = golden.tokens,
      ["tokenizer.ggml.scores"] = golden.scores,
      ["tokenizer.ggml.token_type"] = golden.token_type,
      ["tokenizer.ggml.bos_token_id"] = 1, ["tokenizer.ggml.eos_token_id"] = 2,
    }
    for i, text in ipairs(texts) do
      local ids = t:encode(text, { bos = false })
      local what = ("text %d, %q"):format(i, text)
      assert.same({ golden.rows[i][1], golden.rows[i][2] }, { #ids,
        goldens.crc_of_ids(ids) }, what)
      count = count + #ids
    end
    assert.same({ 1 }, { t:encode("x")[1] })
    goldens.report("sentencepiece", count)
  end)

  -- A name in tokenizer.ggml.pre, and the case of the goldens that splits so.
  for name, case_name in pairs { ["gpt-2"] = "gpt2", ["llama-bpe"] = "llama3",
    qwen2 = "qwen2", smollm = "smollm", ["deepseek-v3"] = "deepseek-v3",
    tekken = "tekken", ["gpt-4o"] = "gpt-4o" } do
    it("splits text as tokenizers does by the rules of " .. name, function()
      local case
      for _, one in ipairs(goldens.read("goldens").cases) do
        if one.name == case_name then case = one end
      end
      local file = goldens.read(case.file)
      local tokens, kinds, merges = {}, {}, {}
      for token, id in pairs(file.model.vocab) do
        tokens[id + 1], kinds[id + 1] = token, 1
      end
      for _, token in ipairs(file.added_tokens) do
        tokens[token.id + 1] = token.content
        kinds[token.id + 1] = token.special and 3 or 4
      end
      for i, merge in ipairs(file.model.merges) do
        merges[i] = table.concat(merge, " ")
      end
      local has_bos = file.post_processor.type == "TemplateProcessing"
      local t = kv.tokenizer {
        ["tokenizer.ggml.model"] = "gpt2", ["tokenizer.ggml.pre"] = name,
        ["tokenizer.ggml.tokens"] = tokens, ["tokenizer.ggml.token_type"] = kinds,
        ["tokenizer.ggml.merges"] = merges, ["tokenizer.ggml.add_bos_token"] = has_bos,
        ["tokenizer.ggml.bos_token_id"] = file.added_tokens[2].id,
      }
      goldens.report("GGUF, " .. name, goldens.compare(t, texts, case.rows))
    end)
  end

  it("encodes as that of SmolLM2 does #model", function()
    local metadata = smollm2()
    if not metadata then return pending "get the model: ./kvlab get smollm2" end
    local t = kv.tokenizer(metadata)
    goldens.report("smollm2", goldens.compare(t, texts, goldens.read("smollm2").rows))
    for _, row in ipairs(goldens.read("chats").rows) do
      assert.equal(row.text, (t:chat(row.messages,
        { add_generation_prompt = row.prompt })))
    end
  end)

  it("has the templates of the metadata, and its tokens in them", function()
    local metadata = small { eos_token_id = 259 }
    metadata["tokenizer.chat_template"] = "D{{ eos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "T{{ tools|length }}"
    metadata["tokenizer.chat_templates"] = { "tool_use" }
    local t, hello = kv.tokenizer(metadata), { { role = "user", content = "Hello" } }
    assert.equal("D" .. t:token_of(259), (t:chat(hello)))
    assert.equal("T1", (t:chat(hello, { tools = { { name = "f" } } })))
    metadata["tokenizer.chat_template"] = 7
    assert.error_matches(function() kv.tokenizer(metadata) end,
      "tokenizer.chat_template is 7, expected a string")
  end)

  it("has the special tokens of the metadata", function()
    local t = kv.tokenizer(small { eot_token_id = 260, unknown_token_id = 0 })
    assert.same({ 258, 259, 260, 0 }, { t.bos, t.eos, t.eot, t.unk })
    assert.equal(261, t.size)
    assert.same({ 257, 260 }, t:encode "abc<user>")
    assert.same({ 60, 115, 62 }, t:encode "<s>")
    assert.same({ 258 }, t:encode("<s>", { special = true }))
    assert.same({ 258, 97, 259 }, t:encode("a", { bos = true, eos = true }))
  end)

  it("adds what begins and ends a text as the metadata say", function()
    assert.same({ 97 }, kv.tokenizer(small()):encode "a")
    assert.same({ 258, 97 }, kv.tokenizer(small { pre = "llama-bpe" }):encode "a")
    local both = small { add_bos_token = true, add_eos_token = true }
    assert.same({ 258, 97, 259 }, kv.tokenizer(both):encode "a")
    assert.same({ 97 }, kv.tokenizer(small { pre = "llama3", add_bos_token = false })
      :encode "a")
  end)

  local WRONG = {
    { { model = "bert" }, 'tokenizer.ggml.model is "bert", expected one of gpt2, llama' },
    { { pre = "falcon" }, 'tokenizer.ggml.pre is "falcon", expected one of deepseek' },
    { { pre = "none" }, "tokenizer.ggml.pre is nil, expected one of" },
    { { tokens = {} }, "tokenizer.ggml.tokens is a table, expected a list of strings" },
    { { tokens = { "a", 7 } }, "tokenizer.ggml.tokens is a table, expected a list" },
    { { merges = "none" }, "tokenizer.ggml.merges is nil, expected a list of strings" },
    { { merges = { "a q" } }, "model.merges%[0%] .*\"aq\", which is not in model.vocab" },
    { { merges = { "ab" } }, 'model.merges%[0%] is "ab", expected two tokens' },
    { { token_type = { 1 } }, "token_type is a table, expected a list of 261 numbers" },
    { { bos_token_id = 999 }, "tokenizer.ggml.bos_token_id is 999, expected 0 ... 260" },
    { { bos_token_id = -1 }, "tokenizer.ggml.bos_token_id is %-1, expected a whole" },
    { { add_bos_token = 1 }, "tokenizer.ggml.add_bos_token is 1, expected true" },
    { { add_eos_token = true, eos_token_id = "none" }, "eos_token_id is nil, expected" },
    { { model = "llama" }, "tokenizer.ggml.scores is nil, expected a list of 261" },
  }
  for i, wrong in ipairs(WRONG) do
    it("names the wrong field " .. i .. ": " .. table.concat(sorted.keys(wrong[1]), " "),
      function()
        assert.error_matches(function() kv.tokenizer(small(wrong[1])) end,
          "^tokenizer: GGUF metadata: .*" .. wrong[2])
      end)
  end
end)
