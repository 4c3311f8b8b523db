"""Ports and socket paths: what stands in the way is one clear line."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tgi.errors import StartupError
from tgi.launcher.sockets import LONGEST_SOCKET_PATH, SocketDirectory, check_port, free_master_port


def test_own_directory_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = SocketDirectory(None), SocketDirectory(None)
    assert first.prefix != second.prefix
    directory = first.path(0).parent
    assert directory.stat().st_mode & 0o077 == 0, "others may not connect"
    first.prepare(2)
    first.path(0).touch()
    first.close()
    assert not directory.exists()
    assert second.path(0).parent.is_dir()
    second.close()


def test_stale_sockets_go_before_the_start_and_ours_after_it(tmp_path: Path) -> None:
    sockets = SocketDirectory(str(tmp_path / "s"))
    assert [sockets.path(rank).name for rank in range(2)] == ["s-0", "s-1"]
    for rank in range(2):
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(sockets.path(rank)))
    sockets.prepare(2)
    assert list(tmp_path.iterdir()) == []
    with socket.socket(socket.AF_UNIX) as new:
        new.bind(str(sockets.path(0)))
    sockets.close()
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_running_server_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    sockets = SocketDirectory(str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as running:
        running.bind(str(sockets.path(0)))
        running.listen()
        with pytest.raises(StartupError, match=r"^Another server is using the socket"):
            sockets.prepare(1)
        sockets.close()
        assert sockets.path(0).exists()


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "s-0").write_text("precious")
    sockets = SocketDirectory(str(tmp_path / "s"))
    with pytest.raises(StartupError, match=r"s-0 exists and is no socket"):
        sockets.prepare(1)
    sockets.close()
    assert (tmp_path / "s-0").read_text() == "precious"


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^The directory of the socket .* does not exist"):
        SocketDirectory(str(tmp_path / "missing" / "s")).prepare(1)


@pytest.mark.parametrize("excess", [0, 1])
def test_longest_path(tmp_path: Path, excess: int) -> None:
    prefix = os.path.join(tmp_path, "s")
    prefix += "x" * (LONGEST_SOCKET_PATH - len("-0") - len(prefix) + excess)
    sockets = SocketDirectory(prefix)
    if excess:
        with pytest.raises(StartupError, match=r"has 108 bytes, .* 107\. Give a shorter --shard-uds-path"):
            sockets.prepare(1)
        return
    sockets.prepare(1)
    with socket.socket(socket.AF_UNIX) as longest:
        longest.bind(str(sockets.path(0)))
    sockets.close()


@pytest.mark.parametrize("hostname", ["127.0.0.1", "0.0.0.0"])
def test_busy_port(hostname: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"^Port {port} at {hostname} is in use"):
            check_port(hostname, port)
    check_port(hostname, port)


def test_address_of_another_machine() -> None:
    with pytest.raises(StartupError, match=r"^192\.0\.2\.1 is no address of this machine"):
        check_port("192.0.2.1", 3000)


def test_master_port() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert free_master_port(taken) != taken
    assert free_master_port(taken) == taken
