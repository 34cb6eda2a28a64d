"""SIGTERM to a real process with open streams: they end well, and it leaves in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.clients.raw_client import RawClient
from support.daemon.service_daemon import STEP_S, ServiceDaemon
from support.engines.dialogue import completion, sse_data, sse_text

_AT_A_TIME = 2
_STREAMS = 8
_TOKENS = 150


def _stop_with_open_streams(trial: int) -> int:
    """Stop a process while it writes eight streams, which have all the time; returns its exit code."""
    with ServiceDaemon() as daemon, ExitStack() as stack:
        url = daemon.read_url()
        streams = [stack.enter_context(RawClient(url)) for _ in range(_STREAMS)]
        for i, stream in enumerate(streams):
            body = completion(f"trial {trial} {i}", max_tokens=_TOKENS, stream=True)
            stream.post_json("/v1/completions", body)
        for stream in streams:
            stream.read_until(b'"text"')
        daemon.terminate()
        for stream in streams:
            body_bytes = stream.read_answer().body  # sse_data demands [DONE] at its end
            assert all("error" not in event for event in sse_data(body_bytes))
            assert len(sse_text(body_bytes)) == _TOKENS
        return daemon.wait()


@pytest.mark.parametrize("trials", [2, pytest.param(50, marks=pytest.mark.long)])
def test_streams_that_fit_the_deadline_end_well(trials: int) -> None:
    """Every stream of every trial is whole, and the exit code is 0 as soon as the last one has ended."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        assert set(pool.map(_stop_with_open_streams, range(trials))) == {0}


def test_streams_that_do_not_fit_are_ended_at_the_deadline() -> None:
    """Streams of a minute end early, with the error event and [DONE], and the exit code is 0."""
    flags = {"limits.drain_timeout_s": 0.5}
    with ServiceDaemon(flags) as daemon, ExitStack() as stack:
        url = daemon.read_url()
        streams = [stack.enter_context(RawClient(url)) for _ in range(_STREAMS)]
        for i, stream in enumerate(streams):
            tokens = round(60 / STEP_S)
            body = completion(f"long {i}", max_tokens=tokens, stream=True)
            stream.post_json("/v1/completions", body)
        for stream in streams:
            stream.read_until(b'"text"')
        daemon.terminate()
        for stream in streams:
            events = sse_data(stream.read_answer().body)
            assert events[-1]["error"]["code"] == "drain_deadline"
        assert daemon.wait() == 0
