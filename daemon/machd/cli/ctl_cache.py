"""``machd ctl cache``: what a running daemon keeps for later requests, and filling it ahead."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from machd.admin.cache import CacheCleared
from machd.admin.status import AdminStatus
from machd.admin.warming import (
    MAX_WARM_BODY_BYTES,
    MAX_WARM_PROMPTS,
    WARM_PROMPT_FIELDS,
    CacheWarmed,
    WarmedPrompt,
    WarmPrompt,
    WarmRequest,
)
from machd.cli.ctl_client import AdminClient
from machd.cli.ctl_tables import print_cache, print_warmed, shown_size
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import counted, json_option, say, show_answer
from machd.cli.ctl_wait import Countdown
from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.errors import InvalidRequestError, RequestError, SettingsError, UnavailableError
from machd.regular_files import open_regular
from machd.settings.problems import shortened

_PROMPT_TIMEOUT_S = 3600.0
"""For one prompt: the daemon has limits of its own, and who waits can leave."""

Line = tuple[int, WarmPrompt]
"""A prompt and the number of its line."""


_GROUP_PROMPTS = min(16, MAX_WARM_PROMPTS)
_GROUP_BYTES = 4_000_000
"""Of one request: half of what the daemon takes, and a prompt that is longer goes alone."""

_MAX_FILE_BYTES = 1 << 30
_MAX_PROBLEMS = 100

_OPTIONS = {"client": "--client", "cache_salt": "--cache-salt"}
"""What says for the whole file what a request says in a field."""


class _Turns(msgspec.Struct):
    """A prompt's messages, whatever they are."""

    messages: object = None


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
    show_answer(cleared, lambda one: _say_cleared(one, with_disk=with_disk), as_json=as_json)


@cache.command(short_help="Compute prompts ahead, so that requests find them.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--client", metavar="NAME", help="Name of the API key whose requests find them.")
@click.option("--cache-salt", metavar="SALT", help="The cache_salt that those requests send.")
@target_options
@json_option
def warm(file: Path, *, client: str | None, cache_salt: str | None, as_json: bool) -> None:
    """Have the daemon compute the prompts in FILE, so that later requests find them.

    Each line is a JSON text, or an object with a prompt, or with messages and tools as a chat
    completion has them. - reads standard input.
    """
    with _opened(file) as content:
        lines = _read(content)
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


def _say_cleared(cleared: CacheCleared, *, with_disk: bool) -> None:
    responses = counted(cleared.responses.count, "stored response")
    say(f"forgot {responses} and {counted(cleared.blocks, 'block')} of the prefix cache")
    if cleared.disk_bytes is None:
        return
    if with_disk:
        files, size = counted(cleared.deleted_blocks, "file"), shown_size(cleared.deleted_bytes)
        say(f"deleted {files} on disk, {size}")
    if cleared.disk_bytes:
        how = "" if with_disk else "; --disk deletes them"
        say(f"{shown_size(cleared.disk_bytes)} of this model remain on disk{how}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open the file, or standard input for ``-``; SettingsError if it cannot be read."""
    if path == Path("-"):
        yield sys.stdin.buffer
        return
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError([f"{shortened(str(path))}: cannot be read: {reason}"]) from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The file's lines; SettingsError where one, or all of them, are longer than the daemon could take."""
    left_bytes = _MAX_FILE_BYTES
    while line := file.readline(MAX_WARM_BODY_BYTES + 1):
        left_bytes -= len(line)
        if len(line) > MAX_WARM_BODY_BYTES:
            raise SettingsError([f"a line is longer than {MAX_WARM_BODY_BYTES} bytes"])
        if left_bytes < 0:
            raise SettingsError([f"the prompts are more than {_MAX_FILE_BYTES >> 20} MiB"])
        yield line


def _read(file: BinaryIO) -> list[Line]:
    """The prompts of a file; empty lines are skipped.

    Raises:
        SettingsError: Lines are no prompts, or there are none; it names each, and quotes nothing.
    """
    lines: list[Line] = []
    problems: list[str] = []
    for number, line in enumerate(_lines(file), start=1):
        # Some editors begin a file with a mark.
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not content.strip():
            continue
        try:
            lines.append((number, _prompt(content)))
        except InvalidRequestError as error:
            problems.append(f"line {number}: {error.message}")
            if len(problems) == _MAX_PROBLEMS:
                break
    if not lines and not problems:
        problems.append("the file holds no prompt")
    if problems:
        raise SettingsError(problems)
    return lines


def _prompt(line: bytes) -> WarmPrompt:
    """Return the prompt of one line.

    Raises:
        InvalidRequestError: It is no prompt; the message goes on from the line's number.
    """
    kind = line.lstrip()[:1]
    if kind not in {b'"', b"{"}:
        raise InvalidRequestError(
            "a JSON text or an object with prompt or messages is expected, all in one line"
        )
    try:
        prompt = WarmPrompt(prompt=decode_body(line, str)) if kind == b'"' else _object(line)
    except InvalidRequestError as error:
        # A line is all that there is of a body here.
        raise InvalidRequestError(error.message.removeprefix("The body ")) from None
    prompt.check()
    return prompt


def _object(line: bytes) -> WarmPrompt:
    if decode_body(line, _Turns).messages == []:
        raise InvalidRequestError("messages is empty; send at least one message")
    prompt = decode_body(line, WarmPrompt)
    if names := unknown_fields(line, WarmPrompt):
        options = [option for name, option in _OPTIONS.items() if name in names]
        hint = (
            f"; {' and '.join(options)} of the command hold for the whole file" if options else ""
        )
        raise InvalidRequestError(
            f"{', '.join(names)}: not known; a prompt has {WARM_PROMPT_FIELDS}{hint}"
        )
    return prompt


def _warm(client: AdminClient, asked: WarmRequest, lines: Sequence[Line]) -> CacheWarmed:
    """Send a few prompts at a time: it shows how far it is, and the daemon's log is not flooded."""
    warmed: list[WarmedPrompt] = []
    with Countdown("prompts", total=len(lines)) as shown:
        for prompts in _groups(lines):
            body = msgspec.structs.replace(asked, prompts=prompts)
            timeout_s = len(prompts) * _PROMPT_TIMEOUT_S
            try:
                answer = client.ask(
                    "POST", "/admin/cache/warm", CacheWarmed, body, timeout_s=timeout_s
                )
            except RequestError as error:
                raise _in_options(error, asked) from None
            warmed += answer.prompts
            shown.advance(len(prompts))
    return CacheWarmed.of(warmed)


def _groups(lines: Sequence[Line]) -> Iterator[list[WarmPrompt]]:
    """The prompts in order, as many together as one request is to have."""
    group: list[WarmPrompt] = []
    group_bytes = 0
    for _, prompt in lines:
        size_bytes = len(msgspec.json.encode(prompt))
        if group and (len(group) == _GROUP_PROMPTS or group_bytes + size_bytes > _GROUP_BYTES):
            yield group
            group, group_bytes = [], 0
        group.append(prompt)
        group_bytes += size_bytes
    if group:
        yield group


def _in_options(error: RequestError, asked: WarmRequest) -> RequestError:
    """Return the daemon's refusal in terms of the command's options."""
    option = _OPTIONS.get(error.param or "")
    if option is None:
        return error
    if error.param == "client" and asked.client is None:
        return RequestError(
            "every API key keeps its prompts to itself (cache.namespace is key): name the key whose "
            "requests are to find these with --client NAME"
        )
    # What the operator typed is the operator's own; the name is no secret, the salt may be one.
    typed = f"{option} {asked.client}" if error.param == "client" else option
    return RequestError(f"{typed}: {error.message.removeprefix(f'{error.param}: ')}")
