"""The number of threads that a matrix library should start: as many as the process may use CPUs.

Matrix libraries count the CPUs of the machine. In a container with a quota of two CPUs on a machine
of 64 they would start 64 threads, which wait for each other and use up the quota by waiting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_FOR_ALL = "OMP_NUM_THREADS"
"""Every one of the libraries reads it where its own variable is not set."""


def thread_variables(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that give each library as many threads as the process may use CPUs.

    Without them BLIS takes one thread, and OpenBLAS and MKL take no notice of a quota.

    Args:
        environ: The environment; a variable that the operator has set is left out of the answer.
        root: The file system that ``/proc`` and ``/sys`` are read from.
    """
    if environ.get(_FOR_ALL):
        return {}
    unset = [name for name in _THREAD_VARIABLES if not environ.get(name)]
    return dict.fromkeys(unset, str(usable_cpus(root=root))) if unset else {}


def usable_cpus(*, root: Path = Path("/")) -> int:
    """Return the number of CPUs that the process may use: its affinity, within its cgroups' quotas.

    A quota of 2.5 CPUs counts as two: a third thread would be stopped for half of each period, and
    the other two would wait for it.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([cpus, *(int(quota) for quota in _quotas_cpus(root))]))


def _quotas_cpus(root: Path) -> Iterator[float]:
    """Yield the quotas of the process's cgroups and of those around them, in CPUs."""
    for mount, controlled in _cgroups(root):
        # In a container the path may be the host's: then only the mount's own files exist.
        for folder in (controlled, *controlled.parents):
            quota = _quota_cpus(mount / folder.relative_to("/"))
            if quota is not None:
                yield quota


def _cgroups(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield where hierarchies with CPU quotas are mounted, each with the path of the process's cgroup."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy without names; version 1 one for each set of controllers.
        if not controllers:
            yield mounts, PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            yield mounts / "cpu", PurePosixPath(path)


def _quota_cpus(cgroup: Path) -> float | None:
    """Return the quota of one cgroup in CPUs; None without one. See cgroups(7)."""
    try:
        if (limit := cgroup / "cpu.max").exists():
            quota_us, period_us = limit.read_text("ascii").split()
        else:
            quota_us = (cgroup / "cpu.cfs_quota_us").read_text("ascii")
            period_us = (cgroup / "cpu.cfs_period_us").read_text("ascii")
        # Without a quota version 2 says "max" and version 1 says -1.
        quota_cpus = int(quota_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return quota_cpus if quota_cpus > 0 else None
