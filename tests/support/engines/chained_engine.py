"""An engine whose keys and values are the texts that they were computed from.

What a position holds is all tokens up to it, as the row knew them: so a block that is put behind other
tokens than those it was computed after shows, in what is asserted here and in what the row says next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    ReusedPrefix,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.step import (
    DecodeRow,
    DraftOutcome,
    PrefillChunk,
    RowFault,
    RowOutput,
    SampledToken,
    ScoredPrompt,
    SharedPrefix,
    StepPlan,
    StepResult,
)
from support.engines.fake_engine import DraftScript, made_up_scores

TOKEN_BYTES = 10
STATE_BYTES = 25

Text = tuple[int, ...]


def said(text: Text, alphabet: int) -> int:
    """The token that follows a text."""
    return zlib.crc32(bytes(text)) % alphabet


@dataclass(frozen=True, slots=True)
class Chained:
    """A block's content.

    Attributes:
        texts: For each position all tokens up to it.
        state: The text up to the end, where that is kept beside the positions.
    """

    texts: tuple[Text, ...]
    state: Text | None

    @property
    def nbytes(self) -> int:
        """Return what it takes in a made-up memory."""
        return len(self.texts) * TOKEN_BYTES + (STATE_BYTES if self.state is not None else 0)


ChainedDisk = dict[bytes, tuple[SavedBlock, Chained]]


@dataclass(slots=True)
class _Row:
    texts: list[Text]
    state: Text
    next_id: int | None = None
    is_decoding: bool = False
    tokens_left: int = 0
    prompt: Text = ()
    prompt_tokens: int = 0

    def compute(self, token_ids: Text) -> None:
        for token_id in token_ids:
            self.state = (*self.state, token_id)
            self.texts.append(self.state)


class ChainedEngine:
    """Keeps the rules of :mod:`machd.engine.protocol.blocks` to the letter.

    Attributes:
        rows: By slot.
        blocks: By number.
        disk: The disk tier.
        loses: Which stores and loads go wrong.
        writes: Whether the disk tier gets what it is given.
        drops: Which of it is not written, as the result of a later step says.
        unsaved: What no result has said so of yet.
        makes_changes: After how many changes a step fails; None for never.
        failing_slots: Rows whose next chunk or token is a fault.
        draft_script: Numbers of drafts and of accepted drafts, by position and maximum.
    """

    def __init__(
        self, *, is_stateful: bool, alphabet: int, is_late: bool, looks_ahead: bool
    ) -> None:
        """Begin with nothing.

        Args:
            is_stateful: Whether a row can only begin where state was kept.
            alphabet: How many tokens there are.
            is_late: Whether a row's first token comes with its first decode.
            looks_ahead: Whether the state of rows that decode is never at hand.
        """
        self.is_stateful = is_stateful
        self.rows: dict[int, _Row] = {}
        self.blocks: dict[int, Chained] = {}
        self.disk: ChainedDisk = {}
        self.loses: Callable[[BlockChange], bool] = lambda _change: False
        self.writes = True
        self.drops: Callable[[SaveBlock], bool] = lambda _change: False
        self.unsaved: list[bytes] = []
        self.makes_changes: int | None = None
        self.failing_slots: set[int] = set()
        self.draft_script: DraftScript = lambda _position, _max_tokens: (0, 0)
        self._verified: list[DraftOutcome] = []
        self._alphabet = alphabet
        self._is_late = is_late
        self._looks_ahead = looks_ahead
        self._faulted: set[int] = set()
        self._used_ids: set[int] = set()
        self._shared: dict[int, tuple[SharedPrefix, Text]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        touched: dict[int, bool] = {}
        unsaved = tuple(self.unsaved)
        for count, change in enumerate(plan.blocks):
            if count == self.makes_changes:
                raise RuntimeError("planted between two changes")
            touched |= self._make(change)
        for slot_index in plan.release:
            self.rows.pop(slot_index, None)
            self._faulted.discard(slot_index)
            self._shared.pop(slot_index, None)
        self._verified = []
        results = [one for chunk in plan.prefill for one in self._prefill(chunk)]
        results += [one for row in plan.decode for one in self._decode_row(row)]
        failed = {one.slot_index for one in results if isinstance(one, RowFault)}
        outputs = [one for chunk in plan.prefill for one in self._scored(chunk)]
        outputs += [one for one in results if isinstance(one, SampledToken)]
        if self.makes_changes is not None:
            raise RuntimeError("planted after all changes")
        return StepResult(
            tuple(one for one in outputs if one.slot_index not in failed),
            tuple(one for one in results if isinstance(one, RowFault)),
            tuple(self._held(one) for one in touched if one in self.blocks),
            tuple(one for one, is_held in touched.items() if not is_held),
            self._told(unsaved),
            tuple(self._verified),
        )

    def _told(self, unsaved: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return what this step tells of what earlier ones were to write."""
        del self.unsaved[: len(unsaved)]
        return unsaved

    def reset(self) -> None:
        """Forget every row; blocks stay."""
        self.rows.clear()
        self._faulted.clear()
        self._shared.clear()

    def _held(self, block_id: int) -> HeldBlock:
        block = self.blocks[block_id]
        return HeldBlock(block_id, block.nbytes, not self.is_stateful or block.state is not None)

    def _make(self, change: BlockChange) -> dict[int, bool]:
        """Make a change; returns for each block that it was to bring whether it is there."""
        match change:
            case StoreBlock():
                return self._keep(change.block_id, self._copy(change))
            case LoadBlock():
                return self._keep(change.block_id, self._load(change))
            case SplitBlock():
                return self._split(change)
            case _:
                self._give_up(change)
                return {}

    def _give_up(self, change: DropBlocks | SaveBlock | ForgetSaved) -> None:
        match change:
            case DropBlocks(block_ids):
                for block_id in block_ids:
                    self.blocks.pop(block_id, None)
            case SaveBlock():
                self._save(change)
            case ForgetSaved(digests):
                for digest in digests:
                    self.disk.pop(digest, None)

    def _keep(self, block_id: int, block: Chained | None) -> dict[int, bool]:
        assert block_id not in self.blocks, "a number that no block has"
        if block is not None:
            self.blocks[block_id] = block
        return {block_id: block is not None}

    def _copy(self, change: StoreBlock) -> Chained | None:
        assert change.block_id not in self._used_ids, "a number that no block has had"
        self._used_ids.add(change.block_id)
        assert change.slot_index not in self._faulted, "nothing is copied out of a row that failed"
        if self.loses(change):
            return None
        row = self.rows[change.slot_index]
        assert 0 <= change.start < change.stop <= len(row.texts), "what is copied is computed"
        state = None
        if change.has_state and not (self._looks_ahead and row.is_decoding):
            assert self.is_stateful, "there is no state"
            assert len(row.texts) == change.stop, "state is of where the row stands"
            state = row.state
        return Chained(tuple(row.texts[change.start : change.stop]), state)

    def _split(self, change: SplitBlock) -> dict[int, bool]:
        assert change.head_id not in self._used_ids, "a number that no block has had"
        self._used_ids.add(change.head_id)
        block = self.blocks.pop(change.block_id)
        assert 0 < change.at < len(block.texts), "both halves have positions"
        head = Chained(block.texts[: change.at], None)
        tail = Chained(block.texts[change.at :], block.state)
        return self._keep(change.head_id, head) | self._keep(change.block_id, tail)

    def _load(self, change: LoadBlock) -> Chained | None:
        saved, block = self.disk.get(change.saved.digest, (None, None))
        if saved is None or self.loses(change):
            return None
        asked = change.saved
        assert (asked.start, asked.token_ids) == (saved.start, saved.token_ids), "as it was saved"
        assert (asked.parent, asked.has_state) == (saved.parent, saved.has_state), "as it was saved"
        return block

    def _save(self, change: SaveBlock) -> None:
        block = self.blocks[change.block_id]
        saved = change.saved
        text = block.texts[-1]
        assert saved.start == len(text) - len(block.texts), "a block is saved by its positions"
        assert saved.token_ids == text[saved.start :], "a block is saved by its tokens"
        assert saved.has_state == self._held(change.block_id).has_state, "and by its state"
        if self.drops(change):
            self.disk.pop(saved.digest, None)
            self.unsaved.append(saved.digest)
        elif self.writes:
            self.disk[saved.digest] = (saved, block)

    def _open(self, reused: ReusedPrefix) -> _Row:
        blocks = [self.blocks[block_id] for block_id in reused.block_ids]
        texts = [text for block in blocks for text in block.texts]
        count = len(reused.token_ids)
        assert 0 < count <= len(texts), "blocks hold at least as many positions"
        for position in range(count):
            expected = reused.token_ids[: position + 1]
            assert texts[position] == expected, "blocks hold what these tokens leave"
        if self.is_stateful:
            assert len(texts) == count, "the last block ends where the tokens do"
            assert blocks[-1].state == reused.token_ids, "and has state"
        return _Row(texts[:count], reused.token_ids)

    def _prefill(self, chunk: PrefillChunk) -> list[SampledToken | RowFault]:
        if chunk.opens:
            assert chunk.slot_index not in self.rows, "a slot is freed before it is taken again"
            row = _Row([], ()) if chunk.reused is None else self._open(chunk.reused)
            row.prompt_tokens = chunk.start + chunk.opened_tokens
            self.rows[chunk.slot_index] = row
        row = self.rows[chunk.slot_index]
        row.tokens_left = chunk.reserved_tokens - chunk.start - len(chunk.token_ids)
        assert chunk.start == len(row.texts), "chunks come in order, without gaps"
        row.prompt += chunk.token_ids
        row.compute(chunk.token_ids[:-1] if chunk.is_last else chunk.token_ids)
        if chunk.shared is not None:
            self._share(chunk.slot_index, chunk.shared)
        if not chunk.is_last:
            return [self._fault(chunk.slot_index)] if chunk.slot_index in self.failing_slots else []
        row.next_id = chunk.token_ids[-1]
        return [] if self._is_late else [self._decode(chunk.slot_index)]

    def _share(self, slot_index: int, prefix: SharedPrefix) -> None:
        computed = self.rows[slot_index].state
        assert 0 < prefix.tokens <= len(computed), "what is shared is computed"
        text = computed[: prefix.tokens]
        for other, begun in self._shared.values():
            if other.number == prefix.number:
                assert (other, begun) == (prefix, text), (
                    "prefixes of one number are of the same tokens"
                )
        self._shared[slot_index] = prefix, text

    def _decode_row(self, decode: DecodeRow) -> list[SampledToken | RowFault]:
        """Return the row's accepted drafts, which it has computed by then, and one token more."""
        slot_index, row = decode.slot_index, self.rows[decode.slot_index]
        max_tokens = min(decode.max_draft_tokens, row.tokens_left - 1)
        drafted = accepted = 0
        if max_tokens > 0 and slot_index not in self.failing_slots:
            drafted, accepted = self.draft_script(len(row.texts), max_tokens)
        assert accepted <= drafted <= max(max_tokens, 0), "a script of drafts keeps to its bounds"
        if drafted:
            self._verified.append(DraftOutcome(slot_index, drafted, accepted))
        return [self._decode(slot_index) for _ in range(accepted + 1)]

    def _decode(self, slot_index: int) -> SampledToken | RowFault:
        if slot_index in self.failing_slots:
            return self._fault(slot_index)
        row = self.rows[slot_index]
        assert row.next_id is not None, "the prompt comes first"
        row.compute((row.next_id,))
        row.is_decoding = True
        row.tokens_left -= 1
        assert row.tokens_left >= 0, "a row gets no more tokens than it may have"
        row.next_id = said(row.state, self._alphabet)
        return SampledToken(slot_index, row.next_id)

    def _fault(self, slot_index: int) -> RowFault:
        self._faulted.add(slot_index)
        return RowFault(slot_index, ValueError("planted"))

    def _scored(self, chunk: PrefillChunk) -> list[RowOutput]:
        row, asked = self.rows[chunk.slot_index], chunk.sampling.prompt_logprobs
        if asked is None or len(row.prompt) < row.prompt_tokens:
            return []
        assert chunk.reused is None, "a scored prompt is computed whole"
        return [ScoredPrompt(chunk.slot_index, made_up_scores(row.prompt, asked))]
