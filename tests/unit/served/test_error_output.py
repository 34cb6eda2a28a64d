"""What a process writes to standard error is copied, and its last lines are kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from support.clocks.polling import CEILING_S

from machd.served.error_output import MAX_BYTES, MAX_LINES, ErrorOutput


class _Ends:
    """Both pipes of an output: ``source`` is written by the process, ``copy`` is read from the front's."""

    def __init__(self) -> None:
        read, self.source = os.pipe()
        self.copy, target = os.pipe()
        self.output = ErrorOutput(os.fdopen(read, "rb"), target)

    def write(self, content: bytes, *, is_last: bool = True) -> None:
        os.write(self.source, content)
        if is_last:
            os.close(self.source)

    def copied(self) -> bytes:
        """Read all to the end."""
        content = b""
        while part := os.read(self.copy, 1 << 16):
            content += part
        return content


@pytest.fixture(name="ends")
def _ends() -> Iterator[_Ends]:
    ends = _Ends()
    yield ends
    os.close(ends.copy)


def test_all_is_copied_as_it_is_and_lines_are_kept(ends: _Ends) -> None:
    """Empty ones are copied only; what is no text is kept as far as it is; the last line needs no end."""
    content = b"terminate called\n\n  what(): [malloc] \xff\r\nlast"
    ends.write(content)

    assert ends.output.last_lines(CEILING_S) == (
        "terminate called",
        "  what(): [malloc] \ufffd",
        "last",
    )
    assert ends.copied() == content


@pytest.mark.parametrize(
    ("line", "count"),
    [(b"short\n", MAX_LINES), (b"x" * 1023 + b"\n", MAX_BYTES >> 10)],
    ids=["lines", "bytes"],
)
def test_the_last_lines_are_kept_within_bounds(ends: _Ends, line: bytes, count: int) -> None:
    """Older ones go first."""
    reader = threading.Thread(target=ends.copied)
    reader.start()
    for number in range(2 * MAX_LINES):
        ends.write(b"%03d" % number + line[3:], is_last=number == 2 * MAX_LINES - 1)
    reader.join(CEILING_S)

    lines = ends.output.last_lines(CEILING_S)

    assert len(lines) == count
    assert (lines[0][:3], lines[-1][:3]) == (f"{2 * MAX_LINES - count}", f"{2 * MAX_LINES - 1}")


def test_a_line_without_end_takes_no_more_than_its_bound(ends: _Ends) -> None:
    """It is copied whole."""
    content = b"y" * (3 * MAX_BYTES)
    threading.Thread(target=ends.write, args=[content]).start()

    assert ends.copied() == content
    assert sum(map(len, ends.output.last_lines(CEILING_S))) == MAX_BYTES


def test_a_pipe_that_another_process_keeps_open_is_not_waited_for(ends: _Ends) -> None:
    """What came until then is there, and what comes later is copied."""
    ends.write(b"said\n", is_last=False)
    assert os.read(ends.copy, 100) == b"said\n"
    began_s = time.monotonic()

    assert ends.output.last_lines(0.05) == ("said",)

    assert time.monotonic() - began_s < CEILING_S / 2
    ends.write(b"late\n")
    assert ends.copied() == b"late\n"


def test_a_process_goes_on_when_nothing_reads_the_copy() -> None:
    """As one whose terminal is closed: its lines are read and kept all the same."""
    read, source = os.pipe()
    copy, target = os.pipe()
    output = ErrorOutput(os.fdopen(read, "rb"), target)
    os.close(copy)
    for number in range(10_000):
        os.write(source, b"%d\n" % number)
    os.close(source)

    assert output.last_lines(CEILING_S)[-1] == "9999"
