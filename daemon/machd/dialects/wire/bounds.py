"""The bounds of everything a client may send, one alias for each kind of value.

``limits.*`` in the settings are what an operator turns; these are the hard ends that no setting
passes, so that no field is ever unbounded. Text is bounded at the scale of the largest body that
could be configured: ``limits.max_body_bytes`` is the bound that is met first.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from machd.request.generation import WHOLE_ROOM
from machd.request.schema_bounds import MAX_CHOICES, MAX_LITERAL_CHARACTERS

MAX_PROMPTS = 128
"""Prompts that one completion request may carry; each of them is ``n`` sequences."""

MAX_INPUTS = 2**20
"""Texts that a request to an encoder may carry; ``limits.max_inputs`` is met first."""

MAX_TOOLS = 512
"""Tools that one request may bring, and calls that one message may hold."""

MAX_SCHEMA_BYTES = 256 * 1024
"""Bytes of JSON that one schema may have, be it a tool's or an answer's."""

MAX_TOOL_SCHEMAS_BYTES = 1024 * 1024
"""Bytes of JSON that the schemas of one request's tools may have together."""

_MAX_TEXT_CHARS = 8 * 1024 * 1024
_MAX_MEDIA_CHARS = 1024 * 1024 * 1024
_MAX_TOKEN_ID = 2**31 - 1
_MAX_PROMPT_TOKENS = 2**20

ModelName = Annotated[str, Meta(max_length=256)]
"""A model's name: compared with the names that are served, never used as a path."""

ContentText = Annotated[str, Meta(max_length=_MAX_TEXT_CHARS)]
"""A prompt or a message's text, in characters."""

MediaText = Annotated[str, Meta(max_length=_MAX_MEDIA_CHARS)]
"""A URL of an image or a video, which may be a data: URL with the whole file; or its base64 alone."""

FramesPerSecond = Annotated[float, Meta(gt=0.0, le=120.0)]
"""Frames to take of each second of a video."""

MaxFrames = Annotated[int, Meta(ge=1, le=4096)]
"""Most frames to take of a video; ``vision.max_frames`` is met first."""

CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
"""A secret of the client's: prompts are only found again by requests that know it."""

Label = Annotated[str, Meta(max_length=512)]
"""A short text that names something."""

UnusedLabel = Annotated[
    str, Meta(max_length=512, description="Accepted; does not change the answer.")
]
"""A short text that a client notes for itself, such as ``user``."""

TokenId = Annotated[int, Meta(ge=0, le=_MAX_TOKEN_ID)]
"""A token id of any vocabulary; :mod:`machd.dialects.wire.generation_request` checks it against the model's own."""

TokenIds = Annotated[list[TokenId], Meta(max_length=_MAX_PROMPT_TOKENS)]
"""A prompt that is already tokenised."""

MaxTokens = Annotated[int, Meta(ge=WHOLE_ROOM, le=2**31 - 1)]
"""Tokens that a completion may have; ``WHOLE_ROOM`` for all that fit."""

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
"""0 is greedy. The range is OpenAI's."""

TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
"""A share of probability mass; 0 leaves the likeliest token alone."""

MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
"""The least probability a token may have, as a share of the likeliest one's; 0 is off."""

TopK = Annotated[int, Meta(ge=-1, le=_MAX_TOKEN_ID)]
"""How many of the likeliest tokens take part; 0 and, as clients of vLLM write it, -1 are off."""

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
"""A presence or frequency penalty, subtracted from logits. The range is OpenAI's."""

RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2.0)]
"""A factor on the logits of tokens that occurred; 1 is off. A logit divided by less is no number."""

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A signed 64-bit integer, as in OpenAI's API."""

MaxToolCalls = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""Calls of tools that a server runs itself. machd runs none, so any number is kept to."""

SamplesPerPrompt = Annotated[int, Meta(ge=1, le=128)]
"""``n``: completions for one prompt. 128 is OpenAI's; ``limits.max_n`` is met first."""

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
"""Alternatives shown at each position of a chat completion. The range is OpenAI's."""

CompletionLogprobs = Annotated[int, Meta(ge=0, le=20)]
"""Alternatives at each position of a completion. OpenAI stops at 5; the chat range serves both."""

PromptLogprobs = Annotated[int, Meta(ge=0, le=20)]
"""Alternatives at each position of a prompt. -1, which asks vLLM for the whole vocabulary, is refused."""

MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of prompts in one answer, alternatives included: some 15 MB of JSON."""

StreamInterval = Annotated[int, Meta(ge=1, le=1024)]
"""Tokens in one server-sent event."""

LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
    Meta(
        max_length=1024,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
"""Token id, written as a JSON string, to what is added to its logit."""

StopText = Annotated[str, Meta(min_length=1, max_length=512)]
"""A text that ends the completion, in characters."""

Stop = StopText | Annotated[list[StopText], Meta(max_length=64)]
"""A text that ends the completion, or several of them."""

MinTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Tokens before which a completion does not end by itself."""

AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**18)]
"""The only tokens that a completion may have."""

TruncatedTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""The prompt's last tokens that are kept; -1 for as many as the context holds."""

RepetitionWindow = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Tokens that a repetition penalty looks back; -1 for the whole text."""

ForbiddenTexts = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)
]
"""Texts that must not occur in an answer."""

StopTokenIds = Annotated[list[TokenId], Meta(max_length=256)]
"""Tokens that end the completion."""

PriorityNumber = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""vLLM's priority: a lower number is started sooner, 0 is normal."""

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""Pairs that a client keeps for itself. The bounds are OpenAI's."""

ToolName = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]{1,128}$(?!\n)")
]
"""A tool's or a schema's name: OpenAI's and Anthropic's characters, and the dots of MCP's tool names.
In Python alone ``$`` lets a line feed follow."""

CallId = Annotated[str, Meta(min_length=1, max_length=512)]
"""A tool call's id: ours, or that of whichever server made the call."""

Description = Annotated[str, Meta(max_length=64 * 1024)]
"""What a tool or a schema is for, in characters."""

RegexText = Annotated[str, Meta(min_length=1, max_length=16 * 1024)]
"""A regular expression, in characters."""

GrammarText = Annotated[str, Meta(min_length=1, max_length=64 * 1024)]
"""A context-free grammar, in characters."""

Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_LITERAL_CHARACTERS)]],
    Meta(min_length=1, max_length=MAX_CHOICES),
]
"""Texts one of which the answer is."""

ThinkingBudget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Tokens of thought; 0 closes thoughts as soon as they open, -1 is no bound."""

TemplateVariable = (
    bool | Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | Annotated[str, Meta(max_length=64)]
)
"""What a client may give a chat template."""

PromptName = Annotated[str, Meta(min_length=1, max_length=128)]
"""A name of one of the prompts of an encoder's checkpoint."""

Dimensions = Annotated[int, Meta(ge=1, le=2**16)]
"""Width of an embedding."""
