"""The KV of the rows that share a forward pass: one object of its kind for each cache of the model.

Standard caches become a :class:`~machd.engine.kv.layers.slab.SlabCache` a layer, in their KV format, and windows
a :class:`~machd.engine.kv.layers.window.WindowSlab`. Others stay in mlx-lm's own arrays. The caches
inside cache lists are held in the same ways.

Rows that share a prefix read one copy of it, taken from the first such row that joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.lane_kv import JoiningRow, LaneKv, PrefilledRow, held_bytes
from machd.engine.kv.layers.kinds import kind_of
from machd.engine.kv.layers.layer_kv import LayerKv
from machd.engine.kv.layers.slab import SlabCache
from machd.engine.kv.rollback import CacheCheckpoint
from machd.engine.kv.row_caches import innermost, kv_arrays, replaced
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab_layout import LayoutRule, LengthClasses, OneSlab


class BatchLaneKv(LaneKv):
    """A lane of any number of rows that are computed together."""

    def __init__(self, max_rows: int, *, has_length_classes: bool = False) -> None:
        """Begin without rows; with length classes the model's attention reads slab by slab, so rows may lie in several."""
        self._rule: LayoutRule = LengthClasses() if has_length_classes else OneSlab(max_rows)
        self._max_rows = max_rows
        self._checkpoint: CacheCheckpoint | None = None
        self._checkpoint_lengths: list[int] = []
        self._positions = RowPositions(self._rule)
        self.layers: list[Cache] = []
        self._opened: list[LayerKv] = []
        self._padded: list[LayerKv] = []
        self._ask_layers()

    @property
    def takes_ragged_spans(self) -> bool:
        """True if all caches have columns: then a row's padding lies after its end."""
        return not self._columnless

    @property
    def can_roll_back(self) -> bool:
        """True if every cache can, with as many rows as there are."""
        return self._can_roll_back

    @property
    def room_tokens(self) -> int:
        """Tokens a row that fit into the slabs or into the rows' reservations."""
        return self._positions.room_tokens()

    def join(self, row: PrefilledRow) -> None:
        """Copy a row in, layer by layer."""
        prefix: list[tuple[mx.array, ...]] | None = None
        if row.shared is not None and row.shared not in self._positions.shared:
            assert isinstance(self._rule, LengthClasses), "attention reads what comes before a slab"
            prefix = _copies_without_nan(row, row.shared.tokens)
            # A NaN must not reach other rows, so this row gets columns of its own before it fails.
            row = row if prefix else replace(row, shared=None)
        self._positions.append(row.length, row.limit, row.shared)
        caches = innermost(row.layers)
        opened = self._opened or [
            kind_of(cache).of(cache, self._positions, self._max_rows) for cache in caches
        ]
        for layer, cache in zip(opened, caches, strict=True):
            layer.join(cache, row.index)
        if not self._opened:
            held = iter(opened)
            self.layers = [replaced(one, lambda _: next(held).model_cache) for one in row.layers]
            self._opened = opened
        self._ask_layers()
        if row.shared is not None and prefix is not None:
            for layer, arrays in zip(opened, prefix, strict=True):
                layer.hold_prefix(row.shared.number, arrays)

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self._positions.keep(order)
        for layer in self._opened:
            layer.keep(order)
        self._ask_layers()

    def clear(self) -> None:
        """Drop the batch."""
        self._positions = RowPositions(self._rule)
        self.layers, self._opened, self._checkpoint = [], [], None
        self._ask_layers()

    def open_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass; kinds without positions get each row's length without padding."""
        self._positions.open_pass(lengths)
        for layer in self._growing:
            if layer.grow_ahead():
                break  # the next layer's turn is the next pass
        self._padded = self._counting if lengths is not None and len(set(lengths)) > 1 else []
        for layer in self._padded:
            layer.set_lengths(lengths or ())

    def close_pass(self) -> None:
        """Drop the pass's padding from caches without positions."""
        for layer in self._padded:
            layer.drop_lengths()

    def checkpoint(self) -> None:
        """Save each row's length, and the state of layers without positions."""
        assert self.can_roll_back, "there is a way back"
        self._checkpoint_lengths = list(self._positions.lengths)
        self._checkpoint = CacheCheckpoint(layer.checkpoint() for layer in self._counting)

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Remove each row's last positions; returns False for recurrent state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None, "there is a checkpoint"
        lengths = zip(self._positions.lengths, self._checkpoint_lengths, strict=True)
        added = [new - old for new, old in lengths]
        is_done = checkpoint.roll_back(counts, added)
        if not is_done or any(counts):
            self._positions.cut(counts if is_done else added)
        return is_done

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's own keys and values from a position on."""
        for layer in self._opened:
            layer.wipe(row, begin)

    def growth_bytes(self, joining: Sequence[JoiningRow], tokens: int, bytes_per_token: int) -> int:
        """Bytes by which the slabs grow in the next layout, plus those that each other layer adds.

        Old arrays are freed once their rows are copied, a layer at a time.
        """
        other_bytes = sum(layer.added_bytes(joining, tokens) for layer in self._columnless)
        # A layer grows ahead of need, while the arrays of another one are being copied.
        other_bytes += 2 * max((layer.nbytes for layer in self._growing), default=0)
        before, after = self._positions.layout, self._positions.after(joining, tokens)
        if before == after:
            return other_bytes
        slab_bytes = held_bytes([layer for layer in self._opened if layer.has_columns])
        columns = sum(slab.places * slab.columns for slab in after)
        shared = {one.shared for one in joining if one.shared is not None}
        columns += sum(
            one.tokens for one in shared.union(self._positions.shared) if one is not None
        )
        layers = max(len(self._opened), 1)
        return max(0, columns * bytes_per_token - slab_bytes) + slab_bytes // layers + other_bytes

    def _ask_layers(self) -> None:
        """Ask the layers once for their abilities with the current rows, so that no pass has to."""
        rows = len(self._positions.lengths)
        self._growing = [layer for layer in self._opened if layer.grows_ahead]
        self._counting = [layer for layer in self._opened if not layer.follows_positions]
        self._columnless = [layer for layer in self._opened if not layer.has_columns]
        self._can_roll_back = all(rows <= layer.max_rolled_back_rows for layer in self._opened)


def _copies_without_nan(row: PrefilledRow, tokens: int) -> list[tuple[mx.array, ...]] | None:
    """Copy a row's first positions, [1, heads, tokens, n] of each cache's arrays, and wait for it; None if there is a NaN."""
    copies = [
        tuple(mx.contiguous(array[:, :, :tokens]) for array in kv_arrays(cache, row.index) or ())
        for cache in innermost(row.layers)
    ]
    has_nan = mx.any(mx.stack([mx.isnan(array).any() for arrays in copies for array in arrays]))
    mx.eval(copies)  # or they would keep the row's own caches alive
    return None if has_nan.item() else copies


def padded_caches(
    prompts: Sequence[Sequence[int]], layer_count: int, kv_format: KvFormat = PLAIN
) -> tuple[list[Cache], mx.array]:
    """Make caches, and padded tokens int32 [rows, longest], to compute whole prompts of a standard model in one call.

    Rows start at position 0 and are padded at their ends, where causal attention cannot see it; the
    padding's columns lie after the row's end.
    """
    positions = RowPositions(OneSlab(len(prompts)))
    lengths = [len(prompt) for prompt in prompts]
    for length in lengths:
        positions.append(0, length)
    positions.open_pass(lengths)
    longest = max(lengths)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    caches: list[Cache] = [SlabCache(positions, kv_format) for _ in range(layer_count)]
    return caches, mx.array(padded, dtype=mx.int32)
