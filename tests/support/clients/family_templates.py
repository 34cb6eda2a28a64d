"""Chat templates by how they write texts, thoughts, tools and calls, cut down from published ones."""

from __future__ import annotations

from collections.abc import Mapping

FAMILY_TEMPLATES: Mapping[str, str] = {
    # Texts are trimmed, tools come in the first user's turn, results are written as JSON strings.
    "llama 3.1": (
        "{{- bos_token }}{% if messages[0].role == 'system' %}"
        "{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}"
        "{% else %}{% set system = '' %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n"
        "{{ system }}<|eot_id|>"
        "{% if tools %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}"
        "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, respond with "
        'a JSON for a function call: {"name": function name, "parameters": {}}.\n\n'
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ first }}<|eot_id|>{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
        "{{ m.content | tojson }}<|eot_id|>"
        "{% elif m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
        "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # Thoughts of answers before the last question are left out; results share a user's turn.
    "qwen 3": (
        "{% if tools %}<|im_start|>system\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
        "# Tools\n\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n\nReturn:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        "<|im_end|>\n{% elif messages[0].role == 'system' %}"
        "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
        "{% set ns = namespace(last=0) %}{% for m in messages %}"
        "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}"
        "{% set content, thought = m.content, '' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
        "{% elif '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
        "{% else %}{{ content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{% if content or not loop.first %}\n{% endif %}"
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Tools and calls are no JSON.
    "qwen 3 coder": (
        "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% if tools %}\n\n<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>"
        "\n<description>{{ t.function.description | trim }}</description>\n<parameters>"
        "{% for name, field in t.function.parameters.properties | items %}\n<parameter>{{ name }}: "
        "{{ field.type }}</parameter>{% endfor %}\n</parameters>\n</function>{% endfor %}\n</tools>"
        "\n\n<tool_call>\n<function=example_function_name>\n</function>\n</tool_call>{% endif %}"
        "<|im_end|>\n"
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
        "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | trim }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
        "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
        "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Tools stand before the last user's turn, and the system's text in it.
    "mistral": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{% set ns = namespace(last=-1) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] [{% for t in tools %}"
        """{{ '{"type": "function", "function": {' }}"""
        '{% for key, value in t.function | items %}"{{ key }}": {{ value | tojson }}'
        "{% if not loop.last %}, {% endif %}{% endfor %}}}{% if not loop.last %}, {% endif %}"
        "{% endfor %}][/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {% if loop.index0 == ns.last and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
        '{% set out = call.function | tojson %}{{ out[:-1] }}, "id": "{{ call.id }}"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        '{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # The system's text is a part of the first user's turn; it shows no tools.
    "gemma 3": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set prefix = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
        "{% else %}{% set prefix = '' %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ prefix if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # The date, instructions as a developer's message, tools as types, calls behind their names.
    "gpt-oss": (
        "<|start|>system<|message|>You are a model.\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n"
        "# Valid channels: analysis, commentary, final.<|end|>"
        "{% if messages[0].role == 'system' or tools %}<|start|>developer<|message|>"
        "{% if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}\n\n"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% if tools %}# Tools\n\n## functions\n\nnamespace functions {\n\n{% for t in tools %}"
        "// {{ t.function.description }}\ntype {{ t.function.name }} = (_: {\n"
        "{% for name, field in t.function.parameters.properties | items %}{{ name }}?: "
        "{{ field.type }},\n{% endfor %}}) => any;\n\n{% endfor %}} // namespace functions{% endif %}"
        "<|end|>{% endif %}"
        "{% set ns = namespace(called='') %}{% for m in messages %}"
        "{% if m.role == 'assistant' and m.tool_calls %}"
        "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|>{% endif %}{% set call = m.tool_calls[0].function %}"
        "{% set ns.called = call.name %}<|start|>assistant to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "<|end|>"
        "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.called }} to=assistant"
        "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    # System texts come first, wherever they stand; thoughts are left out of every answer.
    "deepseek r1": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endif %}"
        "{% endfor %}{{ ns.system }}{% for m in messages %}"
        "{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' and m.tool_calls %}<|Assistant|>{% for call in m.tool_calls %}"
        "<|tool_call_begin|>function<|tool_sep|>{{ call.function.name }}\n```json\n"
        "{{ call.function.arguments | tojson }}\n```<|tool_call_end|>{% endfor %}"
        "{% elif m.role == 'assistant' %}{% set content = m.content %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "<|Assistant|>{{ content }}<|end_of_sentence|>"
        "{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    ),
    # Texts are changed, so that no place can be told.
    "shouting": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}</{{ m.role }}>{% endfor %}"
    ),
}
