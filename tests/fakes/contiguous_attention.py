"""Attention over plain contiguous keys and values of one sequence: the smallest AttentionStep, in float32."""

from __future__ import annotations

import torch

from tgi.server.context import ForwardContext
from tgi.server.models.model import CausalLM


class ContiguousAttention:
    """Remembers every layer's keys and values; each call appends."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []  # as asked for, one per call
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert softcap is None
        assert sinks is None
        assert alibi is None
        self.windows.append(window)
        keys = self._keys[layer] = _append(self._keys.get(layer), key)
        values = self._values[layer] = _append(self._values.get(layer), value)
        group = query.shape[1] // key.shape[1]
        own = torch.arange(keys.shape[0] - query.shape[0], keys.shape[0]).unsqueeze(1)
        seen = torch.arange(keys.shape[0])
        hidden = seen > own
        if window is not None:
            hidden |= seen <= own - window
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float().repeat_interleave(group, 1)) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(group, 1)).to(query.dtype)


@torch.inference_mode()
def prompt_logits(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] float32 of one prompt in one step."""
    context = ForwardContext(ContiguousAttention())
    return model.logits(model.forward(torch.tensor(ids), torch.arange(len(ids)), context))


@torch.inference_mode()
def greedy_ids(model: CausalLM, prompt: list[int], length: int) -> list[int]:
    """The model's own greedy continuation, end-of-text ignored."""
    context = ForwardContext(ContiguousAttention())
    ids, positions, answer = torch.tensor(prompt), torch.arange(len(prompt)), []
    for _ in range(length):
        hidden = model.forward(ids, positions, context)
        ids = model.logits(hidden[-1:]).argmax(-1)
        positions = positions[-1:] + 1
        answer.append(int(ids))
    return answer


def _append(past: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.clone() if past is None else torch.cat((past, new))
