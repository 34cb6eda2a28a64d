"""A BLAS is chosen before an engine is opened, and the log says what computes and what is wrong with the disk tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S
from support.engines.block_samples import content_of, file_of, saved_block
from support.engines.native import without_kernels
from unit.engine.tiny_llama import TinyLlama

from machd.engine import open as opening
from machd.engine.backend import blas, native_kernels
from machd.engine.backend.blas import BlasChoice, BlasReport, RefusedLibrary
from machd.engine.backend.blas_check import BlasCheck
from machd.engine.loading.loader import load_model
from machd.engine.open import _engine, choose_checked_blas
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.key import block_key
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

_OPEN = """
import sys
from pathlib import Path
from machd.engine.open import engine_loader
from machd.engine.protocol.progress import SilentProgress
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


@pytest.fixture(name="checked")
def _checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """Two libraries are installed, the first multiplies wrongly, and nothing is loaded: checks, with their environment."""
    checked: list[tuple[str, dict[str, str]]] = []

    def check(library: str, environ: dict[str, str]) -> BlasCheck:
        checked.append((library, dict(environ)))
        return BlasCheck("[1, 2] times [3, 2] is wrong" if library == "a" else None)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_expects_cuda", lambda: False)
    monkeypatch.setattr(blas, "installed_libraries", lambda _environ: ("a", "b"))
    monkeypatch.setattr(blas, "_load", lambda _library: None)
    monkeypatch.setattr(opening, "check_products", check)
    return checked


def test_a_wrong_library_is_checked_once_and_left_out(
    tmp_path: Path, checked: list[tuple[str, dict[str, str]]]
) -> None:
    """The next start reads what was found."""
    for _ in range(2):
        choice = choose_checked_blas("auto", cache_directory=tmp_path, environ={})
        assert choice.library == "b"
        assert choice.refused == (RefusedLibrary("a", "[1, 2] times [3, 2] is wrong"),)
    assert [library for library, _ in checked] == ["a", "b"]


def test_threads_are_bounded_before_a_library_is_loaded(
    tmp_path: Path,
    checked: list[tuple[str, dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process and the check get the same numbers, and the operator's stand."""
    monkeypatch.setattr("machd.engine.backend.cpu_threads.usable_cpus", lambda **_: 2)
    environ = {"OPENBLAS_NUM_THREADS": "3"}
    choose_checked_blas("auto", cache_directory=tmp_path, environ=environ)
    assert environ == {"OPENBLAS_NUM_THREADS": "3", "MKL_NUM_THREADS": "2", "BLIS_NUM_THREADS": "2"}
    assert [used for _, used in checked] == [environ, environ]


@pytest.mark.parametrize(
    ("platform", "is_installed", "is_warned"),
    [("linux", False, True), ("linux", True, False), ("darwin", False, False)],
)
def test_missing_kernels_are_warned_of_on_a_linux_cpu(
    monkeypatch: pytest.MonkeyPatch, platform: str, *, is_installed: bool, is_warned: bool
) -> None:
    """The advice names both ways to get them; it stands beside that about the BLAS."""
    if not is_installed:
        without_kernels(monkeypatch)
    elif native_kernels.native_kernels() is None:
        pytest.skip("machd's own kernels are not installed")
    monkeypatch.setattr(sys, "platform", platform)
    slow = BlasReport("cpu", "reference BLAS", 1.0, 16.0, is_reference=True, advice="install it")
    monkeypatch.setattr(opening, "measure_blas", lambda _choice: slow)
    with capture_logs() as lines:
        opening._logged_blas(BlasChoice("off", None, "switched off"))
    events = ["blas.measured", "blas.slow", *["kernels.missing"] * is_warned]
    assert [one["event"] for one in lines] == events
    if is_warned:
        assert lines[-1]["log_level"] == "warning"
        assert "scripts/native" in lines[-1]["advice"]
        assert "machd-native" in lines[-1]["advice"]
