"""The matrix that comes with machd: what was measured of every architecture, on tiny models."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.model_code import shared_layers
from machd_probes.versions import ProbeBasis

_NAME = "matrix.json"

MATRIX_PATH = Path(__file__).with_name(_NAME)
"""Path of a new one in a checkout."""


class KeptMatrix(Struct, frozen=True):
    """Reports of all architectures.

    Attributes:
        basis: What they hold for.
        reports: By name.
    """

    basis: ProbeBasis
    reports: dict[str, ArchitectureReport]

    @property
    def shared_layers(self) -> frozenset[str]:
        """Layers that were measured in some architecture and are no architecture's own."""
        codes = (one.code for one in self.reports.values() if one.code is not None)
        switched = (one.code for report in self.reports.values() for one in report.switched)
        return shared_layers((*codes, *switched))


@cache
def kept_matrix() -> KeptMatrix | None:
    """The matrix of this version of machd; None where it is not installed. Takes some 10 ms."""
    path = files(__package__) / _NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptMatrix)
    except (OSError, ValueError):
        return None


def encode_matrix_file(matrix: KeptMatrix) -> bytes:
    """A line for each architecture, so that a difference can be read."""
    encode = msgspec.json.Encoder(order="deterministic").encode
    rows = [
        encode(name) + b": " + encode(report) for name, report in sorted(matrix.reports.items())
    ]
    return (
        b'{"basis": ' + encode(matrix.basis) + b',\n"reports": {\n' + b",\n".join(rows) + b"\n}}\n"
    )
