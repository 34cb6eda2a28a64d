"""Pictures drawn from a seed: every format, size, mode and damage that a client may send."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from support.clients.image_files import encoded, gif, jpeg_of_scans, picture, png, webp, zeros

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")
_SIDES = (1, 2, 13, 14, 27, 28, 29, 100, 224, 641, 1200)


def _picture(source: random.Random, mode: str = "RGB", seed: int = 1) -> Any:
    return picture(mode, seed=seed, width=source.choice(_SIDES), height=source.choice(_SIDES))


def _plain(source: random.Random) -> bytes:
    """Return any mode in any format that takes it."""
    while True:
        image = _picture(source, seed=source.randint(0, 99))
        try:
            return encoded(image.convert(source.choice(_MODES)), source.choice(_FORMATS))
        except (OSError, ValueError):
            continue


def _truncated(source: random.Random) -> bytes:
    content = _plain(source)
    return content[: source.randrange(len(content))]


def _mutated(source: random.Random) -> bytes:
    content = bytearray(_plain(source))
    for _ in range(source.randint(1, 40)):
        content[source.randrange(len(content))] = source.randrange(256)
    return bytes(content)


def _animated(source: random.Random) -> bytes:
    width, height = source.choice(_SIDES), source.choice(_SIDES)
    first, *others = (
        picture(seed=seed, width=width, height=height) for seed in range(source.randint(2, 40))
    )
    file_format = source.choice(("GIF", "WEBP", "PNG"))
    return encoded(first, file_format, save_all=True, append_images=others)


def _of_scans(source: random.Random) -> bytes:
    return jpeg_of_scans(source.choice((10, 11, 40, 64, 65, 100, 400, 5000)))


def _cmyk(source: random.Random) -> bytes:
    return encoded(_picture(source, "CMYK"), "JPEG", quality=source.randint(1, 95))


def _deep(source: random.Random) -> bytes:
    width, height = source.choice(_SIDES), source.choice(_SIDES)
    colour_type, channels = source.choice(((0, 1), (2, 3), (4, 2), (6, 4)))
    rows = b"".join(b"\0" + source.randbytes(width * channels * 2) for _ in range(height))
    return png(width, height, zlib.compress(rows), bit_depth=16, colour_type=colour_type)


def _turned(source: random.Random) -> bytes:
    entry = b"\x12\x01\x03\0\x01\0\0\0" + source.choice(range(10)).to_bytes(2, "little") + b"\0\0"
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + source.randbytes(source.randint(0, 60_000))
    return encoded(_picture(source), "JPEG", exif=exif[:65_000])


def _profiled(source: random.Random) -> bytes:
    profile = source.randbytes(source.choice((1, 100, 70_000, 3_000_000)))
    file_format = source.choice(("PNG", "JPEG", "WEBP"))
    return encoded(_picture(source), file_format, icc_profile=profile)


def _bomb(source: random.Random) -> bytes:
    width, height = (source.choice((4096, 16_383, 30_000, 65_535)) for _ in range(2))
    kind = source.choice(("header", "inflating", "GIF", "WebP"))
    if kind == "GIF":
        return gif(width, height)
    if kind == "WebP":
        return webp(16_383, 16_383)
    content = b"" if kind == "header" else zeros(source.choice((1 << 20, 1 << 28)))
    return png(width, height, content)


GENERATED: Mapping[str, Callable[[random.Random], bytes]] = {
    "plain": _plain,
    "truncated": _truncated,
    "mutated": _mutated,
    "animated": _animated,
    "of scans": _of_scans,
    "CMYK": _cmyk,
    "16 bits": _deep,
    "EXIF": _turned,
    "colour profile": _profiled,
    "bomb": _bomb,
}
