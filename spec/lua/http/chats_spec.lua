--- What a chat over HTTP gives to its model's template: messages, calls, tools, documents
-- and variables, as they are in the request; and what is refused by its name.
local client = require "spec.http_client"
local servers = require "spec.http_servers"

local tokenizer = servers.tokenizer
local own = tokenizer.template

after_each(function()
  tokenizer.template = own
  servers.close_all()
end)

--- The text of the tokens that the template makes of a request.
local function text_of(server, template, body)
  tokenizer.template = template
  local answer = client.ask(server, "POST", "/tokenize", body)
  assert.equal(200, answer.status, answer.body)
  return tokenizer:decode(answer:json().tokens, { special = true })
end

local HELLO = '"messages": [{"role": "user", "content": "Hello"}]'

describe("the template of a chat over HTTP", function()
  it("reads tools and documents with the order of their keys, and variables", function()
    local server = servers.open()
    local body = "{" .. HELLO .. ', "tools": [{"b": 1.0, "a": [{"z": null, "y": 1}]}], '
      .. '"tool_choice": "none", "documents": [{"c": true, "a": "<|im_end|>"}], '
      .. '"chat_template_kwargs": {"think": false, "who": {"y": 1, "x": 2}}}'
    assert.equal('[{"b": 1.0, "a": [{"z": null, "y": 1}]}]/[{"c": true, "a": '
      .. '"<|im_end|>"}]/False/{"y": 1, "x": 2}/[{"role": "user", "content": "Hello"}]',
      text_of(server, "{{ tools|tojson }}/{{ documents|tojson }}/{{ think }}/"
        .. "{{ who|tojson }}/{{ messages|tojson }}", body))
    assert.equal("None", text_of(server, "{{ tools }}", "{" .. HELLO .. ', "tools": []}'))
  end)

  it("reads calls of tools, whose arguments are what their JSON text says", function()
    local server = servers.open()
    assert.equal('user:Hi;assistant:[{"id": "1", "function": {"name": "f", "arguments": '
      .. '{"b": 1, "a": 2}}}];tool:3:1:f;system:AB;', text_of(server, "{% for m in "
      .. "messages %}{{ m.role }}:{{ m.content if m.content is defined else "
      .. "m.tool_calls|tojson }}{% if m.tool_call_id %}:{{ m.tool_call_id }}:{{ m.name }}"
      .. "{% endif %};{% endfor %}", [[{"messages": [{"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function":
          {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}], "refusal": null},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"},
        {"role": "developer", "content": [{"type": "text", "text": "A"},
                                          {"type": "text", "text": "B"}]}]}]]))
  end)

  it("ends with a generation prompt, unless /tokenize is asked for none", function()
    local server, template = servers.open(), "{{ 1 if add_generation_prompt else 0 }}"
    assert.equal("1", text_of(server, template, "{" .. HELLO .. "}"))
    assert.equal("0", text_of(server, template,
      "{" .. HELLO .. ', "add_generation_prompt": false}'))
  end)

  it("is told from a wrong request by the field that is wrong", function()
    local server = servers.open()
    tokenizer.template = "{{ messages[0].content }}{{ think }}{{ tools }}"
    for body, param in pairs {
      ['{"tools": [{}], ' .. HELLO .. "}"] = "tool_choice",
      ['{"tools": [{}], "tool_choice": "auto", ' .. HELLO .. "}"] = "tool_choice",
      ['{"tool_choice": {"type": "function"}, ' .. HELLO .. "}"] = "tool_choice",
      ['{"tools": {}, "tool_choice": "none", ' .. HELLO .. "}"] = "tools",
      ['{"tools": [1], ' .. HELLO .. "}"] = "tools[0]",
      ['{"documents": [{}], ' .. HELLO .. "}"] = "messages", -- it reads none
      ['{"chat_template_kwargs": {"thinc": true}, ' .. HELLO .. "}"] = "messages",
      ['{"chat_template_kwargs": [1], ' .. HELLO .. "}"] = "chat_template_kwargs",
      ['{"chat_template": "x", ' .. HELLO .. "}"] = "chat_template",
      ['{"messages": [{"role": "user", "contents": "a"}]}'] = "contents",
      ['{"messages": [{"role": "tool", "tool_call_id": 1}]}'] = "tool_call_id",
      ['{"messages": [{"role": "assistant", "tool_calls": [{}]}]}'] =
        "messages[0].tool_calls[0]",
      ['{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '
        .. '"{"}}]}]}'] = "messages[0].tool_calls[0]",
      ['{"messages": [{"role": "user", "content": 3}]}'] = "messages[0].content",
      ['{"messages": [{"role": "user", "content": [{"type": "text"}]}]}'] =
        "messages[0].content[0]",
    } do
      local answer = client.ask(server, "POST", "/v1/chat/completions", body)
      assert.equal(400, answer.status, body)
      assert.equal(param, answer:json().error.param, answer.body)
    end
  end)

  it("refuses a chat with the words of the template", function()
    local server = servers.open()
    tokenizer.template = "\n{{ raise_exception('Only cats.') }}"
    local answer = client.ask(server, "POST", "/v1/chat/completions", "{" .. HELLO .. "}")
    local error = answer:json().error
    assert.same({ 400, "messages", "invalid_chat" }, { answer.status, error.param,
                                                       error.code })
    assert.matches("line 2: refuses this chat: Only cats%.$", error.message)
  end)
end)
