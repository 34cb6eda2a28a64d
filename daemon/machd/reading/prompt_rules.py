"""Rules of ``cache.normalise``: texts of known clients that change between requests, and where they stand.

A rule matches what one client writes, word for word, and only where that client writes it. So the same words in a user's
message, in a file or in code stay. Each rule names the version whose requests were recorded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from machd.engine.protocol.tokenizer import Tokenizer
from machd.settings.cache import PromptRuleName


class RulePosition(StrEnum):
    """The messages that a rule looks at."""

    OPENING = "opening"
    """The conversation's first message, if it is a system message."""

    SYSTEM = "system"
    """Every system message."""

    FIRST_USER = "first_user"
    """The first message of the user's."""


@dataclass(frozen=True, slots=True)
class PromptRule:
    """A text of a client's that is taken out of prompts.

    Attributes:
        source: The client's version whose requests showed the text, and where others reported it.
        patterns: What is searched in a message's text. The group ``removed`` is taken out; all else has to be there and stays.
        removes_all: All matches of a pattern are taken out, not only the first one.
    """

    position: RulePosition
    source: str
    patterns: tuple[re.Pattern[str], ...]
    removes_all: bool = False


TEMPLATE_DATE: PromptRuleName = "template_date"
"""The rule without a text: the chat template gets an empty text for the date that it asks for."""

_COUNTDOWN = (
    r"(?:<total_tokens>(?:\d+|Infinite) tokens left</total_tokens>"
    r"|Token usage: \d+/\d+; -?\d+ remaining"
    r"|USD budget: \$[\d.]+/\$[\d.]+; \$-?[\d.]+ remaining)"
)

PROMPT_RULES: Mapping[PromptRuleName, PromptRule] = MappingProxyType(
    {
        # The first block of the system prompt. The last three characters of the version are a hash of the conversation's
        # first message; cch, where it is sent, is one of the whole request.
        "claude_code_billing": PromptRule(
            RulePosition.OPENING,
            "Claude Code 2.1.197; anthropics/claude-code 68900 (cch), teamchong/pxpipe 180 (cc_prev_req)",
            (
                re.compile(
                    r"\A(?P<removed>x-anthropic-billing-header: cc_version=[^\s;]+"
                    r"(?:; [a-z_]+=[^\s;]*)*(?:;\n?|\n|\Z))"
                ),
            ),
        ),
        # A paragraph of the system prompt, and a system message after each result of a tool. The second kind is sent with
        # ENABLE_TOKEN_USAGE_ATTACHMENT=1, the third with a budget.
        "claude_code_countdown": PromptRule(
            RulePosition.SYSTEM,
            "Claude Code 2.1.197; jundot/omlx 2881, anthropics/claude-code 96101, ollama/ollama 17918",
            # Two, because each begins with what is found fast.
            (
                re.compile(rf"\A(?P<removed>{_COUNTDOWN}(?:\n\n{_COUNTDOWN})*(?:\n\n|\Z))"),
                re.compile(rf"(?P<removed>\n\n{_COUNTDOWN}(?:\n\n{_COUNTDOWN})*)(?=\n\n|\Z)"),
            ),
            removes_all=True,
        ),
        # The last part of what is put before the user's first message. A session that is continued on another day has that
        # day's date there.
        "claude_code_date": PromptRule(
            RulePosition.FIRST_USER,
            "Claude Code 2.1.197; anthropics/claude-code 87487",
            (
                re.compile(
                    r"\A<system-reminder>\nAs you answer the user's questions, you can use the following context:\n"
                    r"(?:(?!</system-reminder>).)*?"
                    r"(?P<removed># currentDate\nToday's date is \d{4}-\d\d-\d\d\.)"
                    r"\n\n +IMPORTANT: this context may or may not be relevant to your tasks\.",
                    re.DOTALL,
                ),
            ),
        ),
        # The last line of the environment block of the system prompt.
        "opencode_date": PromptRule(
            RulePosition.OPENING,
            "opencode 1.18.33; anomalyco/opencode 32622",
            (
                re.compile(
                    r"^<env>\n  Working directory: [^\n]*\n(?:  [^\n]*\n)*?"
                    r"(?P<removed>  Today's date: [A-Z][a-z]{2} [A-Z][a-z]{2} \d\d \d{4}\n)</env>$",
                    re.MULTILINE,
                ),
            ),
        ),
        # The second line of the message before the user's first one.
        "qwen_code_date": PromptRule(
            RulePosition.FIRST_USER,
            "Qwen Code 0.15.10",
            (
                re.compile(
                    r"\AThis is the Qwen Code\. We are setting up the context for our chat\.\n"
                    r"(?P<removed>Today's date is [^\n]{1,80} \(formatted according to the user's locale\)\.\n)"
                ),
            ),
        ),
    }
)
"""By name; :data:`TEMPLATE_DATE` is not among them. Codex has none: it keeps a session's date, and adds a later one at the end."""


def writes_date(tokenizer: Tokenizer, rules: Collection[PromptRuleName]) -> bool:
    """Tell whether the chat template gets the date: unless it asks for it, and a rule takes it out."""
    return TEMPLATE_DATE not in rules or "strftime_now" not in (tokenizer.chat_template or "")
