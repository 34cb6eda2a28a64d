"""The import of transformers, in half its time.

When it is imported it reads the 1,600 files of its models for the names that they have, line by line, and its package of
models reads them again: 1 of 1.9 s of processor time (transformers 5.23). Here they are read once, and searched from their ends.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def import_transformers() -> None:
    """Import transformers, and have it say nothing of a PyTorch that is not there. Does nothing the second time."""
    if "transformers" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # noqa: TID251 - written for a library, not read
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "mlx-lm depends on it"
    package = sys.modules["transformers"] = importlib.util.module_from_spec(spec)
    vars(package)["__version__"] = importlib.metadata.version("transformers")
    try:
        _hasten(importlib.import_module("transformers.utils.import_utils"))
    except (ImportError, KeyError):  # of a version that finds its names in another way
        for name in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        importlib.import_module("transformers")
    else:
        importlib.reload(package)  # run for the first time


def _hasten(search: ModuleType) -> None:
    """Have names found at less cost.

    Raises:
        KeyError: The module has no such functions.
    """
    found = vars(search)
    names_of_file, structure_of = found["fetch__all__"], found["create_import_structure_from_path"]

    def names_from_the_end(content: str) -> object:
        """Return what the last ``__all__`` has that begins a line."""
        return names_of_file(content[content.rfind("\n__all__") + 1 :])

    def structure_once(path: str | Path) -> object:
        """Return the structure of a folder, which is kept by its name; a file stands for its folder."""
        place = Path(path)
        return structure_of(str(place.parent if place.is_file() else place))

    found["fetch__all__"] = names_from_the_end
    found["create_import_structure_from_path"] = structure_once
