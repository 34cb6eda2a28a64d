"""The import of mlx-lm changes nothing else in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

_LIMITED = """
import resource, sys
from machd.engine.backend.mlx_lm_import import import_mlx_lm, import_mlx_lm_tokenizers

def check_limit(imported):
    given = (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, given)
    setter = resource.setrlimit
    imported()
    assert resource.setrlimit is setter
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == given
"""


_COUNTED = """
import os
read = []

def count(event, arguments):
    name = arguments[0] if event == "open" else ""
    if isinstance(name, str) and f"transformers{os.sep}models{os.sep}" in name and name.endswith(".py"):
        read.append(name)

sys.addaudithook(count)
"""
"""Remembers files of transformers' models that are read; a few are imported besides, from their sources or from bytecode."""


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    """mlx-lm lowers the hard limit for the whole process; a daemon keeps what it was given."""
    assert _output(f"{_LIMITED}\ncheck_limit(import_mlx_lm)\nprint('kept')") == "kept\n"


def test_mlx_lm_can_be_imported_whole_after_its_tokenizers() -> None:
    """The tokenizers come without mlx and in silence; the whole package then has the same classes, and all others.

    It leaves the limit of open files alone, too, and reads each file of transformers' models once.
    """
    program = (
        f"{_LIMITED}\n{_COUNTED}\n"
        "import_mlx_lm_tokenizers()\n"
        "from mlx_lm.tokenizer_utils import TokenizerWrapper\n"
        "import mlx_lm.tool_parsers.json_tools\n"
        "import mlx_lm.chat_templates.deepseek_v32\n"
        "print('mlx' in sys.modules, 'torch' in sys.modules)\n"
        "check_limit(import_mlx_lm)\n"
        "import mlx_lm\n"
        "import_mlx_lm_tokenizers()\n"
        "import_mlx_lm()\n"
        "print(mlx_lm is sys.modules['mlx_lm'], mlx_lm.generate is not None)\n"
        "print(mlx_lm.tokenizer_utils.TokenizerWrapper is TokenizerWrapper)\n"
        "print(mlx_lm.utils.TokenizerWrapper is TokenizerWrapper)\n"
        "print(len(set(read)) > 1000, len(read) < 1.5 * len(set(read)))\n"
    )
    assert _output(program).split() == [*["False"] * 2, *["True"] * 6]


@pytest.mark.long
def test_transformers_has_the_names_that_it_finds_itself() -> None:
    """Each name has the module, and the libraries that it needs, of transformers' own search."""
    silent = "import os; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'\n"
    program = (
        f"{silent}import transformers\n"
        "print(sorted(map(repr, transformers._class_to_module.items())))\n"
        "print(sorted((name, *sorted(of)) for name, of in transformers._object_missing_backend.items()))"
    )
    own = _output(program)
    assert len(own) > 100_000
    ours = "from machd.engine.backend.transformers_import import import_transformers as first"
    assert _output(f"{ours}\nfirst()\n{program}") == own


@pytest.mark.parametrize(
    ("utils", "search", "package"),
    [
        ("from .. import found", "", "found = 1\nfrom .utils import import_utils"),
        ("", "", "from .utils import import_utils\nfound = 1"),
        (
            "",
            "def fetch__all__(): ...\ndef create_import_structure_from_path(a, b): return 1",
            "from .utils.import_utils import *\nfound = create_import_structure_from_path(2, b=3)",
        ),
    ],
    ids=["needs its package", "has none", "with other arguments"],
)
def test_a_version_with_another_search_is_imported_as_it_is(
    utils: str, search: str, package: str, tmp_path: Path
) -> None:
    """Each of two threads that import it at once has all of it."""
    folder = tmp_path / "transformers"
    (folder / "utils").mkdir(parents=True)
    (folder / "__init__.py").write_text(f"import time\ntime.sleep(0.05)\n{package}\n")
    (folder / "utils" / "__init__.py").write_text(utils)
    (folder / "utils" / "import_utils.py").write_text(search)
    program = (
        f"import sys, threading; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from machd.engine.backend.transformers_import import import_transformers\n"
        "def look():\n"
        "    import_transformers()\n"
        "    import transformers, transformers.utils.import_utils\n"
        "    found.append((transformers.found, transformers.utils.import_utils.__name__))\n"
        "found, threads = [], [threading.Thread(target=look) for _ in range(2)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n"
        "print(found)"
    )
    assert _output(program) == f"{[(1, 'transformers.utils.import_utils')] * 2}\n"


def _output(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
    )
    assert not done.stderr, done.stderr
    return done.stdout
