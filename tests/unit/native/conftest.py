"""Instruction sets that this processor has, and the settings of the kernels put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = native.thread_count()
    yield
    native.use_instruction_set("")
    native.set_thread_count(threads)


@pytest.fixture(scope="session")
def instruction_sets() -> list[str]:
    """Names of those that compute here, the plain loops left out."""
    names = []
    for name in ("avx512", "avx2", "neon"):
        try:
            native.use_instruction_set(name)
        except ValueError:
            continue
        names.append(name)
    native.use_instruction_set("")
    return names
