"""Tests of plans: how a model would be cut for several ranks."""

from __future__ import annotations

from machd.engine.loading.formats.opened import weights_bytes
from machd.engine.loading.placing.sharding import ShardMode
from machd.engine.loading.placing.sharding_plan import PLANNED_RANKS, RankPlan, plan_ranks
from machd_probes.tiny import tiny_configuration, tiny_model


def _plans(architecture: str) -> dict[tuple[str, int], RankPlan]:
    model = tiny_model(tiny_configuration(architecture))
    whole_bytes = weights_bytes(model)
    plans = plan_ranks(model, weights_bytes)
    assert weights_bytes(model) == whole_bytes, "the model itself is not cut"
    return {(one.mode.value, one.ranks): one for one in plans}


def test_plan_has_every_number_of_ranks_in_every_way() -> None:
    """A model of four heads and two heads of keys is cut for two ranks, and no other number."""
    plans = _plans("qwen2")

    assert set(plans) == {(mode, ranks) for mode in ShardMode for ranks in PLANNED_RANKS}
    assert [key for key, plan in plans.items() if not plan.reason] == [
        ("tensor", 2),
        ("pipeline", 2),
    ]
    assert "n_kv_heads is 2, which 4 ranks cannot share evenly" in plans["tensor", 4].reason


def test_plan_says_the_weights_of_the_largest_shard() -> None:
    """Each rank has its part of the layers, and all of the embedding."""
    plans = _plans("deepseek_v3")
    whole_bytes = weights_bytes(tiny_model(tiny_configuration("deepseek_v3")))

    assert whole_bytes / 2 < plans["tensor", 2].weights_bytes < whole_bytes
    assert plans["tensor", 4].weights_bytes < plans["tensor", 2].weights_bytes
    assert plans["tensor", 2].working_bytes == plans["tensor", 2].weights_bytes


def test_plan_refuses_ranks_with_different_kinds_of_caches() -> None:
    """A pipeline of a hybrid model may leave a rank with layers of one kind alone."""
    plans = _plans("kimi_k3")

    assert plans["pipeline", 3].reason == "ranks would keep different kinds of caches"


def test_code_that_asserts_or_divides_by_nothing_is_a_refusal() -> None:
    """mlx-lm's code does not always raise ValueError where it cannot cut a model."""
    assert "cannot be cut" in _plans("minimax_m3_vl")["tensor", 3].reason
    assert "cannot be cut" in _plans("gpt_oss")["tensor", 4].reason
