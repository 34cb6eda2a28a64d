"""A directory in mlx-lm layout, opened: mlx-lm builds its model, or mlx-vlm one that takes images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlx.nn.layers.base import Module

from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.architecture import architecture_name, check_architecture
from machd.engine.loading.formats.checkpoint import Checkpoint, read_checkpoint
from machd.engine.loading.formats.opened import (
    Bounds,
    BuiltModel,
    Opened,
    OwnCode,
    ReadLeaf,
    leave_to_mlx,
)
from machd.engine.loading.source import ModelSource
from machd.engine.loading.vision import loads_vision, refuse_own_code, why_text_only
from machd.engine.vision.media_processor import ProcessorFiles
from machd.engine.vision.mlx_vlm_import import import_family
from machd.engine.vision.vision_model import VisionLanguageModel
from machd.errors import ModelCodeError, ModelError, ModelFormatError


def open_directory(
    source: ModelSource, own_code: OwnCode, bounds: Bounds, import_for_text: Callable[[], None]
) -> OpenedDirectory:
    """Read and check configuration and headers, then import mlx-lm.

    Raises:
        ModelError: One of its kinds; see :func:`read_checkpoint`, :func:`refuse_own_code` and :func:`check_architecture`.
    """
    # Trusted to be read, where it never runs: the error here does not ask for a flag that has no effect.
    checkpoint = read_checkpoint(source.path, trust_remote_code=own_code is not OwnCode.REFUSED)
    if checkpoint.has_own_model and own_code is OwnCode.NEVER_RUN:
        raise ModelCodeError(
            f"{source.path.name} is built by Python code of its own, which is never run to check "
            "it: whether it runs here is not known; read the file that config.json names as "
            "model_file, and serve it with `--model-trust-remote-code` if you trust it"
        )
    refuse_own_code(checkpoint, trust_remote_code=own_code is OwnCode.TRUSTED)
    takes_images = loads_vision(checkpoint)
    # The processor of images has classes of transformers'.
    (import_mlx_lm if takes_images else import_for_text)()
    if not checkpoint.has_own_model and not takes_images:
        check_architecture(checkpoint.config)
    return OpenedDirectory(
        source=source,
        files=checkpoint,
        config=checkpoint.config,
        stored_bytes=checkpoint.stored_bytes,
        weight_files=checkpoint.weight_files,
        own_code=own_code,
        bounds=bounds,
        tensors=checkpoint.tensors,
        takes_images=takes_images,
        vision_reason=why_text_only(checkpoint),
        code_files=checkpoint.code_files,
        has_own_model=checkpoint.has_own_model,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDirectory(Opened):
    """A directory whose files agree with each other."""

    files: Checkpoint

    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model; see :meth:`Opened.build`."""
        if self.takes_images:
            return self._built_with_images()
        try:
            with self.bounds("building the model"):
                model = self._built(recorder)
        except ModelError:
            raise
        except Exception as error:
            # mlx-lm raises KeyError, TypeError or ValueError for a contradiction.
            raise ModelFormatError(
                f"{self.source.path.name}: weights and config.json do not fit together: {printable(error)}"
            ) from error
        return BuiltModel(model, architecture_name(model, self.files.model_type))

    def _built(self, recorder: TensorOrigins | None) -> Module:
        from mlx_lm import utils  # noqa: PLC0415 - after import_mlx_lm()

        path = self.source.path
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
        path = self.source.path
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
            raise ModelFormatError(f"{self.source.path.name}: {printable(error)}") from error
