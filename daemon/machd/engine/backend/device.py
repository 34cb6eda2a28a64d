"""The device that mlx computes on, and its memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx
import psutil

from machd.engine.backend.control_groups import control_groups, group_text
from machd.heap import trim_heap

_ROOT = Path("/")
_STATM = Path("/proc/self/statm")

_NO_LIMIT_BYTES = 1 << 62
"""Version 1 of control groups has no word for no limit: it says the largest number of whole pages, which is more than this."""


def backend_name() -> str:
    """``cpu``, ``metal`` or ``cuda``: what mlx's default device is."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_name() -> str | None:
    """Return what a GPU calls itself, such as ``NVIDIA H200``; None on the CPU."""
    if backend_name() == "cpu":
        return None
    name = mx.device_info().get("device_name")
    return name if isinstance(name, str) else None


def available_memory_bytes() -> int:
    """Bytes that the process can still take where mlx computes.

    On the CPU: what the machine has available, or less where a limit of the control group or of the
    process (``RLIMIT_AS``, ``RLIMIT_DATA``) is nearer. On a GPU: what the device recommends or has in
    all, less what mlx holds already. Metal shares the machine's memory with all other processes, so
    there it is no more than the machine has available, counting what mlx keeps for reuse.

    Raises:
        OSError: The system's files cannot be read, for want of file descriptors for example.
    """
    computing_bytes = computing_memory_bytes()
    if backend_name() != "metal":
        return computing_bytes
    return min(computing_bytes, int(psutil.virtual_memory().available) + mx.get_cache_memory())


def computing_memory_bytes() -> int:
    """Bytes that a step can still take: as :func:`available_memory_bytes`, but for Metal.

    macOS makes room for a step by compressing what other processes hold, so there it is what the
    device recommends, less what mlx holds already.

    Raises:
        OSError: The system's files cannot be read.
    """
    if backend_name() == "cpu":
        machine_bytes = int(psutil.virtual_memory().available)
        limits = (_control_group_bytes(), _process_limit_bytes())
        return min([machine_bytes, *(one for one in limits if one is not None)])
    facts = mx.device_info()
    for key in ("free_memory", "max_recommended_working_set_size", "total_memory", "memory_size"):
        value = facts.get(key)
        if isinstance(value, int):
            held_bytes = 0 if key == "free_memory" else mx.get_active_memory()
            return max(value - held_bytes, 0)
    return int(psutil.virtual_memory().available)


def device_memory_bytes() -> int:
    """Bytes that the device can hold in all, those in use included.

    On the CPU: the machine's memory, or the limit of a control group or of the process where that is
    lower. On a GPU: what the device recommends or has in all.
    """
    machine_bytes = int(psutil.virtual_memory().total)
    if backend_name() == "cpu":
        limits = [_limit_bytes(group) for group in control_groups("memory", _ROOT)]
        limits += [limit_bytes for limit_bytes, _ in _process_limits()]
        return min([machine_bytes, *(one for one in limits if one is not None)])
    facts = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        value = facts.get(key)
        if isinstance(value, int):
            return value
    return machine_bytes


def give_memory_back() -> None:
    """Return the memory that mlx and the C library keep for reuse to the system.

    Takes some milliseconds.
    """
    mx.clear_cache()
    trim_heap()


def has_process_limit() -> bool:
    """Return whether a limit is set on this process's memory (``ulimit -v`` or ``-d``)."""
    return bool(_process_limits())


def _process_limit_bytes() -> int | None:
    """Bytes that the nearest limit on the process's own memory leaves; None without one."""
    return min(
        (max(limit_bytes - used_bytes, 0) for limit_bytes, used_bytes in _process_limits()),
        default=None,
    )


def _process_limits() -> list[tuple[int, int]]:
    """The limits that the kernel enforces on the process's memory, each with what counts against it.

    Only Linux enforces them; see setrlimit(2) for what they count, and proc_pid_statm(5).
    """
    if sys.platform != "linux":
        return []
    limits = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if all(limit == resource.RLIM_INFINITY for limit in limits):
        return []
    pages = [int(one) for one in _STATM.read_text(encoding="ascii").split()]
    used = [pages[0] * resource.getpagesize(), pages[5] * resource.getpagesize()]
    return [pair for pair in zip(limits, used, strict=True) if pair[0] != resource.RLIM_INFINITY]


def _control_group_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that the nearest memory limit of a control group leaves this process; None without a limit."""
    remaining = [_group_bytes(group) for group in control_groups("memory", root)]
    return min((value for value in remaining if value is not None), default=None)


def _limit_bytes(group: Path) -> int | None:
    """The group's own limit; None where it has none."""
    limit_bytes = _number(group_text(group, "memory.max", "memory.limit_in_bytes"))
    return None if limit_bytes is not None and limit_bytes >= _NO_LIMIT_BYTES else limit_bytes


def _group_bytes(group: Path) -> int | None:
    """Limit less use, where file pages that the kernel can drop do not count as use."""
    limit_bytes = _limit_bytes(group)
    if limit_bytes is None:
        return None
    used_bytes = _number(group_text(group, "memory.current", "memory.usage_in_bytes"))
    if used_bytes is None:
        return None
    lines = (group_text(group, "memory.stat") or "").splitlines()
    facts = dict(line.split(" ", 1) for line in lines if " " in line)
    # Of version 1 the second, which counts the groups inside as use and limit do.
    inactive = facts.get("total_inactive_file") or facts.get("inactive_file")
    return max(limit_bytes - used_bytes + (_number(inactive) or 0), 0)


def _number(text: str | None) -> int | None:
    """Return a file's number; None if there is no file, or it says ``max``."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
