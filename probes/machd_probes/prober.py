"""Runs checks on a model: a tiny one of an architecture, a stand-in, or one that is loaded to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.capabilities.evidence import MeasuredOn, Outcome, ProbeResult
from machd.capabilities.matrix import (
    ArchitectureReport,
    ConfigurationReport,
    SwitchedReport,
)
from machd.capabilities.model_code import ModelCode
from machd.clock import Clock, SystemClock
from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.architecture import import_architecture
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.precision import Conversion, native_layers
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.progress import SilentProgress
from machd_probes.bounded import OutOfTimeError
from machd_probes.catalogue import CHECK_NAMES, STAND_IN_CHECKS
from machd_probes.finding import Finding, no_data
from machd_probes.subject import Extent, Subject, told
from machd_probes.switches import Option, described, options_of, pairs, turned_over
from machd_probes.tiny import TinyConfiguration, tiny_configuration, tiny_model, tiny_variants

_CONTEXT_TOKENS = 1024
_WIDEST_ROWS = 16

_TINY = Extent()

_LOADED = Extent(
    tokens=4,
    top_logprobs=20,
    scripts=("early leaves", "down to one and up again"),
    has_long_row=False,
)


def probe_architecture(name: str) -> ArchitectureReport:
    """Every check on every tiny configuration of an architecture.

    The facts are those of the main configuration; of each check the worst result counts.
    """
    variants = tiny_variants(name)
    if not variants:
        return ArchitectureReport(name, problem="no tiny configuration")
    reports = [_probe_configuration(one, tiny_configuration(one)) for one in variants]
    problem = next((report.problem for report in reports if report.problem), "")
    if problem:
        return ArchitectureReport(name, reports[0].facts, problem=problem)
    by_check = zip(*(report.results for report in reports), strict=True)
    results = tuple(ProbeResult.worst(one) for one in by_check)
    configurations = tuple(
        ConfigurationReport(report.code, report.results)
        for report in reports
        if report.code is not None and len(reports) > 1
    )
    return ArchitectureReport(
        name,
        reports[0].facts,
        results,
        code=_joined(reports),
        configurations=configurations,
    )


def probe_switches(name: str) -> ArchitectureReport:
    """Probe an architecture, then the code that runs with other switches by the checks of features alone.

    Each configuration is built with options turned over, one at a time, then two of those that ran
    other code. A model is probed if none before it ran all of its code.
    """
    report = probe_architecture(name)
    if report.code is None:
        return report
    covered, switched = report.code, []
    for variant in tiny_variants(name):
        configuration = tiny_configuration(variant)
        for options in _switching_options(name, configuration, report.code):
            turned = turned_over(configuration, options)
            code = code_of(name, turned)
            if code is None or covered.covers(code, _of_mlx(code)):
                continue
            found = _probe_configuration(name, turned, STAND_IN_CHECKS)
            if found.code is not None:
                covered = covered.joined(found.code)
                switched.append(SwitchedReport(described(options), found.code, found.results))
    return replace(report, switched=tuple(switched))


def _switching_options(
    name: str, configuration: TinyConfiguration, known: ModelCode
) -> Iterator[dict[Option, bool]]:
    """Yield options which run code that is not known, then those in pairs."""
    module = import_architecture(str(configuration.config["model_type"]))
    single: dict[Option, bool] = {}
    for option, value in options_of(configuration, module.ModelArgs):
        code = code_of(name, turned_over(configuration, {option: value}))
        if code is not None and not known.covers(code, _of_mlx(code)):
            single[option] = value
            yield {option: value}
    yield from pairs(single)


def code_of(name: str, configuration: TinyConfiguration) -> ModelCode | None:
    """Return the code of a tiny model; None where the configuration makes none."""
    try:
        return _loaded(name, configuration).description.code
    except (Exception, SystemExit):  # noqa: BLE001 - an architecture's code does anything
        return None


def _of_mlx(code: ModelCode) -> frozenset[str]:
    """Return the layers that are mlx's own: some configuration of some architecture has each."""
    return frozenset(layer for layer in code.layers if layer.startswith("mlx.nn.layers."))


def tiny_loaded(variant: str) -> LoadedModel:
    """Build a tiny model as the loader would return it, with a fake tokenizer.

    Raises:
        Exception: Whatever importing, building or running the architecture raises.
    """
    return _loaded(variant, tiny_configuration(variant))


def tiny_subject(variant: str) -> Subject:
    """A tiny model under test, in an engine of its own.

    Raises:
        Exception: Whatever importing, building or running the architecture raises.
    """
    return _subject(variant, tiny_configuration(variant))


def _loaded(variant: str, configuration: TinyConfiguration) -> LoadedModel:
    import_mlx_lm()
    model = tiny_model(configuration)
    # Computed by the layers that serve: machd's own where they are.
    materialise(model, Conversion(mx.float32, native=native_layers("auto")), SilentProgress())
    description = describe_model(
        model,
        model_id=f"tiny-{variant}",
        architecture=variant.partition("+")[0],
        context_tokens=_CONTEXT_TOKENS,
        eos_token_ids=frozenset(),
    )
    return LoadedModel(model, FakeTokenizer(), description)


def _subject(variant: str, configuration: TinyConfiguration) -> Subject:
    loaded = _loaded(variant, configuration)
    engine = make_engine(loaded, max_rows=_WIDEST_ROWS)
    return Subject(engine, _TINY, model=loaded.model, plain=tiny_model(configuration))


def loaded_subject(engine: Engine, model: Module | None) -> Subject:
    """A model that is loaded to serve, under test: fewer and shorter rows, because it is large.

    Args:
        engine: Without rows; it is left with none.
        model: The engine's model, for checks of its caches; None for those of the engine alone.
    """
    return Subject(engine, _LOADED, model=model)


def run_check(
    subject: Subject, name: str, clock: Clock, *, measured_on: MeasuredOn = MeasuredOn.ARCHITECTURE
) -> ProbeResult:
    """Run one check on a model; an exception of the model is a failed check."""
    started_s = clock.monotonic_s()
    finding = _found(subject, name)
    return ProbeResult(
        name,
        finding.outcome,
        finding.detail,
        finding.evidence,
        clock.monotonic_s() - started_s,
        measured_on,
    )


def _probe_configuration(
    variant: str, configuration: TinyConfiguration, checks: Sequence[str] = CHECK_NAMES
) -> ArchitectureReport:
    name = variant.partition("+")[0]
    try:
        subject = _subject(variant, configuration)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an architecture's code does anything
        return ArchitectureReport(name, problem=f"the tiny model {told(error)}")
    clock = SystemClock()
    try:
        results = tuple(run_check(subject, check, clock) for check in checks)
    finally:
        subject.engine.close()
        mx.clear_cache()
    description = subject.description
    return ArchitectureReport(name, description.cache, results, code=description.code)


def _joined(reports: Sequence[ArchitectureReport]) -> ModelCode | None:
    """The code of all configurations of an architecture."""
    codes = [report.code for report in reports if report.code is not None]
    joined = codes[0]
    for code in codes[1:]:
        joined = joined.joined(code)
    return joined


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
