import mlx.core as mx

def product(
    x: mx.array,
    weights: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    mode: str = "plain",
    group: int = 1,
    bits: int = 32,
) -> mx.array:
    """Multiply rows by transposed weights.

    Args:
        x: [.., inputs] in float32, float16 or bfloat16; computed in float32.
        weights: Plain [outputs, inputs] in float32, float16 or bfloat16, or packed as ``mx.quantize`` packs them.
        scales: Of packed weights.
        biases: Of affine packed weights.
        mode: ``plain``, ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``.
        group: Weights that share a scale.
        bits: Of a packed weight.

    Returns:
        [.., outputs], in the dtype of ``x``.

    Raises:
        ValueError: Shapes, dtypes or bits do not go together, or no kernel computes them here.
    """

def instruction_set() -> str:
    """Name the instruction set that computes: ``avx512``, ``avx2`` or ``neon``; empty where this processor has none of them."""

def use_instruction_set(name: str) -> None:
    """Compute with another instruction set from now on; ``plain`` for loops in float64, which tests compare with.

    Raises:
        ValueError: This processor has none of that name.
    """

def thread_count() -> int:
    """Return the number of threads that share a product, the calling one included."""

def set_thread_count(count: int) -> None:
    """Share products between so many threads from now on: from 1 to 256."""
