"""Normalisation and pieces before byte-level BPE, by the name in ``tokenizer.ggml.pre``.

Each name stands for the steps of one family's ``tokenizer.json``. llama.cpp's converter finds the name by
the family's token ids for one text, so families with equal steps share a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers

from machd.engine.backend.untyped import Backend


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The steps of a family's tokenizer before BPE.

    Attributes:
        patterns: Each cuts the pieces of the one before; what lies between matches stays a piece.
        has_words: Whether GPT-2's own pattern cuts last.
        normalises: Whether texts are brought to Unicode's composed form, NFC.
        keeps_tokens: Whether a piece that is a token stays whole, whatever merges there are.
        begins: Whether a begin token precedes each text, where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    has_words: bool = False
    normalises: bool = False
    keeps_tokens: bool = False
    begins: bool = False

    def normalizer(self) -> Backend | None:
        """Return the normalizer; None for a family without one."""
        return normalizers.NFC() if self.normalises else None

    def pre_tokenizer(self) -> Backend:
        """Return the steps that cut a text, of which the last spells bytes as GPT-2's characters."""
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.has_words)
        return pre_tokenizers.Sequence([*splits, spelling])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _CL100K.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED_CODER = _CL100K.replace("{1,3}", "").replace(
    r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _AFTER_WORDS
_O200K = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _AFTER_WORDS
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-"
    "\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00"
    "-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-"
    "\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13"
    "-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _END,
)
_HAN_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DIGIT = r"\p{N}"

_LLAMA3 = PreTokenizer((_CL100K,), keeps_tokens=True, begins=True)
_DIGITS_AND_WORDS = PreTokenizer((_DIGIT,), has_words=True)
_WORDS = PreTokenizer(has_words=True)
_KINDS: Mapping[PreTokenizer, str] = {
    _LLAMA3: "llama-bpe llama3 llama-v3",
    replace(_LLAMA3, begins=False): "falcon3 falcon-h1 lfm2",
    PreTokenizer((_CL100K,)): "dbrx smaug-bpe chatglm-bpe glm4",
    PreTokenizer((_QWEN2,), normalises=True): "qwen2 deepseek-r1-qwen stablelm2 megrez",
    PreTokenizer((_QWEN35,), normalises=True): "qwen35",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer((_O200K,)): "gpt-4o llama4 kanana2",
    PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)): "tiny_aya cohere2moe",
    PreTokenizer((_TEKKEN,), keeps_tokens=True, begins=True): "tekken",
    PreTokenizer(_DEEPSEEK_V3): "deepseek-v3",
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_OR_HANGUL,
            _DIGIT,
        )
    ): "deepseek-llm",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OR_HANGUL, _DIGIT)): "deepseek-coder",
    PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
    replace(_DIGITS_AND_WORDS, normalises=True): "command-r",
    _DIGITS_AND_WORDS: "smollm starcoder refact codeshell minerva-7b",
    replace(_WORDS, normalises=True): "olmo mpt",
    _WORDS: "gpt-2 gpt2 phi-2 jais",
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: steps for steps, names in _KINDS.items() for name in names.split()}
)
"""Each known name in ``tokenizer.ggml.pre``."""

UNKNOWN = _WORDS
"""What stands in for an unknown name."""
