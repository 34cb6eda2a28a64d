"""The prefix cache: running rows reuse blocks of earlier texts, and store blocks of their own.

A sequence's prompt is looked up when it gets its slot; the blocks found are pinned until it ends. A row
waits before its first chunk for blocks being read from disk, and for a row (its leader) that computes
the same prefix now.

Without state any prefix can be reused, to the token. With windows or recurrent state a row can only
begin at a snapshot, which is made at the ends of prompts and completions and at branch points; chunks
end there, because the engine copies state only from the row's position.
"""

from __future__ import annotations

from collections.abc import Iterable

from machd.engine.protocol.blocks import BlockChange, ReusedPrefix, SavedBlock
from machd.engine.protocol.step import StepPlan, StepResult
from machd.scheduler.block_observer import BlockObserver
from machd.scheduler.block_pool import BlockPool, RowPosition
from machd.scheduler.block_tree import Block, BlockTree, common_tokens
from machd.scheduler.cache_diagnosis import diagnose
from machd.scheduler.common_prefixes import CommonPrefixes, PrefixRow, Sharing
from machd.scheduler.events import CacheDiagnosis
from machd.scheduler.prefix_limits import PrefixConfig, PrefixLimits, PrefixReading
from machd.scheduler.seen_prefixes import SeenPrefixes
from machd.scheduler.sequence import Sequence

_MAX_CHECKED_BLOCKS = 4096
"""Most blocks to check at once: they take about 20 ms, which delays a request that arrives meanwhile."""


class PrefixCache:
    """Block pool and radix tree, with the running rows that share them."""

    def __init__(
        self,
        shape: PrefixConfig,
        limits: PrefixLimits,
        saved: Iterable[SavedBlock] = (),
        *,
        observer: BlockObserver | None = None,
    ) -> None:
        """Start with the blocks that the disk tier has saved.

        Args:
            shape: Sizes, and the model's key.
            limits: Limits of the blocks.
            saved: Blocks on disk.
            observer: Told which blocks are in memory.
        """
        self._block_tokens = shape.block_tokens
        self._min_gain_tokens = shape.min_gain_tokens
        self._is_stateful = shape.costs.is_stateful
        self._tree = BlockTree(shape.model_key)
        self._pool = BlockPool(self._tree, shape.costs, limits, observer)
        self._pool.find_saved(saved)
        self._rows: dict[int, PrefixRow] = {}
        self._common_prefixes = CommonPrefixes(self._rows, shape)
        self._seen = SeenPrefixes()
        self._queries = self._hits = self._prefix_hits = 0

    @property
    def changes(self) -> tuple[BlockChange, ...]:
        """Block changes of the next step."""
        return tuple(self._pool.changes)

    @property
    def reading(self) -> PrefixReading:
        """Counts at this moment."""
        kept, counts = self._pool, self._pool.counts
        return PrefixReading(
            queries=self._queries,
            hits=self._hits,
            prefix_hits=self._prefix_hits,
            misses=self._queries - self._hits - self._prefix_hits,
            entries=counts.entries,
            blocks=len(kept),
            shared_blocks=counts.shared_blocks,
            pinned_blocks=counts.pinned_blocks,
            bytes=counts.bytes,
            pinned_bytes=counts.pinned_bytes,
            bytes_saved=counts.bytes_saved,
            limit_bytes=kept.limit_bytes,
            evictions=kept.evictions,
            saved_blocks=kept.disk_tier.count,
            saved_bytes=kept.disk_tier.bytes,
        )

    def set_limits(self, limits: PrefixLimits) -> None:
        """Change the limits, and evict down to them."""
        self._pool.set_limits(limits)

    def observe_memory(self, available_bytes: int | None) -> None:
        """Adapt the memory limit to the machine's free memory."""
        self._pool.observe(available_bytes)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of blocks in memory that no running row holds."""
        return self._pool.counts.bytes - self._pool.counts.pinned_bytes

    def yield_bytes(self, missing_bytes: int) -> bool:
        """Evict blocks of ``missing_bytes``, as far as rows allow; returns whether any was evicted.

        The limit stays lowered until memory is observed again.
        """
        return self._pool.shrink(self._pool.bytes - missing_bytes)

    def clear(self, *, is_disk_included: bool) -> int:
        """Drop every block that no running row holds; returns how many."""
        return self._pool.clear(is_disk_included=is_disk_included)

    def sharing(self, sequence: Sequence) -> Sharing | None:
        """Find the prefix that a sequence without a slot can share with running rows; None if there is none."""
        return self._common_prefixes.sharing(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Look up the prompt of a sequence that got its slot."""
        assert sequence.slot_index is not None, "a row has a slot"
        root = self._tree.root(sequence.request.cache_namespace)
        root.adapters = root.adapters or sequence.request.sampling.adapters
        row = self._rows[sequence.slot_index] = PrefixRow(sequence, root, self._block_tokens)
        self._pool.pin(root)  # keeps the namespace while the row runs
        self._pool.pin(row.pinned)
        self._look_up(row)

    def leave(self, sequence: Sequence, *, keeps: bool) -> None:
        """Remove the row of a sequence; ``keeps`` stores what it computed."""
        assert sequence.slot_index is not None, "a row has a slot"
        row = self._rows.pop(sequence.slot_index)
        if keeps and row.is_open:
            position, text = sequence.computed_tokens, sequence.text
            # A completion that ended inside accepted drafts has fewer tokens than its row.
            is_exact = position <= len(text)
            is_end = is_exact or not self._is_stateful
            upto = min(position, len(text))
            self._seen.add(row.seen, row.seen.unnoted(text, upto))
            self._extend(row, text, upto, position=position, is_end=is_end)
        self._let_go(row)
        for other in self._common_prefixes.leave(row):
            self._look_up(other)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply a step: confirm blocks, store computed prompts, look up rows that have not begun.

        Nothing that a failed row has computed in this step is stored.
        """
        del self._pool.changes[: len(plan.blocks)]
        self._open_rows(plan)
        self._pool.confirm(result.held_blocks, result.lost_blocks, result.unsaved_blocks)
        failed = {fault.slot_index for fault in result.faults}
        for chunk in plan.prefill:
            if chunk.slot_index not in failed:
                self._keep_prompt(self._rows[chunk.slot_index])
        if plan.prefill or plan.blocks:
            for row in self._rows.values():
                if not (row.is_open or self._common_prefixes.goes_on_waiting(row)):
                    self._look_up(row)

    def _open_rows(self, plan: StepPlan) -> None:
        for chunk in plan.prefill:
            row = self._rows[chunk.slot_index]
            if not row.is_open:
                row.is_open = True
                row.seen.begin(row.tip, row.beginning)
                if not row.sequence.resumed_tokens:  # of its prompt is told once
                    row.sequence.reused_tokens = row.found_tokens
                    row.sequence.diagnosis = self._diagnose(row)
                    self._count(row)
                self._pool.use(row.pinned.path())

    def fail(self) -> None:
        """Remove all rows and blocks in memory after an engine fault."""
        for row in self._rows.values():
            self._let_go(row)
            self._common_prefixes.leave(row)
        self._rows.clear()
        self._pool.lose_memory()

    def is_ready(self, sequence: Sequence) -> bool:
        """Return True if a sequence has begun or need not wait for blocks or a leader."""
        row = self._row_of(sequence)
        if row.is_open or row.leader is not None or row.is_loading:
            return row.is_open
        return all(block.is_held for block in row.pinned.path())

    def reused(self, sequence: Sequence) -> ReusedPrefix | None:
        """Return the prefix that a row begins with; None if it has begun, or nothing was found."""
        row = self._row_of(sequence)
        if row.is_open or not row.found_tokens:
            return None
        return ReusedPrefix(
            row.beginning[: row.found_tokens],
            tuple(block.block_id for block in row.pinned.path()),
        )

    def stop_before(self, sequence: Sequence, stop: int) -> int:
        """Return an earlier end for a chunk that goes to ``stop`` if a snapshot is wanted there."""
        if not self._is_stateful:
            return stop
        row = self._row_of(sequence)
        wanted = {
            row.branch_point,
            len(sequence.prefill_token_ids) - 1,
            *self._common_prefixes.awaited_branch_points(row),
        }
        return min([stop, *(one for one in wanted if sequence.prefilled_tokens < one < stop)])

    def check_invariants(self, sequences: Iterable[Sequence], *, is_whole: bool = True) -> None:
        """Assert that blocks, pins and running rows agree.

        Args:
            sequences: Running sequences.
            is_whole: Check every block, unless there are very many, and not only those of running
                rows.
        """
        running = {sequence.slot_index: sequence for sequence in sequences}
        assert {slot: row.sequence for slot, row in self._rows.items()} == running, (
            "rows are the running sequences"
        )
        pins: dict[int, int] = {}
        for row in self._rows.values():
            pins[id(row.pinned)] = pins.get(id(row.pinned), 0) + 1
        if is_whole and len(self._pool) <= _MAX_CHECKED_BLOCKS:
            self._pool.check_invariants()
            for block in self._tree:
                assert block.pins == pins.get(id(block), 0), "only rows pin blocks"
        for row in self._rows.values():
            if row.pinned.is_usable and not row.pinned.is_root:
                assert row.pinned.pins == pins[id(row.pinned)], "rows pin blocks"
                if not is_whole or len(self._pool) > _MAX_CHECKED_BLOCKS:
                    for block in row.pinned.path():
                        self._pool.check(block)
            assert row.is_open or row.pinned.is_usable, "a reused prefix is in memory"
            assert row.leader is None or row.leader in self._rows.values(), "leaders run"

    def _diagnose(self, row: PrefixRow) -> CacheDiagnosis:
        walk = self._tree.walk(row.known if row.known.is_known else row.root, row.beginning)
        usable = self._usable(walk.block, walk.tokens)
        return diagnose(row, walk, usable, self._seen, min_gain_tokens=self._min_gain_tokens)

    def _count(self, row: PrefixRow) -> None:
        self._queries += 1
        if not row.found_tokens:
            return
        if row.found_tokens == row.sequence.prompt_tokens - 1:
            self._hits += 1
        else:
            self._prefix_hits += 1

    def _look_up(self, row: PrefixRow) -> None:
        """Find the prefix that a row can begin with, now or after loading."""
        sequence = row.sequence
        walk = self._tree.walk(row.known if row.known.is_known else row.root, row.beginning)
        row.known, row.kept_tokens = walk.whole_block, max(row.kept_tokens, walk.tokens)
        block = tip = self._usable(walk.block, walk.tokens)
        row.is_loading = not block.is_usable and self._pool.load(
            one for one in block.path() if not one.is_in_memory
        )
        if not block.is_usable:
            while not tip.is_usable:
                tip = tip.before
            block = self._usable(tip, walk.tokens)
        tokens = min(block.stop, walk.tokens)
        row.branch_point = walk.tokens if walk.tokens - tokens >= self._min_gain_tokens else 0
        self._find_leader(row, tokens)
        row.found_tokens = sequence.prefilled_tokens = tokens
        # Pin the loaded blocks, although a row with state may not be able to begin behind them.
        self._hold(row, tip if row.is_loading else block)
        row.tip = block if block.stop <= tokens else block.before

    def _find_leader(self, row: PrefixRow, tokens: int) -> None:
        """Choose the leader of a row that has so many tokens by itself.

        A row without a gain from waiting now has none later, so rows are compared once.
        """
        if row.is_loading:
            row.leader, row.leader_tokens, row.is_compared = None, 0, False
        elif not row.is_compared or tokens < row.found_tokens:
            can_keep = self._pool.can_keep(self._min_gain_tokens)
            row.leader, row.leader_tokens = (
                self._common_prefixes.leader_of(row, tokens) if can_keep else (None, 0)
            )
            row.is_compared = row.leader is None

    def _usable(self, block: Block, tokens: int) -> Block:
        """Return the last block up to ``block`` at which a row can begin, in memory or not."""
        if self._is_stateful:
            while not block.is_root and not (block.has_state and block.stop <= tokens):
                block = block.before
        return block

    def _let_go(self, row: PrefixRow) -> None:
        self._pool.unpin(row.pinned)
        self._pool.unpin(row.root)

    def _hold(self, row: PrefixRow, block: Block) -> None:
        if block is not row.pinned:
            self._pool.pin(block)
            self._pool.unpin(row.pinned)
            row.pinned = block

    def _keep_prompt(self, row: PrefixRow) -> None:
        """Store the computed blocks of a prompt; at its end also a block that is not full."""
        sequence = row.sequence
        computed = min(sequence.prefilled_tokens, len(sequence.prefill_token_ids) - 1)
        self._seen.add(row.seen, row.seen.unnoted(sequence.prefill_token_ids, computed))
        if sequence.is_prefilled and not self._is_stateful:
            upto = sequence.computed_tokens
            self._extend(row, sequence.prefill_token_ids, upto, position=None, is_end=True)
            return
        position = sequence.prefilled_tokens
        ends = {
            row.branch_point,
            len(sequence.prefill_token_ids) - 1,
            *self._common_prefixes.awaited_branch_points(row),
        }
        if not sequence.is_prefilled:
            is_end = position in ends
            self._extend(
                row, sequence.prefill_token_ids, position, position=position, is_end=is_end
            )

    def _extend(
        self,
        row: PrefixRow,
        text: tuple[int, ...],
        upto: int,
        *,
        position: int | None,
        is_end: bool,
    ) -> None:
        """Store blocks of a row's text as far as it is computed.

        Args:
            row: An open row.
            text: Its tokens.
            upto: Number of computed tokens.
            position: The row's position; None if not known exactly.
            is_end: The last block may be partly filled, and a snapshot is wanted at its end.
        """
        if not row.tip.is_usable:
            return
        assert row.sequence.slot_index is not None, "a row has a slot"
        row_position = RowPosition(
            row.sequence.slot_index, position if self._is_stateful and is_end else None
        )
        while row.tip.stop < upto:
            block = self._next_block(row.tip, text, upto, row_position, is_end=is_end)
            if block is None:
                break
            row.tip = block
            block.prefix_hash = row.seen.hash_at(block.stop) or block.prefix_hash
        is_at_end = is_end and row.tip.stop == upto and not row.tip.is_root
        if is_at_end and self._lacks_state(row.tip, row_position):
            self._pool.store_anew(row.tip, row_position)
        # The reused prefix stays pinned until the tip has reached its end.
        if row.tip.stop >= row.found_tokens:
            self._hold(row, row.tip)

    def _next_block(
        self,
        tip: Block,
        text: tuple[int, ...],
        upto: int,
        row_position: RowPosition,
        *,
        is_end: bool,
    ) -> Block | None:
        """Find or store the block behind ``tip``; None if it cannot be stored yet."""
        child = tip.children.get(text[tip.stop])
        if child is None:
            boundary = (tip.stop // self._block_tokens + 1) * self._block_tokens
            stop = min(upto, boundary)
            if stop < boundary and not is_end:
                return None  # a later step fills it
            return self._pool.store(tip, text[tip.stop : stop], row_position)
        known = text[tip.stop : min(upto, child.stop)]
        common = common_tokens(child.token_ids, known)
        if common < len(child.token_ids):
            is_branch_point = tip.stop + common < upto
            is_state_wanted = row_position.position == tip.stop + common and is_end
            if not child.is_held or not (is_branch_point or is_state_wanted):
                return None
            child = self._pool.split(child, common)
        if self._is_better_saved(child, row_position):
            self._pool.load([child])
            return child if child.is_in_memory else None
        if not child.is_in_memory or self._lacks_state(child, row_position):
            return child if self._pool.store_anew(child, row_position) else None
        return child

    def _is_better_saved(self, block: Block, row_position: RowPosition) -> bool:
        """Return True if a block is only on disk, with a snapshot that the row cannot provide."""
        is_elsewhere = self._is_stateful and not block.is_in_memory
        return is_elsewhere and block.has_state and row_position.position != block.stop

    def _lacks_state(self, block: Block, row_position: RowPosition) -> bool:
        """Return True if the row is at the end of a block that lacks a snapshot."""
        return row_position.position == block.stop and not block.has_state

    def _row_of(self, sequence: Sequence) -> PrefixRow:
        assert sequence.slot_index is not None, "a row has a slot"
        return self._rows[sequence.slot_index]
