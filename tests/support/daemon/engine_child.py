"""An engine process with the fake engine, whose prompts tell it what to do.

A prompt that holds ``POISON`` ends the process by SIGSEGV at its first step, as a kernel does that cannot stand it; one that
holds ``FREEZE`` stops it, and one that holds ``CLASH`` ends it as soon as another row is decoded beside it.

One of several models is told by the query of its path how large it is and what loading does: ``fake?size=3&load_s=0.5``, and
``&fails`` for one that cannot be loaded.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import time
from urllib.parse import parse_qs, urlsplit

from machd.capabilities.fit import MemoryNeeds
from machd.clock import SystemClock
from machd.engine.protocol.step import StepPlan
from machd.engine_process.assembly import engine_loop
from machd.engine_process.front_link import FrontLink
from machd.errors import ModelFormatError
from machd.link.frames import Frames
from machd.settings.model import Settings
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine

POISON = b"poison"
FREEZE = b"freeze"
CLASH = b"clash"

DEVICE_BYTES = 1 << 40

_STAGE_BYTES = 4_000
_STAGE_PARTS = 4
"""Bytes of the weights, as far as the progress of a load tells, and how often it tells."""

_STEP_S = 0.005
"""Slow enough for a test to hit an answer while it is made."""


_prompts: dict[int, bytes] = {}
"""Of the rows so far, by slot: a prompt comes in chunks."""


def _before_step(plan: StepPlan) -> None:
    time.sleep(_STEP_S)
    for chunk in plan.prefill:
        before = b"" if chunk.opens else _prompts[chunk.slot_index]
        prompt = before + bytes(one for one in chunk.token_ids if one < 256)
        _prompts[chunk.slot_index] = prompt
        if POISON in prompt:
            signal.raise_signal(signal.SIGSEGV)  # on this thread, so at once
        if FREEZE in prompt:
            signal.raise_signal(signal.SIGSTOP)
    decoded = [_prompts[one.slot_index] for one in plan.decode]
    if len(decoded) > 1 and any(CLASH in prompt for prompt in decoded):
        signal.raise_signal(signal.SIGSEGV)  # on this thread, so at once


def _ignore(_settings: Settings) -> None:
    """The log of a test's daemon is the test's."""


def main() -> None:
    """Serve the front at the other end of the link."""
    faulthandler.enable()
    frames = Frames(socket.socket(fileno=int(sys.argv[1])))
    first = frames.receive()
    assert first is not None
    settings, name = Settings.model_validate_json(first[0]), bytes(first[1]).decode()
    link = FrontLink(frames, on_settings=_ignore, model_name=name)
    model = parse_qs(urlsplit(settings.model.path or "").query)

    def load() -> FakeEngine:
        if name:
            link.model_sized(_needs(int(model.get("size", ["1000"])[0])), DEVICE_BYTES)
            link.wait_placed()
        link.stage("loading the weights", _STAGE_BYTES)
        for _ in range(_STAGE_PARTS):
            link.advance(_STAGE_BYTES // _STAGE_PARTS)
            time.sleep(float(model.get("load_s", ["0"])[0]) / _STAGE_PARTS)
        link.stage("trying the model", None)
        if "fails" in model:
            raise ModelFormatError("the fake model is damaged")
        return FakeEngine(
            told, model_id=name or "fake", before_step=_before_step, context_tokens=10_000
        )

    loop = engine_loop(
        settings, link, load=load, clock=SystemClock(), on_note=link.note, on_beat=link.beat
    )
    link.located("fake", "/nowhere", name or "fake")
    link.serve(loop)


def _needs(weights_bytes: int) -> MemoryNeeds:
    return MemoryNeeds(
        weights_bytes=weights_bytes,
        working_bytes=0,
        kv_budget_bytes=1 << 40,
        bytes_per_token=1024,
        bytes_per_sequence=0,
        context_tokens=10_000,
    )


if __name__ == "__main__":
    main()
