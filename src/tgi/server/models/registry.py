"""model_type -> the module that has its architecture. Imports only the one that is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from tgi.errors import StartupError
from tgi.server.layers.source import open_source
from tgi.server.models.model import CausalLM

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig
    from tgi.server.distributed.group import Group
    from tgi.server.weights.checkpoint import Checkpoint

# A module beside this one has `Model` and `PACKED`. Model types that share a module are aliases.
MODULES = {
    "llama": "llama",
    "mistral": "llama",
    "smollm": "llama",
    "yi": "llama",
}


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    longest: int | None = None,
) -> CausalLM:
    """The model with this rank's weights, ready to run. The checkpoint may be closed afterwards.

    `longest`: tokens that a request may span, where rope scaling depends on it; max_position_embeddings if not given.
    Raises StartupError naming what is not supported or what the checkpoint lacks.
    """
    module_name = MODULES.get(config.model_type)
    if module_name is None:
        raise StartupError(
            f"model_type {config.model_type!r} is not supported; supported are {', '.join(sorted(MODULES))}"
        )
    module = import_module(f"tgi.server.models.{module_name}")
    source = open_source(
        checkpoint,
        quant_method=config.quant_method,
        dtype=dtype,
        device=device,
        group=group,
        packed=module.PACKED,
    )
    with torch.inference_mode():
        return module.Model(config, source, longest)
