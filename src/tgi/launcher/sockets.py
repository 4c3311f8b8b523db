"""Ports and socket paths, checked before anything starts, so that a clash is one clear line and not a late crash."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from tgi.errors import StartupError
from tgi.shard_client.finished import finished_path

# sockaddr_un holds 108 bytes, the last one a zero.
LONGEST_SOCKET_PATH = 107


class SocketDirectory:
    """Where the shards' sockets lie: the prefix that the user gave, or a new directory that goes when we go."""

    def __init__(self, prefix: str | None) -> None:
        self._directory = None if prefix else tempfile.mkdtemp(prefix="tgi-")
        self.prefix = prefix or os.path.join(self._directory or "", "shard")
        self._ours: set[Path] = set()

    def path(self, rank: int) -> Path:
        return Path(f"{self.prefix}-{rank}")

    def prepare(self, num_shard: int) -> None:
        """Remove what an earlier server left. Raises StartupError when a path cannot be used."""
        for path in [self.path(rank) for rank in range(num_shard)]:
            _prepare(path)
            finished_path(path).unlink(missing_ok=True)
            self._ours |= {path, finished_path(path)}

    def remove(self) -> None:
        """Remove the sockets that were prepared, and what stands beside them: whoever listened there has ended."""
        for path in self._ours:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """The same, and the directory if it is ours."""
        self.remove()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def check_port(hostname: str, port: int) -> None:
    """Raises StartupError, saying what to do, when nobody could listen at `port`. `hostname` is an IP address."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((hostname, port))
            probe.listen(1)
        except OSError as error:
            raise StartupError(_port_trouble(hostname, port, error)) from None


def free_master_port(port: int) -> int:
    """`port` if it can be bound on this host, else one that can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            probe.bind(("", 0))
        return probe.getsockname()[1]


def _port_trouble(hostname: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} at {hostname} is in use. Stop the program that holds it, or choose another --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} needs privileges that this user lacks. Choose a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{hostname} is no address of this machine. Check --hostname (0.0.0.0 listens at all addresses)"
    return f"Cannot listen at port {port} of {hostname}: {error.strerror}"


def _prepare(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise StartupError(
            f"The socket path {path} has {length} bytes, the system allows {LONGEST_SOCKET_PATH}. "
            "Give a shorter --shard-uds-path (or TMPDIR)"
        )
    if not path.parent.is_dir():
        raise StartupError(f"The directory of the socket {path} does not exist. Make it, or change --shard-uds-path")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StartupError(f"No permission to make the socket {path}. Change --shard-uds-path")
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StartupError(f"{path} exists and is no socket. Remove it, or change --shard-uds-path")
    if _somebody_listens(path):
        raise StartupError(f"Another server is using the socket {path}. Stop it, or change --shard-uds-path")
    path.unlink(missing_ok=True)


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            # A full backlog (EAGAIN) is somebody too.
            return error.errno in (errno.EAGAIN, errno.EINPROGRESS)
        return True
