"""Rendering of a checkpoint's chat template: conversations to prompt text, within bounds.

A template is a stranger's program. A template that machd knows by its hash is rendered here; any
other in a process of its own (:mod:`machd.engine.tokenizer.template_child`), because one expression
can hold the interpreter's lock, and with it every stream and ``/health``, for minutes. The process
bounds its own time and memory where it can; this side kills it where it cannot.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from machd.clock import SystemClock
from machd.engine.tokenizer.template_child import (
    CANNOT_RENDER,
    HEADER,
    READY,
    REFUSED,
    RENDERED,
    REQUEST,
    TOO_MUCH,
    RenderRequest,
    as_bytes,
    as_text,
    refusal_message,
    render_text,
    send_frame,
)
from machd.errors import InvalidRequestError, OverloadedError, TemplateLimitError

_KNOWN_TEMPLATES = frozenset(
    {
        # SmolLM2-135M-Instruct, the embedded model.
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    }
)
"""SHA-256 of templates that were reviewed: their time is proportional to the conversation."""

_START_LIMIT_S = 120.0
"""The process imports a part of transformers: 2 s on an idle machine."""

_GRACE_S = 1.0
"""Time for the process to report by itself that its time is up."""

_LOOK_S = 0.05
"""Interval at which a slow process's memory is read."""

MARK = "zq7marker"
"""A word that no template contains; found in a prompt, the template shows what held it."""

SYSTEM: dict[str, object] = {"role": "system", "content": MARK}
USER: dict[str, object] = {"role": "user", "content": "Hello"}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": MARK,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class RenderBounds:
    """Limits of rendering one conversation: wall time, and memory that its process may gain."""

    limit_s: float = 5.0
    memory_bytes: int = 256 << 20


class TemplateRenderer:
    """Renders chat templates; threads may share it, and wait for each other.

    The process is started by :meth:`start` or by the first template that needs it. It ends with
    :meth:`close`, with this object, or with this program, whatever comes first.
    """

    def __init__(self, bounds: RenderBounds | None = None) -> None:
        """Start nothing yet."""
        self._bounds = bounds or RenderBounds()
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Let the process begin its imports; returns at once.

        Raises:
            OverloadedError: The system has no room for a process.
        """
        with self._lock:
            self._running_child()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, object]],
        arguments: Mapping[str, object],
    ) -> str:
        """Render a conversation; the arguments are those of transformers' ``render_jinja_template``.

        Raises:
            InvalidRequestError: The template refuses the conversation; its own words are given.
            TemplateLimitError: It was stopped.
            OverloadedError: The system has no room for a process.
            RuntimeError: The process cannot start, or does not answer as it should.
        """
        if is_known_template(template):
            with refusals_as_errors(arguments):
                return render_text(template, messages, arguments)
        request = RenderRequest(
            template=template,
            messages=messages,
            arguments=arguments,
            limit_s=self._bounds.limit_s,
            memory_bytes=self._bounds.memory_bytes,
        )
        kind, text = self._ask(as_bytes(json.dumps(request, ensure_ascii=False)))
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            raise InvalidRequestError(text, param="messages")
        if kind == TOO_MUCH:
            raise TemplateLimitError(text, param="messages")
        raise RuntimeError(f"the process for chat templates cannot work: {text}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end_child()

    def _ask(self, request: bytes) -> tuple[bytes, str]:
        with self._lock:
            child = self._running_child()
            try:
                child.wait_ready()
                return child.ask(request, self._bounds)
            except BaseException:
                # A late answer would be taken for that to the next request.
                self._end_child()
                raise

    def _running_child(self) -> _Child:
        if self._child is None or not self._child.is_usable(self._bounds):
            self._end_child()
            self._child = _Child()
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """One process and the socket to it. Not for several threads."""

    def __init__(self) -> None:
        """Start the process."""
        try:
            self._channel, other = socket.socketpair()
            with other:
                self._process = _started(self._channel, other)
        except OSError as error:
            raise OverloadedError(
                f"no process for the chat template can be started: {error.strerror}"
            ) from error
        self._clock = SystemClock()
        self._is_ready = False
        self._ready_bytes = 0
        self.end = weakref.finalize(self, _end, self._process, self._channel)

    def is_usable(self, bounds: RenderBounds) -> bool:
        """Tell whether the process runs, and has given back the memory of earlier requests."""
        return (
            self._process.poll() is None
            and self._memory_bytes() <= self._ready_bytes + bounds.memory_bytes
        )

    def wait_ready(self) -> None:
        """Wait until the process has finished its imports."""
        if self._is_ready:
            return
        try:
            kind, text = self._receive(self._clock.monotonic_s() + _START_LIMIT_S)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise RuntimeError("the process for chat templates does not start") from error
        if kind != READY:
            raise RuntimeError(f"the process for chat templates cannot start: {text}")
        self._is_ready = True
        self._ready_bytes = self._memory_bytes()

    def ask(self, request: bytes, bounds: RenderBounds) -> tuple[bytes, str]:
        """Send a request and wait for the answer; after an error the process has to be ended."""
        try:
            self._channel.settimeout(bounds.limit_s + _GRACE_S)
            send_frame(self._channel, REQUEST, request)
            deadline_s = self._clock.monotonic_s() + bounds.limit_s + _GRACE_S
            return self._receive(deadline_s, self._ready_bytes + 2 * bounds.memory_bytes)
        except TimeoutError:
            raise _stopped(f"it takes longer than {bounds.limit_s:g} s") from None
        except (EOFError, ConnectionError) as error:
            raise _stopped("it ends the process that renders it") from error

    def _receive(self, deadline_s: float, max_memory_bytes: int | None = None) -> tuple[bytes, str]:
        kind, size = HEADER.unpack(self._read(HEADER.size, deadline_s, max_memory_bytes))
        return kind, as_text(self._read(size, deadline_s, max_memory_bytes))

    def _read(self, size: int, deadline_s: float, max_memory_bytes: int | None) -> bytes:
        content = bytearray()
        self._channel.settimeout(_LOOK_S)
        while len(content) < size:
            try:
                got = self._channel.recv(min(size - len(content), 1 << 20))
            except TimeoutError:
                self._check(deadline_s, max_memory_bytes)
                continue
            if not got:
                raise EOFError
            content += got
        return bytes(content)

    def _check(self, deadline_s: float, max_memory_bytes: int | None) -> None:
        if self._clock.monotonic_s() > deadline_s:
            raise TimeoutError
        # Where the system limits memory (Linux), the process says so before this is ever true.
        if max_memory_bytes is not None and self._memory_bytes() > max_memory_bytes:
            raise _stopped("it takes too much memory")

    def _memory_bytes(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0  # it has just ended, which the socket reports


def _started(ours: socket.socket, theirs: socket.socket) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            # -P: no module of the working directory takes the place of an installed one.
            [sys.executable, "-P", "-m", "machd.engine.tokenizer.template_child"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        ours.close()
        raise


def is_known_template(template: str) -> bool:
    """Tell whether machd renders a template in its own process."""
    digest = hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
    return digest in _KNOWN_TEMPLATES


@contextmanager
def refusals_as_errors(arguments: Mapping[str, object]) -> Iterator[None]:
    """Turn what a template raises into InvalidRequestError; other errors pass."""
    try:
        yield
    except Exception as error:
        continues = bool(arguments.get("continue_final_message"))
        message = refusal_message(error, continues=continues)
        if message is None:
            raise
        raise InvalidRequestError(message, param="messages") from error


def _stopped(reason: str) -> TemplateLimitError:
    return TemplateLimitError(f"{CANNOT_RENDER}: {reason}", param="messages")


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()
