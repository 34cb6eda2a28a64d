"""Secrets of a daemon's clients and operators, in files as its settings name them."""

from __future__ import annotations

from pathlib import Path


def locked_by(directory: Path, *, api_key: str, admin_token: str) -> dict[str, str]:
    """Write an API key of ``alice`` and an admin token; return the settings of a daemon that asks for them."""
    keys, token = directory / "keys", directory / "token"
    for file, text in ((keys, f"alice:{api_key}\n"), (token, f"{admin_token}\n")):
        file.write_text(text)
        file.chmod(0o600)
    return {
        "auth.api_keys_file": str(keys),
        "auth.admin_token_file": str(token),
        "admin.listen": "127.0.0.1:0",
    }
