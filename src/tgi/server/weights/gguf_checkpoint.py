"""Tensors of a GGUF file under the names, in the row order and with the offsets of the model's safetensors files.

Knows the conventions of the format, not its blocks (`gguf_blocks.py`) nor what a model does with a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from tgi.errors import StartupError
from tgi.gguf_file import BadGguf, GgufFile, GgufTensor
from tgi.server.weights.gguf_blocks import BlockType, block_type, dequantize
from tgi.server.weights.region import Region, bounds_of, check_shape, missing

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma norms the output of a sublayer too, and names the norms for where they stand.
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Where an architecture's file and its safetensors agree on a name that others spell differently.
OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Architectures whose converter adds one to the weights of norms, which the model would otherwise do in each step.
SHIFTED_NORMS = frozenset({"gemma", "gemma2", "gemma3"})
# Read with the configuration, not with the weights.
SETTINGS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
# Architectures whose converter reorders query and key rows, for a rotation of neighbours instead of halves.
PERMUTED = frozenset({"llama"})
BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")
DROP_PAGES_AFTER = 64 << 20  # bytes read


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = GgufFile(path)
        except BadGguf as error:
            raise StartupError(str(error)) from error
        self._architecture = str(self._file.get("general.architecture"))
        self._tensors = {
            checkpoint_name(name, self._architecture): tensor
            for name, tensor in self._file.tensors.items()
            if name not in SETTINGS
        }
        self._unread = DROP_PAGES_AFTER
        self._check_overlaps()

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self._tensors:
            raise missing(self.path, name)
        tensor = self._tensors[name]
        check_shape(self.path, name, tensor.shape, shape)
        blocks = self._blocks(tensor)
        bounds = bounds_of(shape, region)
        sizes = [stop - start for start, stop in bounds]
        # A vector is a matrix of one column, so that its elements can be reordered as rows are.
        *outer, (first, last) = bounds if len(shape) > 1 else (*bounds, (0, 1))
        # Whole blocks that cover the columns asked for: [..., bytes].
        from_block, to_block = first // blocks.elements, -(-last // blocks.elements)
        rows = self._rows(name, tensor, blocks, outer)
        raw = torch.from_numpy(rows[..., from_block * blocks.bytes : to_block * blocks.bytes].copy())
        self._count(raw.numel())
        values = dequantize(blocks, raw.view(-1, blocks.bytes)).view(*raw.shape[:-1], -1)
        start = first - from_block * blocks.elements
        values = values[..., start : start + last - first].reshape(sizes)
        return values - 1 if self._has_shift(name) else values

    def close(self) -> None:
        self._tensors = {}
        self._file.drop_pages()

    def _blocks(self, tensor: GgufTensor) -> BlockType:
        blocks = block_type(tensor.ggml_type)
        if blocks is None:
            raise StartupError(
                f"{self.path}: tensor {tensor.name} has block type {tensor.ggml_type}, which is not supported; take a "
                "file of another quantisation, such as Q4_K_M or Q8_0"
            )
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if columns % blocks.elements:
            raise StartupError(
                f"{self.path}: rows of {tensor.name} ({columns} elements) do not hold whole {blocks.name} blocks of "
                f"{blocks.elements}; fetch the file again"
            )
        return blocks

    def _check_overlaps(self) -> None:
        """Two names for the same bytes are not what any converter writes."""
        by_place = sorted(self._file.tensors.values(), key=lambda tensor: (self._file.part_of(tensor), tensor.offset))
        for tensor, following in pairwise(by_place):
            blocks, part = block_type(tensor.ggml_type), self._file.part_of(tensor)
            if blocks is None or part != self._file.part_of(following):
                continue
            if tensor.offset + math.prod(tensor.shape) // blocks.elements * blocks.bytes > following.offset:
                raise StartupError(f"{part}: tensors {tensor.name} and {following.name} overlap; fetch the file again")

    def _rows(self, name: str, tensor: GgufTensor, blocks: BlockType, outer: Sequence[tuple[int, int]]) -> np.ndarray:
        """The bytes of the rows asked for, in checkpoint order: [..., bytes of a row]."""
        lead, columns = (tensor.shape[:-1], tensor.shape[-1]) if len(tensor.shape) > 1 else (tensor.shape, 1)
        row_bytes = columns // blocks.elements * blocks.bytes
        try:
            data = self._file.bytes_of(tensor, math.prod(lead) * row_bytes)
        except BadGguf as error:
            raise StartupError(str(error)) from error
        rows = np.frombuffer(data, dtype=np.uint8).reshape(*lead, row_bytes)
        heads = self._permuted_heads(name)
        if heads is None:
            return rows[tuple(slice(*bound) for bound in outer)]
        return rows[row_order(rows.shape[0], heads)[slice(*outer[0])]]

    def _permuted_heads(self, name: str) -> int | None:
        """Heads whose rows are reordered in this tensor; None when its rows are in checkpoint order."""
        architecture = self._architecture
        if architecture not in PERMUTED:
            return None
        owner = name.rpartition(".")[0]
        if owner.endswith("self_attn.q_proj"):
            return self._file[f"{architecture}.attention.head_count"]
        if owner.endswith("self_attn.k_proj"):
            heads = self._file[f"{architecture}.attention.head_count"]
            return self._file.get(f"{architecture}.attention.head_count_kv", heads)
        return None

    def _has_shift(self, name: str) -> bool:
        return self._architecture in SHIFTED_NORMS and name.endswith("norm.weight")

    def _count(self, num_bytes: int) -> None:
        self._unread -= num_bytes
        if self._unread < 0:
            self._file.drop_pages()
            self._unread = DROP_PAGES_AFTER


def checkpoint_name(name: str, architecture: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight". A name outside the tables stays as it is."""
    block = BLOCK_NAME.fullmatch(name)
    if block:
        layer, part, leaf = block.groups()
        own = OF_ARCHITECTURE.get(architecture, {}).get(part) or IN_BLOCK.get(part)
        return name if own is None else f"model.layers.{layer}.{own}.{leaf}"
    part, _, leaf = name.rpartition(".")
    return f"{TOP[part]}.{leaf}" if part in TOP else name


def row_order(num_rows: int, heads: int) -> np.ndarray:
    """File row of each checkpoint row.

    Within a head of d rows the checkpoint has the first halves of all rotated pairs, then the second halves; the file
    has the two of each pair side by side:

        checkpoint   0   1   2  ...  d/2  d/2+1 ...
        file         0   2   4  ...   1     3   ...
    """
    pairs = np.arange(num_rows).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
