"""Tables of what machd reads of GGUF files: families and types of tensors, from the code that reads them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from machd.engine.loading.formats.gguf import families
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.known import FAMILIES
from machd.engine.loading.formats.gguf.header import TENSOR_TYPES
from machd.engine.loading.formats.gguf.packings import EXACT_FLOATS, PACKINGS, is_readable

_INTRODUCTION = """\
Any type may be in a file of any family. For each family `tests/contract/test_gguf_families.py` writes a tiny model as a directory and as a
GGUF file, by the rules of llama.cpp's converter: both give the same tokens, in F32 and F16 the same log-probabilities to the bit, and each
planted fault is noticed. For each type `tests/unit/engine/loading/test_gguf_types.py` compares what is read with the formulas of the package
`gguf`, bit for bit. [Limits](../concepts/models.md#limits-of-gguf).
"""


_USES = """\
| Use | From a GGUF file |
|---|---|
| `machd check` | as of a directory, with a line for each type of tensor |
| batches, drafts, quantised keys and values | as of a directory (`tests/integration/test_gguf_serving.py` compares log-probabilities) |
| several ranks | as of a directory (the same file: two ranks against one process) |
| experts on disk | no: most types are packed anew while they are read, so an expert cannot be read by itself; check and the log say so |
| [adapters](../concepts/adapters.md) | yes, of any format; a LoRA in a GGUF file is served as one, and refused as a model |
"""


def gguf_markdown() -> str:
    """The page: uses, families, then types."""
    return (
        f"{_INTRODUCTION}\n## Uses\n\n{_USES}\n## Families\n\n{_families_table()}"
        f"\n## Types of tensors\n\n{_types_table()}"
    )


def _families_table() -> str:
    lines = ["| `general.architecture` | Architectures of mlx-lm | Models |", "|---|---|---|"]
    for module in _modules():
        found = [one for one in vars(module).values() if isinstance(one, Family)]
        names = sorted({one.architecture for one in found if one.architecture in FAMILIES})
        architectures = sorted({one.model_type for one in found})
        told = (inspect.getdoc(module) or "").splitlines()[0]
        lines.append(f"| {_code(names)} | {_code(architectures)} | {told} |")
    return "\n".join(lines) + "\n"


def _modules() -> Iterator[ModuleType]:
    """Every module that has tables of families of its own."""
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        if info.name != "known" and any(isinstance(one, Family) for one in vars(module).values()):
            yield module


def _types_table() -> str:
    lines = ["| Type | On the CPU, with machd's kernels |", "|---|---|"]
    names = sorted({name for name, _, _ in TENSOR_TYPES.values()})
    lines.extend(f"| {name} | {_fate(name)} |" for name in names)
    return "\n".join(lines) + "\n"


def _fate(name: str) -> str:
    if (packing := PACKINGS.get(name)) is not None:
        form = f"{packing.mode}, {packing.bits} bits, groups of {packing.group_size}"
        return f"packed ({form}) with the file's own numbers"
    if name in EXACT_FLOATS:
        return "as stored"
    return "expanded to float16" if is_readable(name) else "refused: no type of weights"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
