"""A daemon of a checkpoint whose chat template or tokenizer is hostile keeps answering everything else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from hostile_templates import ENDLESS, UNINTERRUPTIBLE
from polling import CEILING_S, wait_until
from serve_process import ServeProcess
from unit.engine.tiny_llama import TOKENS, TinyLlama

_CHAT = "/v1/chat/completions"
_MODEL = {"model": "tiny"}
_KINDS = {
    "loops": ENDLESS,
    "uninterruptible": UNINTERRUPTIBLE,
    "repetition": "{{ c * 1000000000 }}",
    "doubling": "{% set ns = namespace(x=c) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ c * 1000 }}{% endfor %}",
    "refusal": "{{ raise_exception(c * 10 ** 6) }}",
}
_TEMPLATE = (
    "{% set c = messages[-1].content %}"
    + "".join(
        f"{{% {'elif' if index else 'if'} c == '{kind}' %}}{body}"
        for index, (kind, body) in enumerate(_KINDS.items())
    )
    + "{% else %}{{ c }}{% endif %}"
)
_SECONDS = 2.0
"""A hostile render takes 5 s at least, and held ``/health`` for as long."""


@pytest.fixture(name="daemon", scope="module")
def _daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A tiny model whose template does what the last message says."""
    tiny = TinyLlama.save(tmp_path_factory.mktemp("model") / "tiny")
    (tiny.path / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    with ServeProcess(str(tiny.path)) as daemon:
        yield daemon


def _chat(url: str, content: str) -> httpx.Response:
    body = {**_MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx.post(url + _CHAT, json=body, timeout=CEILING_S)


def _complete(url: str) -> httpx.Response:
    body = {**_MODEL, "prompt": "hello", "max_tokens": 2}
    return httpx.post(url + "/v1/completions", json=body, timeout=CEILING_S)


class _Health:
    """How long ``/health`` took at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0


@contextmanager
def _watched(url: str) -> Iterator[_Health]:
    health, is_over = _Health(), threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=CEILING_S) as client:
            while not is_over.wait(0.01):
                before_s = time.monotonic()
                assert client.get(url + "/health").status_code == 200
                health.longest_s = max(health.longest_s, time.monotonic() - before_s)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield health
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("kind", _KINDS)
def test_a_hostile_template_is_a_400_and_holds_nothing(daemon: ServeProcess, kind: str) -> None:
    """Health and completions are answered meanwhile, and the next conversation after it."""
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(_chat(daemon.url, kind))) for _ in range(3)
    ]
    with _watched(daemon.url) as health:
        for thread in threads:
            thread.start()
        assert _complete(daemon.url).status_code == 200
        for thread in threads:
            thread.join()
    assert [one.status_code for one in answers] == [400] * 3
    for one in answers:
        error = one.json()["error"]
        assert error["code"] == ("invalid_request" if kind == "refusal" else "template_limit")
        assert "chat template" in error["message"]
        assert len(error["message"]) < 700
    assert health.longest_s < _SECONDS
    assert _chat(daemon.url, "hello").status_code == 200


def test_plain_prompts_wait_for_no_template(daemon: ServeProcess) -> None:
    """More conversations than there are threads for them leave those for prompts alone."""
    threads = [threading.Thread(target=_chat, args=(daemon.url, "loops")) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    for _ in range(3):
        assert _complete(daemon.url).status_code == 200
    assert any(thread.is_alive() for thread in threads), (
        "completions came before the templates' ends"
    )
    for thread in threads:
        thread.join()


def test_a_template_that_is_hostile_at_once_is_a_note_at_the_start(tmp_path: Path) -> None:
    """The daemon starts, says that conversations are refused, and serves completions."""
    tiny = TinyLlama.save(tmp_path / "tiny")
    (tiny.path / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
    with ServeProcess(str(tiny.path)) as daemon:
        notes = [str(one["note"]) for one in daemon.events if one["event"] == "model.note"]
        assert any("conversations are refused" in note for note in notes)
        assert _complete(daemon.url).status_code == 200
        refused = _chat(daemon.url, "hello")
        assert refused.status_code == 400
        assert "longer than 5 s" in refused.json()["error"]["message"]
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert children
        daemon.terminate()
        assert daemon.process.wait(CEILING_S) == 0
        _, alive = psutil.wait_procs(children, timeout=CEILING_S)
        assert not alive


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        (_CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        ),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    ],
)
def test_a_tokenizer_that_panics_is_a_500_in_the_envelope(
    panicking: ServeProcess, path: str, body: dict[str, object]
) -> None:
    """On every endpoint that encodes; the log has its traceback, once a second at most."""
    answer = httpx.post(panicking.url + path, json={**_MODEL, **body}, timeout=CEILING_S)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"] == "the server failed to answer this request"
    wait_until(
        lambda: any(
            one["event"] == "request.failed" and "PanicException" in str(one["exception"])
            for one in panicking.events
        ),
        "the traceback is in the log",
    )
    assert httpx.get(panicking.url + "/health").status_code == 200


@pytest.fixture(name="panicking", scope="module")
def _panicking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A tiny model whose tokenizer panics over every text."""
    tiny = TinyLlama.save(tmp_path_factory.mktemp("panicking") / "tiny")
    path = tiny.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    path.write_text(json.dumps(content), encoding="utf-8")
    with ServeProcess(str(tiny.path)) as daemon:
        yield daemon


def test_a_decoder_that_panics_ends_its_stream_with_an_error(tmp_path: Path) -> None:
    """One that is whole is a 500; the daemon serves on, and counts no request as open."""
    tiny = TinyLlama.save(tmp_path / "tiny")
    path = tiny.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Strip", "content": "h", "start": 9, "stop": 9}
    path.write_text(json.dumps(content), encoding="utf-8")
    forced = TOKENS.index("h")
    body = {**_MODEL, "prompt": "hello", "max_tokens": 8, "logit_bias": {str(forced): 100}}
    with ServeProcess(str(tiny.path)) as daemon:
        whole = httpx.post(daemon.url + "/v1/completions", json=body, timeout=CEILING_S)
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "row_fault"
        detokenised = httpx.post(
            daemon.url + "/detokenize", json={"tokens": [forced]}, timeout=CEILING_S
        )
        assert detokenised.status_code == 500
        assert detokenised.json()["error"]["code"] == "fault"
        for _ in range(3):
            stream = httpx.post(
                daemon.url + "/v1/completions", json={**body, "stream": True}, timeout=CEILING_S
            )
            assert '"error"' in stream.text
        assert httpx.get(daemon.url + "/health").status_code == 200
        assert daemon.process.poll() is None
