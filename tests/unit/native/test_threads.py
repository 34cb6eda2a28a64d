"""The threads that share a product: whatever becomes of them, a process goes on and ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.clocks.polling import CEILING_S

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_PRODUCT = """
import os, resource, sys
import mlx.core as mx
import machd_native as native

x, weights = mx.ones((8, 64)), mx.ones((1024, 64))
def is_right():
    return mx.all(native.product(x, weights) == 64).item()
def size():
    return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
def limit_to(count):
    resource.setrlimit(resource.RLIMIT_AS, (count, resource.RLIM_INFINITY))
"""


def _run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PRODUCT + program],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # no address space is set aside for more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_forked_child_computes_and_ends() -> None:
    """It has none of its parent's threads, waits for none of them, and makes its own."""
    # A stream of its own: MLX's thread of the old one is the parent's too.
    found = _run("""
native.set_thread_count(2)
assert is_right()
child = os.fork()
if child == 0:
    mx.set_default_stream(mx.new_stream(mx.cpu))
    sys.exit(0 if is_right() else 1)
print(os.waitpid(child, 0)[1], is_right())
""")
    assert found == "0 True"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_a_system_without_more_threads_computes_with_those_there_are() -> None:
    """Where no thread can be made, the caller works alone; the count that was asked for stays."""
    found = _run("""
native.set_thread_count(1)
assert is_right()
before = size()
for megabytes in (4, 40):  # for no stack of a thread, and for some
    limit_to(before + megabytes * 2**20)
    native.set_thread_count(200 + megabytes)
    print(is_right(), is_right(), native.thread_count())
limit_to(resource.RLIM_INFINITY)
native.set_thread_count(2)
print(is_right())
""")
    assert found.split() == ["True", "True", "204", "True", "True", "240", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_kernel_cannot_get_memory_for_is_an_error_of_its_caller(threads: int) -> None:
    """Whichever thread it happens on; the next product is right again."""
    # Memory for the longer rows' result is there, of the shorter ones'; memory for their partial sums is not.
    found = _run(f"""
native.set_thread_count({threads})
short, long = mx.ones((512, 64)), mx.ones((512, 4096))
long_weights = mx.ones((1024, 4096))
mx.eval(short, long, long_weights)
mx.eval(native.product(short, weights))
limit_to(size())
try:
    mx.eval(native.product(long, long_weights))
except RuntimeError as error:
    print(error)
limit_to(resource.RLIM_INFINITY)
print(mx.all(native.product(long, long_weights) == 4096).item())
""")
    assert found.split() == ["std::bad_alloc", "True"]


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (-3, 1), (2, 2), (1_000_000, 256)])
def test_a_count_out_of_range_is_the_nearest_one_within(asked: int, given: int) -> None:
    """An absurd number of threads is clamped, so that it does not use up the system's threads."""
    before = native.thread_count()
    native.set_thread_count(asked)
    found = native.thread_count()
    native.set_thread_count(before)
    assert found == given
