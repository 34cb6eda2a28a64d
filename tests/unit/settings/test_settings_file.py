"""Which settings file is read, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from machd.errors import SettingsError
from machd.settings.file import (
    SettingsFile,
    find_settings_file,
    read_settings_file,
    usual_paths,
)


def test_the_flag_wins_over_the_variable_and_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is --config, $LME_CONFIG, ./machd.toml, the user's folder."""
    user_file = tmp_path / "home/.config/machd/machd.toml"
    user_file.parent.mkdir(parents=True)
    user_file.touch()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    environ = {"HOME": str(tmp_path / "home")}
    with_variable = environ | {"LME_CONFIG": "variable.toml"}

    assert find_settings_file(None, environ, platform="linux") == SettingsFile(user_file)
    (work / "machd.toml").touch()
    assert find_settings_file(None, environ) == SettingsFile(Path("machd.toml"))
    assert find_settings_file(None, with_variable) == SettingsFile(
        Path("variable.toml"), "LME_CONFIG"
    )
    assert find_settings_file(Path("flag.toml"), with_variable) == SettingsFile(Path("flag.toml"))


@pytest.mark.parametrize(
    ("platform", "environ", "folder"),
    [
        ("linux", {"HOME": "/home/ada"}, "/home/ada/.config"),
        ("linux", {"HOME": "/home/ada", "XDG_CONFIG_HOME": "/x"}, "/x"),
        ("linux", {"HOME": "/home/ada", "XDG_CONFIG_HOME": ""}, "/home/ada/.config"),
        ("darwin", {"HOME": "/Users/ada"}, "/Users/ada/Library/Application Support"),
    ],
)
def test_the_user_folder_is_the_platforms(
    platform: str, environ: dict[str, str], folder: str
) -> None:
    """The user's file lies where the platform keeps configuration, before the machine's."""
    assert usual_paths(environ, platform=platform) == (
        Path("machd.toml"),
        Path(folder) / "machd/machd.toml",
        Path("/etc/machd/machd.toml"),
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_user_without_a_home_has_no_folder(platform: str) -> None:
    """A service without HOME still has the working folder and the machine's file."""
    assert usual_paths({}, platform=platform) == (
        Path("machd.toml"),
        Path("/etc/machd/machd.toml"),
    )


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """A named file is never skipped; the error names the file and the source of its name."""
    path = tmp_path / "missing.toml"

    with pytest.raises(SettingsError) as caught:
        read_settings_file(SettingsFile(path, "LME_CONFIG"))

    assert caught.value.problems == [f"{path}: there is no such file (LME_CONFIG)"]


def test_a_folder_is_no_settings_file(tmp_path: Path) -> None:
    """What cannot be read is named with the system's reason."""
    with pytest.raises(SettingsError) as caught:
        read_settings_file(SettingsFile(tmp_path))

    assert caught.value.problems == [f"{tmp_path}: cannot be read: it is not a regular file"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[server]\nport = = 1\n", "is not TOML: Invalid value (at line 2, column 8)"),
        (b"[server]\nhost = '\xff'\n", "is not UTF-8 at byte 17"),
    ],
)
def test_a_broken_file_is_named_with_the_place(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    """A person can go straight to the line that is not TOML."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    with pytest.raises(SettingsError) as caught:
        read_settings_file(SettingsFile(path))

    assert caught.value.problems == [f"{path}: {expected}"]
