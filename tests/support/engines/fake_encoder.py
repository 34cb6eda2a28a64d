"""An encoder whose vectors are two numbers of a text: its first token and its length."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping, Sequence

from machd.capabilities.facts import CacheFacts
from machd.engine.protocol.encoder import EncoderDescription, EncoderInput, EncoderTask
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import PlainArray
from machd.engine.protocol.memory import MemoryReading

_MAX_INPUT_TOKENS, _VOCABULARY_TOKENS = 4096, 512


def numbers_of(text: EncoderInput) -> list[float]:
    """The vector of a text."""
    return [float(text.token_ids[0]), float(len(text.token_ids))]


class FakeEncoder:
    """Satisfies :class:`machd.engine.protocol.encoder.Encoder`.

    Attributes:
        passes: The texts of each pass that was computed.
        begun: Set once a pass has begun.
        held: The first pass waits for it.
    """

    def __init__(
        self,
        *,
        packs: bool = False,
        is_held: bool = False,
        fails: Mapping[int, Exception | None] | None = None,
    ) -> None:
        """Make one; a text that begins with a token of ``fails`` raises the error, or for None gets NaN."""
        self.packs = packs
        self.passes: list[tuple[EncoderInput, ...]] = []
        self.begun, self.held = threading.Event(), threading.Event()
        self.is_closed = False
        self._fails = fails or {}
        if not is_held:
            self.held.set()

    @property
    def model(self) -> ModelDescription:
        """Its description."""
        return ModelDescription(
            model_id="fake",
            architecture="fake",
            context_tokens=_MAX_INPUT_TOKENS,
            vocabulary_tokens=_VOCABULARY_TOKENS,
            parameters=0,
            weights_bytes=0,
            dtype="none",
            quantization=None,
            backend="cpu",
            blas=None,
            eos_token_ids=frozenset(),
            cache=CacheFacts((), 0, 0),
            created_unix_s=0,
            encoder=EncoderDescription(
                task=EncoderTask.EMBED,
                pooling="mean",
                is_normalised=False,
                dimensions=2,
                max_input_tokens=_MAX_INPUT_TOKENS,
            ),
        )

    def encode(self, inputs: Sequence[EncoderInput]) -> PlainArray:
        """Compute one pass, of what the front and the tokenizer let through."""
        assert not self.is_closed, "its weights are gone"
        for one in inputs:
            assert 0 < len(one.token_ids) <= _MAX_INPUT_TOKENS
            assert 0 <= min(one.token_ids) <= max(one.token_ids) < _VOCABULARY_TOKENS
        self.passes.append(tuple(inputs))
        self.begun.set()
        self.held.wait()
        numbers = list[float]()
        for one in inputs:
            error = self._fails.get(one.token_ids[0])
            if error is not None:
                raise error
            is_nan = one.token_ids[0] in self._fails
            numbers += [math.nan] * 2 if is_nan else numbers_of(one)
        content = memoryview(array("f", numbers).tobytes())
        return PlainArray((len(inputs), 2), "float32", content)

    def memory(self) -> MemoryReading:
        """Nothing."""
        return MemoryReading(0, 0, 0, 0)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True
