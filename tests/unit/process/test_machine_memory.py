"""Memory of the machine: what the system tells, and machd's own processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.clocks.polling import wait_until

from machd.process.machine_memory import MachineMemory, held_bytes, read_pressure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=3.00 avg60=0 avg300=0 total=1\n", 12.5),
        ("", None),
        ("some\n", None),
        ("some avg10=much\n", None),
    ],
)  # fmt: skip
def test_pressure_is_read_where_the_system_tells_it(
    tmp_path: Path, text: str, expected: float | None
) -> None:
    """The share of the last ten seconds; None for anything else."""
    path = tmp_path / "memory"
    path.write_text(text)
    assert read_pressure(path) == expected
    assert read_pressure(tmp_path / "none") is None


def test_processes_that_were_started_count_too() -> None:
    """Memory of a child is part of all processes' memory, and the machine has more than that.

    What the child holds for itself is told by its number, without the libraries that it shares.
    """
    program = (
        "import sys; kept = bytearray(64 << 20); print(len(kept), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        own_bytes = psutil.Process().memory_info().rss
        child_bytes = psutil.Process(child.pid).memory_info().rss
        wait_until(
            lambda: MachineMemory.read().process_bytes >= (own_bytes + child_bytes) * 0.9,
            "the child is counted",
        )
        memory = MachineMemory.read()
        child.communicate()
    assert 64 << 20 < memory.held_bytes[child.pid] < child_bytes
    assert held_bytes(child.pid) is None
    assert child_bytes > 64 << 20
    assert 0 < memory.available_bytes <= memory.total_bytes
