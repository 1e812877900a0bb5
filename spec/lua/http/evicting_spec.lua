--- The server of OpenAI's API under policies that evict tokens: answers are those of
-- m:generate, many requests share a memory that holds few of them whole, and requests for
-- what the server does not have are told what it has.
local client = require "spec.http_client"
local kv = require "kvlab"
local text_models = require "spec.text_models"

local folder = text_models.folder()
local COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"

local function model(engine)
  local all = { blocks = 32, chunk = 32 }
  for name, value in pairs(engine or {}) do all[name] = value end
  return kv.model(folder, { device = "cpu", dtype = "f32", engine = all })
end

--- Runs fn(server) with a server, in which nothing may be left then.
local function with(o, fn)
  o.port = 0
  local server = kv.http_server(o)
  local cache = server.engine.cache
  local ok, why = pcall(fn, server)
  server:close()
  assert.equal(cache.pages, cache:pages_free())
  cache:close()
  if not ok then error(why, 0) end
end

local function ask(server, path, body) return client.ask(server, "POST", path, body) end

local function text_of(answer)
  assert.equal(200, answer.status, answer.body)
  local choice = answer:json().choices[1]
  return choice.text or choice.message.content
end

local function refused(server, param, words, body)
  local answer = ask(server, body.messages and CHAT or COMPLETE, body)
  assert.equal(400, answer.status, answer.body)
  local problem = answer:json().error
  assert.equal(param, problem.param)
  assert.truthy(problem.message:find(words, 1, true), problem.message)
end

local function prompt(i)
  return ("Prompt %d, of a few blocks. "):format(i):rep(1 + i % 4)
end

describe("a server whose policy evicts", function()
  it("answers completions, chats, streams and n answers as m:generate does", function()
    local m = model()
    for _, name in ipairs { "tova", "snapkv" } do
      local policy = { policy = name, blocks = 3 }
      local function own(text, o)
        for key, value in pairs(policy) do o[key] = value end
        return m:generate(text, o)
      end
      with({ model = model(), policy = name, policy_options = { blocks = 3 } },
        function(server)
          assert.equal("head", server.engine.cache.tables)
          local o = { prompt = prompt(3), max_tokens = 20, temperature = 0 }
          local want = own(o.prompt, { max_tokens = 20, stop = { "zz" } }).text
          assert.equal(want, text_of(ask(server, COMPLETE, o)))
          assert.are_not.equal(m:generate(o.prompt, { max_tokens = 20 }).text, want)
          o.stop = want:sub(9, 10)
          assert.equal(own(o.prompt, { max_tokens = 20, stop = { o.stop } }).text,
            text_of(ask(server, COMPLETE, o)))

          o = { prompt = prompt(2), max_tokens = 9, temperature = 1, seed = 5, n = 3,
                logprobs = 2 }
          local answer = ask(server, COMPLETE, o):json()
          for k = 0, 2 do
            want = own(o.prompt, { max_tokens = 9, temperature = 1, seed = 5 + k,
                                   logprobs = 2 })
            assert.equal(want.text, answer.choices[k + 1].text)
            for i, one in ipairs(want.logprobs) do
              assert.near(one.logprob, answer.choices[k + 1].logprobs.token_logprobs[i],
                1e-4)
            end
          end

          local messages = { { role = "user", content = prompt(1) } }
          local _, ids = m.tokenizer:chat(messages, { add_generation_prompt = true })
          want = own(ids, { max_tokens = 12 }).text
          o = { messages = messages, max_tokens = 12, temperature = 0 }
          assert.equal(want, text_of(ask(server, CHAT, o)))
          o.stream = true
          local parts = {}
          for part in ask(server, CHAT, o).body:gmatch '"content": "(.-)"[,}]' do
            parts[#parts + 1] = part
          end
          assert.equal(require("kvlab.json").decode('"' .. table.concat(parts) .. '"'),
            want)
        end)
    end
  end)

  it("serves many at once with different policies, and preempts none", function()
    local policies = { { "tova", { blocks = 3 } }, { "snapkv", { ratio = 0.4 } },
                       { "full", {} }, { "h2o", { blocks = 3 } } }
    local m, want = model { tables = "head" }, {}
    for i = 1, 12 do
      local name, options = unpack(policies[i % 4 + 1])
      want[i] = m:generate(prompt(i), { max_tokens = 30, ignore_eos = true,
        policy = kv.policy(name, options) }).text
    end
    with({ model = model { blocks = 16, tables = "head", max_seqs = 8 }, policy = "tova",
           policy_options = { blocks = 3 } }, function(server)
      local clients = {}
      for i = 1, 12 do
        local name, options = unpack(policies[i % 4 + 1])
        clients[i] = client.start(server, "POST", COMPLETE, { prompt = prompt(i),
          max_tokens = 30, temperature = 0, ignore_eos = true, policy = name,
          policy_options = next(options) and options or nil })
      end
      local most = 0
      client.run_until(server, function()
        local all = true
        most = math.max(most, #server.calls.running)
        for _, one in ipairs(clients) do
          one:read()
          all = all and one.is_over
        end
        return all
      end, "the answers")
      for i, one in ipairs(clients) do
        assert.equal(want[i], text_of(one:answer()), i)
        one:close()
      end
      assert.is_true(most > 2 and most < 12, most)
      assert.equal(0, server.calls.server:stats().preemptions)
    end)
  end)

  it("answers with more than its memory holds", function()
    with({ model = model { blocks = 8 }, policy = "streaming",
           policy_options = { blocks = 3 } }, function(server)
      local models = client.ask(server, "GET", "/v1/models"):json()
      assert.equal(512, models.data[1].max_model_len)
      local answer = ask(server, COMPLETE, { prompt = "Hello", max_tokens = 400,
                                             ignore_eos = true }):json()
      assert.equal(400, answer.usage.completion_tokens)
      local text = client.ask(server, "GET", "/metrics").body
      local cache, count = server.engine.cache, {}
      for _, name in ipairs { "pages", "pages_held", "pages_peak",
                              "pages_evicted_total" } do
        count[name] = tonumber(text:match("\nkvlab_cache_" .. name .. " (%d+)"))
      end
      local most = 3 * cache.pages / cache.blocks -- three blocks of each table
      assert.same({ pages = cache.pages, pages_held = 0, pages_peak = most,
                    pages_evicted_total = 0 }, count)
      text_of(ask(server, COMPLETE, { prompt = ("a"):rep(70), max_tokens = 4 }))
      local evicted = client.ask(server, "GET", "/metrics").body
        :match "\nkvlab_cache_pages_evicted_total (%d+)"
      -- of 5 blocks, 3 stay
      assert.equal(2 * cache.pages / cache.blocks, tonumber(evicted))
      refused(server, "prompt", "has no room for it and for what policy streaming keeps",
        { prompt = ("a"):rep(120) })
      refused(server, "max_tokens", "the model's context is 512", { prompt = "Hello",
        max_tokens = 509 })
    end)
  end)

  it("refuses drafts and watching", function()
    with({ model = model(), policy = "tova" }, function(server)
      refused(server, "draft", "policy tova evicts tokens, which does not go with drafts",
        { prompt = "a", draft = { ngram = 2 } })
      refused(server, "policy", "which does not go with drafts", { prompt = "a",
        draft = { policy = "quest", tokens = 2 } })
      refused(server, "watch_blocks", "cache has tables by head, whose pages are no",
        { prompt = "a", stream = true, watch_blocks = true })
      text_of(ask(server, COMPLETE, { prompt = "a", policy = "quest",
                                      draft = { ngram = 2 } }))
    end)
    assert.error_matches(function()
      kv.http_server { model = model(), policy = "tova", port = 0,
                       draft = { ngram = 2 } }
    end, "http_server: draft is a table, expected none, as policy tova evicts tokens")
  end)
end)

describe("a server with one table for all layers and heads", function()
  it("says what a policy that evicts needs", function()
    with({ model = model() }, function(server)
      refused(server, "policy", "policy tova evicts tokens, which needs a cache with "
        .. "tables by layer or head, and this server's has one for all; a server has "
        .. "them that is started with a policy that evicts, or with engine.tables=head",
        { prompt = "a", policy = "tova" })
    end)
  end)

  it("has default drafts that a request under a policy that evicts turns off", function()
    with({ model = model { tables = "head" }, draft = { ngram = 2 } }, function(server)
      refused(server, "draft", "expected draft = false", { prompt = "a",
                                                           policy = "tova" })
      text_of(ask(server, COMPLETE, { prompt = "a", policy = "tova", draft = false }))
    end)
  end)
end)
