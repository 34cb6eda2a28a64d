"""One row's draft tokens, and the one place where a failing proposer is dealt with.

An exception of a proposer, or of a grammar on a drafted path, ends the drafts of its row and nothing else:
the row decodes on without them, and the step's result carries the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from machd.engine.protocol.step import ProposerKind
from machd.engine.step.ports import Proposer, RowProposer
from machd.request.generation import SamplingParams


class RowProposals:
    """Draft tokens of one row: none without a proposer, and none after it has failed.

    Attributes:
        is_lookup: A proposal costs next to nothing, so that more may be asked for than is used.
    """

    def __init__(self) -> None:
        """Begin without a proposer."""
        self.is_lookup = False
        self._vocabulary_tokens = 0
        self._fault: BaseException | None = None
        self._row: RowProposer | None = None

    def open(
        self,
        proposer: Proposer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        vocabulary_tokens: int,
    ) -> None:
        """Open the row at ``proposer``."""
        self.is_lookup = proposer.kind is ProposerKind.NGRAM
        self._vocabulary_tokens = vocabulary_tokens
        try:
            self._row = proposer.open(prompt, sampling)
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)

    @property
    def is_open(self) -> bool:
        """True until the proposer has failed or was closed."""
        return self._row is not None

    @property
    def kv_bytes(self) -> int:
        """Bytes that the proposer holds for the row beside the served model's caches."""
        if self._row is None:
            return 0
        try:
            return self._row.kv_bytes
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)
            return 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated."""
        if self._row is not None:
            try:
                self._row.extend(token_ids)
            except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
                self.fail(cause)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Propose the row's next tokens; empty where none are known."""
        if self._row is None or max_tokens < 1:
            return ()
        try:
            token_ids = self._row.propose(max_tokens)[:max_tokens]
            if not all(0 <= one < self._vocabulary_tokens for one in token_ids):
                raise ValueError("it proposes tokens that are not in the vocabulary")  # noqa: TRY301
        except BaseException as cause:  # noqa: BLE001 - reported as the row's DraftFault
            self.fail(cause)
            return ()
        return token_ids

    def fail(self, cause: BaseException) -> None:
        """End the row's drafts because of ``cause``, if it has any."""
        self._fault = cause
        self.close()

    def take_fault(self) -> BaseException | None:
        """Return the fault that ended the drafts, once."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """Give back what the proposer holds for the row."""
        row, self._row = self._row, None
        if row is not None:
            # The row has left or its drafts have failed: a second failure changes nothing.
            with suppress(BaseException):
                row.close()
