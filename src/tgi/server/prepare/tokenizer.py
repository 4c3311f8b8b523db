"""A model without tokenizer.json gets one, made by transformers from the files that it has. Runs no code of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tgi.errors import StartupError
from tgi.server.prepare.staging import staged


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer.json into the folder. Raises StartupError naming why that cannot be done."""
    backend = _load_backend(folder)
    with staged(folder) as work:
        backend.save(str(work / "tokenizer.json"))


def _load_backend(folder: Path) -> Any:
    from transformers import AutoTokenizer  # here: it takes seconds, and most models need none of it

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a file of a stranger makes the library raise
        message = " ".join(str(error).split()) or type(error).__name__
        hint = next((f"; install {name}" for name in ("sentencepiece", "tiktoken") if name in message.lower()), "")
        raise StartupError(
            f"{folder} has no tokenizer.json, and none can be made of its other files ({message[:200]}){hint or '.'} "
            "Or save the tokenizer with transformers' save_pretrained, as a fast one, into this folder"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StartupError(
            f"{folder} has no tokenizer.json, and its {type(tokenizer).__name__} has no fast form to make one of. "
            "Choose a model that has one"
        )
    return backend
