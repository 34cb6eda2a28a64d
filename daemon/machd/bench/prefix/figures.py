"""All that ``machd bench --prefix`` found out, for one mode."""

from __future__ import annotations

from msgspec import Struct

from machd.bench.prefix.full_cache import FullCacheFigures
from machd.bench.prefix.kv_formats import KvFormatFigures
from machd.bench.prefix.latency import PrefixLatencyFigures
from machd.bench.prefix.sharing import SharingFigures
from machd.bench.prefix.steps import StepFigures


class PrefixFigures(Struct, frozen=True, kw_only=True):
    """What was measured of one mode; null or empty what was not.

    Attributes:
        skipped: What was not, and why, a sentence each.
    """

    mode: str
    steps: list[StepFigures]
    latency: PrefixLatencyFigures
    sharing: SharingFigures | None
    full_cache: FullCacheFigures | None
    kv_formats: list[KvFormatFigures]
    skipped: list[str]
