"""The result of a bench as data; ``machd bench --json`` writes it as it stands here.

::

    {"schema_version": 1, "started_at", "url" | null,
     "machine":  {"platform", "cpu", "cpu_count", "memory_bytes", "python", "load_average"},
     "model":    {"id", "weights_bytes", "dtype", "quantization", "backend", "blas",
                  "versions": {"machd", "mlx", "mlx_lm", "backend", "dtype"}},
     "workload": {"requests", "prompt_tokens", "max_tokens", "seed", "endpoint" | null,
                  "ignores_eos"},
     "levels":   [{"mode", "concurrency", "batch_width", "requests", "prompt_tokens",
                   "completion_tokens", "wall_s", "ttft": D, "itl": D, "latency": D,
                   "prompt_tps", "generation_tps", "tokens_per_event",
                   "ceiling": {"generation", "itl_per_step"} | null}],
     "ceilings": [{"batch_width", "prompt_tokens", "runs", "run_step_p50_s": […], "prefill_s",
                   "step": D, "decode_tps", "generation_tps"}],
     "staggered":   [{"mode", "streams", "interval_s", "requests", "ttft": D, "latency": D,
                      "static_ttft_ratio" | null}],
     "long_prompt": [{"mode", "streams", "prompt_tokens", "ttft_s", "before": D, "during": D,
                      "p99_ratio"}],
     "coalescing":  [{"mode", "copies", "rounds", "alone_s", "together_s", "ratio",
                      "coalesced"}],
     "structured":  [{"mode", "streams", "constrained", "rounds", "requests",
                      "completion_tokens", "plain_tps", "mixed_tps", "ratio",
                      "plain_itl": D | null, "mixed_itl": D | null, "kept"}],
     "prefix": [{"mode",
                 "steps": [{"step", "description", "expected", "actual", "prompt_tokens",
                            "cached_tokens", "least_cached_tokens", "ttft_s", "passed"}],
                 "latency": {"rounds", "prompt_tokens", "new_tokens", "cold": D, "warm": D,
                             "prefix": D, "restarted": D | null, "warm_ratio", "prefix_ratio",
                             "restarted_ratio"},
                 "sharing": {"users", "system_tokens", "shared": S, "separate": S,
                             "saved_share", "bytes_saved", "shared_blocks", "evictions"} | null,
                 "full_cache": {"limit_bytes", "prompt_tokens", "pairs", "full": D, "without": D,
                                "cost_share", "cost_quartiles", "evictions", "highest_bytes",
                                "full_rss_bytes", "without_rss_bytes"} | null,
                 "kv_formats": [{"format", "decode_mode", "streams", "rounds",
                                 "completion_tokens", "generation_tps", "speed_ratio", "itl": D,
                                 "bytes_per_token", "reserved_bytes", "rows_ratio"}],
                 "skipped"}],
     "speculation": {"mode", "active_mode", "reason", "tokens", "rounds",
                     "workloads": [{"workload", "goal", "verdict", "pairs", "completion_tokens",
                                    "off_tps": Q, "on_tps": Q, "ratio": Q, "off_ttft": D,
                                    "on_ttft": D, "guesses": G | null, "different_texts",
                                    "prompts": [{"prompt", "prompt_tokens", "ratio",
                                                 "guesses": G | null, "different_texts"}]}]} | null,
     "guarantees": [{"guarantee", "goal_s", "tries", "p50_s" | null, "worst_s" | null, "verdict",
                     "reason" | null}],
     "goals":    [{"name", "bound", "goal", "unit", "figure" | null, "verdict"}],
     "servers":  [{"mode", "decode_mode", "decode_mode_reason", "start_to_ready_s",
                   "ready_rss_bytes", "end_rss_bytes", "ready_beyond_weights_bytes",
                   "end_beyond_weights_bytes"}]}

    D = {"count", "mean_s", "p50_s", "p90_s", "p99_s"}
    S = {"added_bytes", "prompt_tokens", "cached_tokens", "ttft": D}
    Q = {"p25", "p50", "p75"}
    G = {"drafted_tokens", "accepted_tokens", "acceptance" | null, "drafted_by_position",
         "accepted_by_position", "cycles" | null, "fallbacks" | null, "tokens_per_pass"}

The classes here, in ``figures``, ``machine``, ``model_facts``, in the modules of the scenarios, in
``prefix``, ``speculation`` and ``guarantees`` and in ``goal`` say what each field means. Levels of the mode ``static`` are
mlx-lm's ``batch_generate`` without a server; ``machd.bench.static`` says how their times are defined.
Seconds, bytes and tokens throughout, unrounded. ``schema_version`` grows when a field is renamed or
changes its meaning; fields may be added at any time. What is not known is null.
"""

from __future__ import annotations

from msgspec import Struct

from machd.bench.coalescing import CoalescingFigures
from machd.bench.figures import CeilingFigures, LevelFigures
from machd.bench.goal import Goal
from machd.bench.guarantees.figures import GuaranteeFigures
from machd.bench.long_prompt import LongPromptFigures
from machd.bench.machine import MachineFacts
from machd.bench.model_facts import ModelFacts
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.staggered import StaggeredFigures
from machd.bench.structured import StructuredFigures

SCHEMA_VERSION = 1


class WorkloadFacts(Struct, frozen=True, kw_only=True):
    """What was asked for; see ``machd.bench.workload.Workload``.

    Attributes:
        endpoint: Where it was asked for; null where no server was asked.
        ignores_eos: Whether answers were to be kept from ending early.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    endpoint: str | None
    ignores_eos: bool


class ServerFigures(Struct, frozen=True, kw_only=True):
    """A server that the bench started, one for each mode that has one.

    Attributes:
        decode_mode: How it decodes, as it says itself.
        decode_mode_reason: Why it decodes so.
        start_to_ready_s: From starting the process to its first request being welcome. The bare
            loop ran before, so files are in the page cache and kernels are compiled.
        ready_rss_bytes: Resident memory then.
        end_rss_bytes: Resident memory after the last answer.
        ready_beyond_weights_bytes: ``ready_rss_bytes`` less the weights.
        end_beyond_weights_bytes: ``end_rss_bytes`` less the weights.
    """

    mode: str
    decode_mode: str | None
    decode_mode_reason: str | None
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
        staggered: One entry for each mode that ran this scenario; so are the three that follow.
        prefix: One entry for each mode of which the prefix cache was measured.
        speculation: Null unless guessing ahead was measured.
        guarantees: One entry for each promise in seconds; empty unless they were measured.
        goals: Every goal of the run, whatever was measured.
        servers: One entry for each mode that has a server; empty with ``url``.
    """

    schema_version: int = SCHEMA_VERSION
    started_at: str
    url: str | None
    machine: MachineFacts
    model: ModelFacts
    workload: WorkloadFacts
    levels: list[LevelFigures]
    ceilings: list[CeilingFigures]
    staggered: list[StaggeredFigures]
    long_prompt: list[LongPromptFigures]
    coalescing: list[CoalescingFigures]
    structured: list[StructuredFigures]
    prefix: list[PrefixFigures]
    speculation: SpeculationFigures | None
    guarantees: list[GuaranteeFigures]
    goals: list[Goal]
    servers: list[ServerFigures]
