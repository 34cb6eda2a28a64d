"""Image and video files, good and hostile, as clients may send them."""

from __future__ import annotations

import io
import re
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from machd_probes.vision_families.media import block_image, block_video


def picture(mode: str = "RGB", *, seed: int = 1, width: int = 112, height: int = 84) -> Any:
    """Make an image of blocks in a mode of Pillow's."""
    image = block_image(seed, width, height)
    return image if mode == "RGB" else image.convert(mode)


def encoded(image: Any, file_format: str, **options: object) -> bytes:
    """Write an image of Pillow's in a format."""
    written = io.BytesIO()
    image.save(written, file_format, **options)
    return written.getvalue()


def jpeg_of_scans(scans: int, *, width: int = 112, height: int = 84) -> bytes:
    """Write a progressive JPEG whose last scan is repeated until there are so many."""
    grey = picture("L", width=8, height=8).resize((width, height)).convert("RGB")
    content = encoded(grey, "JPEG", progressive=True, quality=10)
    starts = [one.start() for one in re.finditer(rb"\xff\xda", content)]
    last = content[starts[-1] : -2]
    return content[:-2] + last * (scans - len(starts)) + content[-2:]


def deep_png() -> bytes:
    """Write a grey PNG of 16 bits a pixel whose left half is dark and whose right half is light."""
    values = np.full((64, 64), 0x2000, ">u2")
    values[:, 32:] = 0xE000
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    return png(64, 64, zlib.compress(rows), bit_depth=16, colour_type=0)


def png(
    width: int, height: int, compressed: bytes, *, bit_depth: int = 8, colour_type: int = 2
) -> bytes:
    """Write a PNG with any header in front of any compressed data."""
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*one) for one in ((b"IHDR", header), (b"IDAT", compressed), (b"IEND", b""))
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def zeros(count: int) -> bytes:
    """Compress so many zero bytes, whole mebibytes, without holding or compressing all of them."""
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    # Behind a full flush nothing refers to what came before, so that the piece may be repeated.
    piece = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    checksum = count % 65521 << 16 | 1  # Adler-32 of zeros
    header, end = zlib.compress(b"")[:2], compressor.flush()
    return b"".join((header, piece * (count >> 20), end, checksum.to_bytes(4, "big")))


def inflating_png() -> bytes:
    """Write a small PNG with a chunk of text that inflates to 2 GB."""
    plain = png(8, 8, zlib.compress((b"\0" + b"\x7f" * 24) * 8))
    text = _chunk(b"zTXt", b"Comment\0\0" + zeros(2 << 30))
    return plain[:33] + text + plain[33:]


def gif(width: int, height: int) -> bytes:
    """Write the beginning of a GIF with a screen of any size."""
    screen = struct.pack("<HH", width, height)
    frame = b"\x2c" + b"\0" * 4 + screen + b"\0"
    return b"GIF89a" + screen + b"\x80\0\0\0\0\0\xff\xff\xff" + frame + b"\x02\x02\x4c\x01\0;"


def webp(width: int, height: int) -> bytes:
    """Write an animated WebP with a canvas of any size around a small frame."""
    small = encoded(picture(), "WEBP", lossless=True)[12:]
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    frame = b"\0" * 6 + (111).to_bytes(3, "little") + (83).to_bytes(3, "little") + b"\x64\0\0\0"
    chunks = [
        (b"VP8X", b"\x02\0\0\0" + canvas),
        (b"ANIM", b"\0" * 6),
        (b"ANMF", frame + small),
    ]
    content = b"".join(
        kind + struct.pack("<I", len(one)) + one + b"\0" * (len(one) % 2) for kind, one in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WEBP" + content


def video(
    seed: int = 1,
    *,
    frames: int = 8,
    width: int = 112,
    height: int = 84,
    container: str = "mp4",
) -> bytes:
    """Write a video of unlike frames, four a second."""
    import cv2  # noqa: PLC0415 - a dependency of the extra

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"video.{container}"
        codec = cv2.VideoWriter.fourcc(*("VP80" if container == "webm" else "mp4v"))
        writer = cv2.VideoWriter(str(path), codec, 4.0, (width, height))
        for frame in block_video(seed, frames=frames, width=width, height=height):
            writer.write(np.ascontiguousarray(frame.transpose(1, 2, 0)[..., ::-1]))
        writer.release()
        return path.read_bytes()


def archive() -> bytes:
    """Write a ZIP file."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        file.writestr("a.png", encoded(picture(), "PNG"))
    return written.getvalue()


def iso_media(brand: bytes) -> bytes:
    """Write the beginning of an ISO media file of a brand, such as ``heic`` or ``avif``."""
    content = brand + b"\0" * 4 + brand + b"mif1"
    return struct.pack(">I", 8 + len(content)) + b"ftyp" + content + b"\0" * 64
