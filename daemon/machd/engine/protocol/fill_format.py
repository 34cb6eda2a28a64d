"""Fill-in-the-middle prompts, which ask a model for the text between a prefix and a suffix.

A model that was trained for it has marker tokens, which each family spells in its own way. The texts
between the markers are a client's, so they are encoded as plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from machd.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one, that the model reads before the prefix."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The ids of a model's fill-in-the-middle tokens.

    Attributes:
        middle: The token at which the model begins to write; None for a family without one, whose
            prompts have the suffix first.
        repository: The token before the name of a repository, where the model has it.
        ends: Tokens that end a fill when the model writes them.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None
    ends: frozenset[int] = frozenset()

    @property
    def all_ids(self) -> frozenset[int]:
        """The tokens that a client's text must not be encoded to."""
        found = {self.prefix, self.suffix, self.middle, self.repository, self.file, *self.ends}
        return frozenset(one for one in found if one is not None)


_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
    ("[PREFIX]", "[SUFFIX]"),  # Codestral; mistral_common writes the suffix first, and no middle
)
"""The markers of prefix, suffix and middle in each family."""

_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>", "<fim-repo>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|endoftext|>")

_REPOSITORY_NAME = "repository\n"
_FILE_NAME = "file\n"
"""Names for a repository and a file that a request does not name."""


def find_fill_tokens(vocabulary: Mapping[str, int]) -> FillTokens | None:
    """Find a family's fill-in-the-middle tokens in a vocabulary; None where no family is whole."""

    def first(names: Sequence[str]) -> int | None:
        return next((vocabulary[one] for one in names if one in vocabulary), None)

    for markers in _FAMILIES:
        if all(one in vocabulary for one in markers):
            prefix, suffix, *middle = markers
            ends = (*markers, *_REPOSITORY, *_FILE, *_ENDS)
            return FillTokens(
                prefix=vocabulary[prefix],
                suffix=vocabulary[suffix],
                middle=first(middle),
                repository=first(_REPOSITORY),
                file=first(_FILE),
                ends=frozenset(vocabulary[one] for one in ends if one in vocabulary),
            )
    return None


class FillFormat:
    """The fill-in-the-middle prompts of one model."""

    def __init__(
        self,
        tokens: FillTokens,
        encode_plain: Callable[[str], list[int]],
        opening: Sequence[int] = (),
    ) -> None:
        """Take a model's markers, an encoder of plain text, and tokens that begin every prompt, such as begin-of-text."""
        self._tokens = tokens
        self._encode_plain = encode_plain
        self._opening = tuple(opening)

    def fits(self, vocabulary_tokens: int) -> bool:
        """Tell whether logits of this width hold each marker; some tokenizers have more tokens."""
        return max(self._tokens.all_ids) < vocabulary_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a fill, besides the model's own end tokens."""
        return self._tokens.ends

    def prompt(
        self, prefix: str, suffix: str, context: Sequence[ContextFile] = ()
    ) -> tuple[int, ...]:
        """Make the token ids that the model continues with the text between prefix and suffix.

        Raises:
            InvalidRequestError: A text spells one of the model's tokens, and its tokenizer cannot
                read that as plain text.
        """
        tokens = self._tokens
        before = (tokens.prefix, *self._encode(prefix))
        after = (tokens.suffix, *self._encode(suffix))
        opening = (*self._opening, *self._context(context))
        if tokens.middle is None:
            return (*opening, *after, *before)
        return (*opening, *before, *after, tokens.middle)

    def _context(self, context: Sequence[ContextFile]) -> list[int]:
        """Encode the files before the prefix as llama.cpp does for ``input_extra``.

        The pattern is Qwen2.5-Coder's (arXiv:2409.12186), or texts with a rule between them.
        """
        if not context:
            return []
        if self._tokens.file is None:
            joined = "".join(f"\n\n--- snippet ---\n\n{one.text}" for one in context)
            return self._encode(joined)
        ids: list[int] = []
        if self._tokens.repository is not None:
            ids += [self._tokens.repository, *self._encode(_REPOSITORY_NAME)]
        for one in context:
            ids += [self._tokens.file, *self._encode(f"{one.name}\n{one.text}")]
        return [*ids, self._tokens.file, *self._encode(_FILE_NAME)]

    def _encode(self, text: str) -> list[int]:
        ids = self._encode_plain(text) if text else []
        if not self._tokens.all_ids.isdisjoint(ids):
            raise InvalidRequestError(
                "a text holds one of the model's fill-in-the-middle tokens, which its tokenizer cannot "
                "read as plain text; take the token out of the text"
            )
        return ids
