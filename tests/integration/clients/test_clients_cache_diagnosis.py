"""The diagnosis of the prefix cache as client libraries of OpenAI and Anthropic read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine

SYSTEM = "You are the assistant of a shop, and today it is the 28th of November."
CHANGED = SYSTEM.replace("28th", "29th")
ASKED = {"return_cache_diagnosis": True}
AT = SYSTEM.index("28th") + 1


@pytest.fixture
def url() -> Iterator[str]:
    """A daemon with room for prompts."""
    with RunningDaemon(lambda: FakeEngine(told), {"cache.memory_mb": 100}) as running:
        yield running.url


def _is_told(diagnosis: Any) -> bool:
    """Return whether a diagnosis, an untyped extension, names the character that was changed."""
    return bool(diagnosis["reason"] == "diverged" and diagnosis["parted_at"]["character"] == AT)


def test_openais_client_reads_the_diagnosis(url: str) -> None:
    """OpenAI's client gets it from chat completions, completions and responses, if ``extra_body`` asks for it."""

    def asked(system: str) -> list[Any]:
        chat = client.chat.completions.create(
            model="fake",
            messages=[{"role": "system", "content": system}],
            max_tokens=2,
            extra_body=ASKED,
        )
        text = client.completions.create(
            model="fake", prompt=system, max_tokens=2, extra_body=ASKED
        )
        answer = client.responses.create(
            model="fake",
            input=[{"role": "user", "content": system}],
            max_output_tokens=16,
            extra_body=ASKED,
        )
        assert chat.usage
        assert text.usage
        assert answer.usage
        return [
            chat.usage.prompt_tokens_details,
            text.usage.prompt_tokens_details,
            answer.usage.input_tokens_details,
        ]

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CEILING_S) as client:
        asked(SYSTEM)
        for details in asked(CHANGED):
            assert _is_told(details.model_extra["cache_diagnosis"])


def test_anthropics_client_reads_usage_and_diagnostics(url: str) -> None:
    """Its types know ``diagnostics``, whole and streamed; the place is in an extension of the usage."""
    asked: Any = {
        "model": "fake",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "Go."}],
    }
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=CEILING_S) as client:
        first = client.messages.create(
            **asked, system=SYSTEM, diagnostics={"previous_message_id": None}
        )
        asked["diagnostics"] = {"previous_message_id": first.id}
        again = client.messages.create(**asked, system=SYSTEM)
        changed = client.messages.create(**asked, system=CHANGED, extra_body=ASKED)
        with client.messages.stream(**asked, system=CHANGED) as stream:
            streamed = stream.get_final_message()
    assert first.diagnostics is again.diagnostics is None
    for message in (changed, streamed):
        assert message.diagnostics is not None
        reason: Any = message.diagnostics.cache_miss_reason
        assert reason.type == "system_changed"
        assert reason.cache_missed_input_tokens >= 0
    assert _is_told((changed.usage.model_extra or {})["cache_diagnosis"])
