"""How a model that generates text scores a document for a query: by two tokens at the end of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3-Reranker judges by where nothing else is said."""


@dataclass(frozen=True, slots=True)
class RerankerDescription:
    """The prompt and the tokens of a generative reranker.

    Attributes:
        true_token_id: Token that calls a document relevant.
        false_token_id: Token that calls it irrelevant; the score is the first one's share of both probabilities.
        instruction: What documents are judged by, where a request says nothing.
        has_template: The model's chat template makes the prompt of messages of the roles ``query`` and ``document``;
            otherwise the prompt is Qwen3-Reranker's.
    """

    true_token_id: int
    false_token_id: int
    instruction: str = DEFAULT_INSTRUCTION
    has_template: bool = False


def pair_messages(query: str, document: str, instruction: str) -> list[dict[str, object]]:
    """Return a pair as sentence-transformers gives it to a reranker's chat template."""
    return [
        {"role": "system", "content": instruction},
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]
