"""Rows made of the output of ``machd check``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock

from machd.errors import EngineFaultError
from machd_bench.bench import Bench
from machd_bench.check_process import check_json
from machd_bench.report import Row
from machd_bench.scenario import Scenario
from machd_bench.scenarios import parity
from machd_bench.scenarios.parity import PARITY, WEIGHTS
from machd_probes.catalogue import architecture_names

EVIDENCE = {"token_mismatches": 2, "max_logprob_diff": 0.5, "noise_floor": 1e-6, "cases": 9}
MATRIX = {
    "architectures": [
        {
            "architecture": "llama",
            "continuous_batching": {"verdict": "blocked", "reason": "see /somebody's/file"},
            "probes": [
                {"probe": "alone", "outcome": "passed", "duration_s": 1.0},
                {"probe": "trim", "outcome": "failed", "detail": "/a/path", "evidence": EVIDENCE},
            ],
        },
        {
            "architecture": "odd",
            "continuous_batching": {"verdict": "unknown", "reason": "it raised"},
            "problem": "a text of an error",
        },
    ]
}
MODEL = {
    "versions": {"machd": "1", "mlx": "2", "mlx_lm": "3", "backend": "metal", "dtype": "bfloat16"},
    "continuous_batching": {
        "verdict": "supported",
        "reason": "measured on /a/path",
        "source": "measured",
        "evidence": EVIDENCE,
    },
    "chunked_prefill": {"verdict": "supported", "reason": "a rule"},
}


async def rows_of(
    scenario: Scenario, printed: object, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Row], list[str]]:
    """The rows that a scenario makes of what the command prints, and the command's arguments."""
    asked: list[str] = []

    async def check(args: Sequence[str]) -> bytes:
        asked.extend(args)
        return json.dumps(printed).encode()

    monkeypatch.setattr(parity, "check_json", check)
    plan = dataclasses.replace(PLAN, architectures=("llama", "odd"))
    bench = Bench(plan, LoopClock(), Unseen(), serve_args=("--model-path", "m"))
    return [row async for row in scenario.run(bench)], asked


async def test_an_architecture_is_a_row_of_counts_and_differences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes are counted by outcome, and each is there by name; texts of errors are not."""
    (llama, odd), asked = await rows_of(PARITY, MATRIX, monkeypatch)

    assert asked == ["--arch", "llama", "--arch", "odd", "--no-cache"]
    assert llama.case == "llama"
    assert llama.figures["batching"] == "blocked"
    assert (llama.figures["passed"], llama.figures["failed"], llama.figures["errored"]) == (1, 1, 0)
    assert (llama.figures["wrong_tokens"], llama.figures["max_difference"]) == (2, 0.5)
    assert llama.figures["probe_trim"] == "failed"
    assert (odd.figures["batching"], odd.figures["max_difference"]) == ("unknown", None)
    texts = [one for row in (llama, odd) for one in row.figures.values() if isinstance(one, str)]
    assert not any("/" in text or "error" in text for text in texts)


async def test_the_served_models_features_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features with a verdict become rows, with the figures of the measurement if there was one."""
    (batching, prefill), asked = await rows_of(WEIGHTS, MODEL, monkeypatch)

    assert asked == ["--model-path", "m", "--measure"]
    assert (batching.case, batching.figures["verdict"]) == ("continuous batching", "supported")
    assert (batching.figures["cases"], batching.figures["noise"]) == (9, 1e-6)
    assert prefill.figures == {"verdict": "supported", "source": "rule"}


def test_the_architectures_of_a_report_are_there() -> None:
    """The installed mlx-lm has each of them."""
    assert set(parity.ARCHITECTURES) <= set(architecture_names())


async def test_a_check_that_fails_is_an_error_with_its_last_line() -> None:
    """The command's own words are for the terminal."""
    with pytest.raises(EngineFaultError, match=r"exit code 2: .*no-such-arch"):
        await check_json(("--arch", "no-such-arch"))
