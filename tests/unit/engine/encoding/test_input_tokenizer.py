"""Token ids that clients send: which an encoder's tokenizer takes over, and how it cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints.tiny_encoder import TINY_MAX_TOKENS, write_tiny_embedder
from tokenizers import Tokenizer, processors

from machd.engine.encoding.input_tokenizer import TextInputTokenizer
from machd.errors import ContextLengthExceededError, InvalidRequestError

_FORMS = {"both": "[CLS] $A [SEP]", "end": "$A [SEP]", "neither": "$A"}


def _tokenizer(directory: Path, form: str) -> TextInputTokenizer:
    write_tiny_embedder(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=_FORMS[form], special_tokens=special
    )
    tokenizer.save(path)
    return TextInputTokenizer(
        directory, max_input_tokens=TINY_MAX_TOKENS, lowercases=False, strips=False
    )


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("words", [1, 100])
def test_ids_of_a_text_are_taken_and_cut_as_the_text(tmp_path: Path, form: str, words: int) -> None:
    """Special tokens at both ends, at one or at none stay where they are."""
    tokenizer = _tokenizer(tmp_path, form)
    whole = TextInputTokenizer(tmp_path, max_input_tokens=1_000, lowercases=False, strips=False)
    text = "a b " * words
    (ids,) = whole.encode([text], truncates=False)
    taken = tokenizer.take([ids.token_ids], truncates=True)
    assert taken == tokenizer.encode([text], truncates=True)
    if words > TINY_MAX_TOKENS:
        with pytest.raises(ContextLengthExceededError):
            tokenizer.take([ids.token_ids], truncates=False)


@pytest.mark.parametrize(("form", "is_taken"), [("both", False), ("end", False), ("neither", True)])
def test_ids_without_special_tokens_are_refused_where_the_tokenizer_adds_some(
    tmp_path: Path, form: str, *, is_taken: bool
) -> None:
    """Such ids are another tokenizer's; where none are added they cannot be told apart."""
    tokenizer = _tokenizer(tmp_path, form)
    if is_taken:
        (taken,) = tokenizer.take([[7, 8]], truncates=False)
        assert taken.token_ids == (7, 8)
    else:
        with pytest.raises(InvalidRequestError, match="token ids of this model begin with"):
            tokenizer.take([[7, 8]], truncates=False)
