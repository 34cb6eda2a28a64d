"""Grammars kept apart: each compiled and followed in a process of its own, which can be ended.

A step of a grammar with intersections can take minutes and gigabytes inside llguidance, which nothing
there bounds. A call that is late ends the process, and with it this grammar alone.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from machd.engine.backend.child_process import (
    REQUEST,
    AnswerBounds,
    ChildChannel,
    ChildProcess,
    ChildStoppedError,
    send_frame,
)
from machd.engine.grammar.compilation import CompilationError
from machd.engine.grammar.grammar_child import (
    DONE,
    TOKENISE,
    Answer,
    Call,
    Compile,
    End,
    Fork,
    Learn,
)
from machd.engine.grammar.vocabulary import Vocabulary
from machd.errors import OverloadedError

_CHILD_MODULE = "machd.engine.grammar.grammar_child"

_REQUEST_LIMIT_S = 30.0
"""Of the process that forks: it may have to read 250,000 tokens on a busy machine."""

_REQUEST_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """Bounds of a grammar kept apart, in wall time: of compiling it, and of one call while the whole batch waits for it."""

    compile_s: float = 5.0
    step_s: float = 0.5
    memory_bytes: int = 256 << 20
    max_processes: int = 16


class CompilationStoppedError(CompilationError):
    """Compiling took too long or too much memory, or is not wanted any more."""


class GrammarProcesses:
    """Starts and counts the processes. Threads may share it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], list[int]],
        bounds: GrammarBounds,
    ) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self._bounds = bounds
        self._lock = threading.Lock()
        self._forker: ChildProcess | None = None
        self._open = weakref.WeakSet[GrammarProcess]()

    @property
    def open_count(self) -> int:
        """Number of processes that compile or follow a grammar."""
        with self._lock:
            return self._count()

    def compile(
        self, source: str, is_wanted: Callable[[], bool]
    ) -> tuple[SeparateMatcher, list[str]]:
        """Compile a grammar in a process of its own; returns its matcher, and llguidance's warnings.

        Raises:
            CompilationError: It cannot be compiled, or not within the bounds.
            OverloadedError: There are too many processes, or the system has no room for another.
            RuntimeError: The process cannot start.
        """
        bounds = self._bounds
        process = self._fork()
        request = Compile(source, bounds.memory_bytes)
        try:
            answer = process.ask(request, limit_s=bounds.compile_s, is_wanted=is_wanted)
        except ChildStoppedError as error:
            raise CompilationStoppedError(f"too complex: compiling it {error}") from None
        except BaseException:
            process.close()
            raise
        assert isinstance(answer.result, list), "a compilation returns its warnings"
        return SeparateMatcher(process, 0), [str(one) for one in answer.result]

    def end(self, pid: int) -> None:
        """Kill a process."""
        with self._lock:
            if self._forker is not None:
                self._ask(self._forker, End(pid))

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for process in tuple(self._open):
                process.close()
                if self._forker is not None:
                    self._ask(self._forker, End(process.pid))
            if self._forker is not None:
                self._forker.end()
                self._forker = None

    def _fork(self) -> GrammarProcess:
        with self._lock:
            if (count := self._count()) >= self._bounds.max_processes:
                raise OverloadedError(
                    f"{count} grammars with intersections are in use, which is the limit; "
                    "try again later"
                )
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    answer = self._ask(self._running(), Fork(), theirs.fileno())
                except BaseException:
                    ours.close()
                    raise
            pid = msgspec.msgpack.decode(answer, type=int)
            if pid < 0:
                ours.close()
                raise OverloadedError(
                    f"no process for a grammar can be started: {os.strerror(-pid)}; try again later"
                )
            process = GrammarProcess(self, ours, pid, self._encode, self._bounds)
            self._open.add(process)
            return process

    def _count(self) -> int:
        return sum(not one.has_ended for one in self._open)

    def _running(self) -> ChildProcess:
        if self._forker is None or not self._forker.is_usable(_REQUEST_MEMORY_BYTES):
            try:
                forker = ChildProcess(_CHILD_MODULE)
            except OSError as error:
                raise OverloadedError(
                    f"no process for grammars can be started: {error.strerror}"
                ) from error
            forker.wait_ready()
            self._ask(forker, Learn(self._vocabulary))
            self._forker = forker
        return self._forker

    def _ask(
        self, forker: ChildProcess, request: Fork | End | Learn, *descriptors: int
    ) -> bytearray:
        try:
            _, answer = forker.ask(
                msgspec.msgpack.encode(request),
                limit_s=_REQUEST_LIMIT_S,
                max_gained_bytes=_REQUEST_MEMORY_BYTES,
                descriptors=descriptors,
            )
        except ChildStoppedError as error:
            forker.end()
            self._forker = None
            raise OverloadedError(f"the process for grammars {error}; try again") from error
        return answer


class GrammarProcess(ChildChannel):
    """The process of one grammar. Threads may share it, and wait for each other."""

    def __init__(
        self,
        processes: GrammarProcesses,
        channel: socket.socket,
        pid: int,
        encode: Callable[[str], list[int]],
        bounds: GrammarBounds,
    ) -> None:
        super().__init__(channel, pid)
        self._processes = processes
        self._encode = encode
        self._bounds = bounds
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()
        self._start_bytes = self.memory_bytes()
        self.cpu_s = 0.0
        self.has_ended = False
        weakref.finalize(self, channel.close)  # an idle process ends when its parent hangs up

    def ask(
        self,
        request: Compile | Call,
        *,
        limit_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Send a request and wait for the answer.

        Raises:
            CompilationError: The process refuses the grammar.
            ChildStoppedError: There is no answer; the process was killed.
        """
        with self._lock:
            if self.has_ended:
                raise ChildStoppedError("has ended")
            try:
                kind, content = self._asked(request, limit_s, is_wanted)
            except TimeoutError:
                self._kill()
                raise ChildStoppedError(f"takes longer than {limit_s:g} s") from None
            except OSError as error:  # the process has ended, for want of memory most likely
                self._kill()
                raise ChildStoppedError("takes too much memory") from error
            except BaseException:  # a late answer would be taken for that to the next request
                self._kill()
                raise
        if kind != DONE:
            raise CompilationError(content.decode())
        answer = msgspec.msgpack.decode(content, type=Answer)
        self.cpu_s += answer.cpu_s
        return answer

    def call(self, method: str, matcher: int, *arguments: int | list[int]) -> Answer | None:
        """Call a method of a matcher; None if the process had to be ended."""
        return self._call(Call(method, matcher, arguments, self._take_dropped()))

    def copy(self, matcher: int) -> int:
        """Copy a matcher and return the number of the copy."""
        number = next(self._numbers)
        self._call(Call("deep_copy", matcher, (), self._take_dropped(), number))
        return number

    def drop(self, matcher: int) -> None:
        """Let the process forget a matcher with the next call; may be called while another runs."""
        self._dropped.append(matcher)

    def close(self) -> None:
        """Let the process end, which waits for a call."""
        self.has_ended = True
        self._channel.close()

    def _call(self, call: Call) -> Answer | None:
        try:
            return self.ask(call, limit_s=self._bounds.step_s)
        except ChildStoppedError:
            return None

    def _take_dropped(self) -> tuple[int, ...]:
        taken = list[int]()
        with suppress(IndexError):  # another thread may take from it, too
            while True:
                taken.append(self._dropped.popleft())
        return tuple(taken)

    def _asked(
        self, request: Compile | Call, limit_s: float, is_wanted: Callable[[], bool]
    ) -> tuple[bytes, bytearray]:
        bounds = AnswerBounds(
            self._clock.monotonic_s() + limit_s,
            self._start_bytes + self._bounds.memory_bytes,
            is_wanted,
        )
        self._channel.settimeout(limit_s)
        send_frame(self._channel, REQUEST, msgspec.msgpack.encode(request))
        while True:
            kind, content = self.receive(bounds)
            if kind != TOKENISE:
                return kind, content
            token_ids = msgspec.msgpack.encode(self._encode(content.decode()))
            send_frame(self._channel, REQUEST, token_ids)

    def _kill(self) -> None:
        self.close()
        self._processes.end(self.pid)


class SeparateMatcher:
    """An ``LLMatcher`` in a process of its own, with the methods that rows need.

    Once the process has ended, the matcher is in error and accepts nothing, as llguidance's own is.
    """

    def __init__(self, process: GrammarProcess, number: int) -> None:
        self._process = process
        self._number = number
        self._has_error = False
        weakref.finalize(self, process.drop, number)

    @property
    def cpu_s(self) -> float:
        """Processor time of all calls of this grammar."""
        return self._process.cpu_s

    def deep_copy(self) -> SeparateMatcher:
        """Copy the state."""
        return SeparateMatcher(self._process, self._process.copy(self._number))

    def is_alive(self) -> bool:
        """True if the process answers."""
        return self._called("is_accepting") is not None

    def is_error(self) -> bool:
        """True if the matcher cannot be followed any more."""
        return self._has_error or self._process.has_ended

    def is_accepting(self) -> bool:
        """True if the text may end here."""
        return bool(self._called("is_accepting"))

    def is_stopped(self) -> bool:
        """True if the text has to end here."""
        return self.is_error() or bool(self._called("is_stopped"))

    def compute_ff_tokens(self) -> list[int]:
        """Tokens that have to come next."""
        result = self._called("compute_ff_tokens")
        return [int(one) for one in result] if isinstance(result, list) else []

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Count the first tokens that may come next."""
        result = self._called("validate_tokens", token_ids)
        return result if isinstance(result, int) else 0

    def consume_token(self, token_id: int) -> bool:
        """Go on behind a token; False if it is not allowed."""
        return bool(self._called("consume_token", token_id))

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Go on behind several."""
        return bool(self._called("consume_tokens", token_ids))

    def compute_bitmask(self) -> bytes:
        """The mask, a bit a token; empty once the process has ended."""
        mask = self._called("compute_bitmask")
        return mask if isinstance(mask, bytes) else b""

    def unsafe_compute_mask_ptr(self, address: int, size_bytes: int) -> None:
        """Write the mask to memory."""
        mask = self.compute_bitmask()
        ctypes.memmove(address, mask, min(len(mask), size_bytes))

    def _called(self, method: str, *arguments: int | list[int]) -> object:
        answer = self._process.call(method, self._number, *arguments)
        if answer is None:
            return None
        self._has_error = answer.is_error
        return answer.result
