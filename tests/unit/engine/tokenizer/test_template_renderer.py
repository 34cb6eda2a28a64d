"""A chat template takes a bounded time, memory and length of text, whatever it does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.checkpoints.hostile_templates import HARMLESS, HOSTILE, UNINTERRUPTIBLE
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import children_of
from support.daemon.forked_programs import FORKED_TEMPLATE_NAME
from support.every_run import sampled

from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.formats.gguf.tokenizer import build_tokenizer
from machd.engine.tokenizer.template_renderer import (
    RenderBounds,
    TemplateRenderer,
    is_known_template,
)
from machd.errors import InvalidRequestError, OverloadedError, TemplateLimitError

USER: dict[str, object] = {"role": "user", "content": "hi"}
PLAIN = "{{ messages[0].content }}"
BOUNDS = RenderBounds(limit_s=0.3)
PATIENT = RenderBounds(limit_s=CEILING_S)
_MIB = 1 << 20


@pytest.fixture(name="renderer", scope="module")
def _renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(PATIENT)
    yield renderer
    renderer.close()


def _render(
    renderer: TemplateRenderer,
    template: str,
    messages: Sequence[Mapping[str, object]] = (USER,),
    **arguments: object,
) -> str:
    return renderer.render(template, messages, arguments)


def _children() -> list[psutil.Process]:
    program = "machd.engine.tokenizer.template_child"
    return children_of(os.getpid(), program, name=FORKED_TEMPLATE_NAME)


def _own_bytes(process: psutil.Process) -> int:
    """Return what a process has in memory and shares with none, such as the one that it was forked from."""
    return int(process.memory_full_info().uss)


@contextmanager
def _strict(renderer: TemplateRenderer) -> Iterator[None]:
    """Hold the renderer to short bounds; outside, it renders as long as a busy machine takes."""
    patient, renderer._bounds = renderer._bounds, BOUNDS
    try:
        yield
    finally:
        renderer._bounds = patient


_HOSTILE_OF_EVERY_RUN = (
    *("loops", "power", "uninterruptible"),  # time, also in one operation
    *("namespace_list", "dictionary", "zfill", "repetition"),  # memory
    *("output", "join", "tojson", "generation"),  # text
)
"""Each resource, and the ways to it; a template that costs its process its life takes a second and more."""


@pytest.mark.parametrize("name", sampled(HOSTILE, _HOSTILE_OF_EVERY_RUN))
def test_hostile_template_is_stopped(
    renderer: TemplateRenderer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises an error about a limit, in a process of its own, and takes no memory here."""

    def render_here(*_: object) -> str:
        raise AssertionError("rendered in this process, whose threads would all wait")

    monkeypatch.setattr("machd.engine.tokenizer.template_renderer.render_text", render_here)
    own = psutil.Process()
    before_bytes = own.memory_info().rss
    with _strict(renderer), pytest.raises(TemplateLimitError, match="chat template"):
        _render(renderer, HOSTILE[name])
    assert own.memory_info().rss - before_bytes < 100 * _MIB
    assert _render(renderer, PLAIN) == "hi"
    assert sum(map(_own_bytes, _children())) < 700 * _MIB


@pytest.mark.parametrize("name", HARMLESS)
def test_a_template_that_fails_is_refused_in_few_words(
    renderer: TemplateRenderer, name: str
) -> None:
    """The client is told what failed, in a message of bounded length."""
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        _render(renderer, HARMLESS[name])
    assert len(caught.value.message) < 700
    assert caught.value.param == "messages"


def test_a_template_that_no_signal_stops_is_killed_with_its_process() -> None:
    """Its process ends, and the next conversation gets another one."""
    renderer = TemplateRenderer(PATIENT)
    try:
        before = {one.pid for one in _children()}
        renderer.start()
        (first,) = [one for one in _children() if one.pid not in before]
        with _strict(renderer), pytest.raises(TemplateLimitError, match=r"longer than 0\.3 s"):
            _render(renderer, UNINTERRUPTIBLE)
        assert not first.is_running()
        assert _render(renderer, PLAIN) == "hi"
    finally:
        renderer.close()


def test_memory_is_given_back_between_conversations(renderer: TemplateRenderer) -> None:
    """Templates that take all the memory they may, one after another, take no more than one does."""
    grows = HOSTILE["namespace_list"]
    for _ in range(2):
        with _strict(renderer), pytest.raises(TemplateLimitError):
            _render(renderer, grows)
    assert _render(renderer, PLAIN) == "hi"
    assert max(map(_own_bytes, _children())) < 400 * _MIB


def test_a_process_that_dies_is_replaced(renderer: TemplateRenderer) -> None:
    """Such as one that the system's killer of large processes chose; no template is blamed."""
    assert _render(renderer, PLAIN) == "hi"
    for child in _children():
        child.kill()
        child.wait(CEILING_S)
    assert _render(renderer, PLAIN) == "hi"


def test_a_closed_renderer_leaves_no_process() -> None:
    """Neither closed by name nor dropped, also while a template runs."""
    before = {one.pid for one in _children()}
    closed, dropped = TemplateRenderer(PATIENT), TemplateRenderer(PATIENT)
    for one in (closed, dropped):
        one.start()
    assert len({child.pid for child in _children()} - before) == 2
    closed.close()
    closed.close()
    del one, dropped
    wait_until(lambda: {child.pid for child in _children()} <= before, "they ended")


def test_a_process_ends_when_its_parent_is_killed() -> None:
    """The operating system closes the socket between them, whatever ends the parent."""
    program = (
        "import psutil, time\n"
        "from machd.engine.tokenizer.template_renderer import TemplateRenderer\n"
        "renderer = TemplateRenderer()\n"
        "renderer.render('x', [], {})\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    wait_until(lambda: not child.is_running(), "its child has ended")


def test_text_has_a_limit_that_grows_with_the_conversation(renderer: TemplateRenderer) -> None:
    """Eight times what was sent and a mebibyte: a long conversation is no hostile template."""
    long = {"role": "user", "content": "é" * 2_000_000}
    repeats = "{{ messages[0].content * 4 }}"
    assert len(_render(renderer, repeats, [long])) == 8_000_000
    with pytest.raises(TemplateLimitError, match="characters"):
        _render(renderer, "{{ 'x' * 8000000 }}")


def test_any_text_survives_the_way_to_the_process(renderer: TemplateRenderer) -> None:
    """Lone surrogates, control characters, numbers without end, and names that JSON escapes."""
    text = 'a\ud800\x00\x1b\u2028😀"\\'
    assert _render(renderer, PLAIN, [{"content": text}]) == text
    numbers = {"content": [10**30, 1e300, float("inf"), True, None]}
    shown = _render(renderer, "{{ messages[0].content | string }}", [numbers])
    assert shown == str(numbers["content"])


def test_threads_share_a_renderer(renderer: TemplateRenderer) -> None:
    """Each gets the text of its own conversation."""
    texts: dict[int, str] = {}

    def work(index: int) -> None:
        for _ in range(20):
            texts[index] = _render(renderer, PLAIN, [{"content": f"number {index}"}])
            assert texts[index] == f"number {index}"

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {index: f"number {index}" for index in range(6)}


def test_no_room_for_a_process_is_a_busy_server(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file descriptors the client is told to come again; later it is served."""
    fresh = TemplateRenderer(PATIENT)

    def none_left(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("machd.engine.backend.child_process.subprocess.Popen", none_left)
        with pytest.raises(OverloadedError, match="Too many open files"):
            _render(fresh, PLAIN)
    assert _render(renderer, PLAIN) == "hi"


def test_a_process_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation is a fault of the server's, with the reason in its log."""
    fresh = TemplateRenderer(PATIENT)
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text(
        "raise OSError('transformers is broken here')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="transformers is broken here"):
        _render(fresh, PLAIN)


def test_a_known_template_needs_no_process(embedded_model_path: Path) -> None:
    """The embedded model's is rendered in place, and refuses what it cannot render all the same."""
    template = build_tokenizer(read_gguf_header(embedded_model_path)).chat_templates["default"]
    assert is_known_template(template)
    assert not is_known_template(template + " ")
    renderer = TemplateRenderer(PATIENT)
    before = {one.pid for one in _children()}
    text = _render(renderer, template, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert {one.pid for one in _children()} == before
    with pytest.raises(InvalidRequestError, match="cannot render"):
        _render(renderer, template, [{"role": "user", "content": 3}])
