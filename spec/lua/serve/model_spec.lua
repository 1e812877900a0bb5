--- Models that answer, in a script and in the REPL: fed by a pipe, and at a terminal
-- (tmux). The model is small and random; spec/models/generate_spec.lua has a real one.
local kv = require "kvlab"
local processes = require "spec.processes"
local temporary = require "spec.temporary"
local text_models = require "spec.text_models"

local C = kv.C
local executable = kv.paths.executable or kv.paths.library_dir .. "/kvlab"
local folder = text_models.folder()

local function open()
  return kv.model(folder, { device = "cpu", dtype = "f32",
                            engine = { blocks = 32, chunk = 64 } })
end

describe("kv.model", function()
  it("opens a model with its tokenizer and an engine", function()
    local m = open()
    assert.equal(128, m.tokenizer.size)
    assert.equal(512, m.model.config.context)
    local answer = m:generate("Hello", { max_tokens = 6 })
    local direct = kv.generate(m.engine, "Hello", { max_tokens = 6,
                                                    tokenizer = m.tokenizer })
    assert.same(direct, answer)
    assert.equal(6, #answer.ids)
  end)

  it("knows how many tokens the model reads", function()
    local llama = require "models.llama"
    local function context(name, o)
      o = o or {}
      o.device = "cpu"
      return llama.load(kv.paths.root .. "/spec/data/hf/" .. name, o).config.context
    end
    assert.equal(512, context "llama")
    assert.equal(8 * 64, context "yarn_mscale") -- more than max_position_embeddings
    assert.equal(16, context "dynamic")
    assert.equal(100, context("dynamic", { context = 100 }))
  end)

  it("decodes with the policy that a call names, and without one as before", function()
    local m = open()
    local text = ("abc"):rep(30)
    local function direct(policy)
      local engine = m.model:engine { blocks = 32, chunk = 64, policy = policy }
      return kv.generate(engine, text, { max_tokens = 9, tokenizer = m.tokenizer,
                                         logprobs = 1 })
    end
    local full, quest = direct(), direct(kv.policy("quest", { tokens = 16 }))
    assert.are_not.same(full, quest)
    local function answer(o)
      o.max_tokens, o.logprobs = 9, 1
      return m:generate(text, o)
    end
    assert.same(full, answer {})
    assert.same(quest, answer { policy = "quest", tokens = 16 })
    assert.same(quest, answer { policy = kv.policy("quest", { tokens = 16 }) })
    assert.same(full, answer {})
  end)

  it("opens its engine anew for a policy that evicts, and goes back", function()
    local m = open()
    local text, engine = ("A few words. "):rep(10), m.engine
    local function answer(o)
      o.max_tokens, o.logprobs = 12, 1
      return m:generate(text, o)
    end
    local full = answer {}
    for _, name in ipairs { "tova", "snapkv", "streaming" } do
      local direct = kv.generate(m.model:engine { blocks = 32, chunk = 64,
        policy = kv.policy(name, { blocks = 3 }) }, text, { max_tokens = 12,
        tokenizer = m.tokenizer, logprobs = 1 })
      local got = answer { policy = name, blocks = 3 }
      assert.same(direct, got)
      assert.are_not.same(full, got)
      assert.equal("head", m.engine.cache.tables)
      assert.equal(m.engine.cache.pages, m.engine.cache:pages_free())
    end
    assert.same(full, answer {})
    assert.equal("one", m.engine.cache.tables)
    assert.are_not.equal(engine, m.engine)
    assert.equal(32, engine.cache:blocks_free()) -- whoever has the old one can use it
    local text_of = m:generate("Hello", { max_tokens = 500, policy = "tova", blocks = 3,
                                          ignore_eos = true })
    assert.equal(500, #text_of.ids)
  end)

  it("keeps its engine where the one that an eviction needs cannot be opened", function()
    local m = kv.model(folder, { device = "cpu", dtype = "f32",
      engine = { blocks = 32, offload = { slots = 2 } } })
    local text = m:generate("Hello", { max_tokens = 6 }).text
    local ok, why = pcall(m.generate, m, "Hello", { policy = "tova" })
    assert.is_false(ok)
    assert.matches("tables by head do not go with KV in host memory", why)
    assert.equal(text, m:generate("Hello", { max_tokens = 6 }).text)
    m = kv.model(folder, { device = "cpu", dtype = "f32",
                           engine = { blocks = 32, tables = "one" } })
    ok, why = pcall(m.generate, m, "Hello", { policy = "tova" })
    assert.is_false(ok)
    assert.matches('does not go with tables = "one"', why)
  end)

  it("names a prompt and an answer that a policy that evicts has no room for", function()
    local m = open()
    local function refused(words, text, o)
      local ok, why = pcall(m.generate, m, text, o)
      assert.is_false(ok)
      assert.truthy(why:find(words, 1, true), why)
    end
    refused("prompt 1 has 500 tokens, but the engine's cache of 128 pages has no room "
      .. "for it and for what policy tova keeps of it", ("a"):rep(500),
      { policy = "tova", blocks = 3 })
    refused("has 400 tokens and max_tokens is 200, but the model's context is 512",
      ("a"):rep(400), { policy = "tova", blocks = 3, max_tokens = 200 })
    m = kv.model(folder, { device = "cpu", dtype = "f32", engine = { blocks = 20 } })
    refused("prompt 1 has 200 tokens and max_tokens is 300, but the engine's cache has "
      .. "room for 472 under policy snapkv", ("a"):rep(200),
      { policy = "snapkv", blocks = 3, max_tokens = 300 })
    assert.equal(273, #m:generate(("a"):rep(200), { policy = "snapkv", blocks = 3,
                                                    max_tokens = 273,
                                                    ignore_eos = true }).ids)
  end)

  it("answers the same with drafts by a policy, and chats with them", function()
    local m = open()
    local DRAFT = { policy = "quest", ratio = 0.2, tokens = 3 }
    for _, o in ipairs { {}, { temperature = 0.8, seed = 3 }, { stop = { "e", "o" } },
                         { policy = "streaming_blocks", blocks = 2 } } do
      local function run(draft)
        local all = { max_tokens = 20, draft = draft }
        for name, value in pairs(o) do all[name] = value end
        return m:generate("Hello, you there!", all)
      end
      local plain, got = run(), run(DRAFT)
      assert.equal(plain.text, got.text)
      assert.same(plain.ids, got.ids)
      assert.equal(plain.stop, got.stop)
      assert.is_true(#got.ids < 2 or got.draft.steps > 0)
    end
    local function chat(draft)
      local texts, reads = {}, 0
      m:chat { max_tokens = 6, draft = draft, read = function()
        reads = reads + 1
        return reads < 3 and "Hello" or nil
      end, on_text = function(text) texts[#texts + 1] = text end }
      return table.concat(texts)
    end
    assert.equal(chat(), chat(DRAFT))
  end)

  it("has no text for ids that the tokenizer does not have", function()
    local m = open() -- of 128 tokens
    m.tokenizer = text_models.tokenizer(97)
    local answer = m:generate("Hello", { max_tokens = 60, temperature = 50, seed = 1,
                                         ignore_eos = true })
    assert.equal("length", answer.finish_reason)
    local known = {}
    for _, id in ipairs(answer.ids) do if id < 97 then known[#known + 1] = id end end
    assert.is_true(#known < 60)
    assert.equal(m.tokenizer:decode(known), answer.text)
  end)

  it("keeps its graphs from call to call", function()
    local m = kv.model(folder, { device = "cpu", dtype = "f32",
                                 engine = { blocks = 32, graph = true } })
    local first = m:generate("Hello", { max_tokens = 6 })
    local graph = m.engine.graphs[1]
    assert.truthy(graph)
    assert.same(first, m:generate("Hello", { max_tokens = 6 }))
    assert.equal(graph, m.engine.graphs[1])
    m:generate("Hello", { max_tokens = 6, policy = "quest" })
    assert.are_not.equal(graph, m.engine.graphs[1])
    assert.same(first, m:generate("Hello", { max_tokens = 6 }))
  end)

  it("shows the tokens of a text", function()
    local tokens = open():tokens 'Hi "\1'
    assert.same({ id = 40, text = "H" }, tokens[1])
    assert.matches('^     40  "H"\n     73  "i"\n      0  " "\n      2  "\\""',
      tostring(tokens))
  end)

  it("maps which blocks an answer read, named by their text", function()
    local m = open()
    local text = "A text of three blocks, with few words in it."
    local o = { max_tokens = 5, policy = "quest", tokens = 32, layers = { 1 },
                title = "a map", temperature = 1 }
    local map, answer = m:selection_map(text, o)
    assert.equal("a map", map.title)
    assert.equal(2, #map.panels) -- of two KV heads
    assert.same({ "A text of t…", "blocks, wit…", " words in i…" },
      { unpack(map.column_names, 1, 3) })
    assert.equal(4, #map.column_names)
    assert.equal(4, map.rows) -- no step reads the last token
    for i = 1, 4 do
      assert.equal(m.tokenizer:decode({ answer.ids[i] }, { special = true }),
        map.row_names[i])
    end
    local chosen = 0
    for _, x in ipairs(map.panels[1].values) do chosen = chosen + (x == 1 and 1 or 0) end
    assert.is_true(chosen > 0 and chosen < #map.panels[1].values)
    o.layers, o.title = nil, nil
    assert.same(answer, m:generate(text, o))
    assert.is_nil(m.engine.attention.probe) -- nobody watches any more
  end)

  it("draws no map of a policy that evicts", function()
    local ok, why = pcall(open().selection_map, open(), "Hello", { policy = "tova",
                                                                   blocks = 3 })
    assert.is_false(ok)
    assert.matches("selection_map: policy tova evicts tokens, so what it reads are no",
      why)
  end)

  it("names what is wrong, and blames the caller's line", function()
    local m = open()
    local function refused(words, o)
      local line = debug.getinfo(1, "l").currentline + 1
      local ok, text = pcall(function() m:generate("x", o) end)
      assert.is_false(ok)
      assert.truthy(text:find("model_spec.lua:" .. line .. ": ", 1, true), text)
      assert.truthy(text:find(words, 1, true), text)
    end
    refused('generate: "polcy" is no option, did you mean policy?', { polcy = "quest" })
    refused('generate: "ratio" is no option', { ratio = 0.1 })
    refused('policy quest: "raito" is no option, did you mean ratio?',
      { policy = "quest", raito = 0.1 })
    refused('no policy "qest"; did you mean "quest"?', { policy = "qest" })
    refused("generate: policy is 3, expected a policy's name", { policy = 3 })
    refused("generate: top_k is -1, expected a whole number >= 0", { top_k = -1 })
    refused("generate: options are 3, expected a table", 3)
    refused('generate: "ratio" is no option without a policy; an option of a policy '
      .. "stands beside policy = NAME", { ratio = 0.1 })
    refused('generate: "tpo_k" is no option, did you mean top_k?', { tpo_k = 3 })
  end)

  it("says why a model cannot be opened", function()
    local function refused(words, name)
      local ok, text = pcall(kv.model, name, { device = "cpu" })
      assert.is_false(ok)
      assert.truthy(tostring(text):find(words, 1, true), text)
    end
    refused("config.json", "/no/such/folder")
    local recall = kv.paths.root .. "/lua/models/recall"
    refused("tokenizer.json", recall)
    local _, why = pcall(kv.model, recall, { device = "cpu" })
    assert.equal(("tokenizer: %s is no tokenizer.json and no folder with one"):format(
      recall), why)
    refused("name is 3, expected a string", 3)
  end)
end)

-- ---- conversations --------------------------------------------------------------------

local OPEN = ("m = kv.model(%q, { device = 'cpu', dtype = 'f32', "
  .. "engine = { blocks = 32 } })"):format(folder)

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function ask(command)
  local pipe = io.popen(command)
  local answer = pipe:read "*a"
  pipe:close()
  return answer
end

--- What a conversation says, answer by answer.
local function said(lines, o)
  local m, messages, texts = open(), { { role = "system", content = "Be brief." } }, {}
  for i, line in ipairs(lines) do
    messages[#messages + 1] = { role = "user", content = line }
    local _, ids = m.tokenizer:chat(messages, { add_generation_prompt = true })
    texts[i] = m:generate(ids, o).text
    messages[#messages + 1] = { role = "assistant", content = texts[i] }
  end
  return texts
end

describe("a chat", function()
  it("in a pipe answers each line as a part of the conversation", function()
    local path = temporary.path()
    local file = assert(io.open(path, "w"))
    file:write(OPEN, '\nm:chat { system = "Be brief.", max_tokens = 5, temperature = 1, ',
      "seed = 4 }\nHello\n  \nAnd then?")
    file:close()
    local o = { max_tokens = 5, temperature = 1, seed = 4 }
    local texts = said({ "Hello", "And then?" }, o)
    assert.are_not.equal(texts[1], texts[2])
    assert.equal(table.concat(texts, "\n") .. "\n",
      ask(("%s repl --device=cpu <%s 2>&1"):format(quote(executable), quote(path))))
  end)

  it("is a verb, which takes a policy that evicts", function()
    local line = ("%s chat %s --device=cpu --dtype=f32 --policy=tova --set blocks=3 "
      .. "--set engine.blocks=32 --set max_tokens=7 <%s 2>&1")
    local path = temporary.path()
    local file = assert(io.open(path, "w"))
    file:write "Hello, you there!\nSo?\n"
    file:close()
    local written, m, at = {}, open(), 0
    m:chat { max_tokens = 7, policy = "tova", blocks = 3,
      read = function()
        at = at + 1
        written[#written + 1] = at > 1 and "\n" or ""
        return ({ "Hello, you there!", "So?" })[at]
      end,
      on_text = function(text) written[#written + 1] = text end }
    assert.equal(table.concat(written), ask(line:format(quote(executable), quote(folder),
      quote(path))))
    assert.matches('"polcy" is no option',
      ask(("%s chat %s --set polcy=1 2>&1 </dev/null"):format(quote(executable),
        quote(folder))))
  end)

  it("gives back all blocks, and takes lines from a function", function()
    local script = temporary.path()
    local file = assert(io.open(script, "w"))
    file:write('kv = require "kvlab"\n', OPEN, [[

local lines, at = { "a", "b" }, 0
m:chat { max_tokens = 3, read = function() at = at + 1 return lines[at] end,
         on_text = function() return false end }
print(at, m.engine.cache:blocks_free())]])
    file:close()
    assert.matches("\n3\t32\n$",
      ask(("%s run --device=cpu %s 2>&1"):format(quote(executable), quote(script))))
  end)

  it("goes on from what a policy that evicts holds", function()
    for _, name in ipairs { "tova", "snapkv" } do
      local m, lines, at, turns, read = open(), { "Hello, you there!", "So?", "Bye" }, 0,
        {}, 0
      local engine = m:engine_for(kv.policy(name))
      local batch = engine.prefill_batch
      function engine.prefill_batch(self, seqs, counts, ...)
        for _, n in ipairs(counts) do read = read + n end
        return batch(self, seqs, counts, ...)
      end
      m:chat { max_tokens = 9, policy = name, blocks = 3,
        read = function()
          at = at + 1
          turns[at] = { text = "" }
          return lines[at]
        end,
        on_text = function(text, answer)
          turns[at].text, turns[at].ids = turns[at].text .. text, answer.ids
          if at == 2 and #answer.ids == 3 then C.kvl_interrupt(1) end -- Ctrl-C
        end }
      assert.equal(3, #turns[2].ids)
      assert.equal(engine, m.engine)
      assert.equal(engine.cache.pages, engine.cache:pages_free())

      local e = m.model:engine { blocks = 32, chunk = 64,
        policy = kv.policy(name, { blocks = 3 }) }
      local seq, messages, before, newest, count = e:sequence(), {}, 0, {}, 0
      for i, line in ipairs(lines) do
        messages[#messages + 1] = { role = "user", content = line }
        local _, ids = m.tokenizer:chat(messages, { add_generation_prompt = true })
        -- of the answer, the last token is not in the sequence; the others are
        local is_ended = newest[1] == m.tokenizer.eos
        local rest = { unpack(newest) }
        for t = before + (is_ended and 2 or 1), #ids do rest[#rest + 1] = ids[t] end
        count = count + #rest
        local answer = e:generate(seq, e:prefill(seq, rest), #turns[i].ids)
        assert.same(answer, turns[i].ids)
        messages[#messages + 1] = { role = "assistant", content = turns[i].text }
        before, newest = #ids + #turns[i].text, { answer[#answer] }
      end
      assert.equal(count, read)
      assert.is_true(seq:held(0, 0) < seq:length())
      e.cache:close()
    end
  end)

  it("reads a conversation anew whose answer does not stand in it", function()
    local m, at, read = open(), 0, 0
    local engine = m:engine_for(kv.policy "tova")
    local batch = engine.prefill_batch
    function engine.prefill_batch(self, seqs, counts, ...)
      for _, n in ipairs(counts) do read = read + n end
      return batch(self, seqs, counts, ...)
    end
    m.tokenizer.template = "{% for m in messages %}{% if m.role == 'user' %}"
      .. "{{ m.content }}{% endif %}{% endfor %}{{ '<|im_start|>' }}"
    m:chat { max_tokens = 5, policy = "tova", blocks = 3, read = function()
      at = at + 1
      return ({ "abc", "defg" })[at]
    end }
    assert.equal(4 + 8, read)
    assert.equal(engine.cache.pages, engine.cache:pages_free())
  end)

  it("gives its variables to the template", function()
    local m, reads = open(), 0
    m.tokenizer.template = text_models.CHATML
      .. "{% if stops %}{{ raise_exception('It stops.') }}{% endif %}"
    local function read()
      reads = reads + 1
      return reads == 1 and "Hello" or nil
    end
    m:chat { max_tokens = 1, read = read, variables = { stops = false } }
    reads = 0
    assert.error_matches(function()
      m:chat { max_tokens = 1, read = read, variables = { stops = true } }
    end, "It stops%.")
    reads = 0
    assert.error_matches(function()
      m:chat { max_tokens = 1, read = read, variables = { stosp = true } }
    end, "reads no stosp, did you mean stops%?")
  end)

  it("ends with an error when the logits give no token", function()
    local m = open()
    m.model.logits = function(_, _, out) out:fill_(0 / 0) end
    local o = { max_tokens = 4, read = function() return "Hello" end }
    local ok, why = pcall(m.chat, m, o)
    assert.is_false(ok)
    assert.matches("the model's logits for token 1 of its output hold NaN", why)
  end)

  it("at a terminal goes on after Ctrl-C and ends with Ctrl-D", function()
    if not ask("command -v tmux"):find "%S" then return pending "no tmux" end
    local socket = temporary.path()
    local function tmux(words)
      return ask(("tmux -S %s %s 2>&1"):format(socket, words))
    end
    local function screen() return (tmux "capture-pane -p -J":gsub("%s+$", "")) end
    local function wait(pattern)
      local ok = pcall(processes.wait_until, function()
        return screen():find(pattern .. "$")
      end, "")
      if not ok then
        error(("the screen never ended with %s:\n%s"):format(pattern, screen()), 2)
      end
    end
    local function enter(text)
      tmux("send-keys -l -- " .. quote(text))
      tmux "send-keys Enter"
    end
    tmux("-f /dev/null new-session -d -x 200 -y 60 " .. quote(("env XDG_STATE_HOME=%s "
      .. "TERM=screen %s repl"):format(temporary.folder(), quote(executable))))
    wait "%[1%]"
    enter(OPEN)
    wait "%[2%]"
    -- the second answer would never end, once it has written =
    enter("n = 0 m:chat { max_tokens = 2, temperature = 1, on_text = function(_, a) "
      .. "if #a.ids == 1 then n = n + 1 end if n == 2 then io.write('=') io.flush() end "
      .. "while n == 2 do end end }")
    wait "\n>"
    enter "Hello"
    wait "Hello\n[^\n]+\n>"
    enter "Hello"
    wait "Hello\n[^\n]*="
    tmux "send-keys C-c"
    wait "\n>"
    tmux "send-keys -l -- half"
    wait "\n> half"
    tmux "send-keys C-c"
    wait "half[^\n]*\n>"
    enter "Hello"
    wait "Hello\n[^\n]+\n>"
    tmux "send-keys C-d"
    wait "%[3%]"
    enter "n, m.engine.cache:blocks_free()"
    wait "3%s+32\n%[4%]"
    tmux "kill-server"
  end)
end)
