"""Fill-in-the-middle prompts: each family's tokens, in its order, around texts that stay plain."""

from __future__ import annotations

import pytest

from machd.engine.protocol.fill_format import ContextFile, FillFormat, find_fill_tokens
from machd.errors import InvalidRequestError

_P, _S, _M, _END, _REPOSITORY, _FILE, _BOS = range(1000, 1007)

_FAMILIES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
]


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _format(vocabulary: dict[str, int], opening: tuple[int, ...] = ()) -> FillFormat:
    tokens = find_fill_tokens(vocabulary)
    assert tokens is not None
    return FillFormat(tokens, _bytes, opening)


@pytest.mark.parametrize("markers", _FAMILIES)
def test_fill_prompt_has_the_order_of_the_family(markers: tuple[str, str, str]) -> None:
    """Prefix, suffix, and the middle's token last, after the begin-of-text token."""
    form = _format(dict(zip(markers, (_P, _S, _M), strict=True)), opening=(_BOS,))
    assert form.prompt("a", "b") == (_BOS, _P, 97, _S, 98, _M)
    assert form.prompt("", "") == (_BOS, _P, _S, _M)
    assert form.end_token_ids == {_P, _S, _M}


@pytest.mark.parametrize("markers", _FAMILIES)
def test_fill_tokens_are_none_when_one_of_the_family_is_missing(
    markers: tuple[str, str, str],
) -> None:
    """Two of three tokens are no way to ask, and tokens of two families do not mix."""
    for missing in range(3):
        kept = [one for index, one in enumerate(markers) if index != missing]
        assert find_fill_tokens({one: index for index, one in enumerate(kept)}) is None
    assert find_fill_tokens({"<fim_prefix>": 1, "<SUF>": 2, "<|fim_middle|>": 3}) is None
    assert find_fill_tokens({}) is None


def test_fill_prompt_of_codestral_has_the_suffix_first() -> None:
    """Codestral continues the prefix, which stands last; it has no token for the middle."""
    form = _format({"[PREFIX]": _P, "[SUFFIX]": _S}, opening=(_BOS,))
    assert form.prompt("a", "b") == (_BOS, _S, 98, _P, 97)


def test_fill_ends_at_tokens_that_begin_another_text() -> None:
    """A model that goes on to the next file, or pads, has finished the fill."""
    qwen = {"<|fim_prefix|>": _P, "<|fim_suffix|>": _S, "<|fim_middle|>": _M}
    form = _format({**qwen, "<|endoftext|>": _END, "<|file_sep|>": _FILE, "<|other|>": 7})
    assert form.end_token_ids == {_P, _S, _M, _END, _FILE}


def test_fill_context_is_written_as_files_of_a_repository() -> None:
    """With tokens for them, a repository's name and each file's name come before the text."""
    starcoder = {"<fim_prefix>": _P, "<fim_suffix>": _S, "<fim_middle>": _M}
    form = _format({**starcoder, "<repo_name>": _REPOSITORY, "<file_sep>": _FILE})
    context = [ContextFile("x.py", "X"), ContextFile("y.py", "Y")]
    expected = (
        *(_REPOSITORY, *_bytes("repository\n")),
        *(_FILE, *_bytes("x.py\nX")),
        *(_FILE, *_bytes("y.py\nY")),
        *(_FILE, *_bytes("file\n")),
        *(_P, 97, _S, 98, _M),
    )
    assert form.prompt("a", "b", context) == expected


def test_fill_context_is_plain_text_when_there_are_no_file_tokens() -> None:
    """Without tokens for files, their texts stand before the prefix with a rule between them."""
    form = _format({"<PRE>": _P, "<SUF>": _S, "<MID>": _M}, opening=(_BOS,))
    rule = "\n\n--- snippet ---\n\n"
    prompt = form.prompt("a", "b", [ContextFile("x.py", "X"), ContextFile("y.py", "Y")])
    assert prompt == (_BOS, *_bytes(f"{rule}X{rule}Y"), _P, 97, _S, 98, _M)


def test_fill_format_fits_a_model_that_has_a_row_for_each_marker() -> None:
    """A token beyond the model's width would be read outside of its weights."""
    form = _format({"<PRE>": _P, "<SUF>": _S, "<MID>": _M})
    assert form.fits(_M + 1)
    assert not form.fits(_M)


@pytest.mark.parametrize("place", ["prefix", "suffix", "file"])
def test_fill_text_that_would_become_a_token_is_refused(place: str) -> None:
    """A text is refused if its tokenizer reads a marker in it as the token."""
    tokens = find_fill_tokens({"<PRE>": _P, "<SUF>": _S, "<MID>": _M})
    assert tokens is not None
    form = FillFormat(tokens, lambda text: [_M] if "<MID>" in text else _bytes(text))
    texts = {"prefix": "a", "suffix": "b", "file": "c", place: "x<MID>"}
    with pytest.raises(InvalidRequestError, match="fill-in-the-middle") as caught:
        form.prompt(texts["prefix"], texts["suffix"], [ContextFile("n", texts["file"])])
    assert "x<MID>" not in caught.value.message
