"""Images and a video for the tests of vision-language families."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

_BLOCK_PIXELS = 14


def block_image(seed: int, width: int = 112, height: int = 84) -> Image:
    """Make an image of blocks of random colours."""
    from PIL import Image as images  # noqa: PLC0415, N813 - an extra

    return images.fromarray(_blocks(seed, width, height))


def block_video(
    seed: int, frames: int = 4, width: int = 112, height: int = 84
) -> NDArray[np.uint8]:
    """Make a video whose frames are unlike each other: uint8 [frames, channels, height, width]."""
    pictures = [_blocks(seed + number, width, height) for number in range(frames)]
    return np.stack(pictures).transpose(0, 3, 1, 2)


def _blocks(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    shape = (-(-height // _BLOCK_PIXELS), -(-width // _BLOCK_PIXELS), 3)
    colours = random.integers(0, 256, shape, dtype=np.uint8)
    pixels = colours.repeat(_BLOCK_PIXELS, axis=0).repeat(_BLOCK_PIXELS, axis=1)
    return pixels[:height, :width]
