"""A family's generated checkpoint is the same in every process, and its answers are read as a chat's."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from machd.engine.protocol.step import SampledToken
from machd.user_directories import user_cache_directory
from machd_probes.vision_families import write_family
from machd_probes.vision_matrix.mlx_vlm_generation import OwnGeneration

pytest.importorskip("mlx_vlm")

_STATE_FAMILY = "qwen3_5"
"""Its decays stay near what the architecture draws, with mlx's own generator."""


def _weights(directory: Path, *, drawn_before: int, seed: int = 0) -> bytes:
    mx.random.seed(drawn_before)
    write_family(_STATE_FAMILY, directory, user_cache_directory(os.environ), seed=seed)
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """What a process drew before changes none of them; another seed changes them."""
    first = _weights(tmp_path / "first", drawn_before=1)
    assert _weights(tmp_path / "again", drawn_before=2) == first
    assert _weights(tmp_path / "other", drawn_before=1, seed=1) != first


def test_special_tokens_are_no_part_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat's answer leaves them out, and random weights say one now and then."""
    directory = write_family("qwen2_vl", tmp_path / "m", user_cache_directory(os.environ))
    own = OwnGeneration(directory)
    words = own._tokenizer.encode("two words", add_special_tokens=False)
    special = own._tokenizer.all_special_ids[0]
    said = [SampledToken(0, token_id) for token_id in (words[0], special, *words[1:])]
    monkeypatch.setattr(own, "tokens", lambda *_: said)
    assert own.answer(("What?",), len(said)) == "two words"
