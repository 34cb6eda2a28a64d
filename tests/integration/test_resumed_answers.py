"""Answers that run while the mode changes under them, or the engine fails, are those of a daemon that is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Answer, Asked, ask, ask_streamed
from support.clients.common_words import WORDS
from support.clocks.polling import CEILING_S
from support.daemon.forked_daemons import ForkedDaemon, daemon_parent
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.gated_engine import GatedEngine

from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.step.mlx_engine import MlxEngine

_MODEL = "tiny"
_TOKENS = 60
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 1, "seed": 8, "stop": ["er", "ing"]},
    {"temperature": 1, "seed": 9, "min_tokens": 20, "top_p": 0.9},
    {"temperature": 1, "seed": 10, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}
    }},
)  # fmt: skip


def _questions(model: str = _MODEL, tokens: int = 25) -> list[Asked]:
    return [
        Asked({"model": model, "max_tokens": tokens, "prompt": " ".join(WORDS[at : at + 9 + 7 * at]), **kind})
        for at, kind in enumerate(_KINDS)
    ]  # fmt: skip


@pytest.fixture(name="daemon", scope="module")
def _daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedDaemon]:
    directory = tmp_path_factory.mktemp("resumed")
    model = write_tiny_llama(directory / _MODEL)
    flags = (
        *("--continuous-batching", "--continuous-batching-max-b", "16", "--probe-on-start", "off"),
        *("--admin-listen", "127.0.0.1:0"),
    )
    with daemon_parent(directory) as parent, parent.running(str(model), *flags) as daemon:
        yield daemon


def _ask_all(url: str, questions: Sequence[Asked]) -> list[Answer]:
    """Ask all at once: each question streamed, unless for several choices, and not."""
    with ThreadPoolExecutor(2 * len(questions)) as pool:
        of_one = [one for one in questions if "n" not in one.fields]
        streamed = pool.map(lambda one: ask_streamed(url, one), of_one)
        plain = pool.map(lambda one: ask(url, one), questions)
        return [*streamed, *plain]


def _resumed(daemon: ForkedDaemon) -> float:
    return scrape(daemon.url, "machd_sequences_resumed_total")


def test_answers_under_changes_of_mode_are_those_of_a_daemon_left_alone(
    daemon: ForkedDaemon,
) -> None:
    """Seeded, penalised, with log-probabilities, stop strings and a grammar, streamed or not: text, usage and reasons."""
    questions = _questions()
    expected = _ask_all(daemon.url, questions)
    over = threading.Event()

    def change() -> int:
        changes = 0
        while not over.is_set():
            mode = ("single", "batched")[changes % 2]
            daemon.change("/admin/mode", {"mode": mode})
            changes += 1
            over.wait(0.05)
        return changes

    before = _resumed(daemon)
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            answers = _ask_all(daemon.url, questions)
        finally:
            over.set()
        assert changing.result(CEILING_S) > 1
    assert _resumed(daemon) > before, "some were resumed behind their tokens"
    for number, (answer, left_alone) in enumerate(zip(answers, expected, strict=True)):
        assert replace(answer, cached_tokens=0) == replace(left_alone, cached_tokens=0), number


def test_choices_of_one_request_are_resumed_alike(daemon: ForkedDaemon) -> None:
    """Three choices with a seed, suspended and resumed together."""
    asked = Asked(
        {
            "model": _MODEL,
            "max_tokens": _TOKENS,
            "prompt": "one two three",
            "n": 3,
            "seed": 4,
            "temperature": 1,
        }
    )
    expected = ask(daemon.url, asked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, daemon.url, asked)
        for mode in ("single", "batched") * 3:
            daemon.change("/admin/mode", {"mode": mode})
            threading.Event().wait(0.03)
        assert answer.result(CEILING_S).said == expected.said


_ROUNDING_NATS = 1e-4
"""The tiny model's heads are too small for machd's own kernels, so that its bits depend on the batch."""

_STEPS_BETWEEN_FAULTS = 45
"""In which each that ran goes on alone, and all of them together again."""


def test_answers_of_an_engine_that_fails_are_those_of_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Again and again a step of several rows raises: no client reads of it, and nothing is missing or told twice."""
    questions = [
        *_questions("tiny-llama", _TOKENS),
        Asked({"model": "tiny-llama", "prompt": "all", "max_tokens": 30, "n": 3, "seed": 4}),
    ]
    steps, faults, is_failing, run = 0, 0, False, MlxEngine.run

    def failing(this: MlxEngine, plan: StepPlan) -> StepResult:
        nonlocal steps, faults
        steps += 1
        if is_failing and steps > _STEPS_BETWEEN_FAULTS and len(plan.decode) > 1:
            steps, faults = 0, faults + 1
            raise RuntimeError("planted")
        return run(this, plan)

    monkeypatch.setattr(MlxEngine, "run", failing)
    flags = {"continuous_batching.enabled": True, "continuous_batching.max_b": 16}
    with RunningDaemon(lambda: GatedEngine(None), flags) as daemon, capture_logs():
        expected = _ask_all(daemon.url, questions)
        is_failing = True
        answers = _ask_all(daemon.url, questions)
        assert faults > 1
        assert scrape(daemon.url, "machd_sequences_resumed_total", reason="fault") > faults
    for number, (answer, left_alone) in enumerate(zip(answers, expected, strict=True)):
        assert answer.said == left_alone.said, number
        assert answer.logprob_error(left_alone) < _ROUNDING_NATS, number
