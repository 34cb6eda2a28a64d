"""The prefix cache as clients and operators see it: usage, namespaces, stats, metrics, warming."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat, completion, sse_data, told
from support.engines.fake_blocks import FakeDisk
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.protocol.engine import Engine, ModelDescription

ALICE = "k-alice-0123456789abcdef"
BOB = "k-bob-0123456789abcdef"
LONG = "A system prompt of some length, that every one of these requests begins with. " * 4
_CHAT = "/v1/chat/completions"
_WARM = "/admin/cache/warm"
_JSON = {"Content-Type": "application/json"}

each_mode = pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Two keys."""
    path = tmp_path / "api-keys"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    """One without keys."""
    with _running(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def unused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminDaemon]:
    """One without keys that never computes anything."""
    with _running(tmp_path_factory.mktemp("unused")) as running:
        yield running


def _running(
    directory: Path, engine: Callable[[], Engine] = lambda: FakeEngine(told), **flags: object
) -> AdminDaemon:
    """Run a daemon with a memory limit for prompts, since the fake engine's free memory is unknown."""
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return AdminDaemon(directory, engine, {"cache.memory_mb": 100, **named})


def _cached(http: httpx.Client, text: str = LONG, key: str = "", **fields: object) -> int:
    """Cached tokens of a completion of ``text``."""
    headers = {"X-Api-Key": key} if key else {}
    body = completion(text, max_tokens=1, **fields)
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(text)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _stats(daemon: AdminDaemon) -> dict[str, Any]:
    answer = daemon.http.get("/v1/cache/stats")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _warm(daemon: AdminDaemon, *prompts: object, status: int = 200, **fields: object) -> Any:
    answer = daemon.admin.post(_WARM, json={"prompts": list(prompts), **fields}, timeout=CEILING_S)
    assert answer.status_code == status, answer.text
    return answer.json()


@each_mode
def test_what_was_computed_once_is_cached(tmp_path: Path, batched: bool) -> None:  # noqa: FBT001
    """Nothing at first, all but the last token then, and the beginning of what goes on otherwise."""
    with _running(tmp_path, continuous_batching__enabled=batched) as daemon:
        assert _cached(daemon.http) == 0
        assert _cached(daemon.http) == len(LONG) - 1
        assert _cached(daemon.http, LONG + "and on") == len(LONG)
        wait_until(lambda: _stats(daemon)["prefix"]["queries"] == 3, "all are counted")
        prefix = _stats(daemon)["prefix"]
        assert (prefix["hits"], prefix["prefix_hits"], prefix["misses"]) == (1, 1, 1)
        assert prefix["bytes"] > 0
        assert prefix["blocks"] >= len(LONG) // 64
        assert prefix["limit_bytes"] is None or prefix["bytes"] <= prefix["limit_bytes"]
        assert _stats(daemon)["disk"] is None


def _chat_usage(http: httpx.Client, **fields: object) -> dict[str, Any]:
    return dict(http.post(_CHAT, json=chat(LONG, max_tokens=2, **fields)).json()["usage"])


def _diagnosed(http: httpx.Client, system: str, key: str = "", **fields: object) -> httpx.Response:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]
    body = {"model": "fake", "messages": messages, "max_tokens": 2, **fields}
    answer = http.post(_CHAT, json=body, headers={"X-Api-Key": key} if key else {})
    assert answer.status_code == 200, answer.text
    return answer


def test_an_answer_says_why_the_cache_had_no_more(daemon: AdminDaemon) -> None:
    """By reason and position in a header; in the usage, if asked, also by message and character."""
    first = _diagnosed(daemon.http, LONG)
    assert first.headers["X-Cache-Diagnosis"].startswith("first_seen; cached_tokens=0;")
    changed = f"{LONG[:30]}2026-11-28{LONG[40:]}"
    with capture_logs() as logs:
        answer = _diagnosed(daemon.http, changed, return_cache_diagnosis=True)
        wait_until(lambda: any(one["event"] == "request.finished" for one in logs), "it is logged")
    parted = len("system: ") + 30
    said = f"diverged; cached_tokens={parted}; parted_at_tokens={parted}"
    assert answer.headers["X-Cache-Diagnosis"] == said
    place = {"part": "message", "message_index": 0, "role": "system", "character": 30}
    assert answer.json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": parted,
        "cache_diagnosis": {
            "reason": "diverged",
            "parted_at_tokens": parted,
            "parted_at": {**place, "tool_index": None},
        },
    }
    (line,) = [one for one in logs if one["event"] == "request.finished"]
    assert (line["cache_reason"], line["cache_parted_at_tokens"]) == ("diverged", parted)
    url = daemon.daemon.url
    assert scrape(url, "machd_prefix_cache_misses_total", reason="diverged") == 1


def test_a_stream_says_why_the_cache_had_no_more(daemon: AdminDaemon) -> None:
    """Before its first event, and in its usage if asked."""
    _diagnosed(daemon.http, LONG)
    usage_too = {"include_usage": True}
    answer = _diagnosed(
        daemon.http, LONG, return_cache_diagnosis=True, stream=True, stream_options=usage_too
    )
    assert answer.headers["X-Cache-Diagnosis"].startswith("whole; ")
    usage = sse_data(answer.content)[-1]["usage"]
    assert usage["prompt_tokens_details"]["cache_diagnosis"]["reason"] == "whole"


def test_a_client_is_not_told_what_another_one_asked(tmp_path: Path, key_file: Path) -> None:
    """The log says so to the operator."""
    with _running(tmp_path, auth__api_keys_file=str(key_file)) as daemon, capture_logs() as logs:
        _diagnosed(daemon.http, LONG, ALICE)
        answer = _diagnosed(daemon.http, LONG, BOB, return_cache_diagnosis=True)
        wait_until(
            lambda: sum(one["event"] == "request.finished" for one in logs) == 2, "both are logged"
        )
    assert answer.headers["X-Cache-Diagnosis"].startswith("first_seen; ")
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["cache_diagnosis"]["reason"] == "first_seen"
    lines = [one["cache_reason"] for one in logs if one["event"] == "request.finished"]
    assert lines == ["first_seen", "other_namespace"]


def test_every_dialect_tells_what_was_cached(daemon: AdminDaemon) -> None:
    """Whole and streamed, under each one's own names."""
    prompt = _chat_usage(daemon.http)["prompt_tokens"]
    cached = prompt - 1
    assert _chat_usage(daemon.http)["prompt_tokens_details"] == {"cached_tokens": cached}
    body = chat(LONG, max_tokens=2, stream=True, stream_options={"include_usage": True})
    usage = sse_data(daemon.http.post(_CHAT, json=body).content)[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    said = {"model": "fake", "input": LONG, "max_output_tokens": 16, "store": False}
    daemon.http.post("/v1/responses", json=said)
    usage = daemon.http.post("/v1/responses", json=said).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1

    turns = [{"role": "user", "content": LONG}]
    said = {"model": "fake", "messages": turns, "max_tokens": 2}
    daemon.http.post("/v1/messages", json=said)
    usage = daemon.http.post("/v1/messages", json=said).json()["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (1, 0)
    assert usage["cache_read_input_tokens"] == cached
    streamed = daemon.http.post("/v1/messages", json={**said, "stream": True}).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: ")
    ]
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, cached)


def test_what_a_stop_text_ends_has_its_cached_tokens(daemon: AdminDaemon) -> None:
    """Such an answer is whole before the engine has heard of it."""
    body = chat(f"{LONG} say one two", stop=["two"])
    daemon.http.post(_CHAT, json=body)
    usage = daemon.http.post(_CHAT, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@each_mode
def test_several_choices_have_one_prompt(tmp_path: Path, batched: bool) -> None:  # noqa: FBT001
    """Tokens that the first choice computed are not told as cached because the second finds them."""
    with _running(tmp_path, continuous_batching__enabled=batched) as daemon:
        assert _cached(daemon.http, n=3, seed=1) == 0
        assert _cached(daemon.http, n=3, seed=1) == len(LONG) - 1
        twice = completion([LONG, LONG + "more"], max_tokens=1, n=2)
        usage = daemon.http.post("/v1/completions", json=twice).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * len(LONG) - 1


def test_keys_do_not_find_each_other_s_prompts(tmp_path: Path, key_file: Path) -> None:
    """Each has a miss on what the other has computed; and a salt keeps a key's own apart."""
    with _running(tmp_path, auth__api_keys_file=str(key_file)) as daemon:
        assert _cached(daemon.http, key=ALICE) == 0
        assert _cached(daemon.http, key=BOB) == 0
        assert _cached(daemon.http, key=ALICE) == _cached(daemon.http, key=BOB) == len(LONG) - 1
        for salt in ("s", "t"):
            assert _cached(daemon.http, key=ALICE, cache_salt=salt) == 0
        assert _cached(daemon.http, key=ALICE, cache_salt="s") == len(LONG) - 1
        assert _cached(daemon.http, key=BOB, cache_salt="s") == 0


def test_sharing_is_switched_on_while_it_runs(tmp_path: Path, key_file: Path) -> None:
    """From then on keys find each other's prompts, but none that was a key's own, nor a salt's."""
    with _running(tmp_path, auth__api_keys_file=str(key_file)) as daemon:
        assert _cached(daemon.http, key=ALICE) == 0
        change = {"cache": {"namespace": "shared"}}
        assert daemon.admin.patch("/admin/config", json=change).status_code == 200
        assert _cached(daemon.http, key=ALICE) == 0
        assert _cached(daemon.http, key=BOB) == len(LONG) - 1
        assert _cached(daemon.http, key=BOB, cache_salt="s") == 0
        assert _cached(daemon.http, key=ALICE, cache_salt="s") == len(LONG) - 1


def test_a_salt_keeps_decodes_apart(tmp_path: Path) -> None:
    """Two identical requests of one client share a decode, unless one of them has a salt."""
    gate = StepGate()
    with (
        _running(
            tmp_path,
            lambda: FakeEngine(told, before_step=gate),
            continuous_batching__enabled=True,
        ) as daemon,
        gate,
    ):
        answers: list[httpx.Response] = []

        def ask(**fields: object) -> None:
            body = chat("say hello", temperature=0, **fields)
            answers.append(httpx.post(daemon.daemon.url + _CHAT, json=body, timeout=CEILING_S))

        threads = [
            threading.Thread(target=ask, kwargs=fields)
            for fields in ({}, {}, {"cache_salt": "s"}, {"cache_salt": "t"})
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: daemon.status["open_requests"] == 4, "all are open")
        gate.open()
        for thread in threads:
            thread.join(CEILING_S)
        assert [one.status_code for one in answers] == [200] * 4
        assert sum("x-coalesced" in one.headers for one in answers) == 1


def test_a_salt_is_never_logged(tmp_path: Path) -> None:
    """At level debug, in requests and in warming."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with _running(tmp_path) as daemon:
            _cached(daemon.http, cache_salt="xyzzy-salt")
            _warm(daemon, {"prompt": LONG}, cache_salt="xyzzy-salt")
            bad = completion(LONG, cache_salt="xyzzy-salt" * 30)
            assert "xyzzy" not in daemon.http.post("/v1/completions", json=bad).text
    finally:
        logging.getLogger().removeHandler(handler)
    assert "xyzzy-salt" not in stream.getvalue()


def test_stats_are_of_the_last_idle_moment_while_one_runs(tmp_path: Path) -> None:
    """In single-flight mode the prefix cache's numbers stand still with the others."""
    gate = StepGate()
    with (
        _running(tmp_path, lambda: FakeEngine(told, before_step=gate)) as daemon,
        RawClient(daemon.daemon.url) as client,
        gate,
    ):
        before = _stats(daemon)
        body = json.dumps(chat("say hello", stream=True)).encode()
        client.request("POST", _CHAT, body, {"Content-Type": "application/json"})
        wait_until(
            lambda: _stats(daemon)["status"] == "stale_generation_in_flight", "one is running"
        )
        assert _stats(daemon)["prefix"] == before["prefix"]
        assert before["prefix"]["queries"] == 0
        gate.open()
        client.read_answer()
        wait_until(lambda: _stats(daemon)["status"] == "ok", "nothing runs any more")
        assert _stats(daemon)["prefix"]["queries"] == 1


def test_the_status_and_the_metrics_say_what_stats_say(daemon: AdminDaemon) -> None:
    """One set of figures, on both listeners and at a scrape."""
    _cached(daemon.http)
    _cached(daemon.http)
    wait_until(lambda: _stats(daemon)["prefix"]["queries"] == 2, "both are counted")
    stats = _stats(daemon)
    assert daemon.status["cache"]["prefix"] == stats["prefix"]
    url = daemon.daemon.url
    assert scrape(url, "machd_prefix_cache_queries_total") == 2
    assert scrape(url, "machd_prefix_cache_hits_total", kind="full") == 1
    assert scrape(url, "machd_prefix_cache_bytes") == stats["prefix"]["bytes"]
    assert scrape(url, "machd_prefix_cache_blocks", state="held") == stats["prefix"]["blocks"]
    assert scrape(url, "machd_prompt_tokens_cached_total") == len(LONG) - 1
    log = daemon.http.get("/v1/capabilities").json()
    assert log["prefix_cache"]["active"] is True
    assert log["prefix_cache"]["disk"] is False
    assert log["kv_quantization"]["active"] == "none"


class _Blocked(FakeEngine):
    """A model whose caches cannot be kept."""

    @property
    def model(self) -> ModelDescription:
        layers = (LayerCacheFacts("ChunkedKVCache", mergeable=False),)
        return replace(super().model, cache=CacheFacts(layers, 1024, 0))


@pytest.mark.parametrize(
    ("engine", "flags", "why", "reason"),
    [
        (FakeEngine, {"cache__prefix": False}, "cache.prefix is off", "off"),
        (_Blocked, {}, "ChunkedKVCache", "kind_cannot"),
    ],
)
def test_without_a_cache_everything_says_so(
    tmp_path: Path, engine: type[FakeEngine], flags: dict[str, object], why: str, reason: str
) -> None:
    """Answers and metrics give the reason, stats are null, capabilities inactive, clearing clears nothing, warming is a 409."""
    with _running(tmp_path, lambda: engine(told), **flags) as daemon:
        for _ in range(2):
            answer = _diagnosed(daemon.http, LONG, return_cache_diagnosis=True)
            said = f"{reason}; cached_tokens=0; parted_at_tokens=0"
            assert answer.headers["X-Cache-Diagnosis"] == said
            details = answer.json()["usage"]["prompt_tokens_details"]
            nowhere = {"reason": reason, "parted_at_tokens": 0, "parted_at": None}
            assert details["cache_diagnosis"] == nowhere
        url = daemon.daemon.url
        wait_until(
            lambda: scrape(url, "machd_prefix_cache_misses_total", reason=reason) == 2,
            "both are counted",
        )
        changed = {"continuous_batching": {"enabled": True}}
        assert daemon.admin.patch("/admin/config", json=changed).status_code == 200
        answer = _diagnosed(daemon.http, LONG)
        assert answer.headers["X-Cache-Diagnosis"].startswith(f"{reason}; ")
        assert _cached(daemon.http) == _cached(daemon.http) == 0
        assert _stats(daemon)["prefix"] is None
        assert daemon.http.get("/v1/capabilities").json()["prefix_cache"]["active"] is False
        assert daemon.admin.post("/admin/cache/clear").json()["blocks"] == 0
        error = _warm(daemon, {"prompt": LONG}, status=409)["error"]
        assert error["code"] == "conflict"
        assert why in error["message"]
        assert scrape(daemon.daemon.url, "machd_prefix_cache_queries_total") == 0


def test_a_cleared_cache_finds_nothing(daemon: AdminDaemon) -> None:
    """The answer counts the blocks; what is on disk is only cleared when that is said."""
    _cached(daemon.http)
    wait_until(lambda: _stats(daemon)["prefix"]["blocks"] > 0, "it is kept")
    wait_until(lambda: daemon.status["running"] == 0, "nothing runs any more")
    blocks = _stats(daemon)["prefix"]["blocks"]
    cleared = daemon.admin.post("/admin/cache/clear").json()
    assert (cleared["blocks"], cleared["disk_bytes"]) == (blocks, None)
    assert _cached(daemon.http) == 0
    assert daemon.admin.post("/admin/cache/clear?disk=true").status_code == 200
    assert _cached(daemon.http) == 0
    error = daemon.admin.post("/admin/cache/clear?disk=yes").json()["error"]
    assert error["param"] == "disk"


def test_an_engine_that_is_busy_clears_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets 503 after its time limit, and the engine clears later without harm."""
    monkeypatch.setattr("machd.admin.cache._CLEAR_TIMEOUT_S", 0.2)
    gate = StepGate()
    with _running(tmp_path, lambda: FakeEngine(told, before_step=gate)) as daemon, gate:
        with RawClient(daemon.daemon.url) as client:
            body = json.dumps(completion(LONG, max_tokens=1)).encode()
            client.request("POST", "/v1/completions", body, _JSON)
            gate.wait_until_held()
            answer = daemon.admin.post("/admin/cache/clear")
            assert answer.status_code == 503
            assert "as soon as" in answer.json()["error"]["message"]
            gate.open()
            assert client.read_answer().status == 200
        assert daemon.http.get("/health/live").status_code == 200
        assert _cached(daemon.http) in {0, len(LONG) - 1}


def test_warmed_prompts_are_found(daemon: AdminDaemon) -> None:
    """A text by a completion, a conversation by a chat completion with the same tools."""
    tools = [{"type": "function", "function": {"name": "look", "description": LONG}}]
    turns = [{"role": "system", "content": LONG}]
    asked = {"messages": turns, "tools": tools}
    warmed = _warm(daemon, {"prompt": LONG}, asked, {"prompt": LONG})
    text, conversation, again = warmed["prompts"]
    assert (text["prompt_tokens"], text["cached_tokens"], text["error"]) == (len(LONG), 0, None)
    assert again["cached_tokens"] == len(LONG) - 1
    assert text["duration_s"] > 0
    assert (warmed["failed"], warmed["cached_tokens"]) == (0, again["cached_tokens"])
    assert warmed["prompt_tokens"] == 2 * len(LONG) + conversation["prompt_tokens"]
    assert _cached(daemon.http) == len(LONG) - 1
    body = chat("x", max_tokens=1, tools=tools)
    body["messages"] = [*turns, {"role": "user", "content": "hello"}]
    usage = daemon.http.post(_CHAT, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * len(LONG)


def test_a_prompt_that_fails_does_not_stop_the_others(daemon: AdminDaemon) -> None:
    """Its error stands in its place."""
    tool = {"role": "tool", "tool_call_id": "t", "content": "x"}
    warmed = _warm(daemon, {"prompt": "x" * 5000}, {"messages": [tool]}, {"prompt": LONG})
    codes = [one["error"] and one["error"]["code"] for one in warmed["prompts"]]
    assert codes == ["context_length_exceeded", "invalid_request", None]
    assert warmed["failed"] == 2
    assert _cached(daemon.http) == len(LONG) - 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({}, "prompts"),
        ({"prompts": [{"prompt": "a"}, {}]}, "prompts[1]"),
        (
            {"prompts": [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}]},
            "prompts[0]",
        ),
        ({"prompts": [{"prompt": "a"}], "cache_salt": ""}, "cache_salt"),
        ({"prompts": [{"prompt": 1}]}, "prompts[0].prompt"),
        ({"prompts": [{"prompt": "a"}, {"prompt": "b", "client": "x"}]}, "prompts[1].client"),
        ({"prompts": [{"prompt": "a", "cache_salt": "x"}]}, "prompts[0].cache_salt"),
        ({"prompts": [{"prompt": "a"}], "cache_slat": "x"}, "cache_slat"),
    ],
)
def test_what_cannot_be_warmed_is_refused(
    unused: AdminDaemon, body: dict[str, object], param: str
) -> None:
    """All of it, by name, before anything is computed."""
    answer = unused.admin.post(_WARM, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert _stats(unused)["prefix"]["queries"] == 0


def test_nothing_is_warmed_where_nothing_can_be_kept(tmp_path: Path) -> None:
    """With a limit of 0 as without a cache: 409, and capabilities are inactive."""
    with _running(tmp_path, cache__memory_mb=0) as daemon:
        assert "cache.memory_mb" in _warm(daemon, {"prompt": LONG}, status=409)["error"]["message"]
        assert daemon.http.get("/v1/capabilities").json()["prefix_cache"]["active"] is False


def test_a_prompt_that_does_not_fit_says_so(tmp_path: Path) -> None:
    """In its row, and nothing is computed in vain; 976 tokens of 1024 bytes each are 1 MB."""
    with _running(tmp_path, cache__memory_mb=1) as daemon:
        warmed = _warm(daemon, {"prompt": "x" * 978}, {"prompt": "x" * 977})
        (error, fits) = (one["error"] for one in warmed["prompts"])
        assert (error["code"], fits, warmed["failed"]) == ("conflict", None, 1)
        assert "978 tokens take 1.0 MB" in error["message"]
        assert "cache.memory_mb" in error["message"]
        wait_until(lambda: _stats(daemon)["prefix"]["queries"] == 1, "one was computed")
        assert _cached(daemon.http, "x" * 977) == 976


@pytest.mark.parametrize(
    ("engine", "flags", "why"),
    [
        (FakeEngine, {"cache__prefix": False}, "cache.prefix is off"),
        (_Blocked, {}, "fake has no prefix cache"),
    ],
)
def test_a_directory_that_is_not_used_is_not_cleared(
    tmp_path: Path, engine: type[FakeEngine], flags: dict[str, object], why: str
) -> None:
    """Asking for it is a 409 that names the setting; without disk there is nothing to refuse."""
    directory = str(tmp_path / "blocks")
    with _running(tmp_path, lambda: engine(told), cache__disk_dir=directory, **flags) as daemon:
        answer = daemon.admin.post("/admin/cache/clear?disk=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert why in answer.json()["error"]["message"]
        assert "cache.disk_dir" in answer.json()["error"]["message"]
        assert daemon.admin.post("/admin/cache/clear").status_code == 200


def test_what_was_deleted_on_disk_is_counted(tmp_path: Path) -> None:
    """Clear memory alone, then the disk tier, then an empty cache; read the counts after each."""
    disk: FakeDisk = {}
    directory = str(tmp_path / "blocks")
    engine = lambda: FakeEngine(told, disk=disk)  # noqa: E731 - one line
    with capture_logs() as lines, _running(tmp_path, engine, cache__disk_dir=directory) as daemon:
        _cached(daemon.http)
        wait_until(lambda: daemon.status["running"] == 0, "nothing runs any more")
        wait_until(lambda: _stats(daemon)["disk"]["bytes"] > 0, "it is written")
        before = _stats(daemon)
        cleared = daemon.admin.post("/admin/cache/clear").json()
        assert cleared["blocks"] == before["prefix"]["blocks"]
        assert (cleared["deleted_blocks"], cleared["deleted_bytes"]) == (0, 0)
        assert cleared["disk_bytes"] == before["disk"]["bytes"]
        cleared = daemon.admin.post("/admin/cache/clear?disk=true").json()
        assert cleared["blocks"] == cleared["deleted_blocks"] == before["prefix"]["saved_blocks"]
        assert (cleared["deleted_bytes"], cleared["disk_bytes"]) == (before["disk"]["bytes"], 0)
        cleared = daemon.admin.post("/admin/cache/clear?disk=true").json()
        assert (cleared["blocks"], cleared["deleted_blocks"], cleared["disk_bytes"]) == (0, 0, 0)
    logged = [one["deleted_blocks"] for one in lines if one["event"] == "cache.cleared"]
    assert logged == [0, before["prefix"]["saved_blocks"], 0]


def test_prompts_are_longer_than_settings(daemon: AdminDaemon) -> None:
    """A body of megabytes is read; one beyond the bound is a 413 that names it."""
    long = [{"prompt": "x" * 2_000_000}]
    assert _warm(daemon, *long)["failed"] == 1
    answer = daemon.admin.post(_WARM, content=b" " * (8 * 1024 * 1024 + 1), headers=_JSON)
    assert answer.status_code == 413
    assert str(8 * 1024 * 1024) in answer.json()["error"]["message"]
    answer = daemon.admin.post("/admin/mode", content=b" " * 70_000, headers=_JSON)
    assert answer.status_code == 413
    assert "65536" in answer.json()["error"]["message"]


def test_warming_names_whose_prompts_they_are(tmp_path: Path, key_file: Path) -> None:
    """409 without a name, 404 for a wrong one; and only that key with that salt finds them."""
    with _running(
        tmp_path, auth__api_keys_file=str(key_file), limits__max_requests_per_key=1
    ) as daemon:
        error = _warm(daemon, {"prompt": LONG}, status=409)["error"]
        assert (error["param"], "cache.namespace" in error["message"]) == ("client", True)
        assert _warm(daemon, {"prompt": LONG}, status=404, client="carol")["error"]["param"] == (
            "client"
        )
        assert _warm(daemon, {"prompt": LONG}, client="alice")["failed"] == 0
        assert _warm(daemon, {"prompt": LONG}, client="bob", cache_salt="s")["failed"] == 0
        assert _cached(daemon.http, key=ALICE) == len(LONG) - 1
        assert _cached(daemon.http, key=BOB) == 0
        assert _cached(daemon.http, key=BOB, cache_salt="s") == len(LONG) - 1
        change = {"cache": {"namespace": "shared"}}
        assert daemon.admin.patch("/admin/config", json=change).status_code == 200
        assert _warm(daemon, {"prompt": LONG})["failed"] == 0
        assert _cached(daemon.http, key=BOB) == len(LONG) - 1


def test_a_key_that_comes_with_a_reload_can_be_named(tmp_path: Path, key_file: Path) -> None:
    """The names are those in force."""
    with _running(tmp_path, auth__api_keys_file=str(key_file)) as daemon:
        _warm(daemon, {"prompt": LONG}, status=404, client="carol")
        key_file.write_text(key_file.read_text() + "carol:k-carol-0123456789abcdef\n")
        assert daemon.admin.post("/admin/reload").status_code == 200
        assert _warm(daemon, {"prompt": LONG}, client="carol")["failed"] == 0


def test_warming_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    """A client that leaves leaves no generation behind, and nothing is begun after it."""
    gate = StepGate()
    with _running(tmp_path, lambda: FakeEngine(told, before_step=gate)) as daemon, gate:
        with RawClient(daemon.admin_url) as client:
            body = json.dumps({"prompts": [{"prompt": LONG}, {"prompt": "other"}]}).encode()
            headers = {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {daemon.token}",
            }
            client.request("POST", _WARM, body, headers)
            wait_until(lambda: daemon.status["open_requests"] == 1, "the first is open")
            (one,) = daemon.admin.get("/admin/requests").json()["requests"]
            assert (one["endpoint"], one["client"]) == ("cache_warm", "anonymous")
        wait_until(lambda: daemon.status["open_requests"] == 0, "it is let go")
        gate.open()
        wait_until(lambda: daemon.status["running"] == 0, "nothing runs any more")
        assert _stats(daemon)["prefix"]["queries"] <= 1


def test_a_daemon_that_drains_warms_nothing(daemon: AdminDaemon) -> None:
    """503, as for any other work."""
    daemon.admin.post("/admin/drain")
    assert _warm(daemon, {"prompt": LONG}, status=503)["error"]["code"] == "draining"


def test_quantised_caches_are_said() -> None:
    """The format in force stands beside the verdict, in batches as well."""
    flags = {"cache.kv_quantization": "affine8", "continuous_batching.enabled": True}
    with RunningDaemon(FakeEngine, flags) as daemon:
        told_of = httpx.get(f"{daemon.url}/v1/capabilities").json()
    assert told_of["kv_quantization"]["active"] == "affine8"
    assert told_of["kv_quantization"]["verdict"] == "supported"
    assert told_of["decode_mode"]["active"] == "batched"
