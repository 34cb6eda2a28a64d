"""A long prompt whose client leaves, or which an operator ends, is gone on with when it comes again: the real process and a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.serve_process import ServeProcess

_TOKEN = "an-operator-of-the-test-0123456789"
_OPERATOR = {"Authorization": f"Bearer {_TOKEN}"}
_CHUNK_TOKENS = 32
_EMBEDDED, _SMALL = "smollm2-135m-instruct", "small"
_PROMPT_TOKENS = {_EMBEDDED: 1200, _SMALL: 3600}
"""By model: as many as take it long enough to be cancelled in the middle."""

_AT_LEAST = 0.3
"""Share of the prompt that is computed when it is cancelled: a busy machine notices that late."""


@dataclass(frozen=True)
class _Served:
    """A daemon and its model."""

    process: ServeProcess
    model: str

    @property
    def prompt(self) -> list[int]:
        return [1000 + at * 7 % 1000 for at in range(_PROMPT_TOKENS[self.model])]


@pytest.fixture(
    name="server",
    scope="module",
    params=[
        pytest.param((_EMBEDDED, "--no-continuous-batching-enabled"), marks=pytest.mark.long),
        pytest.param((_EMBEDDED, "--continuous-batching-enabled"), marks=pytest.mark.long),
        (_SMALL, "--continuous-batching-enabled"),
    ],
    ids=["single", "batched", "small"],
)
def _server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Served]:
    """A daemon of the embedded model in each mode, or of a small llama, whose chunks are short enough to be counted."""
    model, mode = request.param
    folder = tmp_path_factory.mktemp("operator")
    token_file = folder / "token"
    token_file.write_text(_TOKEN)
    token_file.chmod(0o600)
    arguments = [
        *(mode, "--cache-memory-mb", "500", "--auth-admin-token-file", str(token_file)),
        *("--continuous-batching-prefill-chunk-tokens", str(_CHUNK_TOKENS)),
    ]
    if model == _SMALL:
        path = write_tiny_llama(folder / _SMALL, layers=8, hidden=256, head_dim=64)
        arguments += [str(path), "--model-dtype=float32", "--probe-on-start=off"]
    with ServeProcess(*arguments) as process:
        yield _Served(process, model)


@pytest.fixture(name="anew", scope="module")
def _anew(server: _Served) -> Any:
    """The answer to the prompt when it is computed at once."""
    return _ask(server, "anew")


@pytest.mark.parametrize(
    ("is_operator", "is_streamed"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.long)],
    ids=["disconnect", "operator"],
)
def test_a_cancelled_prompt_is_gone_on_with(
    server: _Served, anew: Any, *, is_operator: bool, is_streamed: bool
) -> None:
    """Its computed tokens are cached tokens of the next one, whose answer is the one of a prompt that is computed at once."""
    salt = f"{is_operator} {is_streamed}"
    computed = _cancelled_at(server, salt, is_operator=is_operator, is_streamed=is_streamed)

    again = _ask(server, salt)

    details = again["usage"]["prompt_tokens_details"]
    assert computed <= details["cached_tokens"] < len(server.prompt) - 1
    diagnosis = details["cache_diagnosis"]
    assert (diagnosis["reason"], diagnosis["parted_at_tokens"]) == (
        "continued",
        details["cached_tokens"],
    )
    assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (found,), (whole,) = again["choices"], anew["choices"]
    assert found["text"] == whole["text"]
    # Where mlx computes, chunks of other lengths are rounded otherwise.
    logprobs = whole["logprobs"]["token_logprobs"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)


def _body(server: _Served, salt: str, **fields: object) -> dict[str, object]:
    return {
        "model": server.model,
        "prompt": server.prompt,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 3,
        "cache_salt": salt,
        "return_cache_diagnosis": True,
        **fields,
    }


def _ask(server: _Served, salt: str) -> Any:
    answer = httpx.post(
        f"{server.process.url}/v1/completions", json=_body(server, salt), timeout=CEILING_S
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def _cancelled_at(server: _Served, salt: str, *, is_operator: bool, is_streamed: bool) -> int:
    """Cancel a prompt in its middle, and return how many of its tokens were computed by then."""

    def requests() -> list[dict[str, Any]]:
        return list(
            httpx.get(f"{server.process.admin_url}/admin/requests", headers=_OPERATOR).json()[
                "requests"
            ]
        )

    def computed() -> int:
        found = requests()
        assert found, "the prompt is computed before it can be cancelled"
        return int(found[0]["prefilled_tokens"])

    with RawClient(server.process.url) as client:
        client.post_json("/v1/completions", _body(server, salt, stream=is_streamed))
        wait_until(lambda: bool(requests()), "it is there")
        wait_until(lambda: computed() >= _AT_LEAST * len(server.prompt), "much of it is computed")
        tokens, (request,) = computed(), requests()
        assert request["phase"] == "prefill"
        if is_operator:
            ended = httpx.delete(
                f"{server.process.admin_url}/admin/requests/{request['id']}", headers=_OPERATOR
            )
            assert ended.status_code == 200, ended.text
            client.read_until(b"ended this request")
    wait_until(lambda: not requests(), "its end is noticed")
    return tokens
