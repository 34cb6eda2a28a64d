"""A draft model's token ids mean what the served model's mean, or it is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.engines.tiny_models import tiny_tokenizer
from unit.engine.tiny_llama import TinyLlama

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.loader import LoadedModel, load_model
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.speculation.vocabulary import check_vocabulary
from machd.errors import SettingsError


class _Other(FakeTokenizer):
    """One that has other bytes for a token, more or fewer tokens, or another way of cutting."""

    def __init__(
        self, *, size_tokens: int | None = None, other_token: int | None = None, cut: int = 0
    ) -> None:
        super().__init__()
        self._size = super().vocabulary_tokens if size_tokens is None else size_tokens
        self._other_token = other_token
        self._cut = cut

    @property
    def vocabulary_tokens(self) -> int:
        return self._size

    def token_bytes(self, token_id: int) -> bytes:
        return b"other" if token_id == self._other_token else super().token_bytes(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids = super().encode(text, add_special_tokens=add_special_tokens)
        return token_ids[self._cut :]


def _refusal(served: Tokenizer, draft: Tokenizer) -> str:
    with pytest.raises(SettingsError) as refused:
        check_vocabulary(served, draft)
    (problem,) = refused.value.problems
    assert problem.startswith("speculation.draft_model: ")
    assert "speculation.mode" in problem, "it says what to do"
    return problem


def test_a_vocabulary_is_its_own(tiny: TinyLlama, embedded_model: LoadedModel) -> None:
    """Vocabularies of the same files are equal, for any kind of tokenizer."""
    loaded = load_model(tiny.source)
    for tokenizer in (loaded.tokenizer, embedded_model.tokenizer, tiny_tokenizer()):
        check_vocabulary(tokenizer, tokenizer)
    check_vocabulary(FakeTokenizer(), FakeTokenizer())


def test_either_may_have_more_tokens() -> None:
    """Only what both have is compared: families pad and add tokens differently."""
    whole = FakeTokenizer().vocabulary_tokens
    check_vocabulary(FakeTokenizer(), _Other(size_tokens=whole - 1))
    check_vocabulary(_Other(size_tokens=whole - 1), FakeTokenizer())
    check_vocabulary(FakeTokenizer(), _Other(size_tokens=whole + 50))


@pytest.mark.parametrize("token_id", [0, 65, 255])
def test_another_token_is_named(token_id: int) -> None:
    """With what it stands for in each, so that a person sees what kind of difference it is."""
    problem = _refusal(FakeTokenizer(), _Other(other_token=token_id))
    assert f"token {token_id} stands for" in problem
    assert "'other'" in problem
    assert problem.isascii()


def test_another_special_token_is_one_too(tiny: TinyLlama) -> None:
    """A token that ends a text in one vocabulary and is a word in the other would be drafted."""
    served = load_model(tiny.source).tokenizer
    problem = _refusal(served, _Renamed(served, {2: b"<|im_close|>"}))
    assert "token 2 stands for '<|im_end|>' there and for '<|im_close|>' here" in problem


def test_other_merges_are_found() -> None:
    """The same table, but texts are cut otherwise."""
    assert "cut into other tokens" in _refusal(FakeTokenizer(), _Other(cut=1))


def test_strangers_are_refused(embedded_model: LoadedModel) -> None:
    """Two models of different families."""
    _refusal(embedded_model.tokenizer, tiny_tokenizer())
    _refusal(tiny_tokenizer(), embedded_model.tokenizer)


def test_nothing_in_common_is_refused() -> None:
    """Without a token that both have, nothing is known to be the same."""
    assert "no token in common" in _refusal(FakeTokenizer(), _Other(size_tokens=0))


class _Renamed(FakeTokenizer):
    """Another tokenizer with other names for some tokens."""

    def __init__(self, inner: Tokenizer, names: dict[int, bytes]) -> None:
        super().__init__()
        self._inner = inner
        self._names = names

    @property
    def vocabulary_tokens(self) -> int:
        return self._inner.vocabulary_tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._names.get(token_id) or self._inner.token_bytes(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode(token_ids)
