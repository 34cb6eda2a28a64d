"""The vision matrix passes a right family, and notices faults that are planted into images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.checkpoints.kept_family import write_kept_family
from support.engines.faults_in_images import (
    a_neighbours_image_is_seen,
    embeddings_are_kept_by_one_hash,
    keys_are_the_same_of_every_image,
    positions_behind_an_image_are_one_ahead,
)
from support.engines.probing import without_compilation

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.verdict import Source, Support
from machd_probes.finding import Finding
from machd_probes.versions import probe_basis
from machd_probes.vision_families import FAMILIES
from machd_probes.vision_matrix.catalogue import (
    CHECK_NAMES,
    PREFIX_CHECK,
    SERVED,
    WINDOW_CHECK,
    family_names,
)
from machd_probes.vision_matrix.checks import CHECKS
from machd_probes.vision_matrix.prober import _few_layers, probe_subject, text_only_reason
from machd_probes.vision_matrix.report import FamilyRow, vision_matrix_of
from machd_probes.vision_matrix.subject import VisionSubject

_FAMILY = "qwen2_vl"
_SEEN_NATS = 0.01
"""What faults change is more than that; rounding was measured at 5e-5 and less."""


@pytest.fixture(name="subject", scope="module")
def _subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionSubject]:
    """A family whose images move the positions of all text behind them."""
    directory = write_kept_family(_FAMILY, tmp_path_factory.mktemp("matrix") / _FAMILY)
    with without_compilation(), VisionSubject(directory) as subject:
        assert subject.noise_floor < _SEEN_NATS
        yield subject


@pytest.fixture(name="right", scope="module")
def _right(subject: VisionSubject) -> ArchitectureReport:
    """What all checks find of it."""
    return probe_subject(_FAMILY, subject)


def _only(report: ArchitectureReport, check: str) -> ArchitectureReport:
    """A report of one check alone."""
    results = tuple(one for one in report.results if one.probe in {SERVED, check})
    assert len(results) == 2
    return replace(report, results=results)


def _row(report: ArchitectureReport) -> FamilyRow:
    matrix = vision_matrix_of([report], probe_basis(backend="cpu", blas=None), "0")
    return matrix.families[0]


def test_a_right_family_is_supported(right: ArchitectureReport) -> None:
    """Every check but that of windows passes, with rows compared in each, and all four verdicts are measured ones."""
    by_check = {result.probe: result for result in right.results}
    assert list(by_check) == [SERVED, *CHECK_NAMES]
    assert by_check.pop(SERVED).outcome is Outcome.PASSED
    assert by_check.pop(WINDOW_CHECK).outcome is Outcome.UNSUPPORTED
    for result in by_check.values():
        assert (result.outcome, result.detail) == (Outcome.PASSED, ""), result.probe
        assert result.evidence.cases > 0
        assert result.evidence.token_mismatches == 0
    row = _row(right)
    for verdict in (row.images, row.continuous_batching, row.prefix_cache, row.video):
        assert verdict is not None
        assert (verdict.support, verdict.source) == (Support.SUPPORTED, Source.MEASURED)
    assert not row.is_wrong
    assert row.is_batched


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (a_neighbours_image_is_seen, "images_in_batch"),
        (positions_behind_an_image_are_one_ahead, "image_alone"),
        (embeddings_are_kept_by_one_hash, "image_alone"),
        (keys_are_the_same_of_every_image, "image_prefix"),
    ],
)
def test_a_planted_fault_is_noticed(
    subject: VisionSubject,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that could see the fault fails for what rows said, and the family's row is wrong or not batched."""
    plant(monkeypatch)
    report = probe_subject(_FAMILY, subject, [check])
    result = report.results[-1]
    assert result.outcome is Outcome.FAILED
    assert "raises" not in result.detail
    assert result.evidence.token_mismatches or result.evidence.max_logprob_diff > _SEEN_NATS
    row = _row(report)
    assert row.is_wrong or not row.is_batched


def test_text_is_right_beside_a_faulty_image(
    subject: VisionSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of text rows names the rows that differ, and the text beside them is none of these."""
    a_neighbours_image_is_seen(monkeypatch)
    result = probe_subject(_FAMILY, subject, ["text_beside_images"]).results[-1]
    assert result.outcome is Outcome.FAILED
    assert "image" in result.detail
    assert "text" not in result.detail


def test_a_model_that_raises_fails_its_check(
    subject: VisionSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in one check is that check's failure; the next one runs."""

    def broken(_: VisionSubject) -> None:
        raise ValueError("[broadcast_shapes] no")

    monkeypatch.setitem(CHECKS, "image_alone", broken)
    monkeypatch.setitem(CHECKS, "two_images", lambda _: Finding(Outcome.PASSED))
    _, first, second = probe_subject(_FAMILY, subject, ["image_alone", "two_images"]).results
    assert (first.outcome, first.detail) == (
        Outcome.FAILED,
        "raises ValueError: [broadcast_shapes] no",
    )
    assert second.outcome is Outcome.PASSED


def test_every_family_is_in_the_catalogue() -> None:
    """The names that are read without mlx are those of the families."""
    assert family_names() == sorted(FAMILIES)


def test_a_family_that_serves_text_only_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is serving's own, and one that is served with images has none."""
    assert text_only_reason(_FAMILY) == ""
    monkeypatch.setattr("machd.engine.loading.formats.checkpoint.is_installed", lambda: False)
    assert "the extra vision is not installed" in text_only_reason(_FAMILY)


def test_a_family_whose_caches_cannot_be_used_again_is_not_wrong(
    right: ArchitectureReport,
) -> None:
    """A rule blocks its prefix cache, so that no daemon serves from it; a measured difference is another matter."""
    report = _only(right, "image_alone")
    assert report.facts is not None
    layers = tuple(replace(one, class_name="ChunkedKVCache") for one in report.facts.layers)
    facts = replace(report.facts, layers=layers)
    blocked = ProbeResult(PREFIX_CHECK, Outcome.UNSUPPORTED, "its caches cannot be used again")
    row = _row(replace(report, facts=facts, results=(*report.results, blocked)))
    assert row.prefix_cache is not None
    assert (row.prefix_cache.support, row.prefix_cache.source) == (Support.BLOCKED, Source.RULE)
    assert not row.is_wrong
    failed = replace(blocked, outcome=Outcome.FAILED)
    assert _row(replace(report, results=(*report.results, failed))).is_wrong


def test_a_tower_of_fixed_size_has_few_layers_while_it_is_checked() -> None:
    """mlx-vlm fixes 24 layers for phi3_v, which made its check as long as that of all other families."""
    pytest.importorskip("mlx_vlm")
    from mlx_vlm.models.phi3_v.vision import VisionModel  # noqa: PLC0415 - an extra

    tower = VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG
    with _few_layers("phi3_v"):
        assert tower.num_hidden_layers == 3
    assert tower.num_hidden_layers == 24
    with _few_layers(_FAMILY):
        assert tower.num_hidden_layers == 24


def test_a_check_without_data_leaves_images_unknown(right: ArchitectureReport) -> None:
    """A pass of one check is no answer where the other could not tell right from wrong."""
    report = _only(right, "two_images")
    unseen = replace(report.results[-1], probe="image_alone", outcome=Outcome.NO_DATA)
    row = _row(replace(report, results=(*report.results, unseen)))
    assert row.images.support is Support.UNKNOWN
    assert not row.is_wrong
