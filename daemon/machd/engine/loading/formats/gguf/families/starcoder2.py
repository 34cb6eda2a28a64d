"""StarCoder 2."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    plain_rope_config,
    refuse_head_dim,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

_FEEDFORWARD = {
    "blk.*.ffn_up": "model.layers.*.mlp.c_fc",
    "blk.*.ffn_down": "model.layers.*.mlp.c_proj",
}
"""Two layers with an activation between; there is no gate."""


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_head_dim(header)
    return plain_rope_config(header, "norm_epsilon")


STARCODER2 = Family(
    "starcoder2",
    "starcoder2",
    {name: path for name, path in NAMES.items() if name != "blk.*.ffn_gate"} | _FEEDFORWARD,
    _config,
    leaves_out=frozenset(),
)
