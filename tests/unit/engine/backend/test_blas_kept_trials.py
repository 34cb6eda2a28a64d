"""Times of BLAS libraries are kept for later starts under the same conditions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.engine.backend.blas_kept_trials import KeptTrials, conditions_key
from machd.engine.backend.blas_trial import BlasTrial, ProductShape

MEASURED = BlasTrial("/lib/a.so", 1.0, 2.0, turns=2)
BROKEN = BlasTrial("/lib/b.so", problem="it crashed", is_broken=True)


def test_trials_are_found_by_their_conditions(tmp_path: Path) -> None:
    """A later process finds them, broken libraries included, and other conditions have none."""
    KeptTrials(tmp_path / "cache").keep("key", [MEASURED, BROKEN])
    kept = KeptTrials(tmp_path / "cache")
    assert kept.find("key") == (MEASURED, BROKEN)
    assert kept.find("other") is None
    assert [one.name for one in (tmp_path / "cache" / "machd").iterdir()] == ["blas.json"]


@pytest.mark.parametrize(
    "trial",
    [BlasTrial("/lib/a.so", problem="not measured within 300 ms"), BlasTrial("/lib/a.so", 1, 2)],
    ids=["out of time", "one turn"],
)
def test_nothing_is_kept_of_a_busy_machine(tmp_path: Path, trial: BlasTrial) -> None:
    """Times that had no second turn would decide for every later start."""
    KeptTrials(tmp_path).keep("key", [MEASURED, trial])
    assert KeptTrials(tmp_path).find("key") is None


def test_the_oldest_trials_are_forgotten(tmp_path: Path) -> None:
    """The file stays small however many models are served."""
    kept = KeptTrials(tmp_path)
    for number in range(40):
        kept.keep(str(number), [MEASURED])
    found = [number for number in range(40) if kept.find(str(number))]
    assert 1 < len(found) < 40
    assert found == list(range(40))[-len(found) :]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"key": [{"library": 1}]}', b"\xff", b'{"key": 1}']
)
def test_a_file_that_is_not_ours_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    """It is no error, and is replaced."""
    kept = KeptTrials(tmp_path)
    (tmp_path / "machd").mkdir()
    (tmp_path / "machd" / "blas.json").write_bytes(content)
    assert kept.find("key") is None
    kept.keep("key", [MEASURED])
    assert kept.find("key") == (MEASURED,)


def test_a_disk_that_takes_nothing_is_not_an_error(tmp_path: Path) -> None:
    """The next start measures again."""
    (tmp_path / "machd").write_bytes(b"a file where the folder would be")
    kept = KeptTrials(tmp_path)
    kept.keep("key", [MEASURED])
    assert kept.find("key") is None


def test_conditions_are_all_that_times_depend_on(tmp_path: Path) -> None:
    """Another file, CPU, shape or number of threads has its own times; the rest of the environment does not count."""
    library, cpu_facts = tmp_path / "a.so", tmp_path / "cpuinfo"
    library.write_bytes(b"1")
    cpu_facts.write_text("model name: one\ncpu MHz: 3\n\nmodel name: second core\n", "utf-8")

    def key(*, width: int = 576, **environ: str) -> str:
        shape = ProductShape(width, 1536)
        return conditions_key([str(library)], shape, environ, cpu_facts=cpu_facts)

    plain = key(HOME="/root")
    assert key(HOME="/home/u") == plain
    cpu_facts.write_text("model name: one\ncpu MHz: 4\n", "utf-8")
    assert key() == plain, "a clock rate of the moment"
    keys = {plain, key(width=2048), key(MKL_NUM_THREADS="2"), key(OMP_NUM_THREADS="2")}
    cpu_facts.write_text("model name: two\n", "utf-8")
    keys.add(key())
    library.write_bytes(b"22")
    keys.add(key())
    os.utime(library, ns=(1, 1))
    keys.add(key())
    assert len(keys) == 7
