"""Why the prefix cache had no more of a prompt, in the words of every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon.admin_daemon import AdminDaemon
from support.engines.dialogue import completion, told
from support.engines.fake_engine import FakeEngine

SYSTEM = "You are the assistant of a shop, and today it is the 28th of November."
CHANGED = SYSTEM.replace("28th", "29th")
AT = SYSTEM.index("28th") + 1
USER: dict[str, object] = {"role": "user", "content": "Go on."}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    """One with room for prompts."""
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), {"cache.memory_mb": 100}) as running:
        yield running


def _answer(daemon: AdminDaemon, path: str, **body: object) -> Any:
    answer = daemon.http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _message(daemon: AdminDaemon, **body: object) -> Any:
    said = {"max_tokens": 2, "messages": [USER], "system": SYSTEM}
    return _answer(daemon, "/v1/messages", **{**said, **body})


def _events(daemon: AdminDaemon, **body: object) -> list[Any]:
    said = {"model": "fake", "max_tokens": 2, "messages": [USER], "stream": True}
    text = daemon.http.post("/v1/messages", json={**said, **body}).text
    lines = text.splitlines()
    return [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: ")]


def _place(
    index: int | None, role: str | None, character: int | None, part: str = "message"
) -> Any:
    return {
        "part": part,
        "message_index": index,
        "role": role,
        "character": character,
        "tool_index": None,
    }


def test_messages_tell_the_diagnosis_in_their_usage(daemon: AdminDaemon) -> None:
    """Whole, and at both ends of a stream; ``system`` is no message of the request."""
    assert "cache_diagnosis" not in _message(daemon)["usage"]
    usage = _message(daemon, system=CHANGED, return_cache_diagnosis=True)["usage"]
    diagnosis = usage["cache_diagnosis"]
    assert (diagnosis["reason"], diagnosis["parted_at"]) == ("diverged", _place(None, "system", AT))
    assert diagnosis["parted_at_tokens"] == usage["cache_read_input_tokens"]
    turns = [USER, {"role": "assistant", "content": "So?"}, {**USER, "content": "On!"}]
    _message(daemon, messages=turns)
    turns[1] = {"role": "assistant", "content": "Sir?"}
    events = _events(daemon, system=SYSTEM, messages=turns, return_cache_diagnosis=True)
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage["cache_diagnosis"]["reason"] == "diverged"
        assert usage["cache_diagnosis"]["parted_at"] == _place(1, "assistant", 1)


def test_a_result_of_a_tool_has_the_index_of_its_message(daemon: AdminDaemon) -> None:
    """The user's message that holds it may hold more."""

    def turns(result: str, said: str) -> list[object]:
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
        blocks = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": result},
            {"type": "text", "text": said},
        ]
        return [
            USER,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": blocks},
        ]

    asked = {"tools": [WEATHER], "return_cache_diagnosis": True}
    _message(daemon, messages=turns("sunny", "And?"), **asked)
    for changed, role, character in (
        (turns("summer", "And?"), "tool", 2),
        (turns("sunny", "Any?"), "user", 2),
    ):
        usage = _message(daemon, messages=changed, **asked)["usage"]
        assert usage["cache_diagnosis"]["parted_at"] == _place(2, role, character)


def test_messages_are_compared_with_an_earlier_one(daemon: AdminDaemon) -> None:
    """By the id of its answer, as Anthropic's API does; a mark of what to cache changes nothing."""
    first = _message(daemon, diagnostics={"previous_message_id": None}, tools=[WEATHER])
    assert first["diagnostics"] is None
    asked = {"diagnostics": {"previous_message_id": first["id"]}, "tools": [WEATHER]}
    marked = {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [marked]},
        {"role": "assistant", "content": "So?"},
        {"role": "user", "content": "On!"},
    ]
    assert _message(daemon, messages=turns, **asked)["diagnostics"] is None
    prompt = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    for changes, reason in (
        ({"system": CHANGED}, "system_changed"),
        ({"system": CHANGED, "messages": [{**USER, "content": "Stop."}]}, "system_changed"),
        ({"tools": [{**WEATHER, "name": "whether"}]}, "tools_changed"),
        ({"messages": [{**USER, "content": "Stop."}]}, "messages_changed"),
        ({"thinking": {"type": "adaptive"}}, "unavailable"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "previous_message_not_found"),
    ):
        answer = _message(daemon, **{**asked, **changes})
        changed = answer["diagnostics"]["cache_miss_reason"]
        assert changed["type"] == reason
        if reason.endswith("_changed"):
            missed = prompt - answer["usage"]["cache_read_input_tokens"]
            assert changed["cache_missed_input_tokens"] == max(0, missed)
    opened = _events(daemon, system=CHANGED, **asked)[0]["message"]
    assert opened["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    assert "diagnostics" not in _message(daemon)


def test_a_message_is_compared_with_those_of_its_client_alone(tmp_path: Path) -> None:
    """An id of another client's answer is one that is not found."""
    keys = tmp_path / "api-keys"
    keys.write_text("alice:k-alice-0123456789abcdef\nbob:k-bob-0123456789abcdef\n")
    keys.chmod(0o600)
    flags = {"cache.memory_mb": 100, "auth.api_keys_file": str(keys)}
    said = {"model": "fake", "max_tokens": 2, "messages": [USER]}
    with AdminDaemon(tmp_path, lambda: FakeEngine(told), flags) as daemon:

        def compared(key: str, previous: str | None) -> Any:
            headers = {"X-Api-Key": f"k-{key}-0123456789abcdef"}
            body = {**said, "diagnostics": {"previous_message_id": previous}}
            return daemon.http.post("/v1/messages", json=body, headers=headers).json()

        first = compared("alice", None)
        assert compared("alice", first["id"])["diagnostics"] is None
        refused = compared("bob", first["id"])["diagnostics"]
        assert refused == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_responses_tell_the_diagnosis_in_their_usage(daemon: AdminDaemon) -> None:
    """An item has its index in ``input``; instructions and earlier responses have none."""

    def diagnosis(**body: object) -> Any:
        said = {"max_output_tokens": 16, "return_cache_diagnosis": True, **body}
        usage = _answer(daemon, "/v1/responses", **said)["usage"]
        return usage["input_tokens_details"]["cache_diagnosis"]

    plain = _answer(
        daemon, "/v1/responses", input="Go on.", instructions=SYSTEM, max_output_tokens=16
    )
    assert "cache_diagnosis" not in plain["usage"]["input_tokens_details"]
    changed = diagnosis(input="Go on.", instructions=CHANGED)
    assert (changed["reason"], changed["parted_at"]) == ("diverged", _place(None, "system", AT))
    items = [USER, {"role": "assistant", "content": "So?"}, {"role": "user", "content": "Or 1?"}]
    diagnosis(input=items, instructions=SYSTEM)
    items[2] = {"role": "user", "content": "Or 2?"}
    told = diagnosis(input=items, instructions=SYSTEM)
    assert told["parted_at"] == _place(2, "user", 3)
    following = {"previous_response_id": plain["id"], "instructions": SYSTEM}
    diagnosis(input="And 1?", **following)
    assert diagnosis(input=[{"role": "user", "content": "And 2?"}], **following)["parted_at"] == (
        _place(0, "user", 4)
    )
    items[2] = {"role": "user", "content": "Or 3?"}
    body = {"model": "fake", "input": items, "instructions": SYSTEM, "max_output_tokens": 16}
    streamed = daemon.http.post(
        "/v1/responses", json={**body, "stream": True, "return_cache_diagnosis": True}
    )
    last = json.loads(streamed.text.rsplit("data: ", 1)[1])["response"]
    assert last["usage"]["input_tokens_details"]["cache_diagnosis"]["parted_at"] == (
        _place(2, "user", 3)
    )


def test_ollamas_last_line_tells_the_diagnosis(daemon: AdminDaemon) -> None:
    """Of a chat, of a prompt with a system message, and of a prompt that is continued as it stands."""
    asked = {"return_cache_diagnosis": True, "options": {"num_predict": 2}}

    def last(path: str, **body: object) -> Any:
        said = {"model": "fake", **asked, **body}
        lines = daemon.http.post(path, json=said).text.splitlines()
        assert all("cache_diagnosis" not in json.loads(one) for one in lines[:-1])
        return json.loads(lines[-1])

    system = {"role": "system", "content": SYSTEM}
    last("/api/chat", messages=[system, USER])
    told = last("/api/chat", messages=[{**system, "content": CHANGED}, USER])["cache_diagnosis"]
    assert (told["reason"], told["parted_at"]) == ("diverged", _place(0, "system", AT))
    told = last("/api/generate", system=SYSTEM.replace("28th", "27th"), prompt="Go on.")
    assert told["cache_diagnosis"]["parted_at"] == _place(None, "system", AT)
    last("/api/generate", prompt=SYSTEM, raw=True)
    told = last("/api/generate", prompt=CHANGED, raw=True, stream=False)["cache_diagnosis"]
    assert told["parted_at"] == _place(None, None, AT, "text")
    assert "cache_diagnosis" not in last("/api/chat", messages=[USER], return_cache_diagnosis=False)


def test_a_text_has_a_place_in_its_prompt(daemon: AdminDaemon) -> None:
    """In characters of the first prompt; one of token ids has none but its position."""

    def told(prompt: object, **fields: object) -> Any:
        body = completion(prompt, max_tokens=1, return_cache_diagnosis=True, **fields)
        usage = daemon.http.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cache_diagnosis"]

    text, changed = f"é {SYSTEM}", f"é {CHANGED}"
    told(text)
    parted = told(changed)
    assert parted["parted_at"] == _place(None, None, AT + 2, "text")
    assert parted["parted_at_tokens"] == AT + 3, "é is two tokens"
    assert told([text.replace("28th", "27th"), "another"])["parted_at"]["character"] == AT + 2
    ids = list(text.replace("28th", "26th").encode())
    by_tokens = told(ids)
    assert (by_tokens["parted_at_tokens"], by_tokens["parted_at"]) == (AT + 3, None)
    cut = told(f"{SYSTEM}{text.replace('28th', '25th')}", truncate_prompt_tokens=len(ids))
    assert cut["parted_at"]["character"] == len(SYSTEM) + AT + 2
