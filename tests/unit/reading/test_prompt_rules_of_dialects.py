"""Rules see a conversation, whatever dialect it came in."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.ollama.request import OllamaChatRequest
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.wire.decoding import decode_body
from machd.reading.normalised_messages import NormalisedMessages
from machd.request.conversation import Conversation
from machd.settings.cache import PromptRuleName

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"
AGENT = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
HI = {"role": "user", "content": "Hi"}
COUNTDOWN = {"role": "system", "content": "<total_tokens>14979990 tokens left</total_tokens>"}
RULES: tuple[PromptRuleName, ...] = ("claude_code_billing", "claude_code_countdown")


def _chat() -> Conversation:
    parts = [{"type": "text", "text": f"{BILLING}\n"}, {"type": "text", "text": AGENT}]
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": parts}, HI, COUNTDOWN],
    }
    return decode_body(json.dumps(body).encode(), ChatCompletionRequest).checked().conversation()


def _responses() -> Conversation:
    body = {
        "model": "m",
        "instructions": f"{BILLING}\n{AGENT}",
        "input": [HI, COUNTDOWN],
    }
    request = decode_body(json.dumps(body).encode(), ResponsesRequest).checked()
    return request.continued(request.chain(previous=(), referenced={}))


def _anthropic() -> Conversation:
    blocks = [{"type": "text", "text": one} for one in (BILLING, AGENT)]
    body = {"model": "m", "max_tokens": 1, "system": blocks, "messages": [HI, COUNTDOWN]}
    return decode_body(json.dumps(body).encode(), MessagesRequest).checked().conversation()


def _ollama() -> Conversation:
    messages = [{"role": "system", "content": f"{BILLING}\n{AGENT}"}, HI, COUNTDOWN]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return decode_body(body, OllamaChatRequest).checked().conversation()


@pytest.mark.parametrize("read", [_chat, _responses, _anthropic, _ollama])
def test_rules_hold_in_every_dialect(read: Callable[[], Conversation]) -> None:
    """They see the conversation, which is the same in all of them."""
    normalised = NormalisedMessages(read().messages, RULES)
    assert [(one["role"], one["content"]) for one in normalised.messages] == [
        ("system", AGENT),
        ("user", "Hi"),
    ]
    assert tuple(one.rule for one in normalised.removed) == RULES
