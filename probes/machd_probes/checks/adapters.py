"""Rows with different adapters, and with none, in one batch say what each says with its adapter in the weights.

Two adapters of random weights and of different rank change every linear layer. Each of their rows is compared with the row
alone on a copy of the model that has the adapter merged into its weights, computed as any model without adapters. Rows of the
base model are compared with the same batch without adapters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from msgspec import structs

from machd.capabilities.evidence import Evidence, Outcome
from machd.capabilities.rules import PrefixExtent, prefix_cache
from machd.engine.adapters.adapted_model import AdaptedModel
from machd.engine.adapters.low_rank import AdapterWeights
from machd.engine.assembly import engine_parts, make_engine
from machd.engine.experts.tensor_origins import switch_layers
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.kernels.batchable import make_batchable
from machd.engine.kernels.pass_adapters import AdapterKey
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.precision import Conversion, native_layers
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.progress import SilentProgress
from machd.engine.protocol.step import Lane, SampledToken
from machd.engine.step.mlx_engine import MlxEngine
from machd.request import adapter as adapters
from machd.request.adapter import Adapter
from machd_probes.bounded import OutOfTimeError, WatchedEngine
from machd_probes.comparison import compared, largest_difference, tolerated
from machd_probes.finding import Finding, no_data, unsupported
from machd_probes.merged_adapters import merged, random_adapter
from machd_probes.passes import Logprobs, compared_passes, restored, snapshot
from machd_probes.play import GREEDY, Join, play
from machd_probes.subject import Subject, is_equal

_NARROW, _WIDE = Adapter(b"narrow", name="narrow"), Adapter(b"wide", scale=0.8, name="wide")
_KEYS: tuple[AdapterKey, ...] = ((), (_NARROW,), (_WIDE,), (_NARROW,), (), (_WIDE,), (_NARROW,))
"""The adapters of each row."""

_TOKENS = 6
_CHUNK_TOKENS = 16
_MAX_ROWS = 16

_SEEN_NATS = 0.1
"""Rounding is tolerated up to a hundredth of it and less."""


def probe(subject: Subject, harm: Callable[[AdaptedModel], None] = lambda _: None) -> Finding:
    """Compare rows with adapters with merged weights.

    Args:
        subject: A tiny model; it is left without adapters.
        harm: Plants a fault once the adapters are in memory, to see that the probe fails.
    """
    parts = engine_parts(LoadedModel(subject.module, FakeTokenizer(), subject.description))
    model = parts.row_adapters
    assert isinstance(model, AdaptedModel), "one process with all weights in memory has adapters"
    if not model.base:
        return unsupported("no layer is a linear one that adapters could change")
    engine = WatchedEngine(MlxEngine(parts, max_rows=_MAX_ROWS), subject.watch)
    weights = {
        _NARROW: random_adapter(model.base, rank=4, seed=1, scale=1.5),
        _WIDE: random_adapter(model.base, rank=7, seed=2, scale=0.5),
    }
    owners: dict[AdapterKey, Subject] = {(): subject}
    try:
        for adapter, own in weights.items():
            owners[adapter,] = _serving(subject, merged(subject.plain, own, adapter.scale))
        found = _Trial(engine, model, weights, owners).found(harm)
    finally:
        for one in list(owners.values())[1:]:
            one.engine.close()
    names = _left_out(subject.plain, model.base)
    if found.outcome is Outcome.PASSED and names:
        return replace(found, detail=f"adapters leave these layers as they are: {names}")
    return found


def _left_out(model: Module, base: Container[str]) -> str:
    """Name the kinds of layers with matrices that no adapter changes, embeddings and convolutions left out."""
    kinds = (Linear, QuantizedLinear)
    linear = {path: one for path, one in model.named_modules() if isinstance(one, kinds)}
    # A layer that a model has in two places is changed under one of its paths.
    changed = {id(one) for path, one in linear.items() if path in base}
    paths = [path.split(".") for path, one in linear.items() if id(one) not in changed]
    names = dict.fromkeys("experts" if "experts" in path else path[-1] for path in paths)
    if switch_layers(model):
        names["experts"] = None
    return ", ".join(sorted(names))


def _serving(subject: Subject, model: Module) -> Subject:
    """Serve another model as the subject's own is served."""
    dtype: mx.Dtype = getattr(mx, subject.description.dtype)
    materialise(model, Conversion(dtype, native=native_layers("auto")), SilentProgress())
    make_batchable(model)
    loaded = LoadedModel(model, FakeTokenizer(), subject.description)
    engine = make_engine(loaded, max_rows=_MAX_ROWS)
    return Subject(engine, subject.extent, model=model, watch=subject.watch)


class _Trial:
    """A model with two adapters, and what has them in its weights."""

    def __init__(
        self,
        engine: Engine,
        model: AdaptedModel,
        weights: Mapping[Adapter, AdapterWeights],
        owners: Mapping[AdapterKey, Subject],
    ) -> None:
        """Begin without adapters in memory.

        Args:
            engine: Serves the model.
            model: The engine's adapters.
            weights: Of each adapter.
            owners: The models that rows with these adapters are compared with.
        """
        self._engine = engine
        self._model = model
        self._weights = weights
        self._owners = owners

    def found(self, harm: Callable[[AdaptedModel], None]) -> Finding:
        """Compare rows together, then rows behind a kept prefix."""
        subject = self._owners[()]
        rows = [
            Join(prompt, _TOKENS, at_step=2 * (number // 4), chunk_tokens=_CHUNK_TOKENS)
            for number, prompt in enumerate(subject.prompts)
        ]
        owners = [self._owners[key] for key in _KEYS]
        if not all(self._is_seen(owner, rows[0]) for owner in self._owners.values()):
            return no_data("an adapter of random weights changes too little of what the model says")
        forced = [owner.forced(row) for owner, row in zip(owners, rows, strict=True)]
        forced, plain = self._played_without(forced)
        with self._in_memory():
            harm(self._model)
            heard = play(
                self._engine,
                [
                    replace(row, sampling=replace(row.sampling, adapters=key))
                    for row, key in zip(forced, _KEYS, strict=True)
                ],
            )
            behind = self._behind_prefixes()
        base = _same_bits(
            (one, its) for key, one, its in zip(_KEYS, plain, heard, strict=True) if not key
        )
        if base.max_logprob_diff:
            return subject.judged([base], "rows without adapters have other bits beside others")
        told = [
            (owner.alone(row), its)
            for key, owner, row, its in zip(_KEYS, owners, rows, heard, strict=True)
            if key
        ]
        found = self._judged(told, behind, subject.noise_floor)
        if is_equal(found.evidence):
            return found
        # Measured only where it decides: it takes as long as all of the above.
        company = [
            largest_difference(subject.alone(row), its)
            for key, row, its in zip(_KEYS, rows, plain, strict=True)
            if not key
        ]
        return self._judged(told, behind, self._noise_floor(rows, company))

    def _noise_floor(self, rows: Sequence[Join], company: Iterable[float]) -> float:
        """Return what rounding changes where nothing but the order of sums is another, in nats.

        Weights with an adapter in them are added up in another order than weights and an adapter. Where the
        parts of a batch round alike, chunks and company show nothing of it; mlx-lm's own layers do.

        Args:
            rows: Computed alone by mlx-lm's own layers and by those that serve, both times without adapters.
            company: The differences that company makes to rows without adapters.
        """
        subject = self._owners[()]
        pairs = map(subject.beside_plain, rows)
        orders = [compared_passes(*pair, 0.0, 0.0).max_logprob_diff for pair in pairs]
        floors = [one.noise_floor for one in self._owners.values()]
        return max(*floors, subject.largest_rounding([*orders, *company]))

    def _judged(
        self,
        told: Iterable[tuple[list[SampledToken], list[SampledToken]]],
        behind: Iterable[tuple[Logprobs, Logprobs]],
        noise_floor: float,
    ) -> Finding:
        """Judge rows and prefixes, the reference first."""
        slack = tolerated(noise_floor)
        rows = [compared(alone, its, noise_floor) for alone, its in told]
        prefixes = [compared_passes(one, other, noise_floor, slack) for one, other in behind]
        subject = self._owners[()]
        found = subject.judged(
            rows, "rows with adapters say something else than the merged weights"
        )
        if found.outcome is Outcome.PASSED:
            found = subject.judged(
                [*rows, *prefixes], "rows behind the kept prefix of an adapter go on differently"
            )
        return found

    def _is_seen(self, owner: Subject, row: Join) -> bool:
        """Return whether an adapter changes more than any fault that is to be noticed."""
        subject = self._owners[()]
        if owner is subject:
            return True
        change = largest_difference(subject.alone(row), owner.alone(row))
        return change > max(_SEEN_NATS, 2 * tolerated(subject.noise_floor))

    def _played_without(self, rows: Sequence[Join]) -> tuple[list[Join], list[list[SampledToken]]]:
        """Play the rows without their adapters; where the model cannot compute a batch, one row at a time.

        Returns:
            The rows in the lane that they are played in, and what they said.
        """
        subject = self._owners[()]
        if subject.description.cache.mergeable:
            base = [
                subject.forced(replace(row, sampling=GREEDY))
                for row, key in zip(rows, _KEYS, strict=True)
                if not key
            ]
            try:
                said = play(self._engine, rows)
                own = [its for key, its in zip(_KEYS, said, strict=True) if not key]
                pairs = zip([subject.alone(row) for row in base], own, strict=True)
                floor = subject.noise_floor
                if is_equal(Evidence.together(compared(alone, its, floor) for alone, its in pairs)):
                    return list(rows), said
            except (OutOfTimeError, MemoryError):
                raise
            except Exception:  # noqa: BLE001 - whatever a model raises in company
                self._engine.reset()
        rows = [replace(row, lane=Lane.SERIAL) for row in rows]
        return rows, play(self._engine, rows)

    def _behind_prefixes(self) -> list[tuple[Logprobs, Logprobs]]:
        """Go on behind prefixes that are kept under the names of their adapters, and without any that was kept.

        Without a control of the base model that goes on right there is nothing to compare: the model keeps no prefixes.
        """
        subject = self._owners[()]
        if prefix_cache(subject.description.cache).extent is PrefixExtent.NONE:
            return []
        prefix, suffix = subject.prompt(21, 21), subject.prompt(3, 3)
        passes = subject.passes(subject.module)
        kept: dict[str, list[object]] = {}
        pairs: list[tuple[Logprobs, Logprobs]] = []
        for key, owner in self._owners.items():
            name = adapters.adapter_namespace(key)
            with self._model.chosen([key]):
                if name not in kept:
                    caches = passes.new_caches()
                    passes.feed(prefix, caches)
                    kept[name] = snapshot(caches)
                heard = passes.continued(suffix, restored(passes.new_caches(), kept[name]))
            alone = owner.passes(owner.module)
            caches = alone.new_caches()
            alone.feed(prefix, caches)
            pairs.append((alone.continued(suffix, caches), heard))
            floor = subject.noise_floor
            if not key and not is_equal(compared_passes(*pairs[0], floor, tolerated(floor))):
                return []
        return pairs

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        for adapter, weights in self._weights.items():
            self._model.add((adapter,), [weights])
        try:
            yield
        finally:
            for adapter in self._weights:
                self._model.remove((adapter,))


def _same_bits(pairs: Iterable[tuple[Sequence[SampledToken], Sequence[SampledToken]]]) -> Evidence:
    """Compare rows of the base model: each bit counts."""
    parts = [compared(one, other, 0.0) for one, other in pairs]
    return Evidence.together(
        structs.replace(part, token_mismatches=max(part.token_mismatches, 1))
        if part.max_logprob_diff
        else part
        for part in parts
    )
