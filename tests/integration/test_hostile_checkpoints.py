"""A daemon of a checkpoint whose chat template or tokenizer is hostile keeps answering everything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from support.checkpoints.hostile_templates import ENDLESS, UNINTERRUPTIBLE
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.forked_daemons import DaemonParent, ForkedDaemon, daemon_parent
from support.daemon.running_daemon import RunningDaemon
from support.every_run import sampled
from unit.engine.tiny_llama import TOKENS, TinyLlama

from machd.engine.protocol.engine import Engine
from machd.engine.tokenizer.template_renderer import RenderBounds, TemplateRenderer
from machd.engine.tokenizer.tokenizer import MlxTokenizer

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
_STRICT = RenderBounds(limit_s=0.3)
_PATIENT = RenderBounds(limit_s=CEILING_S)


@dataclass(frozen=True)
class _Templated:
    """A daemon in this process whose model's template does what the last message says."""

    url: str
    renderer: TemplateRenderer

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Hold templates to short bounds; outside, they take as long as a busy machine needs."""
        self.renderer._bounds = _STRICT
        try:
            yield
        finally:
            self.renderer._bounds = _PATIENT


@pytest.fixture(name="templated", scope="module")
def _templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Templated]:
    tiny = TinyLlama.save(tmp_path_factory.mktemp("model") / "tiny")
    (tiny.path / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    renderers: list[TemplateRenderer] = []

    def make_engine() -> Engine:
        from machd.engine.assembly import make_engine  # noqa: PLC0415 - the same
        from machd.engine.loading.loader import load_model  # noqa: PLC0415 - mlx belongs to the engine thread

        model = load_model(tiny.source, dtype="float32")
        assert isinstance(model.tokenizer, MlxTokenizer)
        model.tokenizer._renderer._bounds = _PATIENT
        renderers.append(model.tokenizer._renderer)
        return make_engine(model)

    with pytest.MonkeyPatch.context() as patch, RunningDaemon(make_engine) as daemon:
        # Three conversations in a row wait for processes that are started anew.
        patch.setattr("machd.generations.open_generations._PREPARATION_LIMIT_S", 3600.0)
        yield _Templated(daemon.url, renderers[0])


@pytest.fixture(name="parent", scope="module")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonParent]:
    with daemon_parent(tmp_path_factory.mktemp("daemons")) as parent:
        yield parent


def _chat(url: str, content: str) -> httpx.Response:
    body = {**_MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx.post(url + _CHAT, json=body)


def _complete(url: str) -> httpx.Response:
    body = {**_MODEL, "prompt": "hello", "max_tokens": 2}
    return httpx.post(url + "/v1/completions", json=body)


_KINDS_OF_EVERY_RUN = ("uninterruptible", "output", "refusal")
"""What has to be killed, what ends by a limit, and what fails by itself; ``test_template_renderer.py`` has the others."""


@pytest.mark.parametrize("kind", sampled(_KINDS, _KINDS_OF_EVERY_RUN))
def test_hostile_template_is_a_400(templated: _Templated, kind: str) -> None:
    """Each of three conversations at once is refused, and the next one is rendered."""
    with templated.strict(), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(_chat, [templated.url] * 3, [kind] * 3))
    assert [one.status_code for one in answers] == [400] * 3
    for one in answers:
        error = one.json()["error"]
        assert error["code"] == ("invalid_request" if kind == "refusal" else "template_limit")
        assert "chat template" in error["message"]
        assert len(error["message"]) < 700
    assert _chat(templated.url, "hello").status_code == 200


def test_health_and_plain_prompts_wait_for_no_template(templated: _Templated) -> None:
    """More endless conversations than there are threads for them leave those for prompts alone."""
    with ThreadPoolExecutor(3) as pool:
        chats = [pool.submit(_chat, templated.url, "loops") for _ in range(3)]
        try:
            wait_until(lambda: _is_rendering(templated.renderer), "a template is rendered")
            for _ in range(3):
                assert _complete(templated.url).status_code == 200
                assert httpx.get(f"{templated.url}/health").status_code == 200
            assert not any(one.done() for one in chats)
        finally:
            with templated.strict():  # for the other two

                def are_refused() -> bool:
                    # A process that is killed is started again for the same conversation, once.
                    child = templated.renderer._child._child
                    if child is not None and _is_rendering(templated.renderer):
                        child._process.kill()
                    return all(one.done() for one in chats)

                wait_until(are_refused, "the conversations end")
                statuses = {one.result().status_code for one in chats}
    assert statuses == {400}


def _is_rendering(renderer: TemplateRenderer) -> bool:
    child = renderer._child._child
    return renderer._child._lock.locked() and child is not None and child._said is not None


@pytest.mark.long
def test_template_that_is_hostile_at_once_is_a_note_at_the_start(
    parent: DaemonParent, tmp_path: Path
) -> None:
    """The daemon starts, says that conversations are refused, and serves completions."""
    tiny = TinyLlama.save(tmp_path / "tiny")
    (tiny.path / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
    with parent.running(str(tiny.path)) as daemon:
        notes = [str(one["note"]) for one in daemon.events if one["event"] == "model.note"]
        assert any("conversations are refused" in note for note in notes)
        assert _complete(daemon.url).status_code == 200
        refused = _chat(daemon.url, "hello")
        assert refused.status_code == 400
        assert "longer than 5 s" in refused.json()["error"]["message"]
        children = psutil.Process(daemon.process_id).children(recursive=True)
        assert children
        assert daemon.stop() == 0
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
    panicking: ForkedDaemon, path: str, body: dict[str, object]
) -> None:
    """On every endpoint that encodes; the log has its traceback, once a second at most."""
    answer = httpx.post(panicking.url + path, json={**_MODEL, **body})
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
def _panicking(
    parent: DaemonParent, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkedDaemon]:
    """A tiny model whose tokenizer panics over every text."""
    tiny = TinyLlama.save(tmp_path_factory.mktemp("panicking") / "tiny")
    path = tiny.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    path.write_text(json.dumps(content), encoding="utf-8")
    with parent.running(str(tiny.path)) as daemon:
        yield daemon


def test_decoder_that_panics_ends_its_stream_with_an_error(
    parent: DaemonParent, tmp_path: Path
) -> None:
    """A whole answer is a 500, a stream ends with an error event, and the daemon serves on."""
    tiny = TinyLlama.save(tmp_path / "tiny")
    path = tiny.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Strip", "content": "h", "start": 9, "stop": 9}
    path.write_text(json.dumps(content), encoding="utf-8")
    forced = TOKENS.index("h")
    body = {**_MODEL, "prompt": "hello", "max_tokens": 8, "logit_bias": {str(forced): 100}}
    with parent.running(str(tiny.path)) as daemon:
        whole = httpx.post(daemon.url + "/v1/completions", json=body)
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
        assert psutil.Process(daemon.process_id).status() != psutil.STATUS_ZOMBIE
