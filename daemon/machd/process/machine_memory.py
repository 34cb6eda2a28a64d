"""Memory of the machine and of machd's processes, as the system tells it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Self

import psutil

_PRESSURE = Path("/proc/pressure/memory")
_PROC = Path("/proc")

_USAGE_BYTES = 96
"""Size of macOS's ``rusage_info_v0``, see libproc.h."""

_FOOTPRINT_AT = 72
"""Where ``ri_phys_footprint`` lies in it: behind an identifier of 16 bytes and seven numbers of 8."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory at one moment; see :class:`machd.admin.memory_history.MemorySample`.

    Attributes:
        held_bytes: Held by each process that this one has started, with those that it has started, by its number; see
            :func:`held_bytes`. Without those of which the system does not tell it.
    """

    process_bytes: int = 0
    available_bytes: int = 0
    total_bytes: int = 0
    swap_used_bytes: int = 0
    pressure: float | None = None
    held_bytes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Self:
        """Read it; takes about a millisecond."""
        memory = psutil.virtual_memory()
        own = os.getpid()
        started = {pid: _with_descendants(pid) for pid in _children(own)}
        return cls(
            process_bytes=sum(map(_resident_bytes, chain([own], *started.values()))),
            available_bytes=int(memory.available),
            total_bytes=int(memory.total),
            swap_used_bytes=_swap_used_bytes(),
            pressure=read_pressure(),
            held_bytes={
                pid: sum(held_bytes(one) or 0 for one in tree)
                for pid, tree in started.items()
                if held_bytes(pid) is not None
            },
        )


def read_pressure(path: Path = _PRESSURE) -> float | None:
    """Return the share of the last ten seconds in which a process waited for memory, in percent; None where unknown.

    Linux tells it where pressure stall information is compiled in and switched on.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text("ascii").splitlines():
            kind, *averages = line.split()
            if kind == "some":
                return float(averages[0].removeprefix("avg10="))
    return None


def held_bytes(pid: int) -> int | None:
    """Return the memory that a process holds for itself; None where the system does not tell.

    On Linux pages without a file behind them, in large pages as well, so that code and libraries, which processes share,
    are left out. On macOS its footprint, which has buffers of the GPU in it. Both are counters of the system: no page
    table is walked, which would stop the process for a while.
    """
    if sys.platform == "darwin":
        return _footprint_bytes(pid)
    with suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared) if hasattr(memory, "shared") else None
    return None


def _footprint_bytes(pid: int) -> int | None:
    with suppress(OSError, AttributeError):
        usage = ctypes.create_string_buffer(_USAGE_BYTES)
        if ctypes.CDLL(None).proc_pid_rusage(pid, 0, usage) == 0:
            return int.from_bytes(usage.raw[_FOOTPRINT_AT : _FOOTPRINT_AT + 8], sys.byteorder)
    return None


def _swap_used_bytes() -> int:
    with suppress(OSError, RuntimeError, psutil.Error):
        return int(psutil.swap_memory().used)
    return 0


def _with_descendants(pid: int) -> list[int]:
    """Return the numbers of a process, of those that it has started, and of theirs."""
    found, new = [], [pid]
    while new:
        found.append(new.pop())
        new += _children(found[-1])
    return found


def _children(pid: int) -> list[int]:
    """Return the numbers of a process's children: psutil looks at every process of the machine for that."""
    tasks = _PROC / str(pid) / "task"
    if not tasks.is_dir():
        with suppress(psutil.Error):
            return [one.pid for one in psutil.Process(pid).children()]
        return []
    children: list[int] = []
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text("ascii").split())
    return children


def _resident_bytes(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
