"""A slot without a client: the engine's count does not show it, the service's does."""

from __future__ import annotations

import itertools
import threading

from support.clients.raw_client import RawClient
from support.clocks.polling import wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import completion
from support.engines.fake_engine import FakeEngine

_STEPS = 3
"""Before the engine hangs: enough for a token."""
_HANGS_S = 30.0


def test_a_slot_without_a_reader_shows() -> None:
    """MachdSlotLeak fires when a request's client has left and the engine still computes it."""
    steps_left, may_go_on = itertools.count(_STEPS, -1), threading.Event()

    def before_step(_plan: object) -> None:
        assert next(steps_left) > 0 or may_go_on.wait(_HANGS_S), "the test lets it go on"

    with RunningDaemon(lambda: FakeEngine(before_step=before_step)) as daemon:

        def read(name: str, **labels: str) -> float:
            return scrape(daemon.url, name, **labels)

        try:
            assert read("machd_generations_open") == 0
            with RawClient(daemon.url) as client:
                body = completion("hi", max_tokens=2000, temperature=0, ignore_eos=True)
                client.post_json("/v1/completions", body | {"model": "fake", "stream": True})
                client.read_until(b"data: ")
                assert read("machd_generations_open") == 1
                client.reset()
            wait_until(lambda: read("machd_generations_open") == 0, "nobody reads any more")
            assert read("machd_slots", state="occupied") == 1
            assert read("machd_requests_running") == 1, "the engine's view of the same thing"
        finally:
            may_go_on.set()
        wait_until(lambda: read("machd_slots", state="occupied") == 0, "the slot is given back")
