"""A result is found again as long as it holds, and never a moment longer."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.probes.fake_worker import made_report

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import LayerCacheFacts
from machd.capabilities.matrix import ArchitectureReport
from machd_probes.results_cache import ResultsCache, results_directory
from machd_probes.sources import sources_digest
from machd_probes.versions import ProbeBasis, probe_basis
from machd_probes.worker_messages import faulted

BASIS = ProbeBasis(
    machd="1", mlx="2", mlx_lm="3", backend="cpu", blas="B 4", dtype="float32", sources="5"
)
REPORT = made_report(
    "qwen3", layer=LayerCacheFacts("CacheList", nested=(LayerCacheFacts("KVCache"),))
)


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    """Return where results lie, not yet made."""
    return results_directory(tmp_path / "cache")


def the_file(directory: Path) -> Path:
    """The only one."""
    (path,) = directory.rglob("*.json")
    return path


def test_a_row_is_found_again(directory: Path) -> None:
    """What was put is what is got, nested facts and figures and all, by another cache too."""
    ResultsCache(directory, BASIS).put(REPORT)

    assert ResultsCache(directory, BASIS).get("qwen3") == REPORT
    assert ResultsCache(directory, BASIS).get("qwen2") is None


def test_results_of_a_loaded_model_are_found_again(directory: Path) -> None:
    """Keys may be any text; a model and an architecture of one name are two things."""
    cache = ResultsCache(directory, BASIS)
    key = "/models/../llama \ud800 1753000000"
    results = (ProbeResult("batch_parity", Outcome.PASSED),)
    cache.put_results(key, results)
    cache.put(made_report("llama"))

    assert cache.get_results(key) == results
    assert cache.get_results("llama") is None
    assert cache.get(key) is None


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ProbeBasis)])
def test_nothing_is_found_on_another_basis(directory: Path, field: str) -> None:
    """A change of any version, of what computes, or of the probes' code measures anew."""
    ResultsCache(directory, BASIS).put(REPORT)
    other = dataclasses.replace(BASIS, **{field: "other"})

    assert ResultsCache(directory, other).get("qwen3") is None


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "a/b", "", ".", "x" * 5000, "nul\x00"]
)
def test_a_name_cannot_leave_the_directory(directory: Path, name: str) -> None:
    """Whatever a row is called, its file lies where results lie, and is found."""
    cache = ResultsCache(directory, BASIS)
    cache.put(made_report(name))

    assert the_file(directory).is_relative_to(directory)
    assert cache.get(name) == made_report(name)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def _other_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"passed"', b'"well done"'))


def _other_basis(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"blas":"B 4"', b'"blas":"B 5"'))


def _other_name(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"qwen3"', b'"llama"'))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _folder_open_to_others(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _empty,
        _deep,
        _binary,
        _other_shape,
        _other_basis,
        _other_name,
        _folder,
        _folder_open_to_others,
    ],
)
def test_a_file_that_is_not_ours_is_no_result_and_no_error(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    """Corrupt, of another basis, of another name, or open to others: it is measured anew."""
    cache = ResultsCache(directory, BASIS)
    cache.put(REPORT)
    damage(the_file(directory))

    assert cache.get("qwen3") is None
    cache.put(REPORT)


def test_a_damaged_file_is_replaced(directory: Path) -> None:
    """The next measurement puts a whole file in its place, and leaves nothing beside it."""
    cache = ResultsCache(directory, BASIS)
    cache.put(REPORT)
    _cut(the_file(directory))
    cache.put(REPORT)

    assert cache.get("qwen3") == REPORT
    assert [path.name for path in the_file(directory).parent.iterdir()] == [
        the_file(directory).name
    ]


def test_everything_is_ours_alone(directory: Path) -> None:
    """Folders have mode 0700 and files 0600: no other user can plant a verdict."""
    ResultsCache(directory, BASIS).put(REPORT)
    path = the_file(directory)
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, directory)]

    assert modes == [0o600, 0o700, 0o700]


def test_a_directory_of_anothers_is_neither_read_nor_written(
    directory: Path, tmp_path: Path
) -> None:
    """A link in the directory's place could lead to forged results."""
    elsewhere = tmp_path / "elsewhere"
    ResultsCache(elsewhere, BASIS).put(REPORT)
    directory.parent.mkdir(parents=True)
    directory.symlink_to(elsewhere)
    cache = ResultsCache(directory, BASIS)
    cache.put(made_report("llama"))

    assert cache.get("qwen3") is None
    assert len(list(elsewhere.rglob("*.json"))) == 1


def test_a_disk_that_takes_nothing_is_no_error(directory: Path) -> None:
    """Where results cannot be kept they are measured every time."""
    directory.parent.mkdir(parents=True)
    directory.write_bytes(b"a file in the way")
    cache = ResultsCache(directory, BASIS)
    cache.put(REPORT)
    cache.put_results("key", REPORT.results)

    assert cache.get("qwen3") is None


def test_a_run_that_broke_off_is_not_kept(directory: Path) -> None:
    """A crash, a limit that was passed, want of memory: all again; a failed probe is a result."""
    cache = ResultsCache(directory, BASIS)
    cache.put(made_report("mamba", Outcome.ERRORED))
    cache.put(made_report("olmo", mlx_lm=Outcome.ERRORED))
    cache.put(ArchitectureReport("dbrx", problem="the tiny model raises MemoryError: "))
    cache.put(faulted("qwen3", "it took more than 60 s"))
    cache.put(made_report("llama", Outcome.FAILED))
    cache.put(ArchitectureReport("gemma", problem="no tiny configuration"))

    for name in ("qwen3", "mamba", "olmo", "dbrx"):
        assert cache.get(name) is None
    assert cache.get("llama") == made_report("llama", Outcome.FAILED)
    assert cache.get("gemma") is not None


def test_old_bases_are_forgotten(directory: Path) -> None:
    """Upgrades do not fill the disk: the newest few folders stay, the one in use among them."""
    bases = [dataclasses.replace(BASIS, sources=str(index)) for index in range(20)]
    for index, basis in enumerate(bases):
        ResultsCache(directory, basis).put(REPORT)
        os.utime(directory / basis.key, (1000.0 + index, 1000.0 + index))

    assert len(list(directory.iterdir())) <= 9
    assert ResultsCache(directory, bases[-1]).get("qwen3") == REPORT


def test_the_basis_is_that_of_this_installation() -> None:
    """Versions are those installed, and what computes is what the caller says."""
    basis = probe_basis(backend="cpu", blas=None)

    assert basis.mlx_lm[0].isdigit()
    assert basis.versions.dtype == "float32"
    assert basis.sources == sources_digest()
