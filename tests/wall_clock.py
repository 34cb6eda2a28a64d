"""Limits in seconds, on machines whose cores others share.

A limit holds if the code keeps it when it gets to run: a test that failed by an assertion is tried
again, twice at the most. Code that is too slow is too slow three times.
"""

from __future__ import annotations

import pytest

__all__ = ["limits_in_seconds"]

limits_in_seconds = pytest.mark.flaky(reruns=2, only_rerun=["AssertionError", "assert "])
