"""``machd model generate`` writes models that machd serves and checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from machd.cli.model import model


def _run(*args: str) -> Result:
    return CliRunner().invoke(model, args)


@pytest.mark.long
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


def test_generate_writes_a_vision_model(tmp_path: Path) -> None:
    """A family other than the default is written, with its processor's files, and the answer names it."""
    directory = tmp_path / "pixtral"
    result = _run("generate", "vision", str(directory), "--family", "pixtral")
    assert result.exit_code == 0, result.output
    assert "of the family pixtral" in result.output
    assert json.loads((directory / "config.json").read_text())["model_type"] == "pixtral"
    assert (directory / "model.safetensors").exists()
    assert (directory / "preprocessor_config.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--family", "qwen2vl"), "the nearest are qwen2_vl"),
        (("--family", "fastvlm"), "cannot be generated"),
        (("--family", "pixtral", "--scale", "mid"), "has no scale 'mid'"),
        (("--gb", "1"), "takes --scale"),
    ],
)
def test_generate_refuses_what_no_vision_model_has(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """An unknown family, one without sizes, a scale that it lacks and a size in bytes are bad usage."""
    result = _run("generate", "vision", str(tmp_path / "model"), *options)
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "model").exists()


def test_a_family_goes_with_vision_only(tmp_path: Path) -> None:
    """A text model has no family."""
    result = _run("generate", "dense", str(tmp_path / "model"), "--family", "qwen2_vl")
    assert result.exit_code == 2
