"""Draft tokens by block diffusion: a draft model fills a whole block in one pass (DFlash).

The draft (Chen et al. 2026, arXiv:2602.06036) has no vocabulary of its own: it reads hidden states of
the served model's layers and uses the served model's embedding and output head. ``dflash_package`` does
that with dflash-mlx; this module chooses which tokens of a row are read, and when.

Only generated tokens are read, never drafts, so nothing has to be rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.draws import DraftDraws, OpenDraws, drawn_tokens
from machd.request.generation import SamplingParams

_FEW_TOKENS = 16
"""Unread tokens up to which a block is drafted at once; more are read first, as a prompt is."""

_CHUNK_TOKENS = 256
"""Tokens read at a time, as by a draft model."""

_KEPT_TOKENS = 256
"""Tokens that a row may generate without a draft before its caches are dropped."""


class BlockReader(Protocol):
    """One row's place in a block draft."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in the row's next tokens, at least one; all but its last are read some time."""
        ...

    def block_logits(self, last_token_id: int, count: int) -> mx.array:
        """Logits [count, n] of the tokens after the row's last one; only after something was read."""
        ...


class BlockDraft(Protocol):
    """A draft model that fills blocks."""

    @property
    def block_tokens(self) -> int:
        """Most tokens of a block."""
        ...

    def open(self) -> BlockReader:
        """Begin with a row."""
        ...


class DFlashProposer:
    """Proposer of whole blocks for any number of rows."""

    def __init__(self, draft: BlockDraft, *, open_draws: OpenDraws) -> None:
        """Take over a draft model."""
        self._draft: BlockDraft | None = draft
        self._open_draws = open_draws

    @property
    def kind(self) -> ProposerKind:
        """DFlash."""
        return ProposerKind.DFLASH

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> _BlockRow:
        """Begin with a row; nothing is computed before the first proposal."""
        assert self._draft is not None, "it is not closed"
        return _BlockRow(self._draft, self._open_draws(prompt, sampling), prompt)

    def close(self) -> None:
        """Drop the draft model."""
        self._draft = None
        mx.clear_cache()


class _BlockRow:
    """Draft tokens of one row."""

    def __init__(self, draft: BlockDraft, draws: DraftDraws, prompt: Sequence[int]) -> None:
        self._draft = draft
        self._draws = draws
        self._token_ids = list(prompt)
        self._drawn_tokens = len(prompt)
        self._reader: BlockReader | None = None
        self._read_tokens = self._drafted_at_tokens = 0
        self._unasked_tokens = 0
        self._block: tuple[int, ...] = ()

    @property
    def kv_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.nbytes

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens; without proposals for long, the reader is dropped."""
        self._token_ids.extend(token_ids)
        self._unasked_tokens += len(token_ids)
        if self._unasked_tokens > _KEPT_TOKENS:
            self.close()

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Propose a block; empty while the draft model has a lot to read.

        Raises:
            FloatingPointError: Its logits are not finite.
        """
        self._unasked_tokens = 0
        if self._drafted_at_tokens == len(self._token_ids):
            return self._block[:max_tokens]  # no token since
        if len(self._token_ids) < 2:
            return ()  # the draft hears what layers make of the tokens before the last
        waiting = self._token_ids[self._read_tokens : -1]
        if self._reader is None:
            self._reader = self._draft.open()
        if waiting:
            chunk = waiting[:_CHUNK_TOKENS]
            self._reader.read(chunk)
            self._read_tokens += len(chunk)
        if len(waiting) > _FEW_TOKENS:
            return ()
        count = min(max_tokens, self._draft.block_tokens)
        self._block = self._drawn(self._reader.block_logits(self._token_ids[-1], count))
        self._drafted_at_tokens = len(self._token_ids)
        return self._block

    def close(self) -> None:
        self._reader = None
        self._read_tokens = self._drafted_at_tokens = 0
        self._block = ()

    def _drawn(self, logits: mx.array) -> tuple[int, ...]:
        self._draws.extend(self._token_ids[self._drawn_tokens :])
        self._drawn_tokens = len(self._token_ids)
        chosen = [self._draws.choose(logits[place : place + 1]) for place in range(len(logits))]
        self._draws.roll_back()
        return tuple(drawn_tokens(chosen))
