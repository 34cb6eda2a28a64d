"""Prompts of generative rerankers: a query and a document as the model was trained to read them.

Qwen3-Reranker's prompt is that of its model card: a wrong one costs most of the ranking's quality, without an error.
Its frame and its content are tokenised apart, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.protocol.reranker import RerankerDescription, pair_messages
from machd.engine.protocol.tokenizer import Tokenizer

QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank_prompts(
    reranker: RerankerDescription,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None = None,
) -> list[tuple[int, ...]]:
    """Return the prompt of each pair of query and document; for a worker thread.

    Args:
        reranker: The model's.
        tokenizer: The model's.
        pairs: Query and document.
        instruction: What documents are judged by; None for the model's own.

    Raises:
        InvalidRequestError: The chat template refuses a pair.
        OverloadedError: The system has no room for the process that renders the template.
    """
    judged_by = reranker.instruction if instruction is None else instruction
    if reranker.has_template:
        messages = [pair_messages(query, document, judged_by) for query, document in pairs]
        return [
            tuple(tokenizer.encode(tokenizer.render_chat(one), add_special_tokens=False))
            for one in messages
        ]
    prefix = tokenizer.encode(QWEN3_PREFIX, add_special_tokens=False)
    suffix = tokenizer.encode(QWEN3_SUFFIX, add_special_tokens=False)
    contents = (
        f"<Instruct>: {judged_by}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    )
    return [
        (*prefix, *tokenizer.encode(content, add_special_tokens=False), *suffix)
        for content in contents
    ]
