"""A GGUF file, opened: its model is built with lazy zeros, which are replaced by each layer's tensors when those are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.model_files import open_regular, shortened
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.header import GgufHeader, GgufTensor
from machd.engine.loading.formats.gguf.packings import PACKINGS, Packing
from machd.engine.loading.formats.gguf.tensors import read_tensor, tensor_zeros
from machd.engine.loading.formats.opened import BuiltModel, Opened, ReadLeaf
from machd.errors import ModelFormatError

_MLX_GROUP = 32
"""A group that mlx makes layers of; the group is set to the file's afterwards, which may be 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGguf(Opened):
    """A GGUF file of a family that machd reads.

    Attributes:
        header: The file's.
        family: How its tensors become parameters.
        modules: The tensors of each module, by mlx-lm's path of the module, then by the parameter's name.
    """

    is_repacked: ClassVar[bool] = True
    header: GgufHeader
    family: Family
    modules: Mapping[str, Mapping[str, tuple[GgufTensor, ...]]]

    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model of zeros in the shapes and dtypes of the stored weights."""
        assert recorder is None, "its arrays lie in no file as they are"
        try:
            with self.bounds("building the model"):
                return BuiltModel(self._built(), self.family.model_type)
        except ModelFormatError:
            raise
        except Exception as error:
            # mlx-lm raises any error for a contradiction, such as ZeroDivisionError for no heads.
            raise ModelFormatError(
                f"{self.header.path.name}: its tensors do not fit its metadata: {printable(error)}"
            ) from error

    def _built(self) -> Module:
        module = importlib.import_module(f"mlx_lm.models.{self.family.model_type}")
        model: Module = module.Model(module.ModelArgs.from_dict(self._config()))
        self.family.finish(self.header, model)
        packings = dict(self._packings(model))

        def packed(path: str, _: Module) -> bool | dict[str, object]:
            packing = packings.get(path)
            if packing is None:
                return False
            return {"group_size": _MLX_GROUP, "bits": packing.bits, "mode": packing.mode}

        quantize(model, class_predicate=packed)
        leaves = dict(tree_flatten(model.leaf_modules(), is_leaf=Module.is_module))
        for path, packing in packings.items():
            leaves[path].group_size = packing.group_size
        arrays = dict(self._zeros(packings))
        self._check_parameters(model, arrays)
        # Parameters of a module that has children are few and small, and nothing reads them later.
        arrays |= self._of_no_leaf(leaves)
        model.update(tree_unflatten(list(arrays.items())))
        model.eval()
        return model

    def _config(self) -> dict[str, object]:
        config = dict(self.checkpoint.config)
        tensors = self.family.rope_factors(self.header)
        if tensors:
            with self._files() as file_of:
                factors = {tensor.name: _numbers(file_of(tensor), tensor) for tensor in tensors}
            config["rope_scaling"] = self.family.rope_of_factors(config, factors)
        return config

    def _packings(self, model: Module) -> Iterator[tuple[str, Packing]]:
        """Find the modules that stay packed, each with its form."""
        for path, leaf in model.named_modules():
            packing = self._packing(self.modules.get(path, {}).get("weight", ()))
            if packing is not None and hasattr(leaf, "to_quantized"):
                yield path, packing

    def _packing(self, tensors: tuple[GgufTensor, ...]) -> Packing | None:
        """Return the form of a weight; None where its tensors have several, or are expanded."""
        types = {one.type_name for one in tensors}
        if len(types) != 1 or not all(map(self.family.keeps_packed, tensors)):
            return None
        return PACKINGS.get(types.pop())

    def _zeros(self, packings: Mapping[str, Packing]) -> Iterator[tuple[str, mx.array]]:
        for path, tensors in self.modules.items():
            for name, of_name in tensors.items():
                packing = packings.get(path) if name == "weight" else None
                stored = [tensor_zeros(one, packing) for one in of_name]
                for part, array in self._changed(path, name, stored):
                    yield f"{path}.{part}", array

    def _changed(
        self, path: str, name: str, stored: list[dict[str, mx.array]]
    ) -> Iterator[tuple[str, mx.array]]:
        """Make mlx-lm's arrays of a parameter's tensors, each with its name."""
        for part in stored[0]:
            arrays = [one[part] for one in stored]
            changed = self.family.changed(self.header, path, name, arrays)
            yield name if part == "weight" else part, mx.contiguous(changed)

    def _check_parameters(self, model: Module, arrays: Mapping[str, mx.array]) -> None:
        """Compare names and shapes with those of the model's own parameters.

        Raises:
            ModelFormatError: The file lacks one, the model has none for a tensor, or its shape is another.
        """
        expected = dict(tree_flatten(model.parameters()))
        for wrong, said in ((expected.keys() - arrays, "lacks"), (arrays - expected.keys(), "has")):
            if wrong:
                raise ModelFormatError(
                    f"{self.header.path.name} {said} {min(wrong)} ({len(wrong)} such parameters), which "
                    f"mlx-lm's {self.family.model_type} of these metadata has{'' if said == 'lacks' else ' not'}"
                )

        for path, array in arrays.items():
            module, _, name = path.rpartition(".")
            # Groups of 16 have more scales than mlx's own layers, whose smallest are of 32.
            is_grouped = name in {"scales", "biases"}
            until = -1 if is_grouped else None
            if array.shape[:until] != expected[path].shape[:until]:
                tensor = self.modules[module]["weight" if is_grouped else name][0]
                raise ModelFormatError(
                    f"{self.header.path.name}: {shortened(tensor.name)} of the shape {tensor.shape} does not fit the metadata"
                )

    def _of_no_leaf(self, leaves: Mapping[str, Module]) -> dict[str, mx.array]:
        others = [path for path in self.modules if path not in leaves]
        found: dict[str, mx.array] = {}
        if others:
            with self._files() as file_of:
                for path in others:
                    for name, tensors in self.modules[path].items():
                        stored = [read_tensor(file_of(one), one, None) for one in tensors]
                        for part, array in self._changed(path, name, stored):
                            found[f"{path}.{part}"] = array
        return found

    @contextmanager
    def reading(self) -> Iterator[ReadLeaf]:
        """Open the file, or each part; tensors are read as mlx-lm has them."""
        with self._files() as file_of:

            def read(path: str, leaf: Module) -> int:
                stored_bytes = 0
                for name, tensors in self.modules.get(path, {}).items():
                    is_packed = name == "weight" and "scales" in leaf
                    packing = PACKINGS[tensors[0].type_name] if is_packed else None
                    stored = [read_tensor(file_of(one), one, packing) for one in tensors]
                    for part, array in self._changed(path, name, stored):
                        leaf[part] = array.astype(leaf[part].dtype)
                    firsts = (one for one in tensors if self.family.is_first(one, path))
                    stored_bytes += sum(one.size_bytes for one in firsts)
                return stored_bytes

            yield read

    def keep_as_stored(self, model: Module) -> None:
        """Give plain weights the dtype of the scales, which is float16; a file that is float32 stays so."""
        if all(tensor.type_name == "F32" for tensor in self.header.tensors):
            return
        may_cast = getattr(model, "cast_predicate", None) or (lambda _path: True)
        for path, leaf in model.named_modules():
            for name in self.modules.get(path, {}):
                if "scales" not in leaf and may_cast(f"{path}.{name}"):
                    leaf[name] = leaf[name].astype(mx.float16)

    @contextmanager
    def _files(self) -> Iterator[Callable[[GgufTensor], BinaryIO]]:
        """Open files as they are needed: each tensor's."""
        with ExitStack() as stack:
            files: dict[Path, BinaryIO] = {}

            def file_of(tensor: GgufTensor) -> BinaryIO:
                if tensor.path not in files:
                    files[tensor.path] = stack.enter_context(open_regular(tensor.path))
                return files[tensor.path]

            try:
                yield file_of
            except (OSError, EOFError) as error:
                raise ModelFormatError(
                    f"{self.header.path.name} has changed while it was read; fetch the file again"
                ) from error


def _numbers(file: BinaryIO, tensor: GgufTensor) -> list[float]:
    values = np.array(read_tensor(file, tensor, None)["weight"].astype(mx.float32))
    return [float(value) for value in values]
