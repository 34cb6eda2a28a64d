"""Messages on the socket between a front and its engine process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from support.clocks.polling import CEILING_S

from machd.link.frames import Frames

_MANY_BYTES = 5_000_000
"""More than the buffers of a socket pair hold."""


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_come_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    """In order; empty and large ones, too."""
    ours, theirs = map(Frames, ends)
    messages = [[b"a"], [b""], [b"b" * _MANY_BYTES, b"", b"c"], [b"\0\0\0\1"]]

    def send() -> None:
        for one in messages:
            ours.send(one)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()

    received = [theirs.receive() for _ in messages]
    assert [None if one is None else list(map(bytes, one)) for one in received] == messages
    sending.join(CEILING_S)


@pytest.mark.parametrize("content", [b"", b"\0", b"\0\0\0\2\0\0\0\5", b"\0\0\0\1\0\0\0\5ab"])
def test_a_message_that_is_cut_off_is_the_end(
    ends: tuple[socket.socket, socket.socket], content: bytes
) -> None:
    """As when a process is killed while it sends."""
    ours, theirs = ends
    ours.sendall(content)
    ours.close()

    assert Frames(theirs).receive() is None


def test_an_end_is_seen_on_both_sides(ends: tuple[socket.socket, socket.socket]) -> None:
    """A thread that waits for a message is woken."""
    ours, theirs = map(Frames, ends)
    received: list[list[bytearray] | None] = []
    waiting = threading.Thread(target=lambda: received.append(ours.receive()), daemon=True)
    waiting.start()
    ours.end()
    ours.end()
    waiting.join(CEILING_S)

    assert received == [None]
    assert theirs.receive() is None
    with pytest.raises(OSError, match="pipe"):
        theirs.send([b"a"])
