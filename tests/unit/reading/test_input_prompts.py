"""Which text stands before the texts of a request."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from machd.engine.protocol.encoder import EncoderDescription, EncoderTask
from machd.errors import InvalidRequestError
from machd.reading.input_prompts import input_prompt

_E5 = {"query": "query: ", "passage": "passage: "}
_QWEN3 = {"query": "Instruct: Given a web search query\nQuery:", "document": ""}
_GEMMA = {"query": "task: search | query: ", "document": "title: none | text: ", "Clustering": "c"}


def _encoder(prompts: Mapping[str, str], default: str | None = None) -> EncoderDescription:
    return EncoderDescription(
        EncoderTask.EMBED,
        "mean",
        is_normalised=True,
        dimensions=4,
        max_input_tokens=16,
        prompts=prompts,
        default_prompt=default,
    )


def test_the_default_prompt_is_used_unless_another_is_asked_for() -> None:
    """Without a default there is none."""
    assert input_prompt(_encoder(_E5)) == ""
    assert input_prompt(_encoder(_E5, "passage")) == "passage: "
    assert input_prompt(_encoder(_E5, "passage"), prompt_name="query") == "query: "


@pytest.mark.parametrize(
    ("prompts", "input_type", "prompt"),
    [
        (_E5, "query", "query: "),
        (_E5, "search_query", "query: "),
        (_E5, "document", "passage: "),
        (_E5, "search_document", "passage: "),
        (_GEMMA, "passage", "title: none | text: "),
        (_GEMMA, "clustering", "c"),
        (_QWEN3, "document", ""),
        ({"query": "q: "}, "document", ""),
        ({}, "query", ""),
        ({}, "anything", ""),
    ],
)
def test_input_types_of_other_servers_name_prompts(
    prompts: Mapping[str, str], input_type: str, prompt: str
) -> None:
    """Cohere's, NVIDIA's and Voyage's names mean the checkpoint's; a checkpoint without prompts takes any."""
    assert input_prompt(_encoder(prompts), input_type=input_type) == prompt


def test_an_instruction_has_the_place_that_the_prompt_has_for_one() -> None:
    """Qwen3-Embedding's prompt keeps its frame; elsewhere the instruction stands as it is."""
    assert input_prompt(_encoder(_QWEN3), instruction="Find code") == "Instruct: Find code\nQuery:"
    assert input_prompt(_encoder(_E5), instruction="Find code: ") == "Find code: "


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt_name": "nope"}, "prompt_name"),
        ({"input_type": "classification"}, "input_type"),
        ({"prompt_name": "query", "instruction": "x"}, "prompt_name"),
    ],
)
def test_unknown_prompts_are_refused_with_the_known_ones(asked: dict[str, str], param: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(InvalidRequestError) as refused:
        input_prompt(_encoder(_E5), **asked)
    assert refused.value.param == param
