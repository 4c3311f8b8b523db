"""model_type -> the module that has its architecture. Imports only the one that is asked for."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from tgi.errors import StartupError
from tgi.server.layers.decoder import TEXT_PART
from tgi.server.layers.source import Source, open_source
from tgi.server.models.model import CausalLM

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig
    from tgi.server.distributed.group import Group
    from tgi.server.weights.checkpoint import Checkpoint

# A module beside this one has `Model` and `PACKED`. Model types that share a module are aliases.
MODULES = {
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "bloom": "bloom",
    "cohere": "cohere",
    "cohere2": "cohere",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "falcon": "falcon",
    "falcon_mamba": "mamba",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "gptj": "gptj",
    "granite": "llama",
    "kimi_k2": "deepseek",
    "llama": "llama",
    "mamba": "mamba",
    "mistral": "llama",
    "mixtral": "mixtral",
    "mpt": "mpt",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "opt": "opt",
    "phi": "phi",
    "phi-msft": "phi",
    "phi3": "llama",
    "phimoe": "mixtral",
    "qwen2": "llama",
    "qwen2_moe": "qwen_moe",
    "qwen3": "llama",
    "qwen3_moe": "qwen_moe",
    "smollm": "llama",
    "smollm3": "llama",
    "stablelm": "stablelm",
    "stablelm_epoch": "stablelm",
    "starcoder2": "starcoder2",
    "yi": "llama",
}


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    longest: int | None = None,
    plugins: Path | None = None,
    path: Path | None = None,
) -> CausalLM:
    """The model with this rank's weights, ready to run. The checkpoint may be closed afterwards.

    `longest`: tokens that a request may span, where rope scaling depends on it; max_position_embeddings if not given.
    `plugins`: a folder whose `<model_type>.py` comes before the modules here.
    `path`: the model's files, from which transformers loads what has no module; without it that is not supported.
    Raises StartupError naming what is not supported or what the checkpoint lacks.
    """
    module = _plugin(config.model_type, plugins) or _own(config.text_type)
    if module is None and path is None:
        known = ", ".join(sorted(MODULES))
        raise StartupError(f"model_type {config.model_type!r} is not supported; supported are {known}")
    source = open_source(
        checkpoint,
        quant_method=config.quant_method,
        dtype=dtype,
        device=device,
        group=group,
        packed={} if module is None else module.PACKED,
    )
    with torch.inference_mode():
        if module is not None:
            return module.Model(replace(config, model_type=config.text_type), _text_part(source), longest)
        assert path is not None
        # Imported here: transformers' modelling code takes seconds, which no other start need spend.
        from tgi.server.models.transformers_model import load_through_transformers

        return load_through_transformers(config, source, path, longest)


def has_module(config: ModelConfig, plugins: Path | None = None) -> bool:
    """Is there a file for it? Else transformers loads it, and looks after its tensors itself."""
    return config.text_type in MODULES or _plugin_file(config.model_type, plugins) is not None


def _text_part(source: Source) -> Source:
    """Where the files of a model of text and images have the decoder and its head."""
    names = source.checkpoint.names()
    return source.at(TEXT_PART) if any(name.startswith(f"{TEXT_PART}.") for name in names) else source


def _own(model_type: str) -> ModuleType | None:
    name = MODULES.get(model_type)
    return None if name is None else import_module(f"tgi.server.models.{name}")


def _plugin_file(model_type: str, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise StartupError(f"--model-plugins {folder} is no folder")
    file = folder / f"{model_type}.py"
    # A model_type is the checkpoint's word: it names a file in this folder, and none elsewhere.
    return file if file.parent == folder and file.is_file() else None


def _plugin(model_type: str, folder: Path | None) -> ModuleType | None:
    """The operator's own module for `model_type`, None where there is none."""
    file = _plugin_file(model_type, folder)
    if file is None:
        return None
    spec = importlib.util.spec_from_file_location(f"tgi_model_plugin_{model_type}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise StartupError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    if lacking := [name for name in ("Model", "PACKED") if not hasattr(module, name)]:
        raise StartupError(f"{file} has no {' and no '.join(lacking)}: it is no model (docs/how-to/add-a-model.md)")
    return module
