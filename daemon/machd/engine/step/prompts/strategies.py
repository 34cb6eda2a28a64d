"""Strategies to compute the chunks of a step's prompts: packed, padded, scored, single.

Packed means flattened without padding, where the model's attention can tell prompts apart, and in the pass of
the batch's rows where there is one. For other models of standard caches whole prompts of like length share a padded
call. Each strategy computes the chunks that it is for and leaves the others to the next one; the last one takes
every chunk. A new strategy is a class here, and a line in :class:`~machd.engine.step.prompts.prefills.Prefills`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from machd.engine.protocol.media import MediaEncodingError
from machd.engine.protocol.step import Lane, RowFault, RowOutput
from machd.engine.step.decode_pass import (
    NO_FEATURES,
    ChooseAdapters,
    Chunk,
    Forward,
    Packing,
    token_adapters,
)
from machd.engine.step.ports import PromptMedia
from machd.engine.step.prompts.prefill import Prefill
from machd.engine.step.row import Decoded

if TYPE_CHECKING:
    from machd.engine.kv.model_kv import ModelKv

_PADDING_TOKENS = 16
"""Padding up to which a shared call is cheaper than one for each prompt."""

_PADDING_SHARE = 4
"""Beyond that a row may be padded by one in so many tokens of the longest row."""

DecodeWith: TypeAlias = Callable[[Sequence[Chunk]], Decoded]
"""Decodes the batch's rows, and computes chunks in the same pass: ``Decoder.decode`` with the plan's rows."""


@dataclass(slots=True)
class PromptStep:
    """Result of computing a step's chunks, filled by one strategy after another.

    Attributes:
        decode_with: Decodes the batch's rows in the pass of the chunks; None where that pass is not theirs.
        whole: Slots whose prompt is whole now.
        outputs: Outputs that prompts have with these chunks.
        result: Faults of prompts; and the result of the batch's rows, if ``has_decoded``.
        has_decoded: True if ``decode_with`` was called: the batch's rows have their tokens.
    """

    decode_with: DecodeWith | None = None
    whole: list[int] = field(default_factory=list)
    outputs: list[RowOutput] = field(default_factory=list)
    result: Decoded = field(default_factory=Decoded)
    has_decoded: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """Chunks flattened into one pass: that of the batch's rows if there is one and no chunk is scored."""

    forward: Forward
    packing: Packing
    choose_adapters: ChooseAdapters

    def compute(self, prefills: Sequence[Prefill], step: PromptStep) -> Sequence[Prefill]:
        """Compute all chunks but scored ones; none if there is one alone and no pass of rows to take it along."""
        scored = [one for one in prefills if one.first_chunk.is_scored]
        plain = [one for one in prefills if not one.first_chunk.is_scored]
        decode_with = None if scored else step.decode_with
        if not self.packing.is_possible or (decode_with is None and len(plain) < 2):
            return prefills
        appended = [Chunk(one.append(), one.caches, one.adapters) for one in plain]
        chunks = [chunk for chunk in appended if chunk.token_ids]
        if decode_with is not None:
            step.result.add(decode_with(chunks))
            step.has_decoded = True
        elif chunks:
            token_ids, caches = self.packing.inputs([], chunks)
            with self.choose_adapters(token_adapters(chunks)):
                self.forward(token_ids, caches, NO_FEATURES)
        mx.eval([cache.state for chunk in chunks for cache in chunk.caches])
        return scored


@dataclass(frozen=True, slots=True)
class Padded:
    """Whole prompts of like length in one call, padded at their ends."""

    forward: Forward
    kv: ModelKv
    media: PromptMedia
    choose_adapters: ChooseAdapters

    def compute(self, prefills: Sequence[Prefill], step: PromptStep) -> Sequence[Prefill]:
        """Compute prompts that have a like; those of a group that lacks weights are left."""
        del step
        groups = _padded_groups(one for one in prefills if self._can_pad(one))
        computed = [group for group in groups if len(group) > 1 and self._compute_group(group)]
        return [one for one in prefills if not any(one in group for group in computed)]

    def _can_pad(self, prefill: Prefill) -> bool:
        """Return True for a whole prompt that padding at its end cannot change.

        Only attention with a standard cache is blind to tokens after its own. A row of the serial
        lane needs caches of its own. The logits of several scored prompts would take too much memory. A
        model with vision is given embeddings or positions of one prompt.
        """
        chunk = prefill.chunk
        is_whole = chunk.start == 0 and chunk.is_last and len(chunk.token_ids) > 1
        is_plain = chunk.lane is Lane.BATCH and not chunk.is_scored
        return is_whole and is_plain and self.kv.can_pad and not self.media.has_features

    def _compute_group(self, group: Sequence[Prefill]) -> bool:
        """Compute a group in one call; False if a prompt of it needs weights that could not be read."""
        prompts = [prefill.first_chunk.token_ids[:-1] for prefill in group]
        caches, token_ids = self.kv.padded_caches(prompts)
        try:
            with self.choose_adapters([prefill.adapters for prefill in group]):
                self.forward(token_ids, caches, NO_FEATURES)
            mx.eval([cache.state for cache in caches])
        except OSError:
            return False  # then each is computed alone, to find which
        for index, prefill in enumerate(group):
            prefill.adopt(caches, index)
        return True


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompts whose log-probabilities were asked for, each in passes of its own."""

    forward: Forward
    choose_adapters: ChooseAdapters

    def compute(self, prefills: Sequence[Prefill], step: PromptStep) -> Sequence[Prefill]:
        """Compute and score every scored prompt's chunk."""
        _compute_each([one for one in prefills if one.first_chunk.is_scored], self._score, step)
        return [one for one in prefills if not one.first_chunk.is_scored]

    def _score(self, prefill: Prefill) -> list[RowOutput]:
        computed_tokens = len(prefill.append())
        token_ids = prefill.chunk.token_ids
        with self.choose_adapters([prefill.adapters]):
            return prefill.scores.compute(self.forward, prefill.caches, token_ids, computed_tokens)


@dataclass(frozen=True, slots=True)
class Single:
    """Every chunk in a pass of its own."""

    forward: Forward
    media: PromptMedia
    choose_adapters: ChooseAdapters

    def compute(self, prefills: Sequence[Prefill], step: PromptStep) -> Sequence[Prefill]:
        """Compute every chunk."""
        _compute_each(prefills, self._pass, step)
        return []

    def _pass(self, prefill: Prefill) -> list[RowOutput]:
        if key_ids := prefill.append():
            token_ids, features = self.media.inputs(
                key_ids, prefill.chunk.start, prefill.first_chunk.media
            )
            with self.choose_adapters([prefill.adapters]):
                self.forward(token_ids, list(prefill.caches), features)
            mx.eval([cache.state for cache in prefill.caches])
        return []


PromptStrategy: TypeAlias = Packed | Padded | Scored | Single
"""A way to compute chunks: ``compute`` waits for them, and returns the prompts with a chunk that is left."""


def _compute_each(
    prefills: Iterable[Prefill], compute: Callable[[Prefill], list[RowOutput]], step: PromptStep
) -> None:
    """Compute chunks one by one, so that a failure is its row's alone."""
    for prefill in prefills:
        try:
            step.outputs += compute(prefill)
        except (FloatingPointError, OSError, MediaEncodingError) as cause:
            step.result.faults.append(RowFault(prefill.chunk.slot_index, cause))


def _padded_groups(prefills: Iterable[Prefill]) -> list[list[Prefill]]:
    """Group whole prompts by length, so that padding stays cheaper than a call for each."""
    groups: list[list[Prefill]] = []
    longest = 0
    for prefill in sorted(prefills, key=lambda one: len(one.chunk.token_ids), reverse=True):
        tokens = len(prefill.chunk.token_ids)
        if groups and longest - tokens <= max(_PADDING_TOKENS, longest // _PADDING_SHARE):
            groups[-1].append(prefill)
        else:
            groups.append([prefill])
            longest = tokens
    return groups
