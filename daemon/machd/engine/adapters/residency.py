"""Which adapters are in memory: loaded beside the steps when a row needs them, dropped when others need their room.

A request's adapters are one entry: several with scales are computed as one of their ranks together. Files are read and
checked on a thread; the arrays of mlx are made on the engine thread, some layers between two steps, and compared there with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from machd.clock import Clock
from machd.engine.adapters.low_rank import AdapterWeights
from machd.engine.protocol.adapters import Holding
from machd.engine.protocol.memory import AdapterReading
from machd.errors import AdapterError
from machd.request.adapter import Adapter

_Key: TypeAlias = tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of adapters in memory.

    Attributes:
        max_loaded: Most of them at once, those on their way included.
        pinned: Names of those that stay in memory once they are there; fewer than ``max_loaded``.
    """

    max_loaded: int = 8
    pinned: frozenset[str] = frozenset()


class AdaptedModel(Protocol):
    """The model that adapters are added to."""

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters."""
        ...

    def adding(self, key: _Key, weights: Sequence[AdapterWeights]) -> Iterator[None]:
        """Put the adapters of a key into memory, a layer at each step of the iteration.

        Raises:
            AdapterError: They cannot be computed together, or with this model; nothing is left of them.
        """
        ...

    def remove(self, key: _Key) -> None:
        """Free the memory of a key that no row uses."""
        ...


@dataclass(slots=True)
class _Entry:
    """The adapters of one key.

    Attributes:
        read: Their weights, on their way; None once layers get them.
        layers: Layers that get them; None once all have.
        error: What is wrong with them, for the next row that asks.
        holders: Rows.
    """

    read: Future[list[AdapterWeights]] | None
    layers: Iterator[None] | None = None
    error: AdapterError | None = None
    holders: int = 0

    @property
    def is_loading(self) -> bool:
        """True until all layers have them, or one cannot."""
        return self.error is None and (self.read is not None or self.layers is not None)

    @property
    def is_loaded(self) -> bool:
        """True if rows can have them."""
        return self.error is None and not self.is_loading


class AdapterResidency:
    """Adapters of one model. Lives on the engine thread."""

    def __init__(
        self,
        model: AdaptedModel,
        read: Callable[[Adapter], AdapterWeights],
        limits: AdapterLimits,
        clock: Clock,
    ) -> None:
        """Begin without any.

        Args:
            model: Computes them.
            read: Reads and checks one adapter's files; called on a thread of its own.
            limits: Of those in memory.
            clock: Measures how long layers take.
        """
        assert limits.max_loaded >= 1, "one row's adapters fit"
        self._model = model
        self._read = read
        self._limits = limits
        self._clock = clock
        self._entries: dict[_Key, _Entry] = {}  # the one held last is last
        self._newest: dict[str, bytes] = {}  # content of each name that a row asked for last
        self._loads = 0
        self._reader: ThreadPoolExecutor | None = None

    def load(self, limit_s: float) -> bool:
        """Put adapters that have been read into memory; see :class:`machd.engine.protocol.adapters.AdapterRoom`."""
        until_s = self._clock.monotonic_s() + limit_s
        for key, entry in self._entries.items():
            while self._add_layer(key, entry):
                if self._clock.monotonic_s() >= until_s:
                    return True
        return False

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Keep adapters in memory for a row; see :class:`machd.engine.protocol.adapters.AdapterRoom`.

        Raises:
            AdapterError: One of them cannot be used with this model.
        """
        key = tuple(adapters)
        if not key:
            return Holding.HELD
        self._newest |= {one.name: one.digest for one in key if one.name in self._limits.pinned}
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room():
                return Holding.NO_ROOM
            entry = self._entries[key] = _Entry(self._begin(key))
        if entry.error is not None:
            del self._entries[key]  # so that mended files are read again
            raise entry.error
        if entry.is_loading:
            return Holding.LOADING
        entry.holders += 1
        self._entries[key] = self._entries.pop(key)
        return Holding.HELD

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Give back what one row has held."""
        if adapters:
            entry = self._entries[tuple(adapters)]
            assert entry.holders > 0, "a row gives back what it has held"
            entry.holders -= 1

    def drop_unused(self, missing_bytes: int) -> bool:
        """Drop adapters that no row holds, those held longest ago first."""
        before_bytes = self._model.nbytes
        dropped = False
        while self._model.nbytes > before_bytes - missing_bytes and self._drop_one():
            dropped = True
        return dropped

    def reading(self) -> AdapterReading:
        """Return the adapters in memory."""
        entries = self._entries.values()
        return AdapterReading(
            loaded=sum(one.is_loaded for one in entries),
            held=sum(one.holders > 0 for one in entries),
            loading=sum(one.is_loading for one in entries),
            used_bytes=self._model.nbytes,
            loads=self._loads,
        )

    def close(self) -> None:
        """Drop all of them."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        for key, entry in self._entries.items():
            if entry.is_loaded or entry.layers is not None:
                self._model.remove(key)
        self._entries.clear()

    def _begin(self, key: _Key) -> Future[list[AdapterWeights]]:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="machd-adapters")
        return self._reader.submit(lambda: [self._weights(one) for one in key])

    def _weights(self, adapter: Adapter) -> AdapterWeights:
        try:
            return self._read(adapter)
        except AdapterError as error:
            message = f"the adapter {adapter.name!r} cannot be used: {error.message}"
            raise AdapterError(message) from error

    def _add_layer(self, key: _Key, entry: _Entry) -> bool:
        """Give one more layer the adapters of a key; False if none can be given any now."""
        if not entry.is_loading or (entry.read is not None and not entry.read.done()):
            return False
        try:
            if entry.read is not None:
                read, entry.read = entry.read, None
                entry.layers = self._model.adding(key, read.result())
            assert entry.layers is not None, "what is loading is read, or layers get it"
            next(entry.layers)
        except StopIteration:
            entry.layers = None
            self._loads += 1
        except AdapterError as error:
            entry.error, entry.layers = error, None
        except Exception as cause:  # noqa: BLE001 - of files, of memory, or of mlx: said to the rows that ask
            names = " and ".join(repr(one.name) for one in key)
            entry.error = AdapterError(f"the adapter {names} could not be loaded: {cause}")
            entry.error.__cause__, entry.layers = cause, None
        return entry.is_loading

    def _make_room(self) -> bool:
        """Drop the adapters that were held longest ago, if there are too many; False if all are in use."""
        while len(self._entries) >= self._limits.max_loaded:
            if not self._drop_one():
                return False
        return True

    def _drop_one(self) -> bool:
        """Drop the adapters that were held longest ago; False if all are in use, on their way or pinned."""
        for key, entry in self._entries.items():
            if not (entry.holders or entry.is_loading or self._is_pinned(key)):
                if entry.is_loaded:
                    self._model.remove(key)
                del self._entries[key]
                return True
        return False

    def _is_pinned(self, key: _Key) -> bool:
        return len(key) == 1 and self._newest.get(key[0].name) == key[0].digest
