"""The files of a MODEL argument on this machine."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from machd.engine.loading import embedded
from machd.engine.loading.hub_download import HUB_FILES
from machd.engine.loading.hub_errors import hide_passwords, named_hub_errors
from machd.engine.loading.hub_transfer import bound_waiting
from machd.engine.protocol.downloads import MAIN_REVISION
from machd.engine.protocol.progress import LoadProgress, SilentProgress
from machd.errors import ModelNotFoundError
from machd.gguf_parts import gguf_name, is_gguf
from machd.settings.problems import shortened
from machd.settings.texts import HUB_ID


class SourceKind(StrEnum):
    """A layout of files."""

    DIRECTORY = "directory"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, in a directory in mlx-lm layout, one GGUF file or a part of several, and the name that requests use."""

    kind: SourceKind
    path: Path
    model_id: str


def resolve_model(
    model: str | None,
    *,
    offline: bool,
    cache_directory: Path,
    progress: LoadProgress | None = None,
) -> ModelSource:
    """Find the files of a directory, a GGUF file, a hub id (``org/name``) or, for None, the embedded default.

    They are fetched only when ``offline`` is false.

    Raises:
        ModelNotFoundError: There is no such model here; the message says how to get it.
        ModelDownloadError: Fetching failed.
    """
    progress = progress or SilentProgress()
    local = local_source(model)
    if local is not None:
        return local
    if model is None or model == embedded.EMBEDDED_MODEL_ID:
        file = embedded.locate(cache_directory)
        if file is None and offline:
            raise ModelNotFoundError(
                f"the embedded model {embedded.EMBEDDED_MODEL_ID} is not on this machine; "
                "`machd model pull` fetches it (or start with `--no-model-offline`)"
            )
        file = file or embedded.pull(cache_directory, progress=progress)
        return ModelSource(SourceKind.GGUF, file, embedded.EMBEDDED_MODEL_ID)
    return ModelSource(SourceKind.DIRECTORY, _hub_snapshot(model, offline=offline), model)


def local_source(model: str | None) -> ModelSource | None:
    """Find the files of a directory or a GGUF file; None for a hub id and the embedded default, which may be fetched.

    Raises:
        ModelNotFoundError: There is no such model here.
    """
    if model is None or model == embedded.EMBEDDED_MODEL_ID:
        return None
    path, mode = _named_file(model)
    if stat.S_ISDIR(mode):
        return ModelSource(SourceKind.DIRECTORY, path, Path(os.path.abspath(path)).name)  # noqa: PTH100 - a link keeps its own name
    if mode:
        if stat.S_ISREG(mode) and is_gguf(path.name):
            return ModelSource(SourceKind.GGUF, path, gguf_name(path).model)
        raise ModelNotFoundError(
            f"{shortened(model)} is neither a directory nor a .gguf file; give the directory that holds "
            "config.json and the .safetensors files"
        )
    if HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return None
    raise ModelNotFoundError(
        f"{shortened(model)} does not exist: give a directory in mlx-lm layout, a .gguf file, a hub id "
        "(org/name), or nothing for the embedded default"
    )


def _named_file(model: str) -> tuple[Path, int]:
    """Find the path and the file mode of a MODEL argument; mode 0 where no file has that name."""
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path, 0
    except RuntimeError as error:  # expanduser() of a user without a home
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    raise ModelNotFoundError(f"cannot look at {shortened(model)}: {reason}")


def _hub_snapshot(model_id: str, *, offline: bool) -> Path:
    """Find the directory of a model in the local hub cache, or fetch it into the cache."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    if not offline:
        bound_waiting()
        hide_passwords()
    with named_hub_errors(model_id, MAIN_REVISION):
        try:
            return Path(
                snapshot_download(
                    model_id, allow_patterns=list(HUB_FILES), local_files_only=offline
                )
            )
        except LocalEntryNotFoundError as error:
            if not offline:
                raise
            raise ModelNotFoundError(
                f"{model_id} is no path below {shortened(os.getcwd())}, and no model of the hub that is on "  # noqa: PTH109 - a text
                "this machine; model.offline is true, and `--no-model-offline` would fetch it from the hub"
            ) from error
