"""Available memory is the nearest limit, the control group's included."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from machd.engine.backend import device

MIB = 1024**2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


def _group(path: Path, limit: str, used_bytes: int, inactive_bytes: int) -> None:
    path.mkdir(exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used_bytes}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_bytes}\n")


def _planted(root: Path, groups: str, slice_folder: str) -> Path:
    """Plant a tree of control groups.

    Returns:
        The folder of the process's own, which does not exist yet.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    own_slice = root / "sys/fs/cgroup" / slice_folder
    own_slice.mkdir(parents=True)
    return own_slice / "machd.service"


@pytest.fixture(name="own_group")
def _own_group(tmp_path: Path) -> Path:
    """A service's group below a slice, in place of the process's own."""
    return _planted(tmp_path, "0::/system.slice/machd.service\n", "system.slice")


def test_the_nearest_limit_counts(tmp_path: Path, own_group: Path) -> None:
    """Pages that the kernel can drop are not use; a limit above the group counts too."""
    _group(own_group, str(100 * MIB), 60 * MIB, 10 * MIB)
    assert device._control_group_bytes(tmp_path) == 50 * MIB
    _group(own_group.parent, str(80 * MIB), 50 * MIB, 0)
    assert device._control_group_bytes(tmp_path) == 30 * MIB


def test_no_limit_is_no_limit(tmp_path: Path, own_group: Path) -> None:
    """``max`` says nothing, and neither does a machine without these files."""
    assert device._control_group_bytes(tmp_path) is None
    _group(own_group, "max", 60 * MIB, 10 * MIB)
    assert device._control_group_bytes(tmp_path) is None


def _first_version(path: Path, limit_bytes: int, used_bytes: int, inactive_bytes: int) -> None:
    path.mkdir(exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
    (path / "memory.usage_in_bytes").write_text(f"{used_bytes}\n")
    (path / "memory.stat").write_text(
        f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive_bytes}\n"
    )


_UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit, with pages of 4 KiB."""


@pytest.mark.parametrize("second", ["", "0::/\n"])
def test_limits_of_version_1_are_read_as_those_of_version_2(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hierarchy of the memory controller bounds what is left and the capacity, beside an empty one of version 2 too."""
    groups = "4:cpu,cpuacct:/elsewhere\n7:memory:/system.slice/machd.service\n"
    own_group = _planted(tmp_path, groups + second, "memory/system.slice")
    monkeypatch.setattr(device, "_ROOT", tmp_path)
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    _first_version(own_group.parent.parent, _UNLIMITED, 90 * MIB, 0)
    _first_version(own_group.parent, 80 * MIB, 50 * MIB, 0)
    _first_version(own_group, 100 * MIB, 85 * MIB, 10 * MIB)
    assert device._control_group_bytes(tmp_path) == 25 * MIB
    assert device.device_memory_bytes() == 80 * MIB
    _first_version(own_group.parent, _UNLIMITED, 50 * MIB, 0)
    assert device.device_memory_bytes() == 100 * MIB


def test_a_container_sees_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    """Version 1 without a namespace tells the host's path, of which the container has no folder."""
    groups = "7:memory:/docker/0123456789abcdef\n"
    mount = _planted(tmp_path, groups, "memory").parent
    _first_version(mount, 100 * MIB, 60 * MIB, 10 * MIB)
    assert device._control_group_bytes(tmp_path) == 50 * MIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path, own_group: Path) -> None:
    """Never a negative number of bytes."""
    _group(own_group, str(10 * MIB), 60 * MIB, 0)
    assert device._control_group_bytes(tmp_path) == 0


def test_the_limit_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a service with ``MemoryMax`` has no more than that."""
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    monkeypatch.setattr(device, "_control_group_bytes", lambda: MIB)
    assert device.available_memory_bytes() == MIB


@pytest.mark.parametrize(
    ("which", "used_pages"), [(resource.RLIMIT_AS, 300), (resource.RLIMIT_DATA, 100)]
)
def test_a_limit_of_the_process_bounds_what_is_available(
    which: int, used_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ulimit -v`` counts the address space, ``ulimit -d`` the data; both bound the capacity, too."""
    limits = {which: (500 * resource.getpagesize(), resource.RLIM_INFINITY)}
    nothing = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda one: limits.get(one, nothing))
    statm = tmp_path / "statm"
    statm.write_text("300 200 50 1 0 100 0\n")
    monkeypatch.setattr(device, "_STATM", statm)
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    assert device.available_memory_bytes() == (500 - used_pages) * resource.getpagesize()
    assert device.device_memory_bytes() == 500 * resource.getpagesize()


def test_a_limit_that_cannot_be_read_is_not_taken_for_none(
    own_group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file descriptor the reading fails: the machine's memory is not the service's."""
    _group(own_group, str(100 * MIB), 60 * MIB, 0)
    monkeypatch.setattr(device, "_ROOT", tmp_path)
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    right = os.open

    def open_file(path: str, flags: int) -> int:
        if path.endswith("/memory.max"):
            raise OSError(errno.EMFILE, "Too many open files")
        return right(path, flags)

    monkeypatch.setattr(os, "open", open_file)
    with pytest.raises(OSError, match="Too many open files"):
        device._control_group_bytes(tmp_path)


def test_capacity_is_the_machines_or_the_groups(
    tmp_path: Path, own_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory in use does not count against the device's total; the nearest limit does."""
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    monkeypatch.setattr(device, "_ROOT", tmp_path)
    machine_bytes = psutil.virtual_memory().total
    assert device.device_memory_bytes() == machine_bytes
    _group(own_group, "max", 60 * MIB, 0)
    assert device.device_memory_bytes() == machine_bytes
    _group(own_group, str(100 * MIB), 60 * MIB, 0)
    assert device.device_memory_bytes() == 100 * MIB
    _group(own_group.parent, str(80 * MIB), 70 * MIB, 0)
    assert device.device_memory_bytes() == 80 * MIB


@pytest.mark.parametrize(
    ("facts", "expected_bytes"),
    [
        ({"max_recommended_working_set_size": 7, "memory_size": 9, "device_name": "Apple"}, 7),
        ({"free_memory": 3, "total_memory": 8}, 8),
    ],
    ids=["metal", "cuda"],
)
def test_a_gpus_capacity_is_what_it_recommends_or_has(
    facts: dict[str, int | str], expected_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recommended working set where there is one, else all of the device's memory."""
    monkeypatch.setattr(device, "backend_name", lambda: "metal")
    monkeypatch.setattr("mlx.core.device_info", lambda: facts)
    assert device.device_memory_bytes() == expected_bytes


@pytest.mark.parametrize(
    ("machine_bytes", "reusable_bytes", "expected_bytes"),
    [(100, 0, 70), (20, 0, 20), (20, 15, 35), (65, 15, 70), (0, 0, 0)],
    ids=["plenty", "others have it", "some of it is ours", "enough of it is ours", "nothing"],
)
def test_metal_shares_the_machines_memory(
    machine_bytes: int, reusable_bytes: int, expected_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory held by other processes is not available; memory that mlx keeps for reuse is."""
    facts = {"max_recommended_working_set_size": 80, "memory_size": 128}
    monkeypatch.setattr(device, "backend_name", lambda: "metal")
    monkeypatch.setattr("mlx.core.device_info", lambda: facts)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: 10)
    monkeypatch.setattr("mlx.core.get_cache_memory", lambda: reusable_bytes)
    machine = psutil.virtual_memory()._replace(available=machine_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert device.available_memory_bytes() == expected_bytes
    assert device.computing_memory_bytes() == 70, "macOS makes room for steps"


def test_cuda_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory available on CUDA does not depend on the memory of the machine."""
    machine = psutil.virtual_memory()._replace(available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(device, "backend_name", lambda: "cuda")
    monkeypatch.setattr("mlx.core.device_info", lambda: {"free_memory": 7, "total_memory": 9})
    assert device.available_memory_bytes() == 7


def test_a_gpu_has_a_name_and_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the one that mlx gives; mlx of another version may give none."""
    facts: dict[str, object] = {"device_name": "NVIDIA H200"}
    monkeypatch.setattr("mlx.core.device_info", lambda: facts)
    monkeypatch.setattr(device, "backend_name", lambda: "cuda")
    assert device.device_name() == "NVIDIA H200"
    facts.clear()
    assert device.device_name() is None
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    facts["device_name"] = "a CPU"
    assert device.device_name() is None
