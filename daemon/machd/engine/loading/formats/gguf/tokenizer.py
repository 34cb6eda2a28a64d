"""A fast tokenizer out of a GGUF file's metadata.

Two kinds: ``gpt2``, byte-level BPE with its merges, and ``llama``, SentencePiece BPE with scores
and byte fallback, whose merges are worked out from the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from machd.engine.backend.untyped import Backend
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types of ggml that need an entry; unknown (2), unused (5) and byte (6) tokens need none."""

_SPACE = "\u2581"

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Mapping[str, str] = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "falcon3": _LLAMA3_PATTERN,
    "qwen2": _QWEN2_PATTERN,
    "stablelm2": _QWEN2_PATTERN,
    "deepseek-r1-qwen": _QWEN2_PATTERN,
    "tekken": _TEKKEN_PATTERN,
}
"""``tokenizer.ggml.pre`` to the pattern of pieces before BPE, as in each family's tokenizer.json."""

_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b"}
)
_GPT2 = frozenset({"default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais"})
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_WHOLE_TOKENS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Families whose BPE keeps a piece that is a token, without merging."""

_END_NAMES = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
"""Control tokens that always end a turn, as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer with its special tokens and chat template.

    Attributes:
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, where set.
        notes: Warnings, such as a pre-tokenizer that machd does not know.
    """

    tokenizer: Backend
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_template: str | None
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
    pre = header.text("tokenizer.ggml.pre", "default")
    notes: tuple[str, ...] = ()
    if kind == "gpt2":
        tokenizer, notes = _byte_level(header, tokens, pre)
    elif kind == "llama":
        tokenizer = _sentence_piece(header, tokens, types)
    else:
        raise ModelFormatError(
            f"{header.path.name}: the tokenizer {kind} is not supported; machd reads gpt2 (byte "
            "BPE) and llama (SentencePiece BPE)"
        )
    _add_tokens(tokenizer, tokens, types)
    bos_by_default = kind == "llama" or pre in _BOS_BY_DEFAULT
    _add_template(tokenizer, header, tokens, bos_by_default=bos_by_default)
    template = header.metadata.get("tokenizer.chat_template")
    return GgufVocabulary(
        tokenizer=tokenizer,
        special_tokens=_special_tokens(header, tokens),
        eos_token_ids=_eos_token_ids(header, tokens, types),
        chat_template=template if isinstance(template, str) and template.strip() else None,
        notes=notes,
    )


def _byte_level(header: GgufHeader, tokens: list[str], pre: str) -> tuple[Backend, tuple[str, ...]]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in header.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    whole_first = pre in _WHOLE_TOKENS_FIRST
    tokenizer = _checked(
        header, lambda: Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_first))
    )
    tokenizer.pre_tokenizer, notes = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, notes


def _pre_tokenizer(pre: str) -> tuple[Backend, tuple[str, ...]]:
    pattern = _PATTERNS.get(pre)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, whole]), ()
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words]), ()
    if pre in _GPT2:
        return words, ()
    note = (
        f"the pre-tokenizer {pre!r} is not known to machd; GPT-2's is used, and the model may read "
        "some text in other pieces than it was trained on"
    )
    return words, (note,)


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
    merge comes first. In this order of merges the two are the same.
    """
    score_of = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    rank = {token: index for index, token in enumerate(tokens)}
    found = [
        (-score, rank[token[:cut]], rank[token[cut:]], token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _checked(header: GgufHeader, build: Callable[[], Backend]) -> Backend:
    """Turn the bare Exception that the library raises for unknown tokens into ModelFormatError."""
    try:
        return build()
    except Exception as error:
        raise ModelFormatError(f"{header.path.name}: broken tokenizer: {error}") from error


def _add_tokens(tokenizer: Backend, tokens: list[str], types: list[int]) -> None:
    """Mark control tokens as special, and user-defined ones as never cut; their ids stay."""
    pairs = list(zip(tokens, types, strict=True))
    control = [
        AddedToken(token, special=True, normalized=False) for token, k in pairs if k == _CONTROL
    ]
    whole = [
        AddedToken(token, normalized=False) for token, k in pairs if k == _USER_DEFINED and token
    ]
    tokenizer.add_special_tokens(control)
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
    named = [_token_of(header, name, tokens) for name in ("eos", "eot", "eom")]
    ids = {token[1] for token in named if token}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _CONTROL and token in _END_NAMES:
            ids.add(index)
    return frozenset(ids)
