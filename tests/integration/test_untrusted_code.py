"""Commands of machd on a checkpoint that brings Python code: refused in one line, and nothing of it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.kept_family import write_kept_family
from support.checkpoints.planted_code import NAMED_PLACES, OTHER_PLACES, plant
from support.clocks.polling import CEILING_S
from support.daemon.forked_commands import run_machd
from support.daemon.forked_programs import STARTED
from unit.engine.tiny_llama import TinyLlama


@pytest.fixture(name="tiny")
def _tiny(tmp_path: Path) -> TinyLlama:
    return TinyLlama.save(tmp_path / "tiny")


@pytest.mark.parametrize("command", ["check", "serve", "draft model"])
def test_vision_checkpoint_with_code_is_refused_in_one_line(
    tmp_path: Path, tiny: TinyLlama, command: str
) -> None:
    """Check, serve, and serve with it as the draft model end with a line that names the file and the setting."""
    witness = tmp_path / "ran"
    path = write_kept_family("qwen2_vl", tmp_path / "qwen2_vl")
    plant(path, witness, NAMED_PLACES["config.json"], NAMED_PLACES["tokenizer_config.json"])
    arguments = {
        "check": ("check", str(path)),
        "serve": ("serve", str(path), "--server-port", "0"),
        "draft model": (
            *("serve", str(tiny.path), "--server-port", "0"),
            *("--speculation-mode", "draft", "--speculation-draft-model", str(path)),
        ),
    }[command]
    done = run_machd(arguments)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("machd: ")
    assert "config.json (auto_map)" in last
    assert "--model-trust-remote-code" in last
    assert "Traceback" not in done.stderr
    assert not witness.exists()


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, tiny: TinyLlama) -> None:
    """``python -m machd`` in a checkpoint's folder takes its libraries from the installation alone."""
    witness = tmp_path / "ran"
    plant(tiny.path, witness, OTHER_PLACES["modules of others' names"])
    # One that is forked has its libraries already.
    started = STARTED(
        [sys.executable, "-m", "machd", "check", "."], cwd=tiny.path, stdout=subprocess.DEVNULL
    )
    assert started.wait(CEILING_S) == 0
    assert not witness.exists()
