"""Sizes of models' files, remembered for those that ask several times a second."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from machd.clock import Clock
from machd.served.model_files import files_at


@dataclass(frozen=True, slots=True)
class _Size:
    size_bytes: int | None
    looked_s: float


class FileSizes:
    """Looks the sizes up on a worker thread. Lives on the event loop."""

    def __init__(self, clock: Clock) -> None:
        """Remember none yet."""
        self._clock = clock
        self._known: dict[str, _Size] = {}

    async def of(self, path: str, max_age_s: float) -> int | None:
        """Return the size of a model's files; None where they are not at this path.

        Args:
            path: As the settings name it.
            max_age_s: How long ago it may have been looked up.
        """
        now_s = self._clock.monotonic_s()
        known = self._known.get(path)
        if known is None or now_s - known.looked_s > max_age_s:
            files = await asyncio.to_thread(files_at, Path(path))
            known = _Size(None if files is None else files.size_bytes, now_s)
            self._known[path] = known
        return known.size_bytes
