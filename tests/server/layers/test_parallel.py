"""What each rank keeps, and that the ranks' parts together are the whole. Ranks are simulated one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from tgi.errors import StartupError
from tgi.server.distributed.group import SingleRank
from tgi.server.layers.embedding import Embedding, Head
from tgi.server.layers.linear import ColumnLinear, MergedColumnLinear, QKVLinear, RowLinear
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.source import Source, open_source
from tgi.server.weights.region import Region, check_shape, missing

HIDDEN = 32
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class MemoryCheckpoint:
    """Tensors of a dict; notes which elements of each were read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.read_elements: dict[str, int] = {}

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self.tensors:
            raise missing("memory", name)  # pyright: ignore[reportArgumentType]
        check_shape("memory", name, self.shape(name), shape)  # pyright: ignore[reportArgumentType]
        part = self.tensors[name][region]
        self.read_elements[name] = self.read_elements.get(name, 0) + part.numel()
        return part

    def close(self) -> None:
        pass


@dataclass
class OneOf:
    """A rank whose collectives do nothing, and are noted."""

    rank: int
    world_size: int
    calls: list[str] = field(default_factory=list)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls.append("all_gather")
        return tensor

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self.calls.append("broadcast")
        return tensor

    def close(self) -> None:
        pass


def source_of(tensors: dict[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> Source:
    group = OneOf(rank, world_size) if world_size > 1 else SingleRank()
    return open_source(
        MemoryCheckpoint(tensors),
        quant_method=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=group,
        packed=PACKED,
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = random(5, HIDDEN, seed=99)
QKV = {
    f"attn.{name}.{leaf}": random(*([rows, HIDDEN] if leaf == "weight" else [rows]), seed=index)
    for index, (name, rows, leaf) in enumerate(
        (name, rows, leaf)
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))
        for leaf in ("weight", "bias")
    )
}


def projected(inputs: torch.Tensor, name: str) -> torch.Tensor:
    return torch.nn.functional.linear(inputs, QKV[f"attn.{name}.weight"], QKV[f"attn.{name}.bias"])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_qkv_keeps_whole_heads_of_all_three(world_size: int) -> None:
    for rank in range(world_size):
        source = source_of(QKV, rank, world_size)
        layer = QKVLinear(source.at("attn"), "qkv_proj", HIDDEN, heads=4, kv_heads=2, head_dim=8, bias=True)
        assert (layer.num_heads, layer.num_kv_heads) == (4 // world_size, max(1, 2 // world_size))
        query = projected(INPUTS, "q_proj").view(5, 4, 8).tensor_split(world_size, 1)[rank]
        kv_rank, kv_ranks = rank * min(world_size, 2) // world_size, min(world_size, 2)
        key, value = (
            projected(INPUTS, name).view(5, 2, 8).tensor_split(kv_ranks, 1)[kv_rank] for name in ("k_proj", "v_proj")
        )
        torch.testing.assert_close(layer(INPUTS).view(5, -1, 8), torch.cat((query, key, value), 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_has_them_fused_gives_the_same(world_size: int) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    fused = {
        f"attn.qkv_proj.{leaf}": torch.cat([QKV[f"attn.{name}.{leaf}"] for name in names])
        for leaf in ("weight", "bias")
    }
    for rank in range(world_size):
        apart, together = (
            QKVLinear(source_of(tensors, rank, world_size).at("attn"), "qkv_proj", HIDDEN, 4, 2, 8, bias=False)
            for tensors in (QKV, fused)
        )
        assert torch.equal(apart(INPUTS), together(INPUTS))


def test_a_bias_in_the_checkpoint_counts_whatever_the_configuration_says() -> None:
    layer = ColumnLinear(source_of(QKV).at("attn"), "q_proj", HIDDEN, 32, bias=False)
    torch.testing.assert_close(layer(INPUTS), projected(INPUTS, "q_proj"))


def test_a_bias_that_is_promised_and_missing_is_an_error() -> None:
    with pytest.raises(StartupError, match=r"holds no tensor attn\.q_proj\.bias"):
        ColumnLinear(
            source_of({"attn.q_proj.weight": QKV["attn.q_proj.weight"]}).at("attn"), "q_proj", 32, 32, bias=True
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_row_linear_sums_to_the_whole_with_one_bias(world_size: int) -> None:
    weight, bias = random(24, HIDDEN), random(24, seed=1)
    total = torch.zeros(5, 24)
    for rank in range(world_size):
        source = source_of({"o_proj.weight": weight, "o_proj.bias": bias}, rank, world_size)
        layer = RowLinear(source, "o_proj", HIDDEN, 24, bias=True)
        total += layer(INPUTS.tensor_split(world_size, 1)[rank])
        assert world_size == 1 or source.group.calls == ["all_reduce"]  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(total, torch.nn.functional.linear(INPUTS, weight, bias))


def test_a_rank_reads_only_its_part() -> None:
    source = source_of(QKV, 1, 2)
    MergedColumnLinear(source.at("attn"), "qkv_proj", HIDDEN, [32, 16, 16])
    checkpoint = source.checkpoint
    assert isinstance(checkpoint, MemoryCheckpoint)
    assert checkpoint.read_elements == {name: tensor.numel() // 2 for name, tensor in QKV.items()}
    assert source.kept_bytes == 4 * sum(tensor.numel() for tensor in QKV.values()) // 2


@pytest.mark.parametrize(("world_size", "vocab_size"), [(1, 10), (2, 10), (4, 12), (2, 11)])
def test_embedding_and_head_cover_the_vocabulary(world_size: int, vocab_size: int) -> None:
    table, head = random(vocab_size, HIDDEN), random(vocab_size, HIDDEN, seed=1)
    ids = torch.arange(vocab_size)
    tensors = {"embed.weight": table, "lm_head.weight": head}
    found, logits = [], []
    for rank in range(world_size):
        source = source_of(tensors, rank, world_size)
        embedding = Embedding(source.at("embed"), vocab_size, HIDDEN)
        found.append(embedding(ids))
        logits.append(Head(source, "lm_head", vocab_size, HIDDEN, tied_to=None)(INPUTS))
        tied = Head(source, "lm_head", vocab_size, HIDDEN, tied_to=embedding)
        torch.testing.assert_close(tied(INPUTS), INPUTS @ embedding.weight.T)
    assert torch.equal(ids, torch.arange(vocab_size))  # not changed in place
    if vocab_size % world_size:  # on every rank whole, no exchange
        assert all(torch.equal(part, table) for part in found)
        joined = logits[-1]
    else:
        assert torch.equal(torch.stack(found).sum(0), table)
        joined = torch.cat(logits, -1)
    torch.testing.assert_close(joined, INPUTS @ head.T)
    assert joined.dtype == torch.float32


def test_a_row_of_the_embedding_is_the_callers_own() -> None:
    embedding = Embedding(source_of({"embed.weight": random(10, HIDDEN)}).at("embed"), 10, HIDDEN)
    before = embedding.weight.clone()
    embedding(torch.tensor([3])).zero_()
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gated_mlp(world_size: int) -> None:
    gate, up, down = random(48, HIDDEN), random(48, HIDDEN, seed=1), random(HIDDEN, 48, seed=2)
    tensors = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}
    total = torch.zeros(5, HIDDEN)
    for rank in range(world_size):
        total += GatedMLP(source_of(tensors, rank, world_size).at("mlp"), HIDDEN, 48, "silu")(INPUTS)
    expected = (torch.nn.functional.silu(INPUTS @ gate.T) * (INPUTS @ up.T)) @ down.T
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_split_is_said_with_what_can() -> None:
    with pytest.raises(
        StartupError, match=r"9 attention heads cannot be split over 2 shards; --num-shard may be 1, 3, 9"
    ):
        QKVLinear(source_of(QKV, 0, 2).at("attn"), "qkv_proj", HIDDEN, heads=9, kv_heads=3, head_dim=8, bias=False)
    with pytest.raises(StartupError, match="3 key-value heads cannot be spread evenly over 4 shards"):
        QKVLinear(source_of(QKV, 0, 4).at("attn"), "qkv_proj", HIDDEN, heads=12, kv_heads=3, head_dim=8, bias=False)


def test_an_activation_that_is_not_there_is_named() -> None:
    with pytest.raises(StartupError, match="hidden_act 'mish' is not supported; silu"):
        GatedMLP(source_of({}).at("mlp"), HIDDEN, 48, "mish")
