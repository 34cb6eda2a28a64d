"""Reads the files of keys and tokens that the settings name; their content is never quoted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from machd.errors import SettingsError
from machd.regular_files import IrregularFileError, RegularFile, read_regular
from machd.settings.problems import shortened


def read_secret(path: Path, *, key: str, max_bytes: int) -> RegularFile:
    """Read a file of keys that the setting ``key`` names; links are followed.

    Raises:
        SettingsError: It cannot be read, is not a regular file or is larger.
    """
    try:
        return read_regular(path, max_bytes=max_bytes)
    except OSError as error:
        raise _unreadable(key, path, error) from None


def credential_path(environ: Mapping[str, str], name: str, *, key: str) -> Path | None:
    """Return the path of the service manager's credential; SettingsError if it cannot be told, None without one."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(directory, name) if directory else None
    return path if path is not None and _is_there(path, key=key) else None


def _is_there(path: Path, *, key: str) -> bool:
    """Return True if a file of that name exists, readable or not; SettingsError if that cannot be told."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError:
        raise _unreadable(key, path, IrregularFileError("no file can have this path")) from None
    except OSError as error:
        raise _unreadable(key, path, error) from None
    return True


def _unreadable(key: str, path: Path, error: OSError) -> SettingsError:
    reason = error.strerror or error
    return SettingsError([f"{key}: cannot read {shortened(str(path))}: {reason}"])
