"""Tokenizers out of GGUF metadata give the token ids of the tokenizers that they were written from."""

from __future__ import annotations

import base64
import importlib.util
import unicodedata
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from unit.engine.gguf_writer import llama_metadata, write_gguf
from unit.engine.tiny_llama import byte_tokens

from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from machd.engine.loading.formats.gguf.tokenizer import GgufVocabulary, build_tokenizer
from machd.engine.loading.tokenizer_files import gguf_tokenizer
from machd.errors import ModelFormatError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

ODD_TEXTS = (
    "",
    " ",
    "   leading and trailing   ",
    "a  b   c    d" + " " * 37 + "e",
    "\n\n\n x\r\n\r\ny\rz\t\tw",
    "I've we'LL HE'D don't 'S \u2019s",
    "1 12 123 1234 1234567890 3.14159 \u0663\u0664\u0665 \u2167 \u00bd",
    "def f(x):\n\treturn x**2  # !=\n\n\n    pass",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u6587\u3002\ud55c\uad6d\uc5b4",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "e\u0301 n\u0303 A\u030a \u00e9\u00f1\u00c5 \u01c5 HTTPServer camelCase",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f3f3\ufe0f\u200d\U0001f308",
    "\x00\x01\x7f\x1b[0m\u0085\u2028\u00a0\u3000\ufeff",
    "\U00010348\U0001d518\ue000\uffff\U0010ffff",
    "<0x41><0x0A> \u2581\u2581 \u2581a",
    "https://a.b/c?d=e&f=g#h //// /* */ === ''' ```",
)


def _vocabulary(tmp_path: Path, **changes: object) -> GgufVocabulary:
    path = write_gguf(tmp_path / "x.gguf", llama_metadata(**changes), {})
    return build_tokenizer(read_gguf_header(path))


def _byte_level(
    tmp_path: Path, pre: str, ranks: Mapping[bytes, int], special: Mapping[str, int]
) -> GgufVocabulary:
    """Write a vocabulary of ranks as llama.cpp's converter does: each token but a byte has one merge."""
    spelled = byte_tokens()
    ordered = sorted(ranks, key=ranks.__getitem__)
    tokens = ["".join(spelled[byte] for byte in token) for token in ordered]
    merges = [_merge(token, ranks) for token in ordered if len(token) > 1]
    return _vocabulary(
        tmp_path,
        tokenizer__ggml__pre=pre,
        tokenizer__ggml__tokens=[*tokens, *special],
        tokenizer__ggml__token_type=[_NORMAL] * len(tokens) + [_CONTROL] * len(special),
        tokenizer__ggml__merges=[
            " ".join("".join(spelled[byte] for byte in part) for part in pair) for pair in merges
        ],
    )


def _merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Join neighbours of lower rank than the token until two parts are left."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [
            (ranks.get(parts[index] + parts[index + 1], len(ranks)), index)
            for index in range(len(parts) - 1)
        ]
        _, index = min(pairs)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    left, right = parts
    return left, right


def _published_ranks(count: int, file: str) -> dict[bytes, int]:
    """The first ranks of a vocabulary of OpenAI's; those of a BPE vocabulary are one themselves."""
    package = importlib.util.find_spec("litellm")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "litellm_core_utils/tokenizers"
    lines = (folder / file).read_bytes().splitlines()[:count]
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


_O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
_CL100K = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""litellm's copies, whose names tiktoken makes of their addresses."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _as_it_is(text: str) -> str:
    return text


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("pre", "file", "pattern", "normalise"),
    [
        ("gpt-4o", _O200K, "o200k_base", _as_it_is),
        ("dbrx", _CL100K, "cl100k_base", _as_it_is),
        ("glm4", _CL100K, "cl100k_base", _as_it_is),
        ("gpt-2", _CL100K, "gpt2", _as_it_is),
        ("qwen2", _CL100K, _QWEN, _composed),
    ],
)
def test_byte_level_ids_are_those_of_tiktoken(
    tmp_path: Path, pre: str, file: str, pattern: str, normalise: Callable[[str], str]
) -> None:
    """Texts with odd spaces, digits, scripts and control characters become the publisher's token ids, and back."""
    ranks = _published_ranks(8000, file)
    special = {"<|endoftext|>": len(ranks), "<|im_end|>": len(ranks) + 1}
    pattern = _PUBLISHED_PATTERNS.get(pattern, pattern)
    own = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    built = _byte_level(tmp_path, pre, ranks, special)
    for text in (*ODD_TEXTS, *(f"{text}<|im_end|>{text}" for text in ODD_TEXTS)):
        token_ids = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert token_ids == own.encode(normalise(text), allowed_special="all"), ascii(text)
        decoded = built.tokenizer.decode(token_ids, skip_special_tokens=False)
        assert decoded == normalise(text)


_PUBLISHED_PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k_base": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""As tiktoken writes them (tiktoken_ext/openai_public.py, 0.14)."""


_PIECES = {
    "llama-bpe": "I|'LL| pay| |123|456|7| na\u00efve|,| e|\u0301!!\n\n| | \u65e5\u672c| x",
    "qwen35": "I|'LL| pay| |1|2|3|4|5|6|7| na\u00efve|,| e\u0301|!!\n\n| | \u65e5\u672c| x",
    "gpt-4o": "I'LL| pay| |123|456|7| na\u00efve|,| e\u0301|!!\n\n| | \u65e5\u672c| x",
    "tiny_aya": "I'LL| pay| |1|234|567| na\u00efve|,| e\u0301|!!\n\n| | \u65e5\u672c| x",
    "tekken": "I|'LL| pay| |1|2|3|4|5|6|7| na\u00efve|,| e\u0301|!!\n\n| | \u65e5\u672c| x",
    "deepseek-v3": "I|'LL| pay| |123|456|7| na\u00efve|,| e\u0301|!!\n\n|  |\u65e5\u672c| x",
    # Its pattern of punctuation has a range with ASCII's letters in it.
    "deepseek-llm": "I|'|LL| pay| |1|2|3|4|5|6|7| na|\u00ef|ve|,| e|\u0301|!!|\n|\n|  |\u65e5\u672c| x",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4|5|6|7| na\u00efve|,| e|\u0301|!!|\n|\n| | |\u65e5\u672c| x",
    "superbpe": "I'LL pay |1|234|567| na\u00efve, e\u0301!!\n\n  \u65e5\u672c x",
    "smollm": "I|'|LL| pay| |1|2|3|4|5|6|7| na\u00efve|,| e|\u0301!!|\n\n | \u65e5\u672c| x",
    "olmo": "I|'|LL| pay| 1234567| na\u00efve|,| e|\u0301!!|\n\n | \u65e5\u672c| x",
}


@pytest.mark.parametrize("pre", sorted(_PIECES))
def test_pre_tokenizer_cuts_as_its_family_does(pre: str) -> None:
    """Contractions, digits, marks, lines and Han characters are cut as each family's pattern says."""
    text = "I'LL pay 1234567 na\u00efve, e\u0301!!\n\n  \u65e5\u672c x"
    spans = PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in spans) == _PIECES[pre]


@pytest.mark.parametrize(
    ("pre", "note"), [("nobody-s", "'nobody-s' is not known"), (None, "names no")]
)
def test_unknown_pre_tokenizer_is_a_note(tmp_path: Path, pre: str | None, note: str) -> None:
    """The file is read with GPT-2's pattern, and a warning says so."""
    assert note in " ".join(_vocabulary(tmp_path, tokenizer__ggml__pre=pre).notes)
    assert _vocabulary(tmp_path).notes == ()


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2", "gemma4"])
def test_other_kind_of_tokenizer_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """A tokenizer that is neither byte-level BPE nor SentencePiece BPE is named."""
    with pytest.raises(ModelFormatError, match=rf"the tokenizer {kind} is not supported"):
        _vocabulary(tmp_path, tokenizer__ggml__model=kind)


def _trained(*, has_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """Train a small SentencePiece model as llama's and gemma's were: BPE, bytes, runs of spaces."""
    text = Path(__file__).read_text(encoding="utf-8") + "\n".join(ODD_TEXTS).replace("\x00", "")
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(text.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<table>", "\n\n", "\n"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _sentence_piece(
    tmp_path: Path, model: sentencepiece.SentencePieceProcessor, **changes: object
) -> GgufVocabulary:
    """Write the model as llama.cpp's converter does."""
    indices = range(model.vocab_size())
    user_defined = {"<table>", "\n\n", "\n"}
    tokens = [model.id_to_piece(index) for index in indices]
    return _vocabulary(
        tmp_path,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[float(model.get_score(index)) for index in indices],
        tokenizer__ggml__token_type=[
            _UNKNOWN
            if model.is_unknown(index)
            else _CONTROL
            if model.is_control(index)
            else _BYTE
            if model.is_byte(index)
            else _USER_DEFINED
            if tokens[index] in user_defined
            else _NORMAL
            for index in indices
        ],
        tokenizer__ggml__merges=None,
        tokenizer__ggml__unknown_token_id=0,
        **changes,
    )


@pytest.mark.parametrize("has_prefix", [True, False], ids=["space prefix", "no prefix"])
def test_sentence_piece_ids_are_the_librarys_own(tmp_path: Path, *, has_prefix: bool) -> None:
    """Merges by score, bytes, user-defined pieces and runs of spaces are those of SentencePiece."""
    model = _trained(has_prefix=has_prefix)
    built = _sentence_piece(tmp_path, model, tokenizer__ggml__add_space_prefix=has_prefix)
    for text in (one for one in ODD_TEXTS if not has_prefix or "\n" not in one):
        token_ids = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert token_ids == model.encode(text), ascii(text)
        decoded = built.tokenizer.decode(token_ids, skip_special_tokens=False)
        assert decoded == text.replace("\u2581", " ")


def test_run_of_spaces_is_joined_from_the_left(tmp_path: Path) -> None:
    """Runs of spaces have equal scores in llama's and mistral's vocabularies; SentencePiece takes the leftmost."""
    runs = ["\u2581" * count for count in range(1, 4)]
    built = _vocabulary(
        tmp_path,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=["<unk>", "x", *runs],
        tokenizer__ggml__scores=[0.0, -1.0, -2.0, *[-1e9] * 2],
        tokenizer__ggml__token_type=[_UNKNOWN] + [_NORMAL] * 4,
        tokenizer__ggml__add_space_prefix=False,
        tokenizer__ggml__bos_token_id=None,
    )
    found = built.tokenizer.encode("x    x").tokens
    assert found == ["x", runs[2], runs[0], "x"]


def test_special_tokens_are_whole_and_around_a_text(tmp_path: Path) -> None:
    """A control token in a text is one token; a begin token comes first, an end token if the file says so."""
    built = _sentence_piece(
        tmp_path, _trained(has_prefix=True), tokenizer__ggml__add_eos_token=True
    )
    token_ids = built.tokenizer.encode("</s>a<s>").ids
    assert token_ids[:2] == [1, 2]
    assert token_ids[-2:] == [1, 2]
    assert built.special_tokens["unk_token"] == "<unk>"


def test_phi_3_tokens_take_the_space_behind_them(tmp_path: Path) -> None:
    """Its special tokens strip white space on the right, as its tokenizer.json says; begin tokens do not."""
    changes = {"tokenizer__ggml__add_bos_token": False}
    model = _trained(has_prefix=True)
    phi3 = _sentence_piece(tmp_path, model, general__architecture="phi3", **changes).tokenizer
    llama = _sentence_piece(tmp_path, model, **changes).tokenizer
    assert phi3.encode("</s>   a").ids == phi3.encode("</s>a").ids
    assert phi3.encode("<s>  a").ids == llama.encode("<s>  a").ids != llama.encode("<s>a").ids


def _ends(tmp_path: Path, kinds: Mapping[str, int], **changes: object) -> set[str]:
    tokens = [*byte_tokens(), *kinds]
    built = _vocabulary(
        tmp_path,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[_NORMAL] * 256 + list(kinds.values()),
        tokenizer__ggml__merges=["a b"],
        tokenizer__ggml__eos_token_id=None,
        **changes,
    )
    return {tokens[index] for index in built.eos_token_ids}


def test_ends_are_control_tokens_by_name_and_by_key(tmp_path: Path) -> None:
    """Each family's end of turn ends an answer; HTML that gemma's vocabulary has does not."""
    kinds = {"ab": _NORMAL, "<end_of_turn>": _CONTROL, "</s>": _USER_DEFINED, "<my end>": _CONTROL}
    assert _ends(tmp_path, kinds) == {"<end_of_turn>"}
    found = _ends(tmp_path, kinds, tokenizer__ggml__eot_token_id=259)
    assert found == {"<end_of_turn>", "<my end>"}


def test_end_of_a_harmony_message_is_no_end_of_turn(tmp_path: Path) -> None:
    """gpt-oss writes <|end|> behind its reasoning; phi's <|end|> is the end of an answer."""
    phi = {"ab": _NORMAL, "<|end|>": _CONTROL}
    assert _ends(tmp_path, phi) == {"<|end|>"}
    harmony = {**phi, "<|return|>": _CONTROL, "<|call|>": _CONTROL}
    assert _ends(tmp_path, harmony) == {"<|return|>", "<|call|>"}


def test_named_templates_stand_beside_the_default_one(tmp_path: Path) -> None:
    """A conversation with tools is rendered with the template tool_use where the file has one."""
    path = write_gguf(
        tmp_path / "x.gguf",
        llama_metadata(
            tokenizer__chat_template="plain",
            tokenizer__chat_template__tool_use="with tools",
            tokenizer__chat_templates=["tool_use"],
        ),
        {},
    )
    tokenizer, _ = gguf_tokenizer(read_gguf_header(path), chat_template=None)
    user: list[dict[str, object]] = [{"role": "user", "content": "hello"}]
    tool: dict[str, object] = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}},
    }
    tokenizer.start_renderer()
    assert tokenizer.render_chat(user) == "plain"
    assert tokenizer.render_chat(user, tools=[tool]) == "with tools"
