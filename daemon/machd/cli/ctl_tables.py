"""The tables of ``machd ctl``: 80 columns, and no colour in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import click
import msgspec
from rich.table import Table
from rich.text import Text

from machd.admin.event_feed import AdminEvent
from machd.admin.status import (
    AdminStatus,
    KvStatus,
    ModelSummary,
    ModeStatus,
    RankStatus,
    SpeculationStatus,
)
from machd.admin.warming import WarmedPrompt
from machd.cli.ctl_text import counted, plain, print_lines, table_lines
from machd.clock import SystemClock
from machd.engine.protocol.memory import MediaReading
from machd.link.kv_memory import KvMemory
from machd.scheduler.prefix_limits import PrefixReading
from machd.served.cache_stats import CacheStats, DiskStats, ExpertBankStats
from machd.served.vector_cache import VectorReading

_STATE_STYLES = {
    "ready": "bold green",
    "restarting": "bold yellow",
    "leaving": "bold yellow",
    "draining": "bold yellow",
    "failed": "bold red",
}
_WORDS = {"MODEL", "STATE", "MODE", "PROMPT", "PHASE", "END"}
_MB = 1_000_000
_LARGEST_MB = 1000
"""From here on a size is shown in GB."""


def print_status(status: AdminStatus) -> None:
    """Write a line for each thing."""
    print_lines(_status_lines(status))


def print_cache(stats: CacheStats) -> None:
    """Write a line for each thing that is kept."""
    print_lines(_cache_lines(stats))


def print_warmed(warmed: Sequence[tuple[str, WarmedPrompt]]) -> None:
    """Write a line for each prompt under its name, and one for all of them together."""
    table = words_table("PROMPT", "TOKENS", "CACHED", "TIME")
    table.add_column(overflow="fold")
    for name, one in warmed:
        failure = plain("" if one.error is None else one.error.message, "red")
        table.add_row(plain(name), *_warmed_cells([one]), failure)
    table.add_row(plain("all"), *_warmed_cells([one for _, one in warmed]), plain(""))
    click.echo("\n".join(table_lines(table)), color=True)


def words_table(*names: str) -> Table:
    """A table under these headings, words on the left and numbers on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in _WORDS else "right")
    return table


def request_counts(running: int, waiting: int) -> str:
    """Open requests, as the status and the list of them count alike."""
    return f"{running + waiting} open: {running} running, {waiting} waiting"


def shown_size(size_bytes: int) -> str:
    """Bytes for a person, in MB or GB of powers of ten."""
    size_mb = size_bytes / _MB
    return f"{size_mb:.1f} MB" if round(size_mb, 1) < _LARGEST_MB else f"{size_mb / 1000:.2f} GB"


def event_line(event: AdminEvent, time_of_day: str) -> str:
    """One event as one line: when, what, and its facts.

    A request's only or first sequence goes by the request's id.
    """
    facts = msgspec.structs.asdict(event)
    del facts["at"]
    if "sequence_id" in facts:
        facts = {"request_id": facts.pop("sequence_id").removesuffix("/0"), **facts}
    told = " ".join(
        f"{name}={_fact(value)}"
        for name, value in facts.items()
        if value is not None and value is not msgspec.UNSET
    )
    return f"{time_of_day} {event.__struct_config__.tag:<9} {told}"


def _status_lines(status: AdminStatus) -> Iterator[tuple[str, Text | str]]:
    yield "state", _state(status)
    yield "up", f"{duration(status.uptime_s)}, machd {status.version}"
    yield "model", status.model or "loading"
    if status.decode_mode is not None:
        yield "decode mode", _mode(status.decode_mode)
    if status.speculation is not None:
        yield "speculation", _speculation(status.speculation)
    yield "requests", request_counts(status.running_requests, status.waiting_requests)
    slots = counted(status.slots, "slot")
    yield "sequences", f"{status.running} running in {slots}, {status.waiting} waiting"
    yield "speed", f"{status.tokens_per_s:.1f} tokens/s over the last ten seconds"
    if status.kv is not None:
        yield "KV cache", _kv_line(status.kv) + _quantised(status.kv)
    if status.cache is not None:
        yield from _kept_lines(status.cache)
    responses = status.responses
    yield "responses", f"{responses.count} stored, {shown_size(responses.size_bytes)}"
    lag_ms = status.event_loop_lag_s * 1000
    yield "engine", f"heartbeat {status.heartbeat_age_s:.1f} s ago; event loop {lag_ms:.0f} ms late"
    yield from map(_rank_line, status.ranks)
    yield "settings", _settings(status)
    if status.config.overrides:
        keys = ", ".join(status.config.overrides)
        yield "overrides", f"{keys}; changed over the admin API, until the next reload"
    yield from map(_model_line, status.models or ())
    yield "faults", f"{status.faults.row} of sequences, {status.faults.engine} of the engine"
    if status.faults.engine_restarts:
        yield "restarts", f"{status.faults.engine_restarts} of the engine process"


def _rank_line(rank: RankStatus) -> tuple[str, str]:
    held, left = shown_size(rank.active_bytes), shown_size(rank.available_bytes)
    return f"rank {rank.rank}", f"{held} held, {left} left; {rank.heartbeat_age_s:.1f} s ago"


def _model_line(model: ModelSummary) -> tuple[str, str]:
    """One of several models; the label is short, as names may be long."""
    pinned = ", pinned" if model.pinned else ""
    held = f", held by {counted(model.leases, 'request')}" if model.leases else ""
    return "of models", f"{model.name}: {model.state}{pinned}{held}"


def _kept_lines(stats: CacheStats) -> Iterator[tuple[str, str]]:
    """List what is kept between requests, a line for each cache that the daemon has."""
    yield "prefix cache", _kept(stats.prefix)
    if stats.disk is not None:
        yield "disk", _on_disk(stats)
    if stats.expert_bank is not None:
        yield "experts", _bank_line(stats.expert_bank)
    if stats.encoder is not None:
        yield "images", _encoder_line(stats.encoder)
    if stats.vectors is not None:
        yield "vectors", _vectors_line(stats.vectors)


def _cache_lines(stats: CacheStats) -> Iterator[tuple[str, str]]:
    prefix = stats.prefix
    yield "prefix cache", _kept(prefix)
    if prefix is not None:
        hits, partly = counted(prefix.hits, "hit"), counted(prefix.prefix_hits, "prefix hit")
        misses = f"{prefix.misses} {'miss' if prefix.misses == 1 else 'misses'}"
        yield "prompts", f"{prefix.queries} looked up: {hits}, {partly}, {misses}"
        shared = f"{counted(prefix.shared_blocks, 'shared block')}, {prefix.pinned_blocks} in use"
        yield "texts", f"{prefix.entries} in {counted(prefix.blocks, 'block')}; {shared}"
        yield "sharing", f"saves {shown_size(prefix.bytes_saved)}"
        yield "evictions", counted(prefix.evictions, "block")
    yield "disk", _on_disk(stats)
    if stats.disk is not None:
        yield "since start", _disk_traffic(stats.disk)
    if stats.expert_bank is not None:
        yield "experts", _bank_line(stats.expert_bank)
    if stats.encoder is not None:
        yield "images", _encoder_line(stats.encoder)
    if stats.vectors is not None:
        yield "vectors", _vectors_line(stats.vectors)
    yield "KV cache", _kv_line(stats.kv)
    stale = "" if stats.status == "ok" else "; a generation runs, and what it changes shows later"
    yield "as of", f"{_moment(stats.as_of)}{stale}"


def _kv_line(kv: KvMemory) -> str:
    used, reserved = shown_size(kv.used_bytes), shown_size(kv.reserved_bytes)
    return f"{used} used, {reserved} reserved of {shown_size(kv.budget_bytes)}"


def _quantised(kv: KvStatus) -> str:
    return "" if kv.quantization == "none" else f"; kept as {kv.quantization}"


def _kept(prefix: PrefixReading | None) -> str:
    if prefix is None:
        return "off"
    limit = "" if prefix.limit_bytes is None else f" of {shown_size(prefix.limit_bytes)}"
    found = f"{prefix.hits + prefix.prefix_hits} of {counted(prefix.queries, 'prompt')} found"
    return f"{shown_size(prefix.bytes)}{limit} in {counted(prefix.blocks, 'block')}; {found}"


def _on_disk(stats: CacheStats) -> str:
    disk, prefix = stats.disk, stats.prefix
    if disk is None:
        return "none"
    count = "" if prefix is None else f" in {counted(prefix.saved_blocks, 'block')}"
    return f"{shown_size(disk.bytes)} of {shown_size(disk.budget_bytes)}{count}"


def _bank_line(bank: ExpertBankStats) -> str:
    size = f"{shown_size(bank.resident_bytes)} of {shown_size(bank.capacity_bytes)}"
    hits = "" if bank.hit_rate is None else f"; hit rate {bank.hit_rate:.0%}"
    read = f"{shown_size(bank.bytes_read)} read from disk"
    return f"{size} in {counted(bank.entries, 'expert')}{hits}; {read}"


def _vectors_line(vectors: VectorReading) -> str:
    if not vectors.limit_bytes:
        return "off"
    size = f"{shown_size(vectors.bytes)} of {shown_size(vectors.limit_bytes)}"
    found = f"{vectors.hits} of {counted(vectors.hits + vectors.misses, 'text')} found"
    return f"{size} in {counted(vectors.entries, 'text')}; {found}"


def _encoder_line(encoder: MediaReading) -> str:
    size = f"{shown_size(encoder.bytes)} in {counted(encoder.entries, 'image')}"
    encoded = f"{encoder.misses} encoded in {encoder.encoding_s:.1f} s"
    return f"{size}; {counted(encoder.hits, 'hit')}, {encoded}"


def _disk_traffic(disk: DiskStats) -> str:
    done = f"{counted(disk.written, 'block')} written to disk, {disk.loaded} read back"
    return f"{done}, {disk.dropped} not written, {disk.damaged} damaged"


def _warmed_cells(warmed: Sequence[WarmedPrompt]) -> tuple[Text, Text, Text]:
    duration_s = sum(one.duration_s for one in warmed)
    return (
        plain(str(sum(one.prompt_tokens for one in warmed))),
        plain(str(sum(one.cached_tokens for one in warmed))),
        plain(f"{duration_s:.2f} s"),
    )


def _state(status: AdminStatus) -> Text:
    state = plain(status.state, _STATE_STYLES.get(status.state, ""))
    if status.state == "draining" and status.is_held:
        return state + plain(" (by an operator; machd ctl resume ends it)")
    return state if status.reason is None else state + plain(f": {status.reason}")


def _mode(mode: ModeStatus) -> str:
    switching = f", switching to {mode.requested}" if mode.is_switching else ""
    wanted = "" if mode.requested == mode.active else f" ({mode.requested} is asked for)"
    return f"{mode.active}{switching or wanted}: {mode.reason}"


def _speculation(speculation: SpeculationStatus) -> str:
    if speculation.mode == "off":
        return f"off: {speculation.reason}"
    right = "nothing drafted yet"
    if speculation.acceptance is not None:
        drafts = counted(speculation.drafted_tokens, "draft token")
        right = f"{speculation.acceptance:.0%} of {drafts} accepted"
    if speculation.fallbacks:
        right += f"; failed for {counted(speculation.fallbacks, 'sequence')}, as the log says"
    return f"{speculation.mode}, {speculation.max_draft_tokens} ahead at most: {right}"


def _settings(status: AdminStatus) -> Text:
    change = status.config
    if not change.ok:
        text = f"{change.kind} at {_moment(change.at)} was refused: {'; '.join(change.problems)}"
        return plain(text, "yellow")
    changed = f"; changed {', '.join(change.changed)}" if change.changed else ""
    return plain(f"as of the {change.kind} at {_moment(change.at)}{changed}")


def _moment(at: str) -> str:
    """A moment in RFC 3339 as this machine's time of day, and how long ago it was."""
    moment = datetime.fromisoformat(at)
    ago = duration(max(0.0, SystemClock().unix_s() - moment.timestamp()))
    return f"{moment.astimezone():%H:%M:%S} ({ago} ago)"


def duration(seconds: float) -> str:
    """Seconds for a person, in the two largest units."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _fact(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
