"""Files of all folders are spread over a run of the tests."""

from __future__ import annotations

from support.file_scheduling import mixed


def test_each_folder_is_spread_over_the_run() -> None:
    """Any quarter of the run has a quarter of each folder's files, in their order."""
    waiting = [f"tests/integration/test_{number:02}.py" for number in range(8)]
    computing = [f"tests/unit/part/test_{number:02}.py" for number in range(40)]

    order = mixed([*waiting, *computing])

    for start in range(0, 48, 12):
        quarter = order[start : start + 12]
        assert sum(file in waiting for file in quarter) == 2
    assert [file for file in order if file in waiting] == waiting
    assert [file for file in order if file in computing] == computing
