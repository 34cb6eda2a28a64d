"""Real models behind one address at random: no answer is cut, and each says what its model says alone."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from integration.test_check_command import write_architecture
from support.clients.cached_answers import Asked, ask, ask_streamed
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess

from machd.user_directories import user_cache_directory
from machd_bench.generated_checkpoint import MoeShape, write_generated_checkpoint

_PROGRAM = "machd.cli.engine"
_QUESTIONS = 8
"""Different ones of each model."""

_BUDGET_GB = 0.36
"""Room for two: the embedded model needs 0.25 GB, the mixture of experts 0.22, the hybrid one little."""

_CONFIG = """
[models]
memory_gb = {budget}
max_turn_s = 5
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
[models.broken]
path = "{broken}"
[continuous_batching]
enabled = true
[limits]
queue_timeout_s = 600
"""


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
            }
        )


@pytest.fixture(name="config_of", scope="module")
def _config_of(
    tmp_path_factory: pytest.TempPathFactory, embedded_model_path: Path
) -> Mapping[str, Path]:
    """The configuration, and the checkpoints that it names."""
    directory = tmp_path_factory.mktemp("models")
    shape = MoeShape(hidden=256, inner=128, layers=4, experts=8)
    paths = {
        "small": embedded_model_path,
        "experts": write_generated_checkpoint(
            directory / "experts", shape, user_cache_directory(os.environ)
        ),
        "hybrid": write_architecture(directory / "hybrid", "qwen3_next"),
        "broken": directory / "nowhere",
    }
    config = directory / "machd.toml"
    config.write_text(_CONFIG.format(budget=_BUDGET_GB, **paths))
    return {"config": config, **paths}


@contextmanager
def _killed(daemon: ServeProcess, interval_s: float | None) -> Iterator[None]:
    """End an engine process at random again and again."""
    done, numbers = threading.Event(), random.Random(7)

    def kill() -> None:
        while interval_s is not None and not done.wait(interval_s):
            children = psutil.Process(daemon.process.pid).children()
            engines = [one for one in children if _PROGRAM in one.cmdline()]
            with suppress(psutil.Error):
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


@pytest.mark.usefixtures("embedded_model_path")
@pytest.mark.parametrize(
    ("requests", "duration_s", "kill_interval_s"),
    [
        (24, 12.0, None),
        pytest.param(60, 60.0, 20.0, marks=pytest.mark.long),
        pytest.param(600, 600.0, None, marks=pytest.mark.long),
        pytest.param(600, 600.0, 20.0, marks=pytest.mark.long),
    ],
)
def test_no_answer_is_cut_and_each_is_its_models_own(
    config_of: Mapping[str, Path], requests: int, duration_s: float, kill_interval_s: float | None
) -> None:
    """Three models, room for two, clients that leave, loads that fail, and perhaps engine processes that are killed."""
    questions = [
        _Question(model, number)
        for model in ("small", "experts", "hybrid")
        for number in range(_QUESTIONS)
    ]
    numbers = random.Random(5)
    kinds = numbers.choices(["plain", "streamed", "left", "broken"], [44, 44, 9, 3], k=requests)
    chosen = [numbers.choice(questions) for _ in kinds]
    with ServeProcess("--config", str(config_of["config"])) as daemon:
        expected = {one: ask(daemon.url, one.asked).texts for one in questions}

        def send(at_s: float, question: _Question, kind: str) -> tuple[str, ...] | None:
            time.sleep(at_s)
            return _send(daemon.url, question, kind)

        times = [numbers.uniform(0.0, duration_s) for _ in kinds]
        with ThreadPoolExecutor(requests) as pool, _killed(daemon, kill_interval_s):
            texts = list(pool.map(send, times, chosen, kinds))

    for question, text in zip(chosen, texts, strict=True):
        assert text in {None, expected[question]}
