"""Length classes of a few columns, so that short rows outgrow them."""

from __future__ import annotations

import pytest

from machd.engine.kv import slab_layout
from machd.engine.protocol import slab_size

COLUMNS = 8


def small_classes(patch: pytest.MonkeyPatch) -> None:
    """Make the smallest class 8 columns long, a slab 64, and let rows of more than 32 be alone."""
    for module in (slab_size, slab_layout):
        patch.setattr(module, "COLUMN_STEP", COLUMNS)
        patch.setattr(module, "CROWDED_COLUMNS", 4 * COLUMNS)
    patch.setattr(slab_layout, "_SLAB_COLUMNS", 8 * COLUMNS)
