# ruff: noqa: E501
"""Chat templates in the formats of families of models, written from descriptions of these formats.

Each is short, and reads messages in the way of its family: contents as text or as parts, arguments of calls as objects
or as JSON in a string.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family's chat template, and how it reads messages."""

    source: str
    tool_use: str | None = None  # a second template, for requests with tools
    contents: str = "text"  # text, parts, or both
    arguments_as_text: bool = False  # arguments of calls must be JSON in a string
    # Only the first call of a message is read; the message may have content or reasoning, not both.
    one_call: bool = False
    one_system: bool = False  # only the first of several system messages at the beginning is read

    @property
    def takes_tools(self) -> bool:
        return "tools" in (self.tool_use or self.source)


def _turns(form: str, last: str, *, before: str = "", refuse_system: bool = False) -> str:
    """Return a template with a turn for each message, made by the Jinja expression `form` of `message`."""
    refusal = "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" if refuse_system else ""
    return (
        f"{before}{{% for message in messages %}}{refusal}{{{{ {form} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {last!r} }}}}{{% endif %}}"
    )


_CHATML = "'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'"
_CHATML_END = "<|im_start|>assistant\n"

_QWEN_2_5 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_QWEN_3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(search=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.search and message.role == "user" and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.search = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

_LLAMA_3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_LLAMA_3_1 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: 26 Jul 2024\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond as {"name": function, "parameters": arguments}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_LLAMA_3_2_VISION = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}{{- '<|image|>' }}
            {%- elif content['type'] == 'text' %}{{- content['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_MISTRAL_1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def _mistral(user: str, answer: str, call_space: str) -> str:
    return """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS]SPACE[" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + "}" }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST]SPACE" + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]SPACE" + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS]SPACE[" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- ANSWER }}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content.content if message.content is mapping else message.content %}
        {{- '[TOOL_RESULTS]SPACE{"content": ' + content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}
""".replace("SPACE", call_space).replace("ANSWER", answer)


_MISTRAL_3 = _mistral("", '" " + message["content"] | trim + eos_token', " ")
_TEKKEN = _mistral("", 'message["content"] + eos_token', "")

_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

_GEMMA_3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
    {%- if message['role'] == 'assistant' -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_DEEPSEEK_V3 = (
    "{% set ns = namespace(first=true, tool=false, last_user=false, system='') %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% if tools %}{{ '\\n\\n## Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}{% set ns.tool = false %}{{ '<｜Assistant｜>' }}"
    "{% for call in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] "
    "+ '\\n```json\\n' + call['function']['arguments'] + '\\n```' + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% elif message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}"
    "{% endfor %}"
)
_DEEPSEEK_V2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

_HERMES_TOOLS = """{{- bos_token }}{{- '<|im_start|>system\\nYou call functions. <tools>' }}
{%- for tool in tools or [] %}{{- tool.function | tojson }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_MIXTRAL_TOOLS = """{{- bos_token }}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if message == users[-1] and tools %}{{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "assistant" and message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] " + {"content": message.content, "call_id": message.tool_call_id} | tojson + "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

_COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message['content'] + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_COMMAND_R_TOOLS = (
    "{{ bos_token }}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>## Available Tools\\n' }}"
    "{% for tool in tools %}{{ '```python\\ndef ' + tool.function.name + '(' }}"
    "{% for name, field in tool.function.parameters.properties.items() %}{{ name + ': ' + field.type }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ '):\\n    \"\"\"' + tool.function.description + '\"\"\"\\n```\\n' }}{% endfor %}{{ '<|END_OF_TURN_TOKEN|>' }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message.role == 'assistant' and message.tool_calls %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Action: ```json\\n' }}"
    "{% for call in message.tool_calls %}{{ {'tool_name': call.function.name, 'parameters': call.function.arguments} | tojson(indent=4) }}{% endfor %}"
    "{{ '```<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message.role == 'tool' %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' + message.content + '</results><|END_OF_TURN_TOKEN|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

_GRANITE = """{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}{%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- '<|start_of_role|>system<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'user' %}{{- '<|start_of_role|>user<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'assistant' and message.tool_calls %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'assistant' %}{{- '<|start_of_role|>assistant<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'tool' %}{{- '<|start_of_role|>tool_response<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""

_GLM_4 = (
    "{{ '[gMASK]<sop>' }}"
    "{% if tools %}{{ '<|system|>\\n# Tools' }}{% for tool in tools %}{{ '\\n\\n## ' + tool.function.name + '\\n\\n' + tool.function | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% macro visible(content) %}{% if content is string %}{{ content }}{% elif content is iterable and content is not mapping %}"
    "{% for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '<|assistant|>' + call.function.name + '\\n' + call.function.arguments }}{% endfor %}"
    "{% elif message.role == 'tool' %}{{ '<|observation|>\\n' }}{{ visible(message.content) }}"
    "{% else %}{{ '<|' + message.role + '|>\\n' }}{{ visible(message.content) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

_LLAMA_GUARD_3 = (
    "{{ bos_token }}{% set role = 'Agent' if messages | length % 2 == 0 else 'User' %}"
    "{{ '<|start_header_id|>user<|end_header_id|>\\n\\nTask: check the ' + role + ' messages.\\n\\n<BEGIN CONVERSATION>\\n\\n' }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set role = 'User' %}"
    "{% elif message['role'] == 'assistant' %}{% set role = 'Agent' %}{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% for content in message['content'] %}{% if content['type'] == 'text' %}{{ role + ': ' + content['text'] | trim + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% endfor %}{{ '<END CONVERSATION><|eot_id|><|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)

_SMOL_VLM = (
    "{{ '<|im_start|>' }}{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{{ '<end_of_utterance>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

_GPT_OSS = """{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set instructions = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set instructions = "" %}{%- set rest = messages %}{%- endif %}
{{- "<|start|>system<|message|>You help. Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|>" + instructions }}
    {%- for tool in tools or [] %}{{- "\\n// " + tool.function.description + "\\ntype " + tool.function.name + " = (_: any) => any;" }}{%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}{{- raise_exception("content and thinking") }}{%- endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" }}{%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}{{- call.arguments | tojson }}{{- "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("no call before") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}{{- message.content | tojson }}{{- "<|end|>" }}
    {%- elif message.role == "user" %}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""

_SMOL_LM_3 = (
    "{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content.rstrip() + '\\n\\n' }}{% endif %}"
    "{% if tools %}{{ '### Tools\\n<tools>\\n' }}{% for tool in tools %}{{ tool | string + '\\n' }}{% endfor %}{{ '</tools>\\n' }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_JAMBA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{{ '<|bom|><|assistant|> <tool_calls>[\\n' }}"
    "{% for call in message.tool_calls %}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson + (',\\n' if not loop.last else '\\n') }}{% endfor %}"
    "{{ ']</tool_calls><|eom|>' }}"
    "{% else %}{{ '<|bom|><|' + message.role + '|> ' + message.content + '<|eom|>' }}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<tool_definitions>\\n' + tools | tojson + '\\n</tool_definitions>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|bom|><|assistant|> ' }}{% endif %}"
)

_NEMOTRON = _turns(
    "'<SPECIAL_10>' + message['role'] | capitalize + '\\n' + message['content'] | trim + '\\n'",
    "<SPECIAL_11>Assistant\n",
)

_KIMI = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}"
    "{% if message.role == 'assistant' and message.tool_calls %}{{ message.content or '' }}{{ '<|tool_calls_section_begin|>' }}"
    "{% for call in message.tool_calls %}{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '<|tool_call_end|>' }}{% endfor %}"
    "{{ '<|tool_calls_section_end|>' }}"
    "{% else %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)

_XML_CALLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_GLM_4_5 = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{% else %}{{ '<|' + message.role + '|>\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}"
    "{% for name, value in call.function.arguments | items %}{{ '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}{% endfor %}"
    "{{ '\\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MINIMAX_M2 = (
    "{% if tools %}{{ ']~b]system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '[e~[\\n' }}{% endif %}"
    "{% for message in messages %}{{ ']~b]' + message.role + '\\n' + message.content }}"
    "{% if message.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}{% for call in message.tool_calls %}"
    "{{ '<invoke name=\"' + call.function.name + '\">\\n' }}"
    "{% for name, value in call.function.arguments | items %}{{ '<parameter name=\"' + name + '\">' + (value if value is string else value | tojson) + '</parameter>\\n' }}{% endfor %}"
    "{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"
)

_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{{ messages[0]['content'].strip() + ' ' }}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'].strip() + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _named(form: str, last: str, before: str = "") -> Family:
    return Family(_turns(form, last, before=before))


FAMILIES: dict[str, Family] = {
    "chatml": Family(_turns(_CHATML, _CHATML_END)),
    "qwen 2.5": Family(_QWEN_2_5),
    "qwen 3": Family(_QWEN_3),
    "qwen 3 coder": Family(_XML_CALLS),
    "glm 4.5": Family(_GLM_4_5),
    "minimax m2": Family(_MINIMAX_M2),
    "llama 2": Family(_LLAMA_2),
    "llama 3": Family(_LLAMA_3),
    "llama 3.1": Family(_LLAMA_3_1),
    "llama 3.2 vision": Family(_LLAMA_3_2_VISION, contents="both"),
    "llama guard 3": Family(_LLAMA_GUARD_3, contents="parts"),
    "mistral 1": Family(_MISTRAL_1),
    "mistral 3": Family(_MISTRAL_3),
    "mistral tekken": Family(_TEKKEN),
    "mixtral 8x22b": Family(_MISTRAL_1, _MIXTRAL_TOOLS),
    "gemma": Family(_GEMMA),
    "gemma 3": Family(_GEMMA_3, contents="both"),
    "phi 3": _named("'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'", "<|assistant|>\n"),
    "deepseek 2": Family(_DEEPSEEK_V2),
    "deepseek 3": Family(
        _DEEPSEEK_V3 + "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}", arguments_as_text=True
    ),
    "deepseek r1": Family(
        _DEEPSEEK_V3 + "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
        arguments_as_text=True,
    ),
    "hermes 2 pro": Family(_turns(_CHATML, _CHATML_END, before="{{ bos_token }}"), _HERMES_TOOLS),
    "command r": Family(_COMMAND_R, _COMMAND_R_TOOLS),
    "zephyr": _named("'<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n'", "<|assistant|>\n"),
    "vicuna": Family(_VICUNA, one_system=True),
    "granite": Family(_GRANITE),
    "smollm 3": Family(_SMOL_LM_3, one_system=True),
    "smolvlm": Family(_SMOL_VLM, contents="parts"),
    "glm 4": Family(_GLM_4, contents="both", arguments_as_text=True),
    "llava 1.5": Family(_LLAVA, contents="parts"),
    "gpt-oss": Family(_GPT_OSS, one_call=True, one_system=True),
    "jamba": Family(_JAMBA),
    "nemotron": Family(_NEMOTRON),
    "kimi": Family(_KIMI, contents="both"),
}

# Tokens of these formats: special ones, those of them that take the whitespace before or after them, and ones that are
# added but not special.
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>"),
    *("<|end_of_text|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|channel|>", "<|end_of_turn|>", "<|bom|>"),
    *("<|im_middle|>", "<reserved_106>", "<end_of_utterance>", "<image>"),
)
SPECIAL_RIGHT = ("<|end|>", "<|assistant|>", "<|system|>")
SPECIAL_LEFT = ("<|eom|>",)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
