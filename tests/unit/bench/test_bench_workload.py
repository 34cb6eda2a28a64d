"""Prompts, modes and addresses."""

from __future__ import annotations

import pytest

from machd.bench.connection import ServerAddress
from machd.bench.modes import CONTINUOUS, MODES, REMOTE, SINGLE, STATIC, modes_named
from machd.bench.plan import BenchPlan
from machd.bench.scenarios import Scenario, scenarios_named
from machd.bench.workload import Workload


def test_no_two_prompts_of_a_run_begin_alike() -> None:
    """Eight words in, every prompt is its own, so that no prefix cache can answer for it."""
    workload = Workload(requests=8, prompt_tokens=32, max_tokens=8, seed=1)
    beginnings = {
        " ".join(workload.prompt(series, index).split()[:8])
        for series in ("level-1", "level-4", "staggered-0", "long-prompt", "coalescing-0")
        for index in range(16)
    }

    assert len(beginnings) == 5 * 16


def test_modes_get_the_same_prompts_and_runs_do_not() -> None:
    """A prompt is a function of seed, level and index alone."""
    one, again = (Workload(8, 16, 8, seed=1) for _ in range(2))
    other = Workload(8, 16, 8, seed=2)

    assert one.prompt("level-1", 3) == again.prompt("level-1", 3)
    assert one.prompt("level-1", 3) != other.prompt("level-1", 3)
    assert len(one.prompt("level-1", 3).split()) == 16
    assert len(one.prompt("level-1", 3, tokens=5).split()) == 5
    assert one.prompts("level-1", 4)[3] == one.prompt("level-1", 3)


def test_a_level_keeps_every_client_busy_to_its_end() -> None:
    """Each client sends the same number of requests: a part of a round would be less load."""
    workload = Workload(requests=8, prompt_tokens=1, max_tokens=1, seed=1)

    assert [workload.request_count(clients) for clients in (1, 3, 8, 16)] == [8, 9, 8, 16]


def test_an_unknown_name_names_those_there_are() -> None:
    """Modes and scenarios are told when one of them is misspelled."""
    with pytest.raises(ValueError, match="'batched' is no mode; there are: single, static, cont"):
        modes_named(["single", "batched"])
    with pytest.raises(ValueError, match="'x' is no scenario; there are: sweep, staggered, long-"):
        scenarios_named(["x"])
    assert modes_named(["single", "single"]) == (SINGLE,)


def test_scenarios_run_in_one_order() -> None:
    """However they are named, once or twice, the sweep comes first."""
    assert scenarios_named(["coalescing", "sweep", "coalescing"]) == (
        Scenario.SWEEP,
        Scenario.COALESCING,
    )


def test_a_mode_is_held_against_the_batch_that_it_can_make() -> None:
    """One row for one at a time, a row for each client in a batch, nothing for a stranger."""
    widths = {
        mode.name: [mode.batch_width(clients) for clients in (1, 16)] for mode in (*MODES, REMOTE)
    }

    assert widths == {
        "single": [1, 1],
        "static": [1, 16],
        "continuous": [1, 16],
        "remote": [None, None],
    }


@pytest.mark.parametrize(
    ("scenarios", "width"),
    [
        (("sweep",), "4"),
        (("sweep", "long-prompt"), "9"),
        (("coalescing",), "4"),
        (("structured",), "16"),
    ],
)
def test_continuous_has_a_slot_for_every_stream(scenarios: tuple[str, ...], width: str) -> None:
    """Its batch is as wide as the widest scenario, and 4 at least."""
    plan = BenchPlan(Workload(8, 1, 1, seed=1), (1, 2), scenarios_named(scenarios))

    args = CONTINUOUS.serve_args(plan.max_width)

    assert args == ("--continuous-batching", "--continuous-batching-max-b", width)
    assert SINGLE.serve_args(plan.max_width) == ("--no-continuous-batching",)


def test_streams_that_take_turns_are_not_measured_beside_each_other() -> None:
    """Only a batching server runs streams next to a long prompt or a copy of themselves."""
    plan = BenchPlan(Workload(8, 1, 1, seed=1), (1,), tuple(Scenario))

    assert plan.of_mode(CONTINUOUS) == plan.of_mode(REMOTE) == tuple(Scenario)
    assert plan.of_mode(SINGLE) == plan.of_mode(STATIC) == (Scenario.SWEEP, Scenario.STAGGERED)


def test_the_bare_loop_runs_at_the_widths_of_the_sweep() -> None:
    """Every width once, narrowest first, and none where there is nothing to hold against it."""
    workload = Workload(8, 1, 1, seed=1)

    assert BenchPlan(workload, (4, 1)).bare_widths(MODES) == [1, 4]
    assert BenchPlan(workload, (4, 2)).bare_widths([SINGLE]) == [1]
    assert BenchPlan(workload, (4,), (Scenario.STAGGERED,)).bare_widths(MODES) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", ServerAddress("127.0.0.1", 8080, is_tls=False)),
        ("http://127.0.0.1:8080/v1/", ServerAddress("127.0.0.1", 8080, is_tls=False)),
        (
            "https://example.org/llm/v1",
            ServerAddress("example.org", 443, is_tls=True, prefix="/llm"),
        ),
        ("http://[::1]:80", ServerAddress("::1", 80, is_tls=False)),
    ],
)
def test_an_address_takes_base_urls_of_either_kind(url: str, expected: ServerAddress) -> None:
    """With or without the /v1 that clients are given, the same server is meant."""
    assert ServerAddress.of(url) == expected


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080", "ftp://example.org", "http://", "http://h:99999"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """A mistyped URL is told as one, not as a server that is down."""
    with pytest.raises(ValueError, match=r"."):
        ServerAddress.of(url)
