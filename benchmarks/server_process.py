"""A whole server as a child: launcher, router and shard on a free port. For benchmarks and tests of the real one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import Child, free_port, running

READY = "Connected"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    launcher: Child


def program(name: str) -> str:
    """The console command of this environment."""
    return str(Path(sys.executable).with_name(name))


@contextlib.contextmanager
def serving(options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve what `options` say, or the bundled model, until the block ends."""
    port = free_port()
    command = [program("text-generation-launcher"), "--hostname", "127.0.0.1", "--port", str(port), *options]
    with running(command, READY, environment) as launcher:
        yield Server(f"http://127.0.0.1:{port}", launcher)
