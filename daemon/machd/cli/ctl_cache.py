"""``machd ctl cache``: what a running daemon keeps for later requests, and filling it ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import click
import msgspec

from machd.api.admin_cache import (
    CacheCleared,
    CacheWarmed,
    WarmedPrompt,
    WarmPrompt,
    WarmRequest,
)
from machd.api.admin_status import AdminStatus
from machd.api.decoding import decode_body
from machd.cli.ctl_client import AdminClient
from machd.cli.ctl_tables import print_cache, print_warmed
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import counted, json_option, say, show_answer
from machd.cli.ctl_wait import Countdown
from machd.errors import InvalidRequestError, RequestError, SettingsError, UnavailableError

__all__ = ["cache"]

_PROMPT_TIMEOUT_S = 3600.0
"""For one prompt: the daemon has limits of its own, and who waits can leave."""

Line = tuple[int, WarmPrompt]
"""A prompt and the number of its line."""


@click.group()
def cache() -> None:
    """Show, fill and clear what the daemon keeps for later requests."""


@cache.command()
@target_options
@json_option
def stats(*, as_json: bool) -> None:
    """Show what the caches hold, and of how much use they were."""
    found = admin_client().ask("GET", "/admin/status", AdminStatus).cache
    if found is None:
        raise UnavailableError("the model is loading, and there are no caches yet")
    show_answer(found, print_cache, as_json=as_json)


@cache.command()
@click.option("--disk", "with_disk", is_flag=True, help="Delete what is kept on disk as well.")
@target_options
@json_option
def clear(*, with_disk: bool, as_json: bool) -> None:
    """Have the daemon forget its stored responses and the prefix cache."""
    path = f"/admin/cache/clear{'?disk=true' if with_disk else ''}"
    cleared = admin_client().ask("POST", path, CacheCleared)
    show_answer(cleared, _say_cleared, as_json=as_json)


@cache.command()
@click.argument("file", type=click.File("rb"))
@click.option("--client", metavar="NAME", help="Name of the API key whose requests find them.")
@click.option("--cache-salt", metavar="SALT", help="The cache_salt that those requests send.")
@target_options
@json_option
def warm(file: BinaryIO, *, client: str | None, cache_salt: str | None, as_json: bool) -> None:
    """Have the daemon compute the prompts in FILE, so that later requests find them.

    Each line is a JSON text, or an object with a prompt, or with messages and tools as a chat
    completion has them. - reads standard input.
    """
    lines = _read(file)
    asked = WarmRequest(prompts=[], client=client, cache_salt=cache_salt)
    warmed = _warm(admin_client(), asked, lines)
    names = [f"line {number}" for number, _ in lines]
    show_answer(
        warmed,
        lambda one: print_warmed(list(zip(names, one.prompts, strict=True))),
        as_json=as_json,
    )
    if warmed.failed:
        raise RequestError(f"{warmed.failed} of {counted(len(lines), 'prompt')} failed")


def _say_cleared(cleared: CacheCleared) -> None:
    responses = counted(cleared.responses.count, "stored response")
    say(f"forgot {responses} and {counted(cleared.blocks, 'block')} of the prefix cache")


def _read(file: BinaryIO) -> list[Line]:
    """The prompts of a file; empty lines are skipped.

    Raises:
        SettingsError: Lines are no prompts, or there are none; it names each, and quotes nothing.
    """
    lines: list[Line] = []
    problems: list[str] = []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            lines.append((number, _prompt(line)))
        except InvalidRequestError as error:
            problems.append(f"line {number}: {error.message}")
    if not lines and not problems:
        problems.append("the file holds no prompt")
    if problems:
        raise SettingsError(problems)
    return lines


def _prompt(line: bytes) -> WarmPrompt:
    is_text = line.lstrip().startswith(b'"')
    prompt = WarmPrompt(prompt=decode_body(line, str)) if is_text else decode_body(line, WarmPrompt)
    prompt.check()
    return prompt


def _warm(client: AdminClient, asked: WarmRequest, lines: Sequence[Line]) -> CacheWarmed:
    """Send one prompt after the other, so that it shows how far it is."""
    warmed: list[WarmedPrompt] = []
    with Countdown("prompts", total=len(lines)) as shown:
        for _, prompt in lines:
            body = msgspec.structs.replace(asked, prompts=[prompt])
            answer = client.ask(
                "POST", "/admin/cache/warm", CacheWarmed, body, timeout_s=_PROMPT_TIMEOUT_S
            )
            warmed += answer.prompts
            shown.advance()
    return CacheWarmed(
        prompts=warmed,
        prompt_tokens=sum(one.prompt_tokens for one in warmed),
        cached_tokens=sum(one.cached_tokens for one in warmed),
        failed=sum(one.error is not None for one in warmed),
        duration_s=round(sum(one.duration_s for one in warmed), 6),
    )
