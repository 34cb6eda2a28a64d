"""The KV of the rows that share a forward pass: one object of its kind for each cache of the model.

Standard caches become a :class:`~machd.engine.kv.layers.slab.SlabKv` a layer, in their KV format, and windows
a :class:`~machd.engine.kv.layers.window.WindowKv`. Others stay in mlx-lm's own arrays. Caches inside mlx-lm's
cache lists become the same kinds.

The first row with a shared prefix brings the prefix's arrays, and all rows of that prefix read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.lane_kv import JoiningRow, LaneKv, PrefilledRow, held_bytes
from machd.engine.kv.layers.batched_cache import BatchedCache
from machd.engine.kv.layers.kinds import kind_of
from machd.engine.kv.layers.slab import SlabKv
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
        self.caches: list[Cache] = []
        self._layers: list[BatchedCache] = []  # of ``caches``, lists flattened
        self._told_lengths: list[BatchedCache] = []
        self._refresh_layer_groups()

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
        caches = innermost(row.caches)
        layers = self._layers or [
            kind_of(cache).of(cache, self._positions, self._max_rows) for cache in caches
        ]
        for layer, cache in zip(layers, caches, strict=True):
            layer.join(cache, row.index)
        if not self._layers:
            in_order = iter(layers)  # `replaced` walks the caches in the order of `innermost`
            self.caches = [
                replaced(one, lambda _: next(in_order).model_cache) for one in row.caches
            ]
            self._layers = layers
        self._refresh_layer_groups()
        if row.shared is not None and prefix is not None:
            for layer, arrays in zip(layers, prefix, strict=True):
                layer.hold_prefix(row.shared.number, arrays)

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self._positions.select(order)
        for layer in self._layers:
            layer.select(order)
        self._refresh_layer_groups()

    def clear(self) -> None:
        """Drop the batch."""
        self._positions = RowPositions(self._rule)
        self.caches, self._layers, self._checkpoint = [], [], None
        self._refresh_layer_groups()

    def begin_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass; if it is padded, layers that count for themselves get each row's number of tokens."""
        self._positions.begin_pass(lengths)
        for layer in self._growing:
            if layer.grow_early():
                break  # the next layer's turn is the next pass
        is_padded = lengths is not None and len(set(lengths)) > 1
        self._told_lengths = self._self_positioned if is_padded else []
        for layer in self._told_lengths:
            layer.set_lengths(lengths or ())

    def end_pass(self) -> None:
        """Drop the pass's padding from the layers that count for themselves."""
        for layer in self._told_lengths:
            layer.drop_lengths()

    def checkpoint(self) -> None:
        """Save each row's length, and the state of layers that count for themselves."""
        assert self.can_roll_back, "there is a way back"
        self._checkpoint_lengths = list(self._positions.lengths)
        self._checkpoint = CacheCheckpoint(layer.checkpoint() for layer in self._self_positioned)

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
        for layer in self._layers:
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
        slab_bytes = held_bytes([layer for layer in self._layers if layer.has_columns])
        columns = sum(slab.places * slab.columns for slab in after)
        shared = {one.shared for one in joining if one.shared is not None}
        columns += sum(
            one.tokens for one in shared.union(self._positions.shared) if one is not None
        )
        layers = max(len(self._layers), 1)
        return max(0, columns * bytes_per_token - slab_bytes) + slab_bytes // layers + other_bytes

    def _refresh_layer_groups(self) -> None:
        """Group the layers by what they need of a pass with the current rows, so that no pass has to."""
        rows = len(self._positions.lengths)
        self._growing = [layer for layer in self._layers if layer.grows_early]
        self._self_positioned = [layer for layer in self._layers if not layer.follows_positions]
        self._columnless = [layer for layer in self._layers if not layer.has_columns]
        self._can_roll_back = all(rows <= layer.max_rolled_back_rows for layer in self._layers)


def _copies_without_nan(row: PrefilledRow, tokens: int) -> list[tuple[mx.array, ...]] | None:
    """Copy a row's first positions, [1, heads, tokens, n] of each cache's arrays, and wait for it; None if there is a NaN."""
    copies = [
        tuple(mx.contiguous(array[:, :, :tokens]) for array in kv_arrays(cache, row.index) or ())
        for cache in innermost(row.caches)
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
    positions.begin_pass(lengths)
    longest = max(lengths)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    caches: list[Cache] = [SlabKv(positions, kv_format) for _ in range(layer_count)]
    return caches, mx.array(padded, dtype=mx.int32)
