--- Large requests are read in slices, and large answers written in slices: the others get
-- their tokens meanwhile, and small requests do not wait for large ones.
local client = require "spec.http_client"
local fields = require "kvlab.http.fields"
local goldens = require "spec.lua.text.goldens"
local json = require "kvlab.json"
local kv = require "kvlab"
local problem = require "kvlab.http.problem"
local processes = require "spec.processes"
local servers = require "spec.http_servers"
local slices = require "kvlab.slices"
local tasks = require "kvlab.http.tasks"

after_each(servers.close_all)

local words -- a real tokenizer, which has merges

local function open(o)
  o = o or {}
  words = words or kv.tokenizer(goldens.folder .. "/llama3.json")
  o.tokenizer = words
  return servers.open(o)
end

local LONG = { prompt = json.array { 1, 2, 3 }, max_tokens = 200, temperature = 0,
               ignore_eos = true }

--- Takes a request, and begins to read it.
local function begin(server, path, body)
  local taken = server.http:stats().requests
  local one = client.start(server, "POST", path, body)
  processes.wait_until(function()
    one:read()
    if server.http:stats().requests == taken then return false end
    server:turn(0)
    return true
  end, "the request")
  return one
end

describe("a large request", function()
  it("lets the others go on while it is read", function()
    local server = open()
    local word = ("ab"):rep(2 ^ 19)
    local alone = client.ask(server, "POST", "/tokenize", { prompt = word })
    for _, case in ipairs { { "/tokenize", { prompt = word } },
      { "/tokenize", { prompt = "e" .. ("\204\129\204\150"):rep(2 ^ 17) } },
      { "/detokenize", { tokens = json.array(words:encode(("a "):rep(60000))) } },
      { "/v1/completions", '{"prompt": [[]' .. (",[]"):rep(2 ^ 18) .. "]}" },
      { "/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], '
        .. '"documents": [{"a": [[]' .. (",[]"):rep(2 ^ 18) .. "]}]}" } } do
      local stream = begin(server, "/v1/completions", LONG)
      local steps = server.metrics.counters.kvlab_steps_total
      local one, longest = client.start(server, "POST", case[1], case[2]), 0
      processes.wait_until(function()
        local before = os.clock()
        server:turn(1000)
        longest = math.max(longest, os.clock() - before)
        one:read()
        return one.is_over
      end, "the answer", 0)
      assert.is_true(server.metrics.counters.kvlab_steps_total > steps + 1)
      assert.is_true(longest < 0.1, ("%s: %.3f s"):format(case[1], longest))
      if case[2].prompt == word then
        assert.same(alone:json().tokens, one:answer():json().tokens)
      end
      one:close()
      client.finish(server, { stream })
      assert.equal(200, stream:answer().status)
    end
  end)

  it("does not hold up small ones", function()
    local server = open()
    local large = begin(server, "/tokenize", { prompt = ("ab"):rep(2 ^ 19) })
    assert.equal(1, server.tasks.count)
    for _ = 1, 3 do
      local answer = client.ask(server, "POST", "/tokenize", { prompt = "Hello" })
      assert.equal(200, answer.status)
      assert.is_nil(large:answer())
    end
    assert.equal(200, client.ask(server, "GET", "/health").status)
    client.finish(server, { large })
    assert.equal(200, large:answer().status)
  end)

  it("ends when its client leaves, when its time is over, and with the server", function()
    local body = { prompt = ("ab"):rep(2 ^ 19) }
    local server = open { limits = { request_s = 0.01 } }
    local large = begin(server, "/tokenize", body)
    client.finish(server, { large })
    assert.equal("timeout", large:answer():json().error.code)
    server = open()
    large = begin(server, "/tokenize", body)
    assert.equal(1, server.tasks.count)
    large:close()
    client.run_until(server, function() return server.tasks.count == 0 end, "the end")
    large = begin(server, "/tokenize", body)
    local second = begin(server, "/tokenize", body)
    server:close()
    processes.wait_until(function()
      large:read()
      second:read()
      return large.is_over and second.is_over
    end, "the end")
  end)

  it("is told why it ends, wherever it rests", function()
    local asked, why = open().asked, problem.new(504, "over", { code = "timeout" })
    local long, ids = ("ab, \"\\é "):rep(4000), json.array {}
    for i = 1, 8000 do ids[i] = i % 90 end
    local chat = { messages = json.array { { role = "user", content = long } } }
    local texts = { tokenize = { prompt = long }, detokenize = { tokens = ids },
                    completion = { prompt = long }, chat = chat }
    for name, o in pairs(texts) do
      local body = json.encode(o)
      local function read() return asked[name](fields.decode(body), body) end
      local function write() return json.encode { o, o } end
      for _, fn in ipairs { read, write } do
        local whole, rests = slices.task(fn), 0
        while not slices.run(whole, 0) do rests = rests + 1 end
        for i = 1, rests, math.max(1, math.floor(rests / 64)) do
          local task = slices.task(fn)
          for _ = 1, i do assert.is_false((slices.run(task, 0))) end
          assert.same({ true, false, why }, { slices.run(task, 0, why) })
        end
        assert.is_true(rests > 0, name)
      end
    end
  end)

  it("ends alone where its client leaves while its error is written", function()
    local all, is_gone, closed = tasks.new(60), false, 0
    local exchange = { is_open = true, is_gone = function() return is_gone end,
                       close = function() closed = closed + 1 end }
    all:add(exchange, 10, function() while true do slices.rest() end end)
    all:run(1000)
    assert.equal(1, all.count)
    is_gone = true
    all:run(1000)
    assert.same({ 0, 1 }, { all.count, closed })
    all:add(exchange, 10, function() error("a mistake", 0) end)
    assert.error_matches(function() all:run(1000) end, "a mistake")
  end)

  it("that is too long for the model is refused before it is read to its end", function()
    local server = open()
    local longest = 0
    for _, token in pairs(words.texts) do longest = math.max(longest, #token) end
    assert.equal(longest, words.bytes_most)
    for _, prompt in ipairs { ("a"):rep(2 ^ 20), ("a "):rep(2 ^ 19), ("a "):rep(300),
      json.array(words:encode(("a "):rep(300))) } do
      local error = client.ask(server, "POST", "/v1/completions",
        { prompt = prompt }):json().error
      assert.same({ "context_length_exceeded", "prompt",
        "the prompt has more than 256 tokens, but the model's context is 256" },
        { error.code, error.param, error.message })
    end
    assert.is_nil(words:encode(("a"):rep(200), { most = 1 }))
    for _, text in ipairs { "", "a", "Hello there", ("a"):rep(5000) } do
      local ids = words:encode(text)
      assert.same(ids, words:encode(text, { most = #ids }))
      if #ids > 0 then assert.is_nil(words:encode(text, { most = #ids - 1 })) end
    end
  end)
end)

describe("a large answer", function()
  local ids = json.array {}
  for i = 1, 240 do ids[i] = 5 + i % 90 end

  --- The prompt echoed 16 times, with 81 000 log-probabilities in all.
  local function ask(server, stream)
    return client.start(server, "POST", "/v1/completions", { prompt = ids, echo = true,
      n = 16, logprobs = 20, max_tokens = 1, temperature = 0, stream = stream })
  end

  local function open_wide()
    return servers.open({}, { blocks = 1024, max_seqs = 16, chunk = 256 })
  end

  --- Runs a server until it has begun to write the answer.
  local function begin_answer(server, stream)
    local one = ask(server, stream)
    client.run_until(server, function()
      one:read()
      local task = server.calls:is_busy() and server.calls.live[1].waiting
      return task and server.tasks.count == 1
    end, "the answer")
    return one
  end

  --- How many completions had each status.
  local function statuses(metrics)
    local out = {}
    for key, count in pairs(metrics.answers) do
      out[key:match 'status="(%d+)"'] = count
    end
    return out
  end

  --- The log-probabilities of each answer, put together.
  local function listed(answer, stream)
    local lists, objects = {}, stream and {} or { answer:json() }
    for text in (stream and answer.body or ""):gmatch "data: ({.-)\n\n" do
      objects[#objects + 1] = json.decode(text)
    end
    for _, object in ipairs(objects) do
      for _, choice in ipairs(object.choices) do
        local list = lists[choice.index] or {}
        lists[choice.index] = list
        if choice.logprobs ~= json.null then
          for i, top in ipairs(choice.logprobs.top_logprobs) do
            list[#list + 1] = { choice.logprobs.tokens[i], choice.logprobs.text_offset[i],
                                top }
          end
        end
      end
    end
    return lists
  end

  it("lets the others go on while it is written, whole and streamed", function()
    local server, whole = open_wide(), nil
    for _, stream in ipairs { false, true } do
      local one, longest, is_written = ask(server, stream), 0, false
      processes.wait_until(function()
        is_written = is_written or #server.calls.running == 0 and server.calls:is_busy()
          and #server.calls.queue == 0
        local before = os.clock()
        server:turn(1000)
        if is_written then longest = math.max(longest, os.clock() - before) end
        one:read()
        return one.is_over
      end, "the answer", 0)
      assert.is_true(is_written, "nothing was left to write after the last step")
      assert.is_true(longest < 0.1, ("%.3f s"):format(longest))
      assert.equal(200, one:answer().status)
      local lists = listed(one:answer(), stream)
      for i = 0, 15 do assert.equal(241, #lists[i]) end
      whole = whole or lists
      assert.same(whole[7], lists[7])
      one:close()
    end
    assert.same({ ["200"] = 2 }, statuses(server.metrics))
  end)

  it("ends when its client leaves, when its time is over, and with the server", function()
    for _, stream in ipairs { false, true } do
      local server = open_wide()
      local metrics = server.metrics
      begin_answer(server, stream):close()
      client.run_until(server, function()
        return not server.calls:is_busy() and server.tasks.count == 0
      end, "the end")
      assert.same({ ["499"] = 1 }, statuses(metrics))
      local late = begin_answer(server, stream)
      server.calls.live[1].deadline_s = 0
      client.finish(server, { late })
      assert.truthy(late:answer().body:find('"code": "timeout"', 1, true))
      server:turn(0)
      assert.equal(0, server.tasks.count)
      assert.same({ ["499"] = 1, ["504"] = 1 }, statuses(metrics))
      local last = begin_answer(server, stream)
      server:close()
      processes.wait_until(function()
        last:read()
        return last.is_over
      end, "the end")
      assert.truthy(last:answer().body:find('"code": "server_stops"', 1, true))
      assert.same({ ["499"] = 1, ["504"] = 1, ["503"] = 1 }, statuses(metrics))
    end
  end)
end)
