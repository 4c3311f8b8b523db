"""Files appear in a model's folder all at once, or not at all. Knows no format."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tgi.errors import StartupError

_PREFIX = ".preparing-"


@contextmanager
def staged(folder: Path, first: Sequence[str] = ()) -> Iterator[Path]:
    """A folder inside `folder` to write into; what is there in the end moves up, the files named `first` before others.

    Whoever looks meanwhile must not take half a model for a whole one: an index goes first, and names what is not there
    yet. After an exception nothing is left behind. Raises StartupError where the disk is full or may not be written.
    """
    try:
        _sweep(folder)
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    except OSError as error:
        raise StartupError(f"{folder} cannot be written ({error}); copy the model to where it can be") from error
    in_use = _take(work)
    try:
        yield work
        for file in sorted(work.iterdir(), key=lambda file: (file.name not in first, file.name)):
            file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"Writing into {folder} failed ({error}); make room and run it again") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if in_use is not None:
            os.close(in_use)


def _sweep(folder: Path) -> None:
    """Take away what processes that were killed have left: half a model may be large."""
    for left in folder.glob(f"{_PREFIX}*"):
        unused = _take(left)
        if unused is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(unused)


def _take(work: Path) -> int | None:
    """A handle that keeps others out while it is open; None where somebody is in, or the file system has no locks."""
    try:
        handle = os.open(work, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
