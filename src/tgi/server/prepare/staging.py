"""Files appear in a model's folder all at once, or not at all. Knows no format."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tgi.errors import StartupError


@contextmanager
def staged(folder: Path, first: Sequence[str] = ()) -> Iterator[Path]:
    """A folder inside `folder` to write into; what is there in the end moves up, the files named `first` before others.

    Whoever looks meanwhile must not take half a model for a whole one: an index goes first, and names what is not there
    yet. After an exception nothing is left behind. Raises StartupError where the disk is full or may not be written.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=".preparing-", dir=folder))
    except OSError as error:
        raise StartupError(f"{folder} cannot be written ({error}); copy the model to where it can be") from error
    try:
        yield work
        for file in sorted(work.iterdir(), key=lambda file: (file.name not in first, file.name)):
            file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"Writing into {folder} failed ({error}); make room and run it again") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
