"""A model's answers are the same whatever becomes of the processes that compute them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.four_dialects import ask_streams_and_whole, questions
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.beyond_limit import TOLD
from support.daemon.engine_kills import EngineKills, assert_answers_stay
from support.daemon.engine_processes import engine_of
from support.daemon.serve_process import ServeProcess

_EMBEDDED = "smollm2-135m-instruct"
_TINY = "tiny"
"""A llama with the same tokens and template."""

_TINY_FLAGS = ("--model-dtype=float32", "--probe-on-start=off")

_STALL_S = 5.0
"""Longer than a step of 16 rows takes on a busy machine."""


@pytest.fixture(name="tiny_path", scope="module")
def _tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("kills") / _TINY)


@pytest.fixture(name="model", scope="module")
def _model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="server", scope="module")
def _server(request: pytest.FixtureRequest, model: str) -> Iterator[ServeProcess]:
    """A daemon of the model."""
    path = request.getfixturevalue("tiny_path" if model == _TINY else "embedded_model_path")
    assert path.exists()
    of_tiny = (str(path), *_TINY_FLAGS) if model == _TINY else ()
    batching = ("--continuous-batching", "--continuous-batching-max-b=16")
    # Some of the requests wait for a slot, and for several processes to load, on a busy machine.
    waiting = f"--limits-queue-timeout-s={CEILING_S:g}"
    stall = f"--engine-stall-timeout-s={_STALL_S:g}"
    with ServeProcess(*of_tiny, *batching, waiting, stall, environ=TOLD) as server:
        yield server


def _engine(server: ServeProcess) -> psutil.Process:
    return engine_of(server.process.pid)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "kills", "streams", "whole", "longest_tokens"),
    [
        pytest.param(_TINY, 2, 1, 4, 45, id="2"),
        pytest.param(_EMBEDDED, 50, 2, 8, 90, id="50", marks=pytest.mark.longest),
    ],
    indirect=["model"],
)
def test_answers_are_those_of_a_daemon_left_alone_when_its_engine_process_is_killed(
    server: ServeProcess, model: str, kills: int, streams: int, whole: int, longest_tokens: int
) -> None:
    """Streams and plain requests of every kind, in four dialects, token for token and with the same usage."""
    asked = questions(model, longest_tokens=longest_tokens)
    # Of these moments the first comes after a quarter of the time, when few answers are whole.
    killed = EngineKills(server, seed=3, max_pause_s=0.5)
    with ThreadPoolExecutor(32) as pool:
        ask = partial(ask_streams_and_whole, server.url, asked, pool, streams=streams, whole=whole)
        assert_answers_stay(killed, ask, kills)


def test_the_front_has_no_mlx_and_its_engine_process_ends_when_it_is_killed(
    tiny_path: Path,
) -> None:
    """Its memory maps no file of mlx's, nor of llguidance's, and the engine process's does; however it ends, its link does."""
    with ServeProcess(str(tiny_path), *_TINY_FLAGS, is_forked=False) as server:
        engine = _engine(server)
        if hasattr(engine, "memory_maps"):  # not every system tells what is mapped
            front = psutil.Process(server.process.pid)
            names, computing = (
                {part for one in process.memory_maps() for part in Path(one.path).parts}
                for process in (front, engine)
            )
            assert not names & {"mlx", "mlx_lm", "llguidance"}
            assert "mlx" in computing
        server.process.kill()
        wait_until(
            lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE,
            "the engine process has ended",
        )
