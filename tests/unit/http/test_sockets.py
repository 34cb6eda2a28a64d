"""Where the daemon listens: sockets with a path, and those that are handed over."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from machd.errors import ListenError
from machd.http.sockets import listen, listen_admin


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    """A folder of ours with a name short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="machd-") as name:
        yield Path(name)


def _leave_behind(path: Path) -> None:
    """Make a socket file without a server."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))


def test_a_unix_socket_is_for_its_user_alone(folder: Path) -> None:
    """Mode 0600, whatever the umask; the file goes with the listener."""
    mask = os.umask(0)
    try:
        listener = listen(f"unix:{folder}/s", 0, environ={})
    finally:
        os.umask(mask)
    assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
    assert not listener.is_exposed
    assert not listener.is_open_to_all_users
    listener.close()
    assert not (folder / "s").exists()


def test_sockets_made_at_the_same_time_leave_the_processs_mask_alone(folder: Path) -> None:
    """Directories that another thread makes meanwhile keep their permissions, and so do those made later."""

    def make_sockets(name: str) -> None:
        for _ in range(100):
            listen(f"unix:{folder}/{name}", 0, environ={}).close()

    makers = [threading.Thread(target=make_sockets, args=(name,)) for name in "ab"]
    for maker in makers:
        maker.start()
    modes = set()
    are_made = False
    while not are_made:
        are_made = not any(maker.is_alive() for maker in makers)
        (folder / "made").mkdir(mode=0o700)
        modes.add(stat.S_IMODE((folder / "made").stat().st_mode))
        (folder / "made").rmdir()
    mask = os.umask(0)
    os.umask(mask)
    assert modes == {0o700}
    assert mask & stat.S_IRWXU == 0


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    """Another user with write access could replace the daemon's socket."""
    folder.chmod(mode)
    with pytest.raises(ListenError, match="can be written to by others"):
        listen_admin(f"unix:{folder}/s", environ={})


def test_a_sticky_folder_of_ours_will_do(folder: Path) -> None:
    """In /tmp users cannot remove other users' files."""
    folder.chmod(0o1777)
    listener = listen_admin(f"unix:{folder}/s", environ={})
    assert listener is not None
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    """Its owner could replace the socket, whatever the mode."""
    inner = folder / "theirs"
    inner.mkdir(mode=0o755)
    os.chown(inner, 65_534, 65_534)
    with pytest.raises(ListenError, match="user id 65534"):
        listen(f"unix:{inner}/s", 0, environ={})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket away")
def test_a_stale_socket_of_another_user_is_left_alone(folder: Path) -> None:
    """What is not ours is not removed."""
    path = folder / "s"
    _leave_behind(path)
    os.chown(path, 65_534, 65_534)
    with pytest.raises(ListenError, match="user id 65534"):
        listen(f"unix:{path}", 0, environ={})
    assert path.exists()


def test_a_stale_socket_of_ours_is_replaced(folder: Path) -> None:
    """A daemon that was killed does not keep the next one from starting."""
    _leave_behind(folder / "s")
    listener = listen(f"unix:{folder}/s", 0, environ={})
    listener.open()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "s"))
    listener.close()


def test_a_symbolic_link_is_refused(folder: Path) -> None:
    """A link is refused even to a stale socket of the daemon's: removing that may be the attacker's aim."""
    _leave_behind(folder / "real")
    (folder / "s").symlink_to(folder / "real")
    with pytest.raises(ListenError, match="symbolic link"):
        listen(f"unix:{folder}/s", 0, environ={})
    assert (folder / "real").exists()


def test_a_successors_socket_is_not_removed(folder: Path) -> None:
    """A listener that closes late leaves what another put in its place."""
    old = listen(f"unix:{folder}/s", 0, environ={})
    (folder / "s").unlink()
    new = listen(f"unix:{folder}/s", 0, environ={})
    old.close()
    assert (folder / "s").exists()
    new.close()


def test_a_socket_that_has_only_just_been_made_is_not_stale(folder: Path) -> None:
    """A daemon that starts a moment later is refused, and does not take the path away."""
    first = listen(f"unix:{folder}/s", 0, environ={})
    with pytest.raises(ListenError, match="in use"):
        listen(f"unix:{folder}/s", 0, environ={})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "s"))
    first.close()


def test_one_daemon_at_a_time_looks_whether_a_socket_is_stale(folder: Path) -> None:
    """Of two that start together one is refused at once; the lock is not left behind."""
    _leave_behind(folder / "s")
    with (folder / "s.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ListenError, match="another daemon"):
            listen(f"unix:{folder}/s", 0, environ={})
        assert (folder / "s").exists()
    listener = listen(f"unix:{folder}/s", 0, environ={})
    listener.close()
    assert not list(folder.iterdir())


def test_a_lock_that_is_a_link_is_not_followed(folder: Path) -> None:
    """A link cannot make the daemon create a file elsewhere."""
    (folder / "s.lock").symlink_to(folder / "elsewhere")
    with pytest.raises(ListenError, match=r"s\.lock"):
        listen(f"unix:{folder}/s", 0, environ={})
    assert not (folder / "elsewhere").exists()


def test_who_binds_at_the_same_time_is_refused_when_it_opens() -> None:
    """Two daemons can both bind one port; the second to open it is told so in a line of ours."""
    first = listen("127.0.0.1", 0, environ={})
    second = listen("127.0.0.1", first.socket.getsockname()[1], environ={})
    first.open()
    with pytest.raises(ListenError, match="in use"):
        second.open()
    first.close()
    second.close()


@pytest.mark.parametrize("host", ["a\0b", "unix:/tmp/a\0b", f"{'a' * 70}.example"])
def test_a_name_that_is_no_name_is_an_error_of_ours(host: str) -> None:
    """Python says ValueError to some of them."""
    with pytest.raises(ListenError):
        listen(host, 0, environ={})


def test_a_path_that_is_too_long_is_an_error_of_ours(folder: Path) -> None:
    """It names the path, and is no traceback."""
    with pytest.raises(ListenError, match="unix:"):
        listen(f"unix:{folder}/{'s' * 200}", 0, environ={})


_PROGRAM = """
import os, socket, sys
from machd.errors import ListenError
from machd.http.sockets import listen, listen_admin
kind, names, admin = sys.argv[1:]
made = {
    "tcp": lambda: socket.create_server(("127.0.0.1", 0)),
    "quiet": lambda: socket.socket(),
    "udp": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "file": lambda: open(os.devnull),
    "open": lambda: socket.create_server(("0.0.0.0", 0)),
    "unix": lambda: socket.socket(socket.AF_UNIX),
}[kind]()
if kind == "unix":
    made.bind(admin.removeprefix("unix:") + ".handed")
    os.chmod(made.getsockname(), 0o666)
    made.listen()
os.dup2(made.fileno(), 3)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": names}
try:
    public = listen("127.0.0.1", 0, environ=environ)
    there = listen_admin(admin, environ=environ)
except ListenError as error:
    print(f"refused: {error}")
else:
    one = public if public.is_inherited else there
    print(public.is_inherited, there is not None and there.is_inherited,
          os.get_inheritable(one.socket.fileno()))
"""


def _handed(kind: str, names: str = "", admin: str = "off") -> str:
    """Return what comes of a socket of that kind handed over, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kind, names, admin],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("names", ["", "public", "unknown", "machd.socket"])
def test_a_single_socket_is_the_public_one(names: str) -> None:
    """Whatever it is called; and nothing that the daemon starts inherits it."""
    assert _handed("tcp", names) == "True False False"


def test_a_single_socket_named_admin_is_the_admins() -> None:
    """The public address is then bound as the settings have it."""
    assert _handed("tcp", "admin", "127.0.0.1:0") == "False True False"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("quiet", "does not listen"),
        ("udp", "no stream socket"),
        ("file", "no socket"),
    ],
)
def test_what_cannot_be_listened_on_is_refused(kind: str, words: str) -> None:
    """The line says what the socket's unit has to say."""
    assert words in _handed(kind)


def test_an_admin_socket_that_others_reach_is_refused(folder: Path) -> None:
    """Neither other machines nor other users get to the admin API, and off means off."""
    assert "other machines" in _handed("open", "admin", "127.0.0.1:0")
    assert "SocketMode=0600" in _handed("unix", "admin", f"unix:{folder}/s")
    assert "admin.listen is off" in _handed("tcp", "admin", "off")


@pytest.mark.parametrize(
    "environ",
    [
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
    ],
)
def test_what_is_meant_for_another_process_is_left_alone(environ: dict[str, str]) -> None:
    """Variables that a parent process left behind hand nothing over."""
    listener = listen("127.0.0.1", 0, environ=environ)
    assert not listener.is_inherited
    listener.close()


def test_a_socket_that_is_not_there_is_refused() -> None:
    """A count that promises more than there is names the variable."""
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}
    with pytest.raises(ListenError, match="LISTEN_FDS"):
        listen("127.0.0.1", 0, environ=environ)
