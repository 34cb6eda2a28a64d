"""Which adapters are in memory: loaded beside the steps when a row needs them, dropped when others need their room.

A request's adapters are one entry: several with scales are computed as one of their ranks together. Files are read and
checked on a thread; the arrays of mlx are made on the engine thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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

    def add(self, key: _Key, weights: Sequence[AdapterWeights]) -> None:
        """Put the adapters of a key into memory.

        Raises:
            AdapterError: They cannot be computed together, or with this model.
        """
        ...

    def remove(self, key: _Key) -> None:
        """Free the memory of a key that no row uses."""
        ...


@dataclass(slots=True)
class _Entry:
    """The adapters of one key.

    Attributes:
        loading: Their weights, on their way; None once they are in the model.
        holders: Rows.
    """

    loading: Future[list[AdapterWeights]] | None
    holders: int = 0


class AdapterResidency:
    """Adapters of one model. Lives on the engine thread."""

    def __init__(
        self,
        model: AdaptedModel,
        read: Callable[[Adapter], AdapterWeights],
        limits: AdapterLimits,
    ) -> None:
        """Begin without any.

        Args:
            model: Computes them.
            read: Reads and checks one adapter's files; called on a thread of its own.
            limits: Of those in memory.
        """
        assert limits.max_loaded >= 1, "one row's adapters fit"
        self._model = model
        self._read = read
        self._limits = limits
        self._entries: dict[_Key, _Entry] = {}  # the one held last is last
        self._newest: dict[str, bytes] = {}  # content of each name that a row asked for last
        self._loads = 0
        self._reader: ThreadPoolExecutor | None = None

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
        if entry.loading is not None:
            if not entry.loading.done():
                return Holding.LOADING
            self._finish(key, entry, entry.loading)
        entry.holders += 1
        self._entries[key] = self._entries.pop(key)
        return Holding.HELD

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Give back what one row has held."""
        if adapters:
            entry = self._entries[tuple(adapters)]
            assert entry.holders > 0, "a row gives back what it has held"
            entry.holders -= 1

    def reading(self) -> AdapterReading:
        """Return the adapters in memory."""
        loading = sum(one.loading is not None for one in self._entries.values())
        return AdapterReading(
            loaded=len(self._entries) - loading,
            held=sum(one.holders > 0 for one in self._entries.values()),
            loading=loading,
            used_bytes=self._model.nbytes,
            loads=self._loads,
        )

    def close(self) -> None:
        """Drop all of them."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        for key in [key for key, one in self._entries.items() if one.loading is None]:
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

    def _finish(self, key: _Key, entry: _Entry, loading: Future[list[AdapterWeights]]) -> None:
        """Put what was read into the model; what cannot be used is forgotten, so that mended files are read again."""
        try:
            self._model.add(key, loading.result())
        except AdapterError:
            del self._entries[key]
            raise
        except Exception as cause:
            del self._entries[key]
            names = " and ".join(repr(one.name) for one in key)
            raise AdapterError(f"the adapter {names} could not be loaded: {cause}") from cause
        entry.loading = None
        self._loads += 1

    def _make_room(self) -> bool:
        """Drop the adapters that were held longest ago, if there are too many; False if all are in use."""
        while len(self._entries) >= self._limits.max_loaded:
            unused = next(
                (key for key, one in self._entries.items() if self._may_go(key, one)), None
            )
            if unused is None:
                return False
            self._model.remove(unused)
            del self._entries[unused]
        return True

    def _may_go(self, key: _Key, entry: _Entry) -> bool:
        is_pinned = len(key) == 1 and self._newest.get(key[0].name) == key[0].digest
        return not (entry.holders or entry.loading or is_pinned)
