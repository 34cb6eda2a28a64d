"""Prompts of generative rerankers, to the letter."""

from __future__ import annotations

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.reranker import RerankerDescription
from machd.reading.rerank_prompt import rerank_prompts

_MODEL_CARD = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruction}
<Query>: What is the capital of China?
<Document>: The capital of China is Beijing.<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""Of Qwen3-Reranker, a blank line at its end included."""

_PAIR = ("What is the capital of China?", "The capital of China is Beijing.")
_WEB = "Given a web search query, retrieve relevant passages that answer the query"


def _written(reranker: RerankerDescription, instruction: str | None = None) -> str:
    (prompt,) = rerank_prompts(reranker, FakeTokenizer(), [_PAIR], instruction)
    return bytes(prompt).decode()


def test_prompt_is_that_of_the_model_card() -> None:
    """With the model's own instruction, and with a request's."""
    reranker = RerankerDescription(1, 2)
    assert _written(reranker) == _MODEL_CARD.format(instruction=_WEB)
    assert _written(reranker, "Find a capital") == _MODEL_CARD.format(instruction="Find a capital")


def test_chat_template_with_the_pairs_roles_makes_the_prompt() -> None:
    """The instruction is the system's, as sentence-transformers has it."""
    reranker = RerankerDescription(1, 2, instruction="Judge.", has_template=True)
    assert _written(reranker) == (
        "system: Judge.\n"
        "query: What is the capital of China?\n"
        "document: The capital of China is Beijing.\n"
        "assistant: "
    )


def test_prompts_of_one_query_begin_alike() -> None:
    """Up to the document, so that the prefix cache has the query once."""
    query, document = _PAIR
    one, other = rerank_prompts(
        RerankerDescription(1, 2), FakeTokenizer(), [(query, document), (query, "other")]
    )
    shared = _MODEL_CARD.format(instruction=_WEB).partition(document)[0].encode()
    assert one[: len(shared)] == other[: len(shared)] == tuple(shared)
