"""A directory of adapters as an operator has one: small, random, and told apart by their seeds."""

from __future__ import annotations

from pathlib import Path

from machd.engine.adapters.adapter_files import adapter_digest
from support.checkpoints.adapters import (
    gguf_metadata,
    gguf_tensors,
    mlx_lm_config,
    mlx_lm_tensors,
    random_adapter,
    write_gguf_adapter,
    write_mlx_lm,
)


def write_adapter(path: Path, seed: int = 0) -> Path:
    """Write an adapter of mlx-lm's, or as GGUF where the name says so; another seed gives other content."""
    adapter = random_adapter(seed=seed, rank=2)
    if path.suffix == ".gguf":
        return write_gguf_adapter(path, gguf_tensors(adapter), gguf_metadata(adapter))
    return write_mlx_lm(path, mlx_lm_tensors(adapter), mlx_lm_config(adapter))


def said(path: Path, scale: float = 1.0, *, name: str | None = None) -> str:
    """What :func:`support.engines.dialogue.says_its_adapters` says of a row with this adapter alone."""
    return f"{name or path.stem}*{scale:g}*{adapter_digest(path).hex()[:8]}"
