"""A few words to render with a chat template, to see what it does with them."""

from __future__ import annotations

MARK = "zq7marker"
"""A word that no template contains by itself."""

SYSTEM: dict[str, object] = {"role": "system", "content": MARK}
USER: dict[str, object] = {"role": "user", "content": "Hello"}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": MARK,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}
