"""All generations of the daemon, of whatever model: those that are open, clients' limits, and threads for prompts.

Everything here runs on the event loop, except what these threads do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from machd.clock import Clock
from machd.errors import DrainDeadlineError, MachdError, OverloadedError
from machd.generations.compilations import Compilations
from machd.generations.decodings import Decodings, MediaRules
from machd.generations.generation import Generation
from machd.generations.identity import GenerationIdentity
from machd.generations.key_limits import KeyLimits
from machd.generations.record import RequestObserver, RequestRecord
from machd.generations.workers import Workers
from machd.process.lifecycle import Lifecycle

if TYPE_CHECKING:
    from machd.generations.encodings import Encoding

_TOKENISER_THREADS = 2

_PREPARATION_LIMIT_S = 60.0
"""The longest that a request waits for a worker thread and its work. Most take milliseconds."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Limits of one request.

    Attributes:
        max_tokens_default: Completion tokens when the client sets none.
        max_n: Completions for each prompt.
        max_queue: Completions that may wait; one request with more than queue and slots hold
            together could never be admitted.
        max_requests_per_key: Generations that one client may have open; None for no limit.
        max_tokens_per_minute_per_key: Tokens that one client may use; None for no limit.
        shares_prefixes: Whether clients find each other's prompts in the prefix cache.
        clamps_max_tokens: Whether a request for more completion tokens than fit gets those that fit;
            otherwise it is refused.
        refuses_ignored_keywords: Whether a schema with keywords that no grammar holds is refused.
        max_images: Images and videos that one request may have together.
        omits_tool_media: Whether a model of text gets a placeholder for an image in a result of a tool; otherwise
            the request is refused.
        media: What they are held against one by one; needed for a model with vision.
        max_inputs: Texts, or pairs of texts, that one request to an encoder may have.
        max_queue_tokens: Tokens of texts that encoders may have to compute, all requests together.
        truncates_inputs: Whether a text that is too long for an encoder loses its end where the request says nothing;
            otherwise it is refused.
        request_timeout_s: Seconds that a request to an encoder may take. The scheduler holds generations to its own.
    """

    max_tokens_default: int
    max_n: int
    max_queue: int
    max_requests_per_key: int | None = None
    max_tokens_per_minute_per_key: int | None = None
    shares_prefixes: bool = False
    clamps_max_tokens: bool = True
    refuses_ignored_keywords: bool = False
    max_images: int = 8
    omits_tool_media: bool = True
    media: MediaRules | None = None
    max_inputs: int = 2048
    max_queue_tokens: int = 1_000_000
    truncates_inputs: bool = False
    request_timeout_s: float = 1800.0


class OpenGenerations:
    """Knows every open generation, and every request whose texts an encoder computes.

    Attributes:
        clock: Reads time.
        lifecycle: Whether new work is taken.
        limits: Of one request, in force.
        compilations: Of constraints.
        decodings: Of images and videos.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        limits: GenerationLimits,
        clock: Clock,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        """Begin with none.

        Raises:
            RuntimeError: The system has no room for the threads.
        """
        self.lifecycle = lifecycle
        self.limits = limits
        self.compilations = Compilations()
        self.decodings = Decodings()
        self._key_limits = KeyLimits(
            clock,
            max_requests=limits.max_requests_per_key,
            max_tokens_per_minute=limits.max_tokens_per_minute_per_key,
        )
        self.clock = clock
        self._observers = tuple(observers)
        self._open: dict[str, Generation] = {}
        self._encodings: dict[str, Encoding] = {}
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._workers = Workers(_TOKENISER_THREADS, name="machd-tokeniser")
        # Threads of their own: a plain prompt waits for no slow chat template and no large schema.
        self._renderers = Workers(_TOKENISER_THREADS, name="machd-chat")

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open) + len(self._encodings)

    @property
    def max_preparation_s(self) -> float:
        """The longest that the preparation of a request may wait."""
        return _PREPARATION_LIMIT_S

    @property
    def all(self) -> tuple[Generation, ...]:
        """Return the generations, oldest first."""
        return tuple(self._open.values())

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """Return the requests whose texts are being computed, oldest first."""
        return tuple(self._encodings.values())

    @property
    def requests(self) -> tuple[Generation | Encoding, ...]:
        """Return generations and encodings."""
        return (*self._open.values(), *self._encodings.values())

    @property
    def encoding_tokens(self) -> int:
        """Tokens of the texts that are being computed."""
        return sum(one.prompt_tokens for one in self._encodings.values())

    def count_of(self, model_id: str) -> int:
        """Return the number of those of one model."""
        return sum(one.identity.model == model_id for one in self.requests)

    def set_limits(self, limits: GenerationLimits) -> None:
        """Hold requests that come from now on against other limits."""
        self.limits = limits
        self._key_limits.set(
            max_requests=limits.max_requests_per_key,
            max_tokens_per_minute=limits.max_tokens_per_minute_per_key,
        )

    def check_client(self, client: str) -> None:
        """Turn a client away before any work is done for it, if it could open nothing anyway.

        Raises:
            KeyLimitError: It has reached a limit of its own.
        """
        self._key_limits.check(client)

    def preparing(self, client: str) -> AbstractContextManager[None]:
        """Count a request whose prompt is being prepared.

        Raises:
            KeyLimitError: The client has as many requests open as it may.
        """
        return self._key_limits.preparing(client)

    async def in_worker(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run tokeniser work off the event loop.

        Raises:
            OverloadedError: It is not done in time.
        """
        return await _within_limit(self._workers, lambda: function(*args, **kwargs))

    async def in_chat_worker(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run work that renders a chat template where no plain prompt waits behind it.

        Raises:
            OverloadedError: It is not done in time.
        """
        return await _within_limit(self._renderers, lambda: function(*args, **kwargs))

    def enter(self, generation: Generation) -> None:
        """Count a generation that begins."""
        identity = generation.identity
        if identity.is_limited:
            self._key_limits.enter(identity.client)
        self._open[identity.generation_id] = generation
        self._all_closed.clear()

    def enter_encoding(self, encoding: Encoding) -> None:
        """Count a request whose texts are computed from now on, and their tokens.

        Raises:
            KeyLimitError: The client may not open it; it was not counted.
        """
        identity = encoding.identity
        if identity.is_limited:
            self._key_limits.enter(identity.client)
        self._encodings[identity.generation_id] = encoding
        self._all_closed.clear()
        self.spend(identity, encoding.prompt_tokens)

    def leave_encoding(self, encoding: Encoding) -> None:
        """Count a request whose texts are computed, or never will be, and record it."""
        self._encodings.pop(encoding.identity.generation_id)
        self._left(encoding.identity, encoding.record(self.clock.monotonic_s()))

    def spend(self, identity: GenerationIdentity, tokens: int) -> None:
        """Count tokens of a generation for its client's limit."""
        if identity.is_limited:
            self._key_limits.spend(identity.client, tokens)

    def leave(self, generation: Generation) -> None:
        """Count a generation that has ended, and record it."""
        self._open.pop(generation.identity.generation_id, None)
        self._left(generation.identity, generation.record(self.clock.monotonic_s()))

    def _left(self, identity: GenerationIdentity, record: RequestRecord) -> None:
        if identity.is_limited:
            self._key_limits.leave(identity.client)
        if not len(self):
            self._all_closed.set()
        for observer in self._observers:
            observer.on_request(record)

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the open requests; end those that outlast ``timeout_s``.

        Returns:
            Whether all of them ended by themselves.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            self.fail_open(
                DrainDeadlineError(
                    f"the server stopped after limits.drain_timeout_s ({timeout_s:g} s)"
                )
            )
            return False
        return True

    def fail_open(self, error: MachdError) -> None:
        """End every open request with ``error``."""
        for one in self.requests:
            one.fail(error)

    def close(self) -> None:
        """Let the worker threads go."""
        for pool in (self._workers, self._renderers):
            pool.shutdown()
        self.decodings.close()
        self.compilations.close()


async def _within_limit(pool: Executor, function: Callable[[], _T]) -> _T:
    """Run a function on a thread of the pool; a thread that is late is left to its work.

    Raises:
        OverloadedError: It took too long, or the requests before it did.
    """
    event_loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_PREPARATION_LIMIT_S):
            return await event_loop.run_in_executor(pool, function)
    except TimeoutError:
        raise OverloadedError(
            f"the prompt was not rendered and tokenised within {_PREPARATION_LIMIT_S:g} s"
        ) from None
