"""A language model's inputs for a prompt with images: embeddings in place of token ids, and positions.

An image is encoded alone, stage by stage beside the steps of other rows, with the tokens that frame it: its embeddings depend on nothing else of the prompt, so they are
kept by content and put into every prompt that has it. Positions are the image's own, moved to its place.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from machd.clock import Clock
from machd.engine.backend.device import give_memory_back
from machd.engine.protocol.media import (
    Media,
    MediaEncodingError,
    MediaProcessor,
    MediaSpan,
    PlainArray,
    spans_between,
    token_ids_of,
)
from machd.engine.protocol.memory import MediaReading, StepMemoryError
from machd.engine.protocol.step import EncodeOutcome, EncodeRow, RowFault
from machd.engine.vision.encoder_memory import encoder_need
from machd.engine.vision.encoder_stages import record_outputs, recording
from machd.engine.vision.vision_model import GRIDS, VisionLanguageModel
from machd.errors import InvalidRequestError

_TOKEN_FEATURES = ("inputs_embeds", "per_layer_inputs")
"""Features with an entry for each token, [1, tokens, …]."""

_DEEPSTACK, _VISUAL = "deepstack_visual_embeds", "visual_pos_masks"
_UNUSED = frozenset({"attention_mask_4d", "attention_mask", "position_ids", "rope_deltas"})
"""Features that mlx-vlm's own generation hands on and language models ignore, and positions, which are made here."""

_MARGIN = 1.25
"""On what a graph shows: operations copy inputs whose strides do not suit them."""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Positions of a media's tokens, counted from its first one.

    Attributes:
        positions: int32 [3, tokens]: time, row and column.
        length: Positions that it takes: the text behind it begins there.
    """

    positions: npt.NDArray[np.int32]
    length: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A media's features.

    Attributes:
        by_token: Features with an entry for each token.
        is_visual: bool [tokens], the tokens that ``deepstack`` has a row for.
        deepstack: For each of the first layers, [visual tokens, dim].
    """

    by_token: Mapping[str, mx.array]
    is_visual: npt.NDArray[np.bool_]
    deepstack: tuple[mx.array, ...]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.by_token.values(), *self.deepstack)

    @property
    def nbytes(self) -> int:
        return sum(int(one.nbytes) for one in self.arrays)

    def between(self, start: int, stop: int) -> _Encoded:
        seen = int(self.is_visual[:start].sum())
        end = seen + int(self.is_visual[start:stop].sum())
        return _Encoded(
            {name: array[:, start:stop] for name, array in self.by_token.items()},
            self.is_visual[start:stop],
            tuple(layer[seen:end] for layer in self.deepstack),
        )


@dataclass(slots=True)
class _Encoding:
    """A media while it is encoded.

    Attributes:
        stages: Lazy outputs of the encoder's modules that are not computed yet, in order, each with the bytes that it takes.
        result: Lazy features.
        result_bytes: That these take once all stages are computed.
    """

    stages: deque[tuple[mx.array, int]]
    result: _Encoded
    result_bytes: int


class MediaEncoder:
    """A model's vision encoder with a cache of embeddings. Lives on the engine thread.

    It satisfies the step's port ``PromptMedia``.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        processor: MediaProcessor,
        clock: Clock,
        *,
        max_bytes: int,
        read_usable_bytes: Callable[[], int],
    ) -> None:
        """Begin with nothing encoded."""
        self.processor = processor
        self._read_usable_bytes = read_usable_bytes
        self._idle_bytes = read_usable_bytes()
        self._wrapped = model
        self._model = model.model
        self._clock = clock
        self._max_bytes = max_bytes
        record_outputs(
            module
            for path, module in self._model.named_modules()
            if path and path.partition(".")[0] != "language_model"
        )
        self._begun: dict[bytes, _Encoding] = {}
        self._digests: dict[int, set[bytes]] = {}  # by slot, of rows in prefill
        self._encoded: OrderedDict[bytes, _Encoded] = OrderedDict()
        self._layouts: OrderedDict[bytes, MediaLayout] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = 0
        self._encoding_s = 0.0

    @property
    def has_features(self) -> bool:
        """True: the model is given embeddings or positions of one prompt."""
        return True

    @property
    def has_positions(self) -> bool:
        """True if the model is told the positions of rows, which images move."""
        return self._wrapped.has_positions

    def reading(self) -> MediaReading:
        """Return the cache at this moment, and counts since the start."""
        return MediaReading(
            entries=len(self._encoded),
            bytes=self._bytes,
            hits=self._hits,
            misses=self._misses,
            encoding_s=self._encoding_s,
        )

    def encode(self, rows: Sequence[EncodeRow], limit_s: float) -> EncodeOutcome:
        """Encode what rows wait for, and pause after ``limit_s``.

        One at a time, the one that is begun first. The limit is exceeded by the rest of a stage: what a module of
        the encoder computes beyond those inside it. A row whose image does not fit into memory fails.
        """
        begin_s = self._clock.monotonic_s()
        for row in rows:
            self._digests.setdefault(row.slot_index, set()).add(row.media.digest)
        wanted = {row.media.digest for row in rows}
        self._begun = {digest: one for digest, one in self._begun.items() if digest in wanted}
        ready: list[bytes] = []
        faults: list[RowFault] = []
        for row in sorted(rows, key=lambda row: row.media.digest not in self._begun):
            if row.media.digest in ready:
                continue
            try:
                if not self._advance(row.media, begin_s + limit_s):
                    break
            except (MediaEncodingError, StepMemoryError, InvalidRequestError) as cause:
                self._begun.pop(row.media.digest, None)
                faults.append(RowFault(row.slot_index, cause))
            else:
                ready.append(row.media.digest)
        duration_s = self._clock.monotonic_s() - begin_s
        self._encoding_s += duration_s
        return EncodeOutcome(tuple(ready), tuple(faults), duration_s)

    def inputs(
        self, keys: Sequence[int], start: int, spans: Sequence[MediaSpan]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Return what the model takes of a stretch of a prompt: token ids int32 [1, n], and features by name.

        Raises:
            MediaEncodingError: The encoder failed on what had been dropped, or was never asked for.
        """
        stop = start + len(keys)
        token_ids = mx.array([token_ids_of(keys, spans, start)], dtype=mx.int32)
        features: dict[str, mx.array] = {}
        if inside := spans_between(spans, start, stop):
            features = self._features(token_ids, start, inside)
        if self._wrapped.has_positions:
            features["position_ids"] = mx.array(self._positions(start, stop, spans))[:, None]
        return token_ids, features

    def shift(self, spans: Sequence[MediaSpan]) -> int:
        """Return the position of the first token behind a prompt's media, less its place."""
        if not self._wrapped.has_positions:
            return 0
        return sum(self._layout(one.media).length - len(one.media.token_ids) for one in spans)

    def forget_rows(self, slot_indices: Iterable[int] | None = None) -> None:
        """Take rows as past their prefill, or gone; None for all. What else needs none of their images drops them."""
        for slot_index in tuple(self._digests if slot_indices is None else slot_indices):
            self._digests.pop(slot_index, None)
        needed = self._needed_digests()
        self._begun = {digest: one for digest, one in self._begun.items() if digest in needed}
        self._evict()

    def close(self) -> None:
        """Drop everything, and close the processor."""
        self._digests.clear()
        self._begun.clear()
        self._encoded.clear()
        self._layouts.clear()
        self._bytes = 0
        self.processor.close()

    def _positions(
        self, start: int, stop: int, spans: Sequence[MediaSpan]
    ) -> npt.NDArray[np.int32]:
        """Return positions int32 [3, stop - start]."""
        shift = self.shift([span for span in spans if span.stop <= start])
        positions = np.tile(np.arange(start, stop, dtype=np.int32) + shift, (3, 1))
        for span in spans_between(spans, start, stop):
            layout = self._layout(span.media)
            begin, end = max(span.start, start), min(span.stop, stop)
            own = layout.positions[:, begin - span.start : end - span.start]
            positions[:, begin - start : end - start] = span.start + shift + own
            moved = layout.length - len(span.media.token_ids)
            positions[:, end - start :] += moved
            shift += moved
        return positions

    def _features(
        self, token_ids: mx.array, start: int, spans: Sequence[MediaSpan]
    ) -> dict[str, mx.array]:
        parts = list(self._parts(token_ids, start, spans))
        names = [name for name in _TOKEN_FEATURES if all(name in one.by_token for one in parts)]
        features = {
            name: mx.concatenate([one.by_token[name] for one in parts], axis=1) for name in names
        }
        layers = max(len(one.deepstack) for one in parts)
        if layers:
            visual = [one for one in parts if one.deepstack]
            features[_VISUAL] = mx.array(np.concatenate([one.is_visual for one in parts])[None])
            features[_DEEPSTACK] = mx.stack(
                [mx.concatenate([one.deepstack[at] for one in visual]) for at in range(layers)]
            )  # [layers, visual tokens, dim]
        return features

    def _parts(
        self, token_ids: mx.array, start: int, spans: Sequence[MediaSpan]
    ) -> Iterator[_Encoded]:
        """Yield the stretch's features part by part: text, media, text and so on."""
        at, stop = start, start + token_ids.shape[1]
        for span in spans:
            begin, end = max(span.start, start), min(span.stop, stop)
            if begin > at:
                yield self._text(token_ids[:, at - start : begin - start])
            yield self._encoded_now(span.media).between(begin - span.start, end - span.start)
            at = end
        if at < stop:
            yield self._text(token_ids[:, at - start :])

    def _text(self, token_ids: mx.array) -> _Encoded:
        features = self._model.get_input_embeddings(token_ids, None).to_dict()
        by_token = {name: features[name] for name in _TOKEN_FEATURES if features[name] is not None}
        return _Encoded(by_token, np.zeros(token_ids.shape[1], dtype=np.bool_), ())

    def _encoded_now(self, media: Media) -> _Encoded:
        """Return the features of an image or video, whose encoding begins or ends here if it has to."""
        if media.digest not in self._encoded:
            try:
                self._advance(media, math.inf)
            except (StepMemoryError, InvalidRequestError) as error:
                self._begun.pop(media.digest, None)
                raise MediaEncodingError("there is too little memory left for it") from error
        return self._encoded[media.digest]

    def _advance(self, media: Media, until_s: float) -> bool:
        """Encode stages of an image or video, at least one; returns True once it is encoded."""
        if media.digest in self._encoded:
            self._encoded.move_to_end(media.digest)
            self._hits += 1
            return True
        encoding = self._begun.get(media.digest) or self._begin(media)
        while encoding.stages:
            stage, stage_bytes = encoding.stages.popleft()
            self._check_room(stage_bytes)
            with _encoder_errors(media):
                mx.eval(stage)
            del stage
            if self._clock.monotonic_s() >= until_s:
                return False
        self._check_room(encoding.result_bytes)
        with _encoder_errors(media):
            mx.eval(*encoding.result.arrays)
        del self._begun[media.digest]
        self._keep(media.digest, encoding.result)
        return True

    def _begin(self, media: Media) -> _Encoding:
        """Call the encoder, which computes nothing yet.

        Raises:
            MediaEncodingError: It failed.
            StepMemoryError: What it computes does not fit into the memory that is left.
            InvalidRequestError: It does not fit into the memory of an idle server.
        """
        self._misses += 1
        self._check_room(media.nbytes)
        with _encoder_errors(media):
            with recording() as stages:
                result = self._compute(media)
            need = encoder_need(stages, result.arrays)
        self._check_room(need.peak_bytes)
        *stage_bytes, result_bytes = need.stage_bytes
        encoding = _Encoding(deque(zip(stages, stage_bytes, strict=True)), result, result_bytes)
        self._begun[media.digest] = encoding
        return encoding

    def _check_room(self, needed_bytes: int) -> None:
        """Refuse to compute what does not fit.

        Raises:
            StepMemoryError: It does not fit beside what is held now.
            InvalidRequestError: It would not fit into the memory that was left when the model was loaded.
        """
        needed_bytes = int(needed_bytes * _MARGIN)
        if needed_bytes <= self._read_usable_bytes():
            return
        give_memory_back()
        left_bytes = self._read_usable_bytes()
        if needed_bytes > max(self._idle_bytes, left_bytes):
            raise InvalidRequestError(
                f"messages: to encode an image or video of this size takes {needed_bytes / 1e9:.1f} GB, and the "
                f"server has {self._idle_bytes / 1e9:.1f} GB for it; send a smaller one",
                param="messages",
            )
        if needed_bytes > left_bytes:
            raise StepMemoryError(needed_bytes=needed_bytes, left_bytes=left_bytes)

    def _compute(self, media: Media) -> _Encoded:
        token_ids = mx.array([media.token_ids], dtype=mx.int32)
        arrays = {name: _array(one) for name, one in media.arrays.items()}
        features = self._model.get_input_embeddings(
            token_ids, arrays.pop("pixel_values", None), mask=mx.ones_like(token_ids), **arrays
        ).to_dict()
        unknown = [
            name
            for name, value in features.items()
            if value is not None and name not in {*_TOKEN_FEATURES, _DEEPSTACK, _VISUAL, *_UNUSED}
        ]
        if unknown:
            raise MediaEncodingError(f"the model's encoder gives {', '.join(unknown)} as well")
        by_token = {name: features[name] for name in _TOKEN_FEATURES if features[name] is not None}
        deepstack = features[_DEEPSTACK]
        is_visual = np.zeros(len(media.token_ids), dtype=np.bool_)
        if deepstack is not None:
            is_visual = np.array(features[_VISUAL]).reshape(-1).astype(np.bool_)
        return _Encoded(by_token, is_visual, tuple(deepstack if deepstack is not None else ()))

    def _keep(self, digest: bytes, encoded: _Encoded) -> None:
        self._encoded[digest] = encoded
        self._bytes += encoded.nbytes
        self._evict()

    def _evict(self) -> None:
        """Drop the least recently used features until the rest fits, but none that a row in prefill needs."""
        needed = self._needed_digests()
        for digest in [one for one in self._encoded if one not in needed]:
            if self._bytes <= self._max_bytes:
                return
            self._bytes -= self._encoded.pop(digest).nbytes

    def _needed_digests(self) -> set[bytes]:
        return set().union(*self._digests.values())

    def _layout(self, media: Media) -> MediaLayout:
        """Return the positions of a media's tokens; the model's encoder need not run for them."""
        known = self._layouts.get(media.digest)
        if known is None:
            token_ids = mx.array([media.token_ids], dtype=mx.int32)
            grids = [media.arrays.get(name) for name in GRIDS]
            positions, _ = self._model.language_model.get_rope_index(
                token_ids, *(None if one is None else _array(one) for one in grids)
            )
            own = np.array(positions, dtype=np.int32).reshape(-1, len(media.token_ids))
            own = np.broadcast_to(own, (3, own.shape[1])) if len(own) == 1 else own
            known = MediaLayout(own, int(own.max()) + 1)
            self._layouts[media.digest] = known
            while len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        return known


_MAX_LAYOUTS = 4096
"""Layouts kept, some kilobytes each."""


@contextmanager
def _encoder_errors(media: Media) -> Iterator[None]:
    """Turn the errors of mlx-vlm and mlx into MediaEncodingError."""
    try:
        yield
    except MediaEncodingError:
        raise
    except Exception as error:
        raise MediaEncodingError(f"the model's encoder failed on the {media.kind}") from error


def _array(one: PlainArray) -> mx.array:
    return mx.array(np.frombuffer(one.content, dtype=one.dtype).reshape(one.shape))
