"""A checkpoint with a damaged header is refused in one line, and never ends or holds the process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support import module_command
from support.checkpoints.damaged_headers import FORMATS
from support.clocks.polling import CEILING_S

_SHORT = {"gguf": "45", "gguf_keys": "30", "safetensors": "20", "config": "40"}
_SEED = "4211"


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *_SHORT.items(),
        *(
            pytest.param(
                one,
                "all",
                marks=pytest.mark.long if one == "safetensors" else pytest.mark.longest,
            )
            for one in FORMATS
        ),
    ],
)
def test_damaged_header_is_refused_in_one_line_by_check_and_loader(
    kind: str, count: str, tmp_path: Path
) -> None:
    """Any value in any field is read, or refused with a message of one line and exit code 2; both agree where they can.

    A process of its own, because a division by zero in a library would end this one.
    """
    command = [
        *module_command("support.checkpoints.damaged_headers"),
        kind,
        count,
        _SEED,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20 * CEILING_S, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1], done.stderr[-2000:])
    wrong = []
    for case, found in zip(lines[::2], lines[1::2], strict=True):
        check, load = found["check"], found["load"]
        is_agreed = check == load or (not case["is_seen"] and load == "refused")
        if not ({check, load} <= {"read", "refused"} and is_agreed):
            wrong.append((case["case"], found))
    assert not wrong
    assert len(lines) // 2 >= int(_SHORT[kind])
