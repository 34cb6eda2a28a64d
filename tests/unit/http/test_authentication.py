"""The key file, and which headers are a key."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from machd.errors import AuthenticationError, SettingsError
from machd.http.authentication import ANONYMOUS, ApiKeys
from machd.settings.sources import SettingsSources

ALICE = "k-alice-0123456789abcdef"
BOB = "k-bob-0123456789abcdef:with:colons"


def _file(tmp_path: Path, text: str, *, mode: int = 0o600) -> Path:
    path = tmp_path / "api-keys"
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


def _problems(path: Path) -> list[str]:
    with pytest.raises(SettingsError) as wrong:
        ApiKeys.read(path)
    return wrong.value.problems


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    """Alice's key and Bob's, among comments and empty lines."""
    return ApiKeys.read(_file(tmp_path, f"# ours\n\nalice:{ALICE}\n  bob:{BOB}  \n"))


# The file


def test_names_come_from_the_file(keys: ApiKeys) -> None:
    """Each key is its name's; what stands after the first colon is the key."""
    assert keys.is_required
    assert keys.authenticate([f"Bearer {ALICE}"], []) == "alice"
    assert keys.authenticate([], [BOB]) == "bob"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice", "line 1 is not name:key"),
        (f":{ALICE}", "line 1 is not name:key"),
        ("alice:short", "at least 16 characters"),
        ("alice:0123456789 abcdef", "none a space"),
        ("alice:schlüssel-0123456789abcdef", "all of them ASCII"),
        (f"alice:{ALICE}\nalice:{BOB}", "line 2 names alice twice"),
        (f"alice:{ALICE}\nbob:{ALICE}", "line 2 repeats the key of another name"),
        (f"al\x1b[31mice:{ALICE}", "line 1 has a name with a control character"),
        (f"alice\x85:{ALICE}", "line 1 has a name with a control character"),
        (f"\x1calice:{ALICE}", "line 1 has a name with a control character"),
        (f"al\u202eice:{ALICE}", "line 1 has a name with a control character"),
        ("# nobody\n\n", "holds no key"),
        ("", "holds no key"),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_a_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    """Whatever is wrong is said with its line, and no part of a key is."""
    (found,) = _problems(_file(tmp_path, text))
    assert problem in found
    for secret in ("short", "0123456789", "schl"):
        assert secret not in found


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    """One run shows them all."""
    assert len(_problems(_file(tmp_path, f"x\ny:z\nalice:{ALICE}\nalice:{BOB}"))) == 3


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """No file, or no text: never a daemon without keys."""
    (missing,) = _problems(tmp_path / "none")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    (binary,) = _problems(path)
    assert "No such file" in missing
    assert "not UTF-8" in binary


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "large", "nul"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Reading the keys neither blocks nor goes on without end."""
    path = {"endless": Path("/dev/zero"), "nul": tmp_path / "a\0b"}.get(kind, tmp_path / "keys")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_text(f"alice:{ALICE}\n" + "#" * 1_048_576)
    (problem,) = _problems(path)
    assert "cannot read" in problem


@pytest.mark.parametrize(("mode", "is_exposed"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everyone_can_read_is_warned_about(
    tmp_path: Path, mode: int, *, is_exposed: bool
) -> None:
    """It works, because containers mount files so; the log says what to do, and no key."""
    with capture_logs() as lines:
        keys = ApiKeys.read(_file(tmp_path, f"alice:{ALICE}", mode=mode))

    assert keys.is_required
    assert [line["event"] for line in lines] == ["api_keys.exposed"] * is_exposed
    assert ALICE not in str(lines)


def test_only_digests_are_kept(keys: ApiKeys) -> None:
    """Nothing that is reachable from the object holds a key."""
    seen: list[object] = [keys]
    for one in seen:
        seen += [
            other
            for other in gc.get_referents(one)
            if not isinstance(other, type) and not any(other is known for known in seen)
        ]
    held = [one for one in seen if isinstance(one, str | bytes)]
    assert any(isinstance(one, bytes) and len(one) == 32 for one in held)
    assert not [one for one in held if one in (ALICE, BOB, ALICE.encode(), BOB.encode())]


# Where it is


def test_the_setting_wins_over_the_service_manager(tmp_path: Path) -> None:
    """auth.api_keys_file, else $CREDENTIALS_DIRECTORY/api-keys, else none."""
    directory = tmp_path / "credentials"
    directory.mkdir()
    _file(directory, f"bob:{BOB}")
    environ = {"CREDENTIALS_DIRECTORY": str(directory)}
    own = {"auth.api_keys_file": str(_file(tmp_path, f"alice:{ALICE}"))}
    settings = SettingsSources(None, {}, own).load().settings
    bare = SettingsSources(None, {}, {}).load().settings

    assert ApiKeys.of(settings, environ).authenticate([], [ALICE]) == "alice"
    assert ApiKeys.of(bare, environ).authenticate([], [BOB]) == "bob"
    assert not ApiKeys.of(bare, {}).is_required
    assert not ApiKeys.of(bare, {"CREDENTIALS_DIRECTORY": str(tmp_path / "none")}).is_required


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling"])
def test_a_credential_that_is_no_file_opens_nothing(tmp_path: Path, kind: str) -> None:
    """Something of that name is there, so keys are meant to be."""
    path = tmp_path / "api-keys"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "none")
    bare = SettingsSources(None, {}, {}).load().settings
    with pytest.raises(SettingsError, match="cannot read"):
        ApiKeys.of(bare, {"CREDENTIALS_DIRECTORY": str(tmp_path)})


# The headers


@pytest.mark.parametrize(
    ("authorizations", "x_api_keys"),
    [
        ([f"bearer {ALICE}"], []),
        ([f"BEARER {ALICE}"], []),
        ([], [ALICE]),
        ([f"Bearer {ALICE}"], [ALICE]),
        ([f"Bearer {ALICE}", f"Bearer {ALICE}"], []),
        (["Basic abc"], [ALICE]),
    ],
)
def test_one_key_in_either_form_is_enough(
    keys: ApiKeys, authorizations: list[str], x_api_keys: list[str]
) -> None:
    """Both headers, or the same key twice."""
    assert keys.authenticate(authorizations, x_api_keys) == "alice"


@pytest.mark.parametrize(
    ("authorizations", "x_api_keys"),
    [
        ([], []),
        ([""], [""]),
        (["Bearer"], []),
        (["Bearer "], []),
        ([ALICE], []),
        ([f"Basic {ALICE}"], []),
        ([f"Bearer  {ALICE}"], []),
        ([f"Bearer {ALICE[:-1]}"], []),
        ([f"Bearer {ALICE}x"], []),
        ([f"Bearer {ALICE.upper()}"], []),
        ([f"Bearer {ALICE}"], [BOB]),
        ([f"Bearer {ALICE}", f"Bearer {BOB}"], []),
        ([], [ALICE, BOB]),
        ([f"Bearer {ALICE}"], ["wrong"]),
        ([], ["\xff" * 20]),
    ],
)
def test_anything_else_is_refused(
    keys: ApiKeys, authorizations: list[str], x_api_keys: list[str]
) -> None:
    """No key, no known one, or two that differ, even if both are good."""
    with pytest.raises(AuthenticationError) as refused:
        keys.authenticate(authorizations, x_api_keys)
    assert ALICE not in refused.value.message


def test_without_keys_everyone_is_one_client() -> None:
    """Nothing is asked, and whatever is sent is ignored."""
    assert ApiKeys.none().authenticate([f"Bearer {ALICE}"], ["other"]) == ANONYMOUS
