"""The reverse proxies of the security page pass streams on, piece by piece.

They are run where they are installed, and passed over elsewhere.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine, spelled
from support.engines.step_gate import StepGate, at_decode
from support.programs.installed_programs import needs_programs, path_of
from support.programs.shown_sessions import fenced_blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating" / "security.md"
NAME = "llm.example.org"
MAIN = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{server}
}}
"""


def example(proxy: str) -> str:
    """The block of the page that is marked as this proxy's."""
    return next(
        block
        for _, before, block in fenced_blocks(PAGE, "nginx", "text")
        if before.endswith(f"<!-- test: {proxy} -->\n")
    )


def substituted(text: str, *pairs: tuple[str, str]) -> str:
    """The example with this test's addresses; each old one has to stand in it."""
    for old, new in pairs:
        assert old in text, f"the page's example has no {old}"
        text = text.replace(old, new)
    return text


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """A proxy that takes connections."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(
            lambda: process.poll() is not None or takes_connections(port),
            "the proxy takes connections",
        )
        assert process.poll() is None, process.communicate()[0]
        yield
    finally:
        process.terminate()
        process.communicate(timeout=CEILING_S)


def takes_connections(port: int) -> bool:
    """Return whether a server listens with a certificate for the name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CEILING_S) as connection:
            context.wrap_socket(connection, server_hostname=NAME).close()
    except OSError:
        return False
    return True


@contextmanager
def nginx(address: str, folder: Path) -> Iterator[int]:
    """Nginx with the page's server block and a certificate of its own."""
    port = free_port()
    certificate = ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"]
    subprocess.run(
        [path_of("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}", *certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server = substituted(
        example("nginx"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/llm.example.org.pem", f"{folder}/cert.pem"),
        ("/etc/ssl/llm.example.org.key", f"{folder}/key.pem"),
        ("127.0.0.1:8080", address),
    )
    config = folder / "nginx.conf"
    config.write_text(MAIN.format(folder=folder, server=server))
    with running([path_of("nginx"), "-p", str(folder), "-c", str(config)], port):
        yield port


@contextmanager
def caddy(address: str, folder: Path) -> Iterator[int]:
    """Caddy with the page's site block and a certificate of its own."""
    port = free_port()
    site = substituted(
        example("caddy"),
        (f"{NAME} {{", f"https://{NAME}:{port} {{\n    bind 127.0.0.1\n    tls internal"),
        ("127.0.0.1:8080", address),
    )
    config = folder / "Caddyfile"
    options = f"admin off\nskip_install_trust\nauto_https disable_redirects\nstorage file_system {folder}/data\n"
    config.write_text(f"{{\n{options}}}\n{site}")
    with running(
        [path_of("caddy"), "run", "--config", str(config), "--adapter", "caddyfile"], port
    ):
        yield port


@pytest.mark.parametrize(
    "proxy",
    [
        pytest.param(nginx, marks=needs_programs("nginx", "openssl"), id="nginx"),
        pytest.param(caddy, marks=needs_programs("caddy"), id="caddy"),
    ],
)
def test_a_stream_arrives_piece_by_piece(proxy: object, tmp_path: Path) -> None:
    """A client behind the page's proxy has the first piece while the second is not made yet."""
    assert callable(proxy)
    gate = StepGate(at_decode)
    flags = {"http.allowed_hosts": [NAME]}
    body = {
        "model": FakeEngine().model.model_id,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }
    with (
        RunningDaemon(lambda: FakeEngine(spelled("abc"), before_step=gate), flags) as daemon,
        gate,
        proxy(urlsplit(daemon.url).netloc, tmp_path) as port,
        httpx.Client(verify=False, timeout=CEILING_S) as client,  # noqa: S501 - a certificate of the test
        client.stream(
            "POST",
            f"https://127.0.0.1:{port}/v1/chat/completions",
            json=body,
            headers={"Host": NAME},
            extensions={"sni_hostname": NAME},
        ) as answer,
    ):
        assert answer.status_code == 200
        pieces = answer.iter_text()
        early = ""
        while '"a"' not in early:
            early += next(pieces)
        gate.open()
        rest = "".join(pieces)

    assert '"b"' not in early
    assert rest.endswith("data: [DONE]\n\n")
