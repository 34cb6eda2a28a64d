"""The adapters of a daemon by their names. Lives on the event loop; files are looked at on worker threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from machd.errors import AdapterError, NotFoundError
from machd.request.adapter import Adapter
from machd.served.adapter_places import AdapterToServe, find_adapter
from machd.served.adapter_readings import AdapterFiles, AdapterReadings, DescribedFiles
from machd.settings.adapters import AdaptersSettings
from machd.settings.models import OLLAMA_TAG, name_essence

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter whose files can be used.

    Attributes:
        number: Its id in llama.cpp's words: the same as long as the daemon runs.
    """

    adapter: AdapterToServe
    number: int
    files: DescribedFiles


class AdapterSet:
    """All adapters; finds them by name, and says which content a name stands for now."""

    def __init__(self, files: AdapterFiles) -> None:
        """Begin without adapters."""
        self._readings = AdapterReadings(files, _log_refusal)
        self._reading: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._section = AdaptersSettings()
        self._adapters: dict[str, AdapterToServe] = {}
        self._unloaded: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._essences: dict[str, str] = {}

    def __bool__(self) -> bool:
        """True if adapters are served, if only by a directory that is empty now."""
        return bool(self._adapters) or self._section.directory is not None

    def __iter__(self) -> Iterator[AdapterToServe]:
        """Go through those that requests may name, by name."""
        return (one for name, one in self._adapters.items() if name not in self._unloaded)

    def take_on(self, section: AdaptersSettings, adapters: Iterable[AdapterToServe]) -> None:
        """Serve these adapters from now on."""
        self._section = section
        self._serve(adapters)
        self._readings.keep(frozenset(one.path for one in self._adapters.values()))

    def find(self, name: str) -> AdapterToServe | None:
        """Return the adapter of a name; case, an organisation and ``:latest`` do not matter where they tell none apart.

        An adapter that is unloaded is found, too: see :meth:`is_loaded`.
        """
        for known in (name, name.removesuffix(OLLAMA_TAG)):
            if known in self._adapters:
                return self._adapters[known]
        alike = self._essences.get(name_essence(name))
        return None if alike is None else self._adapters[alike]

    def is_loaded(self, adapter: AdapterToServe) -> bool:
        """Return True if requests may name an adapter: no operator has unloaded it."""
        return adapter.name not in self._unloaded

    def numbered(self, number: int) -> AdapterToServe | None:
        """Return the adapter of an id; None where no request may name one by it."""
        return next((one for one in self if self._numbers[one.name] == number), None)

    async def resolve(self, adapter: AdapterToServe, scale: float | None = None) -> Adapter:
        """Return an adapter with the content that its files have now, and with another scale if one is given.

        Raises:
            AdapterError: Its files cannot be used; the message says why.
        """
        digest = await self._read(adapter, self._readings.digest)
        scale = adapter.scale if scale is None else scale
        return Adapter(digest, scale, adapter.name, str(adapter.path))

    async def listed(self) -> list[ListedAdapter]:
        """Return the adapters that can be used now, by name."""
        listed: list[ListedAdapter] = []
        for one in tuple(self):
            with contextlib.suppress(
                AdapterError
            ):  # logged, and told to each request that names it
                listed.append(await self.described(one))
        return listed

    async def described(self, adapter: AdapterToServe) -> ListedAdapter:
        """Return what is known of an adapter.

        Raises:
            AdapterError: As of :meth:`resolve`.
        """
        files = await self._read(adapter, self._readings.described)
        return ListedAdapter(adapter, self._numbers[adapter.name], files)

    async def load(self, name: str) -> None:
        """Serve an adapter that the settings name, or one that the directory holds now.

        Raises:
            NotFoundError: There is none of this name.
            AdapterError: Its files cannot be used.
        """
        known = self._adapters.get(name)
        if known is None:
            path = await asyncio.to_thread(find_adapter, self._section, name)
            if path is None:
                raise NotFoundError(
                    "lora_name: adapters.directory holds no adapter of this name, and no table "
                    "[adapters.NAME] is called so",
                    param="lora_name",
                )
            known = AdapterToServe(name, path)
        await self._read(known, self._readings.digest)
        self._unloaded.discard(name)
        if name not in self._adapters:
            self._serve([*self._adapters.values(), known])

    def unload(self, name: str) -> None:
        """Serve an adapter no longer, until it is loaded or the settings are read again.

        Raises:
            NotFoundError: There is none of this name.
        """
        if name not in self._adapters:
            raise NotFoundError(f"The lora adapter {name!r} cannot be found", param="lora_name")
        self._unloaded.add(name)

    def forget_unloads(self) -> None:
        """Serve again what was unloaded, because the settings have been read again."""
        self._unloaded.clear()

    def _serve(self, adapters: Iterable[AdapterToServe]) -> None:
        self._adapters = {one.name: one for one in sorted(adapters, key=lambda one: one.name)}
        for name in self._adapters:
            self._numbers.setdefault(name, len(self._numbers))
        counts = Counter(map(name_essence, self._adapters))
        self._essences = {
            essence: name for name in self._adapters if counts[essence := name_essence(name)] == 1
        }

    async def _read(self, adapter: AdapterToServe, read: Callable[[str, Path], _T]) -> _T:
        """Look at an adapter's files on a worker thread, one call at a time.

        A client that leaves ends no call: the next one finds what it has read.
        """

        async def reading() -> _T:
            async with self._reading[adapter.path]:
                return await asyncio.to_thread(read, adapter.name, adapter.path)

        task = asyncio.ensure_future(reading())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)


def combined(adapters: Iterable[Adapter]) -> tuple[Adapter, ...]:
    """Return several adapters of a request in one order, so that equal sets are equal, and each content once.

    Those that count for nothing are left out.
    """
    by_digest: dict[bytes, Adapter] = {}
    for one in adapters:
        same = by_digest.get(one.digest)
        by_digest[one.digest] = one if same is None else replace(one, scale=same.scale + one.scale)
    return tuple(by_digest[digest] for digest in sorted(by_digest) if by_digest[digest].scale)


def _log_refusal(name: str, error: AdapterError) -> None:
    structlog.get_logger("machd.adapters").error("adapter.refused", name=name, error=error.message)
