"""Prompts on their way into caches: chunk by chunk alone, or whole ones together.

The last token of a prompt with a completion is never prefilled: it is the input of the row's first
decode step, which the batch computes anyway. So the output head runs over no prompt but those whose
log-probabilities were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.batch_lane import padded_caches
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.kv.row_caches import CachedRow
from machd.engine.protocol.step import PrefillChunk, PromptLogprob
from machd.engine.step.decode_pass import Forward
from machd.engine.step.prompt_scores import PromptScores

_PADDING_TOKENS = 16
"""Padding up to which sharing a call is cheaper than a call of one's own."""

_PADDING_SHARE = 4
"""Beyond that a row may be padded by one in so many tokens of the longest row."""


class Prefill:
    """One prompt while it is computed.

    Attributes:
        opening: The first chunk, which says how the row will decode.
        prompt: The tokens so far.
        caches: Where they are; one for each cache of the model.
    """

    def __init__(
        self, opening: PrefillChunk, caches: Sequence[Cache], vocabulary_tokens: int
    ) -> None:
        """Begin with the model's own caches, which hold what the opening chunk reuses."""
        assert opening.opens, "the first chunk opens the row"
        asked = opening.sampling.prompt_logprobs
        assert asked is None or opening.reused is None, "a scored prompt is computed whole"
        self.opening = opening
        self.prompt: list[int] = [] if opening.reused is None else [*opening.reused.token_ids]
        self.caches = caches
        self._scores: PromptScores | None = None
        if asked is not None:
            self._scores = PromptScores(opening.slot_index, asked, vocabulary_tokens)
        self._index = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompt's caches hold."""
        return sum(int(cache.nbytes) for cache in self.caches)

    @property
    def cached_row(self) -> CachedRow:
        """How far it is: all that came is computed, until the last chunk."""
        return CachedRow(self.caches, self._index, len(self.prompt), is_exact=True)

    def fill(self, forward: Forward, chunk: PrefillChunk) -> list[PromptLogprob]:
        """Compute a chunk, and wait for it.

        Returns:
            The log-probabilities of the chunk's tokens, where they were asked for.

        Raises:
            FloatingPointError: They are not numbers.
        """
        token_ids = self.take(chunk)
        if self._scores is not None:
            return self._scores.fill(forward, self.caches, chunk.token_ids, len(token_ids))
        if token_ids:
            forward(mx.array([token_ids], dtype=mx.int32), list(self.caches))
            self.wait()
        return []

    def take(self, chunk: PrefillChunk) -> tuple[int, ...]:
        """Note a chunk, and say which of its tokens are to be computed now."""
        assert chunk.start == len(self.prompt), "chunks come in order, without gaps"
        self.prompt.extend(chunk.token_ids)
        return chunk.token_ids[:-1] if chunk.is_last else chunk.token_ids

    def wait(self) -> None:
        """Until what was begun is in the caches."""
        mx.eval([cache.state for cache in self.caches])

    def adopt(self, caches: Sequence[Cache], index: int) -> None:
        """Take the opening chunk, a whole prompt, as computed in a row of ``caches``."""
        self.prompt.extend(self.opening.token_ids)
        self.caches = caches
        self._index = index

    def finish(self) -> PrefilledRow:
        """The whole prompt, ready to join."""
        return PrefilledRow(
            self.caches,
            length=len(self.prompt) - 1,
            limit=self.opening.reserved_tokens,
            last_token_id=self.prompt[-1],
            index=self._index,
        )


def padded_groups(prefills: Iterable[Prefill]) -> list[list[Prefill]]:
    """Whole prompts in groups of like lengths, so that padding stays cheaper than a call saved."""
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


def fill_together(
    forward: Forward, prefills: Sequence[Prefill], layer_count: int, kv_format: KvFormat
) -> None:
    """Compute whole prompts of a standard model in one call, and wait for it.

    Args:
        forward: The model.
        prefills: Of two tokens or more each; nothing of them is computed yet.
        layer_count: Caches that the model takes.
        kv_format: How they keep keys and values.
    """
    prompts = [prefill.opening.token_ids[:-1] for prefill in prefills]
    caches, token_ids = padded_caches(prompts, layer_count, kv_format)
    forward(token_ids, caches)
    mx.eval([cache.state for cache in caches])
    for index, prefill in enumerate(prefills):
        prefill.adopt(caches, index)


def _opening_tokens(prefill: Prefill) -> int:
    return len(prefill.opening.token_ids)
