"""The import of mlx-lm changes nothing else in the process."""

from __future__ import annotations

import subprocess
import sys

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


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    """mlx-lm lowers the hard limit for the whole process; a daemon keeps what it was given."""
    assert _output(f"{_LIMITED}\ncheck_limit(import_mlx_lm)\nprint('kept')") == "kept\n"


def test_mlx_lm_can_be_imported_whole_after_its_tokenizers() -> None:
    """The tokenizers come without mlx and in silence; the whole package then has the same classes, and all others.

    It leaves the limit of open files alone, too.
    """
    program = (
        f"{_LIMITED}\n"
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
    )
    assert _output(program).split() == ["False", "False", "True", "True", "True", "True"]


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
