"""The result of a bench as data; ``machd bench --json`` writes it as it stands here.

::

    {"schema_version": 1, "started_at", "url" | null,
     "machine":  {"platform", "cpu", "cpu_count", "memory_bytes", "python", "load_average"},
     "model":    {"id", "weights_bytes", "dtype", "quantization", "backend", "blas",
                  "versions": {"machd", "mlx", "mlx_lm", "backend", "dtype"}},
     "workload": {"requests", "prompt_tokens", "max_tokens", "seed", "endpoint", "ignores_eos"},
     "levels":   [{"mode", "concurrency", "batch_width", "requests", "prompt_tokens",
                   "completion_tokens", "wall_s", "ttft": D, "itl": D, "latency": D,
                   "prompt_tps", "generation_tps", "tokens_per_event",
                   "ceiling": {"generation", "itl_per_step"} | null}],
     "ceilings": [{"batch_width", "runs", "run_step_p50_s": […], "prefill_s", "step": D,
                   "decode_tps", "generation_tps"}],
     "servers":  [{"mode", "start_to_ready_s", "ready_rss_bytes", "end_rss_bytes",
                   "ready_beyond_weights_bytes", "end_beyond_weights_bytes"}]}

    D = {"count", "mean_s", "p50_s", "p90_s", "p99_s"}

The classes here, in ``figures`` and in ``machine`` say what each field means. Seconds, bytes and
tokens throughout, unrounded. ``schema_version`` grows when a field is renamed or changes its
meaning; fields may be added at any time. What is not known is null.
"""

from __future__ import annotations

from msgspec import Struct

from machd.api.capabilities import Capabilities, Versions
from machd.bench.figures import CeilingFigures, LevelFigures
from machd.bench.machine import MachineFacts

__all__ = ["BenchReport", "ModelFacts", "ServerFigures", "WorkloadFacts"]

SCHEMA_VERSION = 1


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What was served, as the server says; only machd says more than the name.

    Attributes:
        weights_bytes: What the weights take in memory.
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU.
        versions: Of machd, mlx and mlx-lm.
    """

    id: str
    weights_bytes: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    backend: str | None = None
    blas: str | None = None
    versions: Versions | None = None

    @classmethod
    def of(cls, model_id: str, capabilities: Capabilities | None) -> ModelFacts:
        """Take from machd's capabilities what identifies a measurement."""
        if capabilities is None:
            return cls(id=model_id)
        model = capabilities.model
        return cls(
            id=model_id,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
            backend=capabilities.device.backend,
            blas=capabilities.device.blas,
            versions=capabilities.versions,
        )


class WorkloadFacts(Struct, frozen=True, kw_only=True):
    """What was asked for; see ``machd.bench.workload.Workload``.

    Attributes:
        endpoint: Where it was asked for.
        ignores_eos: Whether answers were kept from ending early.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    endpoint: str
    ignores_eos: bool


class ServerFigures(Struct, frozen=True, kw_only=True):
    """A server that the bench started, one for each mode.

    Attributes:
        start_to_ready_s: From starting the process to its first request being welcome. The bare
            loop ran before, so files are in the page cache and kernels are compiled.
        ready_rss_bytes: Resident memory then.
        end_rss_bytes: Resident memory after the last answer.
        ready_beyond_weights_bytes: ``ready_rss_bytes`` less the weights.
        end_beyond_weights_bytes: ``end_rss_bytes`` less the weights.
    """

    mode: str
    start_to_ready_s: float
    ready_rss_bytes: int
    end_rss_bytes: int
    ready_beyond_weights_bytes: int | None
    end_beyond_weights_bytes: int | None


class BenchReport(Struct, frozen=True, kw_only=True):
    """A whole bench.

    Attributes:
        started_at: RFC 3339, UTC.
        url: The server that was measured; null where the bench started its own.
        levels: A row for each mode and concurrency, in the order in which they ran.
        ceilings: The bare loop, one entry for each batch width; empty with ``url``.
        servers: One entry for each mode; empty with ``url``.
    """

    schema_version: int = SCHEMA_VERSION
    started_at: str
    url: str | None
    machine: MachineFacts
    model: ModelFacts
    workload: WorkloadFacts
    levels: list[LevelFigures]
    ceilings: list[CeilingFigures]
    servers: list[ServerFigures]
