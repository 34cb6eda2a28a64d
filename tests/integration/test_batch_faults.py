"""Faults inside a batch, over HTTP: a row's fault ends one request, an engine's fault only a request that causes it twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawAnswer, RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.arrivals import Arrivals
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, read_page, scrape
from support.engines.dialogue import sse_data, sse_text
from support.engines.gated_engine import GatedEngine
from support.engines.step_gate import StepGate
from support.every_run import sampled

from machd.dialects.completions.handler import _CompletionDialect
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import StepPlan
from machd.engine.protocol.tokenizer import Detokenizer
from machd.engine.sampling import gumbel_noise
from machd.engine.sampling.sampler import Sampler, Selection
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step.decoder import Decoder
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import EngineFaultError
from machd.http.stream import GenerationResponse
from machd.reading.text import CompletionText
from machd.request.generation import SamplingParams

_PATH = "/v1/completions"
_SLOTS = 4
_TOKENS = 16
_BATCHING: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": _SLOTS,
    "continuous_batching.window_ms": 0,
    "continuous_batching.prefill_chunk_tokens": 64,
}

_BAD_SEED = 666
_MARK = "é"  # no token of the tiny model says it, so nothing is held back on its account
_BAD: dict[str, object] = {"temperature": 1, "seed": _BAD_SEED, "stop": [_MARK], "logprobs": 1}


def _body(prompt: str, **fields: object) -> dict[str, object]:
    usual = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    # One character a token: the end of the text, which has none, is never said.
    return {"model": "tiny-llama", "prompt": prompt, "logit_bias": {"0": -100}, **usual, **fields}


_REQUESTS: dict[str, dict[str, object]] = {
    "first": _body("whoever comes first"),
    "second": _body("the next", temperature=1, seed=3),
    "whole": _body("not streamed", temperature=0.8, seed=5, top_k=20, stream=False),
    "late": _body("who comes when others run", frequency_penalty=0.6),
    "waits": _body("who finds no slot", temperature=1.2, seed=7, top_p=0.9),
    "waits too": _body("nor does this one"),
    "bad": _body("whose row will fail", **_BAD),
    "bad whole": _body("whose row will fail", **_BAD, stream=False),
}
_EARLY = ("first", "second", "whole")
_RUNNING = (*_EARLY, "late")
_WAITING = ("waits", "waits too")


class _PlantedError(Exception):
    """A fault of a test's own."""


@pytest.fixture(autouse=True)
def _no_rendered_logs() -> Iterator[None]:
    """Tracebacks of the planted faults are kept, not drawn, which would take longer than the fault."""
    with capture_logs():
        yield


def _engine(gate: StepGate | None, *, looks_ahead: bool = False) -> Callable[[], Engine]:
    return lambda: GatedEngine(gate, looks_ahead=looks_ahead)


@pytest.fixture(name="alone", scope="module")
def _alone() -> dict[str, str]:
    """Return what each request is answered by a daemon that decodes one at a time."""
    with RunningDaemon(_engine(None)) as daemon:
        return {
            name: httpx.post(f"{daemon.url}{_PATH}", json={**body, "stream": False}).json()[
                "choices"
            ][0]["text"]
            for name, body in _REQUESTS.items()
        }


@pytest.fixture(name="arrivals")
def _arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    return Arrivals(monkeypatch)


class _Crowd:
    """Clients that come one after the other, while the engine stands at the gate."""

    def __init__(self, url: str, gate: StepGate, arrivals: Arrivals) -> None:
        self._url = url
        self._gate = gate
        self._arrivals = arrivals
        self._clients: list[RawClient] = []
        self._by_name: dict[str, RawClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()

    def __getitem__(self, name: str) -> RawClient:
        return self._by_name[name]

    def post(self, *names: str, **fields: object) -> None:
        """Ask; each one has arrived before the next one asks."""
        for name in names:
            client = self._by_name[name] = RawClient(self._url)
            self._clients.append(client)
            body = {**_REQUESTS[name], **fields}
            self._arrivals.wait_for_one_more(
                lambda client=client, body=body: client.post_json(_PATH, body)  # type: ignore[misc]
            )

    def step(self) -> StepPlan:
        """Let the held step go; returns the next one, which is held."""
        self._gate.let()
        return self._gate.wait_until_held()

    def gather(self, *early: str, late: str = "late", waiting: tuple[str, ...] = _WAITING) -> None:
        """Until the step is held in which the late one's prompt is computed beside the others."""
        first, *others = early
        self.post(first)
        self._gate.wait_until_held()
        self.post(*others)
        self.step()
        self.step()
        self.post(late, *waiting)
        self.step()

    def answer(self, name: str) -> RawAnswer:
        """One client's whole answer."""
        return self._by_name[name].read_answer()

    def text(self, name: str) -> str:
        """Return what one client was told in full."""
        return _text(self.answer(name))


def _text(answer: RawAnswer) -> str:
    assert answer.status == 200, answer
    if answer.headers["content-type"] == "application/json":
        return str(answer.json()["choices"][0]["text"])
    assert all("error" not in event for event in sse_data(answer.body)), answer
    return sse_text(answer.body)


def _check_error_event(answer: RawAnswer, code: str, alone: str) -> str:
    """The stream ends with the error, after a beginning of what the request says alone."""
    assert answer.status == 200, answer
    assert [event["error"]["code"] for event in sse_data(answer.body) if "error" in event] == [code]
    assert "error" in sse_data(answer.body)[-1]
    text = sse_text(answer.body)
    assert text
    assert alone.startswith(text)
    assert len(text) < len(alone)
    return text


def _check_error_status(answer: RawAnswer, status: int, code: str) -> None:
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)


def _check_nothing_is_left(url: str, **faults: int) -> None:
    """Slots, promises and bytes are given back, the faults are counted, and the engine lives."""
    wait_until(lambda: is_idle(url), "nothing runs and nothing waits")
    wait_until(lambda: scrape(url, "machd_kv_cache_bytes", state="used") == 0, "no KV is used")
    page = read_page(url)
    assert page.value("machd_kv_cache_bytes", state="reserved") == 0
    assert page.value("machd_slots", state="occupied") == 0
    assert page.value("machd_slots", state="free") == _SLOTS
    assert page.value("machd_state", state="ready") == 1
    assert page.value("machd_invariant_violations_total") == 0
    for scope in ("row", "engine"):
        assert page.value("machd_faults_total", scope=scope) == faults.get(scope, 0)


def _check_all_are_served(crowd: _Crowd, names: Mapping[str, str]) -> None:
    """The gate being open: all at once, each is told what it is told alone."""
    crowd.post(*names)
    for name, text in names.items():
        assert crowd.text(name) == text, name


# --- the engine -------------------------------------------------------------------------------


class _Trap:
    """Makes the next calls of one method fail, once it is set."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self._left = 0
        self.has_sprung = False
        right = getattr(owner, method)

        def trapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._left:
                self._left -= 1
                self.has_sprung = True
                raise _PlantedError
            return right(this, *args, **kwargs)

        patch.setattr(owner, method, trapped)

    def set(self, count: int = 1) -> None:
        """Make the next calls fail, so many."""
        self._left = count
        self.has_sprung = False


class _Moment(Enum):
    """When an engine fails."""

    JOINS = "joins"
    """The late one's prompt is computed and its row joins."""

    DECODES = "decodes"
    """All four rows decode."""

    LEAVES = "leaves"
    """A row was left by its client, and one that waited takes its slot."""


@dataclass(frozen=True)
class _Fault:
    owner: type
    method: str
    moment: _Moment

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.method} when a row {self.moment.value}"


_FAULTS = [
    _Fault(MlxEngine, "_forward", _Moment.JOINS),
    _Fault(BatchLaneKv, "join", _Moment.JOINS),
    _Fault(SlabKv, "place", _Moment.JOINS),
    _Fault(MlxEngine, "_forward", _Moment.DECODES),
    _Fault(Decoder, "settle", _Moment.DECODES),
    _Fault(BatchLaneKv, "select", _Moment.LEAVES),
    _Fault(SlabKv, "select", _Moment.LEAVES),
]
_AHEAD_TOO = [one for one in _FAULTS[1:] if one.owner is not SlabKv]
_CASES = [(one, False) for one in _FAULTS] + [(one, True) for one in _AHEAD_TOO]
_EVERY_RUN = [
    (_FAULTS[2], False),
    (_FAULTS[3], True),
    (_FAULTS[4], False),
    (_FAULTS[5], True),
    (_FAULTS[6], False),
]
"""Each moment in step and, but for the join, looking ahead; of the depths of a join the one that leaves most half done."""


def _provoke(crowd: _Crowd, gate: StepGate, trap: _Trap, moment: _Moment, url: str) -> None:
    """From the step in which the late one joins, go on to the moment and let it happen."""
    for name in ("first", "second"):
        crowd[name].read_until(b"data: ")
    if moment is not _Moment.JOINS:
        crowd.step()
        crowd.step()
        crowd["late"].read_until(b"data: ")
    if moment is _Moment.LEAVES:
        crowd["second"].reset()
        wait_until(
            lambda: scrape(url, "machd_aborts_total", reason="client_disconnected") == 1,
            "the departure is noticed",
        )
    trap.set()
    gate.step_until(lambda: trap.has_sprung, "the planted fault")


@pytest.mark.parametrize(("fault", "looks_ahead"), sampled(_CASES, _EVERY_RUN), ids=str)
def test_an_engine_fault_costs_no_answer(
    fault: _Fault,
    looks_ahead: bool,  # noqa: FBT001
    alone: dict[str, str],
    arrivals: Arrivals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running requests are resumed and waiting ones served: each answers as it does alone, without a gap."""
    trap = _Trap(monkeypatch, fault.owner, fault.method)
    gate = StepGate()
    is_left = fault.moment is _Moment.LEAVES
    with (
        RunningDaemon(_engine(gate, looks_ahead=looks_ahead), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather(*_EARLY)
        _provoke(crowd, gate, trap, fault.moment, daemon.url)
        gate.open()
        for name in {*_RUNNING, *_WAITING} - ({"second"} if is_left else set()):
            assert crowd.text(name) == alone[name], name
        _check_all_are_served(crowd, {name: alone[name] for name in (*_RUNNING, *_WAITING)})
        _check_nothing_is_left(daemon.url, engine=1)
        assert scrape(daemon.url, "machd_requests_total", finish_reason="error") == 0


def test_a_request_that_makes_the_engine_fail_twice_is_ended_alone(
    alone: dict[str, str], arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever its prompt is computed the step raises: it is to blame, and its neighbours are whole."""
    run = MlxEngine.run

    def poisoned(this: MlxEngine, plan: StepPlan) -> Any:
        if any(chunk.sampling.seed == _BAD_SEED for chunk in plan.prefill):
            raise _PlantedError
        return run(this, plan)

    monkeypatch.setattr(MlxEngine, "run", poisoned)
    gate = StepGate()
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather(*_EARLY, late="bad")
        gate.open()
        _check_error_status(crowd.answer("bad"), 503, "engine_fault")
        for name in (*_EARLY, *_WAITING):
            assert crowd.text(name) == alone[name], name
        _check_nothing_is_left(daemon.url, engine=2)
        assert scrape(daemon.url, "machd_requests_total", finish_reason="error") == 1


def test_six_engine_faults_in_a_row_end_the_daemon(
    arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After six faults without a whole answer between, waiting requests get the last one, and the daemon ends."""
    trap = _Trap(monkeypatch, Decoder, "settle")
    gate = StepGate()
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather(*_EARLY)
        trap.set(6)
        gate.open()
        for name in (*_RUNNING, *_WAITING):
            answer = crowd.answer(name)
            if answer.status == 200:
                assert sse_data(answer.body)[-1]["error"]["code"] == "engine_fault"
            else:
                _check_error_status(answer, 503, "engine_fault")

        assert daemon.join(CEILING_S)
        assert isinstance(daemon.error, EngineFaultError)
        assert daemon.error.exit_code == 70
        with pytest.raises(httpx.ConnectError):
            httpx.get(daemon.url)


def test_a_whole_answer_between_engine_faults_starts_the_count_afresh(
    alone: dict[str, str], arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a batch fails, the daemon goes on when all are served after it."""
    trap = _Trap(monkeypatch, Decoder, "settle")
    gate = StepGate(lambda _plan: False)
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
    ):
        for _ in range(7):
            trap.set()
            _check_all_are_served(crowd, {name: alone[name] for name in _RUNNING})
            assert trap.has_sprung
        _check_nothing_is_left(daemon.url, engine=7)


# --- rows -------------------------------------------------------------------------------------

_Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class _RowFault:
    """Faults that fail the bad request alone.

    Attributes:
        said: Tokens that its stream has said by then, at the most.
        is_exact: Whether it has said just so many, however they came.
    """

    name: str
    plant: _Plant
    said: int
    is_exact: bool = True

    def __str__(self) -> str:
        return self.name


def _draw_fails_at(position: int) -> _Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = gumbel_noise.draw_key

        def draw(seed: int, at: int) -> tuple[int, int]:
            if seed == _BAD_SEED and at == position:
                raise _PlantedError
            return right(seed, at)

        patch.setattr(gumbel_noise, "draw_key", draw)

    return plant


def _logprobs_fail_at(position: int) -> _Plant:
    """After the tokens of all rows are chosen."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = Sampler.sample

        def sample(this: Sampler, states: Sequence[SamplingState], *args: Any) -> Selection:
            selection = right(this, states, *args)
            for state in states:
                if state.params.seed == _BAD_SEED and state.position == position:
                    raise _PlantedError
            return selection

        patch.setattr(Sampler, "sample", sample)

    return plant


def _state_fails(patch: pytest.MonkeyPatch) -> None:
    right = SamplingState.for_prompt.__func__  # type: ignore[attr-defined]

    def for_prompt(cls: type[SamplingState], params: SamplingParams, *rest: Any) -> SamplingState:
        if params.seed == _BAD_SEED:
            raise _PlantedError
        state: SamplingState = right(cls, params, *rest)
        return state

    patch.setattr(SamplingState, "for_prompt", classmethod(for_prompt))


class _BadDetokenizer:
    """Works until a push, or until the end."""

    def __init__(self, right: Detokenizer, *, fails_at: int) -> None:
        self._right = right
        self._left = fails_at

    def push(self, token_id: int) -> str:
        if not self._left:
            raise _PlantedError
        self._left -= 1
        return self._right.push(token_id)

    def finish(self) -> str:
        raise _PlantedError


def _detokeniser_fails_at(push: int) -> _Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = CompletionText.__init__

        def init(
            this: CompletionText,
            detokenizer: Detokenizer,
            stop: tuple[str, ...],
            **options: Any,
        ) -> None:
            if _MARK in stop:
                detokenizer = _BadDetokenizer(detokenizer, fails_at=push)
            right(this, detokenizer, stop, **options)

        patch.setattr(CompletionText, "__init__", init)

    return plant


def _event_fails_after(count: int) -> _Plant:
    """The bad request's news cannot be written as JSON."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        push, finish = _CompletionDialect.push, _CompletionDialect.finish
        left = count

        def bad_push(this: _CompletionDialect, delta: Any) -> bytes:
            nonlocal left
            if this._options.seed == _BAD_SEED:
                left -= 1
                if left < 0:
                    raise _PlantedError
            return push(this, delta)

        def bad_finish(this: _CompletionDialect, *args: Any) -> bytes:
            if this._options.seed == _BAD_SEED:
                raise _PlantedError
            return finish(this, *args)

        patch.setattr(_CompletionDialect, "push", bad_push)
        patch.setattr(_CompletionDialect, "finish", bad_finish)

    return plant


_ROW_FAULTS = [
    _RowFault("the first draw", _draw_fails_at(0), 0),
    _RowFault("a later draw", _draw_fails_at(5), 5),
    _RowFault("the last draw", _draw_fails_at(_TOKENS - 1), _TOKENS - 1),
    _RowFault("a log-probability", _logprobs_fail_at(5), 5),
    _RowFault("the sampling state", _state_fails, 0),
    _RowFault("the first push", _detokeniser_fails_at(0), 0),
    # What came together with the token that cannot be put into words is not said either.
    _RowFault("a later push", _detokeniser_fails_at(5), 5, is_exact=False),
    _RowFault("the end of the text", _detokeniser_fails_at(_TOKENS), _TOKENS - 1, is_exact=False),
    _RowFault("an event", _event_fails_after(1), _TOKENS - 1, is_exact=False),
]


def _check_row_fault(answer: RawAnswer, fault: _RowFault, alone: str) -> None:
    """A stream that had begun ends with an event; whatever had not is a 500."""
    if answer.status == 200:
        said = len(_check_error_event(answer, "row_fault", alone))
        assert said == fault.said if fault.is_exact else said <= fault.said
    else:
        _check_error_status(answer, 500, "row_fault")


_ROW_CASES = [
    *((fault, role) for fault in _ROW_FAULTS for role in ("whole", "late")),
    *((fault, "first") for fault in _ROW_FAULTS if fault.said == 5),
]
_ROW_EVERY_RUN = {
    "the first draw": (),
    "a later draw": ("whole",),
    "the last draw": (),
    "a log-probability": ("first",),
    "the sampling state": ("late",),
    "the first push": (),
    "a later push": ("late",),
    "the end of the text": ("whole",),
    "an event": ("late",),
}
"""Every part that can fail once, before, amid and at the end of an answer, and each role; a part's other moments are long."""


@pytest.mark.parametrize(
    ("fault", "role"),
    sampled(_ROW_CASES, [one for one in _ROW_CASES if one[1] in _ROW_EVERY_RUN[one[0].name]]),
    ids=str,
)
def test_a_row_fault_ends_its_request_alone(
    fault: _RowFault,
    role: str,
    alone: dict[str, str],
    arrivals: Arrivals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failing request gets an error; the others answer as they do alone, and no slot is lost."""
    fault.plant(monkeypatch)
    gate = StepGate()
    bad = "bad whole" if role == "whole" else "bad"
    *early, late = (bad if name == role else name for name in _RUNNING)
    is_begun = bad == "bad" and fault.said > 0
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather(*early, late=late)
        crowd.step()
        if is_begun:
            if role == "late":
                crowd.step()  # its prompt was part of the others' step; the next one is its first
            crowd[bad].read_until(b"data: ")
        gate.open()

        answer = crowd.answer(bad)
        assert (answer.status == 200) == is_begun
        _check_row_fault(answer, fault, alone[bad])
        for name in {*_RUNNING, *_WAITING} - {role}:
            assert crowd.text(name) == alone[name], name
        _check_nothing_is_left(daemon.url, row=1)


def test_a_choice_that_fails_ends_its_request_with_all_its_choices(
    alone: dict[str, str], arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is told once, and the slot of its sound choice is given back too."""
    _draw_fails_at(5)(monkeypatch)
    gate = StepGate()
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.post("first")
        gate.wait_until_held()
        crowd.post("late")
        crowd.post("bad", n=2, seed=_BAD_SEED - 1, max_tokens=900)
        plans = (crowd.step() for _ in range(_SLOTS + 1))
        assert any(len(plan.decode) == _SLOTS for plan in plans)
        # What the step before said is sent once this one has begun.
        crowd.step()
        crowd["bad"].read_until(b"data: ")
        gate.open()

        events = sse_data(crowd.answer("bad").body)
        assert [one["error"]["code"] for one in events if "error" in one] == ["row_fault"]
        assert crowd.text("first") == alone["first"]
        assert crowd.text("late") == alone["late"]
        _check_nothing_is_left(daemon.url, row=1)
        # Nobody ran to the end of 900 tokens.
        assert gate.step_count < 900


def test_who_reads_a_row_that_fails_is_told_each(
    alone: dict[str, str], arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a shared sequence ends all its subscribers, and no other sequence."""
    _draw_fails_at(8)(monkeypatch)
    gate = StepGate()
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather("bad", "first", "second", late="bad whole", waiting=("late",))
        crowd["bad"].read_until(b"data: ")
        gate.open()

        assert len(_check_error_event(crowd.answer("bad"), "row_fault", alone["bad"])) == 8
        _check_error_status(crowd.answer("bad whole"), 500, "row_fault")
        for name in ("first", "second", "late"):
            assert crowd.text(name) == alone[name], name
        assert scrape(daemon.url, "machd_coalesced_requests_total") == 1
        _check_nothing_is_left(daemon.url, row=2)


def test_a_reader_whose_text_fails_leaves_the_other_readers_alone(
    alone: dict[str, str], arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode is shared and the detokeniser is not: only the one that failed is ended."""
    _detokeniser_fails_at(8)(monkeypatch)
    gate = StepGate()
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.post("bad whole", stop=None)  # no mark, so its detokeniser works
        gate.wait_until_held()
        crowd.post("first", "second")
        crowd.step()
        crowd.post("bad")
        crowd.step()
        crowd.step()
        crowd["bad"].read_until(b"data: ")
        gate.open()

        _check_error_event(crowd.answer("bad"), "row_fault", alone["bad"])
        for name in ("bad whole", "first", "second"):
            assert crowd.text(name) == alone[name], name
        assert scrape(daemon.url, "machd_coalesced_requests_total") == 1
        _check_nothing_is_left(daemon.url, row=1)


# --- the stream -------------------------------------------------------------------------------


def _sending_fails_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """The bad request's response can send so many messages, the head being the first."""
    right = GenerationResponse._write_events

    async def write_events(this: GenerationResponse, sender: Any) -> None:
        dialect = this._dialect
        assert isinstance(dialect, _CompletionDialect)
        if dialect._options.seed == _BAD_SEED:
            sender._send = _BadSend(sender._send, count)
        await right(this, sender)

    patch.setattr(GenerationResponse, "_write_events", write_events)


class _BadSend:
    """ASGI's ``send``, of which so many calls work."""

    def __init__(self, right: Callable[[Any], Awaitable[None]], count: int) -> None:
        self._right = right
        self._left = count

    async def __call__(self, message: Any) -> None:
        if not self._left:
            raise OSError("planted")
        self._left -= 1
        await self._right(message)


@pytest.mark.parametrize(
    ("count", "role"),
    sampled([(0, "first"), (1, "late"), (4, "first")], [(0, "first"), (1, "late")]),
)
def test_a_response_that_cannot_be_sent_is_cut_off_alone(
    role: str,
    count: int,
    alone: dict[str, str],
    arrivals: Arrivals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client sees no good end, its slot is given back, and the others are told all."""
    _sending_fails_after(monkeypatch, count)
    gate = StepGate()
    *early, late = ("bad" if name == role else name for name in _RUNNING)
    with (
        RunningDaemon(_engine(gate), _BATCHING) as daemon,
        _Crowd(daemon.url, gate, arrivals) as crowd,
        gate,
    ):
        crowd.gather(*early, late=late)
        gate.open()

        if count:
            assert b"[DONE]" not in crowd["bad"].read_to_end()
        else:
            _check_error_status(crowd.answer("bad"), 500, "row_fault")
        for name in {*_RUNNING, *_WAITING} - {role}:
            assert crowd.text(name) == alone[name], name
        _check_nothing_is_left(daemon.url, row=1)
        _check_all_are_served(crowd, {name: alone[name] for name in _RUNNING})
