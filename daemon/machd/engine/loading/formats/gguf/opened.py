"""A GGUF file, opened: its model is built with lazy zeros, which are replaced by each layer's tensors when those are read.

:mod:`machd.engine.loading.formats.gguf.families.llama` reads the file and has what is llama's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.model_files import open_regular
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.gguf.families.llama import (
    ARCHITECTURE,
    ROPE_FACTORS,
    in_mlx_order,
    llama_config,
)
from machd.engine.loading.formats.gguf.header import KEPT_BITS, GgufHeader, GgufTensor
from machd.engine.loading.formats.gguf.tensors import read_tensor
from machd.engine.loading.formats.opened import BuiltModel, Opened, ReadLeaf
from machd.errors import ModelFormatError

_GROUP_SIZE = 32
"""Group size of every type that stays quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGguf(Opened):
    """A GGUF file of the llama family.

    Attributes:
        header: The file's.
        modules: The tensor of each module, by mlx-lm's path of the module.
    """

    is_repacked: ClassVar[bool] = True
    header: GgufHeader
    modules: Mapping[str, GgufTensor]

    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model of zeros in the shapes and dtypes of the stored weights."""
        assert recorder is None, "its arrays lie in no file as they are"
        try:
            with self.bounds("building the model"):
                return BuiltModel(self._built(), ARCHITECTURE)
        except ModelFormatError:
            raise
        except Exception as error:
            # mlx-lm raises any error for a contradiction, such as ZeroDivisionError for no heads.
            raise ModelFormatError(
                f"{self.header.path.name}: its tensors do not fit its metadata: {printable(error)}"
            ) from error

    def _built(self) -> Module:
        from mlx_lm.models.llama import Model, ModelArgs  # noqa: PLC0415 - after import_mlx_lm()

        def packing(path: str, _: Module) -> bool | dict[str, int]:
            tensor = self.modules.get(path)
            bits = None if tensor is None else KEPT_BITS.get(tensor.type_name)
            return False if bits is None else {"group_size": _GROUP_SIZE, "bits": bits}

        model: Module = Model(ModelArgs.from_dict(llama_config(self.header, self._rope_factors())))
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
        """Open the file; tensors are read with rows in mlx-lm's order."""
        with self._file() as file:

            def read(path: str, leaf: Module) -> int:
                if (tensor := self.modules.get(path)) is None:
                    return 0
                for part, array in read_tensor(file, tensor).items():
                    rows = in_mlx_order(self.header, path, array)
                    leaf[part] = rows.astype(leaf[part].dtype)
                return tensor.size_bytes

            yield read

    def keep_as_stored(self, model: Module) -> None:
        """Give plain weights the dtype of the scales, which is float16; a file that is float32 stays so."""
        if all(tensor.type_name == "F32" for tensor in self.header.tensors):
            return
        for path, leaf in model.named_modules():
            if path in self.modules and "scales" not in leaf:
                leaf["weight"] = leaf["weight"].astype(mx.float16)

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        with open_regular(self.header.path) as file:
            try:
                yield file
            except (OSError, EOFError) as error:
                raise ModelFormatError(
                    f"{self.header.path.name} has changed while it was read; fetch the file again"
                ) from error

    def _rope_factors(self) -> list[float] | None:
        for tensor in self.header.tensors:
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
