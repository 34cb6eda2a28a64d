"""The checks of the encoders' matrix: vectors and logits of texts, compared with those of the same texts computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from machd.capabilities.evidence import Evidence, Outcome
from machd.engine.protocol.encoder import EncoderInput
from machd_probes.encoder_matrix.catalogue import BATCH_CHECK, KERNELS_CHECK, POOLING_CHECK
from machd_probes.encoder_matrix.subject import EncoderSubject, Vectors
from machd_probes.encoder_matrix.tiny_checkpoint import token_ids
from machd_probes.encoder_matrix.tiny_encoders import LENGTHS
from machd_probes.finding import Finding, no_data, unsupported

MAX_COSINE_GAP = 1e-6
"""Rounding was measured at 1e-12 and less; a neighbour's token that is seen makes more than 1e-3."""

MAX_LOGIT_DIFF = 1e-4
"""Rounding was measured at 1e-6 and less."""

_MAX_LENGTH_DIFF = 1e-3
"""Relative, of two vectors' lengths, which a cosine does not see."""

_LEAST_SPREAD = 1e-3
"""Vectors or logits of different texts that are nearer than that hide every fault."""


def batch_parity(subject: EncoderSubject) -> Finding:
    """Texts of many lengths in one pass, in two orders, and each beside a shorter and a longer one: as each is alone."""
    texts = [*_texts(), *_pairs()]
    alone = _alone(subject, texts)
    if not _differs(alone, is_classifier=subject.is_classifier):
        return no_data("all texts have the same vector")
    found = {"in one pass": (texts, subject.compute(texts), alone)}
    found["in reverse"] = (texts, subject.compute(texts[::-1])[::-1], alone)
    for neighbour in (EncoderInput(token_ids(3, seed=1)), EncoderInput(token_ids(45, seed=2))):
        before = [subject.compute([neighbour, one])[1] for one in texts]
        behind = [subject.compute([one, neighbour])[0] for one in texts]
        length = len(neighbour.token_ids)
        found[f"behind {length} tokens"] = (texts, np.stack(before), alone)
        found[f"before {length} tokens"] = (texts, np.stack(behind), alone)
    return _compared(found, is_classifier=subject.is_classifier)


def pooling(subject: EncoderSubject) -> Finding:
    """Texts alone: their token vectors, pooled and normalised in numpy as the files say."""
    if subject.is_classifier:
        return unsupported("a classifier's head has no pooling module")
    texts = _texts()
    wanted = subject.pooled(texts)
    return _compared({"alone": (texts, _alone(subject, texts), wanted)}, is_classifier=False)


def kernels(subject: EncoderSubject) -> Finding:
    """Passes of machd's own kernels, whose texts lie behind one another: those of mlx's layers, padded."""
    if not subject.packs:
        return unsupported("machd's own kernels do not compute it here")
    found = {}
    # A pass without a second text takes another way.
    for label, texts in (("in one pass", _texts()), ("with pairs", [*_texts(), *_pairs()])):
        alone = np.concatenate([subject.compute_padded([one]) for one in texts])
        found[label] = (texts, subject.compute(texts), alone)
        found[f"{label}, padded"] = (texts, subject.compute_padded(texts), alone)
    return _compared(found, is_classifier=subject.is_classifier)


CHECKS: Mapping[str, Callable[[EncoderSubject], Finding]] = {
    BATCH_CHECK: batch_parity,
    POOLING_CHECK: pooling,
    KERNELS_CHECK: kernels,
}
"""The checks by the names of :data:`machd_probes.encoder_matrix.catalogue.CHECK_NAMES`."""


def _texts() -> list[EncoderInput]:
    return [EncoderInput(token_ids(one)) for one in LENGTHS]


def _pairs() -> list[EncoderInput]:
    """Pairs of texts, which models without token types read as one."""
    return [EncoderInput(token_ids(one, seed=3), second_from=one // 2) for one in LENGTHS[2:]]


def _alone(subject: EncoderSubject, texts: Sequence[EncoderInput]) -> Vectors:
    return np.concatenate([subject.compute([one]) for one in texts])


def _differs(vectors: Vectors, *, is_classifier: bool) -> bool:
    """Return True if no two texts have the same vector."""
    return all(
        not bool(
            (_gaps(one[None], vectors[:place], is_classifier=is_classifier) < _LEAST_SPREAD).any()
        )
        for place, one in enumerate(vectors)
    )


def _gaps(found: Vectors, wanted: Vectors, *, is_classifier: bool) -> Vectors:
    """Return how far rows are from each other, by cosine or by the logit that differs most: [rows]."""
    if is_classifier:
        diffs: Vectors = np.abs(found - wanted).max(axis=1)
        return diffs
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    gaps: Vectors = 1 - (found * wanted).sum(axis=1) / lengths
    return np.maximum(gaps, 0.0)  # NaN stays


def _compared(
    passes: Mapping[str, tuple[Sequence[EncoderInput], Vectors, Vectors]], *, is_classifier: bool
) -> Finding:
    """Compare rows with those wanted; the detail names the passes and the texts that differ."""
    most = MAX_LOGIT_DIFF if is_classifier else MAX_COSINE_GAP
    wrong, gaps, length_diff = list[str](), list[Vectors](), 0.0
    for label, (texts, found, wanted) in passes.items():
        gap = _gaps(found, wanted, is_classifier=is_classifier)
        gaps.append(gap)
        is_right = gap <= most
        if not is_classifier:
            lengths = np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
            is_right &= np.abs(lengths - 1) <= _MAX_LENGTH_DIFF
            length_diff = max(length_diff, float(np.abs(lengths - 1).max()))
        tokens = [
            str(len(one.token_ids))
            for one, is_same in zip(texts, is_right, strict=True)
            if not is_same
        ]
        if tokens:
            wrong.append(f"{label}, texts of {', '.join(tokens)} tokens differ")
    if length_diff > _MAX_LENGTH_DIFF:
        wrong.append(f"lengths of vectors differ by up to {length_diff:.0%}")
    every = np.concatenate(gaps)
    evidence = Evidence(
        token_mismatches=0,
        max_logprob_diff=0.0,
        noise_floor=0.0,
        cases=len(every),
        **{"max_logit_diff" if is_classifier else "max_cosine_gap": float(every.max())},
    )
    return Finding(Outcome.FAILED if wrong else Outcome.PASSED, "; ".join(wrong), evidence)
