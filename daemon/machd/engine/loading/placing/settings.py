"""Settings of a model's placement in memory."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.experts.residency import Residency
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.loading.placing.sharding import Sharding


@dataclass(frozen=True, slots=True)
class PlacingSettings:
    """Settings of a model's placement in memory.

    Attributes:
        dtype: ``model.dtype``: ``auto``, ``float32``, ``float16`` or ``bfloat16``; see ``precision.choose_dtype``.
        residency: Memory for the experts; None to keep the whole model in memory.
        limit_bytes: Memory for the weights of a model among others; None for what is available. The dtype depends on it, so
            it must not change from one load to the next.
        sharding: The ranks that compute the model, of which this one places its shard; None for one process.
    """

    dtype: str = "auto"
    quantize: str | None = None
    kv_format: KvFormat = PLAIN
    residency: Residency | None = None
    sharding: Sharding | None = None
    limit_bytes: int | None = None
