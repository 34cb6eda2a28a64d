"""Rules of ``cache.normalise`` as clients and operators see them: what is cached, and what is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import sse_data, told
from support.engines.fake_engine import FakeEngine

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
SYSTEM = "You are a Claude agent, built on Anthropic's Claude Agent SDK. " * 8
LEFT = "<total_tokens>{} tokens left</total_tokens>"
RULES = ["claude_code_billing", "claude_code_countdown"]
_CHAT = "/v1/chat/completions"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    """One without rules."""
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), {"cache.memory_mb": 100}) as running:
        yield running


def _set_rules(daemon: AdminDaemon, rules: list[str], status: int = 200) -> httpx.Response:
    answer = daemon.admin.patch("/admin/config", json={"cache": {"normalise": rules}})
    assert answer.status_code == status, answer.text
    return answer


def _session(checksum: str, left: int) -> dict[str, object]:
    """The body of Claude Code's second request, whatever the dialect."""
    messages = [
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": LEFT.format(left)},
        {"role": "user", "content": "And on."},
    ]
    return {"model": "fake", "max_tokens": 2, "messages": messages, "system": _blocks(checksum)}


def _blocks(checksum: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in (BILLING.format(checksum), SYSTEM)]


def _messages(http: httpx.Client, checksum: str, left: int = 100) -> tuple[int, int, str]:
    """Return the tokens that were cached, and those of the prompt, and what the header says."""
    answer = http.post("/v1/messages", json=_session(checksum, left))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["cache_read_input_tokens"]
    return cached, cached + usage["input_tokens"], answer.headers["X-Cache-Diagnosis"]


def _chat(checksum: str, **fields: object) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"{BILLING.format(checksum)}\n{SYSTEM}"},
        {"role": "user", "content": "Go on."},
    ]
    return {"model": "fake", "max_tokens": 2, "messages": messages, **fields}


def test_a_billing_line_that_changes_costs_the_whole_prompt_without_its_rule(
    daemon: AdminDaemon,
) -> None:
    """With the rule, which takes effect at once, all is found but the last token; and the answer names it."""
    _messages(daemon.http, "36ee5")
    cached, prompt, said = _messages(daemon.http, "0aaa9")
    assert cached < len(BILLING) + len("system: ")
    assert said.startswith("diverged; ")
    assert "normalised" not in said
    assert _set_rules(daemon, RULES[:1]).json()["changed"] == ["cache.normalise"]
    _messages(daemon.http, "36ee5")
    cached, shorter, said = _messages(daemon.http, "0aaa9")
    assert cached == shorter - 1
    assert shorter == prompt - len(BILLING.format("36ee5\n"))
    assert said.startswith("whole; ")
    assert said.endswith("; normalised=claude_code_billing")
    _set_rules(daemon, RULES)
    assert _messages(daemon.http, "1", left=99)[2].endswith(
        "; normalised=claude_code_billing+claude_code_countdown"
    )
    cached, shorter, _ = _messages(daemon.http, "2", left=12)
    assert cached == shorter - 1


def test_an_answer_says_what_was_taken_out_of_its_prompt(daemon: AdminDaemon) -> None:
    """In its usage by rule, message and length, if asked; operators have the names, and no text."""
    _set_rules(daemon, RULES)
    with capture_logs() as logs:
        answer = daemon.http.post(_CHAT, json=_chat("36ee5", return_cache_diagnosis=True))
        wait_until(lambda: any(one["event"] == "request.finished" for one in logs), "it is logged")
    line = BILLING.format("36ee5") + "\n"
    removed = {"rule": RULES[0], "message_index": 0, "role": "system", "characters": len(line)}
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["cache_diagnosis"]["normalised"] == [removed]
    (logged,) = [one for one in logs if one["event"] == "request.finished"]
    assert logged["normalised"] == RULES[:1]
    assert "36ee5" not in str(logs)
    (finished,) = daemon.admin.get("/admin/requests/finished").json()["requests"]
    assert finished["normalised"] == RULES[:1]
    plain = daemon.http.post(_CHAT, json=_chat("36ee5"))
    assert "cache_diagnosis" not in plain.json()["usage"]["prompt_tokens_details"]
    assert plain.headers["X-Cache-Diagnosis"].endswith("; normalised=claude_code_billing")


def test_nothing_is_said_where_nothing_was_taken_out(daemon: AdminDaemon) -> None:
    """A user may quote the line; his words stay, and so does the answer's form."""
    _set_rules(daemon, RULES)
    quoted = [{"role": "user", "content": f"{BILLING.format('36ee5')}\nWhat is this?"}]
    body = {"model": "fake", "messages": quoted, "max_tokens": 2, "return_cache_diagnosis": True}
    answer = daemon.http.post(_CHAT, json=body)
    assert "normalised" not in answer.headers["X-Cache-Diagnosis"]
    assert "normalised" not in answer.json()["usage"]["prompt_tokens_details"]["cache_diagnosis"]
    written = len(f"user: {quoted[0]['content']}\nassistant: ")
    assert answer.json()["usage"]["prompt_tokens"] == written


def test_a_place_is_one_in_the_request_that_was_sent(daemon: AdminDaemon) -> None:
    """Its character counts the line that the model did not read."""
    _set_rules(daemon, RULES)
    daemon.http.post(_CHAT, json=_chat("36ee5"))
    body = _chat("0aaa9", return_cache_diagnosis=True)
    body["messages"][0]["content"] = body["messages"][0]["content"][:-20] + "and so on"
    answer = daemon.http.post(_CHAT, json=body)
    place = answer.json()["usage"]["prompt_tokens_details"]["cache_diagnosis"]["parted_at"]
    common = len(body["messages"][0]["content"]) - len("and so on")
    assert (place["message_index"], place["character"]) == (0, common)


def test_a_stream_and_an_answer_without_a_prefix_cache_say_it_too(tmp_path: Path) -> None:
    """The rules are the prompt's, whatever is kept of it."""
    flags = {"cache.prefix": False, "cache.normalise": (RULES[0],)}
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), flags) as running:
        for stream in (False, True):
            answer = running.http.post(_CHAT, json=_chat("36ee5", stream=stream))
            assert answer.headers["X-Cache-Diagnosis"].startswith("off; ")
            assert answer.headers["X-Cache-Diagnosis"].endswith("; normalised=claude_code_billing")
        bare = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        said = running.http.post(_CHAT, json=bare).headers["X-Cache-Diagnosis"]
        assert "normalised" not in said


def test_a_streams_usage_says_it_if_asked(daemon: AdminDaemon) -> None:
    """As an unstreamed answer's."""
    _set_rules(daemon, RULES)
    usage_too = {"include_usage": True}
    body = _chat("1", stream=True, stream_options=usage_too, return_cache_diagnosis=True)
    usage = sse_data(daemon.http.post(_CHAT, json=body).content)[-1]["usage"]
    (removed,) = usage["prompt_tokens_details"]["cache_diagnosis"]["normalised"]
    assert removed["rule"] == RULES[0]


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_tokenize_shows_the_prompt_that_the_model_reads(
    daemon: AdminDaemon, fields: dict[str, object]
) -> None:
    """In every way in which it renders conversations."""
    body = {"model": "fake", "messages": _chat("36ee5")["messages"], **fields}
    before = daemon.http.post("/tokenize", json=body).json()
    _set_rules(daemon, RULES)
    after = daemon.http.post("/tokenize", json=body).json()
    assert after["count"] == before["count"] - len(BILLING.format("36ee5\n"))
    text = bytes(after["tokens"]).decode()
    assert text.startswith(f"system: {SYSTEM}")


def test_every_dialect_says_it(daemon: AdminDaemon) -> None:
    """The header is the same in all of them."""
    _set_rules(daemon, RULES)
    chat = _chat("36ee5")
    text = chat["messages"][0]["content"]
    bodies = {
        _CHAT: chat,
        "/v1/messages": _session("36ee5", 7),
        "/v1/responses": {"model": "fake", "instructions": text, "input": "Go on."},
        "/api/chat": {"model": "fake", "messages": chat["messages"], "stream": False},
    }
    for path, body in bodies.items():
        answer = daemon.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "; normalised=claude_code_billing" in answer.headers["X-Cache-Diagnosis"], path


def test_a_rule_that_is_not_known_is_refused_by_name(daemon: AdminDaemon) -> None:
    """The message lists those that are."""
    error = _set_rules(daemon, ["claude_code_biling"], status=400).json()["error"]
    assert (
        'cache.normalise: "claude_code_biling" is none of claude_code_billing, ' in error["message"]
    )


def test_a_model_has_rules_of_its_own(tmp_path: Path) -> None:
    """Its table says so, and the other model's prompts stay as they were sent."""
    config = tmp_path / "machd.toml"
    config.write_text(
        '[models]\nmemory_gb = 0.1\n[models.plain]\npath = "fake?"\n[models.ruled]\npath = "fake?"\n'
        'cache.normalise = ["claude_code_billing"]\n'
    )
    daemon = SupervisedDaemon(config_path=config)
    body = {"messages": _chat("36ee5")["messages"], "max_tokens": 2}
    with capture_logs(), daemon:
        answers = [
            httpx.post(daemon.url + _CHAT, json={**body, "model": one}, timeout=CEILING_S)
            for one in ("plain", "ruled")
        ]
    plain, ruled = (one.json()["usage"]["prompt_tokens"] for one in answers)
    assert plain - ruled == len(BILLING.format("36ee5\n"))
    assert ["normalised" in one.headers["X-Cache-Diagnosis"] for one in answers] == [False, True]
