"""``scripts/native`` where the kernels cannot be built: it says so, and everything else goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Path:
    """A checkout with this environment, whose stamps stay as they are."""
    for folder in ("native/src", "native/machd_native", "scripts", "requirements"):
        shutil.copytree(_ROOT / folder, tmp_path / folder)
    for file in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(_ROOT / "native" / file, tmp_path / "native")
    environment = tmp_path / ".venv"
    environment.mkdir()
    for entry in (_ROOT / ".venv").iterdir():
        if not entry.name.startswith(".machd"):
            (environment / entry.name).symlink_to(entry)
    return tmp_path


def _run(checkout: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/native"],
        cwd=checkout,
        env={**os.environ, "CXX": compiler, "XDG_CACHE_HOME": str(checkout / "cache")},
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )


def test_without_a_compiler_one_line_says_what_to_install(checkout: Path) -> None:
    """And nothing is installed for the build."""
    done = _run(checkout, "no-such-compiler")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "Tip: install g++ (or what your system calls it) and run scripts/native: going on without machd's own kernels"
    ]
    assert not (checkout / "cache").exists()


@pytest.mark.long
def test_a_build_that_fails_shows_its_end_and_is_tried_again(checkout: Path) -> None:
    """The compiler's own words are in it; nothing of the failed build is kept."""
    source = checkout / "native" / "src" / "threads.cpp"
    source.write_text("#error planted\n" + source.read_text("utf-8"), "utf-8")
    for _ in range(2):
        done = _run(checkout, "c++")
        assert done.returncode == 0
        assert "the kernels cannot be built" in done.stderr
        assert "planted" in done.stderr
        assert done.stderr.splitlines()[-1] == "going on without machd's own kernels"
        assert not list((checkout / "cache").rglob("*.whl"))
