"""A directory in mlx-lm layout, opened: mlx-lm builds its model, or mlx-vlm one that takes images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlx.nn.layers.base import Module

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.own_code import OwnCode
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.architecture import architecture_name
from machd.engine.loading.formats.opened import BuiltModel, Opened, ReadLeaf, leave_to_mlx
from machd.engine.vision.media_processor import ProcessorFiles
from machd.engine.vision.mlx_vlm_import import import_family
from machd.engine.vision.vision_model import VisionLanguageModel
from machd.errors import ModelError, ModelFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDirectory(Opened):
    """A directory whose files agree with each other."""

    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model; see :meth:`Opened.build`."""
        if self.checkpoint.takes_images:
            return self._built_with_images()
        try:
            with self.bounds("building the model"):
                model = self._built(recorder)
        except ModelError:
            raise
        except Exception as error:
            # mlx-lm raises KeyError, TypeError or ValueError for a contradiction.
            raise ModelFormatError(
                f"{self.checkpoint.path.name}: weights and config.json do not fit together: {printable(error)}"
            ) from error
        return BuiltModel(model, architecture_name(model, self.checkpoint.model_type))

    def _built(self, recorder: TensorOrigins | None) -> Module:
        from mlx_lm import utils  # noqa: PLC0415 - after import_mlx_lm()

        path = self.checkpoint.path
        if recorder is None:
            trusts = self.own_code is OwnCode.TRUSTED
            model, _ = utils.load_model(path, lazy=True, trust_remote_code=trusts)
        else:
            model, _ = utils.load_model(path, lazy=True, get_model_classes=recorder.model_classes)
            recorder.restore_class(model)
        built: Module = model
        return built

    def _built_with_images(self) -> BuiltModel:
        """Build mlx-vlm's model, and start the process that loads the processor.

        Raises:
            ModelArchitectureError: mlx-vlm has no such family.
            ModelFormatError: The files do not fit it.
            OverloadedError: The system has no room for a process.
        """
        path = self.checkpoint.path
        # Started first: it imports as much as this process, and both can do so at once.
        processor = ProcessorFiles(path, trust_remote_code=self.own_code is OwnCode.TRUSTED)
        try:
            family = import_family(path)
            try:
                with self.bounds("building the model"):
                    model = VisionLanguageModel(family.load_model())
            except ModelError:
                raise
            except Exception as error:  # mlx-vlm's, about files that do not fit its classes
                raise ModelFormatError(
                    f"mlx-vlm's {family.name} cannot be built from {path.name}: {printable(error)}"
                ) from error
        except BaseException:
            processor.close()
            raise
        return BuiltModel(model, family.name, processor)

    @contextmanager
    def reading(self) -> Iterator[ReadLeaf]:
        """Leave reading to mlx, which reads an array when it is computed."""
        try:
            yield leave_to_mlx
        except RuntimeError as error:
            raise ModelFormatError(f"{self.checkpoint.path.name}: {printable(error)}") from error
