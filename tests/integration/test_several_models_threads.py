"""Faults that users of other servers of several models report, each as a test of its name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.clients.cached_answers import ask, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.several_models import LONG_TEXT, Make, asked, making
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat
from support.engines.model_house import NEEDS, SIZE_BYTES, ModelHouse, let_go_on

from machd.served.residence import Residence
from machd.served.turns import ModelState

_LARGE = "size=80000000"
"""A model of which the memory holds one."""


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    """Makes a daemon of models by the queries of their paths."""
    with making(tmp_path) as make:
        yield make


def _refused(daemon: SupervisedDaemon, model: str) -> str:
    """Ask a model that cannot be loaded; returns what the client is told."""
    answer = httpx.post(
        f"{daemon.url}/v1/chat/completions",
        json=chat("say no") | {"model": model},
        timeout=CEILING_S,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "model_not_loaded")
    return str(error["message"])


def test_a_running_answer_is_not_killed_by_a_request_for_another_model(make: Make) -> None:
    """The other one gets its turn once it has waited for one, and the answer goes on after it."""
    text = LONG_TEXT * 8
    with make({"alpha": _LARGE, "beta": _LARGE}) as daemon, ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask_streamed, daemon.url, asked("alpha", text))
        wait_until(lambda: len(daemon.processes) == 1, "the first model loads")
        threading.Event().wait(0.5)
        start_s = time.monotonic()
        assert ask(daemon.url, asked("beta", "short")).texts == ("short",)
        waited_s = time.monotonic() - start_s
        assert long.result(CEILING_S).texts == (text,)

    assert waited_s < CEILING_S / 2
    assert len(daemon.processes) >= 2


def test_two_cold_requests_that_need_one_victim_do_not_wait_for_ever(make: Make) -> None:
    """Each is answered in its turn."""
    models = dict.fromkeys(("alpha", "beta", "gamma"), _LARGE)
    with make(models) as daemon, ThreadPoolExecutor(3) as pool:
        assert ask(daemon.url, asked("gamma", "first")).texts == ("first",)
        answers = list(pool.map(lambda name: ask(daemon.url, asked(name)), ("alpha", "beta")))

    assert [one.texts for one in answers] == [(LONG_TEXT,), (LONG_TEXT,)]


def test_a_model_is_not_evicted_between_its_load_and_its_own_request() -> None:
    """Its request holds it from before the load: another model that waits does not see it idle for a moment."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        a, b = house.models["a"], house.models["b"]
        first = asyncio.create_task(house.models.lease(a))
        await let_go_on()
        second = asyncio.create_task(house.models.lease(b))
        a.sized(NEEDS)
        await let_go_on()
        house.clock.advance(59.0)  # the other one has waited for almost a turn
        house.engine("a").loading.set_result(None)
        await let_go_on()
        b.sized(NEEDS)
        house.models.act()
        assert (a.state, b.state, first.done()) == (ModelState.READY, ModelState.LOADING, True)
        assert not b.reserved_bytes

        first.result().close()
        await let_go_on()
        assert (a.state, b.reserved_bytes) == (ModelState.UNLOADED, SIZE_BYTES)
        house.engine("b").loading.set_result(None)
        (await second).close()

    asyncio.run(main())


def test_a_budget_counts_bytes_and_not_models(make: Make) -> None:
    """Three small models stay side by side where one large one fits alone."""
    models = dict.fromkeys(("alpha", "beta", "gamma"), "size=10000000") | {"large": "size=60000000"}
    with make(models) as daemon:
        for name in ("alpha", "beta", "gamma"):
            assert ask(daemon.url, asked(name, "yes")).texts == ("yes",)
        assert [one.poll() for one in daemon.processes] == [None] * 3

        assert ask(daemon.url, asked("large", "yes")).texts == ("yes",)
        ended = [one for one in daemon.processes if one.poll() is not None]
        assert daemon.processes[-1] not in ended
        assert len(ended) == 2  # of 100 MB each takes 20, the large one 70: no more than needed


def test_a_swap_does_not_load_the_new_model_before_the_old_one_is_freed() -> None:
    """Its weights are read once the process of the old one has ended, which may take a while."""

    async def main() -> None:
        house = ModelHouse("old", "new", places=1)
        await house.load("old")
        ending: Future[None] = Future()
        house.engine("old").suspended = ending
        new = house.models["new"]
        asking = asyncio.create_task(house.models.lease(new))
        await let_go_on()
        new.sized(NEEDS)
        await let_go_on()
        assert house.models["old"].state is ModelState.SUSPENDING
        assert not house.engine("new").is_placed
        assert house.models.reserved_bytes == SIZE_BYTES

        ending.set_result(None)
        await let_go_on()
        assert house.engine("new").is_placed
        assert house.models.reserved_bytes == SIZE_BYTES
        house.engine("new").loading.set_result(None)
        (await asking).close()

    asyncio.run(main())


def test_memory_of_a_load_that_failed_is_given_back(make: Make) -> None:
    """The request gets the reason's code; the next model has the room."""
    models = {"broken": f"{_LARGE}&fails=1", "alpha": "size=35000000", "beta": "size=35000000"}
    with make(models) as daemon:
        assert "could not be loaded" in _refused(daemon, "broken")
        assert ask(daemon.url, asked("alpha", "yes")).texts == ("yes",)
        assert ask(daemon.url, asked("beta", "yes")).texts == ("yes",)
        assert [one.poll() for one in daemon.processes[1:]] == [None, None]


def test_time_to_live_counts_from_the_end_of_an_answer_and_not_from_its_start() -> None:
    """A model is not unloaded while a long answer runs, nor just after it."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        await house.load("a")
        a = house.models["a"]
        a.live(Residence(ttl_s=5.0))
        lease = a.hold()
        house.clock.advance(100.0)
        house.models.act()
        assert a.is_ready
        lease.close()
        house.clock.advance(4.9)
        house.models.act()
        assert a.is_ready
        house.clock.advance(0.2)
        house.models.act()
        assert not a.is_ready

    asyncio.run(main())


def test_two_names_that_one_client_uses_do_not_thrash(make: Make) -> None:
    """Requests that wait for one model are answered in one turn: two names by turns are two loads, not twelve."""
    names = ("alpha", "beta") * 6
    with make({"alpha": _LARGE, "beta": _LARGE}, max_turn_s=CEILING_S) as daemon:
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(lambda name: ask(daemon.url, asked(name)), names))
        loads = len(daemon.processes)

    assert {one.texts for one in answers} == {(LONG_TEXT,)}
    assert loads <= 3  # the last of them may come after a turn


def test_a_model_that_does_not_fit_is_no_error_for_others(make: Make) -> None:
    """It is refused with the figures, what waits for memory waits, and the others go on being served."""
    models = {"alpha": _LARGE, "beta": _LARGE, "huge": "size=500000000"}
    with make(models) as daemon, ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, daemon.url, asked(name)) for name in ("alpha", "beta") * 2]
        message = _refused(daemon, "huge")
        texts = {one.result(CEILING_S).texts for one in others}

    assert "needs 0.51 GB, and models.memory_gb is 0.10" in message
    assert texts == {(LONG_TEXT,)}
