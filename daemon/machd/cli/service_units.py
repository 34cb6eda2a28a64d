"""machd as a systemd service: the unit files, for the system and for one user.

The reason for each setting of the units stands beside it, for the operator that changes it.
The shipped files under ``systemd/`` are these texts for an installation in ``/usr/bin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from machd.settings.texts import ip_address, is_loopback

CONFIG_PATH = Path("/etc/machd/machd.toml")

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Installation:
    """The program that a unit runs.

    Attributes:
        command: The words that start machd; the first one is an absolute path.
        config_path: The settings file; None to look in the usual places.
        host: ``server.host``.
        port: ``server.port``.
    """

    command: tuple[str, ...]
    config_path: Path | None = CONFIG_PATH
    host: str = "127.0.0.1"
    port: int = 8080

    @property
    def serve_words(self) -> tuple[str, ...]:
        """The daemon's whole command line."""
        config = () if self.config_path is None else ("--config", str(self.config_path))
        return (*self.command, "serve", *config)

    @property
    def address(self) -> str | None:
        """Return what a socket unit can listen on: an IP address with its port; None for another host."""
        address = ip_address(self.host)
        if address is None or not self.port:
            return None
        host = "127.0.0.1" if self.host == "localhost" else self.host.strip("[]")
        return f"[{host}]:{self.port}" if address.version == 6 else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine is served, as far as that shows without a name server."""
        return self.host.startswith("unix:") or is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file for a service manager; ``name`` is relative to its folder of units."""

    name: str
    text: str


def system_units(installation: Installation) -> tuple[UnitFile, ...]:
    """The service of the whole machine, and its socket where it can have one."""
    hardening = _hardening(_SYSTEM_HARDENING, installation)
    parts = (_SYSTEM_PLACES, _LIMITS, hardening, "[Install]\nWantedBy=multi-user.target\n")
    return _units(installation, parts, is_system=True)


def user_units(installation: Installation) -> tuple[UnitFile, ...]:
    """The service of one user, and its socket where it can have one."""
    parts = (_USER_PLACES, _LIMITS, _USER_HARDENING, "[Install]\nWantedBy=default.target\n")
    return _units(installation, parts, is_system=False)


def _units(
    installation: Installation, parts: tuple[str, ...], *, is_system: bool
) -> tuple[UnitFile, ...]:
    unit = _unit_section(installation, is_system=is_system)
    service = "\n".join((unit, _service_section(installation), *parts))
    return (UnitFile("machd.service", service), *_socket_units(installation))


def cuda_drop_in() -> UnitFile:
    """Return the drop-in that lets the system's service reach NVIDIA GPUs."""
    return UnitFile("machd.service.d/cuda.conf", _CUDA)


def _unit_section(installation: Installation, *, is_system: bool) -> str:
    after = "After=network-online.target\nWants=network-online.target\n"
    return (
        "[Unit]\n"
        "Description=machd, an inference daemon for MLX\n"
        + (after if is_system and not installation.is_loopback else "")
        + "# Five failures in ten minutes are no accident: stop trying.\n"
        "StartLimitIntervalSec=10min\n"
        "StartLimitBurst=5\n"
    )


def _service_section(installation: Installation) -> str:
    sockets = retried = ""
    if installation.address:
        sockets = (
            "# The socket stays open while the daemon restarts: who connects meanwhile waits.\n"
            "Sockets=machd.socket\n"
        )
        retried = (
            "# Whoever connects to the socket starts it all the same, until the limit above fails"
            " both:\n"
            "# then `reset-failed machd.service machd.socket`, and start them.\n"
        )
    executable = _words(installation.command)
    return f"""\
[Service]
Type=notify
NotifyAccess=main
ExecStart={_words(installation.serve_words)}
# Returns once the new settings are in force, or fails and says why. Whoever can open the socket
# needs no token; it lies in a directory of the daemon's own.
Environment=LME_ADMIN_LISTEN=unix:%t/machd/admin.sock
ExecReload={executable} ctl reload --address ${{LME_ADMIN_LISTEN}}
{sockets}\
# Signs of life come while the engine's heartbeat is younger than half of this, which is more than
# engine.stall_timeout_s: the daemon itself replaces an engine process that hangs so long.
WatchdogSec=11min
# Both are extended by the daemon itself: while a model loads, and for limits.drain_timeout_s.
TimeoutStartSec=3min
TimeoutStopSec=90s
Restart=on-failure
RestartSec=2s
# Bad settings, a model that is not there, an address that is taken: trying again changes nothing.
{retried}\
RestartPreventExitStatus=2
KillMode=mixed
"""


def _socket_units(installation: Installation) -> tuple[UnitFile, ...]:
    if installation.address is None:
        return ()
    text = f"""\
[Unit]
Description=Where machd answers its clients

[Socket]
# This address holds, whatever server.host and server.port say.
ListenStream={installation.address}
FileDescriptorName=public
Backlog={_BACKLOG}

[Install]
WantedBy=sockets.target
"""
    return (UnitFile("machd.socket", text),)


def _hardening(text: str, installation: Installation) -> str:
    if installation.is_loopback:
        return text
    return "".join(line for line in text.splitlines(keepends=True) if "IPAddress" not in line)


def _words(words: tuple[str, ...]) -> str:
    """A command line as systemd reads it, which expands no variables in the first word."""
    executable, *arguments = words
    return " ".join((_quoted(executable), *(_quoted(one.replace("$", "$$")) for one in arguments)))


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    is_plain = not any(one.isspace() or one in "\\'\";" for one in word)
    return escaped if is_plain else f'"{escaped}"'


_SYSTEM_PLACES = """\
# A user that exists while the service runs. Models can lie in /var/lib/machd or any other place
# that every user can read, but not below /home or /root, which it does not see.
DynamicUser=yes
UMask=0077
StateDirectory=machd
StateDirectoryMode=0700
CacheDirectory=machd
CacheDirectoryMode=0700
RuntimeDirectory=machd
RuntimeDirectoryMode=0700
ConfigurationDirectory=machd
# Downloaded models, and in scratch/ (0700) what MLX compiles at run time: machd makes that its
# TMPDIR, because a directory that is mounted noexec, or that others can write to, will not do.
# A dynamic user's directories lie in private/; the name without it is a symbolic link.
Environment=XDG_CACHE_HOME=%C/private HF_HOME=%C/private/machd/huggingface
# Optional: /etc/credstore/machd.api-keys, one name:key a line; clients then need one of the keys.
LoadCredential=api-keys:machd.api-keys
"""

_USER_PLACES = """\
UMask=0077
RuntimeDirectory=machd
RuntimeDirectoryMode=0700
# It is also where a machd that this user runs by hand keeps its token: a stop must not remove it.
RuntimeDirectoryPreserve=yes
"""

_LIMITS = """\
LimitNOFILE=65536
# A core would hold prompts.
LimitCORE=0
# An engine process that the kernel kills for memory is replaced by the daemon.
OOMPolicy=continue
"""

_SYSTEM_HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateMounts=yes
PrivateTmp=yes
PrivateUsers=yes
# Hides GPUs: see machd.service.d/cuda.conf.
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
# Not pid: machd reads /proc/meminfo to know what fits.
ProcSubset=all
KeyringMode=private
LockPersonality=yes
MemoryDenyWriteExecute=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
# Without these two lines other machines can be served, and models fetched (model.offline = false).
IPAddressDeny=any
IPAddressAllow=localhost
"""

_USER_HARDENING = """\
# What a user's own service manager can enforce without privileges.
NoNewPrivileges=yes
KeyringMode=private
LockPersonality=yes
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""

_CUDA = """\
# For machd with the cuda12 or cuda13 extra: copy it to /etc/systemd/system/machd.service.d/.
# The driver's modules have to be loaded before; nvidia-persistenced sees to that.
[Service]
PrivateDevices=no
DevicePolicy=closed
DeviceAllow=char-nvidiactl rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-caps rw
DeviceAllow=char-nvidia-uvm rw
# The driver places its threads and memory near the device.
SystemCallFilter=@resources
# Kernels that MLX compiled are kept over restarts.
Environment=MLX_PTX_CACHE_DIR=%C/private/machd/ptx
"""
