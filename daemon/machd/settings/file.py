"""The settings file: where it is looked for, and reading it as TOML."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from machd.errors import SettingsError
from machd.regular_files import read_regular
from machd.settings.problems import shortened

CONFIG_VARIABLE = "LME_CONFIG"
_FILE_NAME = "machd.toml"
_MAX_FILE_BYTES = 1 << 20
_MAX_KEY_CHARS = 80


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A file to read.

    Attributes:
        named_by: The variable that names it; empty for a file of the command line or of one of
            the usual places.
    """

    path: Path
    named_by: str = ""


def find_settings_file(
    config_path: Path | None, environ: Mapping[str, str], *, platform: str = sys.platform
) -> SettingsFile | None:
    """The file to read: the flag's, the variable's, or the first usual one that is there.

    A named file is not looked at here, so that a missing one is an error and not passed over.
    """
    if config_path is not None:
        return SettingsFile(config_path)
    if named := environ.get(CONFIG_VARIABLE):
        return SettingsFile(Path(named), CONFIG_VARIABLE)
    present = (path for path in usual_paths(environ, platform=platform) if _is_there(path))
    return next((SettingsFile(path) for path in present), None)


def usual_paths(environ: Mapping[str, str], *, platform: str = sys.platform) -> tuple[Path, ...]:
    """The places looked at when no file is named, first one first."""
    folder = _user_folder(environ, platform)
    user = () if folder is None else (folder / "machd" / _FILE_NAME,)
    return (Path(_FILE_NAME), *user, Path("/etc/machd") / _FILE_NAME)


def read_settings_file(file: SettingsFile) -> dict[str, object]:
    """The file's tables; the null device is an empty file.

    Raises:
        SettingsError: The file cannot be read or is not TOML; names it, with line and column.
    """
    named_by = f" ({file.named_by})" if file.named_by else ""
    content = b""
    if file.path == Path(os.devnull):
        return {}
    try:
        content = read_regular(file.path, max_bytes=_MAX_FILE_BYTES).content
        return tomllib.loads(content.decode())
    except FileNotFoundError:
        problem = "there is no such file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}"
    except RecursionError:
        problem = "is nested too deeply"
    except tomllib.TOMLDecodeError as error:
        problem = f"is not TOML: {shortened(str(error))}"
    except ValueError:
        problem = _long_number(content.decode())
    raise SettingsError([f"{shortened(str(file.path))}: {problem}{named_by}"])


def _long_number(text: str) -> str:
    """The key whose integer has more digits than Python converts, and its line."""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = f"{header[1].strip()}."
        if any(len(run) >= sys.get_int_max_str_digits() for run in re.findall("[0-9_]+", line)):
            key = shortened(line.partition("=")[0].strip(), _MAX_KEY_CHARS)
            return f"{section}{key}: the number has too many digits (at line {number})"
    return "a number has too many digits"


def _user_folder(environ: Mapping[str, str], platform: str) -> Path | None:
    """The user's configuration folder; None for a user without a home, as services may be."""
    home = environ.get("HOME")
    if platform == "darwin":
        return Path(home) / "Library" / "Application Support" if home else None
    if folder := environ.get("XDG_CONFIG_HOME"):
        return Path(folder)
    return Path(home) / ".config" if home else None


def _is_there(path: Path) -> bool:
    """Return True if there is a file, as far as this user may look."""
    try:
        return path.is_file()
    except OSError:
        return False
