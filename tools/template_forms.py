"""Chat templates in the forms that many models have, in our own words, for
tools/template_goldens.py. A form is what is around the messages: the tokens, which spaces
are cut, what stands in place of a missing system prompt, how tools and calls are written,
what is refused. The names of the tokens are those of the models."""

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TURNS = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('The roles have to take turns.') }}{% endif %}")
EACH = "{% for message in messages %}"
END = "{% endfor %}"


def chatml(before="", after="<|im_end|>\\n", content="message['content']", prompt=PROMPT):
    return (before + EACH + "{{ '<|im_start|>' + message['role'] + '\\n' + " + content
            + f" + '{after}' }}}}" + END + prompt)


SYSTEM = ("{% if messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\\nBe\\nkind.<|im_end|>\\n' }}{% endif %}")

# {% set %} of a system prompt, which is then in front of the first question.
SPLIT = """{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = DEFAULT -%}
    {%- set rest = messages -%}
{%- endif -%}
"""
BLOCKS = """{%- macro said(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part -%}
                {{- '<image>' -}}
            {%- elif part.text is defined -%}
                {{- part.text -}}
            {%- else -%}
                {{- raise_exception('A part of the type ' ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}
        {{- '' -}}
    {%- else -%}
        {{- raise_exception('Content of an unknown kind') -}}
    {%- endif -%}
{%- endmacro -%}
"""
CALLS = """
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- call.name }}
            {{- '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}"""

FORMS = {
    "chatml": chatml(),
    "chatml, default system": chatml(SYSTEM),
    "chatml, trim": chatml(content="message['content'] | trim"),
    "chatml, strip": chatml(content="message['content'].strip()"),
    "chatml, no line end": chatml(after="<|im_end|>"),
    "chatml, bos": chatml("{{ bos_token }}"),
    "chatml, always asks": chatml(prompt="{{ '<|im_start|>assistant\\n' }}"),
    "chatml, lines": """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "chatml, think": chatml(prompt="{% if add_generation_prompt %}"
                            "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"),
    "chatml, default messages": "{% if not add_generation_prompt is defined %}"
    "{% set add_generation_prompt = false %}{% endif %}{% for message in messages %}"
    "{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are brief.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' ~ '\\n' }}"
    "{% endfor %}" + PROMPT,
    "yi": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false"
    " %}{% endif %}{% if messages[0]['role'] == 'system' %}{% set system_message = "
    "messages[0]['content'] %}{% endif %}{% if system_message is defined %}"
    "{{ system_message }}{% endif %}{% for message in messages %}{% set content = "
    "message['content'] %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\\n' + "
    "content + '<|im_end|>\\n<|im_start|>assistant\\n' }}{% elif message['role'] == "
    "'assistant' %}{{ content + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}",
    "roles renamed": EACH + "{{ {'user': '### Asks', 'assistant': '### Says', 'system': "
    "'### Rules'}.get(message.role, '### ' ~ message.role | title) + '\\n' + "
    "message.content | string + '\\n\\n' }}" + END + "{{ '### Says\\n' if "
    "add_generation_prompt }}",
    "tulu": EACH + "{% if message['role'] == 'system' %}{{ '<|system|>\\n' + "
    "message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + "
    "message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}"
    "{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}"
    "{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% endif %}" + END,
    "zephyr": EACH + "\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + "
    "message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == "
    "'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n" + END,
    "orca": SPLIT.replace("DEFAULT", "'You explain.'") + "{{ '### System:\\n' + system + "
    "'\\n\\n' }}{% for message in rest %}{% if message.role == 'user' %}{{ '### User:\\n' + "
    "message.content + '\\n\\n' }}{% else %}{{ '### Assistant:\\n' + message.content + "
    "eos_token + '\\n\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '### Assistant:\\n' }}{% endif %}",
    "vicuna": SPLIT.replace("DEFAULT", "'A chat.'") + "{{ bos_token + system.strip() }}"
    "{% for message in rest %}" + TURNS + "{% if message.role == 'user' %}{{ ' USER: ' + "
    "message.content.strip() }}{% else %}{{ ' ASSISTANT: ' + message.content.strip() + "
    "eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}"
    "{% endif %}",
    "alpaca": "{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n\\n' }}"
    "{% endif %}{% for message in messages if message.role != 'system' %}{% if message.role "
    "== 'user' %}### Instruction:\n{{ message.content|trim }}{% elif message.role == "
    "'assistant' %}### Response:\n{{ message.content|trim }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}### Response:\n"
    "{% endif %}",
    "llama 2": SPLIT.replace("DEFAULT", "false") + "{% for message in rest %}" + TURNS
    + "{% if loop.index0 == 0 and system is not false %}{% set content = '<<SYS>>\\n' + "
    "system + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = "
    "message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + "
    "'[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + "
    "eos_token }}{% endif %}{% endfor %}",
    "llama 3": EACH + "{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}" + END + "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "llama 3, default system": "{{ bos_token }}{% if messages[0].role != 'system' %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nBe useful.<|eot_id|>' }}{% endif %}"
    + EACH + "{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ "
    "message.content | trim ~ '<|eot_id|>' }}" + END,
    "llama 3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "These functions exist:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time.") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": "{{ bos_token }}" + EACH + TURNS + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' "
    "%}{{ message['content'] + eos_token }}{% endif %}" + END,
    "mistral, spaces": "{{ bos_token }}" + EACH + TURNS + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' "
    "%}{{ ' ' + message['content'] + eos_token + ' ' }}{% endif %}" + END,
    "mistral, tools": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Take turns.") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("An id has nine letters.") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("An unknown role.") }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception("
    "'No system prompts.') }}{% endif %}" + EACH + TURNS + "{% if (message['role'] == "
    "'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}" + END + "{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\\n'}}{% endif %}",
    "gemma 3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Take turns.") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("No content") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    "phi 3": EACH + "{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' "
    "%}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == "
    "'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}"
    + END + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}"
    "{% endif %}",
    "phi 4 mini": EACH + "{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + "
    "message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}" + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
    "openchat": "{{ bos_token }}" + EACH + "{{ 'GPT4 Correct ' + message['role'].title() + "
    "': ' + message['content'] + '<|end_of_turn|>' }}" + END + "{% if add_generation_prompt "
    "%}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
    "falcon": EACH + "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message.role | "
    "capitalize + ': ' + message.content.replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') }}"
    + END + "{{ '\\nAssistant:' if add_generation_prompt else '' }}",
    "solar": EACH + "{{ '### ' ~ message.role | upper ~ ':\\n' ~ message.content }}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}" + END
    + "{% if add_generation_prompt and messages|last|length and (messages|last).role == "
    "'user' %}{{ '\\n\\n### ASSISTANT:\\n' }}{% endif %}",
    "olmo": "{{ eos_token }}" + EACH + "\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' "
    "+ message['content'] }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n" + END,
    "command-r": "{{ bos_token }}" + SPLIT.replace("DEFAULT", "false")
    + "{% if system != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + "
    "'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% for message in rest %}" + TURNS
    + "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' "
    "}}{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' "
    "+ content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system_prompt = ns.system_prompt + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false -%}
        {{- '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_tool = false -%}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {{- '<｜Assistant｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] | tojson + '\\n```<｜tool▁call▁end｜>' }}
                {%- set ns.is_first = true -%}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false -%}
        {%- else %}
            {%- set content = message['content'] -%}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1] -%}
            {%- endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true -%}
        {{- '\\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
""",
    "qwen 2.5": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are brief.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are brief.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}""" + CALLS + """
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen 3": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}""" + CALLS + """
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "hermes": """{%- macro type_of(spec) %}
    {%- set names = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if names[spec.type] is defined %}
        {{- names[spec.type] }}
    {%- elif spec.type == "array" %}
        {{- "list[" + type_of(spec.items) + "]" }}
    {%- elif spec.type is iterable and spec.type is not string %}
        {{- "Union[" }}
        {%- for t in spec.type %}
            {{- type_of({"type": t}) }}
            {%- if not loop.last %}{{- "," }}{%- endif %}
        {%- endfor %}
        {{- "]" }}
    {%- else %}
        {{- "Any" }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- "<|im_start|>system\\nFunctions: <tools>" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- tool.name + "(" }}
        {%- for name, spec in tool.parameters.properties | items %}
            {{- name + ": " + type_of(spec) }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ")\\n    " + tool.description + "\\n" }}
        {%- for name, spec in tool.parameters.properties | dictsort %}
            {{- ("    %s: %s" | format(name, spec.description | default("-"))) + "\\n" }}
        {%- endfor %}
    {%- endfor %}
    {{- "</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role == "tool" %}
            {{- '\\n' }}
        {%- else %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- '<|im_start|>' + message.role }}""" + CALLS + """
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "granite": """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Date: " ~ strftime_now('%B %d, %Y') ~ ".\\nBe clear." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " Tools and documents." %}
    {%- elif tools %}
        {%- set system_message = system_message + " Tools." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools|tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if enable_thinking %}{{- ' think' }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
""",
    "glm": "[gMASK]<sop>\n" + BLOCKS + """{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ said(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not said(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = said(m.content) %}
{%- if '</think>' in content %}
    {%- set content = (content.split('</think>')|last).lstrip() %}
{%- endif %}
{{ '\\n' + content if content.strip() }}
{%- for tc in m.tool_calls or [] %}
{%- set tc = tc.function %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{%- if _args is mapping %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
{%- endif %}
</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' -%}
<|observation|>
{{- said(m.content) }}
{%- else -%}
<|{{ m.role }}|>
{{ said(m.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
""",
    "parts": BLOCKS + "{% for m in messages %}<|{{ m.role }}|>{{ said(m.content) }}"
    "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}",
    "parts, numbered": "{% set images = namespace(n=0) %}{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %} {{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}{% set images.n = images.n + 1 %} Picture {{ images.n }}"
    "{% elif 'text' in p %} {{ p['text'] }}{% endif %}{% endfor %}{% endif %};{% endfor %}",
    "for training": chatml().replace(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
        "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endif %}"),
    "harmony": """{%- macro written(spec) -%}
    {%- if spec.type == "string" -%}
        {%- if spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}{%- else -%}string{%- endif -%}
    {%- elif spec.type == "integer" or spec.type == "number" -%}number
    {%- elif spec.type is iterable and spec.type is not string -%}{{- spec.type|join(" | ") -}}
    {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- set reasoning_effort = reasoning_effort if reasoning_effort is defined else "medium" -%}
{{- "<|start|>system<|message|>Now: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " + reasoning_effort + "<|end|>" }}
{%- if tools -%}
    {{- "<|start|>developer<|message|>namespace functions {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "(_: {\\n" }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {{- name + ("?" if name not in (tool.parameters.required or []) else "") + ": " }}
                {{- written(spec) }}
                {%- if spec.default is defined %}
                    {{- ", // default: " + (spec.default|tojson if spec.default is not string else spec.default) }}
                {%- endif %}
                {{- ",\\n" if not loop.last else "\\n" }}
            {%- endfor %}
            {{- "}) => any;\\n\\n" }}
        {%- else %}
            {{- "() => any;\\n\\n" }}
        {%- endif %}
    {%- endfor %}
    {{- "}<|end|>" }}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- if "tool_calls" in message -%}
            {%- set call = message.tool_calls[0].function -%}
            {%- if message.content and message.thinking -%}
                {{- raise_exception("Not both.") }}
            {%- endif -%}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" + call.arguments|tojson + "<|call|>" }}
            {%- set last.name = call.name -%}
        {%- elif loop.last and not add_generation_prompt -%}
            {{- ("<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>") if "thinking" in message }}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none -%}
        {%- endif -%}
    {%- elif message.role == "tool" -%}
        {%- if last.name is none -%}
            {{- raise_exception("A result of no call.") }}
        {%- endif -%}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == "user" -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
""",
    "rwkv": "{% for m in messages %}{{ {'user': 'User', 'assistant': 'Assistant'}[m.role] | "
    "default('System') }}: {{ m.content.strip().replace('\\n\\n', '\\n') if m.content is "
    "string else m.content }}\n\n{% endfor %}{{ 'Assistant:' * (add_generation_prompt | int) }}",
    "the first system only": "{% for m in messages %}{% if loop.first %}{% set ns = "
    "namespace(found=false) %}{% endif %}{% if m.role == 'system' and not loop.first %}"
    "{% continue %}{% endif %}{% if m.role == 'tool' %}{% break %}{% endif %}[{{ loop.index }}/"
    "{{ loop.length }} {{ m.role[0] | upper }}{{ m.role[1:] }}] {{ m.content | trim | "
    "replace('\\t', ' ') }}\n{% else %}nobody{% endfor %}",
    "documents": "{% set c = messages | map(attribute='content') | list %}{% set roles = "
    "messages | map(attribute='role') | unique | sort | join('+') %}{{ roles }}{{ c | length }}"
    "{% filter trim %}  {% for role, text in [('a', 'b'), ('c', 'd')] %}{{ role ~ text }}"
    "{% endfor %}  {% endfilter %}{% if documents %}{% for d in documents %}{{ d.title }}"
    "{% endfor %}{% endif %}{% set last = (messages | selectattr('role', 'eq', 'user') | list)"
    "[-1:] %}{% for m in last %}{{ m['content'] }}{% endfor %}",
}
