"""An engine process with the fake encoder, which waits at its first pass until it is let go.

Its first argument is a folder. ``begun`` is there once the first pass has begun, which waits for ``go``. ``passes`` has a line for
each input that was computed, its tokens, and ``drops`` one for each question that was dropped, its inputs.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from machd.clock import SystemClock
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.media import PlainArray
from machd.engine_process.encoding_loop import EncodingLoop
from machd.engine_process.front_link import FrontLink
from machd.link.frames import Frames
from support.engines.fake_encoder import FakeEncoder

_POLL_S = 0.005


class _WaitingEncoder(FakeEncoder):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def encode(self, inputs: Sequence[EncoderInput]) -> PlainArray:
        _note(self._folder / "passes", *(one.token_ids for one in inputs))
        (self._folder / "begun").touch()
        while not (self._folder / "go").exists():
            time.sleep(_POLL_S)
        return super().encode(inputs)


class _NotingLoop(EncodingLoop):
    folder: Path

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        super().drop_inputs(inputs)
        _note(self.folder / "drops", len(inputs))


def _note(path: Path, *lines: object) -> None:
    with path.open("a") as file:
        file.writelines(f"{one}\n" for one in lines)


def main() -> None:
    """Serve the front at the other end of the link."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    frames = Frames(socket.socket(fileno=number))
    assert frames.receive() is not None
    link = FrontLink(frames, on_settings=lambda _settings: None)
    loop = _NotingLoop(
        lambda: _WaitingEncoder(folder),
        clock=SystemClock(),
        on_note=link.note,
        on_beat=link.beat,
    )
    loop.folder = folder
    link.located("fake", "/nowhere", "fake")
    link.serve(loop)


if __name__ == "__main__":
    main()
