"""Advice for each cause for which tokens are computed again."""

from __future__ import annotations

from machd.cli.request_changes import Change, ChangeKind
from machd.scheduler.events import CacheReason

_OF_REASONS = {
    CacheReason.EVICTED: "raise `cache.memory_mb` or `cache.memory_percent`, or use `cache.disk_dir`",
    CacheReason.OTHER_NAMESPACE: (
        'use one API key and one `cache_salt`, or `cache.namespace = "shared"` if the clients trust each other'
    ),
    CacheReason.KIND_CANNOT: (
        "this model's caches begin only where a prompt or an answer ended: let prompts only grow at the end"
    ),
    CacheReason.PROMPT_LOGPROBS: "leave `prompt_logprobs` out",
}

_OF_CHANGES = {
    ChangeKind.MESSAGE_TEXT: "keep it as it was, and say what is new in a message at the end",
    ChangeKind.MESSAGE_CALLS: "send the calls as the model made them: the same arguments, in the same order",
    ChangeKind.MESSAGE_THOUGHTS: "send the thoughts back as they came, or never",
    ChangeKind.MESSAGE_IMAGES: "send the same file",
    ChangeKind.MESSAGES_REPLACED: "keep it as it was, and add messages at the end",
    ChangeKind.MESSAGES_ADDED: "add messages at the end",
    ChangeKind.MESSAGES_REMOVED: "leave earlier messages in until the context is full, then remove many at once",
    ChangeKind.TOOLS_ORDER: "send the tools in one order, such as by name",
    ChangeKind.TOOL_CHANGED: "keep its description and parameters the same; say what is new in a message at the end",
    ChangeKind.TOOLS_ADDED: "send all tools from the beginning, or add new ones behind the others",
    ChangeKind.TOOLS_REMOVED: "go on sending all tools, and forbid one in a message at the end",
    ChangeKind.TEMPLATE: "the chat template writes it, such as today's date: use `model.chat_template`, or template variables that stay the same",
}


def advice(reason: CacheReason, change: Change | None) -> str:
    """Return what to do about a cause."""
    if change is None:
        return _OF_REASONS.get(reason, "")
    if change.kind is ChangeKind.MESSAGE_TEXT and change.role == "system":
        return "move what changes into a message at the end, or leave it out"
    return _OF_CHANGES[change.kind]
