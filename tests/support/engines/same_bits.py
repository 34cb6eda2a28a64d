"""Rows in company and alone, compared to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.protocol.step import SampledToken
from machd.engine.step.mlx_engine import MlxEngine
from machd_probes.play import Join, play

Said = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]
"""Each token of a row, its log-probability, and the likeliest ones with theirs."""


def said(engine: MlxEngine, rows: list[Join]) -> list[Said]:
    """Return what rows say that are computed together."""
    return [bits(tokens) for tokens in play(engine, rows)]


def bits(tokens: Sequence[SampledToken]) -> Said:
    """Return what is compared of a row's tokens."""
    return [
        (one.token_id, one.logprob, tuple((top.token_id, top.logprob) for top in one.top_logprobs))
        for one in tokens
    ]


def assert_same_bits_alone(engine: MlxEngine, rows: list[Join], threads: int) -> None:
    """Assert that rows, computed together on so many threads, say what each says alone on as many as usual."""
    native = native_kernels()
    usual = native.thread_count()
    native.set_thread_count(threads)
    try:
        together = said(engine, rows)
    finally:
        native.set_thread_count(usual)
    for row, its in zip(rows, together, strict=True):
        (alone,) = said(engine, [Join(row.prompt, row.tokens, row.sampling)])
        assert its == alone
