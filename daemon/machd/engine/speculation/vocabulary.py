"""Comparison of two models' vocabularies: the same token ids have to mean the same text."""

from __future__ import annotations

from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import SettingsError

_SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "  def area(radius: float) -> float:\n\treturn 3.14159 * radius ** 2  # m\u00b2\n",
    '{"name": "\u017d\u00f3\u0142w", "items": [1, 23, 456, 7890], "ok": true}\r\n\r\n',
    "Stra\u00dfe, \u0442\u0435\u043a\u0441\u0442, \u6587\u5b57\u5217, \u0627\u0644\u0646\u0635, \U0001f600\u200d\U0001f4bb",
)
"""Words, code, numbers and scripts, where merges and pre-tokenisation show."""


def check_vocabulary(served: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft model with another vocabulary.

    Every token that both have must stand for the same bytes, special tokens for the same name, and
    some texts must be cut into the same tokens. Either may have tokens that the other lacks.

    Raises:
        SettingsError: They differ; the message names the first difference.
    """
    difference = _difference(served, draft)
    if difference is not None:
        problem = (
            "speculation.draft_model: it has not the vocabulary of the model at model.path: "
            f"{difference}. Name a smaller model of the same family, or set speculation.mode to ngram"
        )
        raise SettingsError([problem])


def _difference(served: Tokenizer, draft: Tokenizer) -> str | None:
    """Describe the first difference; None if there is none."""
    common = 0
    for token_id in range(min(served.vocabulary_tokens, draft.vocabulary_tokens)):
        ours, theirs = served.token_bytes(token_id), draft.token_bytes(token_id)
        if not ours or not theirs:
            continue
        common += 1
        if ours != theirs:
            return f"token {token_id} stands for {_shown(ours)} there and for {_shown(theirs)} here"
    if not common:
        return "they have no token in common"
    cuts = (
        [one.encode(text, add_special_tokens=False) for text in _SAMPLES] for one in (served, draft)
    )
    ours_cut, theirs_cut = cuts
    return None if ours_cut == theirs_cut else "the same text is cut into other tokens"


def _shown(content: bytes) -> str:
    """Return a token's bytes as plain ASCII."""
    return ascii(content.decode("utf-8", "backslashreplace"))
