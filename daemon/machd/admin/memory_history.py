"""Memory of the models, of machd's processes and of the machine, sampled over the last hour."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from machd.clock import Clock
from machd.process.machine_memory import MachineMemory
from machd.served.served_model import ServedModel

SAMPLE_INTERVAL_S = 10.0
"""Time between two points of the history."""

MAX_SAMPLES = 360
"""Points of the history: an hour."""


class MemorySample(Struct, frozen=True, kw_only=True):
    """Memory at one moment.

    Attributes:
        at: Seconds since 1970.
        weights_bytes: Of the loaded models.
        kv_used_bytes: Keys, values and state of running sequences.
        kv_reserved_bytes: What is promised to them; 0 in single flight.
        kv_budget_bytes: What they may have together.
        prefix_bytes: Blocks of the prefix caches in memory.
        buffers_bytes: Freed memory that the array library keeps for reuse.
        process_bytes: Resident in all of machd's processes, shared pages counted for each.
        available_bytes: What programs may still take without swapping.
        total_bytes: Of the machine.
        swap_used_bytes: Of the machine.
        pressure: Share of the last ten seconds in which a process waited for memory, in percent; null where the system
            does not tell it, as macOS.
    """

    at: float
    weights_bytes: int
    kv_used_bytes: int
    kv_reserved_bytes: int
    kv_budget_bytes: int
    prefix_bytes: int
    buffers_bytes: int
    process_bytes: int
    available_bytes: int
    total_bytes: int
    swap_used_bytes: int
    pressure: float | None


class MemoryHistory:
    """Samples memory and keeps an hour of it. Lives on the event loop; the system is read on a worker thread."""

    def __init__(
        self,
        served: Callable[[], Iterable[ServedModel]],
        clock: Clock,
        read: Callable[[], MachineMemory] = MachineMemory.read,
    ) -> None:
        """Begin with no sample.

        Args:
            served: Reads the models.
            clock: Reads time.
            read: Reads the machine's memory; may take a millisecond.
        """
        self._served = served
        self._clock = clock
        self._read = read
        self._machine = MachineMemory()
        self.samples: deque[MemorySample] = deque(maxlen=MAX_SAMPLES)

    @property
    def now(self) -> MemorySample:
        """The models' memory now, and the machine's as it was last read."""
        models = [one for one in self._served() if one.state is not None]
        snapshots = [one.snapshot for one in models]
        kv = [one.kv for one in models]
        machine = self._machine
        return MemorySample(
            at=round(self._clock.unix_s(), 3),
            weights_bytes=sum(one.model.weights_bytes for one in models),
            kv_used_bytes=sum(one.used_bytes for one in kv),
            kv_reserved_bytes=sum(one.reserved_bytes for one in kv),
            kv_budget_bytes=sum(one.budget_bytes for one in kv),
            prefix_bytes=sum(one.prefix.bytes for one in snapshots if one.prefix is not None),
            buffers_bytes=sum(one.memory.cache_bytes for one in snapshots),
            process_bytes=machine.process_bytes,
            available_bytes=machine.available_bytes,
            total_bytes=machine.total_bytes,
            swap_used_bytes=machine.swap_used_bytes,
            pressure=machine.pressure,
        )

    def held_bytes(self, model: ServedModel) -> int | None:
        """Memory that a model's engine process held when the machine's was last read; None where that is not known.

        CUDA's device memory is not the process's own: what the array library holds there is added.
        """
        pid, state = model.link.pid, model.state
        held = None if pid is None else self._machine.held_bytes.get(pid)
        if held is None or state is None or state.model.backend != "cuda":
            return held
        memory = model.snapshot.memory
        return held + memory.active_bytes + memory.cache_bytes

    async def refresh(self) -> None:
        """Read the machine's memory."""
        self._machine = await asyncio.to_thread(self._read)

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.refresh()
            self.samples.append(self.now)
            await asyncio.sleep(SAMPLE_INTERVAL_S)
