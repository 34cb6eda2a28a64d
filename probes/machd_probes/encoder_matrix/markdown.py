"""The encoders' matrix as a part of the page ``docs/reference/architectures.md``."""

from __future__ import annotations

from collections.abc import Iterator

from machd_probes.encoder_matrix.report import EncoderMatrix
from machd_probes.encoder_matrix.table import HEADINGS, cells, counts, unsupported
from machd_probes.markdown import escaped, markdown_table
from machd_probes.table import NONE, measured_on

_LEGEND = """\
Models that make vectors or labels of texts, measured with the same command on tiny models of every family and every kind of
pooling and head. No log-probability is compared here, but vectors and logits in float32.

- **batch**: a text has the same vector, or the same logits, beside other texts of one pass as alone.
- **pooling**: vectors are pooled, go through dense layers and are normalised as the checkpoint's files say.
- **kernels**: machd's own kernels give what mlx's layers give; **-** where there are none for the family.
- **least cosine**, **logits off by**: the furthest that two results of one text are apart, of all checks together. 1e-06 and 1e-04
  are allowed.

That vectors are those of transformers and sentence-transformers is not measured here: the tests hold each of these encoders to theirs."""


def encoders_markdown(matrix: EncoderMatrix) -> str:
    """The part of the page, its heading included."""
    return "\n\n".join(_parts(matrix)) + "\n"


def _parts(matrix: EncoderMatrix) -> Iterator[str]:
    yield "## Encoders"
    yield (
        f"Measured on {measured_on(matrix.versions)}, mlx-vlm {matrix.versions.mlx_vlm}; "
        "`make matrix-encoders` measures again, in seconds."
    )
    yield f"{len(matrix.rows)} encoders: {counts(matrix.summary)}."
    yield _LEGEND
    rows = [
        (
            f"`{row.encoder}`",
            f"`{row.family}`",
            f"`{row.pooling}`" if row.pooling else NONE,
            *cells(row),
        )
        for row in matrix.rows
    ]
    yield markdown_table(("encoder", "family", "pooling by", *HEADINGS), rows)
    reasons = [(escaped(name), escaped(reason)) for name, reason in unsupported(matrix)]
    if reasons:
        yield markdown_table(("encoder", "reason"), reasons)
