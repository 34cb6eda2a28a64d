"""The encoders' matrix that the page of the reference is made from: measured apart from the architectures, because it takes seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from machd.capabilities.matrix import ArchitectureReport
from machd_probes.encoder_matrix.report import EncoderMatrix, encoder_matrix_of
from machd_probes.versions import ProbeBasis

ENCODERS_PATH = Path(__file__).with_name("matrix.json")
"""Path of a new one in a checkout."""


class KeptEncoders(Struct, frozen=True):
    """Reports of all encoders.

    Attributes:
        basis: What they hold for.
        mlx_vlm: The version of mlx-vlm.
        reports: By name.
    """

    basis: ProbeBasis
    mlx_vlm: str | None
    reports: dict[str, ArchitectureReport]

    @property
    def matrix(self) -> EncoderMatrix:
        """Its rows, judged."""
        return encoder_matrix_of(self.reports.values(), self.basis, self.mlx_vlm)


def kept_encoders() -> KeptEncoders:
    """Read the file.

    Raises:
        OSError: There is none.
        DecodeError: It is another one.
    """
    return msgspec.json.decode(ENCODERS_PATH.read_bytes(), type=KeptEncoders)


def encode_encoders_file(kept: KeptEncoders) -> bytes:
    """A line for each encoder, so that a difference can be read."""
    encode = msgspec.json.Encoder(order="deterministic").encode
    rows = [encode(name) + b": " + encode(report) for name, report in sorted(kept.reports.items())]
    return (
        b'{"basis": '
        + encode(kept.basis)
        + b',\n"mlx_vlm": '
        + encode(kept.mlx_vlm)
        + b',\n"reports": {\n'
        + b",\n".join(rows)
        + b"\n}}\n"
    )
