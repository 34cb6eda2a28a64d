"""Values of absurd length: a line that names the key and the source, and is short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machd.errors import SettingsError
from machd.settings.file import SettingsFile, read_settings_file
from machd.settings.keys import SettingKey, ValueKind, setting_keys
from machd.settings.sources import load_settings
from machd.settings.texts import MAX_SOCKET_PATH_BYTES, is_same_address

DIGITS = "9" * 5_000
LONG = "x" * 100_000
MAX_LINE_CHARS = 700

NUMBERS = [key for key in setting_keys() if key.kind in {ValueKind.INTEGER, ValueKind.NUMBER}]
TEXTS = [key for key in setting_keys() if key.kind is ValueKind.TEXT]


def problems(
    tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: str
) -> list[str]:
    """Return what is wrong with the settings."""
    path = tmp_path / "given.toml"
    path.write_text(toml)
    with pytest.raises(SettingsError) as caught:
        load_settings(config_path=path, environ=environ or {}, flags=flags)
    return caught.value.problems


def each(keys: list[SettingKey]) -> pytest.MarkDecorator:
    """A test for each of these keys."""
    return pytest.mark.parametrize("key", keys, ids=lambda key: key.dotted)


@each(NUMBERS)
def test_every_number_has_a_least_and_a_most(key: SettingKey) -> None:
    """A number without a bound would be taken however absurd it is."""
    assert key.least is not None
    assert key.most is not None


@each(NUMBERS)
@pytest.mark.parametrize("number", [DIGITS, f"-{DIGITS}", f"0x{'f' * 5_000}"])
def test_a_number_of_5000_digits_in_the_file_is_a_line_with_its_key(
    key: SettingKey, number: str, tmp_path: Path
) -> None:
    """Python converts no more than 4,300 digits to or from text; the line names key and file."""
    (line,) = problems(tmp_path, f"[{key.section}]\n{key.name} = {number}\n")

    assert key.dotted in line
    assert str(tmp_path / "given.toml") in line
    assert len(line) < MAX_LINE_CHARS


@each(NUMBERS)
def test_a_number_of_5000_digits_in_a_variable_is_a_line_with_its_key(
    key: SettingKey, tmp_path: Path
) -> None:
    """The line names the key and the variable and shows the first digits."""
    name = key.environment_names[0]

    (line,) = problems(tmp_path, environ={name: DIGITS})

    assert line.startswith(f"{key.dotted}: ")
    assert line.endswith(f"({name})")
    assert len(line) < MAX_LINE_CHARS


def test_a_long_number_is_found_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The line of the file is named besides the key."""
    (line,) = problems(tmp_path, f"[server]\nport = 1\n[limits]\n# ...\nmax_n = {DIGITS}\n")

    assert line.endswith("limits.max_n: the number has too many digits (at line 5)")


@each(TEXTS)
def test_a_text_of_100000_characters_is_refused(key: SettingKey, tmp_path: Path) -> None:
    """No path, host or URL is that long; the line shows its beginning."""
    (line,) = problems(tmp_path, f"[{key.section}]\n{key.name} = '/{LONG}'\n")

    assert line.startswith(f"{key.dotted}: ")
    assert len(line) < MAX_LINE_CHARS


@pytest.mark.parametrize(
    "toml", [f"{LONG} = 1", f"[{LONG}]\na = 1", f"[server]\n{LONG} = 1", f"[a.{LONG}]\n" * 2]
)
def test_a_name_of_100000_characters_is_shortened(toml: str, tmp_path: Path) -> None:
    """An unknown section or key is told by its beginning."""
    (line,) = problems(tmp_path, toml)

    assert len(line) < MAX_LINE_CHARS


def test_a_variable_with_a_name_of_100000_characters_is_shortened(tmp_path: Path) -> None:
    """An unknown variable is told by its beginning."""
    (line,) = problems(tmp_path, environ={f"LME_{LONG}": "1"})

    assert len(line) < MAX_LINE_CHARS


def test_a_settings_path_of_100000_characters_is_a_short_line() -> None:
    """The system's reason, and the beginning of the path."""
    with pytest.raises(SettingsError) as caught:
        read_settings_file(SettingsFile(Path(f"/{LONG}"), "LME_CONFIG"))

    assert caught.value.message.endswith("cannot be read: File name too long (LME_CONFIG)")
    assert len(caught.value.message) < MAX_LINE_CHARS


def test_settings_file_is_not_awaited_when_it_is_a_pipe(tmp_path: Path) -> None:
    """A pipe without a writer would hold the daemon's reload for ever."""
    pipe = tmp_path / "machd.toml"
    os.mkfifo(pipe)

    with pytest.raises(SettingsError, match="cannot be read: it is not a regular file"):
        read_settings_file(SettingsFile(pipe))


def test_settings_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    """No settings are that long."""
    path = tmp_path / "machd.toml"
    path.write_text("#" * (1 << 20) + "\n")

    with pytest.raises(SettingsError, match="it is larger than 1 MiB"):
        read_settings_file(SettingsFile(path))


def test_null_device_is_an_empty_settings_file() -> None:
    """``--config /dev/null`` starts with defaults, whatever lies in the usual places."""
    assert read_settings_file(SettingsFile(Path(os.devnull))) == {}


@pytest.mark.parametrize("dotted", ["server.host", "admin.listen"])
def test_a_socket_path_that_the_system_cannot_bind_is_refused(dotted: str, tmp_path: Path) -> None:
    """The kernel's address holds a path of so many bytes, which are more than its characters."""
    section, _, name = dotted.partition(".")
    longest = "unix:/" + "s" * (MAX_SOCKET_PATH_BYTES - 1)
    path = tmp_path / "longest.toml"
    path.write_text(f"[{section}]\n{name} = '{longest}'\n")
    load_settings(config_path=path, environ={}, flags={})

    for one in (f"{longest}s", f"{longest[:-1]}é"):
        (line,) = problems(tmp_path, f"[{section}]\n{name} = '{one}'\n")
        assert line.startswith(f"{dotted}: ")
        assert f"its path can have {MAX_SOCKET_PATH_BYTES} bytes" in line


def test_a_host_name_longer_than_the_name_system_takes_is_refused(tmp_path: Path) -> None:
    """A name of 253 characters is the longest that can be looked up."""
    (line,) = problems(tmp_path, f"[server]\nhost = '{'h' * 254}'\n")

    assert "a host name has 253 characters at the most" in line


@pytest.mark.parametrize(
    ("host", "port", "listen", "is_same"),
    [
        ("127.0.0.1", 8081, "127.0.0.1:8081", True),
        ("localhost", 8081, "127.0.0.1:08081", True),
        ("::1", 9, "[::1]:9", True),
        ("0.0.0.0", 9, "127.0.0.1:9", True),
        ("::", 9, "[::1]:9", True),
        ("unix:/run/a", 9, "unix:/run/./a", True),
        ("127.0.0.1", 8080, "127.0.0.1:8081", False),
        ("127.0.0.2", 9, "127.0.0.1:9", False),
        ("::1", 9, "127.0.0.1:9", False),
        ("127.0.0.1", 0, "127.0.0.1:0", False),
        ("unix:/run/a", 9, "unix:/run/b", False),
        ("unix:/run/a", 9, "127.0.0.1:9", False),
        ("127.0.0.1", 9, "off", False),
    ],
)
def test_admin_address_is_compared_with_the_public_one(
    host: str, port: int, listen: str, *, is_same: bool
) -> None:
    """Two spellings of one address are the same; a free port of the system's never is."""
    assert is_same_address(host, port, listen) is is_same


def test_admin_api_on_the_public_address_is_refused(tmp_path: Path) -> None:
    """The second listener could not be bound; the line names both settings."""
    (line,) = problems(tmp_path, "[server]\nport = 8081\n")

    assert line.startswith("admin.listen: 127.0.0.1:8081 is the public address (server.host, ")
