"""All logits of some sequences, read in two ragged steps over a paged cache: a model without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi.server.attention.backend import AttentionBackend, AttentionInputs
from tgi.server.context import ForwardContext
from tgi.server.models.model import CausalLM

CPU = torch.device("cpu")


@torch.inference_mode()
def paged_logits(
    model: CausalLM,
    backend: AttentionBackend,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """[tokens, vocab] float32 of each sequence. The second step reads what the first has written."""
    size, shape = backend.block_size, model.cache_shape
    wide = -(-max(map(len, sequences)) // size)
    tables = torch.arange(1, 1 + len(sequences) * wide, dtype=torch.int32, device=device).view(-1, wide)
    cache = backend.make_cache(
        1 + tables.numel(),
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        device,
        shape.value_dim,
    )
    cuts = [(0, len(ids) // 3) for ids in sequences], [(len(ids) // 3, len(ids)) for ids in sequences]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for spans in cuts:
        lens = torch.tensor([end - begin for begin, end in spans])
        positions = torch.cat([torch.arange(begin, end) for begin, end in spans])
        rows = torch.arange(len(spans)).repeat_interleave(lens)
        slots = tables.cpu()[rows, positions // size].long() * size + positions % size
        inputs = AttentionInputs(
            query_lens=lens.tolist(),
            context_lens=[end for _, end in spans],
            cu_seqlens_q=torch.cat((torch.zeros(1), lens.cumsum(0))).int().to(device),
            context_lens_device=torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
            block_tables=tables,
            slots=slots.to(device),
        )
        ids = torch.tensor(
            [token for (begin, end), own in zip(spans, sequences, strict=True) for token in own[begin:end]]
        )
        step = backend.plan(inputs, cache, shape.num_heads)
        logits = model.logits(model.forward(ids.to(device), positions.to(device), ForwardContext(step))).cpu()
        for own, part in zip(parts, logits.split(lens.tolist()), strict=True):
            own.append(part)
    return [torch.cat(own) for own in parts]
