"""What a layer computes on the CPU, as operations of MLX: products with its weights, attention, norms.

A row's result has the same bits whatever rows are computed with it: see ``src/product.h`` and ``src/attention.h``.
"""

from machd_native._kernels import (
    BertBlock,
    BertLayers,
    LayerWeights,
    LlamaBlock,
    LlamaLayers,
    NormWeights,
    PanelWeights,
    attend,
    gathered_product,
    gelu,
    in_large_pages,
    instruction_set,
    layer_norm,
    product,
    rms_norm,
    rotate,
    set_thread_count,
    silu_product,
    text_means,
    thread_count,
    use_instruction_set,
    written,
)

__all__ = [
    "BertBlock",
    "BertLayers",
    "LayerWeights",
    "LlamaBlock",
    "LlamaLayers",
    "NormWeights",
    "PanelWeights",
    "attend",
    "gathered_product",
    "gelu",
    "in_large_pages",
    "instruction_set",
    "layer_norm",
    "product",
    "rms_norm",
    "rotate",
    "set_thread_count",
    "silu_product",
    "text_means",
    "thread_count",
    "use_instruction_set",
    "written",
]
