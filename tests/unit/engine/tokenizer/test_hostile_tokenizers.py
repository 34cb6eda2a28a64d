"""A checkpoint's tokenizer fails in our own errors, and takes no more than it may. The panics are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from unit.engine.tiny_llama import TinyLlama

from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.tokenizer_files import check_growth
from machd.errors import ModelFormatError
from machd.panics import ENDINGS, PanicError, panics_as_errors

_FIXED_LENGTH: dict[str, object] = {"type": "FixedLength", "length": 0}
"""A pre-tokenizer that panics over every text."""


def _change(tiny: TinyLlama, **parts: object) -> None:
    path = tiny.path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}), encoding="utf-8")


def _replace(content: str, *, regex: str | None = None) -> dict[str, object]:
    pattern = {"String": "a"} if regex is None else {"Regex": regex}
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_a_panic_while_a_text_is_encoded_is_an_error(tiny: TinyLlama) -> None:
    """The error is machd's, with the library's as its cause."""
    _change(tiny, pre_tokenizer=_FIXED_LENGTH)
    tokenizer = load_model(tiny.source).tokenizer
    with pytest.raises(PanicError) as caught:
        tokenizer.encode("hello", add_special_tokens=False)
    assert type(caught.value.__cause__).__name__ == "PanicException"
    assert not isinstance(caught.value.__cause__, Exception)


def test_a_panic_while_tokens_are_decoded_is_an_error(tiny: TinyLlama) -> None:
    """Whole, and token by token in a stream."""
    _change(tiny, decoder={"type": "Strip", "content": "h", "start": 9, "stop": 9})
    tokenizer = load_model(tiny.source).tokenizer
    token_ids = tokenizer.encode("hhhh", add_special_tokens=False)
    with pytest.raises(PanicError):
        tokenizer.decode(token_ids)
    detokenizer = tokenizer.detokenizer()
    with pytest.raises(PanicError):
        "".join(map(detokenizer.push, token_ids))


def test_a_panic_while_a_tokenizer_is_read_is_a_format_error(tiny: TinyLlama) -> None:
    """When it is loaded, and when it is checked."""
    _change(tiny, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    for read in (load_model, inspect_model):
        with pytest.raises(ModelFormatError, match="tokenizer"):
            read(tiny.source)


def test_prompts_are_neither_cut_nor_filled_up(tiny: TinyLlama) -> None:
    """A file may say so for a use other than this; transformers ignores it, too."""
    text = "hello " * 50
    whole = load_model(tiny.source).tokenizer.encode(text, add_special_tokens=False)
    _change(
        tiny,
        truncation={
            "direction": "Right",
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 2,
        },
        padding={
            "strategy": {"Fixed": 100_000},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    )
    assert load_model(tiny.source).tokenizer.encode(text, add_special_tokens=False) == whole


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": _replace("b" * 1000)},
        {"normalizer": {"type": "Sequence", "normalizers": [_replace("aaaa")] * 4}},
        {"normalizer": {"type": "Sequence", "normalizers": [_replace("a", regex="")] * 9}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
        {"decoder": _replace("b" * 1000)},
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "Sequence", "decoders": [_replace("aaaa")] * 4}],
            }
        },
    ],
)
def test_a_tokenizer_that_makes_texts_long_is_refused(
    tiny: TinyLlama, part: dict[str, object]
) -> None:
    """When it is loaded, and when it is checked: a short prompt would take all memory."""
    _change(tiny, **part)
    for read in (load_model, inspect_model):
        with pytest.raises(ModelFormatError, match="times as long"):
            read(tiny.source)


def test_real_normalizers_are_taken(tiny: TinyLlama) -> None:
    """SentencePiece's spaces, ALBERT's quotes and runs of spaces."""
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        _replace("\u2581"),
        _replace('"', regex="``|''"),
        _replace(" ", regex=" {2,}"),
        {"type": "NFKD"},
        {"type": "Lowercase"},
    ]
    _change(tiny, normalizer={"type": "Sequence", "normalizers": steps})
    backend = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    check_growth(backend, "real")


def test_a_template_inside_a_configuration_is_bounded_too(tiny: TinyLlama) -> None:
    """Not the file of its own alone."""
    (tiny.path / "chat_template.jinja").unlink()
    config = json.loads((tiny.path / "tokenizer_config.json").read_text())
    for value in ("x" * (2 << 20), [{"name": "default", "template": "x" * (2 << 20)}]):
        tiny.write_json("tokenizer_config.json", {**config, "chat_template": value})
        for read in (load_model, inspect_model):
            with pytest.raises(ModelFormatError, match="larger than"):
                read(tiny.source)


class _Panic(BaseException):
    pass


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (_Panic("x"), PanicError),
        (ValueError("x"), ValueError),
        *((one(), one) for one in ENDINGS),
    ],
)
def test_only_a_panic_is_turned_into_an_error(
    raised: BaseException, seen: type[BaseException]
) -> None:
    """Errors are errors already, and what ends a task or the process passes."""

    def fail() -> None:
        raise raised

    calls: list[Callable[[], Any]] = [panics_as_errors("a library")(fail)]
    for call in calls:
        with pytest.raises(seen):
            call()
