"""An encoder in memory: texts, behind one another or padded to the longest of a pass, to vectors or logits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from machd.engine.backend.device import available_memory_bytes, give_memory_back
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.encoder_model import EncoderModel
from machd.engine.encoding.pass_memory import pass_bytes
from machd.engine.encoding.pooling import first_tokens, normalise, pool, pool_packed
from machd.engine.encoding.sentence_modules import NormalizeModule
from machd.engine.kernels.native_bert import NativeBert
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import PlainArray
from machd.engine.protocol.memory import MemoryReading

_MAX_CACHED_BYTES = 256 << 20
"""Freed memory that mlx may keep between passes: passes have many shapes, and it would keep some of each."""

_UNCHECKED_BYTES = 64 << 20
"""Passes that take less are computed without a look at the memory that is left."""

_LARGEST_SHARE = 0.8
"""Of the memory that is left, the most that a pass may take by the estimate."""


class MlxEncoder:
    """Satisfies :class:`machd.engine.protocol.encoder.Encoder`."""

    def __init__(
        self,
        files: EncoderFiles,
        model: EncoderModel,
        description: ModelDescription,
        *,
        is_native: bool = True,
    ) -> None:
        """Take an encoder whose weights are in memory; without ``is_native`` mlx computes what machd's kernels could."""
        self._files = files
        self._model: EncoderModel | None = model
        self._description = description
        self._pad_token_id = _padding(files)
        is_native = is_native and NativeBert.takes(model.module)
        self._native = NativeBert(model.module) if is_native else None

    @property
    def model(self) -> ModelDescription:
        """Description of the model."""
        return self._description

    @property
    def packs(self) -> bool:
        """False where all texts of a pass take as much as the longest."""
        return self._native is not None

    def encode(self, inputs: Sequence[EncoderInput]) -> PlainArray:
        """Compute one pass; see :meth:`machd.engine.protocol.encoder.Encoder.encode`."""
        model = self._model
        assert model is not None, "not closed"
        self._check(inputs, model)
        if self._native is None:
            made = self._padded(model, inputs).astype(mx.float32)
        else:
            made = self._packed(model, self._native, inputs).astype(mx.float32)
        mx.eval(made)
        content = memoryview(np.array(made).tobytes())
        if mx.get_cache_memory() > _MAX_CACHED_BYTES:
            mx.clear_cache()
        return PlainArray(made.shape, "float32", content)

    def memory(self) -> MemoryReading:
        """Bytes right now; see :meth:`machd.engine.protocol.encoder.Encoder.memory`."""
        available_bytes = available_memory_bytes()
        return MemoryReading(
            kv_used_bytes=0,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=mx.get_cache_memory(),
            available_bytes=available_bytes,
            step_bytes=int(_LARGEST_SHARE * available_bytes),
        )

    def close(self) -> None:
        """Give back the weights."""
        self._model = self._native = None
        give_memory_back()

    def _packed(
        self, model: EncoderModel, native: NativeBert, inputs: Sequence[EncoderInput]
    ) -> mx.array:
        """Make vectors or logits of texts that lie behind one another."""
        lengths = [len(one.token_ids) for one in inputs]
        self._refuse_too_large(sum(lengths), 1)
        ids = [token for one in inputs for token in one.token_ids]
        types = None
        if model.token_types > 1:
            types = [number for one in inputs for number in _types(one)]
        hidden = native(ids, lengths, types)
        if model.head is not None:
            firsts = first_tokens(hidden, lengths)[:, None]
            return model.head(firsts, mx.ones((len(lengths),), mx.int32))
        return self._behind_pooling(model, pool_packed(hidden, lengths, self._modes()))

    def _padded(self, model: EncoderModel, inputs: Sequence[EncoderInput]) -> mx.array:
        """Make vectors or logits of texts, padded to the longest."""
        rows, tokens = len(inputs), max(len(one.token_ids) for one in inputs)
        self._refuse_too_large(rows, tokens)
        ids, types = list[int](), list[int]()
        for one in inputs:
            padding = tokens - len(one.token_ids)
            ids.extend(one.token_ids)
            ids.extend([self._pad_token_id] * padding)
            types.extend(_types(one))
            types.extend([0] * padding)
        if model.token_types == 1:
            types = [0] * len(types)
        lengths = mx.array([len(one.token_ids) for one in inputs], mx.int32)
        hidden = model.body(_matrix(ids, rows), _matrix(types, rows), lengths)
        if model.head is not None:
            return model.head(hidden, lengths)
        return self._behind_pooling(model, pool(hidden, lengths, self._modes()))

    def _modes(self) -> Sequence[str]:
        pooling = self._files.modules.pooling
        assert pooling is not None, "a model without a head has a pooling"
        return pooling.modes

    def _behind_pooling(self, model: EncoderModel, vectors: mx.array) -> mx.array:
        dense = iter(model.dense)
        for one in self._files.modules.after:
            is_length = isinstance(one, NormalizeModule)
            vectors = normalise(vectors) if is_length else next(dense)(vectors)
        return vectors

    def _check(self, inputs: Sequence[EncoderInput], model: EncoderModel) -> None:
        """Assert what callers have checked: mlx reads outside an array without a word."""
        most = self._files.description.max_input_tokens
        for one in inputs:
            assert 0 < len(one.token_ids) <= most, "the front cuts texts"
            assert 0 <= min(one.token_ids) <= max(one.token_ids) < model.vocabulary_tokens, (
                "the tokenizer is the model's"
            )

    def _refuse_too_large(self, rows: int, tokens: int) -> None:
        needed_bytes = pass_bytes(self._files.checkpoint.config, rows, tokens)
        if needed_bytes < _UNCHECKED_BYTES:
            return
        if needed_bytes > _LARGEST_SHARE * available_memory_bytes():
            raise MemoryError(f"a pass of {rows} x {tokens} tokens needs {needed_bytes} bytes")


def _types(one: EncoderInput) -> list[int]:
    """Return the type of each of a text's tokens: 1 from the second text of a pair on."""
    first = len(one.token_ids) if one.second_from is None else one.second_from
    return [0] * first + [1] * (len(one.token_ids) - first)


def _matrix(numbers: list[int], rows: int) -> mx.array:
    return mx.array(numbers, mx.int32).reshape(rows, -1)


def _padding(files: EncoderFiles) -> int:
    """Return the id that fills rows up: RoBERTa counts positions by it, others mask it."""
    value = files.checkpoint.config.get("pad_token_id")
    if not files.family.has_padded_positions:
        return 0
    return value if isinstance(value, int) else 1
