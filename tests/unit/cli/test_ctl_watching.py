"""``machd ctl requests``, ``memory`` and ``log`` print what the daemon answers, and only as text."""

from __future__ import annotations

import msgspec
import pytest

from machd.admin.finished_requests import FinishedRequest
from machd.admin.memory import MemoryReport
from machd.admin.memory_history import MemorySample
from machd.admin.open_requests import OpenRequest
from machd.cli.ctl_watching import print_finished, print_log, print_memory, print_requests
from machd.link.logged_event import LoggedEvent
from machd.scheduler.events import DecodeMode
from machd.scheduler.waits import WaitReason

_OPEN = OpenRequest(
    id="chatcmpl-1",
    request_id="req-1",
    endpoint="chat_completions",
    client="anonymous",
    state="running",
    phase="prefill",
    age_s=1.0,
    prompt_tokens=2000,
    prefilled_tokens=500,
    prefill_tokens_per_s=250.0,
    prefill_left_s=6.0,
    decode_mode=DecodeMode.BATCHED,
    adapter="style",
)
_SAMPLE = MemorySample(
    at=1000.0,
    weights_bytes=98_000_000,
    kv_used_bytes=1_000_000,
    kv_reserved_bytes=2_000_000,
    kv_budget_bytes=10_000_000_000,
    prefix_bytes=3_000_000,
    buffers_bytes=4_000_000,
    process_bytes=500_000_000,
    available_bytes=16_000_000_000,
    total_bytes=25_000_000_000,
    swap_used_bytes=0,
    pressure=None,
)


def test_an_open_request_shows_its_phase_and_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a prompt the tokens and the time that are left; of a waiting request what it waits for."""
    waiting = msgspec.structs.replace(
        _OPEN,
        state="waiting",
        phase="waiting",
        waits_for=WaitReason.MEMORY,
        prefilled_tokens=0,
        prefill_left_s=None,
    )
    print_requests([_OPEN, waiting])
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "PHASE AGE TTFT PROMPT LEFT DONE TOKENS/S"
    assert told[1] == "prefill 1.0 s - 500/2000 6.0 s 0 250.0"
    assert told[3] == "chat_completions, anonymous, req-1, batched, adapter style"
    assert told[4].startswith("waiting: memory 1.0 s - 0/2000 - 0 -")
    assert told[-1] == "2 open: 1 running, 1 waiting"


def test_a_finished_request_shows_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """The code of its error in place of the reason, where it has one."""
    one = FinishedRequest(
        id="chatcmpl-1",
        request_id="req-1",
        endpoint="chat_completions",
        client="alice",
        model="m",
        adapter="style",
        finished_at="2026-01-01T00:00:00.000+00:00",
        finish_reason="abort",
        error="operator_abort",
        queue_ms=10.0,
        ttft_ms=None,
        latency_ms=2500.0,
        prompt_tokens=35,
        cached_tokens=34,
        cache_reason=None,
        cache_parted_at_tokens=None,
        normalised=[],
        completion_tokens=0,
        prompt_tps=None,
        generation_tps=None,
        decode_mode=None,
    )
    print_finished([one])
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told[1] == "operator_abort 0.01 s - 2.50 s 35 34 0 -"
    assert told[3].endswith("chat_completions, alice, req-1, m:style")
    print_finished([])
    assert capsys.readouterr().out == "no request has ended yet\n"


def test_memory_shows_the_extremes_of_its_history(capsys: pytest.CaptureFixture[str]) -> None:
    """What there is now says little about what there was a minute ago."""
    before = msgspec.structs.replace(
        _SAMPLE, at=940.0, process_bytes=900_000_000, available_bytes=1_000_000_000
    )
    print_memory(MemoryReport(now=_SAMPLE, history=[before]))
    told = " ".join(capsys.readouterr().out.split())
    assert "processes 500.0 MB; at most 900.0 MB" in told
    assert "available 16.00 GB of 25.00 GB; at least 1.00 GB" in told
    assert "pressure not told by this system" in told
    assert "history of 1 min 0 s" in told


def test_a_line_of_the_log_is_only_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What a library writes may hold control characters, which a terminal would obey."""
    event = LoggedEvent(
        timestamp="2026-01-01T00:00:00.000+00:00",
        level="warning",
        logger="some.library",
        event="red \x1b[31m text\nand more",
        model="m",
        fields={"count": "3"},
    )
    print_log([event])
    (line,) = capsys.readouterr().out.splitlines()
    assert "\x1b" not in line
    assert " warning  red " in line
    assert line.endswith("model=m count=3")
    print_log([])
    assert capsys.readouterr().out == "no event has been logged\n"
