"""A process that works on what clients and checkpoints send, within bounds of time and memory.

The parent starts ``python -m MODULE``, whose standard input is a socket. The process says READY once its imports are done;
then each request gets one answer. A process that is late or too large is killed by the parent.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import psutil

from machd.clock import SystemClock
from machd.errors import OverloadedError

HEADER = struct.Struct(">cQ")
"""Header of a message: its kind, and the number of bytes that follow."""

REQUEST, READY, UNABLE = b"q", b"r", b"u"
"""Kinds of messages that every such process knows; the kinds of answers are its own."""

_START_LIMIT_S = 120.0
"""The process imports transformers: 1 s on an idle machine."""

_GRACE_S = 1.0
"""Time for the process to report by itself that its time is up."""

_LOOK_S = 0.05
"""Interval at which a slow process's memory is read."""

_CPU_S = 30
"""Processor time of one request after which the kernel ends a process that its parent left behind, beyond what the request may take."""


IsWanted = Callable[[], bool]
"""Tells whether a request still waits for what a process works on."""


class ChildStoppedError(Exception):
    """The process gave no answer and has to be ended; the message is the end of a sentence: "it …"."""


class ChildEndedError(ChildStoppedError):
    """The process ended by itself, or something outside of the program ended it."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Limits of one answer; ``deadline_s`` is on the monotonic clock."""

    deadline_s: float
    max_memory_bytes: float = inf
    is_wanted: IsWanted | None = None


class ChildChannel:
    """The parent's end of the socket to a process, on which answers are read within bounds. Not for several threads."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel = channel
        self.pid = pid
        self._clock = SystemClock()

    def receive(self, bounds: AnswerBounds) -> tuple[bytes, bytearray]:
        """Wait for a message, and return its kind and content.

        Raises:
            ChildStoppedError: It is too large, it is no longer waited for, or the process takes too much memory.
            OSError: It is late (TimeoutError), or the process has ended.
        """
        kind, size = HEADER.unpack(self._read(HEADER.size, bounds))
        if size > bounds.max_memory_bytes:
            raise ChildStoppedError("has too large an answer")
        return kind, self._read(size, bounds)

    def _read(self, size: int, bounds: AnswerBounds) -> bytearray:
        """Return so many bytes, written once to where they stay: an image's may be hundreds of megabytes."""
        content = bytearray(size)
        left = memoryview(content)
        self._channel.settimeout(_LOOK_S)
        while left:
            try:
                got = self._channel.recv_into(left)
            except TimeoutError:
                self._check(bounds)
                continue
            if not got:
                raise ConnectionError
            left = left[got:]
        return content

    def _check(self, bounds: AnswerBounds) -> None:
        if self._clock.monotonic_s() > bounds.deadline_s:
            raise TimeoutError
        if bounds.is_wanted is not None and not bounds.is_wanted():
            raise ChildStoppedError("is no longer waited for")
        # Where the system limits memory (Linux), the process says so before this is ever true.
        if self.memory_bytes() > bounds.max_memory_bytes:
            raise ChildStoppedError("takes too much memory")

    def memory_bytes(self) -> int:
        """Return the memory that the process holds; 0 once it has ended."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0  # it has just ended, which the socket reports


class ChildProcess(ChildChannel):
    """One process and the socket to it. Not for several threads."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Start the process.

        Raises:
            OSError: The system has no room for it.
        """
        self._module = module
        channel, other = socket.socketpair()
        with other:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module and what it is given
                    # -P: no module of the working directory takes the place of an installed one.
                    [sys.executable, "-P", "-m", module, *arguments],
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                channel.close()
                raise
        super().__init__(channel, self._process.pid)
        self._said: bytearray | None = None
        self._ready_bytes = 0
        self.end = weakref.finalize(self, _end, self._process, channel)

    def is_usable(self, max_gained_bytes: float) -> bool:
        """Tell whether the process runs, and has given back the memory of earlier requests."""
        return (
            self._process.poll() is None
            and self.memory_bytes() <= self._ready_bytes + max_gained_bytes
        )

    def wait_ready(self) -> bytearray:
        """Wait until the process has finished its imports, and return what it says then.

        Raises:
            RuntimeError: It cannot start.
        """
        if self._said is not None:
            return self._said
        try:
            kind, said = self.receive(AnswerBounds(self._clock.monotonic_s() + _START_LIMIT_S))
        except OSError as error:
            raise RuntimeError(f"{self._module} does not start") from error
        if kind != READY:
            raise RuntimeError(f"{self._module} cannot start: {as_text(said)}")
        self._said = said
        self._ready_bytes = self.memory_bytes()
        return said

    def ask(
        self,
        request: bytes,
        *,
        limit_s: float,
        max_gained_bytes: int,
        descriptors: Sequence[int] = (),
        is_wanted: IsWanted | None = None,
    ) -> tuple[bytes, bytearray]:
        """Send a request, with copies of files, and wait for kind and content of the answer.

        The process may report within a second more that its time is up. After an error it has to be ended.

        Raises:
            ChildStoppedError: There is no answer, it takes more memory, or nothing waits for it any more.
        """
        try:
            self._channel.settimeout(limit_s + _GRACE_S)
            send_frame(self._channel, REQUEST, request, descriptors)
            deadline_s = self._clock.monotonic_s() + limit_s + _GRACE_S
            bounds = AnswerBounds(deadline_s, self._ready_bytes + max_gained_bytes, is_wanted)
            return self.receive(bounds)
        except TimeoutError:
            raise ChildStoppedError(f"takes longer than {limit_s:g} s") from None
        except ConnectionError as error:
            raise ChildEndedError("ends the process that works on it") from error


class SharedChild:
    """A process that is started again after it was stopped. Threads may share it, and wait for each other."""

    def __init__(self, purpose: str, module: str, *arguments: str) -> None:
        self._purpose = purpose
        self._command = (module, *arguments)
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def start(self) -> None:
        """Let the process begin its imports; returns at once.

        Raises:
            OverloadedError: The system has no room for a process.
        """
        with self._lock:
            self._running()

    def ready(self) -> bytearray:
        """Wait until the process has finished its imports, and return what it says then.

        Raises:
            RuntimeError: It cannot start.
            OverloadedError: The system has no room for it.
        """
        with self._lock, self._ended_on_error():
            return self._running().wait_ready()

    def ask(
        self,
        request: bytes,
        *,
        limit_s: float,
        memory_bytes: int,
        is_wanted: IsWanted | None = None,
    ) -> tuple[bytes, bytearray]:
        """Send a request, and return the kind and content of the answer.

        A process that ends while it works on the request is started again, once: the system or an operator may have
        ended it for reasons of their own. One that takes twice the memory that it is to keep to is stopped.

        Raises:
            ChildStoppedError: There is no answer.
            RuntimeError: The process cannot start.
            OverloadedError: The system has no room for it.
        """

        def ask_once() -> tuple[bytes, bytearray]:
            with self._ended_on_error():
                child = self._running(memory_bytes)
                child.wait_ready()
                return child.ask(
                    request,
                    limit_s=limit_s,
                    max_gained_bytes=2 * memory_bytes,
                    is_wanted=is_wanted,
                )

        with self._lock:
            if is_wanted is not None and not is_wanted():
                raise ChildStoppedError("is no longer waited for")
            try:
                return ask_once()
            except ChildEndedError:
                return ask_once()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End the process if the block raises: a late answer would be taken for that to the next request."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _running(self, memory_bytes: float = inf) -> ChildProcess:
        if self._child is None or not self._child.is_usable(memory_bytes):
            self._end()
            try:
                self._child = ChildProcess(*self._command)
            except OSError as error:
                raise OverloadedError(
                    f"no process for {self._purpose} can be started: {error.strerror}"
                ) from error
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def send_frame(
    channel: socket.socket, kind: bytes, content: bytes, descriptors: Sequence[int] = ()
) -> None:
    """Write one message, and copies of files with its header."""
    header = HEADER.pack(kind, len(content))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(content)


def as_bytes(text: str) -> bytes:
    """UTF-8 that keeps lone surrogates, which JSON can spell."""
    return text.encode("utf-8", "surrogatepass")


def as_text(content: bytes | bytearray) -> str:
    """Inverse of :func:`as_bytes`."""
    return content.decode("utf-8", "surrogatepass")


@contextmanager
def parent_channel() -> Iterator[socket.socket]:
    """Open the socket to the parent, in the process itself."""
    for one in (signal.SIGINT, signal.SIGTERM):
        # Both go to a whole process group; the parent decides when this process ends.
        signal.signal(one, signal.SIG_IGN)
    with socket.socket(fileno=sys.stdin.fileno()) as channel:
        yield channel


def requests_of(channel: socket.socket) -> Iterator[bytes]:
    """Yield the parent's requests until it closes its side."""
    try:
        with channel.makefile("rb") as frames:
            while len(header := frames.read(HEADER.size)) == HEADER.size:
                _, size = HEADER.unpack(header)
                content = frames.read(size)
                if len(content) < size:
                    return
                allow_processor_s(0.0)
                yield content
    except OSError:
        return  # the parent has ended


def allow_processor_s(limit_s: float) -> None:
    """Let the kernel end the process after far more processor time than the parent waits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted_s = limit_s * (os.cpu_count() or 1)
    soft = int(used.ru_utime + used.ru_stime + wanted_s) + _CPU_S
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()
