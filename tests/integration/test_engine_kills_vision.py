"""Answers to images are the same whatever becomes of the processes that encode them and compute."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.clients.four_dialects import ask_streams_and_whole, image_questions
from support.clients.image_files import encoded, picture
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.beyond_limit import TOLD
from support.daemon.engine_kills import EngineKills, assert_answers_stay
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

from machd.user_directories import user_cache_directory
from machd_probes.vision_families.checkpoint import write_family

_MAX_PIXELS = 300_000
"""Many more than the family's checkpoint has, so that the tiny model encodes for a while."""


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("kills")
    checkpoint = write_family("qwen2_vl", folder / "qwen2_vl", user_cache_directory(os.environ))
    processor = checkpoint / "preprocessor_config.json"
    settings = {**json.loads(processor.read_text()), "max_pixels": _MAX_PIXELS}
    processor.write_text(json.dumps(settings))
    flags = ("--model-dtype=float32", "--continuous-batching", "--probe-on-start=off")
    stall = "--engine-stall-timeout-s=10"
    with ServeProcess(str(checkpoint), *flags, stall, environ=TOLD) as server:
        yield server


def _png(seed: int, *, side: int = 252) -> bytes:
    return encoded(picture(seed=seed, width=side, height=side), "PNG")


@pytest.mark.long  # the test below has images in every run, test_engine_kills.py the dialects
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "streams", "whole", "longest_tokens"),
    [
        pytest.param(1, 1, 3, 80, id="1"),
        pytest.param(16, 2, 7, 160, id="16", marks=pytest.mark.longest),
    ],
)
def test_answers_to_images_are_those_of_a_daemon_left_alone(
    server: ServeProcess, kills: int, streams: int, whole: int, longest_tokens: int
) -> None:
    """Streams and plain requests of images and text, in four dialects, token for token and with the same usage."""
    pictures = [_png(seed) for seed in range(6)]
    asked = image_questions("qwen2_vl", pictures, longest_tokens=longest_tokens)
    killed = EngineKills(server, seed=kills, max_pause_s=0.3)
    with ThreadPoolExecutor(21) as pool:
        ask = partial(ask_streams_and_whole, server.url, asked, pool, streams=streams, whole=whole)
        assert_answers_stay(killed, ask, kills, are_caches_cold=True)


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.longest)])
def test_an_image_is_encoded_again_when_the_engine_process_is_killed_meanwhile(
    server: ServeProcess, kills: int
) -> None:
    """No client notices, whatever share of the encoding was done."""
    large = _png(100 + kills, side=700)
    (question, *_) = image_questions("qwen2_vl", [large] * 6, longest_tokens=40)
    source, killed = random.Random(kills), EngineKills(server, seed=kills, max_pause_s=0.0)
    before_s = scrape(server.url, "machd_encoder_seconds_total")
    expected = question.ask_streamed(server.url)
    encoding_s = scrape(server.url, "machd_encoder_seconds_total") - before_s
    with ThreadPoolExecutor(1) as pool:
        for _ in range(kills):
            killed.end_one()
            answer = pool.submit(question.ask_streamed, server.url)
            wait_until(lambda: scrape(server.url, "machd_requests_running") > 0, "it has a slot")
            time.sleep(source.random() * encoding_s * 0.8)
            killed.end_one()
            assert answer.result(CEILING_S) == expected
    assert killed.restarts == killed.count
