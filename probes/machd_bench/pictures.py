"""Images and videos of random blocks, as ``data:`` URLs in the parts of a chat message."""

from __future__ import annotations

import base64
import struct
import tempfile
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_BLOCK_PIXELS = 14
_FRAMES_PER_SECOND = 4.0

Part: TypeAlias = dict[str, object]
"""A part of a chat message's content."""

Pixels: TypeAlias = NDArray[np.uint8]
"""[height, width, 3]."""


class NoVideoWriterError(Exception):
    """OpenCV, which writes the videos, is not installed, or has no codec."""


def text_part(text: str) -> Part:
    """Return a text."""
    return {"type": "text", "text": text}


def image_part(seed: str, side: int, *, changed_pixels: int = 0) -> Part:
    """Draw a square image; with the same seed, images differ in ``changed_pixels`` alone."""
    pixels = _blocks(seed, side)
    pixels[0, :changed_pixels] ^= 1
    url = "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(seed: str, side: int, seconds: int, **fields: object) -> Part:
    """Draw a square video of unlike frames, 4 a second.

    Args:
        seed: Of the pixels.
        side: Width and height in pixels.
        seconds: How long it is.
        fields: More of the part, such as ``fps`` and ``max_frames``.

    Raises:
        NoVideoWriterError: It cannot be written here.
    """
    frames = [_blocks(f"{seed}/{n}", side) for n in range(round(seconds * _FRAMES_PER_SECOND))]
    url = "data:video/mp4;base64," + base64.b64encode(_mp4(frames)).decode()
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def _blocks(seed: str, side: int) -> Pixels:
    random = np.random.default_rng(list(seed.encode()))
    blocks = -(-side // _BLOCK_PIXELS)
    colours = random.integers(0, 256, (blocks, blocks, 3), dtype=np.uint8)
    pixels = colours.repeat(_BLOCK_PIXELS, axis=0).repeat(_BLOCK_PIXELS, axis=1)
    return pixels[:side, :side].copy()


def _png(pixels: Pixels) -> bytes:
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def _mp4(frames: list[Pixels]) -> bytes:
    try:
        import cv2  # noqa: PLC0415 - a dependency of the extra vision
    except ImportError:
        raise NoVideoWriterError(
            "OpenCV, which comes with machd[vision], is not installed"
        ) from None
    height, width, _ = frames[0].shape
    with tempfile.TemporaryDirectory(prefix="machd-bench-") as directory:
        path = Path(directory) / "video.mp4"
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(path), codec, _FRAMES_PER_SECOND, (width, height))
        if not writer.isOpened():
            raise NoVideoWriterError("OpenCV cannot write MP4 files here")
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
        writer.release()
        return path.read_bytes()
