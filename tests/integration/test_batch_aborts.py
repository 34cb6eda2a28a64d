"""Clients that leave a batch at every point of a request's life, and the requests beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import wait_until
from support.daemon.arrivals import Arrivals
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, read_page, scrape
from support.engines.dialogue import sse_text
from support.engines.fake_engine import FakeEngine
from support.engines.gated_engine import GatedEngine
from support.engines.step_gate import StepGate
from support.every_run import sampled

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import StepPlan
from machd.engine_process.inbox import Abort, Inbox, Message
from machd.scheduler.events import Event
from machd.scheduler.scheduler import Scheduler

_PATH = "/v1/completions"
_TOKENS = 24
_CHUNK_TOKENS = 16
_LONG_PROMPT = "a prompt of which much is left to compute " * 4
_BATCHING: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.window_ms": 0,
    "continuous_batching.prefill_chunk_tokens": _CHUNK_TOKENS,
}


def _body(prompt: str, **fields: object) -> dict[str, object]:
    usual = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, **usual, **fields}


_STAYING: dict[str, dict[str, object]] = {
    "one": _body("one of two who stay"),
    "other": _body("the other", temperature=1, seed=5),
}
_LEAVING = {
    "short": _body("who leaves", temperature=0.9, seed=8),
    "long": _body(_LONG_PROMPT),
}


@pytest.fixture(autouse=True)
def _no_failure_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test may make the server log a failure of its own."""
    caplog.set_level(logging.WARNING)
    with capture_logs() as events:
        yield
    assert [one.getMessage() for one in caplog.get_records("call")] == []
    assert [one for one in events if one["log_level"] in ("error", "critical")] == []


# --- the scene --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """An engine, and the name of its model."""

    model_id: str
    make: Callable[[Callable[[StepPlan], None]], Engine]

    def __str__(self) -> str:
        return self.model_id


_TINY = _Kind("tiny-llama", GatedEngine)
_FAKE = _Kind("fake", lambda before_step: FakeEngine(before_step=before_step))


@pytest.fixture(name="alone", scope="module")
def _alone() -> dict[str, dict[str, str]]:
    """Return what each request is answered by a daemon that decodes one at a time, by model."""
    return {kind.model_id: _answers_alone(kind) for kind in (_TINY, _FAKE)}


def _answers_alone(kind: _Kind) -> dict[str, str]:
    with RunningDaemon(lambda: kind.make(lambda _plan: None)) as daemon:
        return {
            name: httpx.post(
                f"{daemon.url}{_PATH}", json={**body, "model": kind.model_id, "stream": False}
            ).json()["choices"][0]["text"]
            for name, body in (_STAYING | _LEAVING).items()
        }


@pytest.fixture(name="mail")
def _mail(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    return Arrivals(monkeypatch)


@dataclass(frozen=True)
class _Books:
    """The daemon's own counts: subscribers, slots and reservations."""

    running: int
    waiting: int
    loops: int
    occupied: int
    free: int
    reserved_bytes: int


_GAUGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("machd_requests_running", {}),
    ("machd_requests_waiting", {}),
    ("machd_active_loops", {}),
    ("machd_slots", {"state": "occupied"}),
    ("machd_slots", {"state": "free"}),
)
"""The fields of :class:`_Books`, as the metrics page names them."""


class _Scene:
    """A daemon held before each of its steps, and its clients. A context manager."""

    def __init__(self, kind: _Kind, mail: Arrivals, *, slots: int) -> None:
        self._mail = mail
        self._model_id = kind.model_id
        self._slots = slots
        self._clients: list[RawClient] = []
        self._is_held = True
        self.gate = StepGate(lambda _plan: self._is_held)
        self._daemon = RunningDaemon(
            lambda: kind.make(self.gate), {**_BATCHING, "continuous_batching.max_b": slots}
        )
        self.departures = 0

    def __enter__(self) -> Self:
        self._daemon.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.gate.open()
        for client in self._clients:
            client.close()
        self._daemon.__exit__(kind, error, traceback)

    def ask(self, body: dict[str, object]) -> RawClient:
        """A client whose request has arrived; the engine learns of it after the held step."""
        client = RawClient(self._daemon.url)
        self._clients.append(client)
        asked = {**body, "model": self._model_id}
        self._mail.wait_for_one_more(lambda: client.post_json(_PATH, asked))
        return client

    def begin(self) -> list[RawClient]:
        """Begin the requests that stay; hold the step in which both decode for the first time."""
        one = self.ask(_STAYING["one"])
        self.gate.wait_until_held()
        other = self.ask(_STAYING["other"])
        self.step(2)
        return [one, other]

    def step(self, count: int = 1) -> StepPlan:
        """Let so many steps go; returns the next one, which is held."""
        for _ in range(count):
            self.gate.let()
            self.gate.wait_until_held()
        return self.gate.wait_until_held()

    def leave(self, client: RawClient, how: Callable[[RawClient], None]) -> None:
        """A client leaves, and the daemon has noticed."""
        how(client)
        self.departures += 1
        wait_until(
            lambda: (
                self.scrape("machd_aborts_total", reason="client_disconnected") == self.departures
            ),
            "the departure is noticed",
        )

    def books(self) -> _Books:
        """The counts at the held step."""
        stats = json.loads(self._read("/v1/cache/stats"))
        page = read_page(self._daemon.url)
        values = [page.value(name, **labels) for name, labels in _GAUGES]
        assert None not in values
        running, waiting, loops, occupied, free = (int(value or 0) for value in values)
        return _Books(running, waiting, loops, occupied, free, stats["kv"]["reserved_bytes"])

    def _read(self, path: str) -> bytes:
        with RawClient(self._daemon.url) as client:
            client.request("GET", path, headers={"Connection": "close"})
            return client.read_answer().body

    def scrape(self, name: str, **labels: str) -> float:
        """A number of the daemon's metrics."""
        return scrape(self._daemon.url, name, **labels)

    def check_end(self, texts: dict[RawClient, str]) -> None:
        """The others get all of their answers, a new request is served, and nothing is left."""
        self._is_held = False
        self.gate.let()
        for client, text in texts.items():
            assert sse_text(client.read_answer().body) == text
        newcomer = self.ask(_STAYING["one"])
        assert sse_text(newcomer.read_answer().body) in texts.values()
        url = self._daemon.url
        wait_until(lambda: is_idle(url), "nothing runs and nothing waits")
        wait_until(
            lambda: self.scrape("machd_kv_cache_bytes", state="used") == 0, "no KV is in use"
        )
        assert self.books() == _Books(0, 0, 0, 0, self._slots, 0)
        page = read_page(url)
        assert sum(page.series("machd_aborts_total").values()) == self.departures
        assert sum(page.series("machd_faults_total").values()) == 0
        assert sum(page.series("machd_invariant_violations_total").values()) == 0


# --- one who leaves ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """The stage of a request at which its client leaves.

    Attributes:
        asks: Which request it is.
        slots: Number of slots, two of them for the requests that stay.
        steps: Computed since it came.
        twin: Whether an identical request has come before it or comes after it.
        max_tokens: That it asks for.
    """

    name: str
    asks: str = "short"
    slots: int = 3
    steps: int = 3
    twin: str = ""
    max_tokens: int = _TOKENS

    def __str__(self) -> str:
        return self.name


_LAST_TOKEN = _Phase("last token", steps=3, max_tokens=3)
_PHASES = [
    _Phase("queued", slots=2),
    _Phase("first chunk", "long", steps=1),
    _Phase("later chunk", "long", steps=4),
    _Phase("first token", steps=2),
    _Phase("decode", steps=6),
    _Phase("follower", twin="before"),
    _Phase("leader", twin="after"),
    _Phase("follower in prefill", "long", twin="before"),
    _Phase("leader in prefill", "long", twin="after"),
    _Phase("follower in the queue", slots=2, twin="before"),
    _Phase("leader in the queue", slots=2, twin="after"),
]


@dataclass(frozen=True)
class _Started:
    """The clients that stay and the one that leaves.

    Attributes:
        base: The books while two requests ran.
        after: The expected books after the leaving client has left.
    """

    staying: list[RawClient]
    leaving: RawClient
    base: _Books
    after: _Books


def _start(scene: _Scene, phase: _Phase, *, is_stream: bool = True) -> _Started:
    """Bring a request to its phase, beside two that stay and perhaps a twin."""
    staying = scene.begin()
    body = {**_LEAVING[phase.asks], "max_tokens": phase.max_tokens}
    base = before = scene.books()
    if phase.twin == "before":
        staying.append(scene.ask(body))
        scene.step(phase.steps)
        before = scene.books()
    leaving = scene.ask({**body, "stream": is_stream})
    scene.step(1 if phase.twin == "before" else phase.steps)
    full = scene.books()
    if phase.twin == "before":
        _check_shares(full, before)
    else:
        assert full != before
    if phase.twin != "after":
        return _Started(staying, leaving, base, before)
    staying.append(scene.ask(body))
    scene.step(1)
    _check_shares(scene.books(), full)
    return _Started(staying, leaving, base, full)


def _check_shares(books: _Books, before: _Books) -> None:
    """There is one more subscriber, without a slot or bytes of its own."""
    assert books.running + books.waiting == before.running + before.waiting + 1
    assert replace(books, running=before.running, waiting=before.waiting) == before


def _check_released(scene: _Scene, after: _Books) -> StepPlan:
    """By the step after the held one, a request whose client has left has no slot any more."""
    plan = scene.step()
    books = scene.books()
    assert books == after, f"not given back: the books say {books} and should say {after}"
    slots = {row.slot_index for row in plan.decode}
    assert slots | {chunk.slot_index for chunk in plan.prefill} == set(range(after.occupied))
    return plan


def _texts(clients: list[RawClient], phase: _Phase, alone: dict[str, str]) -> dict[RawClient, str]:
    names = ["one", "other", phase.asks][: len(clients)]
    return dict(zip(clients, (alone[name] for name in names), strict=True))


_WAYS: dict[str, tuple[_Kind, Callable[[RawClient], None], bool]] = {
    "tiny, stream, reset": (_TINY, RawClient.reset, True),
    "fake, whole, finish": (_FAKE, RawClient.close, False),
}
_EVERY_RUN = {
    f"{phase}-{list(_WAYS)[place % 2]}" for place, phase in enumerate([*_PHASES, _LAST_TOKEN])
}
"""Every phase in one way; of phases that are alike, one in each."""


@pytest.mark.parametrize(
    ("phase", "kind", "how", "is_stream"),
    sampled(
        [(phase, *way) for phase in (*_PHASES, _LAST_TOKEN) for way in _WAYS.values()],
        _EVERY_RUN,
        [f"{phase}-{way}" for phase in (*_PHASES, _LAST_TOKEN) for way in _WAYS],
    ),
)
def test_a_leaving_client_frees_its_slot_by_the_next_step(
    phase: _Phase,
    kind: _Kind,
    how: Callable[[RawClient], None],
    is_stream: bool,  # noqa: FBT001
    alone: dict[str, dict[str, str]],
    mail: Arrivals,
) -> None:
    """Slot, reservation and place in the queue are free, and the other requests answer as they do alone."""
    with _Scene(kind, mail, slots=phase.slots) as scene:
        started = _start(scene, phase, is_stream=is_stream)
        scene.leave(started.leaving, how)
        plan = _check_released(scene, started.after)
        # The engine is told to free the slot, unless nobody had it or somebody still reads along.
        has_slot = started.after == started.base and phase.slots > 2
        assert plan.release == ((2,) if has_slot else ())
        scene.check_end(_texts(started.staying, phase, alone[kind.model_id]))


_TWINS = {one.name: one for one in _PHASES if one.twin}


@pytest.mark.parametrize(
    "phase",
    sampled(
        _TWINS.values(), ["follower", "leader in prefill", "leader in the queue"], list(_TWINS)
    ),
)
def test_when_the_last_reader_leaves_the_shared_decode_ends(
    phase: _Phase, alone: dict[str, dict[str, str]], mail: Arrivals
) -> None:
    """Leader and follower leave one after the other: the second departure gives the place back."""
    with _Scene(_TINY, mail, slots=phase.slots) as scene:
        started = _start(scene, phase)
        *staying, twin = started.staying
        scene.leave(started.leaving, RawClient.reset)
        _check_released(scene, started.after)
        scene.leave(twin, RawClient.reset)
        _check_released(scene, started.base)
        scene.check_end(_texts(staying, phase, alone[_TINY.model_id]))


def test_a_request_that_comes_after_the_first_subscriber_left_is_coalesced(
    alone: dict[str, dict[str, str]], mail: Arrivals
) -> None:
    """A sequence belongs to all its subscribers: it takes new ones after its first one has left."""
    phase = next(one for one in _PHASES if one.name == "leader")
    with _Scene(_TINY, mail, slots=phase.slots) as scene:
        started = _start(scene, phase)
        scene.leave(started.leaving, RawClient.reset)
        _check_released(scene, started.after)
        newcomer = scene.ask(_LEAVING[phase.asks])
        scene.step()
        _check_shares(scene.books(), started.after)
        texts = _texts(started.staying, phase, alone[_TINY.model_id])
        scene.check_end({**texts, newcomer: alone[_TINY.model_id][phase.asks]})


# --- an abort that is lost --------------------------------------------------------------------


def _lose_in_the_inbox(patch: pytest.MonkeyPatch) -> None:
    """The first abort never gets to the engine thread."""
    put = Inbox.put
    lost: list[Message] = []

    def forgetful_put(inbox: Inbox, message: Message) -> None:
        if isinstance(message, Abort) and not lost:
            lost.append(message)
        else:
            put(inbox, message)

    patch.setattr(Inbox, "put", forgetful_put)


def _lose_in_the_scheduler(patch: pytest.MonkeyPatch, number: int) -> None:
    """One abort, counted from 0, has no effect."""
    abort = Scheduler.abort
    aborts = 0

    def forgetful_abort(scheduler: Scheduler, *args: Any) -> list[Event]:
        nonlocal aborts
        aborts += 1
        return [] if aborts == number + 1 else abort(scheduler, *args)

    patch.setattr(Scheduler, "abort", forgetful_abort)


@pytest.mark.parametrize(
    "phase",
    sampled(
        _PHASES,
        ["queued", "later chunk", "decode", "leader"],  # the others lose it in the same place
        list(map(str, _PHASES)),
    ),
)
def test_in_every_phase_a_lost_abort_is_noticed(
    phase: _Phase, mail: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of these tests fails when the one abort never arrives, so it proves something."""
    _lose_in_the_inbox(monkeypatch)
    with _Scene(_FAKE, mail, slots=phase.slots) as scene:
        started = _start(scene, phase)
        scene.leave(started.leaving, RawClient.reset)
        with pytest.raises(AssertionError, match="not given back"):
            _check_released(scene, started.after)


@pytest.mark.parametrize("lost", sampled([None, 0, 1, 2, 3, 4, 5], every_run=[None, 5]))
def test_of_six_departures_at_once_none_may_be_lost(
    lost: int | None,
    alone: dict[str, dict[str, str]],
    mail: Arrivals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They leave in one step and from every phase; if a single abort is lost, the check fails."""
    if lost is not None:
        _lose_in_the_scheduler(monkeypatch, lost)
    with _Scene(_TINY, mail, slots=6) as scene:
        one, other = scene.begin()
        leader = scene.ask(_LEAVING["short"])
        scene.step(2)
        after = scene.books()
        follower, twin = scene.ask(_LEAVING["short"]), scene.ask(_LEAVING["short"])
        decoding = [scene.ask(_body(prompt)) for prompt in ("decodes", "decodes too")]
        prefilling = scene.ask(_LEAVING["long"])
        scene.step(4)
        queued = scene.ask(_body("finds no slot"))
        scene.step()
        full = scene.books()
        assert (full.running, full.waiting, full.occupied) == (8, 1, 6)

        for client in (decoding[0], leader, prefilling, queued, follower, decoding[1]):
            scene.leave(client, RawClient.reset)
        is_noticed = (
            nullcontext() if lost is None else pytest.raises(AssertionError, match="not given back")
        )
        with is_noticed:
            _check_released(scene, after)
        if lost is None:
            texts = alone[_TINY.model_id]
            scene.check_end({one: texts["one"], other: texts["other"], twin: texts["short"]})
