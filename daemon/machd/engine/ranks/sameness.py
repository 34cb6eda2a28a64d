"""Ranks compare what they would have to have in common, and refuse to start apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from machd.engine.backend.model_files import open_regular
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.engine import ModelDescription
from machd.engine.ranks.rank_group import RankGroup
from machd.errors import ModelNotFoundError, StartupError
from machd.gguf_parts import gguf_files
from machd.installed import installed_version
from machd.settings.model import Settings

_SAMPLE_BYTES = 1 << 20
"""What is read of a weight file's beginning, where its header is, and of its end."""

_DECODER = msgspec.msgpack.Decoder(dict[str, str])


def common_facts(settings: Settings, source: ModelSource) -> dict[str, str]:
    """Return what decides on a rank's computation, by name.

    Raises:
        ModelNotFoundError: A file cannot be read.
    """
    facts = {name: str(installed_version(name)) for name in ("machd", "mlx", "mlx-lm")}
    model = settings.model
    facts |= {
        "model.dtype": model.dtype,
        "model.quantize": str(model.quantize),
        "model.max_context_tokens": str(model.max_context_tokens),
        "cache.prefix": str(settings.cache.prefix),
        "cache.kv_quantization": settings.cache.kv_quantization,
        "continuous_batching.max_b": str(settings.continuous_batching.max_b),
        "distributed.mode": settings.distributed.mode,
    }
    files = list(gguf_files(source.path))
    if source.kind is not SourceKind.GGUF:
        files = [source.path / "config.json", *sorted(source.path.glob("*.safetensors"))]
    return facts | {f"the file {file.name}": _sample(file) for file in files}


def shard_facts(model: ModelDescription) -> dict[str, str]:
    """Return what has to be the same of every shard, by name."""
    kinds = {f"{layer.class_name} {layer.window_tokens}" for layer in model.cache.layers}
    return {
        "dtype": model.dtype,
        "architecture": model.architecture,
        "kinds of caches": " ".join(sorted(kinds)),
    }


def check_same(group: RankGroup, facts: Mapping[str, str]) -> None:
    """Compare this rank's facts with those of rank 0. A collective.

    Raises:
        StartupError: They differ; on rank 0, another rank's do.
    """
    leading = _DECODER.decode(group.tell(msgspec.msgpack.encode(facts) if group.leads else b""))
    different = sorted(name for name in {*leading, *facts} if leading.get(name) != facts.get(name))
    counts = [row[0] for row in group.gather([len(different)])]
    if different:
        raise StartupError(
            f"rank {group.rank} differs from rank 0 in {', '.join(different)}; every rank needs the "
            "same versions, settings and model"
        )
    if apart := [rank for rank, count in enumerate(counts) if count]:
        ranks = ", ".join(str(rank) for rank in apart)
        raise StartupError(f"not every rank has what rank 0 has; the log of rank {ranks} says what")


def _sample(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open_regular(file) as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(0)
            digest.update(str(size_bytes).encode() + stream.read(_SAMPLE_BYTES))
            stream.seek(max(size_bytes - _SAMPLE_BYTES, 0))
            digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {file.name}: {error.strerror}") from error
    return digest.hexdigest()
