--- The verb `serve`: what it refuses, what it prints, how it ends; and a real model,
-- whose answers over HTTP are those of m:generate.
local client = require "spec.http_client"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local processes = require "spec.processes"
local temporary = require "spec.temporary"
local text_models = require "spec.text_models"

--- The verb's command line for a shell.
local function command(words)
  return files.shell_line { kv.paths.executable, "serve", unpack(words) }
end

--- Starts the verb. Returns its port, its process and the file of what it prints.
local function start(words)
  local log = temporary.folder() .. "/log"
  local pipe = io.popen(("%s --port=0 >/dev/null 2>%s & echo $!"):format(command(words),
    files.shell_line { log }))
  local pid = pipe:read "*n"
  pipe:close()
  local port = processes.wait_until(function()
    local text = files.read(log) or ""
    return tonumber(text:match "answers at http://127.0.0.1:(%d+)/v1")
      or text:find "\n" and 0
  end, "the server")
  assert(port > 0, files.read(log))
  return port, pid, log
end

--- One request; the server runs in its own process.
local function ask(port, method, path, body, headers)
  return client.ask({ port = port, turn = function() processes.sleep(0.005) end }, method,
    path, body, headers)
end

--- Ctrl-C.
local function stop(pid)
  os.execute("kill -INT " .. pid)
  processes.wait_until(function() return not files.real("/proc/" .. pid) end, "its end")
end

describe("kvlab serve", function()
  local function refused(words)
    local pipe = io.popen(command(words) .. " 2>&1; echo $?")
    local text = pipe:read "*a"
    pipe:close()
    local said, status = text:match "^(.-)\n(%d+)\n$"
    assert.equal("2", status, text)
    return said
  end

  it("refuses a wrong command line in one line", function()
    for words, expected in pairs {
      [{}] = "serve takes one model",
      [{ "a", "b" }] = "serve takes one model",
      [{ "a", "--port=70000" }] = "--port is a whole number from 0 to 65535; given 70000",
      [{ "a", "--dtype=f8" }] = '--dtype is f32, f16 or bf16; given "f8"',
      [{ "a", "--set", "ratio=0.1" }] = "--set ratio is for a policy",
      [{ "a", "--key-file=/nowhere" }] = "--key-file: /nowhere cannot be read",
      [{ "a", "--polcy=quest" }] = "did you mean --policy",
    } do
      local said = refused(words)
      assert.truthy(said:find(expected, 1, true), said)
      assert.is_nil(said:find "\n")
    end
  end)

  it("serves a folder with a policy and a key, and ends with Ctrl-C", function()
    local key = temporary.folder() .. "/key"
    local file = assert(io.open(key, "w"))
    file:write "secret\n"
    file:close()
    local port, pid, log = start { text_models.folder(), "--policy=quest", "--set",
      "ratio=0.5", "--set", "engine.blocks=32", "--set", "engine.format=int8",
      "--set", "limits.n=2", "--name=mine", "--key-file=" .. key, "--dtype=f32",
      "--device=cpu" }
    local with = { Authorization = "Bearer secret" }
    assert.equal(401, ask(port, "GET", "/v1/models").status)
    assert.equal("mine", ask(port, "GET", "/v1/models", nil, with):json().data[1].id)
    local o = { prompt = "Hello", max_tokens = 3, n = 2 }
    local answer = ask(port, "POST", "/v1/completions", o, with)
    assert.equal(200, answer.status, answer.body)
    assert.equal(2, #answer:json().choices)
    o.n = 3
    assert.equal(400, ask(port, "POST", "/v1/completions", o, with).status)
    stop(pid)
    local text = files.read(log)
    assert.truthy(text:find "policy quest")
    assert.truthy(text:find "POST /v1/completions 200 %d tokens")
    assert.truthy(text:find "stopping")
  end)

  it("serves under a policy that evicts", function()
    local folder = text_models.folder()
    local port, pid = start { folder, "--policy=snapkv", "--set", "blocks=3", "--set",
      "engine.blocks=32", "--dtype=f32", "--device=cpu", "--quiet" }
    local o = { prompt = ("A few words. "):rep(8), max_tokens = 20, temperature = 0 }
    local answer = ask(port, "POST", "/v1/completions", o)
    assert.equal(200, answer.status, answer.body)
    stop(pid)
    local m = kv.model(folder, { device = "cpu", dtype = "f32" })
    assert.equal(m:generate(o.prompt, { max_tokens = 20, policy = "snapkv",
      blocks = 3 }).text, answer:json().choices[1].text)
  end)

  it("answers with SmolLM2 what m:generate does, beside others #model", function()
    local policies = {
      { "quest", { ratio = 0.1 } }, { "full" }, { "streaming_blocks", { tokens = 64 } },
    }
    local prompts = {}
    for i = 1, 6 do
      prompts[i] = ("Chapter %d. "):format(i) .. ("And God said, Let there be light: and "
        .. "there was light. "):rep(i * 2) .. "And God"
    end
    local port, pid = start { "smollm2", "--dtype=f32", "--device=cpu", "--quiet",
      "--policy=quest", "--set", "ratio=0.1" }
    local clients, asked = {}, {}
    for i, prompt in ipairs(prompts) do
      local policy = policies[i % 3 + 1]
      asked[i] = { prompt = prompt, max_tokens = 12, temperature = i % 2, seed = i,
                   policy = policy[1], policy_options = policy[2] }
      clients[i] = client.start({ port = port }, "POST", "/v1/completions", asked[i])
    end
    client.finish({ turn = function() processes.sleep(0.005) end }, clients)
    stop(pid)
    local m = kv.model("smollm2", { device = "cpu", dtype = "f32",
                                    engine = { blocks = 128 } })
    for i, o in ipairs(asked) do
      local own = m:generate(o.prompt, { max_tokens = 12, temperature = o.temperature,
        seed = o.seed, policy = kv.policy(o.policy, o.policy_options) })
      assert.equal(own.text, json.decode(clients[i]:answer().body).choices[1].text)
    end
  end)
end)
