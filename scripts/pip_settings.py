"""Print pip's settings as the variables of uv, as lines of a shell.

uv reads neither pip.conf nor PIP_*: without these lines it asks another index than pip, and trusts other certificates.
A machine with settings of uv's own keeps those.
"""

from __future__ import annotations

import ast
import os
import shlex
import ssl
import subprocess
import sys
from pathlib import Path

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "no-index": "UV_NO_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
}
SEPARATED_BY_COMMAS = {"find-links", "trusted-host"}
SECTIONS = ("global", "install", ":env:")
"""The later one wins."""


def main() -> None:
    """Print an ``export`` for each setting of pip that uv has no setting of its own for."""
    environ = os.environ
    if any(path.is_file() for path in uv_files(environ.get("XDG_CONFIG_HOME"))):
        return
    pip = pip_settings()
    variables = {VARIABLES[name]: value for name, value in pip.items() if name in VARIABLES}
    if "UV_INDEX" in variables:
        # As pip does: the best match of all indexes. Every file is checked against a pinned hash.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    paths = ssl.get_default_verify_paths()
    if "SSL_CERT_FILE" not in variables and (paths.cafile or paths.capath):
        # pip trusts what the system trusts, an organisation's own authority among it.
        variables["UV_SYSTEM_CERTS"] = "true"
    for name, value in variables.items():
        if name not in environ:
            print(f"export {name}={shlex.quote(value)}")


def uv_files(config_home: str | None) -> list[Path]:
    """The files in which uv has settings of its own."""
    home = Path(config_home) if config_home else Path.home() / ".config"
    return [home / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]


def pip_settings() -> dict[str, str]:
    """Pip's settings by name, of its files and its variables; those of its variables without pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for section in SECTIONS:
        for line in result.stdout.splitlines():
            key, equals, shown = line.partition("=")
            if equals and key.startswith(f"{section}."):
                name = key.removeprefix(f"{section}.").removeprefix("default-")
                values = str(ast.literal_eval(shown)).split()
                found[name] = ("," if name in SEPARATED_BY_COMMAS else " ").join(values)
    if result.returncode != 0:
        for name, value in os.environ.items():
            if name.startswith("PIP_"):
                found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


if __name__ == "__main__":
    main()
