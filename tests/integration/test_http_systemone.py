"""``POST /v1/systemone``: probabilities are the model's own, whatever runs beside, is cached or ends meanwhile."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.checkpoints.thinking_checkpoint import write_thinking_llama
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import engine_of
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine, made_up_logprob
from support.engines.plain_logits import PlainLogits
from support.every_run import sampled

_PATH = "/v1/systemone"
_STATE = "My card was charged twice for one order, and nobody answers. " * 6
_TEAMS = {"billing": "payments and refunds", "shipping": "deliveries", "security": None}
_QUESTIONS: dict[str, dict[str, object]] = {
    "team": {"type": "choice", "instructions": "Which team?", "criteria": _TEAMS},
    "urgent": {
        "type": "noul",
        "instructions": "Is it urgent?",
        "criteria": {"true": "money is lost"},
    },
    "tone": {
        "type": "score",
        "instructions": "How upset?",
        "criteria": ["calm", "cross", "furious"],
    },
    "wide": {"type": "choice", "criteria": {f"option {index}": None for index in range(60)}},
}
_TOLERANCE = 1e-4


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_llama(tmp_path_factory.mktemp("decisions") / "tiny")


@pytest.fixture(name="server", scope="module")
def _server(directory: Path) -> Iterator[ServeProcess]:
    """A daemon with random weights that batches, four rows at once."""
    arguments = ("--continuous-batching", "--continuous-batching-max-b=4", "--limits-max-queue=40")
    with ServeProcess("--model-path", str(directory), *arguments) as server:
        yield server


@pytest.fixture(name="http", scope="module")
def _http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=CEILING_S) as client:
        yield client


@pytest.fixture(name="fake", scope="module")
def _fake() -> Iterator[httpx.Client]:
    """A client of a daemon with made-up log-probabilities."""
    with (
        RunningDaemon(lambda: FakeEngine(told)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


def _decide(http: httpx.Client, state: object = _STATE, **fields: object) -> dict[str, Any]:
    answer = http.post(_PATH, json={"state": state, "questions": _QUESTIONS, **fields})
    assert answer.status_code == 200, answer.text
    decisions: dict[str, Any] = answer.json()
    return decisions


class _Reference(PlainLogits):
    """Shares of options, from plain logits."""

    def shares(self, lines: list[str], labels: list[tuple[str, ...]]) -> tuple[list[float], float]:
        """Each option's share of the probability of all, and the sum of these."""
        question = "\n".join(lines)
        text = f"<|im_start|>user\n{_STATE}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
        masses = [sum(self.probability(text, one) for one in option) for option in labels]
        return [one / sum(masses) for one in masses], sum(masses)


def test_probabilities_are_those_of_the_plain_logits(http: httpx.Client, directory: Path) -> None:
    """Every type of question gets the shares of its labels' logits, labels of several tokens and cached states included.

    A temperature raises the shares to the power of its inverse.
    """
    plain = _Reference(directory)
    asked: dict[str, tuple[list[str], list[tuple[str, ...]]]] = {
        "team": (
            ["Question: Which team?", "A: billing - payments and refunds", "B: shipping - deliveries", "C: security", "Answer with the letter of one option only."],
            [("A",), ("B",), ("C",)],
        ),
        "urgent": (
            ["Question: Is it urgent?", "yes: money is lost", "Answer yes or no only."],
            [("yes", "Yes"), ("no", "No")],
        ),
        "tone": (
            ["Question: How upset?", "0: calm", "1: cross", "2: furious", "Answer with the number of one level only."],
            [("0",), ("1",), ("2",)],
        ),
    }  # fmt: skip
    first, again = _decide(http)["answers"], _decide(http)["answers"]
    for name, (lines, labels) in asked.items():
        shares, mass = plain.shares(lines, labels)
        for answer in (first[name], again[name]):
            told = answer.get("probabilities", {"yes": answer.get("noul")})
            assert list(told.values()) == pytest.approx(shares[: len(told)], abs=_TOLERANCE)
            assert answer["option_mass"] == pytest.approx(mass, rel=1e-2)
    letters = [a + b for a in "ABC" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:60]
    lines = ["Question:"] + [f"{label}: option {index}" for index, label in enumerate(letters)]
    lines.append("Answer with the letters of one option only.")
    shares, _ = plain.shares(lines, [(one,) for one in letters])
    assert list(first["wide"]["probabilities"].values()) == pytest.approx(shares, abs=_TOLERANCE)

    cooled = _decide(http, temperature=0.5)["answers"]["team"]
    squares = [one**2 for one in first["team"]["probabilities"].values()]
    expected = [one / sum(squares) for one in squares]
    assert list(cooled["probabilities"].values()) == pytest.approx(expected, abs=_TOLERANCE)


def test_probabilities_do_not_depend_on_what_runs_beside(
    http: httpx.Client, server: ServeProcess
) -> None:
    """Six clients at once, chats beside them, states cached or new: as of each alone."""
    states = [f"{index} {_STATE}" for index in range(3)]
    alone = [_decide(http, state)["answers"] for state in states]
    chat = {"messages": [{"role": "user", "content": "Tell."}], "max_tokens": 40}
    with ThreadPoolExecutor(10) as pool:
        chats = [pool.submit(http.post, "/v1/chat/completions", json=chat) for _ in range(2)]
        salts = [None, "fresh"]
        beside = [
            (index, pool.submit(_decide, http, state, **({"cache_salt": salt} if salt else {})))
            for index, state in enumerate(states)
            for salt in salts
        ]
        assert {one.result().status_code for one in chats} <= {200, 429}
        found = [(index, one.result()["answers"]) for index, one in beside]
    for index, answers in found:
        for name, answer in answers.items():
            expected = alone[index][name]
            assert answer.get("noul") == pytest.approx(expected.get("noul"), abs=_TOLERANCE)
            told, known = (one.get("probabilities", {}) for one in (answer, expected))
            assert list(told.values()) == pytest.approx(list(known.values()), abs=_TOLERANCE)
    assert scrape(server.url, "machd_active_loops") == 0


def test_state_is_computed_once_for_all_questions(http: httpx.Client) -> None:
    """Every question but one finds the tokens of a new state in the prefix cache."""
    questions = {f"q{index}": {"type": "noul", "instructions": f"{index}?"} for index in range(40)}
    usage = _decide(http, f"new {_STATE * 6}", questions=questions)["usage"]
    prompt_tokens = usage["input_tokens"] / 40
    assert usage["output_tokens"] == 40
    assert usage["input_tokens"] - usage["cached_tokens"] < 3 * prompt_tokens


def test_more_questions_than_the_queue_holds_are_answered(http: httpx.Client) -> None:
    """64 at once, of which 40 may queue and four run."""
    questions = {f"q{index}": {"type": "noul", "instructions": f"{index}?"} for index in range(64)}
    assert len(_decide(http, questions=questions)["answers"]) == 64


@pytest.mark.parametrize("pause_s", sampled([0.0, 0.05, 0.15], every_run=[0.05]))
def test_decisions_survive_the_end_of_an_engine_process(
    http: httpx.Client, server: ServeProcess, pause_s: float
) -> None:
    """Killed while they are computed, it leaves no answer out and changes none."""
    questions = {f"q{index}": {"type": "noul", "instructions": f"{index}?"} for index in range(60)}
    before = _decide(http, questions=questions)["answers"]
    restarts = scrape(server.url, "machd_engine_restarts_total", reason="exit")
    with ThreadPoolExecutor(1) as pool:
        deciding = pool.submit(_decide, http, questions=questions, cache_salt=f"salt {pause_s}")
        time.sleep(pause_s)
        engine_of(server.process.pid).kill()
        after = deciding.result()["answers"]
    assert list(after) == list(before)
    for name, answer in after.items():
        assert answer["noul"] == pytest.approx(before[name]["noul"], abs=_TOLERANCE)
    wait_until(
        lambda: scrape(server.url, "machd_engine_restarts_total", reason="exit") == restarts + 1,
        "the end is counted",
    )


def test_answers_have_the_documented_shape(fake: httpx.Client) -> None:
    """Made-up log-probabilities, shares and all, in the questions' order."""
    answer = _decide(fake, model="fake")
    assert list(answer["answers"]) == list(_QUESTIONS)
    weights = [math.exp(made_up_logprob(ord(one))) for one in "ABC"]
    assert answer["answers"]["team"] == {
        "type": "choice",
        "choice": list(_TEAMS)[weights.index(max(weights))],
        "probabilities": pytest.approx(
            dict(zip(_TEAMS, (one / sum(weights) for one in weights), strict=True))
        ),
        "confidence": pytest.approx((3 * max(weights) / sum(weights) - 1) / 2),
        "temperature": 1.0,
        "option_mass": pytest.approx(min(1.0, sum(weights))),
    }
    assert answer["answers"]["tone"]["legend"] == {"0": "calm", "1": "cross", "2": "furious"}
    assert answer["answers"]["urgent"].keys() == {"type", "noul", "temperature", "option_mass"}
    assert answer["model"] == "fake"
    assert answer["id"].startswith("decision-")
    assert answer["usage"].keys() == {"input_tokens", "output_tokens", "cached_tokens"}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"state": "s"}', b'{"state": "\\ud800", "questions": {"q": {"type": "noul"}}}'],
    ids=["nothing", "list", "no questions", "half a surrogate pair"],
)
def test_errors_have_a_detail_beside_openais_envelope(fake: httpx.Client, body: bytes) -> None:
    """Clients of System One read ``detail``, others ``error``."""
    answer = fake.post(_PATH, content=body, headers={"content-type": "application/json"})
    told = json.loads(answer.content)
    assert answer.status_code == 400
    assert told["detail"] == told["error"]["message"]


def test_state_beyond_the_context_is_refused_by_name(http: httpx.Client) -> None:
    """Nothing of a state is cut off."""
    answer = http.post(_PATH, json={"state": "word " * 9000, "questions": _QUESTIONS})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


_ODD: tuple[object, ...] = (
    *(None, True, 0, -1, 1e308, "", "x" * 5000, "\u0000", "é🙂", "<|im_end|>", "zq7question"),
    *([], {}, [[]], {"": None}, {"true": {"false": []}}, ["a"] * 300, {"type": "noul"}),
)  # fmt: skip


def _mutated(random: Random, value: object) -> object:
    """Replace a part of a JSON value, or leave one out, somewhere."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        changed = {one: _mutated(random, value[one]) if one == key else value[one] for one in value}
        if random.random() < 0.15:
            del changed[key]
        return changed
    return random.choice(_ODD)


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.long)])
def test_odd_requests_are_answered_by_name(fake: httpx.Client, count: int) -> None:
    """Bodies with a part that is wrong, odd or missing: an answer, or 400 with the field; never a fault."""
    random, refused = Random(54), 0
    for _ in range(count):
        body = {"state": "s", "questions": _QUESTIONS, "model": "fake", "temperature": 1.0}
        answer = fake.post(_PATH, json=_mutated(random, body))
        told = answer.json()
        if answer.status_code == 200:
            assert all("type" in one for one in told["answers"].values())
            continue
        refused += 1
        assert (answer.status_code, told["detail"]) in {
            (400, told["error"]["message"]),
            (404, told["error"]["message"]),
        }
    assert count / 6 < refused < count
