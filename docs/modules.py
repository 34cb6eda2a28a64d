"""Page of all modules: each with the first paragraph of its docstring."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = (_ROOT / "daemon" / "machd", _ROOT / "probes" / "machd_probes")


def modules_markdown() -> str:
    """Return one table for each folder, in the order of their paths."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            folders[path.parent].append(path)
    return "\n".join(_table(folder, files) for folder, files in sorted(folders.items()))


def _table(folder: Path, files: list[Path]) -> str:
    title = f"## {folder.relative_to(_ROOT).as_posix()}/"
    shown = [path for path in files if path.name != "__init__.py"]
    rows = [f"| `{path.name}` | {_summary(path)} |" for path in shown]
    table = ["| File | What it is |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([title, "", _summary(folder / "__init__.py"), "", *table])


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    return first.replace("|", "\\|").replace("<", "&lt;")
