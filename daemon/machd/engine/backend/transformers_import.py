"""The import of transformers, in half its time.

When it is imported it reads the 1,700 files of its models for the names in them, line by line, and its package of models
reads them again: 1 of 1.9 s of processor time (transformers 5.23). Here they are read once, and searched from their ends.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

_lock = threading.Lock()
"""Held during the import: Python's own lock does not make other threads wait for a module that was put in place by hand."""


def import_transformers() -> None:
    """Import transformers, and have it say nothing of a PyTorch that is not there. Does nothing the second time."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # noqa: TID251 - written for a library, not read
    with _lock:
        if "transformers" in sys.modules:
            return
        try:
            _import_patched()
        except Exception:  # noqa: BLE001 - of another version, or of a broken one, whose import raises it again
            for name in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
                del sys.modules[name]
            # Each import of it adds a handler, which would write a second line.
            logging.getLogger("transformers").handlers.clear()
            importlib.import_module("transformers")


def _import_patched() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "mlx-lm depends on it"
    package = sys.modules["transformers"] = importlib.util.module_from_spec(spec)
    # All that the module of the search needs of its package.
    vars(package)["__version__"] = importlib.metadata.version("transformers")
    _patch_search(importlib.import_module("transformers.utils.import_utils"))
    importlib.reload(package)  # run for the first time


def _patch_search(module: ModuleType) -> None:
    functions = vars(module)
    names_in = functions["fetch__all__"]
    structure_of = functions["create_import_structure_from_path"]

    def names_from_the_end(content: str) -> object:
        """Read the last ``__all__`` that begins a line, as the library does, which reads forward from there."""
        return names_in(content[content.rfind("\n__all__") + 1 :])

    def structure_once(path: str | Path) -> object:
        """Return a folder's structure by one name for each folder; the library's cache knows it by a path, its text or a file in it."""
        folder = Path(path)
        return structure_of(str(folder.parent if folder.is_file() else folder))

    functions["fetch__all__"] = names_from_the_end
    functions["create_import_structure_from_path"] = structure_once
