"""The prober on loaded models: bounded in time, honest about what it left out, clean behind itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from support.every_run import sampled

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.verdict import Source, Support
from machd.capabilities.verdicts import judge
from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd_probes.bounded import Deadline
from machd_probes.catalogue import FEATURE_CHECKS
from machd_probes.model_probe import ModelProbe
from machd_probes.prober import loaded_subject, probe_architecture, run_check, tiny_subject
from machd_probes.tiny import tiny_configuration, tiny_model


class TickingClock:
    """Every look at it takes some time, and so every step of an engine that looks at it."""

    def __init__(self, tick_s: float) -> None:
        self._now_s = 0.0
        self._tick_s = tick_s

    def monotonic_s(self) -> float:
        """A little later than the last time."""
        self._now_s += self._tick_s
        return self._now_s

    def unix_s(self) -> float:
        """Not asked for."""
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _plain_operations() -> None:
    """As the daemon has it on the CPU."""
    mx.disable_compile()


def _loaded(variant: str, **changes: object) -> LoadedModel:
    import_mlx_lm()
    configuration = tiny_configuration(variant)
    model = tiny_model(replace(configuration, config={**configuration.config, **changes}))
    description = describe_model(
        model,
        model_id=variant,
        architecture=variant,
        context_tokens=1024,
        eos_token_ids=frozenset(),
    )
    return LoadedModel(model, FakeTokenizer(), description)


def _by_name(results: tuple[ProbeResult, ...]) -> Mapping[str, ProbeResult]:
    return {one.probe: one for one in results}


@pytest.fixture(name="probe")
def _probe(tmp_path: Path) -> ModelProbe:
    """Of no file: nothing is kept of weights."""
    return ModelProbe(tmp_path, model_path=str(tmp_path / "nowhere"))


def test_a_loaded_model_is_measured_and_left_without_rows(probe: ModelProbe) -> None:
    """Every check that decides on a feature passes, with figures, and nothing stays in memory."""
    engine = make_engine(_loaded("lfm2"))

    results = _by_name(probe.measure_weights(engine) or ())

    assert set(results) >= set(FEATURE_CHECKS)
    assert results["batch_parity"].outcome is Outcome.PASSED
    assert results["batch_parity"].evidence.cases > 5
    verdicts = judge(engine.model.cache, tuple(results.values()))
    assert verdicts.continuous_batching.support is Support.SUPPORTED
    assert verdicts.prefix_cache.source is Source.MEASURED
    assert verdicts.speculation.source is Source.MEASURED
    assert engine.memory().kv_used_bytes == 0


@pytest.mark.parametrize("tick_s", sampled([0.4, 0.5, 2.0, 100.0], [0.5, 100.0]))
def test_half_a_check_is_no_pass(tick_s: float) -> None:
    """However much there was time for, what was not finished has no data and decides nothing."""
    engine = make_engine(_loaded("lfm2"))
    subject = loaded_subject(engine, engine.module)
    clock = TickingClock(tick_s)
    subject.watch = Deadline(clock, max_s=30.0)

    result = run_check(subject, "batch_parity", clock)

    assert result.outcome is Outcome.NO_DATA
    assert "time" in result.detail
    verdict = judge(engine.model.cache, (result,)).continuous_batching
    assert verdict.support is Support.UNKNOWN
    assert engine.memory().kv_used_bytes == 0


def test_llama_layers_around_other_caches_keep_passes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of llama's layers that makes rotating caches is served right beside prompts in chunks."""
    from mlx_lm.models.cache import RotatingKVCache  # noqa: PLC0415 - after import_mlx_lm()

    model = _loaded("llama").model
    caches = len(model["model"]["layers"])
    monkeypatch.setattr(
        type(model), "make_cache", lambda _self: [RotatingKVCache(8) for _ in range(caches)]
    )
    subject = tiny_subject("llama")
    result = run_check(subject, "batch_parity", TickingClock(0.0))

    assert (result.outcome, result.detail) == (Outcome.PASSED, "")


def test_an_architecture_that_needs_metal_is_a_row_with_its_reason() -> None:
    """What cannot be built here is told, and nothing is claimed of it."""
    if mx.metal.is_available():
        pytest.skip("it can be built here")
    report = probe_architecture("bitnet")

    assert "Metal" in report.problem
    assert report.results == ()
