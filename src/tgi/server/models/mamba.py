"""Mamba and Falcon-Mamba: selective state spaces in the place of attention. Keep a state for each row and no KV cache.

Falcon-Mamba: norms over what steers the state. Mamba's first files have settings and names of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError
from tgi.server.context import CacheShape, ForwardContext
from tgi.server.layers.decoder import head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.recurrent import RowStates, SelectiveStateSpace
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED: Mapping[str, tuple[str, ...]] = {}
RANK = ("time_step_rank", "dt_rank")


class Mamba:
    can_chunk = True
    requires_padding = False
    scores_prompts = True

    def __init__(self, config: ModelConfig, source: Source, longest: int | None = None) -> None:
        if source.group.world_size > 1:
            raise StartupError("Mamba runs on one shard: start with --num-shard 1")
        fields = config.fields
        fields.only("layer", "Mamba1")
        fields.only("rms_norm", True)
        body = source.at("backbone")
        hidden_size = config.hidden_size
        eps = fields.number("layer_norm_epsilon", default=1e-5)
        rank = fields.get(*RANK)
        norm_eps = fields.number("mixer_rms_eps", default=1e-6) if config.model_type == "falcon_mamba" else None
        first = body.at("embedding")
        place = first if first.has("weight") else body.at("embeddings")
        self.embedding = Embedding(place, config.vocab_size, hidden_size)
        places = [body.at(f"layers.{index}") for index in range(config.num_layers)]
        self.norms = [RMSNorm(place.at("norm"), hidden_size, eps) for place in places]
        self.layers = [
            SelectiveStateSpace(
                place.at("mixer"),
                hidden_size=hidden_size,
                inner_size=fields.count("intermediate_size", default=fields.count("expand", default=2) * hidden_size),
                state_size=fields.count("state_size", "d_state", default=16),
                step_rank=math.ceil(hidden_size / 16) if rank in (None, "auto") else fields.count(*RANK),
                kernel=fields.count("conv_kernel", "d_conv", default=4),
                bias=fields.flag("use_bias"),
                convolution_bias=fields.flag("use_conv_bias", default=True),
                activation=config.hidden_act,
                norm_eps=norm_eps,
            )
            for place in places
        ]
        self.norm = RMSNorm(body.at("norm_f"), hidden_size, eps)
        self.head = head_of(config, source, self.embedding)
        self._states = RowStates([shape for layer in self.layers for shape in layer.shapes], source.device)
        self.cache_shape = CacheShape(0, 1, 1, 1, 1, row_bytes=self._states.row_bytes)
        self.vocab_size = config.vocab_size
        self.weight_bytes = source.kept_bytes

    def allocate(self, num_rows: int) -> None:
        self._states.allocate(num_rows)

    def begin(self, row: int, given: npt.NDArray[np.uint32]) -> None:
        self._states.begin(row, given)

    def forget(self, row: int) -> None:
        self._states.forget(row)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        assert context.rows is not None
        step = self._states.plan(context.rows, input_ids)
        residual = self.embedding(step.ids).float()
        update, states = None, self._states.tensors
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            hidden = norm(residual) if update is None else norm.add(update, residual)
            update = layer(hidden, step.groups, states[2 * index : 2 * index + 2])
        hidden = self.norm(residual) if update is None else self.norm.add(update, residual)
        self._states.end(step)
        return hidden if step.kept is None else hidden.index_select(0, step.kept)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self.head(hidden)


Model = Mamba
