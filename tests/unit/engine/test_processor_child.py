"""Decoding of images in the process that runs beside the daemon."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from support.clients import image_files

from machd.engine.vision.processor_child import (
    _MAX_SCANS,
    ProcessRequest,
    _decoded_image,
    _RefusedError,
    _scans,
)
from machd.request.media import MediaKind


def _request(content: bytes) -> ProcessRequest:
    return ProcessRequest(
        kind=MediaKind.IMAGE,
        content=content,
        placeholder="",
        fps=None,
        max_frames=1,
        max_pixels=100_000,
        limit_s=10.0,
        memory_bytes=1 << 30,
    )


def test_an_image_of_16_bits_keeps_its_shades() -> None:
    """Its upper bits are what is shown to the model; nothing is clipped to white."""
    shown = np.asarray(_decoded_image(_request(image_files.deep_png())))
    assert shown.shape == (64, 64, 3)
    assert set(shown[:, :32].flat) == {0x20}
    assert set(shown[:, 32:].flat) == {0xE0}


@pytest.mark.parametrize("scans", [10, 11, _MAX_SCANS, _MAX_SCANS + 1, 400])
def test_scans_of_a_jpeg_are_bounded(scans: int) -> None:
    """Each costs as much as all pixels, so that a file of 112 kB could take 11 s."""
    content = image_files.jpeg_of_scans(scans)
    assert _scans(content) == scans
    if scans <= _MAX_SCANS:
        assert _decoded_image(_request(content)).size == (112, 84)
        return
    with pytest.raises(_RefusedError, match="more than 64 scans"):
        _decoded_image(_request(content))


@pytest.mark.parametrize("filling", [b"\0", b"junk", b"\xff\xd0", b"\xff\x01"])
def test_scans_behind_what_decoders_pass_over_are_counted(filling: bytes) -> None:
    """Bytes that are no marker, and markers without a segment, end neither the image nor the count."""
    content = image_files.jpeg_of_scans(100)
    at = content.index(b"\xff\xda")
    assert _scans(content[:at] + filling + content[at:]) == 100


@pytest.mark.parametrize("seed", range(20))
def test_scans_in_what_a_jpeg_carries_along_are_not_its_own(seed: int) -> None:
    """A colour profile, EXIF data and comments may hold any bytes, those of a scan's marker too."""
    source = random.Random(seed)
    marker = b"\xff\xda\x00\x0c" * source.randint(1, 200)
    profile = b"\0" * source.randint(0, 99) + marker * source.randint(1, 300)
    content = image_files.encoded(
        image_files.picture(),
        "JPEG",
        progressive=True,
        icc_profile=profile,
        comment=marker,
        exif=b"Exif\0\0" + marker[:60_000],
    )
    plain = image_files.encoded(image_files.picture(), "JPEG", progressive=True)
    assert _scans(content) == _scans(plain) == 10


@pytest.mark.parametrize("seed", range(200))
def test_scans_of_a_damaged_jpeg_are_counted_without_a_fault(seed: int) -> None:
    """Cut short, or with bytes of its own choosing, a file ends the count."""
    source = random.Random(seed)
    content = bytearray(image_files.jpeg_of_scans(20))
    for _ in range(source.randint(0, 30)):
        content[source.randrange(len(content))] = source.choice((0xFF, 0xDA, source.randrange(256)))
    cut = bytes(content[: source.randint(0, len(content))])
    assert 0 <= _scans(cut) <= len(cut)
    assert _scans(os.urandom(64)) in range(33)
