"""Processes that work on what strangers send are started again, and stopped, for the right reasons."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from machd.engine.backend.child_process import (
    ChildEndedError,
    ChildProcess,
    ChildStoppedError,
    SharedChild,
    as_text,
)
from machd.engine.tokenizer.template_child import RENDERED, RenderRequest

_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(name="child", scope="module")
def _child() -> Iterator[SharedChild]:
    child = SharedChild("the chat template", "machd.engine.tokenizer.template_child")
    yield child
    child.close()


def _request(template: str = "said {{ messages[0].content }}") -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    return msgspec.json.encode(
        RenderRequest(
            template=template, messages=messages, arguments={}, limit_s=60.0, memory_bytes=1 << 28
        )
    )


def _ends(monkeypatch: pytest.MonkeyPatch, times: int) -> list[ChildProcess]:
    """End the process as it gets its first requests; returns the processes that were asked."""
    ask, asked = ChildProcess.ask, list[ChildProcess]()

    def ended(child: ChildProcess, *given: object, **named: object) -> tuple[bytes, bytearray]:
        asked.append(child)
        if len(asked) <= times:
            child._process.kill()
            child._process.wait()
        return ask(child, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ChildProcess, "ask", ended)
    return asked


def test_a_process_that_was_killed_costs_its_request_nothing(
    child: SharedChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have ended it for want of memory: the request is done in a new process."""
    asked = _ends(monkeypatch, 1)
    kind, text = child.ask(_request(), limit_s=60.0, memory_bytes=1 << 28)
    assert (kind, as_text(text)) == (RENDERED, "said hello")
    assert len(asked) == 2


def test_what_ends_two_processes_is_the_requests_own_fault(
    child: SharedChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried a third time."""
    asked = _ends(monkeypatch, 9)
    with pytest.raises(ChildEndedError):
        child.ask(_request(), limit_s=60.0, memory_bytes=1 << 28)
    assert len(asked) == 2


def test_work_that_nothing_waits_for_ends(child: SharedChild) -> None:
    """The process is stopped, and the next request gets an answer of a new one."""
    is_gone = threading.Event()
    failed: list[ChildStoppedError] = []

    def ask() -> None:
        try:
            child.ask(
                _request(_LOOP),
                limit_s=3600.0,
                memory_bytes=1 << 28,
                is_wanted=lambda: not is_gone.is_set(),
            )
        except ChildStoppedError as error:
            failed.append(error)

    child.ready()
    asking = threading.Thread(target=ask)
    asking.start()
    is_gone.set()
    asking.join()
    assert len(failed) == 1
    assert child.ask(_request(), limit_s=60.0, memory_bytes=1 << 28)[0] == RENDERED


def test_an_answer_larger_than_the_memory_of_its_process_is_not_read(child: SharedChild) -> None:
    """A process that a codec's fault has taken over may say any size."""
    child.ready()
    with pytest.raises(ChildStoppedError, match="too large an answer"):
        child.ask(_request("a" * 1000), limit_s=60.0, memory_bytes=-(1 << 40))
