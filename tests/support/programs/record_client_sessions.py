"""Record sessions of coding clients: ``python -m support.programs.record_client_sessions MODULES TARGET``.

The clients are the npm packages in MODULES (a ``node_modules`` folder). Each works in a scratch folder, on a daemon with a scripted
engine: it reads a file, writes one, runs a command and edits, in five turns that continue one session. A proxy keeps the requests;
:mod:`support.clients.recorded_sessions` says what is written to TARGET.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from machd.engine.fake.tokenizer import END_OF_TEXT
from machd.request.generation import SamplingParams
from support.clients.recorded_sessions import RecordedRequest, write_session
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine

_CONTEXT_TOKENS = 2_000_000
_PROJECT = "/tmp/session/project"  # noqa: S108 - the same on every machine, since clients send it
_MODEL = "fake"

_TURNS = (
    "Read notes.txt and say what it is about.",
    "Write a summary of it to summary.txt.",
    "How many words has the summary?",
    "Change three to four in notes.txt.",
    "Thanks. What is left to do?",
)


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and what the engine says to it.

    Attributes:
        first: Its command for the first turn; the text of the turn follows.
        later: Its command for a later one.
        environ: Its variables; ``{url}`` is the proxy's.
        files: Its settings by path, below the home folder.
        said: What the engine answers to one request after the other: a text, or a tool's name and arguments.
    """

    name: str
    package: str
    first: tuple[str, ...]
    later: tuple[str, ...]
    said: tuple[str | tuple[str, dict[str, object]], ...]
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def _said(
    read: tuple[str, dict[str, object]],
    write: tuple[str, dict[str, object]],
    run: tuple[str, dict[str, object]],
    edit: tuple[str, dict[str, object]],
) -> tuple[str | tuple[str, dict[str, object]], ...]:
    return (
        *(read, "The notes are about three birds in a garden."),
        *(write, "I wrote the summary."),
        *(run, "It has five words."),
        *(read, edit, "The notes say four birds now."),
        "Nothing is left to do.",
    )


_NOTES, _SUMMARY = f"{_PROJECT}/notes.txt", f"{_PROJECT}/summary.txt"
_TEXT = "Three birds in a garden.\n"

CLIENTS = (
    Client(
        "claude_code",
        "@anthropic-ai/claude-code",
        ("claude", "--allowedTools", "Bash,Read,Write,Edit", "-p"),
        ("claude", "--allowedTools", "Bash,Read,Write,Edit", "--continue", "-p"),
        _said(
            ("Read", {"file_path": _NOTES}),
            ("Write", {"file_path": _SUMMARY, "content": _TEXT}),
            ("Bash", {"command": "wc -w summary.txt", "description": "Count words"}),
            ("Edit", {"file_path": _NOTES, "old_string": "Three", "new_string": "Four"}),
        ),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": _MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    Client(
        "codex",
        "@openai/codex",
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox"),
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last"),
        _said(
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": "echo Three birds in a garden. > summary.txt"}),
            ("exec_command", {"cmd": "wc -w summary.txt"}),
            ("exec_command", {"cmd": "sed -i s/Three/Four/ notes.txt"}),
        ),
        files={
            ".codex/config.toml": f"""
model = "{_MODEL}"
model_provider = "machd"
model_context_window = 200000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.machd]
name = "machd"
base_url = "{{url}}/v1"
"""
        },
    ),
    Client(
        "opencode",
        "opencode-ai",
        ("opencode", "run"),
        ("opencode", "run", "--continue"),
        _said(
            ("read", {"filePath": _NOTES}),
            ("write", {"filePath": _SUMMARY, "content": _TEXT}),
            ("bash", {"command": "wc -w summary.txt", "description": "Count words"}),
            ("edit", {"filePath": _NOTES, "oldString": "Three", "newString": "Four"}),
        ),
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        {
            ".config/opencode/opencode.json": json.dumps(
                {
                    "model": f"machd/{_MODEL}",
                    "share": "disabled",
                    "autoupdate": False,
                    "permission": {"*": "allow"},
                    "provider": {
                        "machd": {
                            "npm": "@ai-sdk/openai-compatible",
                            "name": "machd",
                            "options": {"baseURL": "{url}/v1", "apiKey": "unused"},
                            "models": {_MODEL: {"limit": {"context": 200_000, "output": 4096}}},
                        }
                    },
                }
            )
        },
    ),
    Client(
        "qwen_code",
        "@qwen-code/qwen-code",
        ("qwen", "--auth-type", "openai", "--yolo", "-p"),
        ("qwen", "--auth-type", "openai", "--yolo", "--continue", "-p"),
        _said(
            ("read_file", {"file_path": _NOTES}),
            ("write_file", {"file_path": _SUMMARY, "content": _TEXT}),
            ("run_shell_command", {"command": "wc -w summary.txt", "is_background": False}),
            ("edit", {"file_path": _NOTES, "old_string": "Three", "new_string": "Four"}),
        ),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": _MODEL},
        {
            ".qwen/settings.json": json.dumps(
                {
                    "privacy": {"usageStatisticsEnabled": False},
                    "telemetry": {"enabled": False},
                    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                }
            )
        },
    ),
)


class _Answers:
    """The script of a session: its next answer for each new prompt with tools, and a title for others."""

    def __init__(self, client: Client) -> None:
        self._left = [_spelled(one) for one in client.said]
        self._of_prompts: dict[int, bytes] = {}

    def __call__(self, prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
        del sampling
        key = hash(prompt)
        if key not in self._of_prompts:
            has_tools = bytes(prompt[:6]) == b"tools:"
            self._of_prompts[key] = self._left.pop(0) if has_tools and self._left else b"Birds"
        said = self._of_prompts[key]
        return said[position] if position < len(said) else END_OF_TEXT


def _spelled(said: str | tuple[str, dict[str, object]]) -> bytes:
    if isinstance(said, str):
        return said.encode()
    call = {"name": said[0], "arguments": said[1]}
    return f"<tool_call>{json.dumps(call)}</tool_call>".encode()


class _Proxy(ThreadingHTTPServer):
    """Passes requests on to a daemon, and keeps them."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = url
        self.requests: list[RecordedRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy

    def do_GET(self) -> None:
        answer = httpx.get(self.server.upstream + self.path)
        self._answer(answer.status_code, answer.headers["content-type"], [answer.content])

    def do_HEAD(self) -> None:
        self._answer(200, "text/plain", [])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding"):
            raise ValueError("a compressed body")
        self.server.requests.append(RecordedRequest(self.path, json.loads(body)))
        url = self.server.upstream + self.path
        head = {"content-type": "application/json"}
        with httpx.stream("POST", url, content=body, headers=head, timeout=None) as answer:  # noqa: S113
            self._answer(answer.status_code, answer.headers["content-type"], answer.iter_raw())

    def _answer(self, status: int, kind: str, pieces: Iterable[bytes]) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def record(client: Client, modules: Path) -> list[RecordedRequest]:
    """Run a client's session; returns its requests.

    Raises:
        CalledProcessError: The client failed.
    """
    shutil.rmtree(_PROJECT, ignore_errors=True)
    project = Path(_PROJECT)
    project.mkdir(parents=True)
    (project / "notes.txt").write_text("Three birds sing.\nThey live in the garden.\n", "utf-8")
    subprocess.run(("git", "init", "-q"), cwd=project, check=True)
    engine = FakeEngine(_Answers(client), model_id=_MODEL, context_tokens=_CONTEXT_TOKENS)
    with tempfile.TemporaryDirectory() as home, RunningDaemon(lambda: engine) as daemon:
        proxy = _Proxy(daemon.url)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        for path, text in client.files.items():
            target = Path(home, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{url}", proxy.url), "utf-8")
        environ = {key: text.replace("{url}", proxy.url) for key, text in client.environ.items()}
        paths = f"{modules / '.bin'}:{os.environ['PATH']}"
        for number, turn in enumerate(_TURNS):
            command = (*(client.later if number else client.first), turn)
            subprocess.run(
                command,
                cwd=project,
                env={"HOME": home, "PATH": paths, "LANG": "C.UTF-8", **environ},
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=CEILING_S,
            )
        proxy.shutdown()
        return proxy.requests


def main() -> None:
    """Record the sessions of all clients, or of those named behind the folders."""
    modules, target, *names = sys.argv[1:]
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        requests = record(client, Path(modules))
        package = json.loads(Path(modules, client.package, "package.json").read_text("utf-8"))
        version = re.sub(r"\s", "", package["version"])
        write_session(Path(target, f"{client.name}.jsonl"), f"{client.package} {version}", requests)


if __name__ == "__main__":
    main()
