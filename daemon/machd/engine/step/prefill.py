"""Prefill: prompts computed into caches, alone or together in one pass.

Together means behind one another without padding, where the model's attention can tell them apart. For other
models of standard caches whole prompts of like length share a padded call.

The last token of a prompt with a completion is never prefilled: it is the first span of the row's decode.
So the output head runs over no prompt but those whose log-probabilities were asked for, and over a chunk
that rides in the rows' pass, since one call computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import mlx.core as mx

from machd.capabilities.facts import KvCacheKind
from machd.engine.backend.untyped import Cache
from machd.engine.kv.batch_lane import padded_caches
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import CachedRow, PrefilledRow
from machd.engine.kv.row_caches import make_room
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import MediaEncodingError
from machd.engine.protocol.slab_size import COLUMN_STEP
from machd.engine.protocol.step import Lane, PrefillChunk, RowFault, RowOutput, SharedPrefix
from machd.engine.step.decode_pass import NO_FEATURES, Chunk, Forward, PackCaches, packed
from machd.engine.step.ports import BlockTier, PromptMedia
from machd.engine.step.prompt_scores import PromptScores

_PADDING_TOKENS = 16
"""Padding up to which sharing a call is cheaper than a call of one's own."""

_PADDING_SHARE = 4
"""Beyond that a row may be padded by one in so many tokens of the longest row."""


class Prefill:
    """One prompt while it is computed.

    Attributes:
        opening: The first chunk; its parameters, lane and reservation are the row's.
        prompt: The tokens so far.
        caches: One for each cache of the model.
    """

    def __init__(
        self, opening: PrefillChunk, caches: Sequence[Cache], vocabulary_tokens: int
    ) -> None:
        """Begin with caches that hold the prefix that the opening chunk reuses."""
        assert opening.opens, "the first chunk opens the row"
        assert not (is_scored(opening) and opening.reused), "a scored prompt is computed whole"
        self.opening = opening
        self.prompt: list[int] = [] if opening.reused is None else [*opening.reused.token_ids]
        self.caches = caches
        self._shared: SharedPrefix | None = None
        self._scores = PromptScores(opening, vocabulary_tokens) if is_scored(opening) else None
        self._index = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompt's caches hold."""
        return sum(int(cache.nbytes) for cache in self.caches)

    @property
    def cached_row(self) -> CachedRow:
        """The prompt's row before its last chunk: every token so far is computed."""
        return CachedRow(self.caches, self._index, len(self.prompt), is_exact=True)

    def compute(
        self, forward: Forward, chunk: PrefillChunk, media: PromptMedia | None = None
    ) -> list[RowOutput]:
        """Compute a chunk, and wait for it.

        Args:
            forward: The model.
            chunk: The next one.
            media: The prompt's images and videos, for a model with vision.

        Returns:
            Outputs that the prompt has with this chunk.

        Raises:
            FloatingPointError: The logits are not finite.
            OSError: Weights that are read from disk could not be read.
            MediaEncodingError: An image or video cannot be encoded.
        """
        token_ids = self.append(chunk)
        if self._scores is not None:
            return self._scores.compute(forward, self.caches, chunk.token_ids, len(token_ids))
        if token_ids and media is not None:
            forward_ids, features = media.inputs(token_ids, chunk.start, self.opening.media)
            forward(forward_ids, list(self.caches), features)
            self.wait()
        elif token_ids:
            forward(mx.array([token_ids], dtype=mx.int32), list(self.caches), NO_FEATURES)
            self.wait()
        return []

    def append(self, chunk: PrefillChunk) -> tuple[int, ...]:
        """Append a chunk, and return those of its tokens that are to be computed now."""
        assert chunk.start == len(self.prompt), "chunks come in order, without gaps"
        self._shared = chunk.shared
        self.prompt.extend(chunk.token_ids)
        return chunk.token_ids[:-1] if chunk.is_last else chunk.token_ids

    def wait(self) -> None:
        """Wait until all dispatched tokens are in the caches."""
        mx.eval([cache.state for cache in self.caches])

    def adopt(self, caches: Sequence[Cache], index: int) -> None:
        """Take the opening chunk, a whole prompt, as computed in row ``index`` of ``caches``."""
        self.append(self.opening)
        self.caches = caches
        self._index = index

    def finish(self) -> PrefilledRow:
        """Return the whole prompt, ready to join its lane."""
        make_room(self.caches, COLUMN_STEP)
        return PrefilledRow(
            self.caches,
            length=len(self.prompt) - 1,
            limit=self.opening.reserved_tokens,
            last_token_id=self.prompt[-1],
            index=self._index,
            shared=self._shared,
        )


class Prefills:
    """All prompts that are being computed, by slot."""

    def __init__(  # noqa: PLR0913 - one argument for each part of the engine
        self,
        forward: Forward,
        make_caches: Callable[[], list[Cache]],
        blocks: BlockTier,
        model: ModelDescription,
        kv_format: KvFormat,
        *,
        media: PromptMedia | None = None,
        pack: PackCaches | None = None,
    ) -> None:
        """Begin without prompts.

        Args:
            forward: The model.
            make_caches: Makes empty caches of one row.
            blocks: Blocks that prompts may begin with.
            model: Description of the model.
            kv_format: Format of keys and values.
            media: Images and videos of prompts; None for a model that takes text only.
            pack: Makes the caches of a packed pass; None where the model's layers cannot compute one.
        """
        self._media = media
        self._pack = pack
        self._forward = forward
        self._make_caches = make_caches
        self._blocks = blocks
        self._model = model
        self._kv_format = kv_format
        self._open: dict[int, Prefill] = {}

    def __bool__(self) -> bool:
        """True while a prompt is being computed."""
        return bool(self._open)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompts' caches hold."""
        return sum(prefill.kv_bytes for prefill in self._open.values())

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row; None if its prompt is not being computed."""
        prefill = self._open.get(slot_index)
        return None if prefill is None else prefill.cached_row

    def open(self, chunk: PrefillChunk) -> Prefill:
        """Return the chunk's prompt, which an opening chunk begins."""
        if chunk.opens:
            assert chunk.slot_index not in self._open, "a slot is freed before it is taken"
            caches = self._make_caches()
            if chunk.reused is not None:
                self._blocks.fill(caches, chunk.reused)
            make_room(caches, chunk.opened_tokens)
            prefill = Prefill(chunk, caches, self._model.vocabulary_tokens)
            self._open[chunk.slot_index] = prefill
        return self._open[chunk.slot_index]

    def pop(self, slot_index: int) -> Prefill:
        """Remove and return a prompt."""
        return self._open.pop(slot_index)

    def drop(self, slot_indices: Collection[int]) -> None:
        """Remove the prompts of these slots, if any."""
        for slot_index in slot_indices:
            self._open.pop(slot_index, None)

    def clear(self) -> None:
        """Remove all prompts."""
        self._open.clear()

    def beside(self, chunks: Sequence[PrefillChunk]) -> list[Chunk]:
        """Open chunks of a packed pass; returns those that have a token to compute."""
        return _to_compute((chunk, self.open(chunk)) for chunk in chunks)

    def compute(
        self, chunks: Sequence[PrefillChunk]
    ) -> tuple[list[int], list[RowOutput], list[RowFault]]:
        """Compute chunks, together where that costs less.

        Returns:
            Slots whose prompt is whole now, outputs of prompts, and rows whose logits are not
            finite, or whose experts could not be read or images encoded.
        """
        prefills = [self.open(chunk) for chunk in chunks]
        computed = self._compute_together(chunks, prefills)
        outputs: list[RowOutput] = []
        faults: list[RowFault] = []
        for chunk, prefill in zip(chunks, prefills, strict=True):
            if prefill not in computed:
                try:
                    outputs += prefill.compute(self._forward, chunk, self._media)
                except (FloatingPointError, OSError, MediaEncodingError) as cause:
                    faults.append(RowFault(chunk.slot_index, cause))
                    self.drop([chunk.slot_index])
        whole = [one.slot_index for one in chunks if one.is_last and one.slot_index in self._open]
        return whole, outputs, faults

    def _compute_together(
        self, chunks: Sequence[PrefillChunk], prefills: Sequence[Prefill]
    ) -> set[Prefill]:
        """Compute what can share a pass, and return it; the rest is to be computed one by one."""
        pairs = list(zip(chunks, prefills, strict=True))
        if self._pack is None:
            groups = padded_groups([prefill for chunk, prefill in pairs if self._can_share(chunk)])
            shared = [group for group in groups if len(group) > 1]
            return {prefill for group in shared if self._share(group) for prefill in group}
        plain = [(chunk, prefill) for chunk, prefill in pairs if not is_scored(chunk)]
        if len(plain) == 1:
            return set()
        if together := _to_compute(plain):
            token_ids, caches = packed(self._pack, [], together)
            self._forward(token_ids, caches, NO_FEATURES)
            mx.eval([cache.state for chunk in together for cache in chunk.caches])
        return {prefill for _, prefill in plain}

    def _share(self, group: Sequence[Prefill]) -> bool:
        """Compute a group in one call; False if a prompt of it needs weights that could not be read."""
        try:
            compute_together(self._forward, group, len(self._model.cache.layers), self._kv_format)
        except OSError:
            return False  # each alone tells which
        return True

    def _can_share(self, chunk: PrefillChunk) -> bool:
        """Return True for a whole prompt that padding at its end cannot change.

        Only attention with a standard cache is blind to tokens after its own. A row of the serial
        lane needs caches of its own. The logits of several scored prompts would take too much memory. A
        model with vision is given embeddings or positions of one prompt.
        """
        is_whole = chunk.start == 0 and chunk.is_last and len(chunk.token_ids) > 1
        is_plain = chunk.lane is Lane.BATCH and not is_scored(chunk) and self._media is None
        return is_whole and is_plain and self._model.cache.kind is KvCacheKind.STANDARD


def _to_compute(opened: Iterable[tuple[PrefillChunk, Prefill]]) -> list[Chunk]:
    """Append chunks to their prompts; returns those that have a token to compute."""
    chunks = [Chunk(prefill.append(chunk), prefill.caches) for chunk, prefill in opened]
    return [chunk for chunk in chunks if chunk.token_ids]


def is_scored(chunk: PrefillChunk) -> bool:
    """Return True if log-probabilities of the prompt were asked for."""
    return chunk.sampling.prompt_logprobs is not None


def padded_groups(prefills: Iterable[Prefill]) -> list[list[Prefill]]:
    """Group whole prompts by length, so that padding stays cheaper than a call of one's own."""
    groups: list[list[Prefill]] = []
    longest = 0
    for prefill in sorted(prefills, key=_opening_tokens, reverse=True):
        padding = longest - _opening_tokens(prefill)
        if groups and padding <= max(_PADDING_TOKENS, longest // _PADDING_SHARE):
            groups[-1].append(prefill)
        else:
            groups.append([prefill])
            longest = _opening_tokens(prefill)
    return groups


def compute_together(
    forward: Forward, prefills: Sequence[Prefill], layer_count: int, kv_format: KvFormat
) -> None:
    """Compute whole prompts of a standard model in one call, and wait for it.

    Args:
        forward: The model.
        prefills: Prompts of two tokens or more of which nothing is computed yet.
        layer_count: Caches that the model takes.
        kv_format: Format of keys and values.
    """
    prompts = [prefill.opening.token_ids[:-1] for prefill in prefills]
    caches, token_ids = padded_caches(prompts, layer_count, kv_format)
    forward(token_ids, caches, NO_FEATURES)
    mx.eval([cache.state for cache in caches])
    for index, prefill in enumerate(prefills):
        prefill.adopt(caches, index)


def _opening_tokens(prefill: Prefill) -> int:
    return len(prefill.opening.token_ids)
