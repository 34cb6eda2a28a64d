"""The machine that a bench ran on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Self

import psutil
from msgspec import Struct

_ROOM = 1.5
"""Memory that a server takes over its weights, with what it computes in."""

_CPU_FACTS = Path("/proc/cpuinfo")


class MachineFacts(Struct, frozen=True, kw_only=True):
    """Enough to know whether two reports can be compared.

    Attributes:
        platform: System, release, architecture and C library.
        cpu: What the processor calls itself.
        cpu_count: Processors that this process may use.
        memory_bytes: All of the machine's.
        load_average: Of the minute before the bench; null where the system does not tell.
    """

    platform: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    python: str
    load_average: float | None

    @classmethod
    def read(cls) -> Self:
        """Look at this machine."""
        load_average: float | None = None
        with contextlib.suppress(OSError):
            load_average = os.getloadavg()[0]
        return cls(
            platform=platform.platform(),
            cpu=_cpu_name(),
            cpu_count=_usable_cpus(),
            memory_bytes=int(psutil.virtual_memory().total),
            python=platform.python_version(),
            load_average=load_average,
        )


def has_room(weights_bytes: int, *, servers: int) -> bool:
    """Return whether free memory holds a model once for each of so many servers."""
    return int(psutil.virtual_memory().available) >= servers * _ROOM * weights_bytes


def _cpu_name() -> str:
    """The model name; Linux tells it in a file only."""
    with contextlib.suppress(OSError):
        for line in _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _usable_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
