"""Messages from a worker process to the runner, one JSON object a line, and the wording of faults."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.model_code import ModelCode

BLAS_VARIABLE = "LME_BLAS"
"""Tells a worker, as it tells every command, which library is to multiply matrices."""

RUN_PROBE = "run"
"""The name under which a fault of the whole run of an architecture stands among its results."""

_MAX_DETAIL = 240
_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+~-]+)+/([\w.@+~-]+)")


class WorkerReady(Struct, frozen=True, tag="ready"):
    """mlx is imported, and this is what computes.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: Library and version; null off the CPU.
    """

    backend: str
    blas: str | None = None


class WorkerFinished(Struct, frozen=True, tag="finished"):
    """One architecture is done; the next one on the command line begins."""

    report: ArchitectureReport


class CheckFinished(Struct, frozen=True, tag="check"):
    """One check of a stand-in is done."""

    result: ProbeResult


WorkerMessage: TypeAlias = WorkerReady | WorkerFinished | CheckFinished


class StandInOrder(Struct, frozen=True):
    """The order to measure a stand-in of a model, read from a worker's standard input.

    Attributes:
        architecture: mlx-lm's name of it.
        config: The model's own, as in its ``config.json``; empty where it has none.
        model_file: Python file of the checkpoint's own that defines its classes; None for mlx-lm's.
        dtype: What the model computes in.
        code: What the stand-in has to be made of.
        checks: To run, in this order.
    """

    architecture: str
    config: dict[str, Any]
    model_file: str | None
    dtype: str
    code: ModelCode
    checks: tuple[str, ...]


_DECODER: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)


def encode_message(message: WorkerMessage) -> bytes:
    """A line, its end included."""
    return msgspec.json.encode(message) + b"\n"


def decode_message(line: bytes) -> WorkerMessage | None:
    """The message; None for a line that is none."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def faulted(architecture: str, detail: str) -> ArchitectureReport:
    """The row of an architecture whose run itself went wrong."""
    detail = shortened(detail)
    result = ProbeResult(RUN_PROBE, Outcome.ERRORED, detail)
    return ArchitectureReport(architecture, results=(result,), problem=detail)


def is_faulted(report: ArchitectureReport) -> bool:
    """Return True if :func:`faulted` made the row: the machine may be at fault as well as the model."""
    return any(result.probe == RUN_PROBE for result in report.results)


def shortened(text: str) -> str:
    """One line for a report: the end of ``text``, and of paths of this machine the last part."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    line = _PATH.sub(r"\1", line).encode("utf-8", "replace").decode("utf-8")
    return line if len(line) <= _MAX_DETAIL else f"… {line[-_MAX_DETAIL:].lstrip()}"
