"""Models behind one address at random: no answer is cut, and each says what its model says alone."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from integration.test_check_command import write_architecture
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Asked, ask, ask_streamed
from support.clocks.polling import CEILING_S
from support.daemon.engine_processes import engines_of
from support.daemon.serve_process import ServeProcess

from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint

_QUESTIONS = 8
"""Different ones of each model."""

_LOOK_S = 0.2

_PATIENCE_S = 600.0
"""How long clients and daemon wait for a model: hundreds of requests in turns on a slow machine take their time."""

_BUDGETS_GB = {"tiny": 0.25, "real": 0.37}
"""Room for two: tiny models need 0.1 GB each, the embedded one 0.25, the generated mixture of experts 0.22."""

_TURN_S = 5
_SHORT_TURN_S = 2
"""Of few seconds, in which a model has less time to take turns in."""

_CONFIG = """
[models]
memory_gb = {budget}
max_turn_s = {turn_s}
[models.small]
path = "{small}"
[models.small.continuous_batching]
kv_budget_gb = 0.1
[models.experts]
path = "{experts}"
[models.experts.continuous_batching]
kv_budget_gb = 0.1
[models.hybrid]
path = "{hybrid}"
[models.hybrid.continuous_batching]
kv_budget_gb = 0.1
[models.broken]
path = "{broken}"
[continuous_batching]
enabled = true
[limits]
queue_timeout_s = {patience_s}
[auth]
admin_token_file = "{token}"
"""

_TOKEN = "the token of an operator who is on a test's machine"


@dataclass(frozen=True)
class _Question:
    """One request, by its model and number."""

    model: str
    number: int

    @property
    def asked(self) -> Asked:
        # Token ids, which every vocabulary has.
        prompt = [1 + (self.number * 7 + place * 3) % 90 for place in range(5 + self.number)]
        temperature = float(self.number % 2)
        return Asked(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": 40,
                "seed": self.number,
                "temperature": temperature,
                "ignore_eos": True,
            },
            timeout_s=_PATIENCE_S,
        )


Write = Callable[[int, str], Path]


@pytest.fixture(name="write_config")
def _write_config(tmp_path: Path, embedded_model_path: Path) -> Write:
    """Writes the configuration, of turns of so many seconds and tiny or real models, beside the checkpoints that it names."""
    shape = MoeShape(hidden=256, inner=128, layers=4, experts=8)
    token = tmp_path / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)

    def write(turn_s: int, models: str) -> Path:
        small, experts = tmp_path / "small", tmp_path / "experts"
        if models == "tiny":
            write_tiny_llama(small)
            write_architecture(experts, "qwen2_moe")
        else:
            small = embedded_model_path
            write_generated_checkpoint(experts, shape, user_cache_directory(os.environ))
        paths = {
            "small": small,
            "experts": experts,
            "hybrid": write_architecture(tmp_path / "hybrid", "qwen3_next"),
            "broken": tmp_path / "nowhere",
        }
        budget = _BUDGETS_GB[models]
        path = tmp_path / "machd.toml"
        path.write_text(
            _CONFIG.format(
                budget=budget, turn_s=turn_s, patience_s=_PATIENCE_S, token=token, **paths
            )
        )
        return path

    return write


class _Operator:
    """Unloads models and reloads the settings while they serve, and looks at the memory.

    Attributes:
        most_reserved_bytes: The most that was reserved for all models together.
    """

    def __init__(self, daemon: ServeProcess, config: Path, interval_s: float) -> None:
        self._daemon = daemon
        self._config = config
        self._interval_s = interval_s
        self._done = threading.Event()
        self.most_reserved_bytes = 0

    @contextmanager
    def at_work(self) -> Iterator[_Operator]:
        """Work until the end of the block."""
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(self._work)
            try:
                yield self
            finally:
                self._done.set()
                work.result()

    def _work(self) -> None:
        numbers = random.Random(11)
        settings = self._config.read_text()
        url, headers = f"{self._daemon.admin_url}/admin", {"Authorization": f"Bearer {_TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=CEILING_S) as client:
            for number in itertools.count():
                models = client.get("/models")
                assert models.status_code == 200, models.text
                reserved_bytes = models.json()["reserved_bytes"]
                self.most_reserved_bytes = max(self.most_reserved_bytes, reserved_bytes)
                if number % 20 == 10:
                    model = f"/models/{numbers.choice(['small', 'experts', 'hybrid'])}"
                    unloaded = client.post(f"{model}/unload", json={"now": number % 40 == 10})
                    assert unloaded.status_code in {200, 409}, unloaded.text  # 409: it is loading
                    # What was suspended goes on when an operator says so.
                    assert client.post(f"{model}/load").status_code == 200
                if number % 20 == 0:
                    turn_s = numbers.choice([4, 5, 6])
                    self._config.write_text(
                        settings.replace(f"max_turn_s = {_TURN_S}", f"max_turn_s = {turn_s}")
                    )
                    assert client.post("/reload").status_code == 200
                if self._done.wait(self._interval_s):
                    return


class _Stages:
    """How long models load, and how long their processes take to end, looked at ten times a second.

    Attributes:
        longest_load_s: Of one load, without its wait for memory.
        longest_end_s: From the order to give way to the end of the process.
    """

    def __init__(self, daemon: ServeProcess) -> None:
        self._daemon = daemon
        self._done = threading.Event()
        self.longest_load_s = 0.0
        self.longest_end_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[_Stages]:
        """Look until the end of the block."""
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(self._watch)
            try:
                yield self
            finally:
                self._done.set()
                watching.result()

    def _watch(self) -> None:
        url, headers = f"{self._daemon.admin_url}/admin", {"Authorization": f"Bearer {_TOKEN}"}
        spent_s: dict[tuple[str, str], float] = {}
        looked_s = time.monotonic()
        with httpx.Client(base_url=url, headers=headers, timeout=CEILING_S) as client:
            while not self._done.wait(0.1):
                models = client.get("/models").json()["models"]
                now_s, before_s = time.monotonic(), looked_s
                looked_s = now_s
                for model in models:
                    if model["stage"] == "waiting for memory":
                        continue
                    for state in ("loading", "suspending"):
                        key = (model["name"], state)
                        is_so = model["state"] == state
                        spent_s[key] = spent_s.get(key, 0.0) + now_s - before_s if is_so else 0.0
                self.longest_load_s = max(self.longest_load_s, _longest(spent_s, "loading"))
                self.longest_end_s = max(self.longest_end_s, _longest(spent_s, "suspending"))


def _longest(spent_s: Mapping[tuple[str, str], float], state: str) -> float:
    return max((value for key, value in spent_s.items() if key[1] == state), default=0.0)


@contextmanager
def _killed(
    daemon: ServeProcess, interval_s: float | None, answered: Callable[[], int]
) -> Iterator[None]:
    """End an engine process at random again and again.

    After each end an answer has to come: a machine on which a load takes longer than the interval would have none at all.
    """
    done, numbers = threading.Event(), random.Random(7)

    def kill() -> None:
        answered_before = -1
        while interval_s is not None and not done.wait(interval_s):
            while answered() <= answered_before and not done.wait(_LOOK_S):
                pass
            answered_before = answered()
            with suppress(psutil.Error):  # it has just ended
                engines = engines_of(daemon.process.pid)
                if engines:
                    numbers.choice(engines).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _send(url: str, question: _Question, kind: str) -> tuple[str, ...] | None:
    """Ask in one of several ways; returns the texts of an answer that was waited for."""
    if kind == "broken":
        answer = httpx.post(
            f"{url}/v1/completions", json={"model": "broken", "prompt": "x"}, timeout=CEILING_S
        )
        assert answer.status_code == 503
        return None
    if kind == "left":
        with suppress(httpx.TimeoutException):
            fields = dict(question.asked.fields) | {"stream": True}
            httpx.post(f"{url}/v1/completions", json=fields, timeout=0.9)
        return None
    return (ask_streamed if kind == "streamed" else ask)(url, question.asked).texts


@pytest.mark.parametrize(
    ("models", "requests", "duration_s", "look_s", "kill_interval_s"),
    [
        ("tiny", 8, 3.0, 0.2, None),
        pytest.param("real", 24, 12.0, 0.5, None, marks=pytest.mark.long),
        pytest.param("real", 60, 60.0, 0.5, 20.0, marks=pytest.mark.long),
        pytest.param("real", 600, 600.0, 0.5, None, marks=pytest.mark.longest),
        pytest.param("real", 600, 600.0, 0.5, 20.0, marks=pytest.mark.longest),
    ],
    ids=["8", "24", "60-killed", "600", "600-killed"],
)
def test_no_answer_is_cut_and_each_is_its_models_own(
    write_config: Write,
    models: str,
    requests: int,
    duration_s: float,
    look_s: float,
    kill_interval_s: float | None,
) -> None:
    """Three models, room for two, clients that leave, loads that fail, an operator, and perhaps killed engine processes."""
    questions = [
        _Question(model, number)
        for model in ("small", "experts", "hybrid")
        for number in range(_QUESTIONS)
    ]
    numbers = random.Random(5)
    kinds = numbers.choices(["plain", "streamed", "left", "broken"], [44, 44, 9, 3], k=requests)
    chosen = [numbers.choice(questions) for _ in kinds]
    path = write_config(_TURN_S, models)
    with ServeProcess("--config", str(path)) as daemon:
        # By model, so that each is loaded once.
        expected = {
            one: ask(daemon.url, one.asked).texts for one in questions if one in set(chosen)
        }

        answered = list[_Question]()

        def send(at_s: float, question: _Question, kind: str) -> tuple[str, ...] | None:
            time.sleep(at_s)
            texts = _send(daemon.url, question, kind)
            if texts is not None:
                answered.append(question)
            return texts

        times = [numbers.uniform(0.0, duration_s) for _ in kinds]
        operator = _Operator(daemon, path, look_s)
        with (
            ThreadPoolExecutor(requests) as pool,
            _killed(daemon, kill_interval_s, lambda: len(answered)),
            operator.at_work(),
        ):
            texts = list(pool.map(send, times, chosen, kinds))

    assert 0 < operator.most_reserved_bytes <= _BUDGETS_GB[models] * 1e9
    for question, text in zip(chosen, texts, strict=True):
        assert text in {None, expected[question]}


@pytest.mark.long  # every run has it of the rules, in property/test_model_turns.py
@pytest.mark.parametrize(("duration_s", "turn_s"), [(5.0, _SHORT_TURN_S), (300.0, _TURN_S)])
def test_no_model_waits_longer_than_a_turn_and_one_load_of_another(
    write_config: Write, duration_s: float, turn_s: int
) -> None:
    """Each is asked all the time, with room for two: no stream is silent for longer than that, its own load and its share.

    The share is what one answer takes alone, for each of the requests that compute at once.
    """
    names = ("small", "experts", "hybrid") * 2
    silences_s, answers_s = dict.fromkeys(names, 0.0), list[float]()
    with ServeProcess("--config", str(write_config(turn_s, "real"))) as daemon:
        for name in names:
            asked_s = time.monotonic()
            ask(daemon.url, _Question(name, 1).asked)
            answers_s.append(time.monotonic() - asked_s)
        end_s = time.monotonic() + duration_s

        def go_on(name: str) -> None:
            for number in itertools.count():
                if time.monotonic() > end_s:
                    return
                silence_s = _longest_silence_s(daemon.url, _Question(name, number % _QUESTIONS))
                silences_s[name] = max(silences_s[name], silence_s)

        stages = _Stages(daemon)
        with ThreadPoolExecutor(len(names)) as pool, stages.watched():
            list(pool.map(go_on, names))

    share_s = min(answers_s) * len(names)
    bound_s = turn_s + 2 * stages.longest_load_s + stages.longest_end_s + share_s
    assert stages.longest_load_s > 0
    assert max(silences_s.values()) > turn_s / 2  # they did take turns
    assert max(silences_s.values()) <= bound_s


def _longest_silence_s(url: str, question: _Question) -> float:
    """Ask for a stream, and return the longest time to its first token or between two."""
    fields = dict(question.asked.fields) | {"stream": True}
    last_s, longest_s = time.monotonic(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=_PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now_s = time.monotonic()
                last_s, longest_s = now_s, max(longest_s, now_s - last_s)
    return longest_s
