"""The experts in memory: which are there, which make room, which are being read.

One bank serves every row of every lane. It is used on the engine thread; threads of its own read files
into slots that nothing computes with.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import structlog

from machd.engine.experts.conversion import Bytes
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.slab import Slab
from machd.engine.experts.stored_layer import StoredLayer
from machd.engine.protocol.engine import ExpertReading
from machd.errors import ModelMemoryError

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
"""int64 [n]: expert numbers or slots."""

READ_LIMIT_S = 30.0
"""Time in which an expert that a step waits for has to be read; then the rows that need it fail."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
"""float64 [n]."""

_MOST_HALVINGS = 400
"""Half-lives after which heat is scaled down, far from the largest number of a float64."""

_READERS = 4
_READERS_AHEAD = 2
_ABSENT = -1

_HALF_LIFE_PASSES = 32
"""Passes after which a need counts half. Who makes room is chosen by needs that fade: of the policies between
least recently and least frequently used (LRFU, Lee et al. 2001) this does best on skewed routing. Least
recently used alone goes round in circles as layers do: with room for a quarter of the experts, eight rows
found 7 % there, and 52 % with this."""

_AHEAD_SHARE = 4
"""One in so many slots may be taken by experts that were read ahead in one go."""


@dataclass(slots=True)
class _Read:
    """An expert on its way into a slot."""

    layer: int
    expert: int
    slot: int
    future: Future[int]


@dataclass(slots=True)
class _Shelf:
    """The slots that the layers of one form share.

    Attributes:
        owner_layer: int64 [slots], the layer of each slot's expert; -1 for an empty slot.
        owner_expert: int64 [slots], its number.
        is_held: bool [slots], true while a pass computes with it or a file is read into it.
        is_unused: bool [slots], true for an expert that was read ahead and not yet needed.
    """

    slab: Slab
    owner_layer: Numbers = field(init=False)
    owner_expert: Numbers = field(init=False)
    is_held: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(init=False)
    is_unused: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.slab.slots
        self.owner_layer = np.full(slots, _ABSENT)
        self.owner_expert = np.full(slots, _ABSENT)
        self.is_held = np.zeros(slots, dtype=np.bool_)
        self.is_unused = np.zeros(slots, dtype=np.bool_)


class Heat:
    """How often each expert was needed, where what is long ago counts little."""

    def __init__(self, layers: Sequence[StoredLayer]) -> None:
        """Begin cold."""
        most = max((layer.experts for layer in layers), default=0)
        self._heat = np.zeros((len(layers), most))
        self._layer = 0
        self._passes = 0

    def need(self, layer: int, experts: Numbers) -> None:
        """Count a need; layers come in their order, so a pass ends where the order begins again."""
        if layer <= self._layer:
            self._passes += 1
        self._layer = layer
        if self._passes > _MOST_HALVINGS * _HALF_LIFE_PASSES:
            self._heat *= 2.0**-_MOST_HALVINGS
            self._passes = 0
        # Later needs count more, which comes to the same as earlier ones fading.
        self._heat[layer, experts] += 2.0 ** (self._passes / _HALF_LIFE_PASSES)

    def of(self, layers: Numbers, experts: Numbers) -> Floats:
        """float64 [n], comparable with each other at one moment; below all for no expert."""
        return np.where(layers < 0, -1.0, self._heat[layers, experts])


class ExpertBank:
    """Experts of all layers in a bounded number of slots; those needed longest ago make room."""

    def __init__(
        self, layers: Sequence[StoredLayer], files: ExpertFiles, *, capacity_bytes: int
    ) -> None:
        """Take the memory.

        Args:
            layers: All layers with experts, in their order.
            files: Their files, which the bank owns from now on.
            capacity_bytes: What the experts in memory may take; layers of unlike form share it in
                proportion to their size.

        Raises:
            ModelMemoryError: There is not room for one expert of each form.
        """
        self._layers = layers
        self._files = files
        self._heat = Heat(layers)
        self._current: tuple[int, frozenset[int]] = (0, frozenset())
        self._pending: dict[tuple[int, int], _Read] = {}
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "bytes_read", "ahead_hits"), 0)
        self._warned: set[tuple[int, int]] = set()
        self._log = structlog.get_logger("machd.engine")
        total_bytes = sum(layer.experts * layer.entry_bytes for layer in layers)
        share = min(capacity_bytes / total_bytes, 1.0)
        by_form: dict[object, list[int]] = {}
        for index, layer in enumerate(layers):
            by_form.setdefault(layer.forms, []).append(index)
        self._shelves: list[_Shelf] = []
        self._shelf_of: dict[int, _Shelf] = {}
        for indices in by_form.values():
            entries = sum(layers[index].experts for index in indices)
            slots = int(entries * share + 1e-9)
            if slots < 1:
                raise ModelMemoryError(
                    f"{capacity_bytes / 1e9:.3f} GB hold no expert of this model: one takes "
                    f"{layers[indices[0]].entry_bytes / 1e9:.3f} GB; raise experts.resident_gb"
                )
            shelf = _Shelf(Slab(layers[indices[0]].forms, slots))
            self._shelves.append(shelf)
            self._shelf_of.update(dict.fromkeys(indices, shelf))
        self._slots = [np.full(layer.experts, _ABSENT) for layer in layers]
        self._tables: dict[int, mx.array] = {}
        self._readers = ThreadPoolExecutor(_READERS, "machd-experts")
        self._readers_ahead = ThreadPoolExecutor(_READERS_AHEAD, "machd-experts-ahead")

    @property
    def layers(self) -> Sequence[StoredLayer]:
        """All layers with experts."""
        return self._layers

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots, which are taken whether experts lie in them or not."""
        return sum(shelf.slab.nbytes for shelf in self._shelves)

    @property
    def fill_bytes(self) -> int:
        """Bytes that :meth:`fill` reads, about."""
        stored = sum(one.experts * one.stored_entry_bytes for one in self._layers)
        total = sum(one.experts * one.entry_bytes for one in self._layers)
        return stored * self.capacity_bytes // total

    def close(self) -> None:
        """End all reading, and close the files."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._readers_ahead.shutdown(wait=True, cancel_futures=True)
        self._files.close()
        self._shelves.clear()
        self._shelf_of.clear()

    def reading(self) -> ExpertReading:
        """Return the bank at this moment, and its counts since the start."""
        resident = [
            (index, int(np.count_nonzero(one >= 0))) for index, one in enumerate(self._slots)
        ]
        return ExpertReading(
            capacity_bytes=self.capacity_bytes,
            resident_bytes=sum(
                count * self._layers[index].entry_bytes for index, count in resident
            ),
            entries=sum(count for _, count in resident),
            hits=self._counts["hits"],
            misses=self._counts["misses"],
            evictions=self._counts["evictions"],
            bytes_read=self._counts["bytes_read"],
            read_ahead_hits=self._counts["ahead_hits"],
        )

    def array(self, layer: int, linear: str, parameter: str) -> mx.array | None:
        """Return a parameter of a layer's projection for all slots; None where it has none."""
        return self._shelf_of[layer].slab.arrays.get((linear, parameter))

    def room(self, layer: int) -> int:
        """Experts of a layer that can be in memory at once, while nothing else is held."""
        return int(self._shelf_of[layer].slab.slots)

    def slots(self, layer: int) -> Numbers:
        """int64 [experts], the slot of each expert; -1 for one that is not in memory."""
        return self._slots[layer]

    def table(self, layer: int) -> mx.array | None:
        """int32 [experts], the slot of each expert, if all are in memory; None if not."""
        if layer not in self._tables:
            slots = self._slots[layer]
            if (slots < 0).any():
                return None
            self._tables[layer] = mx.array(slots.astype(np.int32))
        return self._tables[layer]

    def hold_all(self, layer: int) -> None:
        """Hold a layer whose experts are all in memory."""
        self._shelf_of[layer].is_held[self._slots[layer]] = True

    def free(self) -> None:
        """Let go of all experts that were held; what was computed with them is done."""
        for shelf in self._shelves:
            shelf.is_held[:] = False
        for read in self._pending.values():
            self._shelf_of[read.layer].is_held[read.slot] = True

    def begin(self, layer: int, experts: Numbers) -> bool:
        """Hold a layer's experts, at most :meth:`room` of them, and start reading those not in memory.

        Returns:
            Whether each has a slot; if not, some wait for what is being read ahead.
        """
        self._current = (layer, frozenset(experts.tolist()))
        self._collect()
        self._heat.need(layer, experts)
        shelf, slots = self._shelf_of[layer], self._slots[layer][experts]
        present = slots[slots >= 0]
        shelf.is_held[present] = True
        ahead = int(np.count_nonzero(shelf.is_unused[present]))
        shelf.is_unused[present] = False
        absent = experts[slots < 0].tolist()
        on_their_way = [one for one in absent if (layer, one) in self._pending]
        self._counts["hits"] += present.size - ahead
        self._counts["misses"] += len(absent) + ahead
        self._counts["ahead_hits"] += len(on_their_way) + ahead
        to_read = [one for one in absent if one not in on_their_way]
        return self._start(layer, to_read, self._readers) == len(to_read)

    def read_ahead(self, layer: int, experts: Numbers) -> None:
        """Start reading experts that a layer will probably need; those that find no room are left out."""
        shelf = self._shelf_of[layer]
        slots = self._slots[layer][experts]
        # About to be needed themselves, they make no room for the others.
        shelf.is_held[slots[slots >= 0]] = True
        absent = [one for one in experts[slots < 0].tolist() if (layer, one) not in self._pending]
        self._start(layer, absent[: shelf.slab.slots // _AHEAD_SHARE], self._readers_ahead)

    def finish(self, layer: int, experts: Numbers) -> list[int]:
        """Wait until the experts of :meth:`begin` are in memory, held.

        Returns:
            Experts that could not be read.
        """
        absent = [one for one in experts.tolist() if self._slots[layer][one] < 0]
        failed = [one for one in absent if not self._wait_for(layer, one)]
        held = self._slots[layer][experts]
        shelf = self._shelf_of[layer]
        shelf.is_held[held[held >= 0]] = True
        shelf.is_unused[held[held >= 0]] = False
        return failed

    def fill(self, on_read: Callable[[int], None]) -> None:
        """Read experts until every slot has one, as many of each layer.

        Args:
            on_read: Called with the bytes of each expert that was read.

        Raises:
            ExpertReadError: One cannot be read.
        """
        for shelf in self._shelves:
            layers = [index for index, one in self._shelf_of.items() if one is shelf]
            most = max(self._layers[index].experts for index in layers)
            order = [
                (index, expert)
                for expert in range(most)
                for index in layers
                if expert < self._layers[index].experts
            ]
            for index, expert in order[: shelf.slab.slots]:
                self._start(index, [expert], self._readers)
        for read in list(self._pending.values()):
            on_read(read.future.result())
            self._arrive(read)
        for shelf in self._shelves:
            shelf.is_unused[:] = False

    def _start(self, layer: int, experts: Sequence[int], readers: ThreadPoolExecutor) -> int:
        """Give experts a slot each, as long as there are any, and start reading them; returns how many."""
        if not experts:
            return 0
        shelf, stored = self._shelf_of[layer], self._layers[layer]
        slots = self._coldest(shelf, len(experts)).tolist()
        for expert, slot in zip(experts, slots, strict=False):
            self._evict(shelf, slot)
            shelf.is_held[slot] = True
            future = readers.submit(self._read, stored, expert, shelf.slab.room(slot))
            self._pending[layer, expert] = _Read(layer, expert, slot, future)
        return len(slots)

    def _coldest(self, shelf: _Shelf, count: int) -> Numbers:
        """The slots, at most ``count``, that nothing holds and whose experts were needed least."""
        free = np.flatnonzero(~shelf.is_held)
        if count >= free.size:
            return free
        heat = self._heat.of(shelf.owner_layer[free], shelf.owner_expert[free])
        return free[np.argpartition(heat, count)[:count]]

    def _read(self, stored: StoredLayer, expert: int, room: Sequence[Bytes]) -> int:
        """Read one expert, and return its bytes in the files; on a thread of the bank's."""
        parts = zip(stored.places.items(), room, strict=True)
        return sum(self._files.read(places[expert], form, into) for (form, places), into in parts)

    def _wait_for(self, layer: int, expert: int) -> bool:
        """Wait for an expert that is not in memory; returns whether it is now."""
        shelf = self._shelf_of[layer]
        while (read := self._pending.get((layer, expert))) is None:
            # Every slot that is free was given away: one comes back when something was read ahead.
            others = [one for one in self._pending.values() if self._shelf_of[one.layer] is shelf]
            if not others or not self._take_in(others[0]):
                return False
            self._start(layer, [expert], self._readers)
        return self._take_in(read) and bool(self._slots[layer][expert] >= 0)

    def _take_in(self, read: _Read) -> bool:
        """Wait for a read; returns whether it ended, well or not."""
        try:
            read.future.exception(timeout=READ_LIMIT_S)
        except concurrent.futures.TimeoutError:
            # Its slot stays held until the thread lets go of it.
            self._warn(read, f"it took more than {READ_LIMIT_S:.0f} s")
            return False
        self._arrive(read)
        return True

    def _collect(self) -> None:
        """Take in what has been read meanwhile."""
        for read in [one for one in self._pending.values() if one.future.done()]:
            self._arrive(read)

    def _arrive(self, read: _Read) -> None:
        """Give a slot the expert that was read into it, or make it an empty one if that failed."""
        del self._pending[read.layer, read.expert]
        shelf = self._shelf_of[read.layer]
        layer, experts = self._current
        error = read.future.exception()
        shelf.is_held[read.slot] = error is None and read.layer == layer and read.expert in experts
        if isinstance(error, ExpertReadError):
            self._warn(read, str(error))
            return
        self._counts["bytes_read"] += read.future.result()
        shelf.owner_layer[read.slot], shelf.owner_expert[read.slot] = read.layer, read.expert
        shelf.is_unused[read.slot] = True
        self._slots[read.layer][read.expert] = read.slot

    def _evict(self, shelf: _Shelf, slot: int) -> None:
        layer, expert = int(shelf.owner_layer[slot]), int(shelf.owner_expert[slot])
        if layer == _ABSENT:
            return
        self._slots[layer][expert] = _ABSENT
        self._tables.pop(layer, None)
        shelf.owner_layer[slot] = shelf.owner_expert[slot] = _ABSENT
        shelf.is_unused[slot] = False
        self._counts["evictions"] += 1

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
