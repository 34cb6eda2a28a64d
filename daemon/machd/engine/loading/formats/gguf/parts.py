"""The header of a GGUF model: of its one file, or of its parts together, which the metadata count."""

from __future__ import annotations

from pathlib import Path

from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf.header import GgufHeader, read_gguf_header
from machd.errors import ModelFormatError, ModelNotFoundError
from machd.gguf_parts import gguf_name

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"

_MAX_PARTS = 1000


def read_parts(path: Path) -> GgufHeader:
    """Read the header of a model, whichever of its parts is given.

    Returns:
        The metadata of the first part, and the tensors of all.

    Raises:
        ModelFormatError: A part is damaged, or belongs to another model.
        ModelNotFoundError: A part is missing, or cannot be opened.
    """
    given = read_gguf_header(path)
    count = given.integer(_COUNT, 1)
    if count <= 1:
        return given
    number, name = given.integer(_NUMBER), gguf_name(path)
    if count > _MAX_PARTS:
        raise ModelFormatError(f"{path.name}: {_COUNT} is {count:,}; fetch the file again")
    if (name.number, name.count) != (number + 1, count):
        raise ModelFormatError(
            f"{path.name} is part {number + 1} of {count}, and its name does not say so: name it as it was published, "
            f"with -{number + 1:05}-of-{count:05}.gguf at its end, beside the others"
        )
    headers = [
        given if at == number else _part(path.with_name(name.part(at + 1)), at, count)
        for at in range(count)
    ]
    return _joined(headers)


def _part(path: Path, number: int, count: int) -> GgufHeader:
    if not path.exists():
        raise ModelNotFoundError(
            f"{path.name} is missing: the model is split into {count} files; put it beside the others"
        )
    header = read_gguf_header(path)
    if (header.integer(_NUMBER, 0), header.integer(_COUNT, 1)) != (number, count):
        raise ModelFormatError(
            f"{path.name} is not part {number + 1} of {count}, as its name says; fetch it again"
        )
    return header


def _joined(headers: list[GgufHeader]) -> GgufHeader:
    first = headers[0]
    names = set[str]()
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in names:
                raise ModelFormatError(
                    f"{header.path.name} belongs to another model: {shortened(tensor.name)} is in another part, too; "
                    "fetch it again"
                )
            names.add(tensor.name)
    if first.integer(_TENSORS, len(names)) != len(names):
        raise ModelFormatError(
            f"{first.path.name} and its other parts hold {len(names):,} tensors, and {_TENSORS} is "
            f"{first.integer(_TENSORS):,}: a part belongs to another model; fetch them again"
        )
    return GgufHeader(
        first.path, first.metadata, tuple(tensor for one in headers for tensor in one.tensors)
    )
