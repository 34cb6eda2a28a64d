"""``machd ctl`` shows speculation in a line of the status and in lines of events."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from machd.admin.event_feed import ModeChanged, StepComputed
from machd.admin.open_requests import OpenRequest
from machd.admin.status import (
    AdminStatus,
    ConfigStatus,
    Faults,
    SpeculationStatus,
    StoredResponses,
)
from machd.cli.ctl_tables import event_line, print_cache, print_status
from machd.cli.ctl_watching import print_requests
from machd.engine.protocol.memory import MediaReading
from machd.engine.protocol.step import ProposerKind
from machd.link.kv_memory import KvMemory
from machd.process.configuration import ChangeKind
from machd.process.lifecycle import State
from machd.scheduler.events import DecodeMode
from machd.served.cache_stats import CacheStats, ExpertBankStats

_OFF = SpeculationStatus(
    mode=ProposerKind.OFF,
    reason="speculation.mode is off",
    max_draft_tokens=0,
    cycles=0,
    drafted_tokens=0,
    accepted_tokens=0,
    acceptance=None,
    fallbacks=0,
)
_NEW = msgspec.structs.replace(_OFF, mode=ProposerKind.NGRAM, reason="auto", max_draft_tokens=8)
_USED = msgspec.structs.replace(
    _NEW, cycles=300, drafted_tokens=1000, accepted_tokens=620, acceptance=0.62
)


_OPEN = OpenRequest(
    id="chatcmpl-1",
    request_id="req-1",
    endpoint="chat_completions",
    client="anonymous",
    state="running",
    phase="prefill",
    age_s=1.0,
    ttft_s=None,
    prompt_tokens=35,
    prefilled_tokens=0,
    completion_tokens=0,
    decode_mode=None,
)
_CACHE = CacheStats(
    status="ok",
    as_of="2026-01-01T00:00:00.000+00:00",
    kv=KvMemory(budget_bytes=0, reserved_bytes=0, used_bytes=0),
    encoder=MediaReading(entries=3, bytes=12_000_000, hits=9, misses=4, encoding_s=2.51),
    expert_bank=ExpertBankStats(
        capacity_bytes=2_000_000_000,
        resident_bytes=1_500_000_000,
        entries=160,
        hits=900,
        misses=100,
        evictions=40,
        hit_rate=0.9,
        bytes_read=7_000_000_000,
        read_ahead_hits=60,
    ),
)


def _status(speculation: SpeculationStatus | None) -> AdminStatus:
    return AdminStatus(
        state=State.READY,
        is_held=False,
        reason=None,
        open_requests=0,
        version="1",
        uptime_s=1.0,
        model="m",
        decode_mode=None,
        slots=1,
        running=0,
        waiting=0,
        tokens_per_s=0.0,
        kv=None,
        cache=None,
        responses=StoredResponses(count=0, size_bytes=0),
        heartbeat_age_s=0.0,
        event_loop_lag_s=0.0,
        config=ConfigStatus(
            kind=ChangeKind.START,
            at="2026-11-22T08:00:00+00:00",
            ok=True,
            changed=[],
            problems=[],
            overrides=[],
        ),
        faults=Faults(row=0, engine=0),
        speculation=speculation,
    )


def _line(speculation: SpeculationStatus | None, capsys: pytest.CaptureFixture[str]) -> str:
    print_status(_status(speculation))
    lines = capsys.readouterr().out.splitlines()
    return next((line for line in lines if line.startswith("speculation")), "")


@pytest.mark.parametrize(
    ("speculation", "shown"),
    [
        (_OFF, "off: speculation.mode is off"),
        (_NEW, "ngram, 8 ahead at most: nothing drafted yet"),
        (_USED, "ngram, 8 ahead at most: 62% of 1000 draft tokens accepted"),
    ],
    ids=["off", "new", "used"],
)
def test_the_status_shows_the_proposer_and_its_acceptance(
    speculation: SpeculationStatus, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason for no proposer, or the share of accepted drafts."""
    assert _line(speculation, capsys).removeprefix("speculation").strip() == shown


def test_failures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The status refers to the log."""
    print_status(_status(msgspec.structs.replace(_USED, fallbacks=2)))
    text = " ".join(capsys.readouterr().out.split())
    assert "failed for 2 sequences, as the log says" in text


def test_while_the_model_loads_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    """No line, as of the decode mode."""
    assert _line(None, capsys) == ""


def test_an_older_daemon_can_be_asked() -> None:
    """Missing fields are left out instead of making the answer unreadable."""
    wire = msgspec.to_builtins(_status(None))
    del wire["speculation"]
    assert msgspec.convert(wire, AdminStatus).speculation is None


def test_events_show_hand_overs_and_drafts() -> None:
    """One line each, like every other event."""
    changed = ModeChanged(at=1.0, previous=DecodeMode.SPECULATIVE, mode=DecodeMode.BATCHED)
    assert event_line(changed, "08:00") == "08:00 mode      previous=speculative mode=batched"
    step = StepComputed(
        at=1.0,
        width=1,
        prefill_tokens=0,
        forced_tokens=0,
        drafted_tokens=8,
        accepted_tokens=3,
        duration_s=0.5,
    )
    assert "drafted_tokens=8 accepted_tokens=3" in event_line(step, "08:00")


def test_status_and_list_of_requests_count_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Both count requests, of which a sequence runs or none does; sequences have a line of their own."""
    states: tuple[Literal["running", "waiting"], ...] = ("running", "running", "waiting")
    print_requests([msgspec.structs.replace(_OPEN, state=state) for state in states])
    *_, listed = capsys.readouterr().out.splitlines()
    status = msgspec.structs.replace(
        _status(None), open_requests=3, running_requests=2, waiting_requests=1, running=4, slots=4
    )
    print_status(status)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    assert listed == "3 open: 2 running, 1 waiting"
    assert f"requests {listed}" in told
    assert "sequences 4 running in 4 slots, 0 waiting" in told


def test_status_shows_the_bank_of_experts_and_the_encoder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is kept beside keys and values decides about memory and speed too."""
    print_status(msgspec.structs.replace(_status(None), cache=_CACHE))
    told = " ".join(capsys.readouterr().out.split())

    assert "experts 1.50 GB of 2.00 GB in 160 experts; hit rate 90%" in told
    assert "images 12.0 MB in 3 images; 9 hits" in told


def test_cache_table_shows_the_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    """One line has what is kept, how often it was of use, and what encoding took."""
    print_cache(_CACHE)
    text = " ".join(capsys.readouterr().out.split())
    assert "images 12.0 MB in 3 images; 9 hits, 4 encoded in 2.5 s" in text


def test_cache_table_shows_the_expert_bank(capsys: pytest.CaptureFixture[str]) -> None:
    """One line has the bank's size, its hit rate and what was read from disk."""
    print_cache(_CACHE)
    text = " ".join(capsys.readouterr().out.split())
    assert "experts 1.50 GB of 2.00 GB in 160 experts; hit rate 90%; 7.00 GB read from disk" in text
