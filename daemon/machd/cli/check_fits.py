"""``machd check --fits``: can these models be loaded at once, with the figures by which a daemon shares its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click
import msgspec
from msgspec import Struct
from rich.table import Table

from machd.capabilities.fit import Fit, MemoryNeeds
from machd.cli.check_document import ModelCheck
from machd.cli.check_encoder import EncoderCheck
from machd.cli.ctl_text import plain, print_lines, table_lines
from machd.served.model_set import ModelToServe, find_models, models_to_serve
from machd.served.reserved_needs import placed
from machd.served.residence import Residence
from machd.settings.model import Settings
from machd.settings.models import DEFAULT_NAME

_MB, _GB = 1_000_000, 1_000_000_000


class ModelShare(Struct, frozen=True, kw_only=True):
    """Memory of one of several models.

    Attributes:
        model: As it was asked for.
        working_bytes: Memory while it computes, with caches of a set size: of images, and ``cache.memory_mb``.
        kv_bytes: Its KV budget beside others: as its table sets it, or no more than one whole context.
        total_bytes: All of it together.
    """

    model: str
    weights_bytes: int
    working_bytes: int
    kv_bytes: int
    total_bytes: int


class JointFit(Struct, frozen=True, kw_only=True):
    """Several models on one machine.

    Attributes:
        verdict: ``fits`` if all can be loaded at once; ``tight`` if each can, but not all; else ``wont_fit``.
        budget_bytes: ``models.memory_gb``, or what the device can hold.
        budget_setting: The name of that setting; null where the device's memory counts.
        device_memory_bytes: What the device can hold in all.
    """

    verdict: Fit
    reason: str
    models: list[ModelShare]
    total_bytes: int
    budget_bytes: int
    budget_setting: str | None
    device_memory_bytes: int


def check_fits(
    names: Sequence[str],
    settings: Settings,
    *,
    check: Callable[[Settings], ModelCheck | EncoderCheck],
    as_json: bool,
) -> bool:
    """Print what models need together; returns whether they fit.

    Args:
        names: Of models that the settings name, or models as ``model.path`` names one; empty for all that the settings
            name.
        settings: Of the daemon.
        check: Checks the model of settings.
        as_json: Whether to print JSON instead of a table.

    Raises:
        click.UsageError: No model is given, and the settings name none.
        MachdError: A model cannot be checked.
    """
    served = {one.name: one for one in models_to_serve(settings, find_models(settings))}
    if not names:
        names = [one for one in served if one != DEFAULT_NAME or settings.model.path is not None]
    if not names:
        raise click.UsageError(
            "The settings name no models; name some behind --fits, or add tables to the configuration file."
        )
    asked = [served[one] if one in served else _alone(one, settings) for one in names]
    fit = joint_fit([(one, check(one.settings)) for one in asked], settings.models.memory_gb)
    if as_json:
        print_json(fit)
    else:
        print_table(fit)
    return fit.verdict is Fit.FITS


def joint_fit(
    checks: Sequence[tuple[ModelToServe, ModelCheck | EncoderCheck]], memory_gb: object
) -> JointFit:
    """Add up what models need, and compare it with ``models.memory_gb``, or with the device."""
    shares = [_share(model, check) for model, check in checks]
    device_bytes = min(check.fit.device_memory_bytes for _, check in checks)
    budget_bytes = round(memory_gb * _GB) if isinstance(memory_gb, float) else device_bytes
    total_bytes = sum(one.total_bytes for one in shares)
    what = "models.memory_gb is" if isinstance(memory_gb, float) else "the device holds"
    too_large = [one for one in shares if one.total_bytes > budget_bytes]
    figures = f"together they need {_gb(total_bytes)} and {what} {_gb(budget_bytes)}"
    if too_large:
        verdict = Fit.WONT_FIT
        reason = (
            f"{too_large[0].model} alone needs {_gb(too_large[0].total_bytes)} and {what} {_gb(budget_bytes)}: "
            "it can never be loaded"
        )
    elif total_bytes > budget_bytes:
        verdict, reason = Fit.TIGHT, f"{figures}: they take turns for the memory"
    else:
        verdict, reason = Fit.FITS, figures
    return JointFit(
        verdict=verdict,
        reason=reason,
        models=shares,
        total_bytes=total_bytes,
        budget_bytes=budget_bytes,
        budget_setting="models.memory_gb" if isinstance(memory_gb, float) else None,
        device_memory_bytes=device_bytes,
    )


def print_json(fit: JointFit) -> None:
    """Print it for a program."""
    click.echo(msgspec.json.format(msgspec.json.encode(fit), indent=2))


def print_table(fit: JointFit) -> None:
    """Print a line for each model, their sum, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold")
    for name in ("weights", "working memory", "KV cache", "together"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in fit.models:
        figures = (one.weights_bytes, one.working_bytes, one.kv_bytes, one.total_bytes)
        table.add_row(plain(one.model), *map(_gb, figures))
    sums = [
        sum(getattr(one, name) for one in fit.models)
        for name in ("weights_bytes", "working_bytes", "kv_bytes", "total_bytes")
    ]
    table.add_row("sum", *map(_gb, sums))
    for line in table_lines(table):
        click.echo(line)
    print_lines([("memory", f"{fit.verdict}: {fit.reason}")])


def _alone(path: str, settings: Settings) -> ModelToServe:
    """Return a model that the settings do not name."""
    model = settings.model.model_copy(update={"path": path})
    return ModelToServe(path, settings.model_copy(update={"model": model}), Residence())


def _share(model: ModelToServe, check: ModelCheck | EncoderCheck) -> ModelShare:
    settings, fit = model.settings, check.fit
    if not isinstance(check, ModelCheck):  # an encoder, which keeps no keys and values
        return ModelShare(
            model=model.name,
            weights_bytes=fit.weights_bytes,
            working_bytes=fit.working_bytes,
            kv_bytes=0,
            total_bytes=fit.total_bytes,
        )
    takes_images = check.vision is not None and check.vision.served
    media_bytes = settings.vision.cache_mb * _MB if takes_images else 0
    needs = MemoryNeeds(
        weights_bytes=fit.weights_bytes,
        working_bytes=fit.working_bytes + media_bytes,
        kv_budget_bytes=fit.kv_budget_bytes,
        bytes_per_token=check.bytes_per_token,
        bytes_per_sequence=check.bytes_per_sequence,
        context_tokens=check.context_tokens,
    )
    needs = placed(needs, settings, keeps_kv_budget=model.residence.keeps_kv_budget)
    return ModelShare(
        model=model.name,
        weights_bytes=needs.weights_bytes,
        working_bytes=needs.working_bytes,
        kv_bytes=needs.kv_budget_bytes,
        total_bytes=needs.total_bytes,
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / _GB:.2f} GB"
