"""Memory of the machine and of machd's processes, as the system tells it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_PRESSURE = Path("/proc/pressure/memory")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory at one moment; see :class:`machd.admin.memory.MemorySample`."""

    process_bytes: int = 0
    available_bytes: int = 0
    total_bytes: int = 0
    swap_used_bytes: int = 0
    pressure: float | None = None

    @classmethod
    def read(cls) -> Self:
        """Read it; takes about a millisecond."""
        memory = psutil.virtual_memory()
        return cls(
            process_bytes=sum(map(_resident_bytes, _own_processes())),
            available_bytes=int(memory.available),
            total_bytes=int(memory.total),
            swap_used_bytes=_swap_used_bytes(),
            pressure=read_pressure(),
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


def _swap_used_bytes() -> int:
    with suppress(OSError, RuntimeError, psutil.Error):
        return int(psutil.swap_memory().used)
    return 0


def _own_processes() -> list[int]:
    """Return the numbers of this process and all that it has started, and those of theirs."""
    found, new = [], [os.getpid()]
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
