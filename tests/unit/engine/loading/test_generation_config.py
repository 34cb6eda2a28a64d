"""What a checkpoint's publisher wants answers to be drawn with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machd.engine.loading.generation_config import read_default_sampling
from machd.engine.loading.source import ModelSource, SourceKind
from machd.request.generation import DefaultSampling


def _source(directory: Path) -> ModelSource:
    return ModelSource(SourceKind.DIRECTORY, directory, "m")


def read(tmp_path: Path, **written: object) -> tuple[DefaultSampling, tuple[str, ...]]:
    """Read a file with these values."""
    (tmp_path / "generation_config.json").write_text(json.dumps(written), encoding="utf-8")
    return read_default_sampling(_source(tmp_path), "auto")


def test_values_of_the_file_are_defaults(tmp_path: Path) -> None:
    """Those that machd has a parameter for; the rest of the file says nothing here."""
    assert read(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0, repetition_penalty=1.05
    ) == (DefaultSampling(0.6, 0.95, 20, 0, 1.05), ())
    assert read(tmp_path, do_sample=False, eos_token_id=[1, 2], typical_p=0.5, top_k=-1) == (
        DefaultSampling(top_k=0),
        (),
    )


def test_setting_none_leaves_the_file_unread(tmp_path: Path) -> None:
    """Requests have machd's own defaults then."""
    read(tmp_path, temperature=0.6)
    assert read_default_sampling(_source(tmp_path), "none") == (DefaultSampling(), ())


def test_missing_file_says_nothing(tmp_path: Path) -> None:
    """As does one with nulls."""
    assert read_default_sampling(_source(tmp_path), "auto") == (DefaultSampling(), ())
    assert read(tmp_path, temperature=None) == (DefaultSampling(), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", 0),
        ("top_k", 2.5),
        ("top_k", 10**400),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
    ],
)
def test_bad_value_is_left_out_by_name(tmp_path: Path, name: str, value: object) -> None:
    """The others hold; the model is served."""
    other = "top_p" if name != "top_p" else "min_p"
    sampling, (note,) = read(tmp_path, **{name: value, other: 0.5})
    assert sampling.named == {other: 0.5}
    assert f": {name} is no" in note


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"temperature": NaN}'])
def test_unreadable_file_is_left_out_by_name(tmp_path: Path, text: str) -> None:
    """It is no reason not to serve."""
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    sampling, (note,) = read_default_sampling(_source(tmp_path), "auto")
    assert sampling == DefaultSampling()
    assert "generation_config.json" in note
