"""A panic, which is no Exception, is answered like an error: envelope, log and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle
from support.engines.dialogue import chat, completion, sse_data
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.admin.gate import AdminGate
from machd.clock import SystemClock
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.grammar import grammar_source
from machd.engine.protocol.step import StepPlan
from machd.engine.protocol.tokenizer import Detokenizer
from machd.http.failures import always_answered
from machd.http.stream import GenerationResponse


class _Panic(BaseException):
    """A BaseException like pyo3's for a panic in Rust."""


class _PanickingDetokenizer:
    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._pushes = 0

    def push(self, token_id: int) -> str:
        self._pushes += 1
        if self._pushes > 3:
            raise _Panic
        return self._inner.push(token_id)

    def finish(self) -> str:
        return self._inner.finish()


class _PanickingTokenizer(FakeTokenizer):
    """Panics over some texts, and over tokens where it is told to."""

    panics_over_tokens = False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if "panic" in text:
            raise _Panic
        return super().encode(text, add_special_tokens=add_special_tokens)

    def detokenizer(self, *, keeps: Any = ()) -> Any:
        inner = super().detokenizer(keeps=keeps)
        return _PanickingDetokenizer(inner) if self.panics_over_tokens else inner


class _Engine(FakeEngine):
    def __init__(self, before_step: Callable[[StepPlan], None] = lambda _plan: None) -> None:
        super().__init__(before_step=before_step)
        self._tokenizer = _PanickingTokenizer()


@pytest.fixture(name="daemon")
def _daemon() -> Iterator[RunningDaemon]:
    with RunningDaemon(_Engine) as daemon:
        yield daemon


@pytest.fixture(name="panics_over_tokens")
def _panics_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_PanickingTokenizer, "panics_over_tokens", True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "panic"}),
        ("/v1/completions", completion("panic")),
        ("/v1/chat/completions", chat("panic")),
        ("/v1/messages", {**chat("panic"), "max_tokens": 4}),
    ],
)
def test_a_panic_is_a_500_in_the_envelope_of_the_path(
    daemon: RunningDaemon, path: str, body: dict[str, object]
) -> None:
    """It is logged once with its traceback, and no request stays open."""
    with capture_logs() as logged:
        answer = httpx.post(daemon.url + path, json=body, timeout=CEILING_S)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.json()["error"]["message"] == "the server failed to answer this request"
    (failed,) = [one for one in logged if one["event"] == "request.failed"]
    assert isinstance(failed["exc_info"], _Panic)
    well = httpx.post(
        daemon.url + "/v1/completions", json=completion("hi", max_tokens=2), timeout=CEILING_S
    )
    assert well.status_code == 200
    wait_until(lambda: is_idle(daemon.url), "no request is open")


@pytest.mark.usefixtures("panics_over_tokens")
@pytest.mark.parametrize("is_stream", [True, False])
def test_detokeniser_that_panics_ends_its_row(*, is_stream: bool) -> None:
    """A stream that has begun ends with an error event, a whole answer is a 500; the daemon goes on."""
    body = completion("hi", stream=is_stream, max_tokens=20)
    gate = StepGate(at_decode)
    with RunningDaemon(lambda: _Engine(gate)) as daemon, gate:
        url = f"{daemon.url}/v1/completions"
        if not is_stream:
            gate.open()
        with capture_logs() as logged, httpx.stream("POST", url, json=body) as answer:
            gate.open()  # a stream's head comes with its first token
            answer.read()
        assert [one["event"] for one in logged if one.get("exc_info")] == ["row.failed"]
        assert httpx.get(daemon.url + "/health").status_code == 200
        wait_until(lambda: is_idle(daemon.url), "no request is open")
    if is_stream:
        assert sse_data(answer.content)[-1]["error"]["code"] == "row_fault"
        assert answer.content.endswith(b"data: [DONE]\n\n")
    else:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "row_fault"


async def _raise_before(_scope: Any, _receive: Any, _send: Any) -> None:
    raise _Panic


async def test_the_admin_api_answers_a_panic_in_the_envelope() -> None:
    """Its gate is the outermost layer there."""
    gate: Any = AdminGate(_raise_before, clock=SystemClock(), state={})
    transport = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/admin/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "fault"


def test_a_response_that_has_begun_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client sees a broken answer, not a short one, and the daemon serves on."""

    async def begin(response: GenerationResponse, _scope: Any, _receive: Any, send: Any) -> None:
        response._generation.close()
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise _Panic

    with RunningDaemon() as daemon:
        with monkeypatch.context() as patch:
            patch.setattr(GenerationResponse, "__call__", begin)
            with capture_logs() as logged, pytest.raises(httpx.RemoteProtocolError):
                httpx.post(f"{daemon.url}/v1/chat/completions", json=chat(max_tokens=2))
        assert [one["event"] for one in logged if one["log_level"] == "error"] == ["request.failed"]
        answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=chat(max_tokens=2))
        assert answer.status_code == 200


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_what_ends_the_process_passes(ending: type[BaseException]) -> None:
    """It is no failure of a request."""

    async def end(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ending

    nothing: Any = None
    with capture_logs() as logged, pytest.raises(ending):
        await always_answered(end)(nothing, nothing, nothing)
    assert logged == []


def test_a_panic_of_the_grammar_compiler_is_the_schemas_fault(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a 400, and plain requests are served."""

    def panic(*_: object, **__: object) -> None:
        raise _Panic

    matcher = SimpleNamespace(grammar_from_json_schema=panic)
    monkeypatch.setattr(grammar_source, "LLMatcher", matcher)
    body = chat("hi", response_format={"type": "json_object"})
    answer = httpx.post(daemon.url + "/v1/chat/completions", json=body, timeout=CEILING_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_grammar"
    assert httpx.post(daemon.url + "/tokenize", json={"prompt": "hi"}).status_code == 200


def test_a_text_that_takes_too_long_to_tokenise_is_a_503(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is left to its work, and the client may come again."""
    gate = threading.Event()

    def wait(*_: object, **__: object) -> list[int]:
        gate.wait(CEILING_S)
        return []

    with monkeypatch.context() as patched:
        patched.setattr("machd.generations.open_generations._PREPARATION_LIMIT_S", 0.5)
        patched.setattr(_PanickingTokenizer, "encode", wait)
        answer = httpx.post(daemon.url + "/tokenize", json={"prompt": "hi"}, timeout=CEILING_S)
    gate.set()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.headers["retry-after"]
    again = httpx.post(daemon.url + "/tokenize", json={"prompt": "hi"}, timeout=CEILING_S)
    assert again.status_code == 200
