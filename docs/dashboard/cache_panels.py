"""The panels about what is kept: keys and values of running sequences, prompts, responses."""

from __future__ import annotations

from dashboard.grafana import PanelRow, Query
from dashboard.promql import panel, rate, rates_by, share_of_rates, total, total_rate

_BLOCK_STATES = ("held", "pinned", "shared", "disk")

CACHES = PanelRow(
    "KV cache, prefix cache, stored responses",
    (
        panel(
            "KV cache",
            "Bytes that running sequences hold and were promised, and the budget. Requests wait "
            "while what they need is more than the budget has left.",
            "bytes",
            *(
                total("machd_kv_cache_bytes", state, f'state="{state}"')
                for state in ("budget", "reserved", "used")
            ),
        ),
        panel(
            "Prompt tokens that were cached",
            "The share of prompt tokens that were not computed again.",
            "percentunit",
            share_of_rates(
                "cached", "machd_prompt_tokens_cached_total", "machd_prompt_tokens_total"
            ),
            maximum=1,
        ),
        panel(
            "Prompts that were found",
            "The share of prompts that the prefix cache had, whole or a beginning of them.",
            "percentunit",
            Query(
                f"sum by (kind) ({rate('machd_prefix_cache_hits_total')}) / ignoring (kind) "
                f"group_left sum({rate('machd_prefix_cache_queries_total')})",
                "{{kind}}",
            ),
            is_stacked=True,
            maximum=1,
        ),
        panel(
            "Why prompts were not found",
            "Requests a second whose prompt was not found whole. Evicted is a cache that is too small; diverged is a prompt that "
            "changed; continued is a conversation that goes on.",
            "reqps",
            rates_by("reason", "machd_prefix_cache_misses_total"),
        ),
        panel(
            "Prefix cache",
            "Bytes in memory and what they may be, and what sharing saves. At the limit every new "
            "prompt evicts another.",
            "bytes",
            total("machd_prefix_cache_limit_bytes", "limit"),
            total("machd_prefix_cache_bytes", "held"),
            total("machd_prefix_cache_saved_bytes", "saved by sharing"),
        ),
        panel(
            "Prefix cache blocks",
            "Blocks in memory; of those in use by running sequences, and shared by texts; on disk; "
            "and the texts.",
            "short",
            *(
                total("machd_prefix_cache_blocks", state, f'state="{state}"')
                for state in _BLOCK_STATES
            ),
            total("machd_prefix_cache_entries", "texts"),
        ),
        panel(
            "Evictions",
            "Blocks a second that made room for others. Many, while few prompts are found, is a "
            "cache that is too small.",
            "cps",
            total_rate("machd_prefix_cache_evictions_total", "evicted"),
        ),
        panel(
            "Block files",
            "Bytes of the prefix cache on disk and what they may be.",
            "bytes",
            total("machd_block_files_budget_bytes", "budget"),
            total("machd_block_files_bytes", "used"),
        ),
        panel(
            "Block files written and read",
            "Blocks a second. Damaged ones are a disk that fails; dropped ones could not be written "
            "as fast as they came.",
            "cps",
            rates_by("outcome", "machd_block_files_total"),
        ),
        panel(
            "Experts on disk",
            "Experts a second that passes needed: found in memory, read ahead in time, or waited for. "
            "Many waited for is a bank that is too small: raise experts.resident_gb.",
            "cps",
            rates_by("outcome", "machd_expert_bank_lookups_total"),
        ),
        panel(
            "Expert bank",
            "Memory of the experts that are not only on disk; 0 without experts on disk.",
            "bytes",
            total("machd_expert_bank_capacity_bytes", "bank"),
        ),
        panel(
            "Experts read from disk",
            "Bytes a second. What the disk can give bounds tokens a second once experts are waited for.",
            "Bps",
            total_rate("machd_expert_bank_read_bytes_total", "read"),
        ),
        panel(
            "Adapters",
            "Adapters in memory, and those of them that running sequences use.",
            "short",
            *(total("machd_adapters", state, f'state="{state}"') for state in ("loaded", "held")),
        ),
        panel(
            "Adapter memory",
            "Memory of the adapters, which running sequences cannot reserve.",
            "bytes",
            total("machd_adapter_bytes", "used"),
        ),
        panel(
            "Adapters loaded",
            "Adapters a second that were put into memory. Many of them is adapters.max_loaded too small.",
            "cps",
            total_rate("machd_adapter_loads_total", "loaded"),
        ),
        panel(
            "Images and videos",
            "Images and videos a second in prompts of requests that ended.",
            "cps",
            rates_by("kind", "machd_prompt_media_total"),
        ),
        panel(
            "Encodings looked up",
            "Images and videos, and texts of encoders, a second whose embeddings were kept, or had to be encoded.",
            "cps",
            rates_by("outcome", "machd_encoder_lookups_total"),
        ),
        panel(
            "Time encoding images",
            "Seconds a second, in which no stream moves. Much of it with few misses is images that are too large.",
            "percentunit",
            total_rate("machd_encoder_seconds_total", "encoding"),
        ),
        panel(
            "Encoded images, videos and texts",
            "Memory of what is kept; vision.cache_mb is the limit, and of an encoder's texts cache.vectors_mb.",
            "bytes",
            total("machd_encoder_cache_bytes", "used"),
        ),
        panel(
            "Stored responses",
            "Responses that later requests may refer to.",
            "short",
            total("machd_stored_responses", "responses"),
        ),
        panel(
            "Stored response bytes",
            "What those responses take.",
            "bytes",
            total("machd_stored_response_bytes", "stored responses"),
        ),
    ),
)
