"""How keys and values are kept: as they are, or in fewer bits."""

from __future__ import annotations

from machd.engine.affine_format import AffineFormat
from machd.engine.kv_planes import FoldedKv, FoldedVectors, KvFormat, KvWidths, PlainFormat
from machd.engine.turboquant import TurboQuantFormat

__all__ = ["PLAIN", "FoldedKv", "FoldedVectors", "KvFormat", "KvWidths", "kv_format_named"]

PLAIN = PlainFormat()

_FORMATS: dict[str, KvFormat] = {
    one.name: one for one in (PLAIN, AffineFormat(8), AffineFormat(4), TurboQuantFormat())
}


def kv_format_named(name: str) -> KvFormat:
    """The format of a value of ``cache.kv_quantization``."""
    return _FORMATS[name]
