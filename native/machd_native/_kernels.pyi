from typing import Literal

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

def gathered_product(
    x: mx.array,
    weights: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    indices: mx.array,
    *,
    mode: str = "plain",
    group: int = 1,
    bits: int = 32,
) -> mx.array:
    """Multiply rows by the transposed weights of experts, as ``mx.gather_qmm`` does.

    A row gets the bits that :func:`product` gives it with its expert's weights.

    Args:
        x: [.., rows, inputs] in float32, float16 or bfloat16; computed in float32.
        weights: As of :func:`product`, with an axis of experts before: [experts, outputs, inputs].
        scales: Of packed weights, the same.
        biases: Of affine packed weights, the same.
        indices: uint32 or int32 [..], experts. They and the axes of ``x`` before the last two are broadcast to common ones.
        mode: ``plain``, ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``.
        group: Weights that share a scale.
        bits: Of a packed weight.

    Returns:
        [common axes, rows, outputs], in the dtype of ``x``; NaN where an index is not that of an expert.

    Raises:
        ValueError: Shapes, dtypes or bits do not go together, or no kernel computes them here.
    """

def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    starts: mx.array,
    prefix_keys: mx.array | None = None,
    prefix_values: mx.array | None = None,
    *,
    scale: float,
    window: int = 0,
) -> mx.array:
    """Attend each token to the columns of its row up to its own; float32 alone.

    Args:
        queries: [rows, heads, tokens, head_dim].
        keys: [places, kv_heads, columns, head_dim], of which the first ``rows`` places are read; head_dim is a multiple of 16.
        values: The same, with a head_dim of its own.
        starts: int32 [rows], columns before the pass's first token.
        prefix_keys: [1, kv_heads, prefix columns, head_dim], which all rows have before their own.
        prefix_values: The same.
        scale: Of the scores.
        window: Columns that a token sees, its own included; 0 for all.

    Returns:
        [rows, tokens, heads, head_dim of the values].

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

def written(columns: mx.array, tokens: mx.array, starts: mx.array) -> mx.array:
    """Write a pass's tokens into columns, in place where nobody else holds them.

    Args:
        columns: [places, heads, columns, n].
        tokens: [rows, heads, tokens, n] of the same dtype. What would lie behind the last column is left out.
        starts: int32 [rows], the column of each row's first token.

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

def rotate(
    x: mx.array, cosines: mx.array, sines: mx.array, positions: mx.array, *, rotated: int
) -> mx.array:
    """Turn heads by their positions: pairs of a number and the one half a head behind it; float32 alone.

    Args:
        x: [rows, tokens, heads, head_dim].
        cosines: [positions, head_dim / 2].
        sines: The same.
        positions: int32 [rows], of each row's first token.
        rotated: So many of the first heads are turned, the others copied.

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute what ``mx.fast.rms_norm`` does, of float32 [.., n] and [n].

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

def layer_norm(x: mx.array, weight: mx.array, bias: mx.array, eps: float) -> mx.array:
    """Compute what ``mx.fast.layer_norm`` does, of float32 [.., n], [n] and [n].

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

def gelu(x: mx.array) -> mx.array:
    """Compute what ``mlx.nn.gelu`` does, of float32 [.., n].

    Raises:
        ValueError: The dtype is another one, or rows have no numbers.
    """

def silu_product(x: mx.array) -> mx.array:
    """Compute ``gate * sigmoid(gate) * up`` of float32 [.., 2 n], gate and up one behind the other.

    Raises:
        ValueError: The last axis is odd, or the dtype another one.
    """

def gelu_product(x: mx.array) -> mx.array:
    """Compute the same with gelu's usual approximation, ``gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate ** 3))) / 2 * up``.

    Raises:
        ValueError: The last axis is odd, or the dtype another one.
    """

class LowRank:
    """What an adapter makes of one product: ``ratios * product + offsets + b @ (a @ row)``, kept as it is computed fastest."""

    class Piece:
        """An adapter of some of the product's outputs, which lie together."""

        def __init__(
            self,
            first_output: int,
            a: mx.array,
            b: mx.array,
            ratios: mx.array | None = None,
            offsets: mx.array | None = None,
        ) -> None:
            """Take float32 arrays.

            Args:
                first_output: Of the product's.
                a: [rank, inputs].
                b: [outputs, rank]; a scale belongs into it.
                ratios: Of DoRA, [outputs]: factors of the product's own outputs; None for 1.
                offsets: [outputs], added to these outputs; None for 0.
            """

    def __init__(self, pieces: list[Piece]) -> None:
        """Take pieces; ``a`` and ``b`` are kept in float16 where no number loses a digit so.

        Raises:
            ValueError: There are none, or they do not go together.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

def add_low_rank(y: mx.array, x: mx.array, index: mx.array, adapters: list[LowRank]) -> mx.array:
    """Add what adapters of rows add to a product, in place where nobody else holds its result.

    A row's bits depend on its numbers and its adapter alone; a row without an adapter keeps its own.

    Args:
        y: float32 [.., outputs], what the product made of ``x``.
        x: float32 [.., inputs].
        index: int32, of each row 0 for no adapter, or the number of one + 1. A row with another index is NaN.
        adapters: By number.

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """

class LayerWeights:
    """Weights of a layer's product, kept where they lie."""

    def __init__(
        self,
        weights: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        *,
        mode: str = "plain",
        group: int = 1,
        bits: int = 32,
    ) -> None:
        """Take arrays as :func:`product` does.

        Raises:
            ValueError: They do not go together, or no kernel computes them here.
        """

class LlamaBlock:
    """A layer's parts, of a llama or a model of its shape: what the functions here compute one after another, with the same bits."""

    def __init__(
        self,
        *,
        input_norm: tuple[mx.array, float],
        post_norm: tuple[mx.array, float],
        qkv: list[LayerWeights],
        output: LayerWeights,
        gate_up: list[LayerWeights],
        down: LayerWeights,
        heads: int,
        kv_heads: int,
        scale: float,
        query_norm: tuple[mx.array, float] | None = None,
        key_norm: tuple[mx.array, float] | None = None,
        output_norm: tuple[mx.array, float] | None = None,
        down_norm: tuple[mx.array, float] | None = None,
        activation: Literal["silu", "gelu"] = "silu",
        window: int = 0,
        table: int = 0,
    ) -> None:
        """Take a layer's parts.

        Args:
            input_norm: Weight, float32 [hidden], and epsilon of the norm of the attention's input.
            post_norm: The same, of the feed-forward part's.
            qkv: From hidden to heads + 2 kv_heads heads: queries, keys and values in one, or one of each.
            output: From the heads to hidden.
            gate_up: From hidden to gates and as many ups in one, or one of each, packed alike.
            down: From these to hidden.
            heads: Of the queries.
            kv_heads: Of the keys and values.
            scale: Of the scores.
            query_norm: As the first, [head_dim], of each head of queries.
            key_norm: The same, of keys.
            output_norm: As the first, of what ``output`` makes, before it is added.
            down_norm: The same, of what ``down`` makes.
            activation: Of the gates: see :func:`silu_product` and :func:`gelu_product`.
            window: Columns that a token sees, its own included; 0 for all.
            table: Number of the table that rotates queries and keys.

        Raises:
            ValueError: Sizes do not go together.
        """

class LlamaAdapter:
    """An adapter of llama layers."""

    def __init__(self, layers: list[list[LowRank | None]]) -> None:
        """Take what it adds to products.

        Args:
            layers: Of each layer what it adds to the product of each of the block's weights: ``qkv``, ``output``, ``gate_up``, ``down``.
                None where it leaves one as it is.
        """

class LlamaLayers:
    """Llama layers as one operation."""

    def __init__(self, blocks: list[LlamaBlock]) -> None:
        """Take layers.

        Args:
            blocks: In order.

        Raises:
            ValueError: There are none, or rows or heads of one do not go with those of another.
        """

    class Columns:
        """Some of a pass's rows, and the columns that they have in each layer."""

        def __init__(
            self,
            keys: list[mx.array],
            values: list[mx.array],
            starts: mx.array,
            tokens: int,
            prefix_keys: list[mx.array] = [],
            prefix_values: list[mx.array] = [],
            rings: list[tuple[int, int]] = [],
        ) -> None:
            """Take arrays, of each layer one.

            Args:
                keys: [places, kv_heads, columns, head_dim], written in place where nobody else holds them.
                values: The same.
                starts: int32 [rows], columns before the pass's first token.
                tokens: Of each row.
                prefix_keys: As of :func:`attend`; a row's first column has the position behind them. None without a prefix.
                prefix_values: The same.
                rings: Columns of a ring and the column of position 0 there: position p lies in column (p + that) % columns. 0 columns
                    where positions lie in order, as they do everywhere without any.
            """

    def __call__(
        self,
        x: mx.array,
        tables: list[tuple[mx.array, mx.array]],
        columns: list[Columns],
        index: mx.array | None = None,
        adapters: list[LlamaAdapter] = [],
    ) -> list[mx.array]:
        """Compute a pass; each token sees all columns of its row up to its own.

        Args:
            x: float32 [.., hidden], the tokens of the first columns' rows one after another, then those of the next.
            tables: Cosines and sines, [positions, head_dim / 2] each.
            columns: Of all rows.
            index: int32, of each token 0 for no adapter, or the number of one + 1; see :func:`add_low_rank`. None without adapters.
            adapters: By number.

        Returns:
            The last layer's result like ``x``; and of each of the columns keys and values of the first layer, of the second
            one and so on.

        Raises:
            ValueError: Shapes or dtypes do not go together.
        """

class PanelWeights:
    """Weights and bias of a product with many rows, laid out for it."""

    def __init__(self, weights: mx.array, bias: mx.array) -> None:
        """Take arrays.

        Args:
            weights: float32 [outputs / 16, inputs, 16]: in number [p, k, o] the weight of output 16 p + o and input k.
            bias: float32 [outputs].

        Raises:
            ValueError: They do not go together.
        """

class NormWeights:
    """Weight and bias of a LayerNorm."""

    def __init__(self, weight: mx.array, bias: mx.array, eps: float) -> None:
        """Take float32 arrays [n].

        Raises:
            ValueError: They do not go together.
        """

class BertBlock:
    """A BERT layer's parts."""

    def __init__(
        self,
        *,
        qkv: PanelWeights,
        output: PanelWeights,
        attention_norm: NormWeights,
        up: PanelWeights,
        down: PanelWeights,
        output_norm: NormWeights,
    ) -> None:
        """Take a layer's parts.

        Args:
            qkv: From hidden to queries, keys and values, hidden numbers each.
            output: From hidden to hidden.
            attention_norm: Of the sum of the layer's input and its attention.
            up: From hidden to what GELU is computed of.
            down: From there to hidden.
            output_norm: Of the sum with the feed-forward part.
        """

class BertLayers:
    """BERT layers as one operation, over texts that lie behind one another."""

    def __init__(self, embedding_norm: NormWeights, blocks: list[BertBlock], *, heads: int) -> None:
        """Take layers.

        Args:
            embedding_norm: Of the rows that come in.
            blocks: In order.
            heads: Of each layer, with a multiple of 16 numbers each.

        Raises:
            ValueError: There are no layers, or sizes do not go together.
        """

    def __call__(self, x: mx.array, lengths: list[int]) -> mx.array:
        """Compute a pass; each token sees all tokens of its text, and its bits depend on nothing else.

        Args:
            x: float32 [tokens, hidden], sums of embeddings, one text behind another.
            lengths: Tokens of each text.

        Returns:
            The last layer's result, like ``x``.

        Raises:
            ValueError: Shapes or dtypes do not go together, a text has no tokens, or all have not as many as there are rows.
        """

def text_means(rows: mx.array, lengths: list[int]) -> mx.array:
    """Compute the means of each text's rows, [texts, n] of float32 [rows, n].

    Raises:
        ValueError: A text has no rows, or all together have not as many as there are.
    """

def in_large_pages(array: mx.array) -> mx.array:
    """Compute an array and put it into pages of 2 MiB where the system has them: a copy, or the array itself."""

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
