"""What each rank keeps, and that the ranks' parts together are the whole. Ranks are simulated one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from tgi.errors import StartupError
from tgi.server.distributed.group import SingleRank
from tgi.server.layers.embedding import Embedding, Head
from tgi.server.layers.linear import ColumnLinear, MergedColumnLinear, QKVLinear, RowLinear
from tgi.server.layers.mlp import MLP, GatedMLP
from tgi.server.layers.moe import (
    MixtureOfExperts,
    Router,
    SigmoidGated,
    check_top_k,
    flat_gated_experts,
    gated_experts,
    grouped_top,
    softmax_then_top,
    sparse_mixer,
    stacked_gated_experts,
    top_then_softmax,
)
from tgi.server.layers.norm import WholeRMSNorm
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
        assert (layer.share.num_heads, layer.share.num_kv_heads) == (4 // world_size, max(1, 2 // world_size))
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


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_grouped_rows_of_a_fused_projection(world_size: int) -> None:
    """q0 q1 k0 v0 | q2 q3 k1 v1: what GPT-NeoX and Falcon keep."""
    grouped: dict[str, torch.Tensor] = {}
    for leaf in ("weight", "bias"):
        query, key, value = (
            QKV[f"attn.{name}.{leaf}"].unflatten(0, (-1, 8)) for name in ("q_proj", "k_proj", "v_proj")
        )
        pairs = query.unflatten(0, (2, 2))
        rows = [torch.cat((pairs[group], key[group : group + 1], value[group : group + 1])) for group in range(2)]
        grouped[f"attn.qkv.{leaf}"] = torch.cat(rows).flatten(0, 1)
    for rank in range(world_size):
        apart = QKVLinear(source_of(QKV, rank, world_size).at("attn"), "qkv_proj", HIDDEN, 4, 2, 8, bias=True)
        source = source_of(grouped, rank, world_size).at("attn")
        together = QKVLinear(source, "qkv", HIDDEN, 4, 2, 8, bias=True, grouped=True)
        assert torch.equal(apart(INPUTS), together(INPUTS))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_mlp_that_is_kept_input_first(world_size: int) -> None:
    tensors = {
        "mlp.fc.weight": random(HIDDEN, 48, seed=1),
        "mlp.fc.bias": random(48, seed=2),
        "mlp.proj.weight": random(48, HIDDEN, seed=3),
        "mlp.proj.bias": random(HIDDEN, seed=4),
    }
    inner = torch.nn.functional.gelu(INPUTS @ tensors["mlp.fc.weight"] + tensors["mlp.fc.bias"], approximate="tanh")
    expected = inner @ tensors["mlp.proj.weight"] + tensors["mlp.proj.bias"]
    parts = [
        MLP(
            source_of(tensors, rank, world_size).at("mlp"),
            HIDDEN,
            48,
            "gelu_new",
            up="fc",
            down="proj",
            bias=True,
            transposed=True,
        )(INPUTS)
        for rank in range(world_size)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_over_all_heads_counts_those_of_other_ranks() -> None:
    weight, heads = random(32, seed=1), random(5, 4, 8, seed=2)
    whole = WholeRMSNorm(source_of({"norm.weight": weight}).at("norm"), 4, slice(0, 4), 8, 1e-5)(heads)

    class Other(OneOf):
        """The other rank's share of the sum, known beforehand."""

        def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
            other = heads[:, 2:] if self.rank == 0 else heads[:, :2]
            return tensor.add_(other.flatten(1).square().sum(-1, keepdim=True))

    parts = []
    for rank in range(2):
        source = dataclasses.replace(source_of({"norm.weight": weight}, rank, 2), group=Other(rank, 2)).at("norm")
        own = slice(2 * rank, 2 * rank + 2)
        parts.append(WholeRMSNorm(source, 4, own, 8, 1e-5)(heads[:, own]))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


EXPERTS, INNER, TOP = 6, 16, 2
MOE = {
    "moe.gate.weight": random(EXPERTS, HIDDEN, seed=1),
    **{
        f"moe.experts.{expert}.{name}.weight": random(*shape, seed=10 * expert + at) / 4
        for expert in range(EXPERTS)
        for at, (name, shape) in enumerate(
            (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER))), start=20
        )
    },
}


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def mixed_one_by_one(inputs: torch.Tensor) -> torch.Tensor:
    """The textbook: token by token, expert by expert."""
    probabilities = (inputs @ MOE["moe.gate.weight"].t()).softmax(-1)
    out = torch.zeros_like(inputs)
    for token, line in enumerate(probabilities):
        weights, ids = line.topk(TOP)
        for weight, expert in zip(weights / weights.sum(), ids.tolist(), strict=True):
            gate, up, down = (MOE[f"moe.experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2"))
            inner = torch.nn.functional.silu(inputs[token] @ gate.t()) * (inputs[token] @ up.t())
            out[token] += weight * (inner @ down.t())
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_kept_one_by_one(world_size: int) -> None:
    inputs = random(40, HIDDEN, seed=3)
    parts = []
    for rank in range(world_size):
        source = source_of(MOE, rank, world_size).at("moe")
        experts = gated_experts(source.at("experts"), EXPERTS, HIDDEN, INNER, silu_and_mul, names=("w1", "w3", "w2"))
        mixture = MixtureOfExperts(source, Router(source, HIDDEN, EXPERTS), softmax_then_top(TOP), experts)
        parts.append(mixture(inputs))
        alone = torch.cat([mixture(inputs[token : token + 1]) for token in range(8)])
        torch.testing.assert_close(alone, parts[-1][:8])  # whoever else is in the batch
    torch.testing.assert_close(torch.stack(parts).sum(0), mixed_one_by_one(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_kept_in_stacks(world_size: int, transposed: bool, interleaved: bool) -> None:
    inputs = random(9, HIDDEN, seed=3)
    names = [[f"moe.experts.{expert}.{name}.weight" for expert in range(EXPERTS)] for name in ("w1", "w3", "w2")]
    gate, up, down = (torch.stack([MOE[name] for name in column]) for column in names)
    gate_up = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
    biases = {
        "moe.experts.gate_up_proj_bias": torch.zeros(EXPERTS, 2 * INNER),
        "moe.experts.down_proj_bias": random(1, HIDDEN, seed=5).expand(EXPERTS, HIDDEN).contiguous(),
    }
    tensors = {"moe.experts.gate_up_proj": gate_up, "moe.experts.down_proj": down}
    if transposed:
        tensors = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items()}
    tensors |= {"moe.gate.weight": MOE["moe.gate.weight"], **biases}

    def activation(rows: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(torch.cat((rows[..., ::2], rows[..., 1::2]), -1) if interleaved else rows)

    parts = []
    for rank in range(world_size):
        source = source_of(tensors, rank, world_size).at("moe")
        experts = stacked_gated_experts(
            source.at("experts"),
            EXPERTS,
            HIDDEN,
            INNER,
            activation,
            bias=True,
            transposed=transposed,
            interleaved=interleaved,
        )
        parts.append(MixtureOfExperts(source, Router(source, HIDDEN, EXPERTS), softmax_then_top(TOP), experts)(inputs))
    expected = mixed_one_by_one(inputs) + biases["moe.experts.down_proj_bias"][0]  # weights of a token sum to one
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_kept_one_behind_the_other(world_size: int) -> None:
    inputs = random(9, HIDDEN, seed=3)
    names = [[f"moe.experts.{expert}.{name}.weight" for expert in range(EXPERTS)] for name in ("w1", "w3", "w2")]
    gate, up, down = ([MOE[name] for name in column] for column in names)
    tensors = {
        "moe.gate.weight": MOE["moe.gate.weight"],
        "moe.experts.w1": torch.cat(gate),
        "moe.experts.v1": torch.cat(up),
        "moe.experts.w2": torch.cat([weight.t() for weight in down]),
    }
    parts = []
    for rank in range(world_size):
        source = source_of(tensors, rank, world_size).at("moe")
        experts = flat_gated_experts(
            source.at("experts"), EXPERTS, HIDDEN, INNER, silu_and_mul, names=("w1", "v1", "w2")
        )
        parts.append(MixtureOfExperts(source, Router(source, HIDDEN, EXPERTS), softmax_then_top(TOP), experts)(inputs))
    torch.testing.assert_close(torch.stack(parts).sum(0), mixed_one_by_one(inputs), rtol=1e-4, atol=1e-5)


def test_a_rank_reads_only_its_part_of_stacked_experts() -> None:
    tensors = {"moe.gate_up_proj": random(EXPERTS, 2 * INNER, HIDDEN), "moe.down_proj": random(EXPERTS, HIDDEN, INNER)}
    source = source_of(tensors, 1, 2).at("moe")
    gated_experts(source, EXPERTS, HIDDEN, INNER, silu_and_mul)
    assert isinstance(source.checkpoint, MemoryCheckpoint)
    assert source.checkpoint.read_elements == {name: tensor.numel() // 2 for name, tensor in tensors.items()}


def test_an_expert_of_all_tokens_by_each_tokens_own_measure() -> None:
    inputs, weight = random(9, HIDDEN, seed=3), random(1, HIDDEN, seed=4)
    gated = SigmoidGated(source_of({"gate.weight": weight}), "gate", HIDDEN, lambda hidden: 2 * hidden)
    torch.testing.assert_close(gated(inputs), torch.sigmoid(inputs @ weight.t()) * 2 * inputs)


def test_routes() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0, -1.0, 2.5]])
    weights, ids = top_then_softmax(2)(logits)
    assert ids.tolist() == [[3, 5]]
    torch.testing.assert_close(weights, torch.tensor([[3.0, 2.5]]).softmax(-1))
    weights, ids = softmax_then_top(2, normalise=False, scale=2.0)(logits)
    torch.testing.assert_close(weights, 2 * logits.softmax(-1)[:, [3, 5]])
    # Groups (2, 1), (0, 3), (-1, 2.5): by the sum of two best the first and the second stay.
    weights, ids = grouped_top(2, 3, 2, score=torch.sigmoid, per_group=2, normalise=True)(logits)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    # The bias moves the choice and not the weights.
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    weights, ids = grouped_top(2, 1, 1, score=torch.sigmoid, bias=bias)(logits)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, [1, 3]]))


def test_sparse_mixer_weighs_an_expert_against_those_near_it() -> None:
    # Near the best, 3.0: 2.5 and 2.7, since (3 - 2.5) / 3 <= 0.2. Near the next, 2.7: 2.5 and 2.2, the first left out.
    logits = torch.tensor([[2.2, 3.0, 1.0, 2.5, 2.7]])
    weights, ids = sparse_mixer(0.1)(logits)
    assert ids.tolist() == [[1, 4]]
    first = torch.tensor([3.0, 2.5, 2.7]).softmax(0)[0]
    second = torch.tensor([2.7, 2.5, 2.2]).softmax(0)[0]
    torch.testing.assert_close(weights, torch.stack((first, second)).unsqueeze(0))


def test_groups_are_chosen_before_experts() -> None:
    """The best expert of all is not taken where its group is not."""
    logits = torch.tensor([[4.0, -9.0, 3.0, 3.0, 2.0, 3.5]])
    _, by_best = grouped_top(2, 3, 1, score=torch.sigmoid)(logits)
    _, by_two = grouped_top(2, 3, 1, score=torch.sigmoid, per_group=2)(logits)
    assert (sorted(by_best[0].tolist()), sorted(by_two[0].tolist())) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((5, 4), "5 experts per token cannot be chosen of 4"),
        ((5, 8, 4, 2), "5 experts per token cannot be chosen of 4"),
        ((2, 8, 3, 2), "8 experts make no 3 groups of one size"),
        ((2, 8, 4, 5), "5 groups of experts per token cannot be chosen of 4"),
    ],
)
def test_more_than_there_are_cannot_be_chosen(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_top_k(*numbers)
