"""The messages that families are asked: texts, images and videos, as a client sends them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from machd.request.media import MEDIA_KEY, MediaKind, MediaSource
from machd_probes.vision_families.media import block_image, block_video

if TYPE_CHECKING:
    from PIL.Image import Image

_FRAMES_A_SECOND = 4.0
_FRAMES = 8


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of blocks of random colours."""

    seed: int
    width: int = 112
    height: int = 84

    def picture(self) -> Image:
        """Draw it."""
        return block_image(self.seed, self.width, self.height)

    def content(self) -> bytes:
        """Encode it as PNG."""
        written = io.BytesIO()
        self.picture().save(written, "PNG")
        return written.getvalue()


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video of two seconds, whose frames are unlike each other."""

    seed: int

    def content(self) -> bytes:
        """Encode it as MP4."""
        import cv2  # noqa: PLC0415 - a dependency of the extra

        frames = block_video(self.seed, frames=_FRAMES)
        _, _, height, width = frames.shape
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "video.mp4"
            size, codec = (width, height), cv2.VideoWriter.fourcc(*"mp4v")
            writer = cv2.VideoWriter(str(path), codec, _FRAMES_A_SECOND, size)
            for frame in frames:
                writer.write(np.ascontiguousarray(frame.transpose(1, 2, 0)[..., ::-1]))
            writer.release()
            return path.read_bytes()


Turn: TypeAlias = tuple[str | ImagePart | VideoPart, ...]
"""A user's message."""

_QUESTION = "What is this?"
_FIRST, _SECOND, _TALL = ImagePart(1), ImagePart(2), ImagePart(3, 84, 140)

TURNS: Mapping[str, Turn] = {
    "an image": (_FIRST, _QUESTION),
    "another image": (_SECOND, _QUESTION),
    "two images": (_FIRST, _QUESTION, _SECOND, "And this?"),
    "two sizes": ("Look at this: ", _SECOND, " and then at that: ", _TALL, " What differs?"),
    "text": (_QUESTION,),
    "longer text": (
        "Name three colours of the rainbow, and say which one you would paint a door in.",
    ),
    "a second question": (_FIRST, "How many colours does it have?"),
    "a third question": (_FIRST, "Which of its corners is the darkest?"),
}
"""The first two images have one size, so that one could stand in the other's place unseen by any shape."""

VIDEO_TURNS: Mapping[str, Turn] = {
    "a video": (VideoPart(5), _QUESTION),
    "another video": (VideoPart(6), _QUESTION),
}


def message(turn: Turn) -> dict[str, object]:
    """Return a turn as serving reads it: a message with sources."""
    parts = [_part(one, f"messages[0].content[{number}]") for number, one in enumerate(turn)]
    if all(isinstance(one, str) for one in turn):
        return {"role": "user", "content": "".join(str(one) for one in turn)}
    return {"role": "user", "content": parts}


def _part(one: str | ImagePart | VideoPart, param: str) -> dict[str, object]:
    if isinstance(one, str):
        return {"type": "text", "text": one}
    kind = MediaKind.IMAGE if isinstance(one, ImagePart) else MediaKind.VIDEO
    return {"type": str(kind), MEDIA_KEY: MediaSource(kind, param, content=one.content())}
