"""The date that a chat template writes is taken out, and nothing else of what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from support.engines.fake_engine import FakeEngine
from support.engines.tiny_models import tiny_tokenizer

from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.reading.conversation import PreparedConversation, prepare_conversation
from machd.reading.normalised_messages import RemovedText
from machd.reading.prompt_rules import TEMPLATE_DATE
from machd.request.conversation import Conversation
from machd.settings.cache import PromptRuleName


@dataclass
class Front:
    """As much of a model as a conversation's preparation asks for."""

    tokenizer: object
    model = FakeEngine().model
    media = None


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer() -> Iterator[MlxTokenizer]:
    """One whose process renders the templates of all tests, each in its turn."""
    tokenizer = tiny_tokenizer()
    yield tokenizer
    tokenizer.close()


def _prepared(tokenizer: object, *rules: PromptRuleName, **fields: object) -> PreparedConversation:
    conversation = Conversation([{"role": "user", "content": "What day is it?"}], **fields)  # type: ignore[arg-type]
    return prepare_conversation(conversation, Front(tokenizer), {}, rules)  # type: ignore[arg-type]


# How published templates write a date, of each with what is needed to read that.
_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
_DATED = {
    # meta-llama/Llama-3.2-1B-Instruct
    "llama": (
        (
            "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
            '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
            '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
            '{{- "Today Date: " + date_string + "\\n\\n" }}'
        ),
        "Today Date: {}\n\n",
        "%d %b %Y",
    ),
    # openai/gpt-oss-20b
    "gpt-oss": (
        (
            "{%- macro build_system_message() -%}\n"
            '{{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}\n'
            "{%- endmacro -%}\n{{- build_system_message() }}"
        ),
        "Current date: {}\n\n",
        "%Y-%m-%d",
    ),
    # HuggingFaceTB/SmolLM3-3B
    "smollm3": (
        '{%- set today = strftime_now("%d %B %Y") -%}\n{{- "Today Date: " ~ today ~ "\\n" -}}\n',
        "Today Date: {}\n",
        "%d %B %Y",
    ),
    # ibm-granite/granite-3.1-2b-instruct
    "granite": (
        '{{- "Today\'s Date: " + strftime_now(\'%B %d, %Y\') + ".\\n" }}',
        "Today's Date: {}.\n",
        "%B %d, %Y",
    ),
}


@pytest.mark.parametrize("name", _DATED)
def test_a_template_that_writes_a_date_gets_an_empty_one(
    tokenizer: MlxTokenizer, name: str
) -> None:
    """All else is rendered as before, and the length of what is missing is said."""
    head, written, form = _DATED[name]
    tokenizer.wrapped._tokenizer.chat_template = head + _TURNS
    rest = "<user>What day is it?<assistant>"
    today = datetime.now(UTC).astimezone().strftime(form)
    dated = _prepared(tokenizer, "claude_code_date")
    assert tokenizer.decode(dated.prompt) == written.format(today) + rest
    assert dated.removed == ()
    bare = _prepared(tokenizer, TEMPLATE_DATE)
    assert tokenizer.decode(bare.prompt) == written.format("") + rest
    assert bare.removed == (RemovedText(TEMPLATE_DATE, None, None, len(today)),)


@pytest.mark.parametrize(
    "template",
    [
        _TURNS,
        "\n  {% if true %}  a\n{% endif %}\n" + _TURNS,
        "{% set strftime_now = 'its own' %}" + _TURNS + "{{ strftime_now }}",
        "{# strftime_now #}\n\n" + _TURNS,
    ],
)
def test_a_template_that_writes_no_date_is_rendered_as_before(
    tokenizer: MlxTokenizer, template: str
) -> None:
    """To the byte, its white space at the beginning included; and nothing is said."""
    tokenizer.wrapped._tokenizer.chat_template = template
    before, after = _prepared(tokenizer), _prepared(tokenizer, TEMPLATE_DATE)
    assert after.prompt == before.prompt
    assert after.removed == ()


def test_a_date_that_the_client_names_stays(tokenizer: MlxTokenizer) -> None:
    """It is a variable of the template, and no date of today."""
    tokenizer.wrapped._tokenizer.chat_template = _DATED["llama"][0] + _TURNS
    named = {"date_string": "1 Jan 2000"}
    prepared = _prepared(tokenizer, TEMPLATE_DATE, template_variables=named)
    assert tokenizer.decode(prepared.prompt).startswith("Today Date: 1 Jan 2000\n")
    assert prepared.removed == ()
