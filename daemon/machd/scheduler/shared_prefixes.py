"""Prefixes that rows of the batch lane share: chosen when a sequence is admitted, kept until it leaves.

A prefix is known by a number. Whichever of its rows joins the lane first brings its keys and values, so the
choice needs no block to be in memory: the prefix cache only has to be on, and to let both prompts see one
another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from machd.engine.protocol.step import Lane, SharedPrefix
from machd.scheduler.block_tree import common_tokens
from machd.scheduler.sequence import Sequence

MIN_SHARED_TOKENS = 256
"""Shorter prefixes save too few bytes to be worth a row's way through two arrays."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """A prefix that a sequence could share.

    Attributes:
        prefix: Beginning of its prompt.
        peer: A running sequence whose own prompt is not computed yet, and which would share it too.
    """

    prefix: SharedPrefix
    peer: Sequence | None = None


class SharedPrefixes:
    """Finds the prefix that a sequence can share with running ones.

    Attributes:
        min_tokens: Tokens of the shortest prefix that is worth it.
    """

    def __init__(self) -> None:
        """Begin with no prefix."""
        self.min_tokens = MIN_SHARED_TOKENS
        self._next_number = 1

    def find(
        self, sequence: Sequence, running: Iterable[Sequence], block_tokens: int
    ) -> Sharing | None:
        """Find the prefix for a sequence that has no slot yet; None if it has none to share.

        A prefix that rows share already comes first. A row that decodes keeps its columns, but the prefix that
        another has in common with it is likely to come again.

        Args:
            sequence: Has no slot yet.
            running: Running sequences.
            block_tokens: A new prefix is a multiple of these, so that texts which go on alike by chance do not
                make it longer than later ones are.
        """
        if not sequence.has_completion:
            return None
        namespace = sequence.request.cache_namespace
        common = {
            other: _common_tokens(sequence, other)
            for other in running
            if other.lane is Lane.BATCH and other.request.cache_namespace == namespace
        }
        shared = {one.shared for one, tokens in common.items() if _shares_at_most(one, tokens)}
        if known := max(
            filter(None, shared), key=lambda one: (one.tokens, -one.number), default=None
        ):
            return Sharing(known)
        peer = max(
            (one for one in common if one.shared is None), key=common.__getitem__, default=None
        )
        tokens = 0 if peer is None else common[peer] // block_tokens * block_tokens
        if peer is None or tokens < self.min_tokens:
            return None
        prefix = SharedPrefix(self._next_number, tokens)
        self._next_number += 1
        return Sharing(prefix, None if peer.is_prefilled else peer)


def _common_tokens(one: Sequence, other: Sequence) -> int:
    """Return the tokens that two prompts have in common, last ones left out: rows decode from these on."""
    if not other.has_completion:
        return 0
    common = common_tokens(one.request.prompt, other.request.prompt)
    return min(common, one.prompt_tokens - 1, other.prompt_tokens - 1)


def _shares_at_most(sequence: Sequence, tokens: int) -> bool:
    return sequence.shared is not None and sequence.shared.tokens <= tokens
