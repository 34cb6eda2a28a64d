"""Streams that tell how far a prompt is: ``return_progress``, comments, and ``GET /slots``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.step_gate import StepGate, at_decode, at_prefill

from machd.engine.protocol.step import StepPlan

_CHAT = "/v1/chat/completions"
_LONG = "x" * 20_000
_COMMENT = re.compile(rb"^: prefill (\d+)/(\d+)(?:, \d+ s left)?$", re.MULTILINE)


def _engine(
    before_step: Callable[[StepPlan], None], faults: FakeFaults | None = None
) -> FakeEngine:
    return FakeEngine(told, before_step=before_step, context_tokens=100_000, faults=faults)


def _slowly(plan: StepPlan) -> None:
    time.sleep(0.03 if plan.prefill else 0.0)


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    """One that takes a while for each 512 prompt tokens, batches, and comments on silence."""
    flags = {
        "continuous_batching.enabled": True,
        "streaming.keepalive_s": 0.1,
        "cache.memory_mb": 100,
    }
    with RunningDaemon(lambda: _engine(_slowly), flags) as daemon:
        yield daemon


def _events(daemon: RunningDaemon, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    answer = httpx.post(daemon.url + path, json=body | {"stream": True}, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-decode-mode"]
    return sse_data(answer.content)


def _check(progress: list[dict[str, Any]], total: int, cache: int = 0) -> None:
    """Check that progress runs from what is cached to the whole prompt."""
    assert {one["total"] for one in progress} == {total}
    assert {one["cache"] for one in progress} == {cache}
    processed = [one["processed"] for one in progress]
    assert (processed[0], processed[-1]) == (cache, total)
    assert processed == sorted(set(processed))
    times = [one["time_ms"] for one in progress]
    assert times[0] == 0
    assert times == sorted(times)


def test_a_chat_tells_its_progress_before_its_text(daemon: RunningDaemon) -> None:
    """From nothing to the whole prompt in steps, in chunks that add nothing; and again from what is cached by then."""
    body = chat(f"{_LONG} say yes", return_progress=True, stream_options={"include_usage": True})
    for cache in (0, None):
        events = _events(daemon, _CHAT, body)
        progress = [one for one in events if "prompt_progress" in one]
        usage = events[-1]["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert found == 0 if cache == 0 else found > 19_000
        _check([one["prompt_progress"] for one in progress], usage["prompt_tokens"], found)
        assert all(
            one["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
            for one in progress
        )
        first_text = next(
            at
            for at, one in enumerate(events)
            if one["choices"] and one["choices"][0]["delta"].get("content")
        )
        assert events.index(progress[-1]) < first_text
        if not found:
            assert len(progress) > 4


def test_completions_tell_the_progress_of_all_their_prompts_together(
    daemon: RunningDaemon,
) -> None:
    """Each prompt counts once, however many choices it has."""
    prompts = [f"{letter * 5000} say {letter}" for letter in "ab"]
    body = completion(prompts, n=2, max_tokens=9, return_progress=True)
    events = _events(daemon, "/v1/completions", body)
    progress = [one["prompt_progress"] for one in events if "prompt_progress" in one]
    _check(progress, sum(map(len, prompts)))
    assert len(progress) > 3
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["a", "a", "b", "b"]


def test_a_fill_tells_its_progress_in_llama_cpps_shape() -> None:
    """Between its events, which have no choices."""
    with RunningDaemon(lambda: FakeEngine(told)) as daemon:
        body = {"input_prefix": "say hi", "input_suffix": "there", "return_progress": True}
        answer = httpx.post(f"{daemon.url}/infill", json=body | {"stream": True}, timeout=CEILING_S)
    events = [json.loads(one.removeprefix(b"data: ")) for one in answer.content.split(b"\n\n")[:-1]]
    progress = [one for one in events if "prompt_progress" in one]
    _check([one["prompt_progress"] for one in progress], events[-1]["tokens_evaluated"])
    assert all((one["content"], one["stop"]) == ("", False) for one in progress)
    assert "".join(one["content"] for one in events) == "hi"


def test_progress_is_told_to_streams_that_ask_for_it_alone(daemon: RunningDaemon) -> None:
    """An answer in one piece is as it would be without, and so is a stream that says false."""
    for fields in ({"return_progress": True}, {"stream": True, "return_progress": False}):
        answer = httpx.post(daemon.url + _CHAT, json=chat("say no", **fields), timeout=CEILING_S)
        assert answer.status_code == 200
        assert b"prompt_progress" not in answer.content


def test_openais_client_reads_a_stream_with_progress(daemon: RunningDaemon) -> None:
    """Chunks have the field as an extra, and its helper puts the same message together as without."""
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": f"o{_LONG[:1000]} say two words"}],
        }
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, extra_body={"return_progress": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        with client.chat.completions.stream(
            **asked, extra_body={"return_progress": True}
        ) as helper:
            whole = helper.get_final_completion().choices[0].message
        pieces = list(
            client.completions.create(
                model="fake", prompt="say one", stream=True, extra_body={"return_progress": True}
            )
        )
    progress = [
        (chunk.model_extra or {})["prompt_progress"] for chunk in chunks if chunk.model_extra
    ]
    _check(progress, progress[0]["total"], progress[0]["cache"])
    assert text == "two words"
    assert (whole.role, whole.content) == ("assistant", "two words")
    assert "".join(piece.choices[0].text for piece in pieces) == "one"
    assert any("prompt_progress" in (piece.model_extra or {}) for piece in pieces)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_CHAT, chat(f"c{_LONG} say yes")),
        ("/v1/completions", completion(f"t{_LONG} say yes")),
        ("/v1/responses", {"model": "fake", "input": f"r{_LONG} say yes"}),
        (
            "/v1/messages",
            {
                "model": "fake",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": f"m{_LONG} say yes"}],
            },
        ),
    ],
)
def test_comments_tell_progress_during_prefill(
    daemon: RunningDaemon, path: str, body: dict[str, object]
) -> None:
    """They come by the clock, with tokens of the prompt and the time left, and grow."""
    answer = httpx.post(daemon.url + path, json=body | {"stream": True}, timeout=CEILING_S)
    texts = re.findall(rb'"(?:text|content|delta)":"([^"]*)"', answer.content)
    assert b"yes" in b"".join(texts), (
        "in how many pieces it comes depends on how busy the machine is"
    )
    found = [(int(done), int(total)) for done, total in _COMMENT.findall(answer.content)]
    assert len(found) > 4
    assert found == sorted(found)
    assert all(done <= total for done, total in found)
    assert b" s left\n\n" in answer.content
    assert answer.content.count(b"event: ping\n") >= (len(found) if path == "/v1/messages" else 0)


def test_anthropics_client_reads_a_stream_with_comments(daemon: RunningDaemon) -> None:
    """It skips them, as it does pings."""
    with (
        Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="fake",
            max_tokens=9,
            messages=[{"role": "user", "content": f"a{_LONG} say yes"}],
        ) as stream,
    ):
        assert stream.get_final_text() == "yes"


def test_a_prefill_that_fails_after_its_progress_was_told_ends_with_an_error_event() -> None:
    """Its status is spent once the first step was told."""
    gate = StepGate(at_prefill)
    faults = FakeFaults(row_errors={(0, 0): ValueError("planted")})
    with (
        RunningDaemon(lambda: _engine(gate, faults)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat(f"{_LONG} say a", stream=True, return_progress=True))
        gate.wait_until_held()
        gate.let()
        client.read_until(b'"processed":512,')
        gate.open()
        answer = client.read_answer()
    assert answer.status == 200
    events = sse_data(answer.body)
    assert events[-1]["error"]["code"] == "row_fault"


def test_slots_tell_the_progress_of_their_prompts() -> None:
    """In llama.cpp's words while it is computed, with rate and time left; then the tokens of the answer."""
    gate, text = StepGate(at_decode), f"{_LONG} say abc"

    def pace(plan: StepPlan) -> None:
        _slowly(plan)
        gate(plan)

    flags = {"continuous_batching.enabled": True}
    with (
        RunningDaemon(lambda: _engine(pace), flags) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as http,
        RawClient(daemon.url) as client,
        gate,
    ):
        idle = http.get("/slots").json()[0]
        assert idle["is_processing"] is False
        assert "n_prompt_tokens" not in idle
        client.post_json("/v1/completions", completion(text, stream=True))
        seen: list[dict[str, Any]] = []

        def look() -> bool:
            (slot, *others) = http.get("/slots").json()
            assert not any(one["is_processing"] for one in others)
            if slot["is_processing"]:
                seen.append(slot)
            return bool(seen) and seen[-1]["next_token"][0]["n_decoded"] > 0

        gate.step_until(look, "a token")
        gate.open()
        assert sse_text(client.read_answer().body) == "abc"
    prefill = [one for one in seen if not one["next_token"][0]["n_decoded"]]
    assert len(prefill) > 3
    assert {one["n_prompt_tokens"] for one in seen} == {len(text)}
    counts = [one["n_prompt_tokens_processed"] for one in seen]
    assert counts == sorted(counts)
    assert (counts[-1], seen[-1]["n_prompt_tokens_cache"]) == (len(text), 0)
    rated = [one for one in prefill if "prompt_per_second" in one]
    assert all(one["prompt_per_second"] > 0 and one["prompt_left_ms"] >= 0 for one in rated)
    assert len(rated) > 2
    assert rated[-1]["prompt_left_ms"] < rated[0]["prompt_left_ms"]
    assert "prompt_left_ms" not in seen[-1]


def test_a_stream_whose_tokens_are_held_back_is_kept_alive_by_the_clock() -> None:
    """Tokens come all the time, and nothing is sent of them: a proxy sees silence."""

    def slowly(plan: StepPlan) -> None:
        time.sleep(0.03 if plan.decode else 0.0)

    flags = {"streaming.keepalive_s": 0.1}
    with RunningDaemon(lambda: _engine(slowly), flags) as daemon:
        body = chat(f"say {'a' * 60}", stream=True, stream_interval=1000)
        answer = httpx.post(daemon.url + _CHAT, json=body, timeout=CEILING_S)
    assert sse_text(answer.content) == "a" * 60
    assert answer.content.count(b": keep-alive\n\n") > 3
