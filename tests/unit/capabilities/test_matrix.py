"""Evidence on an architecture is looked up by the code that a model runs."""

from __future__ import annotations

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport, ConfigurationReport
from machd.capabilities.model_code import ModelCode

FULL = ModelCode("llama", frozenset({"Linear"}), frozenset({"KVCache"}), "digest")
WINDOWED = ModelCode("llama", frozenset({"Linear"}), frozenset({"KVCache", "window"}), "digest")
"""It covers FULL, and runs windows besides."""

EQUAL = ProbeResult("batch_parity", Outcome.PASSED, "", Evidence(0, 0.0, 0.0, cases=3))
ROUNDED = ProbeResult("batch_parity", Outcome.PASSED, "", Evidence(0, 3.8e-6, 0.0, 3))
FAILED = ProbeResult("batch_parity", Outcome.FAILED, "other tokens", Evidence(7, 0.5, 0.0, 3))


def _report(full: ProbeResult, windowed: ProbeResult) -> ArchitectureReport:
    return ArchitectureReport(
        "llama",
        results=(ProbeResult.worst([full, windowed]),),
        code=FULL.joined(WINDOWED),
        configurations=(
            ConfigurationReport(FULL, (full,)),
            ConfigurationReport(WINDOWED, (windowed,)),
        ),
    )


def test_figures_are_those_of_the_configuration_that_runs_the_code() -> None:
    """Rounding of windows says nothing about a model without any."""
    report = _report(EQUAL, ROUNDED)

    assert report.results_for(FULL) == (EQUAL,)
    assert report.results_for(WINDOWED) == (ROUNDED,)


def test_configurations_of_equal_code_count_together() -> None:
    """A number of the configuration that shows in no class tells them apart, and the model has either."""
    report = ArchitectureReport(
        "llama",
        results=(ROUNDED,),
        code=FULL,
        configurations=(ConfigurationReport(FULL, (EQUAL,)), ConfigurationReport(FULL, (ROUNDED,))),
    )

    (found,) = report.results_for(FULL)
    assert (found.evidence.max_logprob_diff, found.evidence.cases) == (3.8e-6, 6)


def test_failure_of_any_configuration_counts() -> None:
    """A probe that failed with the same classes of layers blocks."""
    (found,) = _report(EQUAL, FAILED).results_for(FULL)

    assert found.outcome is Outcome.FAILED


def test_code_of_several_configurations_gets_the_worst_result() -> None:
    """No one configuration runs both kinds of layers."""
    other = ModelCode("llama", frozenset({"Bias"}), frozenset({"KVCache"}), "digest")
    report = ArchitectureReport(
        "llama",
        results=(ProbeResult.worst([EQUAL, ROUNDED]),),
        code=FULL.joined(other),
        configurations=(
            ConfigurationReport(FULL, (EQUAL,)),
            ConfigurationReport(other, (ROUNDED,)),
        ),
    )

    (found,) = report.results_for(FULL.joined(other))
    assert found.evidence.max_logprob_diff == 3.8e-6


def test_code_that_was_not_measured_has_no_results() -> None:
    """Whatever is known about the other configurations."""
    unknown = ModelCode("llama", frozenset({"Experts"}), frozenset({"KVCache"}), "digest")
    assert _report(EQUAL, ROUNDED).results_for(unknown) == ()
