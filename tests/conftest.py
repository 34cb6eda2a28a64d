"""Fixtures that need a real model, made once for the whole run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from httpx import _config as httpx_config
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings
from litestar._signature import model as litestar_models
from litestar._signature.model import SignatureModel
from litestar.utils import signature as litestar_signature
from litestar.utils.signature import ParsedSignature
from support import forked_worker, forked_workers
from support.clocks.polling import CEILING_S
from support.daemon.daemon_reports import daemon_reports
from support.file_scheduling import FileScheduling

from machd.engine.backend.blas import choose_blas

if TYPE_CHECKING:
    from execnet import XSpec
    from xdist.remote import Producer
    from xdist.scheduler.loadscope import LoadScopeScheduling

    from machd.engine.loading.loader import LoadedModel  # imports mlx, which comes after the BLAS

# The tests of one worker leave the other cores to the other workers. A second BLAS thread would spin
# there: it takes twice the time on busy cores. And none would live on in a fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Before anything imports mlx: the tests measure and prove what the daemon runs.
choose_blas(os.environ.get("LME_BLAS", "auto"))
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# mlx wakes its CPU thread for every operation of a pass; on busy cores each wake-up interrupts the
# test's own thread.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A shell without job control has what it runs in the background ignore interrupts, and so would all daemons below.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from support.daemon.forked_programs import (  # noqa: E402 - remembers the variables above
    FORKS,
    ParentEndedError,
    fork_programs,
    start_parent_of_workers,
)

from machd.engine.backend.mlx_lm_import import import_mlx_lm  # noqa: E402
from machd.engine.loading import architecture, embedded  # noqa: E402
from machd.engine.protocol.engine import Engine  # noqa: E402
from machd.user_directories import user_cache_directory  # noqa: E402

# How long an example takes says something of the machine, and nothing of the property.
settings.register_profile(
    "machd", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("machd")

fork_programs()

# A tenth of a run went into looking for cycles of what lives on.
gc.set_threshold(50_000, 20, 20)

# httpx's own five seconds would judge how busy the machine is.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, _phase, CEILING_S)


_parsed_signature = ParsedSignature.from_fn
_parsed_signatures: dict[tuple[CodeType, frozenset[str]], ParsedSignature] = {}
_signature_model = SignatureModel.create
_signature_models: dict[tuple[int, frozenset[str]], type[SignatureModel]] = {}


def _parsed_once(function: Callable[..., object], namespace: dict[str, Any]) -> ParsedSignature:
    key = (function.__code__, frozenset(namespace))
    if key not in _parsed_signatures:
        _parsed_signatures[key] = _parsed_signature(function, namespace)
    return _parsed_signatures[key]


def _modelled_once(
    dependency_name_set: set[str], parsed_signature: ParsedSignature, **others: Any
) -> type[SignatureModel]:
    # It is kept, so that no other one has its id.
    key = id(parsed_signature), frozenset(dependency_name_set)
    if key not in _signature_models:
        _signature_models[key] = _signature_model(
            dependency_name_set=dependency_name_set, parsed_signature=parsed_signature, **others
        )
    return _signature_models[key]


# All daemons have the same handlers, and each would read their annotations again: half of a start.
vars(litestar_signature)["ParsedSignature"].from_fn = _parsed_once
vars(litestar_models)["SignatureModel"].create = _modelled_once

# The same few files of mlx-lm would be parsed for each tokenizer that is opened: 15 ms.
vars(architecture)["_constant"] = cache(vars(architecture)["_constant"])

# No test speaks TLS, and each client reads all of the system's certificates for it: 22 ms of processor time.
vars(httpx_transports)["create_ssl_context"] = cache(httpx_config.create_ssl_context)


def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core, for most of a test's time waits for another process; memory is for eight."""
    return min(8, 2 * (os.cpu_count() or 1))


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    """Have the workers forked."""
    if FORKS:
        start_parent_of_workers(config.invocation_params.args)
        forked_workers.fork_workers(specs)


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart() -> Generator[None]:
    """Report without a traceback that the process that collects the tests has ended; it has written why to stderr."""
    try:
        yield
    except ParentEndedError as error:
        raise pytest.UsageError("the process that collects the tests has ended") from error


def pytest_xdist_getremotemodule() -> ModuleType | None:
    """Return what a forked worker runs."""
    return forked_worker if FORKS else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Return a cheaper scheduler than xdist's where it would take its own for files."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a machine run a part of the files."""
    parser.addoption(
        "--share",
        metavar="K/N",
        help="run the K-th of N shares of the test files, K from 0 on; a file is always in the same share",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other shares."""
    share: str | None = config.getoption("--share")
    if share is None:
        return
    number, count = map(int, share.split("/"))
    others = [one for one in items if zlib.crc32(one.location[0].encode()) % count != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [one for one in items if one not in set(others)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is collected, a million objects that live on: 2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the tests themselves, a million objects, out of each garbage collection that a test asks for: 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the daemons that still run have logged, and their state."""
    report = yield
    if report.failed:
        report.sections += [("a daemon that runs", one) for one in daemon_reports()]
    return report


@pytest.fixture(name="embedded_model_path", scope="session")
def _embedded_model_path() -> Path:
    """The embedded default's file, fetched once."""
    cache_directory = user_cache_directory(os.environ)
    return embedded.locate(cache_directory) or embedded.pull(cache_directory)


@pytest.fixture(name="embedded_model", scope="session")
def _embedded_model(embedded_model_path: Path) -> LoadedModel:
    """The embedded default in float32, on the test thread."""
    import_mlx_lm()
    from machd.engine.loading.loader import load_model  # noqa: PLC0415 - imports mlx, which only some tests need
    from machd.engine.loading.source import ModelSource, SourceKind  # noqa: PLC0415

    source = ModelSource(SourceKind.GGUF, embedded_model_path, embedded.EMBEDDED_MODEL_ID)
    return load_model(source, dtype="float32")


@pytest.fixture(name="embedded_engine", scope="session")
def _embedded_engine(embedded_model: LoadedModel) -> Iterator[Engine]:
    """An engine with the embedded default, whose weights lie where they were loaded: to copy them takes a second."""
    from machd.engine import assembly  # noqa: PLC0415 - imports mlx
    from machd.engine.kernels import layers_in_one  # noqa: PLC0415 - imports mlx

    with pytest.MonkeyPatch.context() as patched:
        for module in (assembly, layers_in_one):
            patched.setattr(module, "lay_in_large_pages", lambda _model: None)
        engine = assembly.make_engine(embedded_model)
    yield engine
    engine.close()
