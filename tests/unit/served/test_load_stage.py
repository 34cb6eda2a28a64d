"""How far a load is, by the bytes of its stages."""

from __future__ import annotations

import pytest

from machd.served.load_stage import LoadStage


def test_a_load_has_no_share_before_it_knows_what_it_reads() -> None:
    """Stages without bytes come first: a tokenizer, an import."""
    stage = LoadStage()
    assert (stage.name, stage.share) == (None, 0.0)
    stage.stage("importing mlx-lm", None)
    assert (stage.name, stage.share) == ("importing mlx-lm", 0.0)


def test_a_stage_without_bytes_leaves_the_share_as_it_is() -> None:
    """The weights are read; what follows them has no size."""
    stage = LoadStage()
    stage.stage("loading the weights", 100)
    stage.advance(40)
    assert stage.share == pytest.approx(0.4)
    stage.advance(60)
    stage.stage("trying the model", None)
    assert (stage.name, stage.share) == ("trying the model", 1.0)


def test_bytes_of_another_stage_count_with_those_before() -> None:
    """Experts are read before the rest of a model whose experts are on disk."""
    stage = LoadStage()
    stage.stage("reading experts", 300)
    stage.advance(300)
    stage.stage("loading the weights", 100)
    assert stage.share == pytest.approx(0.75)


def test_more_bytes_than_were_told_are_no_more_than_all() -> None:
    """A stage may read a module twice."""
    stage = LoadStage()
    stage.stage("loading the weights", 100)
    stage.advance(120)
    assert stage.share == 1.0
