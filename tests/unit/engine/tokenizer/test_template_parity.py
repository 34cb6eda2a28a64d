"""Prompts are, byte for byte, those of mlx-lm and transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from support.checkpoints.header_checkpoint import CHATML
from support.engines.tiny_models import tiny_tokenizer
from unit.engine.tiny_llama import CHAT_TEMPLATE

from machd.engine.tokenizer.template_renderer import TOOL
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import ChatTemplateMissingError, InvalidRequestError

_CONVENIENCES = """\
{%- macro shown(value) -%}[{{ value | tojson }}]{%- endmacro -%}
{%- set ns = namespace(system='', count=0) -%}
{{ bos_token or 'no begin' }}{{ eos_token }}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- set ns.system = message.content -%}
    {%- continue -%}
  {%- endif -%}
  {%- set ns.count = ns.count + 1 -%}
  {%- if ns.count > 9 -%}{%- break -%}{%- endif %}
<|{{ message['role'] | upper }}|> {{ message.content | trim if message.content is string else shown(message.content) }}
  {%- if message.reasoning_content is defined %} <think>{{ message.reasoning_content }}</think>{% endif %}
  {%- for call in message.tool_calls or [] %} {{ shown(call) }}{% endfor -%}
  {%- if message.role == 'assistant' -%}{% generation %}{{ message.content }}{% endgeneration %}{%- endif -%}
{%- endfor -%}
{{ ns.system }} {{ tools | tojson(indent=2) if tools else 'no tools' }} {{ strftime_now('%Y') }}
{{ enable_thinking }} {{ reasoning_effort | default('none') }} {{ documents is none }}
{%- for key, value in dict(b=2, a=1).items() | sort %}{{ key }}={{ value }};{% endfor -%}
{%- if add_generation_prompt %}
<|ASSISTANT|>
{% endif -%}
"""

TEMPLATES = {
    "chatml": CHATML,
    "tiny": CHAT_TEMPLATE,
    "conveniences": _CONVENIENCES,
    "blocks": "{% block x %}{% for m in messages %}  {{ m.content }}\n  {% endfor %}{% endblock %}",
    "with_tools": {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "tools {{ tools | length }} {{ messages[0].content }}",
    },
}

CONVERSATIONS: dict[str, list[dict[str, object]]] = {
    "plain": [{"role": "user", "content": "  Grüße 😀 \u2028 <b>&amp;</b> {{ 7 * 7 }}  "}],
    "turns": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\r\nb", "name": None},
        {"role": "assistant", "content": "c", "reasoning_content": "because"},
        {"role": "user", "content": ""},
    ],
    "calls": [
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {
                        "name": "look",
                        "arguments": {"z": 1, "a": [1.5, 10**30, None, True, {"k": "v"}]},
                    },
                }
            ],
        },
        {"role": "tool", "content": "[1]", "tool_call_id": "1"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}]}],
    "empty": [],
}

VARIABLES: list[dict[str, object]] = [
    {},
    {"enable_thinking": True, "reasoning_effort": "low"},
    {"add_generation_prompt": False},
]


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer() -> Iterator[MlxTokenizer]:
    tokenizer = tiny_tokenizer()
    tokenizer.wrapped._tokenizer.add_special_tokens({"bos_token": "<|end|>"})
    yield tokenizer
    tokenizer.close()


def _expected(
    tokenizer: MlxTokenizer,
    messages: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
) -> str:
    """Render with the libraries; a refusal is a fixed word, since its wording differs."""
    try:
        return str(tokenizer.wrapped.apply_chat_template(messages, tokenize=False, **arguments))
    except Exception as error:  # noqa: BLE001 - a template raises anything
        return f"refused: {type(error).__name__}"


def _rendered(tokenizer: MlxTokenizer, messages: Any, arguments: Mapping[str, Any]) -> str:
    given = dict(arguments)
    known = {
        name: given.pop(name)
        for name in ("add_generation_prompt", "continue_final_message")
        if name in given
    }
    tools = given.pop("tools", ())
    return tokenizer.render_chat(messages, tools=tools, variables=given, **known)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_the_libraries_render_it(
    tokenizer: MlxTokenizer, template: str, conversation: str
) -> None:
    """With and without tools, variables, and the generation prompt; what they refuse is refused."""
    tokenizer.wrapped._tokenizer.chat_template = TEMPLATES[template]
    messages = CONVERSATIONS[conversation]
    for variables in VARIABLES:
        for tools in ({}, {"tools": [TOOL]}):
            arguments: dict[str, object] = {"add_generation_prompt": True, **variables, **tools}
            expected = _expected(tokenizer, messages, arguments)
            if expected.startswith("refused: "):
                with pytest.raises(InvalidRequestError):
                    _rendered(tokenizer, messages, arguments)
            else:
                assert _rendered(tokenizer, messages, arguments) == expected


@pytest.mark.parametrize("final", ["The answer is ", "x", " a \n", "{{ y }}"])
@pytest.mark.parametrize("template", ["chatml", "tiny", "conveniences", "blocks"])
def test_a_final_message_is_continued_as_transformers_continues_it(
    tokenizer: MlxTokenizer, template: str, final: str
) -> None:
    """The prompt ends inside it, with or without the space that the template trims."""
    tokenizer.wrapped._tokenizer.chat_template = TEMPLATES[template]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": final}]
    arguments: dict[str, object] = {"continue_final_message": True, "add_generation_prompt": False}
    expected = _expected(tokenizer, messages, arguments)
    assert not expected.startswith("refused: ")
    assert _rendered(tokenizer, messages, arguments) == expected


def test_a_final_message_that_is_not_shown_is_refused(tokenizer: MlxTokenizer) -> None:
    """Without a word of the conversation in the message."""
    tokenizer.wrapped._tokenizer.chat_template = "{{ messages[-1].content | length }}"
    messages: list[dict[str, object]] = [{"role": "assistant", "content": "secret words"}]
    with pytest.raises(InvalidRequestError, match="does not show the final message") as caught:
        tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert "secret" not in caught.value.message


def test_templates_without_a_default_are_no_template(tokenizer: MlxTokenizer) -> None:
    """A conversation without tools is refused by name if only tools have a template."""
    tokenizer.wrapped._tokenizer.chat_template = {"tool_use": "t {{ messages[0].content }}"}
    user: dict[str, object] = {"role": "user", "content": "a"}
    assert tokenizer.render_chat([user], tools=[TOOL]) == "t a"
    with pytest.raises(ChatTemplateMissingError, match="default"):
        tokenizer.render_chat([user])


def test_the_embedded_models_template_renders_as_transformers_renders_it(
    embedded_model: Any,
) -> None:
    """In place, as the libraries do."""
    tokenizer = embedded_model.tokenizer
    for messages in (CONVERSATIONS["plain"], CONVERSATIONS["turns"]):
        for prompt in (True, False):
            arguments = {"add_generation_prompt": prompt}
            text = _rendered(tokenizer, messages, arguments)
            assert text == _expected(tokenizer, messages, arguments)
            assert re.search("<.im_end.>", text)
