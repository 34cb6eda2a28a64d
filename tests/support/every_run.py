"""What `make test` runs of an exhaustive sweep; `make test-long` runs all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import pytest


def sampled(
    cases: Iterable[object], every_run: Collection[object], ids: Sequence[str] | None = None
) -> list[object]:
    """Cases of a parametrisation: those of ``every_run`` as they are, the others with the marker ``long``.

    Args:
        cases: Values of the parameter; where there are several parameters, a tuple of theirs.
        every_run: Some of the cases, or of their ids where those are given.
        ids: One a case.
    """
    cases = list(cases)
    names: Sequence[object] = cases if ids is None else ids
    unknown = [one for one in every_run if one not in names]
    assert not unknown, f"there are no such cases: {unknown}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=None if ids is None else ids[place],
            marks=() if names[place] in every_run else pytest.mark.long,
        )
        for place, case in enumerate(cases)
    ]
