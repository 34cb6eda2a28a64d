"""Many clients and a KV budget for a few: requests that wait, requests that are rejected, and reservations."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.chaos_clients import Answer, Conduct, Errand, Town, answer_of
from support.clients.raw_client import RawAnswer, RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import completion, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.gated_engine import GatedEngine
from support.engines.small_classes import small_classes
from support.engines.step_gate import StepGate

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import StepPlan
from machd.engine_process.inbox import Inbox, Message, Submit
from machd.engine_process.loop import EngineLoop
from machd.scheduler.scheduler import Scheduler

_PATH = "/v1/completions"
_SLOTS = 8
_BUDGET_BYTES = 100_000
_TINY_TOKEN_BYTES = 512  # two layers of keys and values: 195 tokens fit the budget
_FLAGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": _SLOTS,
    "continuous_batching.window_ms": 0,
    "continuous_batching.prefill_chunk_tokens": 32,
    "continuous_batching.kv_budget_gb": _BUDGET_BYTES / 1e9,
    "limits.max_tokens_policy": "refuse",
    "limits.max_queue": 512,
    "limits.queue_timeout_s": 3600,
}
_LETTERS = "etaoin shrdlu,.ETAOINSHRDLU0123456789"
_FITTING = 20
_NEVER = 4


@pytest.fixture(autouse=True)
def _classes_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the smallest class would take more than the whole budget."""
    small_classes(monkeypatch)


@pytest.fixture(autouse=True)
def _no_loose_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test may leave a task behind, or make the server log a failure of its own."""
    gc.collect()  # what the tests before have left is not this one's
    caplog.set_level(logging.WARNING)
    with capture_logs() as events:
        yield
    gc.collect()
    assert [one.getMessage() for one in caplog.get_records("call")] == []
    assert [one for one in events if one["log_level"] in ("error", "critical")] == []


# --- what is watched --------------------------------------------------------------------------


@dataclass
class _Watch:
    """All snapshots of the engine loop, each with the scheduler's counts."""

    snapshots: int = 0
    max_reserved_bytes: int = 0
    deferred: int = 0
    """Snapshots in which somebody waited although a slot was free: for want of KV."""

    submits: int = 0

    @property
    def is_within_budget(self) -> bool:
        """Return whether no more was ever promised than there is."""
        return self.max_reserved_bytes <= _BUDGET_BYTES

    def note(self, loop: EngineLoop, scheduler: Scheduler) -> None:
        """Look at one snapshot."""
        scheduler.check_invariants()
        snapshot = loop.snapshot
        if snapshot.kv_budget_bytes is None:
            return  # a daemon that decodes one at a time, for comparison
        assert snapshot.kv_budget_bytes == _BUDGET_BYTES
        self.snapshots += 1
        self.max_reserved_bytes = max(self.max_reserved_bytes, snapshot.kv_reserved_bytes)
        has_free_slot = snapshot.active_loops < snapshot.slot_count
        self.deferred += snapshot.waiting_count > 0 and has_free_slot


@pytest.fixture(name="watch")
def _watch(monkeypatch: pytest.MonkeyPatch) -> _Watch:
    watch = _Watch()
    note, put = EngineLoop._note, Inbox.put

    def watched_note(loop: EngineLoop, engine: Engine, scheduler: Scheduler, *, idle: bool) -> None:
        note(loop, engine, scheduler, idle=idle)
        watch.note(loop, scheduler)

    def counted_put(inbox: Inbox, message: Message) -> None:
        put(inbox, message)
        watch.submits += isinstance(message, Submit)

    monkeypatch.setattr(EngineLoop, "_note", watched_note)
    monkeypatch.setattr(Inbox, "put", counted_put)
    return watch


def _tiny(before_step: Callable[[StepPlan], None] = lambda _plan: None) -> Callable[[], Engine]:
    return lambda: GatedEngine(before_step)


# --- many clients -----------------------------------------------------------------------------


def _fitting(number: int, rng: random.Random) -> dict[str, object]:
    """A request that fits the budget when it is alone, and has one right answer."""
    return {
        "model": "tiny-llama",
        "prompt": "".join(rng.choices(_LETTERS, k=rng.choice([1, 5, 20, 60, 110]))),
        "max_tokens": rng.choice([2, 8, 24, 80]),
        "temperature": rng.choice([0.0, 0.9]),
        "seed": number,
        "stream": rng.random() < 0.6,
        "n": 2 if rng.random() < 0.15 else 1,
        "ignore_eos": rng.random() < 0.5,
    }


def _needed_bytes(body: dict[str, Any], choices: int = 1) -> int:
    """Return what a request of the tiny model has to be promised."""
    return (len(body["prompt"]) + int(body["max_tokens"])) * _TINY_TOKEN_BYTES * choices


def _requests() -> list[dict[str, object]]:
    rng = random.Random(2)  # some fit only without the padding of the batch
    return [_fitting(number, rng) for number in range(_FITTING)]


_TOO_LARGE = {
    "model": "tiny-llama",
    "prompt": "x" * 100,
    "max_tokens": 96,
    "temperature": 0,
}


@pytest.fixture(name="alone", scope="module")
def _alone() -> list[Answer]:
    """Return what each fitting request is answered by a daemon that decodes one at a time."""
    with RunningDaemon(_tiny()) as daemon:
        errands = [[_errand(body, number)] for number, body in enumerate(_requests())]
        return [answer_of(answer) for _, answer in _run(daemon.url, errands, 1) if answer]


def _errand(body: dict[str, object], request: int | None = None) -> Errand:
    return Errand(_PATH, json.dumps(body).encode(), request=request)


def _run(
    url: str, groups: list[list[Errand]], max_clients: int
) -> list[tuple[Errand, RawAnswer | None]]:
    async def run() -> list[tuple[Errand, RawAnswer | None]]:
        async with asyncio.timeout(CEILING_S):
            return await Town(url, max_clients=max_clients).run(groups)

    return asyncio.run(run())


def _everyone() -> list[list[Errand]]:
    """All fitting requests and those too large, in one fixed disorder."""
    errands = [[_errand(body, number)] for number, body in enumerate(_requests())]
    errands += [[_errand(_TOO_LARGE)] for _ in range(_NEVER)]
    random.Random(12).shuffle(errands)
    return errands


def _at_once(
    daemon: RunningDaemon, gate: StepGate, watch: _Watch
) -> list[tuple[Errand, RawAnswer]]:
    """Submit all errands between two steps, so that none is done before all have come.

    The first step, of a request that needs little, is held until the others are in the inbox.
    """
    with RawClient(daemon.url) as first:
        first.post_json(_PATH, {**_TOO_LARGE, "prompt": "first", "max_tokens": 2})
        gate.wait_until_held()
        answers = asyncio.run(_all_asked(daemon.url, _everyone(), gate, watch))
        assert first.read_answer().status == 200
    return answers


async def _all_asked(
    url: str, errands: list[list[Errand]], gate: StepGate, watch: _Watch
) -> list[tuple[Errand, RawAnswer]]:
    before = watch.submits

    async def open_gate() -> None:
        while watch.submits < before + len(errands):  # noqa: ASYNC110 - counted on another thread
            await asyncio.sleep(0.005)
        gate.open()

    async with asyncio.timeout(CEILING_S):
        pairs, _ = await asyncio.gather(
            Town(url, max_clients=len(errands)).run(errands), open_gate()
        )
    return [(errand, answer) for errand, answer in pairs if answer is not None]


def _check_too_large(answer: RawAnswer) -> None:
    """400 with both numbers."""
    assert answer.status == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("kv_budget_exceeded", "max_tokens")
    assert str(_needed_bytes(_TOO_LARGE)) in error["message"]
    assert str(_BUDGET_BYTES) in error["message"]
    assert "retry-after" not in answer.headers


def _check_nothing_is_left(url: str, watch: _Watch) -> None:
    wait_until(lambda: is_idle(url), "nothing runs and nothing waits")
    wait_until(lambda: scrape(url, "machd_kv_cache_bytes", state="used") == 0, "no KV is in use")
    stats = httpx.get(f"{url}/v1/cache/stats").json()["kv"]
    assert stats == {"budget_bytes": _BUDGET_BYTES, "reserved_bytes": 0, "used_bytes": 0}
    assert scrape(url, "machd_slots", state="free") == _SLOTS
    assert scrape(url, "machd_faults_total") == 0
    assert scrape(url, "machd_invariant_violations_total") == 0
    assert watch.is_within_budget


def test_under_defer_everyone_who_fits_is_served_in_the_end(
    alone: list[Answer], watch: _Watch
) -> None:
    """However many wait for bytes, each says what it says alone, and no promise exceeds the budget."""
    gate = StepGate()
    with RunningDaemon(_tiny(gate), _FLAGS) as daemon, gate:
        answers = _at_once(daemon, gate, watch)

        _check_nothing_is_left(daemon.url, watch)
        rejections = scrape(daemon.url, "machd_rejections_total")
    assert len(answers) == _FITTING + _NEVER
    for errand, answer in answers:
        if errand.request is None:
            _check_too_large(answer)
        else:
            assert answer_of(answer) == alone[errand.request], errand
    assert rejections == 0
    assert watch.deferred > 100
    assert watch.max_reserved_bytes > 0.9 * _BUDGET_BYTES
    modes = Counter(answer.headers.get("x-decode-mode") for _, answer in answers)
    assert modes["batched"] >= 5
    assert modes["single"] >= 1, "one that fits only without the batch's padding decodes alone"


@pytest.mark.long
def test_under_defer_departures_give_their_promises_back(
    alone: list[Answer], watch: _Watch
) -> None:
    """Half of the clients leave, before and after they are admitted; the others are all served."""
    rng = random.Random(13)
    errands = [
        [replace(one, conduct=_conduct(rng), patience=rng.random(), resets=rng.random() < 0.5)]
        for (one,) in _everyone() * 3
        if one.request is not None
    ]
    with RunningDaemon(_tiny(), _FLAGS) as daemon:
        pairs = _run(daemon.url, errands, 24)

        _check_nothing_is_left(daemon.url, watch)
        aborts = scrape(daemon.url, "machd_aborts_total", reason="client_disconnected")
    for errand, answer in pairs:
        assert (answer is None) == errand.conduct.leaves
        if answer is not None:
            assert errand.request is not None
            assert answer_of(answer) == alone[errand.request], errand
    assert aborts >= 10
    assert watch.deferred > 10


def _conduct(rng: random.Random) -> Conduct:
    leaving = [Conduct.LEAVE_AT_ONCE, Conduct.LEAVE_SOON, Conduct.LEAVE_IN_STREAM]
    return rng.choice([Conduct.READ, *leaving]) if rng.random() < 0.7 else Conduct.READ


def test_under_reject_who_does_not_fit_now_is_told_to_come_again(
    alone: list[Answer], watch: _Watch
) -> None:
    """Requests whose bytes are promised to others get 429 at once; an idle daemon serves them."""
    gate = StepGate()
    flags = {**_FLAGS, "continuous_batching.kv_policy": "reject"}
    with RunningDaemon(_tiny(gate), flags) as daemon, gate:
        answers = _at_once(daemon, gate, watch)
        _check_nothing_is_left(daemon.url, watch)
        counted = scrape(daemon.url, "machd_rejections_total", reason="kv_budget_spent")
        bodies = _requests()
        again = [
            (number, pair[1])
            for number, body in enumerate(bodies)
            for pair in _run(daemon.url, [[_errand(body, number)]], 1)
        ]
        _check_nothing_is_left(daemon.url, watch)

    statuses = Counter(answer.status for _, answer in answers)
    never = {
        number
        for number, body in enumerate(bodies)
        if _needed_bytes(body, _choices(body)) > _BUDGET_BYTES
    }
    assert set(statuses) == {200, 400, 429}
    assert statuses[400] == _NEVER + len(never)
    assert statuses[429] == counted
    assert statuses[200] >= 2
    for errand, answer in answers:
        _check_rejecting_answer(errand, answer, alone, is_never=errand.request in never)
    for number, answer_again in again:
        assert answer_again is not None
        if number in never:
            assert answer_again.json()["error"]["code"] == "kv_budget_exceeded"
        else:
            assert answer_of(answer_again) == alone[number]


def _choices(body: dict[str, Any]) -> int:
    """Decodes of their own: equal greedy choices share one."""
    return int(body["n"]) if body["temperature"] else 1


def _check_rejecting_answer(
    errand: Errand, answer: RawAnswer, alone: list[Answer], *, is_never: bool
) -> None:
    if errand.request is None:
        _check_too_large(answer)
    elif is_never:
        assert (answer.status, answer.json()["error"]["code"]) == (400, "kv_budget_exceeded")
    elif answer.status == 429:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("kv_budget_spent", "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
    else:
        assert answer_of(answer) == alone[errand.request], errand


# --- who is large -----------------------------------------------------------------------------


class _Asking:
    """Clients of one daemon; the engine learns of each after the step that is held."""

    def __init__(self, url: str, watch: _Watch, stack: ExitStack) -> None:
        self._url = url
        self._watch = watch
        self._stack = stack

    def __call__(self, body: dict[str, object]) -> RawClient:
        client = self._stack.enter_context(RawClient(self._url))
        before = self._watch.submits
        client.post_json(_PATH, body)
        wait_until(lambda: self._watch.submits > before, "a request has arrived")
        return client


def test_who_needs_much_is_not_starved_by_those_who_need_little(watch: _Watch) -> None:
    """A large request that waits is not overtaken by small ones for which there would be room."""
    admitted: list[bytes] = []
    gate = StepGate()

    def before_step(plan: StepPlan) -> None:
        admitted.extend(bytes(one.token_ids) for one in plan.prefill if one.start == 0)
        gate(plan)

    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=before_step), _FLAGS) as daemon,
        ExitStack() as stack,
        gate,
    ):
        asking = _Asking(daemon.url, watch, stack)

        def ask(prompt: str, max_tokens: int) -> RawClient:
            return asking(completion(prompt, temperature=0, max_tokens=max_tokens, stream=True))

        clients = {"small 0": ask("small 0", 20)}
        gate.wait_until_held()
        clients["large"] = ask("large", 80)
        for number in range(1, 6):
            clients[f"small {number}"] = ask(f"small {number}", 5)
            gate.let()
            gate.wait_until_held()
        assert watch.deferred > 0
        assert admitted == [b"small 0"]
        gate.open()
        for client in clients.values():
            assert sse_text(client.read_answer().body)
        _check_nothing_is_left(daemon.url, watch)

    smalls = [b"small %d" % number for number in range(1, 6)]
    assert admitted == [b"small 0", b"large", *smalls]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"),
    [(2, 130), *(pytest.param(*one, marks=pytest.mark.long) for one in ((3, 127), (25, 80)))],
)
def test_who_decodes_alone_says_the_same_when_its_prompt_came_with_others(
    prompt_tokens: int, max_tokens: int, watch: _Watch
) -> None:
    """Prompts of both lanes are computed in one step, and each row goes on from its own cache.

    The last one fits the budget only without the columns that its class has to spare.
    """
    gate = StepGate()
    bodies = [
        {
            "model": "tiny-llama",
            "prompt": _LETTERS[start : start + length],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for start, length, tokens in (
            (0, 4, 40),
            (5, prompt_tokens, 10),
            (9, prompt_tokens, max_tokens),
        )
    ]
    with RunningDaemon(_tiny()) as daemon:
        errands = [[_errand(body)] for body in bodies]
        alone = [answer_of(answer) for _, answer in _run(daemon.url, errands, 1) if answer]
    flags = {**_FLAGS, "continuous_batching.prefill_chunk_tokens": 64}
    with RunningDaemon(_tiny(gate), flags) as daemon, ExitStack() as stack, gate:
        asking = _Asking(daemon.url, watch, stack)
        clients = [asking(bodies[0])]
        gate.wait_until_held()
        clients += [asking(body) for body in bodies[1:]]
        gate.let()
        plan = gate.wait_until_held()
        assert [chunk.is_last for chunk in plan.prefill] == [True, True]
        gate.open()
        answers = [client.read_answer() for client in clients]
        _check_nothing_is_left(daemon.url, watch)
    assert [answer.headers["x-decode-mode"] for answer in answers] == [
        "batched",
        "batched",
        "single",
    ]
    assert [answer_of(answer) for answer in answers] == alone
