"""The kernels' own tests once more, under sanitizers that end at the first wrong access or undefined operation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("machd_native", reason="make setup has found no compiler")

_ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.timeout(
    2400
)  # it builds all kernels and runs 450 tests, all many times slower than usual
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' library")
def test_kernels_touch_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    """Every shape and format of products, with address and undefined-behaviour sanitizers in all kernels."""
    build, package = tmp_path / "build", tmp_path / "site" / "machd_native"
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    configure = [f"-DPython_EXECUTABLE={sys.executable}", "-DMACHD_SANITIZE=ON", "-G", "Ninja"]
    for command in (
        ["cmake", "-S", str(_ROOT / "native"), "-B", str(build), *configure],
        ["cmake", "--build", str(build)],
    ):
        _run(command, {**os.environ, "PATH": path})
    shutil.copytree(_ROOT / "native" / "machd_native", package)
    (module,) = build.glob("_kernels*.so")
    shutil.copy(module, package)
    # libstdc++ beside it: the sanitizer looks for what throws before Python has loaded it.
    libraries = [
        _run(["c++", f"-print-file-name={name}"], dict(os.environ)).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", ""))),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
    }
    files = (
        "test_products",
        "test_gathered_products",
        "test_attention",
        "test_rows",
        "test_low_rank",
        "test_llama_layers",
        "test_bert_layers",
    )
    tests = [str(Path(__file__).with_name(f"{name}.py")) for name in files]
    # -s: what a sanitizer writes as the process ends is not captured.
    _run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests], environment
    )


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=_ROOT
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
