"""The device that mlx computes on, and its memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx
import psutil

from machd.engine.backend.heap import trim_heap

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")

_NO_SUCH_LIMIT = (FileNotFoundError, NotADirectoryError, PermissionError)
"""A control group without the memory controller, or outside of what the process may see. Any other
error is a reading that failed, which must not pass for a group without a limit."""


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
        limits = [_limit_bytes(group) for group in _control_groups(_CGROUP_ROOT)]
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


def _control_group_bytes(root: Path = _CGROUP_ROOT) -> int | None:
    """Bytes that the nearest memory limit (cgroup v2) leaves this process; None without a limit."""
    remaining = [_group_bytes(path) for path in _control_groups(root)]
    return min((value for value in remaining if value is not None), default=None)


def _control_groups(root: Path) -> list[Path]:
    """This process's control group (v2) and those above it; none where there are none."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    relative = next((line[3:] for line in lines if line.startswith("0::")), None)
    if relative is None:
        return []
    group = root / relative.lstrip("/")
    return [path for path in (group, *group.parents) if _is_below(path, root)]


def _is_below(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _limit_bytes(group: Path) -> int | None:
    """The group's own limit; None where it has none."""
    try:
        return int((group / "memory.max").read_text(encoding="ascii"))
    except (*_NO_SUCH_LIMIT, ValueError):  # the word max, too
        return None


def _group_bytes(group: Path) -> int | None:
    """Limit less use, where file pages that the kernel can drop do not count as use."""
    limit_bytes = _limit_bytes(group)
    if limit_bytes is None:
        return None
    try:
        used_bytes = int((group / "memory.current").read_text(encoding="ascii"))
        facts = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (*_NO_SUCH_LIMIT, ValueError):
        return None
    inactive = next((line.split()[1] for line in facts if line.startswith("inactive_file ")), "0")
    return max(limit_bytes - used_bytes + int(inactive), 0)
