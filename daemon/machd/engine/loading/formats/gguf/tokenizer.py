"""A fast tokenizer out of a GGUF file's metadata.

Two kinds: ``gpt2``, byte-level BPE with its merges, and ``llama``, SentencePiece BPE with scores
and byte fallback, whose merges are worked out from the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from machd.engine.backend.untyped import Backend
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.loading.formats.gguf.pre_tokenizers import (
    PRE_TOKENIZERS,
    UNKNOWN,
    PreTokenizer,
)
from machd.errors import ModelFormatError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Token types of ggml that need an entry; unused (5) and byte (6) tokens need none."""

_SPACE = "\u2581"

_NAMED = "tokenizer.chat_template."
_END_IDS = ("eos", "eot", "eom")
_END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
    }
)
"""Control tokens that end a turn or a text, as in llama.cpp.

llama.cpp counts markers of a next file, too; they end fill-in-the-middle prompts alone, in fill_format.py.
"""

_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})
_SOLAR_ENDS = frozenset({"<|calls|>", "<|flush|>"})
"""Tokens of vocabularies in which ``<|end|>`` ends a message of several, and no turn."""

_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's only special tokens that leave the white space behind them."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer with its special tokens and chat template.

    Attributes:
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, where set.
        chat_templates: Templates by name: ``default``, and others beside it such as ``tool_use``; empty
            without a default one.
        notes: Warnings, such as a pre-tokenizer that machd does not know.
    """

    tokenizer: Backend
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]
    notes: tuple[str, ...]


def build_tokenizer(header: GgufHeader) -> GgufVocabulary:
    """Build the tokenizer that the metadata describe.

    Raises:
        ModelFormatError: No tokenizer, of a kind that machd does not read, or inconsistent.
    """
    tokens = header.texts("tokenizer.ggml.tokens")
    types = [int(kind) for kind in header.numbers("tokenizer.ggml.token_type")]
    types = types or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFormatError(f"{header.path.name}: tokens and token types differ in number")
    kind = header.text("tokenizer.ggml.model")
    notes: tuple[str, ...] = ()
    if kind == "gpt2":
        pre = header.text("tokenizer.ggml.pre", "default")
        steps = PRE_TOKENIZERS.get(pre)
        if steps is None:
            steps, notes = UNKNOWN, (_unknown_note(pre),)
        tokenizer, begins = _byte_level(header, tokens, steps), steps.begins
    elif kind == "llama":
        tokenizer, begins = _sentence_piece(header, tokens, types), True
    else:
        raise ModelFormatError(
            f"{header.path.name}: the tokenizer {kind} is not supported; machd reads gpt2 (byte "
            "BPE) and llama (SentencePiece BPE)"
        )
    is_phi3 = kind == "llama" and header.text("general.architecture", "") == "phi3"
    _add_tokens(tokenizer, tokens, types, plain=_PHI3_PLAIN if is_phi3 else None)
    _add_template(tokenizer, header, tokens, bos_by_default=begins)
    return GgufVocabulary(
        tokenizer=tokenizer,
        special_tokens=_special_tokens(header, tokens),
        eos_token_ids=_eos_token_ids(header, tokens, types),
        chat_templates=_chat_templates(header),
        notes=notes,
    )


def _unknown_note(pre: str) -> str:
    named = (
        "the file names no pre-tokenizer"
        if pre == "default"
        else f"the pre-tokenizer {pre!r} is not known to machd"
    )
    return (
        f"{named}; GPT-2's is used, and the model may read some text in other pieces than it was "
        "trained on"
    )


def _chat_templates(header: GgufHeader) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, text in header.metadata.items():
        is_named = key.startswith(_NAMED)
        if isinstance(text, str) and text.strip() and (is_named or key == _NAMED[:-1]):
            found[key.removeprefix(_NAMED) if is_named else "default"] = text
    return found if "default" in found else {}


def _byte_level(header: GgufHeader, tokens: list[str], steps: PreTokenizer) -> Backend:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in header.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    tokenizer = _checked(
        header, lambda: Tokenizer(models.BPE(vocabulary, merges, ignore_merges=steps.keeps_tokens))
    )
    if steps.normalises:
        tokenizer.normalizer = steps.normalizer()
    tokenizer.pre_tokenizer = steps.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(header: GgufHeader, tokens: list[str], types: list[int]) -> Backend:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelFormatError(f"{header.path.name}: tokens and scores differ in number")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, types, scores)
    unknown_id = header.integer("tokenizer.ggml.unknown_token_id", 0)
    unknown = tokens[unknown_id] if unknown_id < len(tokens) else None
    tokenizer = _checked(
        header,
        lambda: Tokenizer(
            models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        ),
    )
    has_prefix = header.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """List every way to join two pieces to a third, in the order of the result's score.

    SentencePiece joins the neighbours with the highest-scoring result; BPE joins the neighbours whose
    merge comes first. In this order of merges the two are the same. Of equal scores, which runs of
    spaces have, SentencePiece takes the leftmost: there the longest left piece comes first.
    """
    kept = (_NORMAL, _USER_DEFINED)
    pieces = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in kept
    }
    merges: list[tuple[str, str]] = []
    results: list[float] = []
    for token, score in pieces.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in pieces:
                right = token[cut:]
                if right in pieces:
                    merges.append((left, right))
                    results.append(score)
    lengths = np.fromiter((len(left) for left, _ in merges), np.int64, len(merges))
    order = np.lexsort((-lengths, -np.array(results)))
    return [merges[index] for index in order.tolist()]


def _checked(header: GgufHeader, build: Callable[[], Backend]) -> Backend:
    """Turn the bare Exception that the library raises for unknown tokens into ModelFormatError."""
    try:
        return build()
    except Exception as error:
        raise ModelFormatError(f"{header.path.name}: broken tokenizer: {error}") from error


def _add_tokens(
    tokenizer: Backend, tokens: list[str], types: list[int], *, plain: frozenset[str] | None
) -> None:
    """Mark control tokens as special, and user-defined ones as never cut; their ids stay.

    All but the ``plain`` ones take the white space behind them; with None no token does.
    """
    special: list[Backend] = []
    whole: list[Backend] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
            takes_space = plain is not None and token not in plain
            is_special = kind != _USER_DEFINED
            (special if is_special else whole).append(
                AddedToken(token, special=is_special, normalized=False, rstrip=takes_space)
            )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _add_template(
    tokenizer: Backend, header: GgufHeader, tokens: list[str], *, bos_by_default: bool
) -> None:
    """Put begin and end tokens around a text that is encoded with special tokens."""
    pieces = ["$A"]
    used: list[tuple[str, int]] = []
    bos = _token_of(header, "bos", tokens)
    eos = _token_of(header, "eos", tokens)
    if bos and header.flag("tokenizer.ggml.add_bos_token", default=bos_by_default):
        pieces.insert(0, bos[0])
        used.append(bos)
    if eos and header.flag("tokenizer.ggml.add_eos_token", default=False):
        pieces.append(eos[0])
        used.append(eos)
    if used:
        tokenizer.post_processor = TemplateProcessing(
            single=pieces, pair=[*pieces, "$B:1"], special_tokens=list(dict.fromkeys(used))
        )


def _token_of(header: GgufHeader, name: str, tokens: list[str]) -> tuple[str, int] | None:
    index = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tokens):
        return None
    return tokens[index], index


def _special_tokens(header: GgufHeader, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {short: _token_of(header, name, tokens) for name, short in names.items()}
    return {f"{short}_token": token[0] for short, token in found.items() if token}


def _eos_token_ids(header: GgufHeader, tokens: list[str], types: list[int]) -> frozenset[int]:
    """Find the tokens that end a text: those that the file names, and control tokens by name.

    Unlike llama.cpp, an end's name marks no token that the file declares to be text: gemma's ``</s>`` is HTML.
    """
    ids = {token[1] for token in (_token_of(header, name, tokens) for name in _END_IDS) if token}
    named = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _END_NAMES
    }
    if any(ends.issubset(named) for ends in (_HARMONY_ENDS, _SOLAR_ENDS)):
        ids.discard(named.pop("<|end|>", -1))
    return frozenset(ids.union(named.values()))
