"""The import of mlx-vlm: a checkpoint's model family, with its model code and its processor.

mlx-vlm is the extra ``vision``. Nothing here is imported for a checkpoint without images.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.own_code import closed_to_own_code
from machd.engine.vision.families import ONE_TILE_FAMILIES
from machd.errors import ModelArchitectureError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

_VISION_KEYS = ("vision_config", "img_processor", "mm_vision_tower", "vision_tower")
"""Keys of ``config.json`` that say a checkpoint has a vision tower."""


def has_vision(config: Mapping[str, object]) -> bool:
    """Tell from ``config.json`` whether a checkpoint has a vision tower; imports nothing."""
    return any(config.get(key) for key in _VISION_KEYS)


def is_installed() -> bool:
    """Tell whether the extra ``vision`` is installed; imports nothing."""
    return importlib.util.find_spec("mlx_vlm") is not None


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint's family of mlx-vlm's."""

    name: str
    directory: Path

    def load_model(self) -> Module:
        """Build the model with lazy weights.

        Raises:
            Exception: Any error of mlx-vlm's about the files.
        """
        from mlx_vlm.utils import load_model  # noqa: PLC0415 - imported by import_family

        with closed_to_own_code():
            model: Module = load_model(self.directory, lazy=True)
        return model

    def load_processor(self, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401 - processors have no common class
        """Load the checkpoint's processor.

        Raises:
            Exception: Any error of mlx-vlm's or transformers' about the files.
        """
        from mlx_vlm.utils import (  # noqa: PLC0415 - imported by import_family
            load_image_processor,
            load_processor,
        )

        with closed_to_own_code(is_trusted=trust_remote_code):
            # mlx-vlm's default is True.
            image_processor = load_image_processor(
                self.directory, trust_remote_code=trust_remote_code
            )
            processor = load_processor(
                self.directory, add_detokenizer=False, trust_remote_code=trust_remote_code
            )
        if image_processor is not None:
            processor.image_processor = image_processor
        if self.name in ONE_TILE_FAMILIES:
            processor.image_processor.max_patches = 1
        return processor


def import_family(directory: str | Path) -> Family:
    """Import the code of a checkpoint's family.

    Raises:
        ModelArchitectureError: mlx-vlm has no such family, or cannot import it here.
    """
    import_mlx_lm()  # first, because both read transformers and mlx-lm's import leaves limits alone
    from mlx_vlm.utils import get_model_and_args, load_config  # noqa: PLC0415 - a part of the extra

    path = Path(directory)
    config = load_config(path)
    try:
        _, name = get_model_and_args(config)
    except Exception as error:
        raise ModelArchitectureError(
            f"model_type {config.get('model_type')}: mlx-vlm cannot import it here: {error}"
        ) from error
    return Family(str(name), path)
