"""Which text is put before the texts of a request, of the prompts that an encoder's checkpoint names."""

from __future__ import annotations

import re

from machd.engine.protocol.encoder import EncoderDescription
from machd.errors import InvalidRequestError

_SYNONYMS = (
    frozenset({"query", "search_query"}),
    frozenset({"document", "passage", "search_document", "text"}),
)
"""Names for one side of a search: of checkpoints, and of Cohere's, NVIDIA's and Voyage's APIs."""

_INSTRUCTED = re.compile(r"Instruct: .+(?P<rest>\nQuery:\s*)", re.DOTALL)
"""The prompt of Qwen3-Embedding and E5-instruct, in which an instruction has its place."""


def input_prompt(
    encoder: EncoderDescription,
    *,
    prompt_name: str | None = None,
    input_type: str | None = None,
    instruction: str | None = None,
) -> str:
    """Return the text that stands before each text; empty for none.

    An ``instruction`` takes the place of the one in the checkpoint's prompt for queries, or stands there as it is
    where that prompt has none. An ``input_type`` changes nothing for a checkpoint without prompts.

    Raises:
        InvalidRequestError: The checkpoint has no such prompt; the message names those that it has.
    """
    if sum(one is not None for one in (prompt_name, input_type, instruction)) > 1:
        raise InvalidRequestError.at(
            "prompt_name", "send one of prompt_name, input_type and instruction"
        )
    if instruction is not None:
        return _instructed(encoder, instruction)
    if prompt_name is not None:
        if prompt_name not in encoder.prompts:
            raise InvalidRequestError.at(
                "prompt_name", f"the model's checkpoint has {_named(encoder)}; ask for one of them"
            )
        return encoder.prompts[prompt_name]
    if input_type is not None and encoder.prompts:
        return _typed(encoder, input_type)
    return "" if encoder.default_prompt is None else encoder.prompts[encoder.default_prompt]


def _instructed(encoder: EncoderDescription, instruction: str) -> str:
    match = _INSTRUCTED.fullmatch(encoder.prompts.get("query", ""))
    return instruction if match is None else f"Instruct: {instruction}{match['rest']}"


def _typed(encoder: EncoderDescription, input_type: str) -> str:
    asked = input_type.lower()
    names = next((one for one in _SYNONYMS if asked in one), frozenset({asked}))
    for name, prompt in encoder.prompts.items():
        if name.lower() == asked:
            return prompt
    for name, prompt in encoder.prompts.items():
        if name.lower() in names:
            return prompt
    if asked in _SYNONYMS[1]:
        return ""  # models with instructions for queries alone take documents as they are
    raise InvalidRequestError.at(
        "input_type", f"the model's checkpoint has {_named(encoder)}; ask for one of them"
    )


_MAX_NAMES = 32


def _named(encoder: EncoderDescription) -> str:
    if not encoder.prompts:
        return "no prompts"
    names = ", ".join(map(repr, list(encoder.prompts)[:_MAX_NAMES]))
    return f"the prompts {names}"
