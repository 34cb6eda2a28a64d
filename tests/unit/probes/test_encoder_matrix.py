"""The encoders' matrix passes right models, and notices faults that are planted into rows, masks and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from machd.capabilities.evidence import Outcome
from machd.capabilities.verdict import Support
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.encoding import bodies, encoder_model, mlx_encoder
from machd.engine.encoding.pooling import first_tokens, pool, pool_packed
from machd.engine.kernels.native_bert import NativeBert
from machd.errors import ModelArchitectureError
from machd_probes.encoder_matrix import checks
from machd_probes.encoder_matrix.catalogue import (
    BATCH_CHECK,
    CHECK_NAMES,
    KERNELS_CHECK,
    POOLING_CHECK,
)
from machd_probes.encoder_matrix.prober import probe_encoder
from machd_probes.encoder_matrix.report import EncoderRow, encoder_matrix_of
from machd_probes.encoder_matrix.subject import EncoderSubject
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS
from machd_probes.versions import encoder_basis

pytest.importorskip("mlx_vlm", reason="the extra vision is not installed")

Plant = Callable[[pytest.MonkeyPatch], None]

_HAS_KERNELS = native_kernels() is not None


def _row(name: str, *check_names: str) -> EncoderRow:
    report = probe_encoder(name, check_names or CHECK_NAMES)
    assert not any("raises" in one.detail for one in report.results), report
    matrix = encoder_matrix_of([report], encoder_basis(backend="cpu", blas=None), "0")
    return matrix.rows[0]


_EVERY_RUN = ("bert", "qwen3")
"""The kept matrix, which a test holds to this code, has all of them."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one in _EVERY_RUN else pytest.mark.long)
        for one in TINY_ENCODERS
    ],
)
def test_a_right_encoder_is_supported(name: str) -> None:
    """Every verdict of every family is supported, with figures of what it kept or was pooled as."""
    row = _row(name)
    verdicts = dict(row.verdicts)
    assert ("pooling" in verdicts) == (row.task == "embed")
    assert ("kernels" in verdicts) == (
        _HAS_KERNELS and "bert" in row.family and "modern" not in name
    )
    for verdict in verdicts.values():
        assert verdict.support is Support.SUPPORTED, verdict.reason
        assert verdict.texts > 0
        figure = verdict.least_cosine if row.task == "embed" else verdict.max_logit_diff
        assert isinstance(figure, float)


def _pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all texts by mlx, padded, where machd's own kernels would take them behind one another."""
    monkeypatch.setattr(NativeBert, "takes", staticmethod(lambda _model: False))


def _swap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each text its neighbour's vector."""

    def rolled(hidden: mx.array, lengths: mx.array, modes: Sequence[str]) -> mx.array:
        pooled = pool(hidden, lengths, modes)
        return mx.concatenate([pooled[-1:], pooled[:-1]])

    _pad(monkeypatch)
    monkeypatch.setattr(mlx_encoder, "pool", rolled)


def _swap_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rolled(hidden: mx.array, lengths: Sequence[int], modes: Sequence[str]) -> mx.array:
        pooled = pool_packed(hidden, lengths, modes)
        return mx.concatenate([pooled[-1:], pooled[:-1]])

    monkeypatch.setattr(mlx_encoder, "pool_packed", rolled)


def _see_a_neighbours_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each text that lies behind another one begin one token too early."""

    def shifted(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        before = np.maximum(np.cumsum([0, *lengths[:-1]]) - 1, 0)
        return first_tokens(hidden[mx.array(before)], [1] * len(lengths))

    monkeypatch.setattr(mlx_encoder, "first_tokens", shifted)


def _forget_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    _pad(monkeypatch)
    _forget_mask(monkeypatch)


def _forget_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bodies, "key_mask", lambda _lengths, tokens: mx.ones((1, 1, 1, tokens), mx.bool_)
    )


def _pool_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the last column and the mean of all, as where padding is at the left or has been forgotten."""

    def pool_all(hidden: mx.array, _lengths: mx.array, modes: Sequence[str]) -> mx.array:
        rows, tokens = hidden.shape[:2]
        return pool(hidden, mx.full((rows,), tokens, dtype=mx.int32), modes)

    _pad(monkeypatch)
    monkeypatch.setattr(mlx_encoder, "pool", pool_all)


def _pool_by(mode: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            mlx_encoder, "pool", lambda hidden, lengths, _modes: pool(hidden, lengths, [mode])
        )
        monkeypatch.setattr(
            mlx_encoder,
            "pool_packed",
            lambda hidden, lengths, _modes: pool_packed(hidden, lengths, [mode]),
        )

    return plant


def _forget_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_encoder, "normalise", lambda found: found)


def _forget_pooling_of_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a classifier's head pool the padding, too."""
    monkeypatch.setattr(
        encoder_model,
        "pool",
        lambda hidden, lengths, modes: pool(
            hidden, mx.full(lengths.shape, hidden.shape[1], dtype=mx.int32), modes
        ),
    )


def _add_too_much_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let machd's own kernels add positions and token types one and a half times."""
    right = NativeBert.__init__

    def init(self: NativeBert, model: object) -> None:
        right(self, model)
        self._typed_positions = self._typed_positions * 1.5

    monkeypatch.setattr(NativeBert, "__init__", init)


_LONG = pytest.mark.long
"""Faults whose like is planted into another model."""

_NATIVE = pytest.mark.skipif(not _HAS_KERNELS, reason="machd's own kernels are not built")


@pytest.mark.parametrize(
    ("name", "plant", "check"),
    [
        ("bert", _swap_rows, BATCH_CHECK),
        pytest.param("qwen3", _swap_rows, BATCH_CHECK, marks=_LONG),
        pytest.param("bert", _swap_packed_rows, BATCH_CHECK, marks=_NATIVE),
        pytest.param("bert-reranker", _see_a_neighbours_token, BATCH_CHECK, marks=_NATIVE),
        ("bert", _forget_padding, BATCH_CHECK),
        pytest.param("modernbert", _forget_padding, BATCH_CHECK, marks=_LONG),
        pytest.param("gemma3_text", _forget_padding, BATCH_CHECK, marks=_LONG),
        pytest.param("llama", _forget_padding, BATCH_CHECK, marks=_LONG),
        pytest.param("llama_bidirec", _forget_padding, BATCH_CHECK, marks=_LONG),
        pytest.param("roberta-classifier", _forget_padding, BATCH_CHECK, marks=_LONG),
        pytest.param("modernbert-reranker", _forget_padding, BATCH_CHECK, marks=_LONG),
        ("modernbert-reranker", _forget_pooling_of_head, BATCH_CHECK),
        pytest.param("bert-max", _pool_padding, BATCH_CHECK, marks=_LONG),
        ("qwen2", _pool_padding, BATCH_CHECK),
        pytest.param("mistral", _pool_padding, BATCH_CHECK, marks=_LONG),
        ("bert", _pool_by("cls"), POOLING_CHECK),
        pytest.param("bert-cls", _pool_by("mean"), POOLING_CHECK, marks=_LONG),
        pytest.param("bert-root", _pool_by("mean"), POOLING_CHECK, marks=_LONG),
        pytest.param("xlm-roberta", _pool_by("max"), POOLING_CHECK, marks=_LONG),
        pytest.param("qwen3", _pool_by("mean"), POOLING_CHECK, marks=_LONG),
        pytest.param("gemma3_text", _pool_by("last"), POOLING_CHECK, marks=_LONG),
        ("bert", _forget_length, POOLING_CHECK),
        pytest.param("llama", _forget_length, POOLING_CHECK, marks=_LONG),
        pytest.param("bert", _forget_mask, KERNELS_CHECK, marks=_NATIVE),
        pytest.param("camembert-classifier", _forget_mask, KERNELS_CHECK, marks=(_NATIVE, _LONG)),
        pytest.param("bert", _add_too_much_of_types, KERNELS_CHECK, marks=_NATIVE),
        pytest.param("roberta", _add_too_much_of_types, KERNELS_CHECK, marks=(_NATIVE, _LONG)),
    ],
)
def test_a_planted_fault_turns_the_verdict(
    name: str, plant: Plant, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's row, a forgotten mask and a wrong pooling are blocked by the check that could see them, in figures or by length."""
    plant(monkeypatch)
    row = _row(name, check)
    (verdict,) = (one for one in dict(row.verdicts).values() if one.texts)
    assert verdict.support is Support.BLOCKED
    assert "differ" in verdict.reason
    assert row.is_wrong
    if "lengths of vectors" in verdict.reason:  # which a cosine does not see
        return
    if row.task == "embed":
        assert isinstance(verdict.least_cosine, float)
        assert verdict.least_cosine < 1 - 100 * checks.MAX_COSINE_GAP
    else:
        assert isinstance(verdict.max_logit_diff, float)
        assert verdict.max_logit_diff > 100 * checks.MAX_LOGIT_DIFF


def test_vectors_that_are_no_number_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals nothing, and its figures can be written down."""
    monkeypatch.setattr(
        EncoderSubject, "compute", lambda _self, texts: np.full((len(texts), 32), np.nan)
    )
    row = _row("qwen3", BATCH_CHECK)
    assert row.batch.support is Support.BLOCKED
    assert row.batch.least_cosine == -1.0


def test_an_encoder_that_answers_every_text_alike_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One vector for all texts hides every fault, so that nothing is said."""
    monkeypatch.setattr(EncoderSubject, "compute", lambda _self, texts: np.ones((len(texts), 32)))
    row = _row("qwen3", BATCH_CHECK)
    assert row.batch.support is Support.UNKNOWN
    assert "same vector" in row.batch.reason


def test_a_check_that_raises_fails_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception is that check's failure."""

    def broken(_subject: EncoderSubject) -> None:
        raise ValueError("[broadcast_shapes] no")

    monkeypatch.setitem(checks.CHECKS, BATCH_CHECK, broken)
    first, second = probe_encoder("qwen3", [BATCH_CHECK, POOLING_CHECK]).results
    assert first.outcome is Outcome.FAILED
    assert first.detail == "raises ValueError: [broadcast_shapes] no"
    assert second.outcome is Outcome.PASSED


def test_an_encoder_that_cannot_be_built_has_a_problem_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without mlx-vlm the row of a family of its names what is missing, and decoders have theirs."""
    monkeypatch.setattr(encoder_model, "is_installed", lambda: False)
    report = probe_encoder("bert")
    assert ModelArchitectureError.__name__ in report.problem
    assert "vision" in report.problem
    matrix = encoder_matrix_of([report], encoder_basis(backend="cpu", blas=None), None)
    assert matrix.rows[0].batch.support is Support.UNKNOWN
    assert not matrix.rows[0].is_wrong
    assert not probe_encoder("qwen3", [POOLING_CHECK]).problem
