"""With machd's repairs switched off, every architecture that needs one is found out before it is batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S
from support.engines.architectures import MENDED
from support.engines.probing import without_compilation
from unit.probes import worker_without_repairs

from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.engine.assembly import make_engine
from machd.engine.kernels import batchable
from machd.errors import ModelArchitectureError
from machd_probes import model_probe
from machd_probes.model_probe import ModelProbe
from machd_probes.prober import tiny_loaded

_WRONG_ALONE = {"plamo3"}
"""Wrong by itself, whoever is beside it: company changes nothing."""

_NOT_LOADED = {"olmo"}
"""It raises on every prompt, so that no daemon starts with it."""


@pytest.fixture(autouse=True)
def _without_repairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batchable, "_MENDED", {})
    monkeypatch.setattr(model_probe, "_START_S", CEILING_S)  # on a machine of any speed
    with without_compilation():
        yield


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=() if variant == "afm7" else pytest.mark.long)
        for variant in MENDED
        if variant not in _NOT_LOADED
    ],
)
def test_it_is_found_out_at_the_start(variant: str, tmp_path: Path) -> None:
    """The matrix does not speak for it, and a small model of the same code shows what is wrong."""
    engine = make_engine(tiny_loaded(variant))
    probe = ModelProbe(
        tmp_path, model_path="/nowhere", worker_command=worker_without_repairs.COMMAND
    )
    assert judge(engine.model.cache).continuous_batching.support is not Support.BLOCKED

    assert probe.recall(engine) == ()
    verdicts = judge(engine.model.cache, probe.measure(engine))

    if variant == "olmo_hybrid":  # its repair is for drafts in a batch
        while (results := probe.measure_next(engine)) is not None:
            verdicts = judge(engine.model.cache, results)
        assert verdicts.batched_specdec.support is Support.BLOCKED
    elif variant not in _WRONG_ALONE:
        assert verdicts.continuous_batching.support is Support.BLOCKED


@pytest.mark.parametrize("variant", sorted(_NOT_LOADED))
def test_what_raises_on_every_prompt_is_not_served(variant: str) -> None:
    """mlx-lm's olmo adds a mask that is a word; without the repair it cannot be loaded."""
    with pytest.raises(ModelArchitectureError, match="Cannot perform"):
        tiny_loaded(variant)
