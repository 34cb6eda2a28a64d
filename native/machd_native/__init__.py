"""Products of rows with a layer's weights on the CPU, as operations of MLX.

A row's result has the same bits whatever rows are computed with it: see ``src/product.h``.
"""

from machd_native._kernels import (
    instruction_set,
    product,
    set_thread_count,
    thread_count,
    use_instruction_set,
)

__all__ = [
    "instruction_set",
    "product",
    "set_thread_count",
    "thread_count",
    "use_instruction_set",
]
