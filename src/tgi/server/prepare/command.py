"""download-weights: fetch a model, then do what its files need before they can be served. Once; a second run finds it.

Knows the order of the steps; each step is a module beside this one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tgi import hub
from tgi.errors import StartupError
from tgi.model_files import Need, needs

log = logging.getLogger(__name__)


def prepare(
    model_id: str,
    revision: str | None = None,
    *,
    convert: bool = False,
    merge: bool = False,
    source: Mapping[str, str] | None = None,
    chain: tuple[str, ...] = (),
) -> Path:
    """Where the model lies, ready to be served; an adapter's own folder where `merge` does not ask for more.

    `convert`: pickled weights may be read. `chain`: adapters whose base this is. Raises StartupError, one line.
    """
    if model_id in chain:
        raise StartupError(f"The adapters {' -> '.join((*chain, model_id))} name each other as base. Check --model-id")
    folder = hub.download(model_id, revision, source, pickles=convert)
    undone = needs(folder)
    if Need.MERGE in undone:
        base = _base_of(folder, convert, merge, source, (*chain, model_id))
        if not merge:
            return folder
        from tgi.server.prepare.adapter import merge_adapter

        log.info("Merging the adapter %s into %s", model_id, base)
        merge_adapter(folder, base)
    if Need.CONVERT in undone:
        if not convert:
            raise StartupError(
                f"The model {model_id} has its weights only as pickled files, which are converted when you allow it "
                "with --trust-remote-code or --auto-convert"
            )
        from tgi.server.prepare.pickles import convert_pickles

        log.info("Converting the weights of %s to safetensors", model_id)
        convert_pickles(folder)
    if Need.TOKENIZER in needs(folder):
        from tgi.server.prepare.tokenizer import make_tokenizer

        log.info("Making a tokenizer.json for %s", model_id)
        make_tokenizer(folder)
    return hub.locate(model_id, revision, source)


def _base_of(
    folder: Path, convert: bool, merge: bool, source: Mapping[str, str] | None, chain: tuple[str, ...]
) -> Path:
    from tgi.server.prepare.adapter import read_adapter

    config = read_adapter(folder)
    try:
        return prepare(config.base, config.base_revision, convert=convert, merge=merge, source=source, chain=chain)
    except StartupError as error:
        raise StartupError(f"The base of the adapter {chain[-1]}: {error}") from error
