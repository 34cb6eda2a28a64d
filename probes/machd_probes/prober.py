"""Runs the checks on a model: a tiny one of an architecture, or one that is loaded to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import mlx.core as mx

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.clock import Clock, SystemClock
from machd.engine.fake_tokenizer import FakeTokenizer
from machd.engine.loader import LoadedModel, describe_model
from machd.engine.mlx_engine import MlxEngine
from machd.engine.mlx_lm_import import import_mlx_lm
from machd.engine.protocol import Engine
from machd_probes.bounded import BoundedEngine, OutOfTimeError
from machd_probes.catalogue import CHECK_NAMES, SERVING_CHECKS
from machd_probes.checks.window_overflow import WIDEST_WINDOW_TOKENS
from machd_probes.finding import Finding, no_data
from machd_probes.subject import Extent, Subject, told
from machd_probes.tiny import tiny_configuration, tiny_model, tiny_variants

__all__ = ["measure_engine", "probe_architecture", "tiny_loaded", "tiny_subject"]

_CONTEXT_TOKENS = 1024
_WIDEST_ROWS = 16

_TINY = Extent()

_LOADED = Extent(
    tokens=4,
    top_logprobs=20,
    scripts=("early leaves", "down to one and up again"),
    has_long_row=False,
)
_LOADED_MAX_S = 30.0
"""A model of some hundred million parameters takes a third of it on two cores."""


def probe_architecture(name: str) -> ArchitectureReport:
    """Every check on every tiny configuration of an architecture.

    The facts are those of the main configuration; of each check the worst result counts.
    """
    variants = tiny_variants(name)
    if not variants:
        return ArchitectureReport(name, problem="no tiny configuration")
    reports = [_probe_variant(name, variant) for variant in variants]
    problem = next((report.problem for report in reports if report.problem), "")
    if problem:
        return ArchitectureReport(name, reports[0].facts, problem=problem)
    by_check = zip(*(report.results for report in reports), strict=True)
    return ArchitectureReport(name, reports[0].facts, tuple(_worst(one) for one in by_check))


def tiny_loaded(variant: str) -> LoadedModel:
    """A tiny model as the loader would hand it out, with a tokenizer that nobody needs.

    Raises:
        Exception: Whatever importing, building or running the architecture raises.
    """
    import_mlx_lm()
    model = tiny_model(tiny_configuration(variant))
    description = describe_model(
        model,
        model_id=f"tiny-{variant}",
        architecture=variant.partition("+")[0],
        context_tokens=_CONTEXT_TOKENS,
        eos_token_ids=frozenset(),
    )
    return LoadedModel(model, FakeTokenizer(), description)


def measure_engine(engine: Engine, clock: Clock | None = None) -> tuple[ProbeResult, ...]:
    """The checks that decide on continuous batching, on a model that is loaded to serve.

    Takes some seconds, and a bounded number of them; what there is no time for has no data. Windows
    that are too wide to be filled in that time are tried on a tiny model of the architecture.

    Call it on the engine's thread, while the engine has no rows; it is left with none.

    Args:
        engine: What will serve.
        clock: Reads time; the machine's unless given.
    """
    clock = clock or SystemClock()
    bounded = BoundedEngine(engine, clock, max_s=_LOADED_MAX_S)
    subject = Subject(bounded, _LOADED)
    results = _run(subject, SERVING_CHECKS, clock)
    window_tokens = subject.window_tokens or 0
    if window_tokens <= WIDEST_WINDOW_TOKENS:
        return results
    stand_in = _tiny_windows(engine.model.architecture, window_tokens, clock)
    return tuple(
        stand_in if stand_in is not None and one.probe == stand_in.probe else one for one in results
    )


def _tiny_windows(architecture: str, window_tokens: int, clock: Clock) -> ProbeResult | None:
    """What tiny models do when their windows overflow, for one whose windows are too wide to fill.

    None where the architecture has no tiny model with a window, or none could be run in time.
    """
    found: list[ProbeResult] = []
    for variant in tiny_variants(architecture):
        try:
            subject = tiny_subject(variant)
        except (Exception, SystemExit):  # noqa: BLE001 - an architecture's code does anything
            return None
        subject.engine = BoundedEngine(subject.engine, clock, max_s=_LOADED_MAX_S)
        found += _run(subject, ("window_overflow",), clock)
        subject.engine.close()
    found = [one for one in found if one.outcome is not Outcome.UNSUPPORTED]
    if not found:
        return None
    worst = _worst(found)
    note = (
        f"on a tiny model, because the window of {window_tokens} tokens is more than a probe fills"
    )
    return replace(worst, detail=f"{worst.detail}; {note}" if worst.detail else note)


def tiny_subject(variant: str) -> Subject:
    """A tiny model under test, in an engine of its own.

    Raises:
        Exception: Whatever importing, building or running the architecture raises.
    """
    loaded = tiny_loaded(variant)
    plain = tiny_model(tiny_configuration(variant))
    engine = MlxEngine(loaded, max_rows=_WIDEST_ROWS)
    return Subject(engine, _TINY, model=loaded.model, plain=plain)


def _probe_variant(name: str, variant: str) -> ArchitectureReport:
    try:
        subject = tiny_subject(variant)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an architecture's code does anything
        return ArchitectureReport(name, problem=f"the tiny model {told(error)}")
    try:
        results = _run(subject, CHECK_NAMES, SystemClock())
    finally:
        subject.engine.close()
        mx.clear_cache()
    return ArchitectureReport(name, subject.description.cache, results)


def _run(subject: Subject, names: Sequence[str], clock: Clock) -> tuple[ProbeResult, ...]:
    results = []
    for name in names:
        started_s = clock.monotonic_s()
        finding = _found(subject, name)
        results.append(
            ProbeResult(
                name,
                finding.outcome,
                finding.detail,
                finding.evidence,
                clock.monotonic_s() - started_s,
            )
        )
    return tuple(results)


def _found(subject: Subject, name: str) -> Finding:
    try:
        finding: Finding = import_module(f"machd_probes.checks.{name}").probe(subject)
    except OutOfTimeError as error:
        subject.engine.reset()
        return no_data(str(error))
    except MemoryError as error:
        subject.engine.reset()
        return Finding(Outcome.ERRORED, told(error))
    except Exception as error:  # noqa: BLE001 - a model raises whatever it likes
        subject.engine.reset()
        return Finding(Outcome.FAILED, told(error))
    return finding


_SEVERITY = (
    Outcome.ERRORED,
    Outcome.FAILED,
    Outcome.PASSED,
    Outcome.NO_DATA,
    Outcome.UNSUPPORTED,
)


def _worst(results: Sequence[ProbeResult]) -> ProbeResult:
    """The result that counts, with the figures of all."""
    worst = min(results, key=lambda result: _SEVERITY.index(result.outcome))
    return ProbeResult(
        worst.probe,
        worst.outcome,
        worst.detail,
        Evidence.together(result.evidence for result in results),
        sum(result.duration_s for result in results),
    )
