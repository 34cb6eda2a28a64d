"""``machd`` in a shell at the cost of a fork: a program of a few lines that has it forked."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.daemon.forked_programs import FORKS, ForkedProgram

_IN_A_SHELL = """#!{python} -IS
# machd as a shell finds it, at the cost of a fork.
import fcntl, json, os, signal, socket, sys

# What it says of commands depends on which machd a shell would find.
folders = [one for one in os.environ["PATH"].split(":") if one != os.path.dirname(__file__)]
os.environ["PATH"] = ":".join(folders)
read_end, write_end = os.pipe()
with open(__file__) as lock, socket.socket(fileno={channel}) as channel:
    fcntl.flock(lock, fcntl.LOCK_EX)
    order = json.dumps({{
        "kind": "any", "module": "machd.cli.main", "arguments": ["machd", *sys.argv[1:]],
        "environ": dict(os.environ), "folder": os.getcwd(), "starts_session": False,
        "max_file_bytes": None, "numbers": [0, 1, 2, 3], "code_number": 3,
    }}).encode()
    socket.send_fds(channel, [len(order).to_bytes(4, "big")], [0, 1, 2, write_end])
    channel.sendall(order)
    process_id = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, whose group is this program's alone
    signal.signal(number, lambda number, _: os.kill(process_id, number))
os.close(write_end)
sys.exit(ord(os.read(read_end, 1) or bytes([137])))
"""


@functools.cache
def forked_in_shells() -> tuple[Path, Sequence[int]]:
    """Return a folder with a ``machd`` for a shell's PATH, and the descriptors that the shell has to inherit."""
    folder = Path(tempfile.mkdtemp(prefix="machd-in-shells-"))
    atexit.register(shutil.rmtree, folder)
    program = folder / "machd"
    if not FORKS:
        program.symlink_to(Path(sys.executable).with_name("machd"))
        return folder, ()
    channel, other = socket.socketpair()
    with other:
        # A parent of their own, which nothing else of this process asks meanwhile.
        command = (sys.executable, "-m", "support.daemon.forking_parent", str(other.fileno()))
        process = ForkedProgram(command, pass_fds=[other.fileno()])
    atexit.register(process.wait)
    atexit.register(channel.close)
    program.write_text(_IN_A_SHELL.format(python=sys.executable, channel=channel.fileno()))
    program.chmod(0o755)
    return folder, (channel.fileno(),)
