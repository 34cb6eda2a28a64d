"""Encoding of text in which no special token is recognised.

A tokenizer takes the spelling of a special token for the token. That is right for a rendered chat,
and wrong for a client's text between tokens of machd's: a client must not write such tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import Any, TypeAlias

from machd.engine.backend.untyped import Backend
from machd.panics import panics_as_errors

_Step: TypeAlias = dict[str, Any] | None
"""One step of a tokenizer's pipeline, as in ``tokenizer.json``."""


class PlainTextEncoder:
    """An encoder around a copy of a ``tokenizers.Tokenizer``, made at the first call.

    The copy puts no space before a text, as SentencePiece does: these texts begin inside a prompt.
    """

    def __init__(self, backend: Backend, tokens: Collection[str]) -> None:
        self._backend = backend
        self._tokens = frozenset(tokens)
        self._copy: Backend | None = None
        self._lock = threading.Lock()

    @panics_as_errors("tokenizers")
    def encode(self, text: str) -> list[int]:
        """Encode a text."""
        with self._lock:
            if self._copy is None:
                self._copy = _plain_copy(self._backend, self._tokens)
            copy = self._copy
        # A batch of one releases the GIL, as in MlxTokenizer.encode.
        (encoding,) = copy.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)


def _plain_copy(backend: Backend, tokens: Collection[str]) -> Backend:
    from tokenizers import Tokenizer  # noqa: PLC0415 - imported by the loader

    state = json.loads(backend.to_str())
    for added in state["added_tokens"]:
        # Only tokens that are marked as special can be switched off.
        added["special"] = added["special"] or added["content"] in tokens
    state["normalizer"] = _without_prefix_space(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix_space(state["pre_tokenizer"])
    state["truncation"] = state["padding"] = None
    copy = Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _without_prefix_space(step: _Step) -> _Step:
    """Change the state of a normalizer or a pre-tokenizer to add nothing before a text."""
    match step:
        case None | {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            (parts,) = step.keys() - {"type"}
            kept = [_without_prefix_space(one) for one in step[parts]]
            return {**step, parts: [one for one in kept if one is not None]}
        case _:
            return step
