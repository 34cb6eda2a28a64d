"""The shape of a model's products, read from its configuration without mlx: what a BLAS is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from machd.engine.backend.blas_trial import ProductShape
from machd.engine.backend.model_files import read_object
from machd.engine.loading.gguf_header import read_gguf_header
from machd.engine.loading.source import SourceKind, resolve_model
from machd.errors import MachdError

_WIDTHS = ("hidden_size", "d_model", "n_embd")
_COLUMNS = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "d_ff")


def product_shape(model: str | None, *, cache_directory: Path) -> ProductShape:
    """Return the shape of the first matrix of a layer's MLP, bounded; a default where nothing says it.

    Nothing is fetched: of a model that is not on this machine yet, nothing says it.

    Args:
        model: As of :func:`machd.engine.loading.source.resolve_model`.
        cache_directory: The user's.
    """
    try:
        source = resolve_model(model, offline=True, cache_directory=cache_directory)
        if source.kind is SourceKind.GGUF:
            header = read_gguf_header(source.path)
            architecture = header.text("general.architecture")
            return ProductShape(
                header.integer(f"{architecture}.embedding_length"),
                header.integer(f"{architecture}.feed_forward_length"),
            ).bounded()
        return shape_of_config(read_object(source.path / "config.json") or {})
    except (MachdError, OSError):
        return ProductShape()  # what is wrong with the model is said where it is loaded


def shape_of_config(config: Mapping[str, object]) -> ProductShape:
    """Return the shape that ``config.json`` says, bounded; models with several parts say it under ``text_config``."""
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        width = _first_count(place, _WIDTHS)
        if width is not None:
            return ProductShape(width, _first_count(place, _COLUMNS) or width).bounded()
    return ProductShape()


def _first_count(config: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """Return the first of these values that is a count."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
