"""Matrix libraries get as many threads as the process may use CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.engine.backend.cpu_threads import thread_variables, usable_cpus

_CPUS = 8


@pytest.fixture(autouse=True)
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as on a machine of eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(_CPUS)), raising=False)


def _system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write the kernel's files below ``root``."""
    for name, content in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "cpus"),
    [
        ("0::/\n", {}, _CPUS),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, _CPUS),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, _CPUS),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense\n"}, _CPUS),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ("0::/host/path\n", {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/a\n1:memory:/\n",
            {
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            "4:cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            _CPUS,
        ),
    ],
)
def test_usable_cpus_fit_the_affinity_and_every_quota(
    tmp_path: Path, cgroup: str, files: dict[str, str], cpus: int
) -> None:
    """The least of affinity and whole CPUs of the quotas of versions 1 and 2, parents included, and at least one."""
    assert usable_cpus(root=_system(tmp_path, cgroup, files)) == cpus


def test_usable_cpus_without_cgroups_are_those_of_the_affinity(tmp_path: Path) -> None:
    """A system without the kernel's files has no quota."""
    assert usable_cpus(root=tmp_path) == _CPUS


def test_thread_variables_leave_the_operators_alone(tmp_path: Path) -> None:
    """A variable that is set keeps its value, and OMP_NUM_THREADS speaks for all libraries."""
    root = _system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert thread_variables({}, root=root) == {
        "OPENBLAS_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "BLIS_NUM_THREADS": "2",
    }
    assert "OPENBLAS_NUM_THREADS" not in thread_variables({"OPENBLAS_NUM_THREADS": "7"}, root=root)
    assert thread_variables({"OMP_NUM_THREADS": "7"}, root=root) == {}
