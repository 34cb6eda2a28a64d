"""Thoughts are the same whatever becomes of the processes that compute them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.checkpoints.thinking_checkpoint import write_thinking_llama
from support.clients.four_dialects import ask_streams_and_whole, thoughtful_questions
from support.daemon.beyond_limit import TOLD
from support.daemon.engine_kills import EngineKills, assert_answers_stay
from support.daemon.serve_process import ServeProcess


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    checkpoint = write_thinking_llama(tmp_path_factory.mktemp("kills") / "thinking")
    flags = ("--model-dtype=float32", "--continuous-batching", "--probe-on-start=off")
    stall = "--engine-stall-timeout-s=10"
    with ServeProcess(str(checkpoint), *flags, stall, environ=TOLD) as server:
        yield server


@pytest.mark.long  # contract/test_resumed_rows.py resumes thoughts in every run, test_engine_kills.py kills processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "streams", "longest_tokens"),
    [
        pytest.param(1, 1, 120, id="1"),
        pytest.param(16, 2, 240, id="16", marks=pytest.mark.longest),
    ],
)
def test_thoughts_and_what_follows_are_those_of_a_daemon_left_alone(
    server: ServeProcess, kills: int, streams: int, longest_tokens: int
) -> None:
    """Streams and plain requests in four dialects: thoughts that a budget, the model or nothing ends, and a grammar behind."""
    asked, killed = (
        thoughtful_questions("thinking", longest_tokens=longest_tokens),
        EngineKills(server, seed=kills, max_pause_s=0.3),
    )
    with ThreadPoolExecutor(21) as pool:
        ask = partial(
            ask_streams_and_whole, server.url, asked, pool, streams=streams, whole=len(asked)
        )
        answers = assert_answers_stay(killed, ask, kills)
    whole = answers[-len(asked) :]
    assert all("thinking" in repr(one) or "reasoning" in repr(one) for one in whole)
