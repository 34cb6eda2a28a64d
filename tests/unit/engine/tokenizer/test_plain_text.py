"""A client's text stays text: no spelling of a token becomes the token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.tokenizer_files import gguf_tokenizer
from machd.engine.tokenizer.plain_text import PlainTextEncoder
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import InvalidRequestError

_MARKERS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
_SPECIAL = "<|im_end|>"


@pytest.fixture(name="coder", scope="module")
def _coder(embedded_model_path: Path) -> MlxTokenizer:
    """The embedded tokenizer with markers that, like Qwen2.5-Coder's, are not marked as special."""
    import_mlx_lm()
    tokenizer = gguf_tokenizer(read_gguf_header(embedded_model_path), chat_template=None)[0]
    inner = tokenizer.wrapped._tokenizer
    inner.add_tokens([*_MARKERS, "<whole>"])
    return MlxTokenizer(tokenizer.wrapped)


def _id(tokenizer: MlxTokenizer, token: str) -> int:
    (token_id,) = tokenizer.encode(token, add_special_tokens=False)
    return token_id


@given(
    parts=st.lists(st.sampled_from([*_MARKERS, _SPECIAL, "<|endoftext|>", "a", " b\n", "é", "<|"]))
)
def test_spelled_tokens_are_plain_text(coder: MlxTokenizer, parts: list[str]) -> None:
    """However a text spells markers and special tokens, none of its ids is one of theirs."""
    text = "".join(parts)
    form = coder.fill_format
    assert form is not None
    pre, suf, mid = (_id(coder, one) for one in _MARKERS)
    prompt = form.prompt(text, text)
    own = [*prompt[1 : prompt.index(suf)], *prompt[prompt.index(suf) + 1 : -1]]
    assert (prompt[0], prompt[-1]) == (pre, mid)
    assert not {pre, suf, mid, *coder.special_token_ids} & set(own)
    assert coder.decode(own) == text + text


def test_other_added_tokens_are_still_recognised(coder: MlxTokenizer) -> None:
    """Added tokens that are neither special nor markers are text's own, such as runs of spaces."""
    form = coder.fill_format
    assert form is not None
    assert _id(coder, "<whole>") in form.prompt("a<whole>", "")


def test_plain_text_is_encoded_as_before(coder: MlxTokenizer) -> None:
    """A text that spells nothing has the ids that a prompt has; the shared tokenizer is untouched."""
    form = coder.fill_format
    assert form is not None
    text = "def add(a, b):\n    return a + b\n"
    ids = coder.encode(text, add_special_tokens=False)
    assert form.prompt(text, "")[1:-2] == tuple(ids)
    assert _id(coder, _SPECIAL) in coder.special_token_ids


def test_a_model_without_markers_has_no_fill_format(embedded_model_path: Path) -> None:
    """The embedded model was not trained to fill."""
    import_mlx_lm()
    tokenizer = gguf_tokenizer(read_gguf_header(embedded_model_path), chat_template=None)[0]
    assert tokenizer.fill_format is None
    assert tokenizer.chat_template is not None
    assert "im_start" in tokenizer.chat_template


def test_plain_text_begins_without_a_space() -> None:
    """SentencePiece's space before a text is left out: a text between markers begins in the middle."""
    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    for normalizer, pre_tokenizer in (
        (normalizers.Prepend("\u2581"), None),
        (normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]), None),
        (None, pre_tokenizers.Metaspace()),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])),
    ):
        backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
        assert backend.encode("a").ids == [3]
        assert PlainTextEncoder(backend, ()).encode("a") == [2]


def test_ids_of_a_copy_are_those_of_the_tokenizer() -> None:
    """Added tokens in any order keep their ids in the copy that encodes plain text."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.add_tokens([AddedToken("<one>"), AddedToken("<two>")])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    plain = PlainTextEncoder(backend, ["<one>"])
    assert plain.encode("a<two>b") == backend.encode("a<two>b").ids
    assert plain.encode("<one>a<end>b") == [0, 1]


def test_a_slow_tokenizer_refuses_what_it_cannot_read_as_text(coder: MlxTokenizer) -> None:
    """Without the library's shared object a spelled marker cannot be plain text, so it is refused."""
    slow = MlxTokenizer(coder.wrapped)
    slow._backend = None
    slow._table = None
    form = slow.fill_format
    assert form is not None
    assert form.prompt("a", "b")
    with pytest.raises(InvalidRequestError, match="fill-in-the-middle"):
        form.prompt("a<|fim_suffix|>", "b")
