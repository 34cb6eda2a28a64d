"""Whether the installed mlx-lm has a model's architecture, asked before its weights are read."""

from __future__ import annotations

import re

from machd.engine.untyped import LanguageModel
from machd.errors import ModelArchitectureError

__all__ = ["architecture_name", "check_architecture"]

_MODULE_NAME = re.compile(r"\w[\w-]*")
_PACKAGE = "mlx_lm.models."


def check_architecture(config: dict[str, object]) -> None:
    """Look up the classes that mlx-lm would build, and build nothing.

    Raises:
        ModelArchitectureError: mlx-lm has no such architecture, or cannot import it here.
    """
    from mlx_lm.utils import _get_classes  # noqa: PLC0415 - imported by the loader

    model_type = str(config["model_type"])
    problem = "the installed mlx-lm has no such architecture; a newer one may"
    if _MODULE_NAME.fullmatch(model_type):
        try:
            _get_classes(config)
        except (ValueError, AttributeError):
            pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module's import does anything
            # One architecture calls sys.exit when an optional package is missing.
            problem = f"mlx-lm cannot import it here: {error}"
        else:
            return
    raise ModelArchitectureError(f"model_type {model_type}: {problem}")


def architecture_name(model: LanguageModel, model_type: str) -> str:
    """mlx-lm's name of the architecture, which several model types may share."""
    module = type(model).__module__
    return module.removeprefix(_PACKAGE) if module.startswith(_PACKAGE) else model_type
