"""What a layer computes on the CPU, as operations of MLX: products with its weights, attention, norms.

A row's result has the same bits whatever rows are computed with it: see ``src/product.h`` and ``src/attention.h``.
"""

from machd_native._kernels import (
    LayerWeights,
    LlamaBlock,
    LlamaLayers,
    attend,
    gathered_product,
    gelu_product,
    in_large_pages,
    instruction_set,
    product,
    rms_norm,
    rotate,
    set_thread_count,
    silu_product,
    thread_count,
    use_instruction_set,
    written,
)

__all__ = [
    "LayerWeights",
    "LlamaBlock",
    "LlamaLayers",
    "attend",
    "gathered_product",
    "gelu_product",
    "in_large_pages",
    "instruction_set",
    "product",
    "rms_norm",
    "rotate",
    "set_thread_count",
    "silu_product",
    "thread_count",
    "use_instruction_set",
    "written",
]
