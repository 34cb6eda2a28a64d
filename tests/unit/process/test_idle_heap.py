"""Free heap of an idle process goes back to the system, and no request waits for that."""

from __future__ import annotations

from machd.heap import find_heap_trim
from machd.process.idle_heap import IdleHeap

_MB = 1_000_000


class _Process:
    """A process that can be idle and grow; a trim takes it back to ``kept_bytes``."""

    def __init__(self) -> None:
        self.is_idle = True
        self.resident_bytes = 300 * _MB
        self.kept_bytes = 200 * _MB
        self.trims = 0
        self.heap = IdleHeap(
            lambda: self.is_idle,
            trim=self._trim,
            read_resident_bytes=lambda: self.resident_bytes,
        )

    def _trim(self) -> None:
        self.trims += 1
        self.resident_bytes = self.kept_bytes


async def test_heap_is_trimmed_when_no_request_was_open_at_two_looks() -> None:
    """The first look at an idle process only notes it; the second one trims."""
    process = _Process()
    await process.heap.look()
    assert process.trims == 0
    await process.heap.look()
    assert process.trims == 1


async def test_heap_is_left_alone_when_a_request_is_open() -> None:
    """Growth while requests are open is not touched, and idleness is counted anew after it."""
    process = _Process()
    for is_idle in (False, True, False, True, False):
        process.is_idle = is_idle
        await process.heap.look()
    assert process.trims == 0


async def test_heap_is_trimmed_again_only_after_growth() -> None:
    """An idle process that does not grow is trimmed once; 32 MB more are worth another trim."""
    process = _Process()
    for _ in range(5):
        await process.heap.look()
    assert process.trims == 1
    process.resident_bytes += 31 * _MB
    await process.heap.look()
    assert process.trims == 1
    process.resident_bytes += 1 * _MB
    await process.heap.look()
    assert process.trims == 2


async def test_growth_is_counted_from_the_smallest_size_since_the_last_trim() -> None:
    """Memory that was given back by other means is not set off against later growth."""
    process = _Process()
    for _ in range(2):
        await process.heap.look()
    process.resident_bytes = 150 * _MB
    await process.heap.look()
    process.resident_bytes = 182 * _MB
    await process.heap.look()
    assert process.trims == 2


async def test_watch_returns_at_once_when_the_c_library_cannot_trim() -> None:
    """Where nothing can be trimmed, nothing is watched."""
    heap = IdleHeap(lambda: True)
    heap._trim = None
    await heap.watch()


def test_trim_is_found_or_known_to_be_missing() -> None:
    """What is found can be called; None is an answer as well."""
    trim = find_heap_trim()
    if trim is not None:
        trim()
