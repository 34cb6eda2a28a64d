"""A BLAS is chosen for the model before an engine is opened, and the log says what is wrong with the disk tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S
from support.engines.block_samples import content_of, file_of, saved_block
from unit.engine.tiny_llama import TinyLlama

from machd.engine import open as opening
from machd.engine.backend import blas
from machd.engine.backend.blas import BlasChoice, RefusedLibrary
from machd.engine.backend.blas_trial import BlasCheck, BlasTrial, ProductShape
from machd.engine.loading.loader import load_model
from machd.engine.open import _engine, choose_blas_for
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.key import block_key
from machd.engine.ranks.joining import RankPlace
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

_OPEN = """
import sys
from pathlib import Path
from machd.engine.open import engine_loader
from machd.engine.backend.progress import SilentProgress
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings
is_on, directory, cache_directory = sys.argv[1:]
settings = Settings(cache=CacheSettings(prefix=is_on == "on", disk_dir=directory or None))
engine_loader(
    settings, cache_directory=Path(cache_directory), environ={},
    progress=SilentProgress(),
)
"""


@pytest.mark.parametrize(("prefix", "directory"), [("off", "b"), ("on", "b"), ("off", "")])
def test_directory_without_a_prefix_cache_is_warned_of(
    tmp_path: Path, prefix: str, directory: str
) -> None:
    """The log says so before anything is loaded; neither setting alone is wrong."""
    path = str(tmp_path / directory) if directory else ""
    # A process of its own, because preparing for mlx chooses a BLAS for the whole process.
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, prefix, path, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=CEILING_S,
    )  # fmt: skip
    is_warned = "blocks.not_used" in done.stdout + done.stderr
    assert is_warned is ((prefix, directory) == ("off", "b"))


def test_damaged_files_are_warned_of(tmp_path: Path, tiny: TinyLlama) -> None:
    """Damaged files that are found at the start are logged as those that are read later."""
    loaded = load_model(tiny.source)
    root, key, saved = tmp_path / "blocks", block_key(loaded), saved_block(1)
    settings = Settings(cache=CacheSettings(disk_dir=str(root)))
    for count in (0, 1):
        files = DiskTier(root, key)
        files.save(saved, content_of(saved))
        files.close(10)
        if count:
            file_of(root, key, saved).write_bytes(b"not a block")
        with capture_logs() as lines:
            _engine(loaded, settings, root).close()
        warned = [one for one in lines if one["event"] == "blocks.damaged"]
        assert [(one["count"], one["log_level"]) for one in warned] == [(1, "warning")] * count


class _Comparison:
    """Stands in for the measurement of two installed libraries; ``b`` is the faster."""

    def __init__(self) -> None:
        self.shapes: list[ProductShape] = []
        self.environ: dict[str, str] = {}

    def __call__(
        self, libraries: tuple[str, ...], shape: ProductShape, environ: dict[str, str]
    ) -> tuple[BlasTrial, ...]:
        self.shapes.append(shape)
        self.environ = environ
        return tuple(BlasTrial(one, 3.0 - n, 3.0 - n, turns=2) for n, one in enumerate(libraries))


@pytest.fixture(name="comparison")
def _comparison(monkeypatch: pytest.MonkeyPatch) -> _Comparison:
    """Two libraries are installed, mlx is not imported, and nothing is loaded."""
    comparison = _Comparison()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_expects_cuda", lambda: False)
    monkeypatch.setattr(blas, "installed_libraries", lambda _environ: ("a", "b"))
    monkeypatch.setattr(blas, "_load", lambda _library: None)
    monkeypatch.setattr(opening, "compare_libraries", comparison)
    monkeypatch.setattr(opening, "check_products", lambda *_: BlasCheck(None))
    return comparison


def _chosen(tmp_path: Path, environ: dict[str, str], place: RankPlace | None = None) -> BlasChoice:
    return choose_blas_for(
        str(tmp_path),
        "auto",
        cache_directory=tmp_path,
        environ=environ,
        place=place,
    )


def test_libraries_are_compared_once_with_the_models_shape(
    tmp_path: Path, comparison: _Comparison
) -> None:
    """The next start takes the same library without measuring; another model is measured."""
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 576, "intermediate_size": 1536}', "utf-8")
    choices = [_chosen(tmp_path, {}) for _ in range(2)]
    assert [one.library for one in choices] == ["b", "b"]
    assert choices[0].trials == choices[1].trials
    assert comparison.shapes == [ProductShape(576, 1536)]

    config.write_text('{"hidden_size": 64, "intermediate_size": 128}', "utf-8")
    assert _chosen(tmp_path, {}).library == "b"
    assert comparison.shapes[1:] == [ProductShape(64, 128)]


def test_a_wrong_library_is_checked_once_and_left_out(
    tmp_path: Path, comparison: _Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks leave it out too; what was found is kept, and nothing else is compared with it."""
    checked: list[str] = []

    def check(library: str, *_: object) -> BlasCheck:
        checked.append(library)
        return BlasCheck("[1, 2] times [3, 2] is wrong" if library == "a" else None)

    monkeypatch.setattr(opening, "check_products", check)
    place = RankPlace(rank=0, backend="ring")
    for choice in (_chosen(tmp_path, {}), _chosen(tmp_path, {}), _chosen(tmp_path, {}, place)):
        assert choice.library == "b"
        assert choice.refused == (RefusedLibrary("a", "[1, 2] times [3, 2] is wrong"),)
    assert checked == ["a", "b"]
    assert comparison.shapes == []


def test_ranks_measure_nothing(tmp_path: Path, comparison: _Comparison) -> None:
    """They take the first library of a fixed order, so that no clock of one rank decides."""
    place = RankPlace(rank=0, backend="ring")
    assert _chosen(tmp_path, {}, place).library == "a"
    assert comparison.shapes == []


def test_threads_are_bounded_before_a_library_is_loaded(
    tmp_path: Path, comparison: _Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process and the measurement get the same numbers, and the operator's stand."""
    monkeypatch.setattr("machd.engine.backend.cpu_threads.usable_cpus", lambda **_: 2)
    environ = {"OPENBLAS_NUM_THREADS": "3"}
    _chosen(tmp_path, environ)
    assert environ == {"OPENBLAS_NUM_THREADS": "3", "MKL_NUM_THREADS": "2", "BLIS_NUM_THREADS": "2"}
    assert comparison.environ == environ
