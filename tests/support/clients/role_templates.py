"""Chat templates by what they want of roles, cut down from published ones."""

from __future__ import annotations

from collections.abc import Mapping

_TURN = "<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
_CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"

ROLE_TEMPLATES: Mapping[str, str] = {
    # Llama 3, ChatML.
    "anywhere": f"{{% for m in messages %}}{_TURN}{_CALLS}{{% endfor %}}",
    # Qwen 3.5.
    "first": (
        "{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        f"{_TURN}{_CALLS}{{% endfor %}}"
    ),
    # Templates that look at the first message, and at the user's and the assistant's behind it.
    "first, silent": (
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>{% endif %}"
        "{% for m in messages if m.role != 'system' %}" + _TURN + _CALLS + "{% endfor %}"
    ),
    # Mistral 7B v0.3: results belong to no turn, and behind them the assistant answers.
    "alternating": (
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% set ns = namespace(index=0) %}{% for m in rest %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}"
        "{% elif m.role != 'tool' and m.role != 'assistant' %}"
        "{{ raise_exception('Only user and assistant roles, with the exception of an initial system "
        "message!') }}{% endif %}" + _TURN + _CALLS + "{% endfor %}"
    ),
    # Gemma 2: no system message at all, no tools.
    "none": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        + _TURN
        + "{% endfor %}"
    ),
}
"""What each refuses, it refuses as the published one does."""
