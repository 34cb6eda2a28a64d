"""``machd model generate`` writes models that machd serves and checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from machd.cli.model import model


def _run(*args: str) -> Result:
    return CliRunner().invoke(model, args)


def test_generate_writes_a_model_of_the_size(tmp_path: Path) -> None:
    """The directory has weights of about the size, a configuration and a tokenizer."""
    directory = tmp_path / "dense"
    result = _run("generate", "dense", str(directory), "--gb", "0.6")
    assert result.exit_code == 0, result.output
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
    assert (directory / "tokenizer.json").exists()
    layers = [path for path in directory.glob("model-*.safetensors") if "00000" not in path.name]
    assert sum(path.stat().st_size for path in layers) == pytest.approx(6e8, rel=0.05)


def test_generate_refuses_a_directory_with_files(tmp_path: Path) -> None:
    """Nothing is overwritten: a directory that is not empty is bad usage."""
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    result = _run("generate", "moe", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty" in result.output
