"""Prompts of several questions about one text: each a conversation of one message, and all begin with the same tokens.

The text is rendered and tokenised once, however many questions there are, and its tokens do not depend on them. Words
and punctuation are different tokens in nearly every tokenizer, so a prompt's tokens are parted between the word
``Question`` and the colon behind it: a whole prompt would have the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.protocol.chat_format import TextState
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import UnsupportedParameterError


def shared_prompts(
    tokenizer: Tokenizer, text: str, questions: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return a prompt for each question behind the text, which ends where the reply begins, without thoughts.

    For a worker thread of chat templates.

    Raises:
        ChatTemplateMissingError: The model takes no conversations.
        InvalidRequestError: The chat template refuses the conversation.
        OverloadedError: The system has no room for the process that renders it.
        UnsupportedParameterError: A reply does not begin with its answer, or the template changes messages.
    """
    chat_format = tokenizer.chat_format
    mark = "zq7question"
    while mark in text:
        mark += "q"
    rendered = tokenizer.render_chat(
        [{"role": "user", "content": f"{text}\n\nQuestion{mark}"}],
        variables={"enable_thinking": False},
    )
    if chat_format.opening_state is not TextState.NORMAL or rendered.count(mark) != 1:
        raise UnsupportedParameterError.at(
            "model",
            "its replies do not begin with an answer that could be read; serve another model",
        )
    beginning, _, ending = rendered.partition(mark)
    if chat_format.reasoning_markers is not None:
        opened, closed = chat_format.reasoning_markers
        if ending.rstrip().endswith(opened.strip()):
            ending = f"{ending}{closed}"
    shared = tokenizer.encode(beginning, add_special_tokens=False)
    return [
        (*shared, *tokenizer.encode(f":{one}{ending}", add_special_tokens=False))
        for one in questions
    ]
