"""A real model's answers are the same whatever becomes of the processes that compute them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.clients.four_dialects import Question, questions
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import engine_of
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

_MODEL = "smollm2-135m-instruct"
_STALL_S = 8.0
"""Longer than a step of 32 rows takes on a busy machine."""

_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
"""SIGABRT is the end that MLX gives a process whose allocation fails."""


@pytest.fixture(name="server", scope="module")
def _server(embedded_model_path: Path) -> Iterator[ServeProcess]:
    assert embedded_model_path.is_file()
    flags = ("--continuous-batching", "--continuous-batching-max-b", "32")
    with ServeProcess(*flags, "--engine-stall-timeout-s", f"{_STALL_S:g}") as server:
        yield server


def _engine(server: ServeProcess) -> psutil.Process:
    return engine_of(server.process.pid)


def _is_ready(server: ServeProcess) -> bool:
    return httpx.get(f"{server.url}/health/ready", timeout=CEILING_S).status_code == 200


def _has_another(server: ServeProcess, former: psutil.Process) -> bool:
    """Another engine process is there, and serves; the daemon says that it is replaced before it starts one."""
    try:
        return engine_of(server.process.pid).pid != former.pid and _is_ready(server)
    except (StopIteration, psutil.NoSuchProcess):
        return False


def _run_together(server: ServeProcess) -> bool:
    """Several rows are decoded: no suspect runs alone any more, which would be to blame for the next end."""
    return _is_ready(server) and scrape(server.url, "machd_active_loops") > 1


def _ask_all(
    server: ServeProcess, asked: list[Question], pool: ThreadPoolExecutor
) -> list[Future[object]]:
    """Ask each question for two streams and, the first eight, for a whole answer."""
    streams = [pool.submit(one.ask_streamed, server.url) for one in asked * 2]
    return streams + [pool.submit(one.ask, server.url) for one in asked[:8]]


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_answers_are_those_of_a_daemon_left_alone_when_its_engine_process_is_killed(
    server: ServeProcess, kills: int
) -> None:
    """24 streams and 8 plain requests of every kind, in four dialects, token for token and with the same usage."""
    rng, asked = random.Random(kills), questions(_MODEL)
    before = sum(
        scrape(server.url, "machd_engine_restarts_total", reason=reason)
        for reason in ("exit", "stall")
    )
    with ThreadPoolExecutor(32) as pool:
        expected = [one.result(CEILING_S) for one in _ask_all(server, asked, pool)]
        done = 0
        while done < kills:
            answers = _ask_all(server, asked, pool)
            while done < kills and sum(not one.done() for one in answers) > 3:
                wait_until(
                    lambda: _run_together(server) or all(one.done() for one in answers),  # noqa: B023
                    "answers are being made",
                )
                time.sleep(rng.random() * 0.5)
                engine = _engine(server)
                engine.send_signal(_SIGNALS[done % len(_SIGNALS)])
                done += 1
                wait_until(lambda: _has_another(server, engine), "another one serves")  # noqa: B023
            said = [one.result(CEILING_S) for one in answers]
            for number, (one, undisturbed) in enumerate(zip(said, expected, strict=True)):
                assert one == undisturbed, number
    after = sum(
        scrape(server.url, "machd_engine_restarts_total", reason=reason)
        for reason in ("exit", "stall")
    )
    assert after - before == kills


@pytest.mark.skipif(
    not hasattr(psutil.Process, "memory_maps"), reason="the system does not tell what is mapped"
)
def test_the_front_has_no_mlx(server: ServeProcess) -> None:
    """Its memory maps no file of mlx's, nor of llguidance's, and the engine process's does."""
    front = psutil.Process(server.process.pid)
    mapped = {Path(one.path).parts for one in front.memory_maps()}
    names = {part for parts in mapped for part in parts}
    computing = {part for one in _engine(server).memory_maps() for part in Path(one.path).parts}

    assert not names & {"mlx", "mlx_lm", "llguidance"}
    assert "mlx" in computing


def test_an_engine_process_ends_with_a_front_that_is_killed(embedded_model_path: Path) -> None:
    """However the front ends, its link does."""
    assert embedded_model_path.is_file()
    with ServeProcess() as server:
        engine = _engine(server)
        server.process.kill()
        wait_until(
            lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE,
            "the engine process has ended",
        )
