"""The keys, values and states that one model's rows have: caches for its prompts, and lanes for its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.batch_lane import BatchLaneKv, padded_caches
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import LaneKv
from machd.engine.kv.row_caches import make_room, make_row_caches
from machd.engine.kv.serial_lane import SerialLaneKv


@dataclass(frozen=True, slots=True)
class ModelKv:
    """Makes the caches and lanes of one model.

    Attributes:
        kv_format: Format of keys and values.
        layer_count: Caches that the model takes.
        can_pad: Padding at a prompt's end changes nothing: every cache is a standard one, and attention is blind
            to tokens after its own.
        has_length_classes: The model's attention reads slab by slab, so rows may lie in several.
    """

    model: LanguageModel
    kv_format: KvFormat
    layer_count: int
    can_pad: bool
    has_length_classes: bool

    def row_caches(self) -> list[Cache]:
        """Make empty caches of one row."""
        return make_row_caches(self.model, self.kv_format)

    def make_room(self, caches: Sequence[Cache], tokens: int) -> None:
        """Have a row's caches grow for so many tokens when they grow next."""
        make_room(caches, tokens)

    def padded_caches(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Cache], mx.array]:
        """Make caches and token ids int32 [rows, longest] to compute whole prompts in one call; see ``can_pad``."""
        return padded_caches(prompts, self.layer_count, self.kv_format)

    def batch_lane(self, max_rows: int) -> LaneKv:
        """Make a lane of rows that are computed together."""
        return BatchLaneKv(max_rows, has_length_classes=self.has_length_classes)

    def serial_lane(self) -> LaneKv:
        """Make a lane of one row."""
        return SerialLaneKv()
