"""Vectors and logits of a request's texts: tokens from a worker thread, numbers from the engine or from those kept.

Everything else runs on the event loop. An input that another request is being computed with is waited for, and not
computed twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
from machd.generations.identity import GenerationIdentity
from machd.generations.open_generations import OpenGenerations
from machd.generations.record import RequestRecord, finish_reason
from machd.scheduler.events import FinishReason
from machd.served.served_model import ServedModel
from machd.served.vector_cache import vector_keys

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
            generation_id=identity.generation_id,
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


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Different inputs that the engine computes together for the request that was the first to have them.

    Attributes:
        places: The row of each input in the answer, by key.
    """

    places: Mapping[bytes, int]
    answer: asyncio.Task[PlainArray]

    @property
    def has_values(self) -> bool:
        """Whether it has ended well; a client may have left, and then it has not."""
        answer = self.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    def row(self, key: bytes) -> memoryview:
        """Return the bytes of one input's row."""
        content = self.answer.result().content
        row_bytes = len(content) // len(self.places)
        place = self.places[key]
        return content[place * row_bytes : (place + 1) * row_bytes]


class Encodings:
    """Computes the texts of requests with one model."""

    def __init__(self, served: ServedModel, open_: OpenGenerations) -> None:
        """Open encodings among the daemon's open requests."""
        self._served = served
        self._open = open_
        self._computing: dict[bytes, _Question] = {}

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
        # Latency shows whether a text was computed before, so clients find each other's only where they may.
        namespace = "" if self._open.limits.shares_prefixes else identity.client
        with self._open.preparing(identity.client):
            inputs, keys = await self._open.in_worker(
                _made_and_keyed, make, self._served.inputs, namespace
            )
        prompt_tokens = sum(len(one.token_ids) for one in inputs)
        different = dict(zip(keys, inputs, strict=True))
        rows = self._kept(different)
        self._check_room(prompt_tokens, is_computed=len(rows) < len(different))
        encoding = Encoding(
            identity, len(inputs), prompt_tokens, opened_s=self._open.clock.monotonic_s()
        )
        self._open.enter_encoding(encoding)
        try:
            values = await self._values(different, rows, encoding)
        except MachdError as error:
            encoding.fail(error)
            raise
        except asyncio.CancelledError:
            encoding.fail(ClientDisconnectedError("the client has left"))
            raise
        finally:
            self._open.leave_encoding(encoding)
        places = {key: place for place, key in enumerate(different)}
        return Encoded(values, [places[key] for key in keys], prompt_tokens)

    def _kept(self, inputs: Mapping[bytes, EncoderInput]) -> dict[bytes, bytes | memoryview]:
        """Return the rows of those inputs that were computed before, by key, and count them."""
        vectors = self._served.kept_vectors()
        found = {key: row for key in inputs if (row := vectors.find(key)) is not None}
        hits = sum(key in found or key in self._computing for key in inputs)
        vectors.count(hits=hits, misses=len(inputs) - hits)
        return dict(found)

    async def _values(
        self,
        inputs: Mapping[bytes, EncoderInput],
        rows: dict[bytes, bytes | memoryview],
        encoding: Encoding,
    ) -> PlainArray:
        """Return the rows of all inputs in their order: those that are there, and others as they are computed."""
        while missing := [key for key in inputs if key not in rows]:
            others = {key: self._computing[key] for key in missing if key in self._computing}
            asked = {key: inputs[key] for key in missing if key not in others}
            own = self._ask(asked) if asked else None
            try:
                questions = set(others.values()) if own is None else {own, *others.values()}
                await self._answers(questions, encoding)
                if own is not None and len(asked) == len(inputs):
                    return own.answer.result()
                if own is not None:
                    rows |= {key: own.row(key) for key in asked}
            finally:
                if own is not None:
                    own.answer.cancel()
            # What another request has failed with, or was cancelled with, is asked for again.
            rows |= {key: one.row(key) for key, one in others.items() if one.has_values}
        content = memoryview(b"".join(rows[key] for key in inputs))
        return PlainArray((len(inputs), len(content) // len(inputs) // 4), "float32", content)

    def _ask(self, inputs: Mapping[bytes, EncoderInput]) -> _Question:
        """Have inputs computed, and let other requests know."""
        answer = asyncio.create_task(self._served.encode(tuple(inputs.values())))
        question = _Question({key: place for place, key in enumerate(inputs)}, answer)
        self._computing |= dict.fromkeys(inputs, question)
        answer.add_done_callback(lambda _: self._end(question))
        return question

    def _end(self, question: _Question) -> None:
        """Keep the rows of a question that has been answered."""
        vectors = self._served.kept_vectors()
        has_values = question.has_values
        for key in question.places:
            del self._computing[key]
            if has_values:
                vectors.keep(key, question.row(key))

    async def _answers(self, questions: set[_Question], encoding: Encoding) -> None:
        """Wait for the answers to questions, or for the end of the request."""
        limit_s = self._open.limits.request_timeout_s
        ends: set[asyncio.Future[Any]] = {one.answer for one in questions}
        while ends:
            left_s = encoding.identity.arrived_s + limit_s - self._open.clock.monotonic_s()
            done, _ = await asyncio.wait(
                {*ends, encoding.failure},
                timeout=max(0.0, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if encoding.error is not None:
                raise encoding.error
            if not done:
                raise RequestTimeoutError(
                    f"the request was not finished within limits.request_timeout_s ({limit_s:g} s)"
                )
            ends -= done

    def _check_room(self, prompt_tokens: int, *, is_computed: bool) -> None:
        """Refuse texts for which there is no room beside those that are being computed."""
        limit = self._open.limits.max_queue_tokens
        if prompt_tokens > limit:
            raise InvalidRequestError.at(
                "input",
                f"the texts have {prompt_tokens} tokens together, and limits.max_queue_tokens is {limit}; "
                "send them in several requests",
            )
        if is_computed and self._open.encoding_tokens + prompt_tokens > limit:
            raise QueueFullError(
                f"texts of {self._open.encoding_tokens} tokens are being computed, and "
                f"limits.max_queue_tokens is {limit}; try again later"
            )


def _made_and_keyed(
    make: MakeInputs, tokenizer: InputTokenizer, namespace: str
) -> tuple[Sequence[EncoderInput], list[bytes]]:
    inputs = make(tokenizer)
    return inputs, vector_keys(inputs, namespace)
