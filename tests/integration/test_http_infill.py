"""Texts with a gap: ``POST /infill`` and ``suffix``, on a fake engine and on a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.clients.bad_requests import valid_body
from support.clients.raw_client import RawClient
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.step_gate import StepGate, at_decode

from machd.engine.fake.tokenizer import FakeTokenizer


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    """An obedient fake engine."""
    with RunningDaemon(lambda: FakeEngine(told)) as daemon:
        yield daemon


@pytest.fixture(name="http", scope="module")
def _http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=daemon.url) as client:
        yield client


def _gap(**fields: object) -> dict[str, object]:
    return {"model": "fake", "input_prefix": "say hi", "input_suffix": "there", **fields}


def _events(body: bytes) -> list[dict[str, Any]]:
    *frames, rest = body.split(b"\n\n")
    assert rest == b""
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def test_a_fill_is_llama_cpps_object(http: httpx.Client) -> None:
    """Content, tokens and the reason of the end; the prompt is prefix, suffix and three markers."""
    answer = http.post("/infill", json=_gap())
    assert answer.headers["x-decode-mode"] == "single"
    assert answer.json() == {
        "index": 0,
        "content": "hi",
        "stop": True,
        "tokens_predicted": 3,
        "tokens_evaluated": len("say hi") + len("there") + 3,
        "model": "fake",
        "tokens_cached": 0,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
    }


@pytest.mark.parametrize(
    ("fields", "content", "stop_type", "word"),
    [
        ({}, "hi", "eos", ""),
        ({"max_tokens": 1}, "h", "limit", ""),
        ({"input_prefix": "say ab STOP cd", "stop": ["STOP"]}, "ab ", "word", "STOP"),
        ({"input_prefix": "say ", "prompt": "yes"}, "yes", "eos", ""),
        ({"input_prefix": "say "}, "", "eos", ""),
    ],
)
def test_a_streamed_fill_is_the_whole_one_in_pieces(
    http: httpx.Client, fields: dict[str, object], content: str, stop_type: str, word: str
) -> None:
    """Each event but the last has content and ``stop: false``; the last says how it ended."""
    whole = http.post("/infill", json=_gap(**fields)).json()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == (
        content,
        stop_type,
        word,
    )
    *pieces, last = _events(http.post("/infill", json=_gap(**fields, stream=True)).content)
    assert "".join(one["content"] for one in pieces) == content
    assert not any(one["stop"] for one in pieces)
    assert {**last, "content": content, "tokens_cached": whole["tokens_cached"]} == whole


def test_a_fault_inside_a_stream_is_an_event() -> None:
    """A fill that cannot go on ends with an error event after what was written of it."""
    faults = FakeFaults(row_errors={(0, 3): ValueError("xyzzy")})
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        gate,
        RawClient(daemon.url) as client,
    ):
        client.post_json("/infill", _gap(input_prefix="say abcdef", stream=True))
        for letter in b"abc":
            gate.wait_until_held()
            client.read_until(b'"%c"' % letter)
            gate.let()
        *pieces, last = _events(client.read_answer().body)
    assert [one["content"] for one in pieces] == ["a", "b", "c"]
    assert last["error"]["code"] == "row_fault"
    assert "xyzzy" not in json.dumps(last)


def test_completions_with_a_suffix_fill_the_gap(daemon: RunningDaemon) -> None:
    """OpenAI's ``suffix``: every prompt is filled up to it, and counts with the markers."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model="fake", prompt=["say one", "say two"], suffix="end"
        )
    assert [one.text for one in answer.choices] == ["one", "two"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * (len("say one") + len("end") + 3)


class _NoFillEngine(FakeEngine):
    """A model that was not trained to fill."""

    class _Tokenizer(FakeTokenizer):
        fill_format = None  # type: ignore[assignment]

    tokenizer = _Tokenizer()


def test_a_model_without_the_tokens_refuses_to_fill() -> None:
    """400 with that reason, for ``/infill`` and ``suffix``; an empty suffix is a plain completion."""
    with RunningDaemon(_NoFillEngine) as daemon, httpx.Client(base_url=daemon.url) as http:
        for path, body, param in (
            ("/infill", _gap(), "input_suffix"),
            ("/v1/completions", valid_body("/v1/completions", suffix="x"), "suffix"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "no fill-in-the-middle tokens" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == param
        plain = valid_body("/v1/completions", suffix="")
        assert http.post("/v1/completions", json=plain).status_code == 200


_MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(name="coder", scope="module")
def _coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a real daemon whose model has Qwen2.5-Coder's markers."""
    from support.checkpoints.tiny_checkpoint import write_tiny_llama  # noqa: PLC0415 - imports mlx
    from support.daemon.serve_process import ServeProcess  # noqa: PLC0415

    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-coder", added_tokens=_MARKERS)
    with ServeProcess(str(path)) as server, httpx.Client(base_url=server.url) as client:
        yield client


def _ids(http: httpx.Client, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = http.post("/tokenize", json=body).json()["tokens"]
    return ids


def test_a_real_fill_is_the_continuation_of_its_tokens(coder: httpx.Client) -> None:
    """Greedily, /infill and ``suffix`` write what follows prefix, suffix and markers as token ids."""
    prefix, suffix = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
    pre, suf, mid = (_ids(coder, one)[0] for one in _MARKERS)
    prompt = [pre, *_ids(coder, prefix), suf, *_ids(coder, suffix), mid]
    asked = {"model": "tiny-coder", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = coder.post("/completions", json={**asked, "prompt": prompt}).json()
    filled = coder.post(
        "/infill", json={**asked, "input_prefix": prefix, "input_suffix": suffix}
    ).json()
    suffixed = coder.post(
        "/v1/completions", json={**asked, "prompt": prefix, "suffix": suffix}
    ).json()
    assert filled["tokens_evaluated"] == len(prompt) == suffixed["usage"]["prompt_tokens"]
    assert filled["content"] == expected["choices"][0]["text"] == suffixed["choices"][0]["text"]


@pytest.mark.parametrize("token", [*_MARKERS, "<|im_end|>"])
def test_a_text_cannot_write_a_models_tokens(coder: httpx.Client, token: str) -> None:
    """A spelled token has as many tokens as its letters need, not one."""
    assert len(_ids(coder, token)) == 1
    asked = {"model": "tiny-coder", "max_tokens": 1, "input_suffix": ""}
    answer = coder.post("/infill", json={**asked, "input_prefix": token}).json()
    assert answer["tokens_evaluated"] > 3 + 1


def test_properties_of_a_checkpoint_tell_no_path(coder: httpx.Client) -> None:
    """Name and chat template are told, and no directory."""
    answer = coder.get("/props")
    assert answer.json()["model_path"] == "tiny-coder"
    assert "im_start" in answer.json()["chat_template"]
    assert "/tmp" not in answer.text  # noqa: S108 - looked for, not written
    assert str(Path.cwd()) not in answer.text
