"""Vectors and logits of a request's texts: tokens from a worker thread, numbers from the engine.

Everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from machd.engine.protocol.encoder import EncoderInput, InputTokenizer
from machd.engine.protocol.media import PlainArray
from machd.errors import (
    ClientDisconnectedError,
    InvalidRequestError,
    MachdError,
    QueueFullError,
    RequestTimeoutError,
)
from machd.generations.generation import GenerationIdentity, finish_reason
from machd.generations.open_generations import OpenGenerations
from machd.generations.record import RequestRecord
from machd.scheduler.events import FinishReason
from machd.served.served_model import ServedModel

MakeInputs = Callable[[InputTokenizer], Sequence[EncoderInput]]
"""Tokenises the texts of a request, on a worker thread."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What came of a request's texts.

    Attributes:
        values: float32, a row for each of the different inputs.
        places: For each input of the request the row that is its own: equal inputs are computed once.
        prompt_tokens: Tokens of all inputs, special tokens included; equal inputs count each.
    """

    values: PlainArray
    places: Sequence[int]
    prompt_tokens: int


class Encoding:
    """A request whose texts are being computed."""

    def __init__(
        self, identity: GenerationIdentity, inputs: int, prompt_tokens: int, *, opened_s: float
    ) -> None:
        self.identity = identity
        self.inputs = inputs
        self.prompt_tokens = prompt_tokens
        self.error: MachdError | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened_s = opened_s

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, and only its record is left to be made."""
        return self.failure.done()

    def fail(self, error: MachdError) -> None:
        """End it from the server's side; its client gets ``error``."""
        self.error = self.error or error
        if not self.failure.done():
            self.failure.set_result(None)

    def record(self, finished_s: float) -> RequestRecord:
        """The record of the request, at its end."""
        identity = self.identity
        return RequestRecord(
            request_id=identity.request_id,
            endpoint=identity.endpoint,
            decode_mode=None,
            prompt_tokens=self.prompt_tokens,
            first_prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            queue_s=self._opened_s - identity.arrived_s,
            prefill_s=None,
            ttft_s=None,
            decode_s=None,
            duration_s=finished_s - identity.arrived_s,
            finish_reason=finish_reason(FinishReason.STOP.value, self.error),
            error_code=self.error.code if self.error else None,
            client=identity.client,
            model=identity.model,
            trace=identity.trace,
            inputs=self.inputs,
        )


class Encodings:
    """Computes the texts of requests with one model."""

    def __init__(self, served: ServedModel, open_: OpenGenerations) -> None:
        """Open encodings among the daemon's open requests."""
        self._served = served
        self._open = open_

    async def encode(self, make: MakeInputs, identity: GenerationIdentity) -> Encoded:
        """Tokenise texts and compute them; cancel it to drop them.

        Args:
            make: Tokenises them.
            identity: The client and the ids of the request.

        Raises:
            InvalidRequestError: As of ``make``, or they have more tokens than may wait at all.
            KeyLimitError: The client has reached a limit of its own.
            QueueFullError: Too many tokens wait already.
            RequestTimeoutError: They were not computed in time.
            EngineFaultError, DrainingError: The engine failed, or ends.
        """
        self._open.lifecycle.check_accepting()
        with self._open.preparing(identity.client):
            inputs = await self._open.in_worker(make, self._served.inputs)
        prompt_tokens = sum(len(one.token_ids) for one in inputs)
        self._check_room(prompt_tokens)
        different = {one: index for index, one in enumerate(dict.fromkeys(inputs))}
        encoding = Encoding(
            identity, len(inputs), prompt_tokens, opened_s=self._open.clock.monotonic_s()
        )
        self._open.enter_encoding(encoding)
        try:
            values = await self._computed(tuple(different), encoding)
        except MachdError as error:
            encoding.fail(error)
            raise
        except asyncio.CancelledError:
            encoding.fail(ClientDisconnectedError("the client has left"))
            raise
        finally:
            self._open.leave_encoding(encoding)
        return Encoded(values, [different[one] for one in inputs], prompt_tokens)

    async def _computed(self, inputs: tuple[EncoderInput, ...], encoding: Encoding) -> PlainArray:
        limit_s = self._open.limits.request_timeout_s
        left_s = encoding.identity.arrived_s + limit_s - self._open.clock.monotonic_s()
        answer = asyncio.create_task(self._served.encode(inputs))
        ends: set[asyncio.Future[Any]] = {answer, encoding.failure}
        try:
            await asyncio.wait(ends, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if encoding.error is not None:
                raise encoding.error
            if not answer.done():
                raise RequestTimeoutError(
                    f"the request was not finished within limits.request_timeout_s ({limit_s:g} s)"
                )
            return answer.result()
        finally:
            answer.cancel()

    def _check_room(self, prompt_tokens: int) -> None:
        """Refuse texts for which there is no room beside those that are being computed."""
        limit = self._open.limits.max_queue_tokens
        if prompt_tokens > limit:
            raise InvalidRequestError.at(
                "input",
                f"the texts have {prompt_tokens} tokens together, and limits.max_queue_tokens is {limit}; "
                "send them in several requests",
            )
        if self._open.encoding_tokens + prompt_tokens > limit:
            raise QueueFullError(
                f"texts of {self._open.encoding_tokens} tokens are being computed, and "
                f"limits.max_queue_tokens is {limit}; try again later"
            )
