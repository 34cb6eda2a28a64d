"""A GGUF file, opened: its model is built of zeros that are never computed, and each layer's tensor is read in their place.

machd reads one architecture: llama's; :mod:`machd.engine.loading.formats.gguf_llama` has what is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from machd.engine.backend.inspection_bounds import check_counts, check_finite, printable
from machd.engine.backend.model_files import open_regular, shortened
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from machd.engine.loading.formats.gguf_llama import (
    ROPE_FACTORS,
    in_mlx_order,
    llama_config,
    make_llama,
    module_path,
    refuse_experts,
)
from machd.engine.loading.formats.gguf_tensors import EXPANDED, KEPT_BITS, read_tensor
from machd.engine.loading.formats.opened import Bounds, BuiltModel, Opened, OwnCode, ReadLeaf
from machd.engine.loading.source import ModelSource
from machd.errors import ModelArchitectureError, ModelFormatError

_ARCHITECTURE = "llama"

_GROUP_SIZE = 32
"""Weights that share a scale in every type that is kept quantised."""


def open_gguf(source: ModelSource, bounds: Bounds) -> OpenedGguf:
    """Read and check the header.

    Raises:
        ModelArchitectureError: The file's architecture is none that machd reads.
        ModelFormatError: The file is damaged, or holds what machd does not read.
    """
    with bounds("reading the header"):
        header = read_gguf_header(source.path)
    check_gguf(header)
    paths = ((module_path(tensor.name), tensor) for tensor in header.tensors)
    return OpenedGguf(
        source=source,
        files=header,
        config=llama_config(header),
        stored_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        weight_files=(source.path,),
        own_code=OwnCode.REFUSED,
        bounds=bounds,
        is_repacked=True,
        modules={path: tensor for path, tensor in paths if path is not None},
    )


def check_gguf(header: GgufHeader) -> None:
    """Refuse what cannot become a llama of mlx-lm, before anything large is read.

    Raises:
        ModelArchitectureError: Another architecture, or a mixture of experts.
        ModelFormatError: A tensor type that machd does not read, a tensor that llama has not, or more
            layers than tensors.
    """
    name = header.path.name
    architecture = header.text("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelArchitectureError(
            f"{name} holds the architecture {shortened(architecture)}; machd reads GGUF files of "
            "the llama family: take the model in mlx-lm layout (safetensors) instead"
        )
    refuse_experts(header)
    for tensor in header.tensors:
        if tensor.type_name not in KEPT_BITS and tensor.type_name not in EXPANDED:
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is stored as {tensor.type_name}, which machd does not "
                "read; use a Q4_0, Q4_1, Q8_0, F16 or F32 file"
            )
        if len(tensor.shape) == 1 and tensor.type_name in KEPT_BITS:
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is a vector stored as {tensor.type_name}; no converter writes that"
            )
        if tensor.name != ROPE_FACTORS and module_path(tensor.name) is None:
            raise ModelFormatError(f"{name}: a plain llama has no tensor {shortened(tensor.name)}")
    if not any(tensor.name == "token_embd.weight" for tensor in header.tensors):
        raise ModelFormatError(f"{name} holds no token_embd.weight; it is no language model")
    config = llama_config(header)
    check_counts(config, len(header.tensors))
    check_finite(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGguf(Opened):
    """A GGUF file of the llama family, with the tensor of each module by mlx-lm's path of it."""

    files: GgufHeader
    modules: Mapping[str, GgufTensor] = field(default_factory=dict)

    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model of zeros in the shapes and dtypes of the stored weights."""
        assert recorder is None, "its arrays lie in no file as they are"
        try:
            with self.bounds("building the model"):
                return BuiltModel(self._built(), _ARCHITECTURE)
        except ModelFormatError:
            raise
        except Exception as error:
            # mlx-lm raises any error for a contradiction, such as ZeroDivisionError for no heads.
            raise ModelFormatError(
                f"{self.source.path.name}: its tensors do not fit its metadata: {printable(error)}"
            ) from error

    def _built(self) -> Module:
        def packing(path: str, _: Module) -> bool | dict[str, int]:
            tensor = self.modules.get(path)
            bits = None if tensor is None else KEPT_BITS.get(tensor.type_name)
            return False if bits is None else {"group_size": _GROUP_SIZE, "bits": bits}

        model = make_llama(llama_config(self.files, self._rope_factors()))
        quantize(model, class_predicate=packing)
        zeros = [
            (f"{path}.{part}", array)
            for path, tensor in self.modules.items()
            for part, array in _zeros(tensor).items()
        ]
        model.load_weights(zeros, strict=True)
        model.eval()
        return model

    @contextmanager
    def reading(self) -> Iterator[ReadLeaf]:
        """Open the file; numbers are read in mlx-lm's order of rows."""
        with self._file() as file:

            def read(path: str, leaf: Module) -> int:
                if (tensor := self.modules.get(path)) is None:
                    return 0
                for part, array in read_tensor(file, tensor).items():
                    rows = in_mlx_order(self.files, path, array)
                    leaf[part] = rows.astype(leaf[part].dtype)
                return tensor.size_bytes

            yield read

    def keep_as_stored(self, model: Module) -> None:
        """Give plain weights the dtype of the scales, which is float16; a file that is float32 stays so."""
        if all(tensor.type_name == "F32" for tensor in self.files.tensors):
            return
        for path, leaf in model.named_modules():
            if path in self.modules and "scales" not in leaf:
                leaf["weight"] = leaf["weight"].astype(mx.float16)

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        with open_regular(self.files.path) as file:
            try:
                yield file
            except (OSError, EOFError) as error:
                raise ModelFormatError(
                    f"{self.files.path.name} has changed while it was read; fetch the file again"
                ) from error

    def _rope_factors(self) -> list[float] | None:
        for tensor in self.files.tensors:
            if tensor.name == ROPE_FACTORS:
                with self._file() as file:
                    values = read_tensor(file, tensor)["weight"].astype(mx.float32).tolist()
                assert isinstance(values, list)
                return [value for value in values if isinstance(value, float)]
        return None


def _zeros(tensor: GgufTensor) -> dict[str, mx.array]:
    """Make zeros in the shapes and dtypes of what :func:`read_tensor` reads."""
    bits = KEPT_BITS.get(tensor.type_name)
    if bits is None:
        dtype = mx.float16 if tensor.type_name == "F16" else mx.float32
        return {"weight": mx.zeros(tensor.shape, dtype)}
    *rows, columns = tensor.shape
    groups = mx.zeros((*rows, columns // _GROUP_SIZE), mx.float16)
    packed = mx.zeros((*rows, columns * bits // 32), mx.uint32)
    return {"weight": packed, "scales": groups, "biases": groups}
