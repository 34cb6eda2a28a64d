"""What every encoder promises, the fake one of the tests and those that mlx computes: one suite, so that the fake stays honest."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.engines.fake_encoder import FakeEncoder
from support.engines.loaded_encoder import Vectors, loaded_encoder, vectors

from machd.engine.protocol.encoder import Activation, Encoder, EncoderInput, EncoderTask
from machd.engine.protocol.media import PlainArray
from machd_probes.encoder_matrix.tiny_checkpoint import token_ids, write_encoder
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS

_NEAR = 1e-4
"""Rounding was measured at 3e-6; a neighbour's token moves numbers by more than 0.01."""

_FAKES = ("fake", "fake that packs")
_LOADED = ("bert", "bert-reranker", "xlm-roberta", "roberta-classifier", "modernbert", "qwen3")


@pytest.fixture(name="directories", scope="module")
def _directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of tiny models."""
    parent = tmp_path_factory.mktemp("encoders")
    return {name: write_encoder(parent / name, TINY_ENCODERS[name]) for name in _LOADED}


@pytest.fixture(name="encoder", params=[*_FAKES, *_LOADED])
def _encoder(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Encoder]:
    """Every encoder, one after the other."""
    name = request.param
    if name in directories:
        encoder = loaded_encoder(directories[name])
    else:
        encoder = FakeEncoder(packs=name != "fake")
    yield encoder
    encoder.close()


def _texts(encoder: Encoder) -> list[EncoderInput]:
    """Texts of many lengths, the longest that there may be and one of one token among them; and pairs."""
    assert encoder.model.encoder is not None
    lengths = (1, 7, encoder.model.encoder.max_input_tokens, 2, 19)
    texts = [EncoderInput(token_ids(one)) for one in lengths]
    pairs = [EncoderInput(token_ids(one, seed=4), second_from=one // 2) for one in (12, 30)]
    return [*texts, *pairs]


def _assert_near(found: Vectors, wanted: Vectors) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= _NEAR


def _assert_company_changes_nothing(encoder: Encoder) -> None:
    """Hold an encoder to the numbers of each text alone: in a pass, in another order, beside a text of another length, twice."""
    texts = _texts(encoder)
    alone = np.concatenate([vectors(encoder, [one]) for one in texts])
    assert len({tuple(row) for row in alone}) == len(texts), "texts differ"
    _assert_near(vectors(encoder, texts), alone)
    _assert_near(vectors(encoder, texts[::-1]), alone[::-1])
    short = EncoderInput(token_ids(3, seed=9))
    for place, one in enumerate(texts):
        _assert_near(vectors(encoder, [short, one])[1:], alone[place : place + 1])
        _assert_near(vectors(encoder, [one, short])[:1], alone[place : place + 1])
    _assert_near(vectors(encoder, [texts[1]] * 3), alone[[1, 1, 1]])


def _assert_answers_have_the_described_form(encoder: Encoder) -> None:
    """Hold an encoder to float32 numbers, [inputs, dimensions], that are finite, and of length 1 where it says so."""
    description = encoder.model.encoder
    assert description is not None
    texts = _texts(encoder)
    for count in range(1, len(texts) + 1):
        made = encoder.encode(texts[:count])
        assert (made.shape, made.dtype) == ((count, description.dimensions), "float32")
        assert len(made.content) == 4 * count * description.dimensions
        numbers = np.frombuffer(made.content, np.float32).reshape(made.shape)
        assert np.isfinite(numbers).all()
        lengths = np.linalg.norm(numbers, axis=1)
        assert not description.is_normalised or np.abs(lengths - 1).max() <= _NEAR


def _assert_refuses_what_no_front_sends(encoder: Encoder) -> None:
    """Hold an encoder to stop at tokens outside its table, at a text without tokens and at one that is too long; and to go on."""
    description = encoder.model.encoder
    assert description is not None
    too_long = token_ids(description.max_input_tokens + 1)
    beyond = encoder.model.vocabulary_tokens
    for tokens in ((), (-1,), (5, beyond), too_long):
        with pytest.raises(AssertionError):
            encoder.encode([EncoderInput(token_ids(4)), EncoderInput(tokens)])
    assert vectors(encoder, [EncoderInput((beyond - 1,))]).shape == (1, description.dimensions)


def test_company_changes_nothing(encoder: Encoder) -> None:
    """A text has the same numbers alone and in any pass, whatever its place and its neighbours."""
    _assert_company_changes_nothing(encoder)


def test_answers_have_the_described_form(encoder: Encoder) -> None:
    """Numbers are as many as described, for every number of texts, in their order."""
    _assert_answers_have_the_described_form(encoder)


def test_what_no_front_sends_is_refused(encoder: Encoder) -> None:
    """A fault of the caller reads nothing outside a table, and the next pass is computed."""
    _assert_refuses_what_no_front_sends(encoder)


def test_description_agrees_with_itself(encoder: Encoder) -> None:
    """The front cuts texts, names labels and activates logits by the description alone."""
    model, description = encoder.model, encoder.model.encoder
    assert description is not None
    assert model.context_tokens == description.max_input_tokens > 0
    assert model.vocabulary_tokens > 0
    assert description.dimensions > 0
    assert isinstance(encoder.packs, bool)
    if description.task is EncoderTask.CLASSIFY:
        assert len(description.labels) == description.dimensions
        assert description.pooling == ""
        assert not description.is_normalised
    else:
        assert description.labels == ()
        assert description.activation is Activation.NONE
        assert description.pooling
    assert model.cache.bytes_per_token == model.cache.bytes_per_sequence == 0


def _counted_bytes(encoder: Encoder) -> int:
    """Weights that the array library holds: those of machd's own kernels lie in large pages, which it does not count."""
    return 0 if encoder.packs else encoder.model.weights_bytes


def test_memory_is_told_and_holds_the_weights(encoder: Encoder) -> None:
    """Readings have no keys and values, hold the weights at least, and no pass leaves much behind."""
    texts = _texts(encoder)
    vectors(encoder, texts)
    before = encoder.memory()
    for _ in range(3):
        vectors(encoder, texts)
    after = encoder.memory()
    for one in (before, after):
        assert one.kv_used_bytes == 0
        assert one.peak_bytes >= one.active_bytes >= _counted_bytes(encoder)
        assert one.cache_bytes >= 0
    assert after.active_bytes <= before.active_bytes


def test_closed_encoder_computes_nothing(encoder: Encoder) -> None:
    """After ``close`` the weights are given back, so that a pass is the caller's fault; the description stays."""
    text = [EncoderInput(token_ids(5))]
    vectors(encoder, text)
    most_bytes = encoder.memory().active_bytes - _counted_bytes(encoder) // 2
    encoder.close()
    assert encoder.memory().active_bytes <= most_bytes
    with pytest.raises(AssertionError):
        encoder.encode(text)
    assert encoder.model.encoder is not None


def _changed(change: Callable[[Sequence[EncoderInput], list[float]], list[float]]) -> Encoder:
    """A fake encoder whose numbers are changed."""

    class _Faulty(FakeEncoder):
        def encode(self, inputs: Sequence[EncoderInput]) -> PlainArray:
            right = super().encode(inputs)
            numbers = change(inputs, [*right.content.cast("f")])
            content = memoryview(array("f", numbers).tobytes())
            return PlainArray((len(inputs), len(numbers) // len(inputs)), "float32", content)

    return _Faulty()


@pytest.mark.parametrize(
    "change",
    [
        lambda _inputs, numbers: numbers[2:] + numbers[:2],  # the neighbour's row
        lambda inputs, numbers: [one + len(inputs) - 1 for one in numbers],
        lambda inputs, numbers: [*numbers[:-1], float(max(len(one.token_ids) for one in inputs))],
        lambda _inputs, numbers: [1.0 for _ in numbers],
    ],
    ids=["a neighbour's row", "how many there are", "the longest's length", "all alike"],
)
def test_an_encoder_that_sees_its_neighbours_is_noticed(
    change: Callable[[Sequence[EncoderInput], list[float]], list[float]],
) -> None:
    """The suite fails for encoders that break its promise about company."""
    with pytest.raises(AssertionError):
        _assert_company_changes_nothing(_changed(change))


def test_an_encoder_of_another_form_is_noticed() -> None:
    """The suite fails where a number is missing, or is none."""
    wrong: list[Callable[[Sequence[EncoderInput], list[float]], list[float]]] = [
        lambda inputs, numbers: numbers + [0.0] * len(inputs),
        lambda _inputs, numbers: [float("nan"), *numbers[1:]],
    ]
    for change in wrong:
        with pytest.raises(AssertionError):
            _assert_answers_have_the_described_form(_changed(change))


def test_an_encoder_that_takes_any_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite fails for an encoder that answers what no front sends."""
    answer = PlainArray((1, 2), "float32", memoryview(bytes(8)))
    monkeypatch.setattr(FakeEncoder, "encode", lambda _self, _inputs: answer)
    with pytest.raises(pytest.fail.Exception):
        _assert_refuses_what_no_front_sends(FakeEncoder())
