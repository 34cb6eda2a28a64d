"""The addresses of a daemon, its token and its keys from start to end."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from machd.admin.token import token_paths, write_new_token
from machd.entrance import Entrance
from machd.errors import ListenError, MachdError, SettingsError
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources

ALICE = "k-alice-0123456789abcdef"


def _settings(flags: Mapping[str, object] | None = None) -> Settings:
    flags = {"server.port": 0, "admin.listen": "off", **(flags or {})}
    return SettingsSources(None, {}, flags).load().settings


def _keys(folder: Path, *, mode: int = 0o600) -> Path:
    path = folder / "api-keys"
    path.write_text(f"alice:{ALICE}\n")
    path.chmod(mode)
    return path


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# The keys


def test_keys_that_go_away_are_missed(tmp_path: Path) -> None:
    """A change that has nothing to do with them never lets everyone in."""
    path = _keys(tmp_path)
    entrance = Entrance(_settings(), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    path.unlink()
    for _ in range(2):
        with pytest.raises(SettingsError, match="gone away"):
            entrance.admit(_settings({"logging.level": "debug"}))
    _keys(tmp_path)
    assert entrance.admit(_settings()).is_required
    entrance.close()


def test_keys_that_nobody_names_any_more_are_not_missed(tmp_path: Path) -> None:
    """Taking auth.api_keys_file away is how an operator opens a daemon on loopback."""
    entrance = Entrance(_settings({"auth.api_keys_file": str(_keys(tmp_path))}), {})
    assert not entrance.admit(_settings()).is_required
    entrance.close()


def test_keys_are_read_once_at_start(tmp_path: Path) -> None:
    """What is wrong with their mode is said once, and again when they are read again."""
    settings = _settings({"auth.api_keys_file": str(_keys(tmp_path, mode=0o644))})
    with capture_logs() as lines:
        entrance = Entrance(settings, {})
        assert entrance.admit(settings).is_required
        assert [line["event"] for line in lines] == ["api_keys.exposed"]
        entrance.admit(settings)
        assert len(lines) == 2
    entrance.close()


# The token


def test_a_successors_token_stays(tmp_path: Path) -> None:
    """A daemon that ends late leaves what another has put in the place of its own."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    entrance = Entrance(_settings({"admin.listen": "127.0.0.1:0"}), environ)
    assert entrance.admin is not None
    token, path = write_new_token(environ, *entrance.admin.socket.getsockname())
    entrance.close()
    assert path.read_text().strip() == token


def test_each_address_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Also where the port is the same; and it is looked for under the name that it was given."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    written = {
        host: write_new_token(environ, host, 81)[1] for host in ("127.0.0.1", "127.0.0.2", "::1")
    }
    assert len(set(written.values())) == 3
    assert written["127.0.0.1"].name == "admin-81.token"
    for host, path in written.items():
        assert next(token_paths(environ, host, 81)) == path
    assert written["::1"] in token_paths(environ, "0:0::1", 81)
    assert set(token_paths(environ, "localhost", 81)) & {written["127.0.0.1"], written["::1"]}


@pytest.mark.parametrize("kind", ["port", "path"])
def test_of_two_that_start_together_one_starts(tmp_path: Path, kind: str) -> None:
    """The other one is refused in a line of ours, and the token is the first one's."""
    for turn in range(20):
        folder = tmp_path / str(turn)
        folder.mkdir(mode=0o700)
        ports = {"server.port": _free_port(), "admin.listen": f"127.0.0.1:{_free_port()}"}
        paths = {"server.host": f"unix:{folder}/p", "admin.listen": f"unix:{folder}/a"}
        started, refusals = _start_two(ports if kind == "port" else paths, folder)
        assert (len(started), [type(one) for one in refusals]) == (1, [ListenError])
        token = started[0].admin_token
        assert token is not None
        if kind == "port":
            assert token.own_file is not None
            digest = hashlib.sha256(token.own_file.read_text().strip().encode()).digest()
            assert token._digest == digest
        started[0].close()
        assert not list(folder.glob("machd/*"))


def _start_two(flags: Mapping[str, object], folder: Path) -> tuple[list[Entrance], list[Exception]]:
    """Two at the same moment; those that started, and why others did not."""
    started: list[Entrance] = []
    refusals: list[Exception] = []
    settings, both = _settings(flags), threading.Barrier(2)

    def start() -> None:
        both.wait()
        try:
            started.append(Entrance(settings, {"XDG_RUNTIME_DIR": str(folder)}))
        except (MachdError, OSError) as error:
            refusals.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return started, refusals
