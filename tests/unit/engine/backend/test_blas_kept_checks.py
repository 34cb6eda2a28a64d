"""Checks of BLAS libraries are kept for later starts under the same conditions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.engine.backend.blas_check import BlasCheck
from machd.engine.backend.blas_kept_checks import KeptChecks, conditions_key

RIGHT = BlasCheck(None)
WRONG = BlasCheck("[1, 2] times [3, 2] is wrong in row 0")


def test_checks_are_found_by_their_conditions(tmp_path: Path) -> None:
    """A later process finds them, those of wrong libraries included, and other conditions have none."""
    kept = KeptChecks(tmp_path / "cache")
    kept.keep("right", RIGHT)
    kept.keep("wrong", WRONG)
    kept = KeptChecks(tmp_path / "cache")
    assert (kept.find("right"), kept.find("wrong"), kept.find("other")) == (RIGHT, WRONG, None)
    assert [one.name for one in (tmp_path / "cache" / "machd").iterdir()] == ["blas.json"]


def test_a_check_without_time_is_not_kept(tmp_path: Path) -> None:
    """A busy machine would decide for every later start."""
    KeptChecks(tmp_path).keep("key", BlasCheck("it took longer than 30 s", is_lasting=False))
    assert KeptChecks(tmp_path).find("key") is None


def test_the_oldest_checks_are_forgotten(tmp_path: Path) -> None:
    """The file stays small however often a library is replaced."""
    kept = KeptChecks(tmp_path)
    for number in range(40):
        kept.keep(str(number), RIGHT)
    found = [number for number in range(40) if kept.find(str(number))]
    assert 1 < len(found) < 40
    assert found == list(range(40))[-len(found) :]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"key": {"library": 1}}', b"\xff", b'{"trials": {}}']
)
def test_a_file_that_is_not_ours_is_replaced(tmp_path: Path, content: bytes) -> None:
    """It is no error: the library is checked again."""
    kept = KeptChecks(tmp_path)
    (tmp_path / "machd").mkdir()
    (tmp_path / "machd" / "blas.json").write_bytes(content)
    assert kept.find("key") is None
    kept.keep("key", RIGHT)
    assert kept.find("key") == RIGHT


def test_a_disk_that_takes_nothing_is_not_an_error(tmp_path: Path) -> None:
    """The next start checks again."""
    (tmp_path / "machd").write_bytes(b"a file where the folder would be")
    kept = KeptChecks(tmp_path)
    kept.keep("key", RIGHT)
    assert kept.find("key") is None


def test_conditions_are_all_that_a_check_depends_on(tmp_path: Path) -> None:
    """Another file, CPU or number of threads has its own check; the rest of the environment does not count."""
    library, cpu_facts = tmp_path / "a.so", tmp_path / "cpuinfo"
    library.write_bytes(b"1")
    cpu_facts.write_text("model name: one\ncpu MHz: 3\n\nmodel name: second core\n", "utf-8")

    def key(**environ: str) -> str:
        return conditions_key(str(library), environ, cpu_facts=cpu_facts)

    plain = key(HOME="/root")
    assert key(HOME="/home/u") == plain
    cpu_facts.write_text("model name: one\ncpu MHz: 4\n", "utf-8")
    assert key() == plain, "a clock rate of the moment"
    keys = {plain, key(MKL_NUM_THREADS="2"), key(OMP_NUM_THREADS="2")}
    cpu_facts.write_text("model name: two\n", "utf-8")
    keys.add(key())
    library.write_bytes(b"22")
    keys.add(key())
    os.utime(library, ns=(1, 1))
    keys.add(key())
    assert len(keys) == 6
