"""The expert bank: which experts are in memory, which are evicted, which are being read.

One bank serves the rows of all lanes. The engine thread calls it; reading threads of its own write into slots
that no computation uses.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import structlog

from machd.engine.experts.dtype_conversion import Bytes
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.slot_arrays import SlotArrays
from machd.engine.experts.stored_layer import StoredLayer
from machd.engine.experts.use_counts import Indices, UseCounts
from machd.engine.protocol.memory import ExpertReading
from machd.errors import ModelMemoryError

MAX_READ_S = 10.0
"""Time that a pass waits for one layer's reads; then the rows that need them fail. It is shorter than the default
of limits.client_stall_timeout_s, so that a stalled disk fails requests and not the daemon."""

_MAX_STALLED_READ_S = 0.1
"""The same from a timeout on until a read ends: a pass through many layers must not wait for each."""

_READERS = 4
_READAHEAD_READERS = 2
_ABSENT = -1

_MAX_READAHEAD_SHARE = 1 / 4
"""Share of a pool's slots that one layer's read-ahead may fill."""


@dataclass(slots=True)
class _Read:
    layer: int
    expert: int
    slot: int
    future: Future[int]


@dataclass(slots=True)
class _Pool:
    """The slots that all layers with equally shaped experts share.

    Attributes:
        can_evict: False if there is a slot for every expert of these layers.
        owner_layer: int64 [slots], the layer of each slot's expert; -1 for an empty slot.
        owner_expert: int64 [slots], the expert's number in its layer.
        is_pinned: bool [slots], true while a pass computes with the slot or a file is read into it.
        is_unused_readahead: bool [slots], true for an expert that was read ahead and not used since.
    """

    memory: SlotArrays
    can_evict: bool
    owner_layer: Indices = field(init=False)
    owner_expert: Indices = field(init=False)
    is_pinned: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(init=False)
    is_unused_readahead: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.memory.slots
        self.owner_layer = np.full(slots, _ABSENT)
        self.owner_expert = np.full(slots, _ABSENT)
        self.is_pinned = np.zeros(slots, dtype=np.bool_)
        self.is_unused_readahead = np.zeros(slots, dtype=np.bool_)

    def slots_to_evict(self, count: int, uses: UseCounts) -> Indices:
        """Return up to ``count`` unpinned slots: empty ones first, then by the fewest recent uses."""
        unpinned = np.flatnonzero(~self.is_pinned)
        if count >= unpinned.size:
            return unpinned
        scores = uses.scores(self.owner_layer[unpinned], self.owner_expert[unpinned])
        return unpinned[np.argpartition(scores, count)[:count]]


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    read_ahead_hits: int = 0


class ExpertBank:
    """Experts of all layers in a bounded number of slots.

    A pass uses it layer by layer: :meth:`unpin_all`, :meth:`request`, :meth:`wait`, then it computes with
    :meth:`slots`.
    """

    def __init__(
        self, layers: Sequence[StoredLayer], files: ExpertFiles, *, capacity_bytes: int
    ) -> None:
        """Allocate the memory, which layers of different shapes share in proportion to their size; the bank closes ``files``.

        Raises:
            ModelMemoryError: There is not room for one expert of each shape.
        """
        self._layers = layers
        self._files = files
        self._uses = UseCounts(layers)
        self._requested: tuple[int, frozenset[int]] = (0, frozenset())
        self._pending: dict[tuple[int, int], _Read] = {}
        self._counts = _Counts()
        self._is_stalled = False
        self._warned: set[tuple[int, int]] = set()
        self._log = structlog.get_logger("machd.engine")
        self._pools = _pools(layers, capacity_bytes)
        self._distinct_pools = list({id(pool): pool for pool in self._pools.values()}.values())
        self._slots = [np.full(layer.experts, _ABSENT) for layer in layers]
        self._tables: dict[int, mx.array] = {}
        self._readers = ThreadPoolExecutor(_READERS, "machd-experts")
        self._readahead_readers = ThreadPoolExecutor(_READAHEAD_READERS, "machd-experts-ahead")

    @property
    def layers(self) -> Sequence[StoredLayer]:
        """All layers with experts."""
        return self._layers

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots, which are allocated from the start."""
        return sum(pool.memory.nbytes for pool in self._distinct_pools)

    @property
    def fill_bytes(self) -> int:
        """Approximate bytes that :meth:`fill` reads."""
        stored = sum(one.experts * one.stored_entry_bytes for one in self._layers)
        total = sum(one.experts * one.entry_bytes for one in self._layers)
        return stored * self.capacity_bytes // total

    def close(self) -> None:
        """End all reads, and free files and memory."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._readahead_readers.shutdown(wait=True, cancel_futures=True)
        self._files.close()
        self._pools.clear()
        self._distinct_pools.clear()

    def reading(self) -> ExpertReading:
        """Return the bank's content now, and its counts since the start."""
        resident = [int(np.count_nonzero(slots >= 0)) for slots in self._slots]
        pairs = zip(resident, self._layers, strict=True)
        return ExpertReading(
            capacity_bytes=self.capacity_bytes,
            resident_bytes=sum(count * layer.entry_bytes for count, layer in pairs),
            entries=sum(resident),
            hits=self._counts.hits,
            misses=self._counts.misses,
            evictions=self._counts.evictions,
            bytes_read=self._counts.bytes_read,
            read_ahead_hits=self._counts.read_ahead_hits,
        )

    def array(self, layer: int, projection: str, parameter: str) -> mx.array | None:
        """Return a projection's parameter for all slots, [slots, *shape]; None where it has none."""
        return self._pools[layer].memory.arrays.get((projection, parameter))

    def max_experts(self, layer: int) -> int:
        """Return how many experts of a layer fit at once."""
        return self._pools[layer].memory.slots

    def slots(self, layer: int) -> Indices:
        """Return int64 [experts], the slot of each expert; -1 for one that is not in memory."""
        return self._slots[layer]

    def resident_table(self, layer: int) -> mx.array | None:
        """Return int32 [experts], the slot of each expert, if the whole layer is in memory; else None."""
        if layer not in self._tables:
            slots = self._slots[layer]
            if (slots < 0).any():
                return None
            self._tables[layer] = mx.array(slots.astype(np.int32))
        return self._tables[layer]

    def can_evict(self, layer: int) -> bool:
        """Return False if all experts that share a layer's slots are in memory for good."""
        return self._pools[layer].can_evict

    def pin_all(self, layer: int) -> None:
        """Pin all experts of a layer that is in memory whole."""
        self._pools[layer].is_pinned[self._slots[layer]] = True

    def unpin_all(self) -> None:
        """Unpin every expert that is in memory: all that was computed with them is evaluated."""
        for pool in self._distinct_pools:
            pool.is_pinned[:] = False
        for read in self._pending.values():
            self._pools[read.layer].is_pinned[read.slot] = True

    def count_uses(self, layer: int, experts: Indices, tokens: Indices) -> None:
        """Count how many tokens of a pass use each of a layer's experts, int64 [n], for eviction."""
        self._uses.add(layer, experts, tokens)

    def request(self, layer: int, experts: Indices) -> bool:
        """Pin experts of a layer, each once and :meth:`max_experts` at most, and start reading those not in memory.

        Returns:
            True if every expert has a slot; False if some wait until a read-ahead ends.
        """
        self._requested = (layer, frozenset(experts.tolist()))
        self._finish_reads(read for read in self._pending.values() if read.future.done())
        pool, slots = self._pools[layer], self._slots[layer][experts]
        present = slots[slots >= 0]
        pool.is_pinned[present] = True
        readahead_used = int(np.count_nonzero(pool.is_unused_readahead[present]))
        pool.is_unused_readahead[present] = False
        absent = experts[slots < 0].tolist()
        unread = [one for one in absent if (layer, one) not in self._pending]
        self._counts.hits += present.size - readahead_used
        self._counts.misses += len(absent) + readahead_used
        self._counts.read_ahead_hits += len(absent) - len(unread) + readahead_used
        return self._start_reads(layer, unread, self._readers) == len(unread)

    def read_ahead(self, layer: int, experts: Indices) -> None:
        """Start reading experts that a later layer will probably need, as far as unpinned slots allow."""
        pool = self._pools[layer]
        slots = self._slots[layer][experts]
        # Likely to be needed next, they must not be evicted for each other.
        pool.is_pinned[slots[slots >= 0]] = True
        absent = [one for one in experts[slots < 0].tolist() if (layer, one) not in self._pending]
        max_reads = int(pool.memory.slots * _MAX_READAHEAD_SHARE)
        self._start_reads(layer, absent[:max_reads], self._readahead_readers)

    def wait(self, layer: int, experts: Indices) -> list[int]:
        """Wait until the experts of :meth:`request` are in memory, pinned; returns those that could not be read."""
        absent = [one for one in experts.tolist() if self._slots[layer][one] < 0]
        reads = {one: self._pending.get((layer, one)) for one in absent}
        self._wait_for([read for read in reads.values() if read is not None])
        for one in absent:
            if reads[one] is None:
                self._read_late(layer, one)
        failed = [one for one in absent if self._slots[layer][one] < 0]
        slots = self._slots[layer][experts]
        pool = self._pools[layer]
        pool.is_pinned[slots[slots >= 0]] = True
        pool.is_unused_readahead[slots[slots >= 0]] = False
        return failed

    def fill(self, on_read: Callable[[int], None]) -> None:
        """Read experts until every slot has one, as many of each layer; ``on_read`` gets the bytes of each.

        Raises:
            ExpertReadError: An expert cannot be read.
        """
        for pool in self._distinct_pools:
            layers = [index for index, one in self._pools.items() if one is pool]
            most = max(self._layers[index].experts for index in layers)
            order = [
                (index, expert)
                for expert in range(most)
                for index in layers
                if expert < self._layers[index].experts
            ]
            for index, expert in order[: pool.memory.slots]:
                self._start_reads(index, [expert], self._readers)
        for read in list(self._pending.values()):
            on_read(read.future.result())
            self._finish_reads([read])
        for pool in self._distinct_pools:
            pool.is_unused_readahead[:] = False

    def _start_reads(self, layer: int, experts: Sequence[int], readers: ThreadPoolExecutor) -> int:
        """Start reading experts into slots, as long as there are unpinned ones; return how many."""
        if not experts:
            return 0
        pool, stored = self._pools[layer], self._layers[layer]
        slots = pool.slots_to_evict(len(experts), self._uses).tolist()
        for expert, slot in zip(experts, slots, strict=False):
            self._evict(pool, slot)
            pool.is_pinned[slot] = True
            future = readers.submit(self._read, stored, expert, pool.memory.slot_bytes(slot))
            self._pending[layer, expert] = _Read(layer, expert, slot, future)
        return len(slots)

    def _read(self, stored: StoredLayer, expert: int, into: Sequence[Bytes]) -> int:
        """Read one expert, and return its bytes in the files. Runs on a reading thread."""
        parts = zip(stored.locations.items(), into, strict=True)
        return sum(
            self._files.read(locations[expert], parameter, room)
            for (parameter, locations), room in parts
        )

    def _read_late(self, layer: int, expert: int) -> None:
        """Read an expert that found no slot before, because read-ahead had taken all unpinned ones."""
        pool = self._pools[layer]
        while not self._start_reads(layer, [expert], self._readers):
            others = [one for one in self._pending.values() if self._pools[one.layer] is pool]
            if not others or not self._wait_for(others[:1]):
                return
        self._wait_for([self._pending[layer, expert]])

    def _wait_for(self, reads: Sequence[_Read]) -> bool:
        """Wait for reads to end, well or not; return False if one takes too long."""
        limit_s = _MAX_STALLED_READ_S if self._is_stalled else MAX_READ_S
        done, late = concurrent.futures.wait([read.future for read in reads], limit_s)
        if late:
            # A late read keeps its slot pinned until it ends, because its thread still writes there.
            self._is_stalled = True
            for read in reads:
                if read.future in late:
                    self._warn(read, f"the disk gave no answer in {limit_s:.1f} s")
        self._finish_reads([read for read in reads if read.future in done])
        return not late

    def _finish_reads(self, reads: Iterable[_Read]) -> None:
        """Enter experts whose reads ended into the tables; a failed read leaves its slot empty."""
        layer, experts = self._requested
        for read in list(reads):
            del self._pending[read.layer, read.expert]
            self._is_stalled = False
            pool, error = self._pools[read.layer], read.future.exception()
            is_requested = read.layer == layer and read.expert in experts
            pool.is_pinned[read.slot] = error is None and is_requested
            if isinstance(error, ExpertReadError):
                self._warn(read, str(error))
                continue
            self._counts.bytes_read += read.future.result()
            pool.owner_layer[read.slot], pool.owner_expert[read.slot] = read.layer, read.expert
            pool.is_unused_readahead[read.slot] = True
            self._slots[read.layer][read.expert] = read.slot

    def _evict(self, pool: _Pool, slot: int) -> None:
        layer, expert = int(pool.owner_layer[slot]), int(pool.owner_expert[slot])
        if layer == _ABSENT:
            return
        self._slots[layer][expert] = _ABSENT
        self._tables.pop(layer, None)
        pool.owner_layer[slot] = pool.owner_expert[slot] = _ABSENT
        pool.is_unused_readahead[slot] = False
        self._counts.evictions += 1

    def _warn(self, read: _Read, problem: str) -> None:
        """Log that an expert could not be read; once for each, because every pass may ask for it."""
        if (read.layer, read.expert) in self._warned:
            return
        self._warned.add((read.layer, read.expert))
        self._log.error(
            "experts.unreadable",
            layer=self._layers[read.layer].path,
            expert=read.expert,
            problem=problem,
            advice="requests that need it fail; restart machd once the model's files are whole",
        )


def _pools(layers: Sequence[StoredLayer], capacity_bytes: int) -> dict[int, _Pool]:
    """Allocate a pool for each shape of expert; returns the pool of each layer."""
    total_bytes = sum(layer.experts * layer.entry_bytes for layer in layers)
    share = min(capacity_bytes / total_bytes, 1.0)
    by_shape: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        by_shape.setdefault(layer.parameters, []).append(index)
    pools: dict[int, _Pool] = {}
    for indices in by_shape.values():
        first = layers[indices[0]]
        experts = sum(layers[index].experts for index in indices)
        slots = int(experts * share + 1e-9)
        if slots < 1:
            raise ModelMemoryError(
                f"{capacity_bytes / 1e9:.3f} GB hold no expert of this model: one takes "
                f"{first.entry_bytes / 1e9:.3f} GB; raise experts.resident_gb"
            )
        pool = _Pool(SlotArrays(first.parameters, slots), can_evict=slots < experts)
        pools.update(dict.fromkeys(indices, pool))
    return pools
