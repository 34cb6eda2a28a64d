"""Samples of a daemon during a soak, and the verdict on them.

Memory is judged by medians of the middle third and the last third of all samples; the first third
is warm-up. Descriptors, threads and tasks are judged by the same medians, of idle points alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machd_bench.plot import COLOURS, GREY, saved_figure

_MAX_RSS_GROWTH = 0.03
_MAX_COUNT_GROWTH = 2
"""Descriptors, threads or tasks more at the median idle point of the last third."""

_MIN_SAMPLES = 9
_MIN_IDLE_SAMPLES = 3
_TABLE_ROWS = 60
_SIZE_INCHES = (10.0, 6.0)
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a daemon.

    Attributes:
        at_s: Seconds since the load began.
        rss_bytes: Physical memory of the process.
        heap_used_bytes: Allocated in the C library's heap; 0 where it does not say.
        heap_free_bytes: Free in that heap, given back to the system or not.
        mlx_bytes: Held by mlx.
        prefix_bytes: Held by the prefix cache.
        stored_response_bytes: Held by stored responses.
        is_idle: No request was open.
    """

    at_s: float
    rss_bytes: int
    heap_used_bytes: int
    heap_free_bytes: int
    mlx_bytes: int
    prefix_bytes: int
    stored_response_bytes: int
    descriptors: int
    threads: int
    tasks: int
    is_idle: bool


_COUNTS: dict[str, Callable[[Sample], float]] = {
    "descriptors": lambda sample: sample.descriptors,
    "threads": lambda sample: sample.threads,
    "tasks": lambda sample: sample.tasks,
}


def rss_growth(samples: Sequence[Sample]) -> float:
    """Median RSS of the last third over that of the middle third, less 1."""
    middle, last = _thirds(samples)
    return _median(last, lambda one: one.rss_bytes) / _median(middle, lambda one: one.rss_bytes) - 1


def problems(samples: Sequence[Sample]) -> list[str]:
    """Sentences that say what grew; none where nothing did."""
    found: list[str] = []
    middle, last = _thirds(samples)
    idle_middle = [sample for sample in middle if sample.is_idle]
    idle_last = [sample for sample in last if sample.is_idle]
    if min(len(middle), len(last)) < _MIN_SAMPLES // 3:
        return [f"{len(samples)} samples are too few for a verdict"]
    if min(len(idle_middle), len(idle_last)) < _MIN_IDLE_SAMPLES:
        return ["idle points are too few for a verdict"]
    growth = rss_growth(samples)
    if growth > _MAX_RSS_GROWTH:
        found.append(f"RSS grew by {growth:.1%} from the middle third to the last")
    for name, read in _COUNTS.items():
        before, after = _median(idle_middle, read), _median(idle_last, read)
        if after - before > _MAX_COUNT_GROWTH:
            found.append(f"{name} of an idle daemon grew from {before:g} to {after:g}")
    return found


def report_table(samples: Sequence[Sample]) -> str:
    """The samples as a table, thinned out to what a screen holds; memory in MB."""
    head = (
        f"{'s':>7} {'rss':>7} {'used':>7} {'free':>7} {'mlx':>7} {'prefix':>7} {'stored':>7}"
        f" {'fds':>4} {'threads':>7} {'tasks':>5} idle"
    )
    stride = max(1, len(samples) // _TABLE_ROWS)
    return "\n".join([head, *map(_row, samples[::stride])])


def write_report(samples: Sequence[Sample], summary: dict[str, object], path: Path) -> None:
    """Write ``path``.json with everything, and a picture of memory and counts as ``path``.png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {**summary, "samples": [asdict(sample) for sample in samples]}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    with saved_figure(path.with_suffix(".png"), _SIZE_INCHES) as figure:
        memory, counts = figure.subplots(2, 1, sharex=True)
        minutes = [sample.at_s / 60 for sample in samples]
        parts: dict[str, Callable[[Sample], int]] = {
            "RSS": lambda sample: sample.rss_bytes,
            "heap in use": lambda sample: sample.heap_used_bytes,
            "mlx": lambda sample: sample.mlx_bytes,
            "prefix cache": lambda sample: sample.prefix_bytes,
        }
        for colour, (label, part) in zip(COLOURS, parts.items(), strict=True):
            values = [part(sample) / _MB for sample in samples]
            memory.plot(minutes, values, color=colour, label=label)
        for third in (1, 2):
            memory.axvline(minutes[-1] * third / 3, color=GREY, linestyle="--", linewidth=1)
        memory.set_ylabel("MB")
        memory.legend()
        idle = [sample for sample in samples if sample.is_idle]
        for colour, (label, read) in zip(COLOURS, _COUNTS.items(), strict=False):
            values = [read(sample) for sample in idle]
            counts.plot([one.at_s / 60 for one in idle], values, color=colour, label=label)
        counts.set_ylabel("when idle")
        counts.set_xlabel("minutes")
        counts.legend()


def _thirds(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples of the middle third of the time and of the last."""
    end_s = samples[-1].at_s
    middle = [one for one in samples if end_s / 3 <= one.at_s < end_s * 2 / 3]
    return middle, [one for one in samples if one.at_s >= end_s * 2 / 3]


def _median(samples: Sequence[Sample], read: Callable[[Sample], float]) -> float:
    return statistics.median(map(read, samples))


def _row(sample: Sample) -> str:
    memory = (
        sample.rss_bytes,
        sample.heap_used_bytes,
        sample.heap_free_bytes,
        sample.mlx_bytes,
        sample.prefix_bytes,
        sample.stored_response_bytes,
    )
    megabytes = " ".join(f"{one / _MB:>7.1f}" for one in memory)
    idle = "yes" if sample.is_idle else ""
    return (
        f"{sample.at_s:>7.0f} {megabytes} {sample.descriptors:>4} {sample.threads:>7}"
        f" {sample.tasks:>5} {idle}"
    )
