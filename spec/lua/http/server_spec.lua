--- The server of OpenAI's API, over real sockets, with a small random model: what is
-- answered equals what the engine computes alone, whatever others ask at the same time
-- and however badly they behave.
local client = require "spec.http_client"
local json = require "kvlab.json"
local kv = require "kvlab"
local named = require "kvlab.named"
local processes = require "spec.processes"
local servers = require "spec.http_servers"

local family, tokenizer = servers.family, servers.tokenizer
local open, engine = servers.open, servers.engine

after_each(servers.close_all)

local function post(server, path, body, headers)
  return client.ask(server, "POST", path, body, headers)
end

local function complete(server, body)
  local answer = post(server, "/v1/completions", body)
  assert.equal(200, answer.status, answer.body)
  return answer:json()
end

--- What kv.generate answers on an engine of its own.
local function alone(prompt, o, policy)
  local e = engine { policy = policy }
  o.tokenizer = tokenizer
  local answer = kv.generate(e, prompt, o)
  e.cache:close()
  return answer
end

--- Waits until so many requests have arrived in all, without running the server: so it
-- takes those that are new together.
local function wait_for_requests(server, count)
  processes.wait_until(function()
    return server.http:stats().requests == count
  end, "the requests")
end

local function problem_of(answer, status)
  assert.equal(status, answer.status, answer.body)
  assert.truthy(answer.head:find "application/json")
  local object = answer:json()
  assert.same({ "error" }, { next(object) and "error" })
  assert.string(object.error.message)
  assert.string(object.error.type)
  return object.error
end

local PROMPT = "A prompt, of several blocks!"

describe("completions", function()
  it("are what kv.generate answers, greedy and drawn, for texts and for ids", function()
    local server = open()
    for _, o in ipairs { { temperature = 0 }, { temperature = 1.3, seed = 7 },
                         { temperature = 0.9, seed = 3, top_k = 9, top_p = 0.8 } } do
      local own = alone(PROMPT, { temperature = o.temperature, seed = o.seed,
        top_k = o.top_k,
                                  top_p = o.top_p, max_tokens = 20 })
      o.prompt, o.max_tokens = PROMPT, 20
      local object = complete(server, o)
      assert.equal(own.text, object.choices[1].text)
      assert.equal(own.finish_reason, object.choices[1].finish_reason)
      assert.same({ prompt_tokens = #PROMPT, completion_tokens = #own.ids,
                    total_tokens = #PROMPT + #own.ids }, object.usage)
      o.prompt = json.array(tokenizer:encode(PROMPT))
      assert.equal(own.text, complete(server, o).choices[1].text)
    end
  end)

  it("have n answers for each of several prompts, in their order", function()
    local server = open()
    local object = complete(server, { prompt = { PROMPT, "Other" }, n = 3, seed = 11,
                                      temperature = 1, max_tokens = 6 })
    local i = 0
    for _, prompt in ipairs { PROMPT, "Other" } do
      for k = 0, 2 do
        i = i + 1
        local own = alone(prompt, { temperature = 1, seed = 11 + k, max_tokens = 6 })
        assert.equal(i - 1, object.choices[i].index)
        assert.equal(own.text, object.choices[i].text)
      end
    end
    assert.is_nil(object.choices[7])
  end)

  it("end at stop strings and at stop tokens", function()
    local server = open()
    local whole = alone(PROMPT, { max_tokens = 30, ignore_eos = true })
    local stop = whole.text:sub(6, 7)
    local object = complete(server, { prompt = PROMPT, temperature = 0, max_tokens = 30,
                                      stop = stop, ignore_eos = true })
    assert.equal(whole.text:sub(1, whole.text:find(stop, 1, true) - 1),
      object.choices[1].text)
    assert.equal("stop", object.choices[1].finish_reason)
    object = complete(server, { prompt = PROMPT, temperature = 0, max_tokens = 30,
                                stop_token_ids = { whole.ids[4] }, ignore_eos = true })
    assert.equal("stop", object.choices[1].finish_reason)
  end)

  it("that are drawn without a seed differ", function()
    local server = open()
    local texts, count = {}, 0
    for _ = 1, 4 do
      local text = complete(server, { prompt = PROMPT, temperature = 2, max_tokens = 20 })
        .choices[1].text
      count, texts[text] = count + (texts[text] and 0 or 1), true
    end
    assert.is_true(count > 1)
  end)

  it("come in parts that are the whole", function()
    local server = open()
    local o = { prompt = PROMPT, temperature = 1, seed = 5, max_tokens = 25, logprobs = 2,
                echo = true }
    local whole = complete(server, o).choices[1]
    o.stream, o.stream_options = true, { include_usage = true }
    local answer = post(server, "/v1/completions", o)
    assert.truthy(answer.head:find "text/event%-stream")
    local events, is_done = client.events(answer.body)
    assert.is_true(is_done)
    local text, tokens, offsets, values, reason = "", {}, {}, {}, nil
    for i = 1, #events - 1 do
      local choice = events[i].choices[1]
      text, reason = text .. choice.text, choice.finish_reason
      for j, name in ipairs(choice.logprobs.tokens) do
        tokens[#tokens + 1], offsets[#offsets + 1] = name, choice.logprobs.text_offset[j]
        values[#values + 1] = choice.logprobs.token_logprobs[j]
      end
    end
    assert.equal(whole.text, text)
    assert.equal(whole.finish_reason, reason)
    assert.same(whole.logprobs.tokens, tokens)
    assert.same(whole.logprobs.text_offset, offsets)
    assert.same(whole.logprobs.token_logprobs, values)
    assert.equal(#PROMPT + 25, events[#events].usage.total_tokens)
    assert.same({}, events[#events].choices)
    assert.is_true(#events > 10)
  end)
end)

describe("log-probabilities", function()
  --- By the engine's own logits of every token.
  local function own_logprobs(ids)
    local e = engine()
    local seq = e:sequence()
    local logits = e:prefill_all(seq, ids)
    local out, rows = { json.null }, logits:list()
    for i = 1, #ids - 1 do
      local sum, first = 0, (i - 1) * 97
      for v = 1, 97 do sum = sum + math.exp(rows[first + v]) end
      out[i + 1] = rows[first + ids[i + 1] + 1] - math.log(sum)
    end
    e:finish(seq)
    e.cache:close()
    return out
  end

  it("of a prompt that is echoed are those of the engine's logits", function()
    local server = open()
    local ids = tokenizer:encode(PROMPT:rep(3))
    local own = own_logprobs(ids)
    for _, max_tokens in ipairs { 0, 1 } do
      local object = complete(server, { prompt = json.array(ids), echo = true,
        logprobs = 1,
                                        max_tokens = max_tokens, temperature = 0 })
      local got = object.choices[1].logprobs
      assert.equal(#ids + max_tokens, #got.tokens)
      assert.equal(max_tokens, object.usage.completion_tokens)
      assert.equal(json.null, got.token_logprobs[1])
      assert.equal(json.null, got.top_logprobs[1])
      for i = 2, #ids do
        assert.near(own[i], got.token_logprobs[i], 1e-4)
        local best = -math.huge
        for _, value in pairs(got.top_logprobs[i]) do best = math.max(best, value) end
        assert.is_true(best >= got.token_logprobs[i])
        assert.equal(tokenizer:bytes_of(ids[i]), got.tokens[i])
        assert.equal(i - 1, got.text_offset[i])
      end
    end
  end)

  it("of an echoed prompt do not depend on what is in the cache or in the batch",
    function()
    local server = open()
    local o = { prompt = PROMPT, echo = true, logprobs = 0, max_tokens = 0 }
    local first = complete(server, o).choices[1].logprobs
    local clients = {}
    for i = 1, 6 do
      o.prompt = i % 2 == 0 and PROMPT or "Another one " .. i
      clients[i] = client.start(server, "POST", "/v1/completions", o)
    end
    client.finish(server, clients)
    for i = 2, 6, 2 do
      local got = clients[i]:answer():json().choices[1].logprobs
      for j = 2, #first.tokens do
        assert.near(first.token_logprobs[j], got.token_logprobs[j], 1e-5)
      end
    end
  end)

  it("of a chat are those of kv.generate, with bytes", function()
    local server = open()
    local messages = { { role = "user", content = "Hello" } }
    local _, ids = tokenizer:chat(messages, { add_generation_prompt = true })
    local own = alone(ids, { max_tokens = 6, logprobs = 2 })
    local answer = post(server, "/v1/chat/completions", { messages = messages,
      temperature = 0, max_tokens = 6, logprobs = true, top_logprobs = 2 }):json()
    local content = answer.choices[1].logprobs.content
    assert.equal(6, #content)
    for i, one in ipairs(content) do
      assert.near(own.logprobs[i].logprob, one.logprob, 1e-5)
      assert.equal(2, #one.top_logprobs)
      assert.equal(one.token, string.char(unpack(one.bytes)))
    end
  end)
end)

describe("chats", function()
  local MESSAGES = { { role = "system", content = "Be brief." },
                     { role = "user", content = { { type = "text", text = "Hello" } } } }

  it("are what kv.generate answers to the tokenizer's chat, whole and in parts",
    function()
    local server = open()
    local _, ids = tokenizer:chat({ MESSAGES[1], { role = "user", content = "Hello" } },
      { add_generation_prompt = true })
    local own = alone(ids, { max_tokens = 20, temperature = 1, seed = 9 })
    local o = { model = "tiny", messages = MESSAGES, max_completion_tokens = 20,
      seed = 9 }
    local object = post(server, "/v1/chat/completions", o):json()
    assert.same({ role = "assistant", content = own.text, refusal = json.null },
      object.choices[1].message)
    assert.equal("chat.completion", object.object)
    o.stream = true
    local events, is_done = client.events(post(server, "/v1/chat/completions", o).body)
    assert.is_true(is_done)
    assert.equal("assistant", events[1].choices[1].delta.role)
    local text = ""
    for _, event in ipairs(events) do
      assert.equal("chat.completion.chunk", event.object)
      text = text .. (event.choices[1].delta.content or "")
    end
    assert.equal(own.text, text)
    assert.equal(own.finish_reason, events[#events].choices[1].finish_reason)
  end)

  it("are the same with drafts, those of the server and those that requests name",
    function()
    local server = open { draft = { policy = "quest", ratio = 0.2, tokens = 3 } }
    local own = open {}
    local DRAFTS = { "none named", false, { ngram = 2 },
                       { policy = "block_mean", reuse = true },
      { policy = "streaming_blocks", policy_options = { blocks = 2 }, tokens = "auto" } }
    for _, temperature in ipairs { 0, 0.8 } do
      for _, draft in ipairs(DRAFTS) do
        local o = { prompt = PROMPT, max_tokens = 20, temperature = temperature, seed = 4,
                    ignore_eos = true }
        local want = complete(own, o).choices[1].text
        if draft ~= "none named" then o.draft = draft end
        assert.equal(want, complete(server, o).choices[1].text)
      end
    end
    local text = client.ask(server, "GET", "/metrics").body
    for _, name in ipairs { "drafted", "accepted" } do
      assert.is_true(tonumber(text:match("\nkvlab_" .. name
        .. '_tokens_total{place="1"} (%d+)')) > 0)
    end
    assert.is_true(tonumber(text:match "\nkvlab_check_seconds_total (%S+)") > 0)
  end)

  it("say which blocks each step read to those who watch", function()
    local server = open { policy = "streaming_blocks",
      policy_options = { blocks = 3, sink = 1, min_blocks = 1 } }
    local body = post(server, "/v1/chat/completions", { messages = MESSAGES,
      stream = true,
      watch_blocks = true, max_tokens = 12, temperature = 0, ignore_eos = true }).body
    local events = client.events(body)
    local first = events[1].choices[1].kvlab
    assert.equal(4, first.block_size)
    local _, ids = tokenizer:chat({ MESSAGES[1], { role = "user", content = "Hello" } },
      { add_generation_prompt = true })
    assert.equal(tokenizer:decode(ids, { special = true }), table.concat(first.blocks))
    local seen = 0
    for _, event in ipairs(events) do
      local extra = event.choices[1].kvlab
      if extra and extra.reads then
        seen = seen + 1
        local sum = 0
        for _, percent in ipairs(extra.reads) do sum = sum + percent end
        assert.equal(300, sum) -- three blocks of all heads
        assert.equal(100, extra.reads[1])
        assert.equal(100, extra.reads[#extra.reads])
      end
    end
    assert.is_true(seen > 8)
  end)
end)

describe("requests at the same time", function()
  local ASKED = {}
  for i = 1, 18 do
    ASKED[i] = { prompt = (i % 3 == 0 and PROMPT or "Prompt " .. i .. " "):rep(1 + i % 4),
                 max_tokens = 5 + i, temperature = i % 2 == 0 and 1.1 or 0, seed = i,
                 ignore_eos = true }
    if i % 3 > 0 then
      ASKED[i].policy = i % 3 == 1 and "quest" or "streaming_blocks"
      ASKED[i].policy_options = { ratio = 0.3, min_blocks = 1 + i % 2 }
    end
  end

  it("get what each gets alone, with any policy, streamed or not, one cut short",
    function()
    local want, server = {}, open({}, { blocks = 80, max_seqs = 5 })
    for i, o in ipairs(ASKED) do
      local own = open({}, { blocks = 80, max_seqs = 5 })
      want[i] = complete(own, o).choices[1].text
    end
    local clients, leaves = {}, nil
    for i, o in ipairs(ASKED) do
      local sent = {}
      for name, value in pairs(o) do sent[name] = value end
      sent.stream = i % 4 == 0
      clients[i] = client.start(server, "POST", "/v1/completions", sent)
      if i == 7 then
        leaves = client.start(server, "POST", "/v1/completions", { prompt = "I leave",
          max_tokens = 200, temperature = 0, stream = true, ignore_eos = true })
      end
      server:turn(0)
    end
    processes.wait_until(function()
      server:turn(0)
      leaves:read()
      return leaves.got:find "data: "
    end, "the first part")
    leaves:close()
    client.finish(server, clients)
    for i, one in ipairs(clients) do
      local answer, text = one:answer(), ""
      if i % 4 == 0 then
        for _, event in ipairs(client.events(answer.body)) do
          text = text .. event.choices[1].text
        end
      else
        text = answer:json().choices[1].text
      end
      assert.equal(want[i], text, i)
    end
    assert.equal(1, server.metrics.counters.kvlab_disconnects_total)
    assert.equal(0, #server.calls.running)
    assert.same({}, server.calls.server.requests)
    for _, entry in pairs(server.policies.entries) do assert.equal(0, entry.users) end
  end)

  it("with two policies do not see each other's answers in shared blocks", function()
    local server = open()
    local o = { prompt = PROMPT:rep(2), max_tokens = 30, temperature = 0,
      ignore_eos = true }
    local streaming = { blocks = 2, sink = 0, recent = 1 }
    local function with(policy, options, prompt)
      return complete(server, { prompt = prompt or o.prompt, max_tokens = 30,
        temperature = 0,
        ignore_eos = true, policy = policy, policy_options = options }).choices[1].text
    end
    local first = with("streaming_blocks", streaming)
    -- now its prompt with its answer, densely: nothing of the sparse pass may be reused
    local longer = o.prompt .. first
    local own = alone(longer, { max_tokens = 30, ignore_eos = true })
    assert.equal(own.text, with("full", nil, longer))
    local quest = { ratio = 0.25, min_blocks = 1 } -- has not seen the prompt being read
    own = alone(longer, { max_tokens = 30, ignore_eos = true },
      kv.policy("quest", quest))
    assert.equal(own.text, with("quest", quest, longer))
  end)

  it("wait, in a queue that has an end", function()
    local server = open({ limits = { queue = 2 } }, { max_seqs = 1 })
    local clients = {}
    for i = 1, 5 do
      clients[i] = client.start(server, "POST", "/v1/completions",
        { prompt = "Prompt " .. i, max_tokens = 30, temperature = 0, ignore_eos = true })
    end
    wait_for_requests(server, 5)
    client.finish(server, clients)
    local of = {}
    for _, one in ipairs(clients) do
      local answer = one:answer()
      of[answer.status] = (of[answer.status] or 0) + 1
      if answer.status == 429 then
        assert.equal("queue_full", problem_of(answer, 429).code)
        assert.truthy(answer.head:find "Retry%-After: 1")
      end
    end
    assert.same({ [200] = 2, [429] = 3 }, of) -- none ran yet as they came
    local error = problem_of(post(server, "/v1/completions", { prompt = PROMPT, n = 3 }),
      400)
    assert.equal("n", error.param)
  end)

  it("never take more of the cache than there is", function()
    local server = open({}, { blocks = 20, max_seqs = 8 })
    local clients = {}
    for i = 1, 8 do
      clients[i] = client.start(server, "POST", "/v1/completions",
        { prompt = ("%d "):format(i):rep(10), max_tokens = 25, temperature = 0,
          ignore_eos = true })
    end
    client.finish(server, clients)
    for _, one in ipairs(clients) do assert.equal(200, one:answer().status) end
    assert.equal(0, server.calls.server.scheduler.stats.preemptions)
  end)
end)

describe("a wrong request", function()
  local CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
  local deep = ("["):rep(80) .. ("]"):rep(80)
  local CASES = {
    { COMPLETE, "", "invalid_json" }, { COMPLETE, "{", "invalid_json" },
    { COMPLETE, "[1]", "invalid_json" }, { COMPLETE, "3", "invalid_json" },
    { COMPLETE, '{"prompt": "\255"}', "invalid_utf8" },
    { COMPLETE, '{"prompt": "a", "user": ' .. deep .. "}", "invalid_json" },
    { COMPLETE, '{"prompt": "a", "temprature": 1}', "unknown_field", "temprature" },
    { COMPLETE, "{}", nil, "prompt" }, { COMPLETE, '{"prompt": ""}', nil, "prompt" },
    { COMPLETE, '{"prompt": []}', nil, "prompt" },
    { COMPLETE, '{"prompt": {"a": 1}}', nil, "prompt" },
    { COMPLETE, '{"prompt": ["a", ""]}', nil, "prompt[1]" },
    { COMPLETE, '{"prompt": ["a", 3]}', nil, "prompt[1]" },
    { COMPLETE, '{"prompt": [1, 97]}', nil, "prompt[1]" },
    { COMPLETE, '{"prompt": [1.5]}', nil, "prompt[0]" },
    { COMPLETE, '{"prompt": [null]}', nil, "prompt[0]" },
    { COMPLETE, '{"prompt": "a", "max_tokens": -1}', nil, "max_tokens" },
    { COMPLETE, '{"prompt": "a", "max_tokens": "3"}', nil, "max_tokens" },
    { COMPLETE, '{"prompt": "a", "max_tokens": 400}', "context_length_exceeded",
      "max_tokens" },
    { COMPLETE, json.encode { prompt = ("a"):rep(300) }, "context_length_exceeded",
      "prompt" },
    { COMPLETE, '{"prompt": "a", "temperature": -0.1}', nil, "temperature" },
    { COMPLETE, '{"prompt": "a", "temperature": 1e999}', nil, "temperature" },
    { COMPLETE, '{"prompt": "a", "top_p": 1.1}', nil, "top_p" },
    { COMPLETE, '{"prompt": "a", "n": 0}', nil, "n" },
    { COMPLETE, '{"prompt": "a", "n": 17}', nil, "n" },
    { COMPLETE, '{"prompt": "a", "logprobs": true}', nil, "logprobs" },
    { COMPLETE, '{"prompt": "a", "stop": [""]}', nil, "stop" },
    { COMPLETE, '{"prompt": "a", "stop": 3}', nil, "stop" },
    { COMPLETE, '{"prompt": "a", "stop": {}}', nil, "stop" },
    { COMPLETE, '{"prompt": {}}', nil, "prompt" },
    { COMPLETE, '{"prompt": "a", "draft": []}', nil, "draft" },
    { COMPLETE, '{"prompt": "a", "policy": "quest", "policy_options": []}', nil,
      "policy_options" },
    { COMPLETE, json.encode { prompt = "a", stop = ("x"):rep(1025) }, nil, "stop" },
    { COMPLETE, '{"prompt": "a", "n": 1, "n": 2}', "invalid_json" },
    { COMPLETE, '{"prompt": "a", "stream": 1}', nil, "stream" },
    { COMPLETE, '{"prompt": "a", "stream_options": {}}', nil, "stream_options" },
    { COMPLETE, '{"prompt": "a", "watch_blocks": true}', nil, "watch_blocks" },
    { COMPLETE, '{"prompt": "a", "best_of": 2}', "unsupported_value", "best_of" },
    { COMPLETE, '{"prompt": "a", "logit_bias": {"3": 1}}', "unsupported_value",
      "logit_bias" },
    { COMPLETE, '{"prompt": "a", "presence_penalty": 1}', "unsupported_value",
      "presence_penalty" },
    { COMPLETE, '{"prompt": "a", "policy": "../quest"}', "unknown_policy", "policy" },
    { COMPLETE, '{"prompt": "a", "policy": "quest", "policy_options": {"raito": 1}}',
      "invalid_policy", "policy_options" },
    { COMPLETE, '{"prompt": "a", "policy": "quest", "policy_options": [1]}', nil,
      "policy_options" },
    { COMPLETE, '{"prompt": "a", "draft": true}', nil, "draft" },
    { COMPLETE, '{"prompt": "a", "draft": {"tokens": 0}}', nil, "draft.tokens" },
    { COMPLETE, '{"prompt": "a", "draft": {"policy": "quets"}}', "unknown_policy",
      "draft.policy" },
    { COMPLETE, '{"prompt": "a", "draft": {"policy": "xattention"}}', "invalid_policy",
      "draft.policy" },
    { COMPLETE, '{"prompt": "a", "draft": {"policy": "quest", "ngram": 2}}', nil,
      "draft" },
    { COMPLETE, '{"prompt": "a", "draft": {"ngram": 2, "reuse": false}}', nil, "draft" },
    { COMPLETE, '{"prompt": "a", "draft": {"policy": "magicpig", "reuse": true}}',
      "invalid_policy", "draft.policy" },
    { COMPLETE, '{"prompt": "a", "draft": {"policy": "quest", "tokens": 120}}', nil,
      "draft.tokens" },
    { CHAT, "{}", nil, "messages" }, { CHAT, '{"messages": {}}', nil, "messages" },
    { CHAT, '{"messages": []}', nil, "messages" },
    { CHAT, '{"messages": [{"role": "user"}]}', nil, "messages[0].content" },
    { CHAT, '{"messages": [{"content": "a"}]}', nil, "messages[0].role" },
    { CHAT, '{"messages": ["a"]}', nil, "messages[0]" },
    { CHAT, '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
      "unsupported_value", "messages[0].content[0]" },
    { CHAT, '{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}',
      "unsupported_value", "tool_choice" },
    { CHAT, '{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}', nil,
      "top_logprobs" },
    { CHAT, json.encode { messages = { { role = "user", content = ("a"):rep(300) } } },
      "context_length_exceeded", "messages" },
    { "/tokenize", "{}", nil, "prompt" },
    { "/detokenize", '{"tokens": [97]}', nil, "tokens[0]" },
  }

  it("is answered with the API's error, which names the field, and changes nothing",
    function()
    local server = open()
    local before = complete(server, { prompt = PROMPT, temperature = 0 }).choices[1].text
    for _, case in ipairs(CASES) do
      local error = problem_of(post(server, case[1], case[2]), 400)
      assert.equal("invalid_request_error", error.type)
      assert.equal(case[3] or json.null, error.code, case[2])
      assert.equal(case[4] or json.null, error.param, case[2])
    end
    assert.equal(before, complete(server, { prompt = PROMPT,
      temperature = 0 }).choices[1].text)
  end)

  it("for what is not there is 404, and 405 for a wrong method", function()
    local server = open()
    problem_of(client.ask(server, "GET", "/v1/nothing"), 404)
    assert.equal("model_not_found", problem_of(post(server, "/v1/completions",
      { prompt = "a", model = "gpt-4" }), 404).code)
    problem_of(client.ask(server, "GET", "/v1/models/other"), 404)
    local answer = client.ask(server, "GET", "/v1/completions")
    problem_of(answer, 405)
    assert.truthy(answer.head:find "Allow: POST")
  end)

  it("by its size is refused before its body is read, or after, if it does not say",
    function()
    local server = open { limits = { bytes_body = 1000 } }
    local one = client.connect(server.port)
    one:send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
      .. "Content-Length: 1073741824\r\n\r\n" .. ("a"):rep(100))
    client.finish(server, { one })
    assert.equal("body_too_large", problem_of(one:answer(), 413).code)
    one = client.connect(server.port)
    one:send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
      .. "Transfer-Encoding: chunked\r\n\r\n" .. ("200\r\n" .. ("a"):rep(512)
        .. "\r\n"):rep(8)
      .. "0\r\n\r\n")
    client.finish(server, { one })
    assert.equal("body_too_large", problem_of(one:answer(), 413).code)
    assert.equal(2, server.http:stats().too_large)
  end)

  it("that does not arrive in time ends, and holds up nobody", function()
    local server = open { limits = { arrival_s = 1 } }
    local halves = {}
    for i, text in ipairs { "", "POST /v1/comp",
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\n",
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        .. "Content-Length: 50\r\n\r\n{\"pro" } do
      halves[i] = client.connect(server.port)
      if text ~= "" then halves[i]:send(text) end
    end
    assert.equal(16, complete(server, { prompt = PROMPT, temperature = 0 })
      .usage.completion_tokens)
    client.finish(server, halves)
    for _, one in ipairs(halves) do
      assert.equal("request_timeout", problem_of(one:answer(), 408).code)
    end
    assert.equal(4, server.http:stats().too_slow)
  end)

  it("that is no HTTP ends its connection", function()
    local server = open { limits = { arrival_s = 0.3 } } -- no request has arrived by then
    local one = client.connect(server.port)
    one:send "\0\1\2 nonsense\r\n\r\n"
    client.finish(server, { one })
    assert.equal(200, client.ask(server, "GET", "/health").status)
  end)
end)

describe("a server", function()
  it("tells its models, its health, its tokens and its metrics", function()
    local server = open()
    local list = client.ask(server, "GET", "/v1/models"):json()
    assert.equal("list", list.object)
    assert.equal("tiny", list.data[1].id)
    assert.equal(256, list.data[1].max_model_len)
    assert.equal("tiny", client.ask(server, "GET", "/v1/models/tiny"):json().id)
    assert.equal("ok", client.ask(server, "GET", "/health"):json().status)
    local tokens = post(server, "/tokenize", { prompt = "Hello<|im_end|>" }):json()
    assert.same({ tokens = { 40, 69, 76, 76, 79, 96 }, count = 6, max_model_len = 256 },
      tokens)
    assert.equal("Hello<|im_end|>",
      post(server, "/detokenize", { tokens = tokens.tokens }):json().prompt)
    assert.equal("<|im_end|>", client.ask(server, "GET",
      "/tokenizer_info"):json().eos_token)
    complete(server, { prompt = PROMPT, max_tokens = 4, temperature = 0,
      ignore_eos = true })
    local text = client.ask(server, "GET", "/metrics").body
    for _, line in ipairs { 'kvlab_answers_total{path="/v1/completions",status="200"} 1',
      "kvlab_generated_tokens_total 4", "kvlab_prompt_tokens_total " .. #PROMPT,
      'kvlab_time_to_first_token_seconds_bucket{le="+Inf"} 1',
        "kvlab_requests_running 0" } do
      assert.truthy(text:find(line .. "\n", 1, true), line)
    end
    for line in text:gmatch "[^\n]+" do
      assert.truthy(line:find "^# %u+ [%l_]+ %g" or line:find "^[%l_]+{?[^}]*}? %S+$",
        line)
    end
    local page = client.ask(server, "GET", "/")
    assert.truthy(page.head:find "text/html" and page.body:find "<!doctype html>")
    assert.is_nil(page.body:find "https?://")
  end)

  it("asks for its key, but for the page and its health", function()
    local server = open { key = "secret" }
    for _, headers in ipairs { {}, { Authorization = "Bearer secre" },
      { Authorization = "Bearer secrets" }, { Authorization = "secret" } } do
      local answer = post(server, "/v1/completions", { prompt = "a" }, headers)
      assert.equal("invalid_api_key", problem_of(answer, 401).code)
    end
    assert.equal(401, client.ask(server, "GET", "/metrics").status)
    assert.equal(200, client.ask(server, "GET", "/health").status)
    assert.equal(200, client.ask(server, "GET", "/").status)
    assert.equal(200, post(server, "/v1/completions", { prompt = "a", max_tokens = 1 },
      { Authorization = "Bearer secret" }).status)
  end)

  it("is not for pages of other sites", function()
    local server = open()
    local function status(headers)
      return client.ask(server, "GET", "/v1/models", nil, headers).status
    end
    assert.equal(403, status { Host = "evil.example" })
    assert.equal(403, status { Origin = "http://evil.example" })
    assert.equal(403, status { Origin = "null" })
    local host = "localhost:" .. server.port
    assert.equal(200, status { Host = host, Origin = "http://" .. host })
  end)

  it("ends requests that take too long", function()
    local server = open { limits = { request_s = 0.1 } }
    local o = { prompt = PROMPT, max_tokens = 200, temperature = 0, ignore_eos = true }
    local function run(stream)
      o.stream = stream
      local one = client.start(server, "POST", "/v1/completions", o)
      client.run_until(server, function()
        return server.calls:is_busy()
      end, "the request")
      processes.sleep(0.11)
      client.finish(server, { one })
      return one:answer()
    end
    assert.equal("timeout", problem_of(run(false), 504).code)
    local events, is_done = client.events(run(true).body)
    assert.equal("timeout", events[#events].error.code)
    assert.is_true(is_done)
  end)

  it("fails only the requests of a policy that raises", function()
    local left = 3
    named.give("policies", "breaks", "spec", kv.policy.define { name = "breaks",
      decode = true, defaults = { ratio = 0.5 }, score = function(_, ctx)
        left = left - 1
        if left < 0 then error "it broke" end
        return ctx:new_scores():fill_(0)
      end })
    local server = open()
    local own = alone(PROMPT, { max_tokens = 20, ignore_eos = true }).text
    local o = { prompt = PROMPT, max_tokens = 20, temperature = 0, ignore_eos = true }
    local good = client.start(server, "POST", "/v1/completions", o)
    o.policy = "breaks"
    local bad = client.start(server, "POST", "/v1/completions", o)
    client.finish(server, { good, bad })
    assert.truthy(problem_of(bad:answer(), 500).message:find "it broke")
    assert.equal(own, good:answer():json().choices[1].text)
  end)

  it("fails only the requests whose logits hold NaN", function()
    local o = { max_tokens = 20, ignore_eos = true, temperature = 0 }
    local prompts, bad_id = { PROMPT, "Other", "Third" }, nil
    local wholes, is_taken = {}, {}
    for i, prompt in ipairs(prompts) do
      local own = alone(prompt, { max_tokens = 20, ignore_eos = true })
      wholes[i] = own.text
      for _, id in ipairs(own.ids) do is_taken[id] = true end
      for _, id in ipairs(tokenizer:encode(prompt)) do is_taken[id] = true end
    end
    for id = 0, 95 do bad_id = bad_id or not is_taken[id] and id end
    local row = family.embedding:index(bad_id)
    local kept = row:clone()
    row:fill_(0 / 0)
    local server, calls, bad = open(), {}, {}
    local ok, why = pcall(function()
      for i, prompt in ipairs(prompts) do
        o.prompt, o.stream, o.echo, o.logprobs = prompt, i == 2, nil, nil
        calls[#calls + 1] = client.start(server, "POST", "/v1/completions", o)
        o.prompt = json.array { 1, 2, bad_id, 3 }
        if i == 3 then o.echo, o.logprobs = true, 1 end
        bad[i] = client.start(server, "POST", "/v1/completions", o)
        calls[#calls + 1] = bad[i]
      end
      client.finish(server, calls)
    end)
    row:copy_(kept)
    assert.is_true(ok, why)
    local words = "the answer failed: request %d+: the model's logits for token %d of "
    local first, third = bad[1]:answer(), bad[3]:answer()
    assert.matches(words .. "its output hold NaN", problem_of(first, 500).message)
    assert.matches(words .. "its prompt hold NaN", problem_of(third, 500).message)
    local events, is_done = client.events(bad[2]:answer().body)
    assert.matches(words .. "its output hold NaN", events[#events].error.message)
    assert.is_true(is_done)
    assert.equal(wholes[1], calls[1]:answer():json().choices[1].text)
    assert.equal(wholes[3], calls[5]:answer():json().choices[1].text)
    local text = {}
    for _, event in ipairs((client.events(calls[3]:answer().body))) do
      text[#text + 1] = event.choices[1].text
    end
    assert.equal(wholes[2], table.concat(text))
  end)

  it("keeps only so many policies, and the memory of no more", function()
    local server, bytes = open { limits = { policies = 2 } }, {}
    for i = 1, 8 do
      complete(server, { prompt = PROMPT, max_tokens = 3, policy = "quest",
                         policy_options = { ratio = i / 10 } })
      collectgarbage()
      collectgarbage()
      bytes[i] = tonumber(kv.C.kvl_bytes_live())
    end
    assert.is_true(bytes[2] > bytes[1])
    for i = 3, 8 do assert.equal(bytes[2], bytes[i]) end
    local o = { prompt = PROMPT, max_tokens = 100, temperature = 0, ignore_eos = true,
                policy = "quest" }
    local clients = {}
    for i = 1, 2 do
      o.policy_options = { ratio = 0.01 * i }
      clients[i] = client.start(server, "POST", "/v1/completions", o)
    end
    wait_for_requests(server, 8 + 2)
    client.run_until(server, function()
      return #server.calls.running == 2
    end, "two policies")
    o.policy_options = { ratio = 0.9 }
    clients[3] = client.start(server, "POST", "/v1/completions", o)
    wait_for_requests(server, 8 + 3)
    client.finish(server, clients)
    assert.equal("too_many_policies", problem_of(clients[3]:answer(), 429).code)
    o.max_tokens = 2
    assert.equal(200, post(server, "/v1/completions", o).status)
  end)

  it("goes on beside a client that reads nothing, and gives it up", function()
    local server = open { limits = { unsent = 2000 } }
    local one = client.connect(server.port, 4096)
    -- 5 MB: the system itself may take 4
    one:post(client.text("POST", "/v1/completions", json.encode {
      prompt = { PROMPT, PROMPT, PROMPT, PROMPT }, n = 8,
      max_tokens = 200, stream = true, temperature = 0, ignore_eos = true,
      logprobs = 20 }))
    wait_for_requests(server, 1)
    complete(server, { prompt = PROMPT, temperature = 0 })
    client.run_until(server, function() return #server.calls.live == 0 end, "the end")
    assert.equal(1, server.metrics.counters.kvlab_disconnects_total)
    one:close()
  end)

  it("has only so many connections, and is there again when some end", function()
    local server = open { limits = { connections = 20 } }
    local idle = {}
    for i = 1, 200 do idle[i] = client.connect(server.port) end
    processes.wait_until(function()
      server:turn(0)
      return server.http:stats().refused > 100
    end, "what is refused")
    for i = 21, 24 do idle[i]:send(client.text("GET", "/health")) end
    client.finish(server, { idle[21], idle[22] })
    assert.equal("too_many_connections", problem_of(idle[21]:answer(), 503).code)
    for _, one in ipairs(idle) do one:close() end
    processes.wait_until(function()
      server:turn(0)
      return server.http:stats().connections == 0
    end, "the end of connections")
    assert.equal(200, client.ask(server, "GET", "/health").status)
  end)

  it("tells its clients when it stops", function()
    local server = open()
    local o = { prompt = PROMPT, max_tokens = 100, stream = true, temperature = 0,
                ignore_eos = true }
    local streamed = client.start(server, "POST", "/v1/completions", o)
    o.stream = false
    local whole = client.start(server, "POST", "/v1/completions", o)
    wait_for_requests(server, 2)
    processes.wait_until(function()
      server:turn(0)
      streamed:read()
      return streamed.got:find "data: " and #server.calls.running == 2
    end, "the first part")
    server:close()
    whole:read()
    streamed:read()
    assert.is_true(whole.is_over and streamed.is_over)
  end)

  it("refuses wrong options", function()
    assert.has_error(function() open { limits = { queu = 3 } } end)
    assert.has_error(function() open { address = "somewhere" } end)
    local server = open()
    local ok, why = pcall(kv.http_server, { model = server.model, port = server.port })
    assert.is_false(ok)
    assert.truthy(tostring(why):find "Address already in use")
  end)
end)
