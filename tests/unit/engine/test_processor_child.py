"""Decoding of images in the process that runs beside the daemon."""

from __future__ import annotations

import numpy as np
from support.clients import image_files

from machd.engine.vision.processor_child import ProcessRequest, _decoded_image
from machd.request.media import MediaKind


def test_an_image_of_16_bits_keeps_its_shades() -> None:
    """Its upper bits are what is shown to the model; nothing is clipped to white."""
    request = ProcessRequest(
        kind=MediaKind.IMAGE,
        content=image_files.deep_png(),
        placeholder="",
        fps=None,
        max_frames=1,
        max_pixels=10_000,
        limit_s=1.0,
        memory_bytes=1 << 30,
    )
    shown = np.asarray(_decoded_image(request))
    assert shown.shape == (64, 64, 3)
    assert set(shown[:, :32].flat) == {0x20}
    assert set(shown[:, 32:].flat) == {0xE0}
