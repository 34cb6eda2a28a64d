"""``python -m machd.engine.grammar.grammar_child``: forks a process for each grammar kept apart.

:mod:`machd.engine.grammar.grammar_processes` is the parent's side. This process holds the vocabulary and never compiles;
a fork of it compiles one grammar and follows it for all its rows, and can be killed at any moment.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from contextlib import suppress

import msgspec
from llguidance import LLMatcher, LLTokenizer

from machd.clock import thread_cpu_s
from machd.engine.backend.child_process import (
    HEADER,
    READY,
    parent_channel,
    requests_of,
    send_frame,
)
from machd.engine.grammar.compilation import CompilationError, compile_source
from machd.engine.grammar.vocabulary import Vocabulary

DONE, FAILED, TOKENISE = b"d", b"f", b"t"
"""Kinds of messages to the parent: an answer, a refusal in words, a text to tokenise meanwhile."""

_FIRST = 0
"""Number of the matcher at the beginning of a text."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Request to fork a process that answers on the descriptor that comes with it."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Request to kill a forked process, or to do nothing if it has ended."""

    pid: int


class Learn(msgspec.Struct, frozen=True, tag="learn"):
    """The first request: the vocabulary."""

    vocabulary: Vocabulary


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """The first request to a fork, and the memory that it may gain where the system can limit it."""

    source: str
    memory_bytes: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of a method of a matcher.

    Attributes:
        dropped: Numbers of matchers that are not needed any more.
        copy: Number to keep a result under that is itself a matcher.
    """

    method: str
    matcher: int
    arguments: tuple[int | list[int], ...] = ()
    dropped: tuple[int, ...] = ()
    copy: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """The result of a call.

    Attributes:
        result: What the method returned; the warnings of a compilation.
        is_error: The matcher cannot be followed any more.
        cpu_s: Processor time of the call.
    """

    result: bool | int | bytes | list[int | str] | None
    is_error: bool
    cpu_s: float


class _Encoding:
    """The model's tokenizer, which the parent has."""

    def __init__(self) -> None:
        self.channel: socket.socket | None = None

    def __call__(self, text: str) -> list[int]:
        assert self.channel is not None, "nothing is tokenised before a fork"
        send_frame(self.channel, TOKENISE, text.encode())
        _, size = HEADER.unpack(_read(self.channel, HEADER.size))
        return msgspec.msgpack.decode(_read(self.channel, size), type=list[int])


def main() -> None:
    """Answer requests until the parent closes its side; then kill all forks."""
    with parent_channel() as channel:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        send_frame(channel, READY, b"")
        forks = _Forks(channel)
        try:
            while True:
                content = forks.answer(*_received(channel))
                send_frame(channel, DONE, content)
        except (EOFError, OSError):
            pass  # the parent has ended
        finally:
            forks.kill_all()


class _Forks:
    """The forks of this process, each with its grammar."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._encoding = _Encoding()
        self._pids: set[int] = set()
        self._vocabulary: tuple[LLTokenizer, Vocabulary] | None = None

    def answer(self, request: Fork | End | Learn, descriptors: list[int]) -> bytes:
        self._reap()
        match request:
            case Learn(vocabulary):
                self._vocabulary = (vocabulary.bound(self._encoding), vocabulary)
            case Fork():
                (descriptor,) = descriptors
                return msgspec.msgpack.encode(self._fork(descriptor))
            case End(pid):
                if pid in self._pids:
                    os.kill(pid, signal.SIGKILL)
        return b""

    def kill_all(self) -> None:
        self._reap()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, descriptor: int) -> int:
        """Return the fork's number, or the negated errno where the system has no room for one."""
        assert self._vocabulary is not None, "the vocabulary comes first"
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            return -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._channel.close()
            _serve(descriptor, *self._vocabulary, self._encoding)
        os.close(descriptor)
        self._pids.add(pid)
        return pid

    def _reap(self) -> None:
        """Forget forks that have ended, whose numbers the system may give to others from now on."""
        for pid in tuple(self._pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._pids.discard(pid)


def _received(channel: socket.socket) -> tuple[Fork | End | Learn, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(channel, HEADER.size, 1)
    header += _read(channel, HEADER.size - len(header))
    _, size = HEADER.unpack(header)
    content = _read(channel, size)
    return msgspec.msgpack.decode(content, type=Fork | End | Learn), descriptors


def _read(channel: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        got = channel.recv(min(size - len(content), 1 << 20))
        if not got:
            raise EOFError
        content += got
    return bytes(content)


def _serve(
    descriptor: int, tokenizer: LLTokenizer, vocabulary: Vocabulary, encoding: _Encoding
) -> None:
    """Compile one grammar and answer calls of its matchers, in a fork, which ends with it."""
    try:
        with socket.socket(fileno=descriptor) as channel:
            encoding.channel = channel
            matchers: dict[int, LLMatcher] = {}
            for content in requests_of(channel):
                request = msgspec.msgpack.decode(content, type=Compile | Call)
                before_s = thread_cpu_s()
                try:
                    if isinstance(request, Compile):
                        _limit_memory(request.memory_bytes)
                        matcher = compile_source(
                            tokenizer, request.source, vocabulary.eos_token_ids
                        )
                        matchers[_FIRST] = matcher
                        result: object = matcher.get_grammar_warnings()
                    else:
                        matcher, result = _called(matchers, request)
                except CompilationError as error:
                    send_frame(channel, FAILED, str(error).encode())
                    continue
                answer = Answer(result, matcher.is_error(), thread_cpu_s() - before_s)  # type: ignore[arg-type]
                send_frame(channel, DONE, msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)  # a fork leaves nothing to clean up, whatever it raised


def _called(matchers: dict[int, LLMatcher], call: Call) -> tuple[LLMatcher, object]:
    for number in call.dropped:
        matchers.pop(number, None)
    matcher = matchers[call.matcher]
    result = getattr(matcher, call.method)(*call.arguments)
    if call.copy is None:
        return matcher, result
    matchers[call.copy] = result
    return result, None


def _limit_memory(gained_bytes: int) -> None:
    """Limit the private memory of this process, where the system can."""
    with suppress(
        OSError, ValueError
    ):  # macOS knows no such limit; the parent looks at what is used
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - psutil is not imported here
            data_pages = int(file.read().split()[5])
        wanted = data_pages * resource.getpagesize() + gained_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    main()
