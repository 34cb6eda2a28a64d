"""Requests for scores, ranks and classes of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.dialects.wire import bounds
from machd.dialects.wire.encoder_request import EncoderRequest, InputTexts
from machd.dialects.wire.refusal import Ignored, Refused
from machd.errors import InvalidRequestError


class RerankDocument(Struct, frozen=True, kw_only=True):
    """A document as an object; what else it holds is ignored."""

    text: bounds.ContentText


_Documents: TypeAlias = Annotated[
    list[bounds.ContentText | RerankDocument], Meta(min_length=1, max_length=bounds.MAX_INPUTS)
]
_TopN: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_DocumentTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ScoringRequest(EncoderRequest, frozen=True, kw_only=True):
    """Fields of requests for scores.

    Attributes:
        instruction: What makes a document relevant, for rerankers that generate.
        use_activation: False gives the model's logits as they are.
    """

    instruction: bounds.ContentText | None = None
    use_activation: bool | None = None

    @property
    def wants_logits(self) -> bool:
        """Whether scores are the model's logits."""
        return self.use_activation is False


class RerankRequest(ScoringRequest, frozen=True, kw_only=True):
    """Documents that are to be put in the order of their relevance for a query.

    Attributes:
        documents: Texts, or objects with a ``text``.
        texts: The name of text-embeddings-inference for ``documents``; then the answer is its own, too.
        raw_scores: Its name for the opposite of ``use_activation``.
        return_text: Its name for ``return_documents``.
        top_n: Results at most; all of them unless given, or 0.
        return_documents: Whether results hold their documents.
        max_tokens_per_doc: Tokens that a document is cut to.
    """

    query: bounds.ContentText
    documents: _Documents | None = None
    texts: InputTexts | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: _TopN | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: _DocumentTokens | None = None

    max_chunks_per_doc: Ignored = UNSET
    rank_fields: Refused = UNSET
    return_embeddings: Refused = UNSET

    def checked(self) -> Self:
        """Check as the base class does, and that one field holds the documents."""
        super().checked()
        if (self.documents is None) == (self.texts is None):
            raise InvalidRequestError.at("documents", "send either documents or texts")
        return self

    @property
    def wants_logits(self) -> bool:
        """Whether scores are the model's logits."""
        return self.raw_scores is True or super().wants_logits

    @property
    def is_tei(self) -> bool:
        """Whether the request is one of text-embeddings-inference."""
        return self.texts is not None

    @property
    def documents_param(self) -> str:
        """The field that holds the documents."""
        return "texts" if self.is_tei else "documents"

    @property
    def document_texts(self) -> list[str]:
        """The documents' texts."""
        given = self.documents or self.texts or ()
        return [one if isinstance(one, str) else one.text for one in given]

    @property
    def gives_documents(self) -> bool:
        """Whether results hold their documents."""
        return bool(self.return_documents or self.return_text)


class ScoreRequest(ScoringRequest, frozen=True, kw_only=True):
    """Pairs of texts that are to be scored: one text with each of others, or texts with others of the same number.

    Attributes:
        text_1: The first texts; ``queries`` and ``data_1`` are other names for them.
        text_2: The second ones; ``documents``, ``items`` and ``data_2`` are other names.
    """

    text_1: bounds.ContentText | InputTexts | None = None
    text_2: bounds.ContentText | InputTexts | None = None
    queries: bounds.ContentText | InputTexts | None = None
    documents: bounds.ContentText | InputTexts | None = None
    items: bounds.ContentText | InputTexts | None = None
    data_1: bounds.ContentText | InputTexts | None = None
    data_2: bounds.ContentText | InputTexts | None = None

    _FIRST: ClassVar = ("text_1", "queries", "data_1")
    _SECOND: ClassVar = ("text_2", "documents", "items", "data_2")

    def checked(self) -> Self:
        """Check as the base class does, and that the texts make pairs."""
        super().checked()
        self.pairs()
        return self

    @property
    def param(self) -> str:
        """The field that holds the second texts."""
        return self._given(self._SECOND)[0]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts.

        Raises:
            InvalidRequestError: There are no texts, or they do not make pairs.
        """
        name, first = self._given(self._FIRST)
        other_name, second = self._given(self._SECOND)
        if len(first) == 1:
            return [(first[0], one) for one in second]
        if len(first) != len(second):
            raise InvalidRequestError.at(
                other_name,
                f"{name} has {len(first)} texts and {other_name} {len(second)}; send as many, or one in {name}",
            )
        return list(zip(first, second, strict=True))

    def _given(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return the one of some fields that is given, and its texts."""
        given = [one for one in names if getattr(self, one) is not None]
        if len(given) != 1:
            raise InvalidRequestError.at(
                given[1] if given else names[0], f"send one of {', '.join(names)}"
            )
        texts: str | list[str] = getattr(self, given[0])
        return given[0], [texts] if isinstance(texts, str) else texts


class ClassifyRequest(EncoderRequest, frozen=True, kw_only=True):
    """Texts that are to be classified.

    Attributes:
        use_activation: False gives logits in place of probabilities.
    """

    input: bounds.ContentText | InputTexts
    use_activation: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input
