"""Llama layers as one operation: what their parts compute one after another, with the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every_run import sampled

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _GATES = 192, 6, 2, 32, 160
_COLUMNS = 100
_SCALE = 0.2
_EPS = (1e-5, 1e-3)
_GROUP = 32
_FORMATS: dict[str, tuple[str, int, int] | None] = {
    "plain": None,
    "bfloat16": None,
    **{f"affine{bits}": ("affine", _GROUP, bits) for bits in (3, 4, 5, 6, 8)},
    **{f"affine{bits}-16": ("affine", 16, bits) for bits in (2, 3, 6)},
    "mxfp4": ("mxfp4", _GROUP, 4),
}
"""Mode, group and bits; K-quants of GGUF files have groups of 16."""
_SIZES = {
    "qkv": ((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, _HIDDEN),
    "output": (_HIDDEN, _HEADS * _HEAD_DIM),
    "gate_up": (2 * _GATES, _HIDDEN),
    "down": (_HIDDEN, _GATES),
}

_MERGED = {
    "qkv": tuple(n * _HEAD_DIM for n in (_HEADS, _KV_HEADS, _KV_HEADS)),
    "output": (_HIDDEN,),
    "gate_up": (_GATES, _GATES),
    "down": (_HIDDEN,),
}
"""Outputs of the layers whose weights are one product."""

Product = tuple[list[mx.array], dict[str, object]]


def _numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _int32(*numbers: int) -> mx.array:
    return mx.array(list(numbers), dtype=mx.int32)


def _table(positions: int) -> tuple[mx.array, mx.array]:
    half = _HEAD_DIM // 2
    angles = mx.arange(positions)[:, None] * mx.exp(-mx.arange(half) / half * 9)
    return mx.cos(angles), mx.sin(angles)


def _products(name: str, layer: int = 0) -> dict[str, Product]:
    made: dict[str, Product] = {}
    packing = _FORMATS[name]
    for seed, (product, sizes) in enumerate(_SIZES.items()):
        plain = _numbers(*sizes, seed=10 + 10 * layer + seed) * 0.1
        arrays = [plain.astype(mx.bfloat16) if name == "bfloat16" else plain]
        if packing is not None:
            mode, group, bits = packing
            arrays = list(mx.quantize(plain, _GROUP, bits, mode))
            # mlx has no groups of 16: two of its own get other scales.
            halves = [mx.repeat(each, _GROUP // group, axis=1) for each in arrays[1:]]
            other = 1 + mx.arange(halves[0].shape[1]) % (_GROUP // group)
            if group != _GROUP:
                arrays[1:] = [each * other for each in halves]
            made[product] = arrays, {"mode": mode, "group": group, "bits": bits}
        else:
            made[product] = arrays, {}
    return made


def _norms() -> tuple[mx.array, mx.array]:
    return _numbers(_HIDDEN, seed=1), _numbers(_HIDDEN, seed=2)


def _weights(name: str, product: Product) -> Any:
    arrays, packing = product
    made = native.LayerWeights(*arrays, **packing)
    return [made] if name in {"qkv", "gate_up"} else made


def _block(products: dict[str, Product], **changes: object) -> Any:
    norms = _norms()
    named = {
        "input_norm": (norms[0], _EPS[0]),
        "post_norm": (norms[1], _EPS[1]),
        **{name: _weights(name, product) for name, product in products.items()},
        "heads": _HEADS,
        "kv_heads": _KV_HEADS,
        "scale": _SCALE,
    }
    return native.LlamaBlock(**{**named, **changes})


def _layers(*products: dict[str, Product]) -> Any:
    return native.LlamaLayers([_block(one) for one in products])


def _columns(
    layers: list[list[mx.array]], starts: mx.array, tokens: int, prefixes: list[list[mx.array]]
) -> Any:
    parts = [[one[at] for one in each] for each in (layers, prefixes) for at in (0, 1)]
    return native.LlamaLayers.Columns(*parts[:2], starts, tokens, *parts[2:])


def _in_steps(  # noqa: PLR0917 - what a layer computes with
    products: dict[str, Product],
    x: mx.array,
    columns: list[mx.array],
    starts: mx.array,
    table: tuple[mx.array, mx.array],
    prefix: list[mx.array],
    options: Mapping[str, Any] = MappingProxyType({}),
    adapted: Callable[[str, mx.array, mx.array], mx.array] = lambda _name, _rows, made: made,
) -> list[mx.array]:
    def normed(name: str, heads: mx.array) -> mx.array:
        return native.rms_norm(heads, *options[name]) if name in options else heads

    def product(name: str, rows: mx.array) -> mx.array:
        (weights, *rest), packing = products[name]
        scales, biases = [*rest, None, None][:2]
        return adapted(name, rows, native.product(rows, weights, scales, biases, **packing))

    rows, tokens, _ = x.shape
    norms = _norms()
    heads = product("qkv", native.rms_norm(x, norms[0], _EPS[0]))
    heads = heads.reshape(rows, tokens, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
    before = prefix[0].shape[2] if prefix else 0
    queries, keys, values = mx.split(heads, [_HEADS, _HEADS + _KV_HEADS], axis=2)
    heads = mx.concatenate(
        [normed("query_norm", queries), normed("key_norm", keys), values], axis=2
    )
    heads = native.rotate(heads, *table, starts + before, rotated=_HEADS + _KV_HEADS)
    parts = mx.split(heads, [_HEADS, _HEADS + _KV_HEADS], axis=2)
    queries, own_keys, own_values = (part.swapaxes(1, 2) for part in parts)
    keys = native.written(mx.array(columns[0]), own_keys, starts)
    values = native.written(mx.array(columns[1]), own_values, starts)
    mixed = native.attend(
        queries, keys, values, starts, *prefix, scale=_SCALE, window=options.get("window", 0)
    )
    x = x + normed("output_norm", product("output", mixed.reshape(rows, tokens, -1)))
    activated = native.gelu_product if options.get("activation") == "gelu" else native.silu_product
    gated = activated(product("gate_up", native.rms_norm(x, norms[1], _EPS[1])))
    return [x + normed("down_norm", product("down", gated)), keys, values]


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(_FORMATS)),
    rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 2, 9, 70]),
    prefix_tokens=st.sampled_from([0, 0, 5, 130]),
    spare_places=st.integers(0, 2),
    threads=st.integers(1, 3),
    is_held=st.booleans(),
    count=st.integers(1, 3),
)
def test_layers_have_the_bits_of_their_steps(  # noqa: PLR0917 - what may differ
    instruction_sets: list[str],
    name: str,
    rows: int,
    tokens: int,
    prefix_tokens: int,
    spare_places: int,
    threads: int,
    is_held: bool,  # noqa: FBT001 - drawn
    count: int,
) -> None:
    """Whatever their number, the weights' format, the rows, threads and instructions; columns that others hold are copied, and none written behind the last."""
    products, x = (
        [_products(name, layer) for layer in range(count)],
        _numbers(rows, tokens, _HIDDEN),
    )
    shape = (rows + spare_places, _KV_HEADS, _COLUMNS, _HEAD_DIM)
    columns = [
        [_numbers(*shape, seed=seed + 2 * layer) for seed in (3, 4)] for layer in range(count)
    ]
    prefixes = [
        [
            _numbers(1, _KV_HEADS, prefix_tokens, _HEAD_DIM, seed=seed + 2 * layer)
            for seed in (50, 51)
        ]
        for layer in range(count if prefix_tokens else 0)
    ]
    starts, table = _int32(*[0, 29, 64, 98][:rows]), _table(300)
    native.set_thread_count(threads)
    for instruction_set in instruction_sets:
        native.use_instruction_set(instruction_set)
        passed, expected = x, list[mx.array]()
        for layer in range(count):
            prefix = prefixes[layer] if prefixes else []
            passed, *own = _in_steps(products[layer], passed, columns[layer], starts, table, prefix)
            expected += own
        lying = [[mx.array(one) for one in each] for each in columns]
        mx.eval(passed, expected, lying)
        held = [one for each in lying for one in each] if is_held else []
        seen = [_columns(lying, starts, tokens, prefixes)]
        del lying
        got = _layers(*products)(x, [table], seen)
        del seen
        mx.eval(got)
        assert all(mx.array_equal(*pair) for pair in zip(got, [passed, *expected], strict=True))
        given_columns = [one for each in columns for one in each]
        assert all(mx.array_equal(*pair) for pair in zip(held, given_columns, strict=False))


@pytest.mark.parametrize("name", _FORMATS)
def test_every_format_on_every_instruction_set(instruction_sets: list[str], name: str) -> None:
    """A row and a short prompt have the bits of their steps, in the plain loops as in the kernels."""
    products, table = _products(name), _table(300)
    for instruction_set in (*instruction_sets, "plain"):
        native.use_instruction_set(instruction_set)
        for tokens in (1, 7):
            x, starts = _numbers(2, tokens, _HIDDEN), _int32(3, 60)
            columns = [_numbers(2, _KV_HEADS, _COLUMNS, _HEAD_DIM, seed=seed) for seed in (3, 4)]
            expected = _in_steps(products, x, columns, starts, table, [])
            got = _layers(products)(x, [table], [_columns([columns], starts, tokens, [])])
            assert all(map(mx.array_equal, got, expected)), (instruction_set, tokens)


def test_rows_and_prompts_in_one_pass_have_the_bits_that_they_have_alone() -> None:
    """Rows of two slabs and the tokens of two prompts behind them: nothing is others' but the weights."""
    products, table = _products("affine4"), _table(300)
    kinds = [(2, 1, [5, 60]), (1, 1, [90]), (1, 7, [0]), (1, 30, [64])]
    parts = [_numbers(rows * tokens, _HIDDEN, seed=tokens) for rows, tokens, _ in kinds]
    columns = [
        [_numbers(rows, _KV_HEADS, _COLUMNS, _HEAD_DIM, seed=seed + rows) for seed in (3, 4)]
        for rows, _, _ in kinds
    ]
    seen = [
        _columns([arrays], _int32(*starts), tokens, [])
        for arrays, (_, tokens, starts) in zip(columns, kinds, strict=True)
    ]
    got, *written = _layers(products)(mx.concatenate(parts), [table], seen)
    begin = 0
    for at, (rows, tokens, starts) in enumerate(kinds):
        x = parts[at].reshape(rows, tokens, _HIDDEN)
        alone, *own = _in_steps(products, x, columns[at], _int32(*starts), table, [])
        assert mx.array_equal(got[begin : begin + rows * tokens], alone.reshape(-1, _HIDDEN))
        assert mx.array_equal(written[2 * at], own[0])
        assert mx.array_equal(written[2 * at + 1], own[1])
        begin += rows * tokens


_OPTIONS: Mapping[str, Any] = {
    "query_norm": (_numbers(_HEAD_DIM, seed=90), 1e-6),
    "key_norm": (_numbers(_HEAD_DIM, seed=91), 1e-6),
    "output_norm": (_numbers(_HIDDEN, seed=92), 1e-6),
    "down_norm": (_numbers(_HIDDEN, seed=93), 1e-6),
    "activation": "gelu",
    "window": 40,
}


def _apart(product: Product, sizes: tuple[int, ...]) -> list[Any]:
    """Cut a product's weights by their outputs."""
    arrays, packing = product
    ends = np.cumsum(sizes).tolist()
    cut = [mx.split(array, ends[:-1]) for array in arrays]
    return [native.LayerWeights(*each, **packing) for each in zip(*cut, strict=True)]


@pytest.mark.parametrize(
    ("tokens", "left_out"),
    sampled(
        list(itertools.product((1, 9, 70), (None, *_OPTIONS))),
        [*((9, name) for name in (None, *_OPTIONS)), (1, None), (70, None)],
    ),
)
def test_every_part_of_a_layer_has_the_bits_of_its_step(
    instruction_sets: list[str], left_out: str | None, tokens: int
) -> None:
    """Norms of heads and of what is added, gelu and a window; with queries, keys and values in one product or in three, gates and ups in one or in two."""
    options = {name: one for name, one in _OPTIONS.items() if name != left_out}
    products, table = _products("affine5"), _table(300)
    other_tables = [(table[1], table[0]), table]
    x, starts = _numbers(2, tokens, _HIDDEN), _int32(3, 29)
    columns = [_numbers(2, _KV_HEADS, _COLUMNS, _HEAD_DIM, seed=seed) for seed in (3, 4)]
    in_parts = {part: _apart(products[part], _MERGED[part]) for part in ("qkv", "gate_up")}
    for instruction_set in (*instruction_sets, "plain"):
        native.use_instruction_set(instruction_set)
        expected = _in_steps(products, x, columns, starts, table, [], options)
        for changes, tables in (({}, [table]), (in_parts, [table]), ({"table": 1}, other_tables)):
            layers = native.LlamaLayers([_block(products, **{**options, **changes})])
            got = layers(x, tables, [_columns([columns], starts, tokens, [])])
            assert all(map(mx.array_equal, got, expected)), (instruction_set, list(changes))


def _low_ranks(
    seed: int, left_out: str, *, has_magnitudes: bool = False
) -> dict[str, list[tuple[mx.array, ...] | None]]:
    """Make an adapter's a and b of every merged layer, of ranks that differ, and its ratios; none of the product that is left out."""
    return {
        name: [
            None
            if name == left_out
            else (
                _numbers(2 + seed + at, _SIZES[name][1], seed=100 * seed + at) * 0.1,
                _numbers(outputs, 2 + seed + at, seed=100 * seed + 50 + at) * 0.1,
                *([1 + _numbers(outputs, seed=seed + at) * 0.1] if has_magnitudes else []),
            )
            for at, outputs in enumerate(sizes)
        ]
        for name, sizes in _MERGED.items()
    }


def _low_rank(pieces: Sequence[tuple[Any, ...]]) -> Any:
    return native.LowRank([native.LowRank.Piece(*one) for one in pieces])


def _merged_rank(name: str, parts: Sequence[tuple[mx.array, ...] | None]) -> Any:
    begins = np.cumsum((0, *_MERGED[name])).tolist()
    pieces = [(begin, *one) for begin, one in zip(begins, parts, strict=False) if one is not None]
    return _low_rank(pieces) if pieces else None


@pytest.mark.parametrize(
    ("tokens", "name"),
    sampled(
        list(itertools.product((1, 9, 70), ("affine4", "affine5", "plain"))),
        [(1, "affine4"), (9, "plain"), (70, "affine5")],
    ),
)
def test_rows_with_adapters_have_the_bits_of_their_steps(  # noqa: C901 - compared in many ways
    instruction_sets: list[str], name: str, tokens: int
) -> None:
    """Two adapters, one of which leaves a product as it is and one has magnitudes, beside a base row, with merged products and without, in two layers; base rows have the bits of a pass without adapters, and rows those that they have alone."""
    layers_of = [
        [_low_ranks(1 + layer, "down"), _low_ranks(20 + layer, "", has_magnitudes=True)]
        for layer in (0, 1)
    ]
    products = [_products(name, layer) for layer in (0, 1)]
    table, numbers = _table(300), [2, 0, 1, 2]
    x, starts = _numbers(4, tokens, _HIDDEN), _int32(3, 29, 0, 11)
    index = mx.repeat(_int32(*numbers), tokens)
    columns = [
        [_numbers(4, _KV_HEADS, _COLUMNS, _HEAD_DIM, seed=seed + 2 * layer) for seed in (3, 4)]
        for layer in (0, 1)
    ]
    merged = [
        native.LlamaAdapter(
            [[_merged_rank(*one) for one in ranks[at].items()] for ranks in layers_of]
        )
        for at in (0, 1)
    ]
    apart = [
        native.LlamaAdapter(
            [
                [one and _low_rank([(0, *one)]) for parts in ranks[at].values() for one in parts]
                for ranks in layers_of
            ]
        )
        for at in (0, 1)
    ]
    blocks_apart = [
        _block(one, **{part: _apart(one[part], _MERGED[part]) for part in ("qkv", "gate_up")})
        for one in products
    ]

    def adapted(layer: int, product: str, rows: mx.array, made: mx.array) -> mx.array:
        for at, ranks in enumerate(layers_of[layer], 1):
            if (rank := _merged_rank(product, ranks[product])) is not None:
                own = mx.where(index == at, 1, 0).astype(mx.int32)
                made = native.add_low_rank(made, rows, own, [rank])
        return made

    for instruction_set in (*instruction_sets, *(["plain"] if tokens < 70 else [])):
        native.use_instruction_set(instruction_set)
        passed, expected = x, list[mx.array]()
        for layer in (0, 1):
            passed, *own = _in_steps(
                products[layer],
                passed,
                columns[layer],
                starts,
                table,
                [],
                adapted=partial(adapted, layer),
            )
            expected += own
        seen = [_columns(columns, starts, tokens, [])]
        base, *_ = _layers(*products)(x, [table], seen)
        assert not mx.array_equal(passed[0], base[0])
        for threads in (1, 2):
            native.set_thread_count(threads)
            for layers, adapters in (
                (_layers(*products), merged),
                (native.LlamaLayers(blocks_apart), apart),
            ):
                got = layers(x, [table], seen, index, adapters)
                assert all(map(mx.array_equal, got, [passed, *expected])), instruction_set
                assert mx.array_equal(got[0][1], base[1])
                for row, number in enumerate(numbers):
                    its = [[one[row : row + 1] for one in each] for each in columns]
                    alone = [_columns(its, starts[row : row + 1], tokens, [])]
                    chosen = index[:tokens] * 0 + number
                    assert mx.array_equal(
                        layers(x[row : row + 1], [table], alone, chosen, adapters)[0][0],
                        got[0][row],
                    )


def test_adapters_that_are_not_of_these_layers_are_refused() -> None:
    """Before anything is computed; an index comes with adapters, and a row whose adapter is not there is NaN."""
    layers, x, table = _layers(_products("plain")), _numbers(2, 1, _HIDDEN), _table(10)
    seen = [_columns([[mx.zeros((2, 2, 9, 32))] * 2], _int32(0, 0), 1, [])]
    right = [_merged_rank(*one) for one in _low_ranks(1, "").items()]
    other = _numbers(4, 191), _numbers(192, 4)
    longer = _numbers(4, 192), _numbers(193, 4)
    wrongs = [
        (_int32(1, 1), [[right, right]]),
        (_int32(1, 1), [[right[:3]]]),
        (_int32(1, 1), [[[*right[:3], _low_rank([(0, *other)])]]]),
        (_int32(1, 1), [[[right[0], _low_rank([(0, *longer)]), *right[2:]]]]),
        (_int32(1), [[right]]),
        (mx.ones((2,)), [[right]]),
        (_int32(1, 1), []),
        (None, [[right]]),
    ]
    for index, adapters in wrongs:
        with pytest.raises(ValueError, match=r"are|has|comes"):
            layers(x, [table], seen, index, [native.LlamaAdapter(one) for one in adapters])
    got, *_ = layers(x, [table], seen, _int32(2, 0), [native.LlamaAdapter([right])])
    assert mx.isnan(got[0]).all()
    assert mx.array_equal(got[1], layers(x, [table], seen)[0][1])


@settings(max_examples=40)
@given(
    start=st.integers(0, 200),
    tokens=st.sampled_from([1, 2, 30]),
    spare=st.integers(0, 30),
    shift=st.integers(0, 20),
    window=st.sampled_from([1, 40, 64]),
)
def test_a_ring_has_the_bits_of_columns_in_order(
    instruction_sets: list[str], start: int, tokens: int, spare: int, shift: int, window: int
) -> None:
    """Wherever position 0 lies, once or many times round, and whatever older positions have left there; each position is written where it is read."""
    products, table, x = _products("affine4"), _table(300), _numbers(1, tokens, _HIDDEN)
    straight = [_numbers(1, _KV_HEADS, 240, _HEAD_DIM, seed=seed) for seed in (3, 4)]
    ring = window + tokens - 1 + spare
    shift %= ring
    last = start + tokens - 1 - (start + tokens - 1 + shift - mx.arange(ring)) % ring
    turned = [
        mx.where((last >= 0)[:, None], one[:, :, mx.maximum(last, 0)], 7.0) for one in straight
    ]
    layers = native.LlamaLayers([_block(products, window=window)])
    for instruction_set in (*instruction_sets, "plain"):
        native.use_instruction_set(instruction_set)
        expected, *in_order = layers(x, [table], [_columns([straight], _int32(start), tokens, [])])
        keys, values = ([mx.array(one)] for one in turned)
        seen = native.LlamaLayers.Columns(
            keys, values, _int32(start), tokens, rings=[(ring, shift)]
        )
        got, *written = layers(x, [table], [seen])
        assert mx.array_equal(got, expected)
        own = mx.arange(start, start + tokens)
        for one, other in zip(written, in_order, strict=True):
            assert mx.array_equal(one[:, :, (own + shift) % ring], other[:, :, own])


def test_a_ring_that_is_not_there_is_refused() -> None:
    """One for each layer, without a prefix; one that goes on behind the columns has position 0 in its first."""
    columns = [[mx.zeros((2, 2, 9, 32))] * 2]
    layers, x = _layers(_products("plain")), mx.zeros((2, 1, _HIDDEN))
    for rings, prefix in (
        ([(9, 0)] * 2, []),
        ([(9, 0)], columns),
        ([(12, 1)], []),
        ([(-1, 0)], []),
    ):
        prefixes = [[mx.zeros((1, 2, 9, 32))] * 2] * len(prefix)
        parts = [[one[at] for one in each] for each in (columns, prefixes) for at in (0, 1)]
        seen = native.LlamaLayers.Columns(*parts[:2], _int32(0, 0), 1, *parts[2:], rings)
        with pytest.raises(ValueError, match="ring"):
            layers(x, [_table(10)], [seen])
    with pytest.raises(ValueError, match="a table for each layer"):
        layers(x, [], [_columns(columns, _int32(0, 0), 1, [])])


def test_columns_are_written_in_place() -> None:
    """A step copies no slab without other references, or memory would double."""
    layers, x, table = _layers(_products("plain")), _numbers(4, 1, _HIDDEN), _table(10)
    keys, values = (_numbers(4, _KV_HEADS, 9_000, _HEAD_DIM, seed=seed) for seed in (3, 4))
    mx.eval(keys, values, x, table)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for at in range(5):
        seen = _columns([[keys, values]], _int32(at, at, at, at), 1, [])
        got, keys, values = layers(x, [table], [seen])
        del seen
        mx.eval(got, keys, values)
    assert mx.get_peak_memory() - before < keys.nbytes / 2


def test_layers_that_have_gone_are_computed_all_the_same() -> None:
    """What was asked for keeps the weights until it is computed."""
    products, x, table = _products("affine4"), _numbers(2, 1, _HIDDEN), _table(10)
    columns = [_numbers(2, _KV_HEADS, 9, _HEAD_DIM, seed=seed) for seed in (3, 4)]
    starts = _int32(1, 2)
    expected = _in_steps(products, x, columns, starts, table, [])
    waiting = _layers(products)(x, [table], [_columns([columns], starts, 1, [])])
    del products
    assert all(mx.array_equal(*pair) for pair in zip(waiting, expected, strict=True))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("heads", 5),
        ("heads", 0),
        ("kv_heads", 4),
        ("kv_heads", 1),
        ("input_norm", (_HIDDEN - 1,)),
        ("post_norm", (1, _HIDDEN)),
        ("qkv", (320, 96)),
        ("output", (96, 192)),
        ("gate_up", (322, 192)),
        ("down", (192, 159)),
        ("query_norm", (_HEAD_DIM - 1,)),
        ("down_norm", (_HEAD_DIM,)),
        ("activation", "relu"),
        ("window", -1),
    ],
    ids=str,
)
def test_parts_that_do_not_go_together_are_refused(
    part: str, wrong: int | str | tuple[int, ...]
) -> None:
    """When the block is made."""
    given_part: object = wrong
    if isinstance(wrong, tuple):
        array = mx.zeros(wrong)
        given_part = (array, 1e-5) if part.endswith("norm") else _weights(part, ([array], {}))
    with pytest.raises(ValueError, match=r"are|have|has|is|go on"):
        _block(_products("plain"), **{part: given_part})


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": (2, 1, 191)},
        {"x": ()},
        {"x": (3, 1, 192)},
        {"keys": (1, 2, 9, 32)},
        {"keys": (2, 3, 9, 32), "values": (2, 3, 9, 32)},
        {"values": (2, 2, 9, 48)},
        {"values": (2, 2, 8, 32)},
        {"starts": (3,)},
        {"cosines": (10, 32)},
        {"sines": (9, 16)},
        {"cosines": (0, 16), "sines": (0, 16)},
    ],
    ids=str,
)
def test_a_pass_that_does_not_go_with_the_layers_is_refused(
    wrong: dict[str, tuple[int, ...]],
) -> None:
    """Before anything is computed."""
    shapes = {
        "x": (2, 1, 192),
        "keys": (2, 2, 9, 32),
        "values": (2, 2, 9, 32),
        "starts": (2,),
        "cosines": (10, 16),
        "sines": (10, 16),
        **wrong,
    }
    arrays = [
        mx.zeros(shape, dtype=mx.int32 if name == "starts" else mx.float32)
        for name, shape in shapes.items()
    ]
    x, keys, values, starts, *table = arrays
    seen = _columns([[keys, values]], starts, 1, [])
    with pytest.raises(ValueError, match=r"are|have|has|there"):
        _layers(_products("plain"))(x, [(table[0], table[1])], [seen])


@pytest.mark.parametrize(("layers", "prefixes"), [(0, 0), (1, 0), (3, 0), (2, 1)])
def test_columns_of_other_layers_are_refused(layers: int, prefixes: int) -> None:
    """Each layer has its own, and a prefix in all or none."""
    columns = [[mx.zeros((2, 2, 9, 32))] * 2] * layers
    prefix = [[mx.zeros((1, 2, 9, 32))] * 2] * prefixes
    seen = _columns(columns, _int32(0, 0), 1, prefix)
    with pytest.raises(ValueError, match="each layer"):
        _layers(_products("plain"), _products("plain"))(mx.zeros((2, 1, 192)), [_table(10)], [seen])


def test_layers_of_other_sizes_are_refused() -> None:
    """Rows pass from one to the next, and columns are of one shape; and no layers at all."""
    fewer = {
        **_products("plain"),
        "down": ([mx.zeros((_HIDDEN, 80))], {}),
        "gate_up": ([mx.zeros((160, _HIDDEN))], {}),
    }
    assert len(_layers(_products("plain"), fewer)(mx.zeros((0, 1, 192)), [_table(10)], [])) == 1
    other = _block(_products("plain"), heads=3, kv_heads=1)
    for blocks in ([_block(_products("plain")), other], []):
        with pytest.raises(ValueError, match=r"there are layers|of one size"):
            native.LlamaLayers(blocks)
