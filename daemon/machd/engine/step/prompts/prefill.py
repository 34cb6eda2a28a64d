"""One prompt while it is computed into caches of its own.

The last token of a prompt with a completion is never prefilled: it is the first span of the row's decode.
So the output head runs over no prompt but those whose log-probabilities were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow, PrefilledRow
from machd.engine.protocol.step import PrefillChunk, SharedPrefix
from machd.engine.step.prompts.scores import PromptScores
from machd.request.adapter import Adapter


class Prefill:
    """One prompt while it is computed.

    Attributes:
        first_chunk: Its parameters, lane and reservation are the row's.
        chunk: The chunk of this step.
        prompt: The tokens so far.
        caches: One for each cache of the model.
        scores: Log-probabilities of the prompt's tokens; unused unless they were asked for.
    """

    def __init__(
        self, first_chunk: PrefillChunk, caches: Sequence[Cache], vocabulary_tokens: int
    ) -> None:
        """Begin with caches that hold the prefix that the first chunk reuses."""
        assert first_chunk.opens, "the first chunk opens the row"
        reused = first_chunk.reused
        assert not (first_chunk.is_scored and reused), "a scored prompt is computed whole"
        self.first_chunk = self.chunk = first_chunk
        self.prompt: list[int] = [] if reused is None else [*reused.token_ids]
        self.caches = caches
        self.scores = PromptScores(first_chunk, vocabulary_tokens)
        self._shared: SharedPrefix | None = None
        self._index = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes that the prompt's caches hold."""
        return sum(int(cache.nbytes) for cache in self.caches)

    @property
    def cached_row(self) -> CachedRow:
        """The prompt's row before its last chunk: every token so far is computed."""
        return CachedRow(self.caches, self._index, len(self.prompt), is_exact=True)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Adapters that compute the prompt."""
        return self.first_chunk.sampling.adapters

    def append(self) -> tuple[int, ...]:
        """Append the chunk, and return those of its tokens that are to be computed now."""
        chunk = self.chunk
        assert chunk.start == len(self.prompt), "chunks come in order, without gaps"
        self._shared = chunk.shared
        self.prompt.extend(chunk.token_ids)
        return chunk.token_ids[:-1] if chunk.is_last else chunk.token_ids

    def adopt(self, caches: Sequence[Cache], index: int) -> None:
        """Take the chunk, a whole prompt, as computed in row ``index`` of ``caches``."""
        self.append()
        self.caches = caches
        self._index = index

    def finish(self) -> PrefilledRow:
        """Return the whole prompt, ready to join its lane."""
        return PrefilledRow(
            self.caches,
            length=len(self.prompt) - 1,
            limit=self.first_chunk.reserved_tokens,
            last_token_id=self.prompt[-1],
            index=self._index,
            shared=self._shared,
        )
