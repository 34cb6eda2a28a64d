"""Several models behind one address: each answers as it does alone, and none cuts another's answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.clients.cached_answers import Asked, ask, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.serve_process import ServeProcess
from support.daemon.several_models import LONG_TEXT, Make, asked, making
from support.engines.dialogue import chat

from machd.request.constraint import Constraint
from machd.served.engine_grammars import EngineGrammars


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    """Makes a daemon with memory for two of the models that are given, by the queries of their paths."""
    with making(tmp_path) as make:
        yield make


def _three(load_s: float = 0.0) -> dict[str, str]:
    return dict.fromkeys(("alpha", "beta", "gamma"), f"size=35000000&load_s={load_s}")


def test_each_model_answers_under_its_name(make: Make) -> None:
    """A request loads the one that it asks for; the answer carries its name."""
    with make(_three()) as daemon:
        for name in ("alpha", "beta", "gamma", "alpha"):
            answer = httpx.post(
                f"{daemon.url}/v1/chat/completions",
                json=chat("say hello") | {"model": name},
                timeout=CEILING_S,
            ).json()
            assert answer["model"] == name
            assert answer["choices"][0]["message"]["content"] == "hello"


def test_nobody_is_cut_when_three_models_share_the_memory_of_two(make: Make) -> None:
    """Long answers of all three at once, streamed and not, are whole: busy models are suspended, and go on."""
    names = ("alpha", "beta", "gamma")
    # An answer takes two turns and more.
    text = LONG_TEXT * 2
    with make(_three(0.1), max_turn_s=1.0) as daemon, ThreadPoolExecutor(6) as pool:
        plain = [pool.submit(ask, daemon.url, asked(name, text)) for name in names]
        streamed = [pool.submit(ask_streamed, daemon.url, asked(name, text)) for name in names]
        texts = {one.result(CEILING_S).texts for one in (*plain, *streamed)}

    assert texts == {(text,)}
    assert len(daemon.processes) >= 4


def test_damaged_files_are_refused_before_a_process_has_imported_mlx(tmp_path: Path) -> None:
    """A load that must fail takes next to no time from other models, and the operator is told what is damaged."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"model_type": "llama"}')
    (damaged / "model.safetensors").write_bytes(b"\xff" * 8)
    config = tmp_path / "machd.toml"
    config.write_text(f'[models.damaged]\npath = "{damaged}"\n')
    with ServeProcess("--config", str(config), is_forked=False) as daemon:
        answer = httpx.post(
            f"{daemon.url}/v1/completions",
            json={"model": "damaged", "prompt": "x"},
            timeout=CEILING_S,
        )
        engines_s = psutil.Process(daemon.process.pid).cpu_times().children_user
        failed = daemon.wait_for("model.failed")

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
    assert str(failed["error"]).startswith("model.safetensors cannot be read")
    assert engines_s < 1.0  # to import mlx and mlx-lm takes two


def test_an_unknown_name_is_refused_with_the_names_that_are_served(make: Make) -> None:
    """No other model answers for it."""
    with make(_three()) as daemon:
        answer = httpx.post(
            f"{daemon.url}/v1/chat/completions", json=chat("say no") | {"model": "delta"}
        )

    assert answer.status_code == 404
    assert "'alpha', 'beta', 'gamma'" in answer.json()["error"]["message"]


def test_without_autoload_a_model_that_is_not_loaded_is_refused(make: Make) -> None:
    """With the code that says so; the default one is there from the start."""
    with make(_three(), autoload=False) as daemon:
        answer = httpx.post(
            f"{daemon.url}/v1/chat/completions", json=chat("say no") | {"model": "beta"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
        assert ask(daemon.url, asked("alpha", "yes")).texts == ("yes",)


def test_answers_are_whole_when_engine_processes_die_while_models_take_turns(make: Make) -> None:
    """A death is no model's end, whatever it does at that moment."""
    names = ("alpha", "beta", "gamma")
    text = LONG_TEXT * 3
    with make(_three(0.1)) as daemon, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, daemon.url, asked(name, text)) for name in names]
        for _ in range(4):
            threading.Event().wait(0.9)
            if all(one.done() for one in answers):
                break
            daemon.processes[-1].kill()
        texts = {one.result(CEILING_S).texts for one in answers}

    assert texts == {(text,)}


def test_a_request_whose_grammar_is_compiled_when_its_model_is_suspended_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its model is there again; another model's grammars do not wait for that."""
    is_asked, may_go_on = threading.Event(), threading.Event()
    is_separate = EngineGrammars.is_separate

    def is_separate_later(grammars: EngineGrammars, constraint: Constraint) -> bool:
        if "first" in constraint.source:
            is_asked.set()
            may_go_on.wait(CEILING_S)
        return is_separate(grammars, constraint)

    monkeypatch.setattr(EngineGrammars, "is_separate", is_separate_later)
    models = {"alpha": "size=80000000", "beta": "size=80000000"}
    with make(models, max_turn_s=0.1) as daemon, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, daemon.url, _formed("alpha", "first"))
        assert is_asked.wait(CEILING_S)
        second = pool.submit(ask, daemon.url, _formed("beta", "second"))
        wait_until(lambda: daemon.processes[0].poll() is not None, "the first is suspended")
        may_go_on.set()

        assert second.result(CEILING_S).texts[0].startswith('{"second"')
        assert first.result(CEILING_S).texts[0].startswith('{"first"')


def _formed(model: str, key: str) -> Asked:
    """A question whose answer is an object with one key."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "boolean"}},
        "required": [key],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return Asked(chat("hi", max_tokens=40) | {"model": model, "response_format": form})
