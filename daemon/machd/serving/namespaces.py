"""Who may find what others left behind: names of namespaces that no two parties can share by chance.

A namespace is a text to the scheduler. It is made as a JSON array, in which no choice of key names
and salts can spell another one's: a key ``a`` with the salt ``b`` is not a key named ``a/b``.
"""

from __future__ import annotations

import msgspec


def decode_namespace(client: str, salt: str | None) -> str:
    """Whose requests may share a decode: those of one client, and of one salt where it has one.

    How fast an answer comes tells whether somebody else asked the same, which a salt hides.
    """
    return _joined("key", client, salt)


def cache_namespace(client: str, salt: str | None, *, is_shared: bool) -> str:
    """Whose prompts a request finds again, and who finds its own.

    Args:
        client: Name of the API key, or ``anonymous``.
        salt: What the client keeps the request apart by; None for nothing.
        is_shared: Whether all clients share what they leave, as ``cache.namespace`` says.
    """
    return _joined("shared", salt) if is_shared else _joined("key", client, salt)


def _joined(*parts: str | None) -> str:
    return msgspec.json.encode(parts).decode()
