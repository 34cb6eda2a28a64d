"""A GGUF file, opened: its model is built with lazy zeros, which are replaced by each layer's tensors when those are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.model_files import open_regular, shortened
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.gguf.families.family import ROPE_FACTORS, Family
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
    modules: Mapping[str, Mapping[str, GgufTensor]]

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
        if self.header.has(ROPE_FACTORS):
            (tensor,) = (one for one in self.header.tensors if one.name == ROPE_FACTORS)
            with self._files() as file_of:
                factors = (
                    read_tensor(file_of(tensor), tensor, None)["weight"].astype(mx.float32).tolist()
                )
            # mlx-lm's "longrope" takes a factor for each frequency; with equal context lengths it scales nothing else.
            config["rope_scaling"] = {
                "type": "longrope",
                "original_max_position_embeddings": config["max_position_embeddings"],
                "short_factor": factors,
                "long_factor": factors,
            }
        return config

    def _packings(self, model: Module) -> Iterator[tuple[str, Packing]]:
        """Find the modules that stay packed, each with its form."""
        for path, leaf in model.named_modules():
            tensor = self.modules.get(path, {}).get("weight")
            packing = None if tensor is None else PACKINGS.get(tensor.type_name)
            if packing is not None and hasattr(leaf, "to_quantized"):
                yield path, packing

    def _zeros(self, packings: Mapping[str, Packing]) -> Iterator[tuple[str, mx.array]]:
        for path, tensors in self.modules.items():
            for name, tensor in tensors.items():
                packing = packings.get(path) if name == "weight" else None
                for part, array in tensor_zeros(tensor, packing).items():
                    part_path = f"{path}.{name if part == 'weight' else part}"
                    yield part_path, self.family.changed(self.header, path, name, array)

    def _check_parameters(self, model: Module, arrays: Mapping[str, mx.array]) -> None:
        """Compare names and shapes with those of the model's own parameters.

        Raises:
            ModelFormatError: The file lacks one, the model has none for a tensor, or one of another shape.
        """
        expected = dict(tree_flatten(model.parameters()))
        for wrong, said in ((expected.keys() - arrays, "lacks"), (arrays - expected.keys(), "has")):
            if wrong:
                raise ModelFormatError(
                    f"{self.header.path.name} {said} {min(wrong)} ({len(wrong)} such parameters), which "
                    f"mlx-lm's {self.family.model_type} of these metadata has{'' if said == 'lacks' else ' not'}"
                )

        for path, array in arrays.items():
            # Scales and biases are those of the file's groups, which may be smaller than mlx's.
            if array.shape != expected[path].shape and not path.endswith((".scales", ".biases")):
                module, _, name = path.rpartition(".")
                tensor = self.modules[module][name]
                raise ModelFormatError(
                    f"{self.header.path.name}: {shortened(tensor.name)} of the shape {tensor.shape} does not fit the metadata"
                )

    def _of_no_leaf(self, leaves: Mapping[str, Module]) -> dict[str, mx.array]:
        others = [path for path in self.modules if path not in leaves]
        found: dict[str, mx.array] = {}
        if others:
            with self._files() as file_of:
                for path in others:
                    for name, tensor in self.modules[path].items():
                        array = read_tensor(file_of(tensor), tensor, None)["weight"]
                        changed = self.family.changed(self.header, path, name, array)
                        found[f"{path}.{name}"] = changed
        return found

    @contextmanager
    def reading(self) -> Iterator[ReadLeaf]:
        """Open the file, or each part; tensors are read as mlx-lm has them."""
        with self._files() as file_of:

            def read(path: str, leaf: Module) -> int:
                stored_bytes = 0
                for name, tensor in self.modules.get(path, {}).items():
                    is_packed = name == "weight" and "scales" in leaf
                    packing = PACKINGS[tensor.type_name] if is_packed else None
                    for part, array in read_tensor(file_of(tensor), tensor, packing).items():
                        to = name if part == "weight" else part
                        changed = self.family.changed(self.header, path, name, array)
                        leaf[to] = changed.astype(leaf[to].dtype)
                    stored_bytes += tensor.size_bytes
                return stored_bytes

            yield read

    def keep_as_stored(self, model: Module) -> None:
        """Give plain weights the dtype of the scales, which is float16; a file that is float32 stays so."""
        if all(tensor.type_name == "F32" for tensor in self.header.tensors):
            return
        for path, leaf in model.named_modules():
            for name in self.modules.get(path, {}):
                if "scales" not in leaf:
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
