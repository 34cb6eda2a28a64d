"""An image is encoded in stages, between which the engine computes other rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any
from unittest.mock import create_autospec

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from support.clocks.manual_clock import ManualClock

from machd.engine.protocol.media import Media, MediaEncodingError, MediaProcessor, PlainArray
from machd.engine.protocol.memory import StepMemoryError
from machd.engine.protocol.step import EncodeRow
from machd.engine.vision.media_encoder import MediaEncoder
from machd.engine.vision.vision_model import VisionLanguageModel
from machd.errors import InvalidRequestError
from machd.request.media import MediaKind

_DIM = 8
_TOKENS = 4
_LAYERS = 3


class _Features:
    """What mlx-vlm's models give."""

    def __init__(self, embeddings: mx.array) -> None:
        self._embeddings = embeddings

    def to_dict(self) -> dict[str, mx.array | None]:
        names = ("per_layer_inputs", "deepstack_visual_embeds", "visual_pos_masks")
        return {"inputs_embeds": self._embeddings, **dict.fromkeys(names)}


class _Tower(Module):
    """A vision tower of a few layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = [Linear(_DIM, _DIM) for _ in range(_LAYERS)]

    def __call__(self, pixels: mx.array) -> mx.array:
        for block in self.blocks:
            pixels = block(pixels)
        return pixels


class _Model(Module):
    """A model of mlx-vlm's shape, whose encoder can be told to fail."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        mx.random.seed(0)
        self.vision_tower = _Tower()
        self.language_model = Linear(_DIM, _DIM)
        self.fails = False
        self.calls = 0

    def get_input_embeddings(
        self, _token_ids: mx.array, pixels: mx.array, **_named: Any
    ) -> _Features:
        self.calls += 1
        if self.fails:
            raise ValueError("no such image")
        return _Features(self.vision_tower(pixels)[None])


def _media(digest: bytes) -> Media:
    pixels = np.frombuffer(digest * _TOKENS * _DIM, dtype=np.uint8)[: _TOKENS * _DIM]
    array = pixels.astype(np.float32).reshape(_TOKENS, _DIM) / 255
    plain = PlainArray(array.shape, array.dtype.str, memoryview(array.tobytes()))
    return Media(MediaKind.IMAGE, digest, (5,) * _TOKENS, {"pixel_values": plain})


@pytest.fixture(name="model")
def _fixture_model() -> _Model:
    return _Model()


def _encoder(
    model: _Model, max_bytes: int = 10**6, *, left_bytes: Sequence[int] = (10**9,)
) -> MediaEncoder:
    """Make an encoder; ``left_bytes`` are what its readings find, the last one again and again."""
    readings = chain(left_bytes, repeat(left_bytes[-1]))
    return MediaEncoder(
        VisionLanguageModel(model),
        create_autospec(MediaProcessor),
        ManualClock(),
        max_bytes=max_bytes,
        read_usable_bytes=lambda: next(readings),
    )


def _embeddings(encoder: MediaEncoder, media: Media) -> mx.array:
    return encoder._encoded_now(media).by_token["inputs_embeds"]


def test_an_image_in_stages_is_the_image_at_once(model: _Model) -> None:
    """Paused after each module, the embeddings are those of one uninterrupted call."""
    media = _media(b"a")
    staged, whole = _encoder(model), _encoder(model)
    rows = (EncodeRow(0, media),)
    pauses = 0
    while not staged.encode(rows, limit_s=0.0).encoded:
        pauses += 1
    assert pauses >= _LAYERS, "it pauses between the tower's layers"
    assert model.calls == 1
    assert mx.array_equal(_embeddings(staged, media), _embeddings(whole, media)).item()
    assert (staged.reading().misses, staged.reading().entries) == (1, 1)
    assert staged.encode(rows, limit_s=0.0).encoded == (media.digest,), "what is known is ready"
    assert staged.reading().hits == 1


def test_what_is_begun_goes_on_whatever_comes_before_it(model: _Model) -> None:
    """A more urgent image does not throw away what is half done, or neither would ever end."""
    first, second = _media(b"a"), _media(b"b")
    encoder = _encoder(model)
    encoder.encode((EncodeRow(0, first),), limit_s=0.0)
    rows = (EncodeRow(1, second), EncodeRow(0, first))
    done: list[bytes] = []
    while len(done) < 2:
        done += [one for one in encoder.encode(rows, limit_s=0.0).encoded if one not in done]
    assert done == [first.digest, second.digest]
    assert model.calls == 2


def test_what_nobody_waits_for_is_dropped(model: _Model) -> None:
    """A request that leaves takes its half encoded image with it."""
    first, second = _media(b"a"), _media(b"b")
    encoder = _encoder(model)
    encoder.encode((EncodeRow(0, first),), limit_s=0.0)
    encoder.encode((EncodeRow(1, second),), limit_s=0.0)
    assert list(encoder._begun) == [second.digest]


def test_an_encoder_that_fails_fails_its_row(model: _Model) -> None:
    """Another row's image is encoded all the same."""
    encoder = _encoder(model)
    first, second = _media(b"a"), _media(b"b")
    model.fails = True
    outcome = encoder.encode((EncodeRow(3, first),), limit_s=1.0)
    assert [one.slot_index for one in outcome.faults] == [3]
    assert isinstance(outcome.faults[0].cause, MediaEncodingError)
    model.fails = False
    assert encoder.encode((EncodeRow(4, second),), limit_s=1.0).encoded == (second.digest,)


def test_an_image_larger_than_the_cache_is_kept_until_its_row_is_past_prefill(
    model: _Model,
) -> None:
    """It is encoded once, in stages, and never by the chunk that needs it."""
    media = _media(b"a")
    encoder = _encoder(model, max_bytes=8)
    assert encoder.encode((EncodeRow(0, media),), limit_s=1.0).encoded == (media.digest,)
    assert _embeddings(encoder, media).shape == (1, _TOKENS, _DIM)
    assert model.calls == 1
    encoder.forget_rows((0,))
    assert encoder.reading().entries == 0


def test_a_row_that_leaves_takes_its_half_encoded_image_along(model: _Model) -> None:
    """Its arrays do not wait for the next image."""
    encoder = _encoder(model)
    encoder.encode((EncodeRow(0, _media(b"a")),), limit_s=0.0)
    encoder.forget_rows((0,))
    assert not encoder._begun


def test_an_image_that_does_not_fit_fails_its_row_alone(model: _Model) -> None:
    """Nothing of it is computed: the row fails with what it needs and what is left, and another row's is encoded."""
    encoder = _encoder(model, left_bytes=(10**9, 10**9, 0, 0, 10**9))
    outcome = encoder.encode((EncodeRow(3, _media(b"a")), EncodeRow(4, _media(b"b"))), limit_s=1.0)
    (fault,) = outcome.faults
    assert fault.slot_index == 3
    assert isinstance(fault.cause, StepMemoryError)
    assert fault.cause.needed_bytes > 0
    assert outcome.encoded == (b"b",)


def test_an_image_that_no_idle_server_could_encode_is_the_clients_mistake(model: _Model) -> None:
    """To wait would not help: the error says to send a smaller one."""
    encoder = _encoder(model, left_bytes=(100,))
    (fault,) = encoder.encode((EncodeRow(0, _media(b"a")),), limit_s=1.0).faults
    assert isinstance(fault.cause, InvalidRequestError)
    assert "send a smaller one" in fault.cause.message


def test_a_stage_that_no_longer_fits_fails_its_row(model: _Model) -> None:
    """Other rows may have grown since the encoding began."""
    encoder = _encoder(model, left_bytes=(10**9,) * 4 + (0,))
    row = EncodeRow(0, _media(b"a"))
    assert not encoder.encode((row,), limit_s=0.0).faults
    (fault,) = encoder.encode((row,), limit_s=0.0).faults
    assert isinstance(fault.cause, StepMemoryError)
    assert not encoder._begun
