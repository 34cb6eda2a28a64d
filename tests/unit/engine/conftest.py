"""A tiny model for the engine's tests, made on the fly."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.engine.tiny_llama import TinyLlama


@pytest.fixture
def tiny(tmp_path: Path) -> TinyLlama:
    """A two-layer llama with random weights, saved in mlx-lm layout."""
    return TinyLlama.save(tmp_path / "tiny-llama")
