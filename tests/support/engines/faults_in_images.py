"""Faults to plant into images: embeddings of another row, positions, and hashes that collide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from machd.engine.protocol.media import Media, MediaBounds, MediaSpan
from machd.engine.vision.media_encoder import MediaEncoder
from machd.engine.vision.media_processor import CheckpointProcessor
from machd.request.media import MediaSource

_SAME = b"the same of every image"


def a_neighbours_image_is_seen(patch: pytest.MonkeyPatch) -> None:
    """A row gets the embeddings of the image that the row before it was given, if both have as many tokens."""
    right = MediaEncoder.inputs
    before: dict[int, Media] = {}

    def inputs(
        self: MediaEncoder, keys: Sequence[int], start: int, spans: Sequence[MediaSpan]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        shown = [
            MediaSpan(span.start, before.get(len(span.media.token_ids), span.media))
            for span in spans
        ]
        before.update((len(span.media.token_ids), span.media) for span in spans)
        return right(self, keys, start, shown)

    patch.setattr(MediaEncoder, "inputs", inputs)


def positions_behind_an_image_are_one_ahead(patch: pytest.MonkeyPatch) -> None:
    """Tokens decoded behind an image are a position further than they should be."""
    right = MediaEncoder.shift

    def shift(self: MediaEncoder, spans: Sequence[MediaSpan]) -> int:
        return right(self, spans) + bool(spans)

    patch.setattr(MediaEncoder, "shift", shift)


def embeddings_are_kept_by_one_hash(patch: pytest.MonkeyPatch) -> None:
    """All images have one hash, so that the encoder's cache gives the embeddings of another one."""
    right = CheckpointProcessor.process

    def process(
        self: CheckpointProcessor, source: MediaSource, bounds: MediaBounds, *given: Any
    ) -> Media:
        media = right(self, source, bounds, *given)
        tokens = len(media.token_ids).to_bytes(4, "little")
        return _with_keys(replace(media, digest=_SAME + tokens), media.keys)

    patch.setattr(CheckpointProcessor, "process", process)


def keys_are_the_same_of_every_image(patch: pytest.MonkeyPatch) -> None:
    """Images of as many tokens have the same keys, so that the prefix cache takes one for the other."""
    right = CheckpointProcessor.process

    def process(
        self: CheckpointProcessor, source: MediaSource, bounds: MediaBounds, *given: Any
    ) -> Media:
        media = right(self, source, bounds, *given)
        return _with_keys(replace(media), replace(media, digest=_SAME).keys)

    patch.setattr(CheckpointProcessor, "process", process)


def _with_keys(media: Media, keys: tuple[int, ...]) -> Media:
    media.__dict__["keys"] = keys
    return media
