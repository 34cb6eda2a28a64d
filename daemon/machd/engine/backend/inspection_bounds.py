"""Limits around code that trusts a checkpoint: mlx-lm's classes and chat templates.

mlx-lm loops over the counts in a configuration, and a template is a program. Neither refuses a
billion.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import psutil

from machd.clock import SystemClock, thread_cpu_s
from machd.engine.backend.model_files import shortened
from machd.errors import MachdError, ModelFormatError

_LAYER_COUNT = re.compile(r"(num|n)_(\w+_)?(layers?|blocks)|layers|depth|block_count")
_PART_COUNT = re.compile(r"(\w+_)?(experts?|heads?|groups?)")
_MAX_PARTS = 1 << 16
"""Limit a layer: mlx-lm loops over its parts, and the largest models have some hundred experts."""

_EPSILON = re.compile(r"(\w*norm\w*_)?eps(ilon)?")
_ROTARY = re.compile(r"\w*rope\w*_(theta|base|base_freq)|rotary_emb_base|((low|high)_freq_)?factor")
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1e-30, 1e30
"""Bounds within which a number and its inverse are far from the ends of float32."""

_MAX_NESTING = 8
_LARGEST_SHOWN = 1e300
_MAX_MESSAGE_CHARS = 300
_AGAIN_S = 1.0
_SOONEST_S = 0.01
_WALL_FACTOR = 8
"""How often its processor time a block may last, on a machine that is busy or reads from a slow disk."""


class _TimeIsUpError(BaseException):
    """Not an Exception: Jinja and mlx-lm catch those, and would go on."""


def check_counts(config: Mapping[str, object], tensor_count: int) -> None:
    """Compare a configuration's numbers of layers with the number of tensors.

    Every layer has a tensor at least, and a model is built layer by layer. Experts, heads and groups
    can share one tensor.

    Raises:
        ModelFormatError: There are more layers than tensors, or more parts than any layer has.
    """
    for key, value in _numbers(config, _MAX_NESTING):
        if _LAYER_COUNT.fullmatch(key.lower()) and value > tensor_count:
            raise ModelFormatError(
                f"the configuration says {shortened(key)} = {_number_text(value)}, and the weights are "
                f"{tensor_count} tensors; fetch or copy config.json again"
            )
        if _PART_COUNT.fullmatch(key.lower()) and value > _MAX_PARTS:
            raise ModelFormatError(
                f"the configuration says {shortened(key)} = {_number_text(value)}, and no layer has "
                f"more than {_MAX_PARTS}; fetch or copy config.json again"
            )


def check_finite(config: Mapping[str, object]) -> None:
    """Look for numbers with which a model computes NaN for every token.

    Raises:
        ModelFormatError: An epsilon of a normalisation is negative, a base or a factor of rotary positions is not positive,
            one of them is no number of float32, or any whole number is none of float64.
    """
    for key, value in _numbers(config, _MAX_NESTING):
        if _EPSILON.fullmatch(key):
            is_usable = 0 <= value < _LARGEST_FLOAT
        elif _ROTARY.fullmatch(key):
            is_usable = _SMALLEST_FLOAT < value < _LARGEST_FLOAT
        else:
            is_usable = not isinstance(value, int) or abs(value) < _LARGEST_SHOWN
        if not is_usable:
            raise ModelFormatError(
                f"the configuration says {shortened(key)} = {_number_text(value)}, which is absurd: no token can be computed; "
                "fetch or copy config.json again"
            )


def _number_text(value: float) -> str:
    return f"{value:.6g}" if abs(value) < _LARGEST_SHOWN else "infinitely many"


def _numbers(config: Mapping[str, object], nesting: int) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, dict) and nesting:
            yield from _numbers(value, nesting - 1)
        elif isinstance(value, int | float):
            yield key, value


@contextmanager
def bounded(
    what: str, *, seconds: float, memory_bytes: int, hint: str = "its files are absurd"
) -> Iterator[None]:
    """End a block that takes too long or too much memory; ``what`` starts the message, and ``hint`` ends it.

    ``seconds`` limits the block's own processor time, so that other work on the machine does not count;
    a block that waits instead is ended after ``_WALL_FACTOR`` times as long. The time limit works on the
    main thread alone, where a command runs; the memory limit on Linux alone, of this process's private
    memory.

    Raises:
        ModelFormatError: It took more than one of them.
    """
    clock = SystemClock()
    started, wall_started = thread_cpu_s(), clock.monotonic_s()

    def give_up(_signal: int, _frame: FrameType | None) -> None:
        # A handler runs on the main thread, whose time it is.
        left = seconds - (thread_cpu_s() - started)
        wall_left = _WALL_FACTOR * seconds - (clock.monotonic_s() - wall_started)
        if left <= 0 or wall_left <= 0:
            raise _TimeIsUpError
        signal.setitimer(signal.ITIMER_REAL, max(min(left, wall_left), _SOONEST_S), _AGAIN_S)

    on_main_thread = threading.current_thread() is threading.main_thread()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, give_up) if on_main_thread else None
    try:
        _limit_memory(memory_bytes, limits)
        if on_main_thread:
            # Again and again, for code that catches everything.
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        yield
    except _TimeIsUpError as error:
        raise ModelFormatError(f"{what} takes longer than {seconds:.0f} s; {hint}") from error
    except MemoryError as error:
        raise ModelFormatError(
            f"{what} takes more than {memory_bytes // 2**20} MiB; {hint}"
        ) from error
    finally:
        if on_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _limit_memory(memory_bytes: int, limits: tuple[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    soft, hard = limits
    wanted = int(psutil.Process().memory_info().data) + memory_bytes
    known = [one for one in (soft, hard, wanted) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))


def printable(error: BaseException) -> str:
    """Describe an error of foreign code in one short line without control characters."""
    text = " ".join(str(error).split()) or "no message"
    clean = "".join(char if char.isprintable() else "?" for char in text[: 4 * _MAX_MESSAGE_CHARS])
    short = clean if len(clean) <= _MAX_MESSAGE_CHARS else clean[:_MAX_MESSAGE_CHARS] + "…"
    return short if isinstance(error, MachdError) else f"{type(error).__name__}: {short}"
