"""The fixed text whose perplexity compares weight formats."""

from __future__ import annotations

from importlib.resources import files


def perplexity_text() -> str:
    """Return some 230 words of plain English, written for this purpose."""
    return (files("machd_bench") / "perplexity.txt").read_text(encoding="utf-8").strip()
