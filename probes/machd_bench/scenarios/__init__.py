"""All scenarios of the bench, a file each, in the order in which they run."""

from __future__ import annotations

from machd_bench.scenarios.batched_speculation import BATCHED_SPECULATION
from machd_bench.scenarios.ceiling import CEILING
from machd_bench.scenarios.coalescing import COALESCING
from machd_bench.scenarios.experts import EXPERTS
from machd_bench.scenarios.image_join import IMAGE_JOIN
from machd_bench.scenarios.kv_formats import KV_FORMATS
from machd_bench.scenarios.long_prompt import LONG_PROMPT
from machd_bench.scenarios.memory import MEMORY
from machd_bench.scenarios.parity import PARITY, WEIGHTS
from machd_bench.scenarios.peers import PEERS
from machd_bench.scenarios.prefix import PREFIX
from machd_bench.scenarios.sharing import SHARING
from machd_bench.scenarios.speculation import SPECULATION
from machd_bench.scenarios.staggered import STAGGERED
from machd_bench.scenarios.structured import STRUCTURED
from machd_bench.scenarios.sweep import SWEEP
from machd_bench.scenarios.vision_prefix import VISION_PREFIX
from machd_bench.scenarios.weight_formats import WEIGHT_FORMATS

SCENARIOS = {
    one.name: one
    for one in (
        *(SWEEP, PEERS, STAGGERED, LONG_PROMPT, COALESCING, STRUCTURED),
        *(IMAGE_JOIN, PREFIX, SHARING, VISION_PREFIX),
        *(KV_FORMATS, EXPERTS, WEIGHT_FORMATS),
        *(SPECULATION, BATCHED_SPECULATION, MEMORY),
        *(PARITY, WEIGHTS, CEILING),
    )
}
