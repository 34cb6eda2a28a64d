"""The number of threads that a matrix library should start: as many as the process may use CPUs.

Matrix libraries count the CPUs of the machine. In a container with a quota of two CPUs on a machine
of 64 they would start 64 threads, which wait for each other and use up the quota by waiting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from machd.engine.backend.control_groups import control_groups, group_text

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_FOR_ALL = "OMP_NUM_THREADS"
"""Every one of the libraries reads it where its own variable is not set."""


def thread_variables(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that give each library as many threads as the process may use CPUs.

    Without them BLIS takes one thread, and OpenBLAS and MKL take no notice of a quota.
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


def _quotas_cpus(root: Path) -> list[float]:
    """Return the quotas of the process's cgroups and of those around them, in CPUs."""
    try:
        quotas = [_quota_cpus(group) for group in control_groups("cpu", root)]
    except OSError:
        return []
    return [quota for quota in quotas if quota is not None]


def _quota_cpus(group: Path) -> float | None:
    """Return the quota of one cgroup in CPUs; None without one. See cgroups(7)."""
    limit = group_text(group, "cpu.max")  # version 2: quota and period
    if limit is None:
        quota, period = (
            group_text(group, f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")
        )
        limit = f"{quota} {period}"
    try:
        quota_us, period_us = limit.split()
        # Without a quota version 2 says "max" and version 1 says -1.
        quota_cpus = int(quota_us) / int(period_us)
    except (ValueError, ZeroDivisionError):
        return None
    return quota_cpus if quota_cpus > 0 else None
