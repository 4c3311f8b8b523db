"""How many rows a shard has finished, told by a file beside its socket. It can be read when the shard has been killed:
answers of Health, which come once a second, leave out what finished just before."""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path

from tgi.errors import StartupError

_COUNT = struct.Struct("<Q")


def finished_path(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.finished")


class FinishedFile:
    """The shard's side."""

    def __init__(self, socket: Path) -> None:
        """Raises StartupError where the file cannot be made."""
        self._path = finished_path(socket)
        try:
            self._path.unlink(missing_ok=True)
            with self._path.open("x+b") as file:
                file.truncate(_COUNT.size)
                self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError as error:
            raise StartupError(f"Cannot make {self._path}: {error.strerror}; choose another --uds-path") from error

    def write(self, count: int) -> None:
        _COUNT.pack_into(self._memory, 0, count)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def read_finished(socket: Path) -> int:
    """0 where there is no file (yet)."""
    with contextlib.suppress(OSError, struct.error):
        return int(_COUNT.unpack(finished_path(socket).read_bytes())[0])
    return 0
