"""The finished requests that are kept: bounded, and with the numbers of their log lines."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from support.clocks.manual_clock import ManualClock
from support.daemon.busy_metrics import RECORD

from machd.admin.finished_requests import MAX_FINISHED, FinishedRequest, FinishedRequests


def test_only_the_newest_are_kept_and_the_newest_is_first() -> None:
    """Memory does not grow with the requests that there were."""
    finished = FinishedRequests(ManualClock())
    for number in range(MAX_FINISHED + 50):
        finished.on_request(replace(RECORD, generation_id=f"gen-{number}"))
    kept = finished.newest_first
    assert len(kept) == MAX_FINISHED
    assert kept[0].id == f"gen-{MAX_FINISHED + 49}"
    assert kept[-1].id == "gen-50"


def test_a_finished_request_has_the_numbers_of_its_record() -> None:
    """Rounded as the log line rounds them, with the moment of its end."""
    told: list[FinishedRequest] = []
    finished = FinishedRequests(ManualClock(86400.5), told.append)
    finished.on_request(
        replace(
            RECORD,
            generation_id="gen-1",
            adapter="style",
            first_prompt_tokens=110,
            first_cached_tokens=10,
            queue_s=0.0123,
            prefill_s=0.5,
            ttft_s=0.51234,
            decode_s=2.0,
            duration_s=2.51267,
            completion_tokens=21,
            error_code="operator_abort",
        )
    )
    (one,) = finished.newest_first
    assert told == [one]
    shown = msgspec.to_builtins(one)
    assert shown["finished_at"] == "1970-01-02T00:00:00.500+00:00"
    assert (shown["id"], shown["adapter"], shown["error"]) == ("gen-1", "style", "operator_abort")
    assert (shown["queue_ms"], shown["ttft_ms"], shown["latency_ms"]) == (12.3, 512.3, 2512.7)
    assert (shown["prompt_tps"], shown["generation_tps"]) == (200.0, 10.0)
