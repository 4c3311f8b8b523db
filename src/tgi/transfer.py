"""Large files from the hub into its cache, each going on where an earlier download of it ended, in whichever process.

The hub's own client throws away what it has of a file when its process ends. Knows the cache's blobs and its locks;
knows no model, and leaves the links from snapshots to blobs to that client.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TypeVar

log = logging.getLogger(__name__)

FILES_AT_ONCE = 8
BLOCK_BYTES = 1 << 20  # written at once
TRIES = 6  # without a byte in between
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
RETRIED = (408, 429, 500, 502, 503, 504)
# The hub sends larger files over its client's own protocol only.
LARGEST_BYTES = 50_000_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN_ETAG = re.compile(r"[\w-]{8,128}")  # fit to be a file's name

Answer = TypeVar("Answer")
# Makes the bar of all bytes: (total, initial) -> a context with `update(bytes)`.
MakeBar = Callable[[int, int], Any]


class NoRoom(OSError):
    """The disk is too small for what is still to come."""


@dataclass(frozen=True, slots=True)
class Place:
    """A repository's commit on the hub and its folder in the cache."""

    name: str
    commit: str
    cache: Path
    endpoint: str | None
    token: str | None

    @property
    def blobs(self) -> Path:
        return self.cache / self.folder / "blobs"

    @property
    def folder(self) -> str:
        return "models--" + self.name.replace("/", "--")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    url: str
    etag: str  # names the content; of large files its SHA-256
    size: int


def fetch_blobs(place: Place, names: Collection[str], make_bar: MakeBar) -> list[str]:
    """Bring the content of files into the cache's blobs, several at once.

    Returns those that are left to the hub's client: of whose content the hub does not say enough, or that are too
    large. Raises what the client raises, OSError for a full disk (NoRoom before anything is fetched) or content with
    wrong bytes.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        found = dict(zip(names, pool.map(lambda name: _describe(place, name), names), strict=True))
    described = [file for file in found.values() if file is not None]
    left = [name for name, file in found.items() if file is None]
    missing = {file.etag: file for file in described if not (place.blobs / file.etag).exists()}
    if not missing:
        return left
    place.blobs.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in missing.values())
    have = sum(min(_size(_partial(place, file)), file.size) for file in missing.values())
    free = shutil.disk_usage(place.blobs).free
    if total - have > free:
        raise NoRoom(f"{(total - have) / 1e9:.2f} GB are to come, {free / 1e9:.2f} GB are free")
    stop, alone = threading.Event(), threading.Lock()
    with make_bar(total, have) as bar, ThreadPoolExecutor(FILES_AT_ONCE) as pool:

        def advance(count: int) -> None:
            with alone:
                bar.update(count)

        try:
            for _ in pool.map(lambda file: _fetch(place, file, advance, stop), missing.values()):
                pass
        finally:
            stop.set()  # where one has failed, the others need not come to their ends
            pool.shutdown(cancel_futures=True)
    return left


def patiently(call: Callable[[], Answer]) -> Answer:
    """The call's answer; it is made again while the hub says that it is busy."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for tried in range(1, TRIES):
        try:
            return call()
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            response = getattr(error if isinstance(error, HfHubHTTPError) else error.__cause__, "response", None)
            if response is None or response.status_code not in RETRIED:
                raise
            asked = str(response.headers.get("Retry-After", ""))
            _wait(tried, f"The hub answers {response.status_code}", time.sleep, int(asked) if asked.isdecimal() else 0)
    return call()


def _describe(place: Place, name: str) -> RemoteFile | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(place.name, name, revision=place.commit, endpoint=place.endpoint)
    about = patiently(lambda: get_hf_file_metadata(url, token=place.token, endpoint=place.endpoint))
    if about.etag is None or about.size is None or about.size > LARGEST_BYTES or not _PLAIN_ETAG.fullmatch(about.etag):
        return None
    return RemoteFile(name, url, about.etag, about.size)


def _fetch(place: Place, file: RemoteFile, advance: Callable[[int], None], stop: threading.Event) -> None:
    """One file, under the lock that the hub's client takes for it."""
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    blob, partial = place.blobs / file.etag, _partial(place, file)
    lock = place.cache / ".locks" / place.folder / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    headers = {**build_hf_headers(token=place.token), "Accept-Encoding": "identity"}
    with WeakFileLock(lock):
        while not blob.exists():  # another process may have fetched it meanwhile
            resumed = _size(partial) > 0
            with _Growing(partial, file, advance) as growing:
                _receive(growing, headers, stop)
            if growing.have < file.size:
                return  # stopped
            if growing.is_right():
                partial.replace(blob)
                return
            partial.unlink()
            if not resumed:
                raise OSError(f"{file.name} does not have the content that the hub announced")
            # The older part may be the broken one: of a machine that lost its power, or a file system without locks.
            log.warning("%s does not have the content that the hub announced; it is fetched anew", file.name)
            advance(-growing.have)


class _Growing:
    """What has come of a file, hashed as it comes."""

    def __init__(self, path: Path, file: RemoteFile, advance: Callable[[int], None]) -> None:
        self.file = file
        self.have = 0
        self._advance = advance
        self._digest = hashlib.sha256()
        if _size(path) > file.size:
            path.unlink()
        self._opened = path.open("ab+")
        self._opened.seek(0)
        hashlib.file_digest(self._opened, lambda: self._digest)
        self.have = self._opened.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def append(self, block: bytes) -> None:
        self._opened.write(block)
        self._digest.update(block)
        self.have += len(block)
        self._advance(len(block))

    def begin_anew(self) -> None:
        self._opened.truncate(0)
        self._digest = hashlib.sha256()
        self._advance(-self.have)
        self.have = 0

    def is_right(self) -> bool:
        known = _SHA256.fullmatch(self.file.etag) is not None
        return self.have == self.file.size and (not known or self._digest.hexdigest() == self.file.etag)


def _receive(growing: _Growing, headers: Mapping[str, str], stop: threading.Event) -> None:
    """Append what is lacking, over as many connections as it takes. Raises what the client raises."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of the transport, whichever one the hub's client uses
    )

    file, tried = growing.file, 0
    while growing.have < file.size and not stop.is_set():
        before = growing.have
        failure: Exception = OSError("the connection ended")
        try:
            for block in _blocks(growing, headers):
                growing.append(block)
                if stop.is_set() or growing.have > file.size:
                    return
        except HfHubHTTPError:
            raise  # `_blocks` has waited as long as it makes sense
        except HTTPError as error:
            failure = error
        if growing.have < file.size:
            tried = tried + 1 if growing.have == before else 1
            if tried >= TRIES:
                raise failure
            reason = f"{file.name} has come to {growing.have} of {file.size} bytes: {failure or type(failure).__name__}"
            _wait(tried, reason, stop.wait)


def _blocks(growing: _Growing, headers: Mapping[str, str]) -> Iterator[bytes]:
    """What one connection brings, from where `growing` ends; if the server cannot do that, from the beginning."""
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    have = growing.have
    with http_stream_backoff(
        "GET",
        growing.file.url,
        headers={**headers, "Range": f"bytes={have}-"} if have else headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        max_retries=TRIES - 1,
        base_wait_time=FIRST_WAIT_S,
        max_wait_time=LONGEST_WAIT_S,
        retry_on_exceptions=(),
        retry_on_status_codes=RETRIED,
    ) as response:
        hf_raise_for_status(response)
        if have and response.status_code != HTTPStatus.PARTIAL_CONTENT:
            growing.begin_anew()
        yield from response.iter_bytes(BLOCK_BYTES)


def _wait(tried: int, reason: str, sleep: Callable[[float], object], least_s: int = 0) -> None:
    seconds = max(least_s, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tried - 1)))
    log.warning("%s; trying again in %g s", reason, seconds)
    sleep(seconds)


def _partial(place: Place, file: RemoteFile) -> Path:
    return place.blobs / f"{file.etag}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
