"""More adapters than fit into memory, asked for at random: each answer is its adapter's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints.adapters import mlx_lm_config, mlx_lm_tensors, random_adapter, write_mlx_lm
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Answer, Asked, ask, ask_streamed
from support.daemon.engine_processes import engines_of
from support.daemon.serve_process import ServeProcess

from machd.engine.adapters.low_rank import BaseLayer, BaseLayers


def _projections(layers: int, width: int, heads: int) -> BaseLayers:
    return {
        f"model.layers.{layer}.self_attn.{name}": BaseLayer(width, width, heads=heads)
        for layer in range(layers)
        for name in ("q_proj", "o_proj")
    }


_TINY, _EMBEDDED = _projections(2, 64, 4), _projections(30, 576, 9)
"""Layers of the two models."""

_CONFIG = """
[continuous_batching]
enabled = true
max_b = 8
[adapters]
directory = "{directory}"
max_loaded = {max_loaded}
"""

_QUESTIONS = 2
"""Of each adapter, and of the model without any."""

_CLIENTS = 16
_TOKENS = 16


def _asked(name: str, number: int) -> Asked:
    prompt = [1 + (number * 7 + place * 3) % 90 for place in range(9 + number)]
    fields = {"model": name, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
    return Asked({**fields, "ignore_eos": True}, timeout_s=600.0)


@pytest.mark.usefixtures("embedded_model_path")
@pytest.mark.parametrize(
    ("base", "adapters", "max_loaded", "requests", "kills"),
    [
        pytest.param(_TINY, 3, 2, 16, 1, id="tiny-3"),
        pytest.param(_EMBEDDED, 100, 8, 2000, 5, id="embedded-100", marks=pytest.mark.longest),
    ],
)
def test_each_answer_is_its_adapters_own(
    tmp_path: Path, base: BaseLayers, adapters: int, max_loaded: int, requests: int, kills: int
) -> None:
    """Beside others, with adapters that come and go, and with an engine process that is killed meanwhile."""
    directory = tmp_path / "adapters"
    model = "smollm2-135m-instruct" if base is _EMBEDDED else "tiny"
    names = [model, *(f"adapter-{number}" for number in range(adapters))]
    for number, name in enumerate(names[1:]):
        scale = 0.02 if base is _EMBEDDED else 2.0
        adapter = random_adapter(base, seed=number, rank=2 + number % 7, scale=scale)
        write_mlx_lm(directory / name, mlx_lm_tensors(adapter), mlx_lm_config(adapter))
    config = tmp_path / "machd.toml"
    config.write_text(_CONFIG.format(directory=directory, max_loaded=max_loaded))
    questions = [(name, number) for name in names for number in range(_QUESTIONS)]
    chosen = random.Random(3).choices(questions, k=requests)
    arguments = ["--config", str(config)]
    if model == "tiny":
        arguments += [str(write_tiny_llama(tmp_path / model)), "--probe-on-start=off"]
    with ServeProcess(*arguments) as daemon:
        expected = {one: ask(daemon.url, _asked(*one)).texts for one in questions}

        def answer(index: int) -> tuple[str, ...]:
            if index in _kill_at(requests, kills):
                _kill_engine(daemon)
            how: Callable[[str, Asked], Answer] = (ask, ask_streamed)[index % 2]
            return how(daemon.url, _asked(*chosen[index])).texts

        with ThreadPoolExecutor(_CLIENTS) as pool:
            texts = list(pool.map(answer, range(requests)))
    assert len(set(expected.values())) > len(questions) * 0.9, "adapters say different things"
    wrong = [(one, text) for one, text in zip(chosen, texts, strict=True) if text != expected[one]]
    assert wrong == []


def _kill_at(requests: int, kills: int) -> set[int]:
    return {requests * one // (kills + 1) for one in range(1, kills + 1)}


def _kill_engine(daemon: ServeProcess) -> None:
    for engine in engines_of(daemon.process.pid):
        engine.kill()
