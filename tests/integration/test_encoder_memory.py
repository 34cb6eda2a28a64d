"""An encoder's daemon holds as much memory after many requests as after the first ones."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from support.checkpoints.tiny_encoder import write_tiny_embedder
from support.clients.encoder_load import LEFT, EncoderLoad
from support.clocks.polling import wait_until
from support.daemon.engine_processes import engine_of
from support.daemon.scraping import is_idle, scrape
from support.daemon.serve_process import ServeProcess

_WARM_ROUNDS = 2
_MAX_NEW_DESCRIPTORS = 2


@pytest.mark.parametrize(
    ("rounds", "round_requests", "max_growth_bytes"),
    [
        pytest.param(2, 500, 4_000_000, id="a-thousand"),
        # An object of 80 bytes a request would be as much.
        pytest.param(100, 1000, 8_000_000, id="a-hundred-thousand", marks=pytest.mark.longest),
    ],
)
def test_memory_stays_level_over_requests_of_many_shapes(
    tmp_path: Path, rounds: int, round_requests: int, max_growth_bytes: int
) -> None:
    """Front and engine process, while texts of all lengths come, some are refused, and some clients leave midway.

    ``MACHD_ENCODER_MODEL`` names another checkpoint than the tiny one.
    """
    model = os.environ.get("MACHD_ENCODER_MODEL") or str(write_tiny_embedder(tmp_path / "tiny"))
    with ServeProcess(
        model, "--cache-vectors-mb", "1", "--limits-long-input-policy", "truncate"
    ) as server:
        front, engine = psutil.Process(server.process.pid), engine_of(server.process.pid)
        load = EncoderLoad(server.url)

        def readings() -> dict[str, float]:
            wait_until(lambda: is_idle(server.url), "all requests have ended")
            return {
                "front": front.memory_info().rss,
                "engine": engine.memory_info().rss,
                "descriptors": front.num_fds() + engine.num_fds(),
                "threads": front.num_threads() + engine.num_threads(),
            }

        before = dict[str, float]()
        for number in range(_WARM_ROUNDS + rounds):
            if number == _WARM_ROUNDS:
                before = readings()
            load.run(round_requests, seed=number)
            server.take_lines()
        after = readings()
        open_requests = scrape(server.url, "machd_generations_open")
        kept_bytes = scrape(server.url, "machd_encoder_cache_bytes")

    grown = {name: after[name] - before[name] for name in before}
    assert max(grown["front"], grown["engine"]) < max_growth_bytes, grown
    assert max(grown["descriptors"], grown["threads"]) <= _MAX_NEW_DESCRIPTORS, grown
    assert set(load.outcomes) == {200, 400, LEFT}
    assert open_requests == 0
    assert 0 < kept_bytes <= 1_000_000
