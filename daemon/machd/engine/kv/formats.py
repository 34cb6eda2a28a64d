"""How keys and values are kept: as they are, or in fewer bits."""

from __future__ import annotations

from machd.engine.kv.affine import AffineFormat
from machd.engine.kv.kv_format import KvFormat, PlainFormat
from machd.engine.kv.turboquant import TurboQuantFormat

PLAIN = PlainFormat()

_FORMATS: dict[str, KvFormat] = {
    one.name: one for one in (PLAIN, AffineFormat(8), AffineFormat(4), TurboQuantFormat())
}


def kv_format_named(name: str) -> KvFormat:
    """The format of a value of ``cache.kv_quantization``."""
    return _FORMATS[name]
