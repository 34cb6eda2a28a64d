"""Where mlx computes and how much memory is there."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import psutil

__all__ = ["available_memory_bytes", "backend_name"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def backend_name() -> str:
    """``cpu``, ``metal`` or ``cuda``: what mlx's default device is."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def available_memory_bytes() -> int:
    """Bytes that can still be taken for weights where mlx computes.

    On the CPU: what the machine has available, or less where a control group's limit is nearer. On
    a GPU: what the device recommends or has in all, less what mlx holds already.
    """
    if backend_name() == "cpu":
        machine_bytes = int(psutil.virtual_memory().available)
        limit_bytes = _control_group_bytes()
        return machine_bytes if limit_bytes is None else min(machine_bytes, limit_bytes)
    facts = mx.device_info()
    for key in ("free_memory", "max_recommended_working_set_size", "total_memory", "memory_size"):
        value = facts.get(key)
        if isinstance(value, int):
            held_bytes = 0 if key == "free_memory" else mx.get_active_memory()
            return max(value - held_bytes, 0)
    return int(psutil.virtual_memory().available)


def _control_group_bytes(root: Path = _CGROUP_ROOT) -> int | None:
    """What the nearest memory limit (cgroup v2) of this process leaves; None without a limit."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    relative = next((line[3:] for line in lines if line.startswith("0::")), None)
    if relative is None:
        return None
    group = root / relative.lstrip("/")
    remaining = [_group_bytes(path) for path in (group, *group.parents) if _is_below(path, root)]
    return min((value for value in remaining if value is not None), default=None)


def _is_below(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _group_bytes(group: Path) -> int | None:
    """Limit less use, where file pages that the kernel can drop do not count as use."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used_bytes = int((group / "memory.current").read_text(encoding="ascii"))
        facts = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    inactive = next((line.split()[1] for line in facts if line.startswith("inactive_file ")), "0")
    return max(int(limit) - used_bytes + int(inactive), 0)
