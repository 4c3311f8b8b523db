"""Mixture of experts: a router's choice, the experts chosen, and those that every token shares.

Each expert's inner features are split over the ranks; one sum over the ranks follows for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tgi.errors import StartupError
from tgi.server.layers.source import Source
from tgi.server.quantization.scheme import Part

# [tokens, experts] float32 router logits -> weights [tokens, k] float32 and expert numbers [tokens, k] int64
Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Linear(Protocol):
    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor: ...


def softmax_then_top(top_k: int, *, normalise: bool = True, scale: float = 1.0) -> Route:
    """The k likeliest of all experts; `normalise`: their weights sum to one (Mixtral, Qwen3-MoE)."""

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(top_k)
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * scale if scale != 1.0 else weights, ids

    return route


def top_then_softmax(top_k: int) -> Route:
    """A distribution over the k best alone (gpt-oss)."""

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, ids = logits.topk(top_k)
        return best.softmax(-1), ids

    return route


def grouped_top(
    top_k: int,
    groups: int,
    top_groups: int,
    *,
    score: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None = None,
    per_group: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
) -> Route:
    """The k best experts within the `top_groups` best of `groups` (DeepSeek). A group counts for the sum of its
    `per_group` best. `score`: logits -> scores (softmax or sigmoid). `bias` [experts] takes part in the choice, not in
    the weights."""

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = score(logits)
        choice = scores if bias is None else scores + bias
        if groups > 1:
            grouped = choice.unflatten(-1, (groups, -1))
            best = grouped.topk(per_group, dim=-1).values.sum(-1).topk(top_groups).indices
            allowed = torch.zeros_like(grouped[..., 0]).scatter_(-1, best, 1.0).unsqueeze(-1)
            choice = grouped.masked_fill(allowed == 0.0, float("-inf")).flatten(-2)
        ids = choice.topk(top_k).indices
        weights = scores.gather(-1, ids)
        if normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * scale, ids

    return route


def sparse_mixer(jitter: float) -> Route:
    """Two experts, each with its likelihood among those whose logit is near its own, the first left out for the second
    (SparseMixer, arXiv 2409.12136: Phi-MoE). Near: within twice `jitter` of the best, relative to the larger of the
    two. The weights sum to no particular number."""

    def pick(candidates: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, expert = candidates.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        return candidates.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert), expert

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first_weight, first = pick(logits, logits)
        second_weight, second = pick(logits.scatter(-1, first, float("-inf")), logits)
        return torch.cat((first_weight, second_weight), -1), torch.cat((first, second), -1)

    return route


class Router:
    """Replicated on every rank; logits in float32."""

    def __init__(
        self, source: Source, hidden_size: int, num_experts: int, *, bias: bool = False, name: str = "gate"
    ) -> None:
        place = source.at(name)
        whole = (slice(0, num_experts), slice(0, hidden_size))
        self._kernel = source.linear([Part(place.prefix, (num_experts, hidden_size), *whole, bias)], float_out=True)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, experts] float32"""
        return self._kernel(hidden)


class Experts:
    """What the ranks have of each expert, as linear maps; `up` may hold gate and up together."""

    def __init__(
        self,
        source: Source,
        up: Sequence[Sequence[Part]],
        down: Sequence[Part],
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`up`: for each expert the parts whose rows follow each other; `down`: one part for each."""
        self._kernel = source.experts(up, [[part] for part in down], activation)

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], [tokens, k] twice -> [tokens, hidden], this rank's share of the sum."""
        return self._kernel(hidden, ids, weights)


def gated_experts(
    source: Source,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Callable[[torch.Tensor], torch.Tensor],
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Experts:
    """Experts that the checkpoint keeps one by one, `{number}.{name}` for gate, up and down, or in stacks, as
    transformers has them in memory and tools save them."""
    if source.has("gate_up_proj"):
        return stacked_gated_experts(source, num_experts, hidden_size, intermediate_size, activation)
    own = source.share(intermediate_size, "inner features of an expert")
    whole = slice(0, hidden_size)
    up: list[list[Part]] = []
    down: list[Part] = []
    for expert in range(num_experts):
        gate, upper, lower = (source.at(f"{expert}.{name}").prefix for name in names)
        shape = (intermediate_size, hidden_size)
        up.append([Part(module, shape, own, whole, False) for module in (gate, upper)])
        down.append(Part(lower, (hidden_size, intermediate_size), whole, own, False))
    return Experts(source, up, down, activation)


def stacked_gated_experts(
    source: Source,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Callable[[torch.Tensor], torch.Tensor],
    *,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    bias: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
) -> Experts:
    """Experts that the checkpoint keeps as two tensors, [experts, 2 inner, hidden] and [experts, hidden, inner], or
    with the last two dimensions `transposed`. `bias`: beside each lies one named `{name}_bias`. `interleaved`: rows of
    gate and up take turns, and the activation must expect them so."""
    own = source.share(intermediate_size, "inner features of an expert")
    whole = slice(0, hidden_size)
    shapes = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    if interleaved:
        rows = [slice(2 * own.start, 2 * own.stop)]
    else:
        rows = [own, slice(intermediate_size + own.start, intermediate_size + own.stop)]
    up_names, down_names = ((source.name(name), source.name(f"{name}_bias")) for name in names)
    leads = source.group.rank == 0  # the bias of a row-split product counts once in the sum

    def part(expert: int, which: int, rows: slice, columns: slice, has_bias: bool) -> Part:
        found = (up_names, down_names)[which]
        return Part(found[0], shapes[which], rows, columns, has_bias, transposed, (expert, num_experts), found)

    up = [[part(expert, 0, each, whole, bias) for each in rows] for expert in range(num_experts)]
    down = [part(expert, 1, whole, own, bias and leads) for expert in range(num_experts)]
    return Experts(source, up, down, activation)


def flat_gated_experts(
    source: Source,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Callable[[torch.Tensor], torch.Tensor],
    *,
    names: tuple[str, str, str],
) -> Experts:
    """Experts that the checkpoint keeps as three tensors [experts * inner, hidden], for gate, up and down, one expert
    behind the other."""
    own = source.share(intermediate_size, "inner features of an expert")
    whole = slice(0, hidden_size)
    rows = num_experts * intermediate_size
    gate, up, down = ((source.name(name), source.name(f"{name}_bias")) for name in names)

    def inner(expert: int) -> slice:
        return slice(expert * intermediate_size + own.start, expert * intermediate_size + own.stop)

    def lower(expert: int) -> Part:
        return Part(down[0], (hidden_size, rows), whole, inner(expert), False, transposed=True, names=down)

    ups = [
        [Part(name[0], (rows, hidden_size), inner(expert), whole, False, names=name) for name in (gate, up)]
        for expert in range(num_experts)
    ]
    return Experts(source, ups, [lower(expert) for expert in range(num_experts)], activation)


class SigmoidGated:
    """An MLP that every token goes through, each by its own measure: sigmoid(gate(x)) * mlp(x)."""

    def __init__(self, source: Source, name: str, hidden_size: int, mlp: Linear) -> None:
        """`name`: of the gate, a map to one number."""
        self._gate = Router(source, hidden_size, 1, name=name)
        self._mlp = mlp

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        measure = self._gate(hidden).sigmoid_()
        outputs = self._mlp(hidden)
        return outputs * measure.to(outputs.dtype)


class MixtureOfExperts:
    def __init__(
        self,
        source: Source,
        router: Linear,
        route: Route,
        experts: Experts,
        *,
        shared: Linear | None = None,
    ) -> None:
        """`shared`: what every token goes through beside its experts; whole on every rank when called (an MLP of
        `layers.mlp` is)."""
        self._router = router
        self._route = route
        self._experts = experts
        self._shared = shared
        self._group = source.group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        weights, ids = self._route(self._router(hidden))
        mixed = self._group.all_reduce_(self._experts(hidden, weights, ids))
        return mixed if self._shared is None else mixed + self._shared(hidden)


def check_top_k(top_k: int, num_experts: int, groups: int = 1, top_groups: int = 1) -> int:
    """`top_k`. Raises StartupError where a token would choose more experts, or groups of them, than there are."""
    if num_experts % groups:
        raise StartupError(f"config.json: {num_experts} experts make no {groups} groups of one size")
    if top_groups > groups:
        raise StartupError(f"config.json: {top_groups} groups of experts per token cannot be chosen of {groups}")
    if top_k > num_experts // groups * top_groups:
        found = num_experts // groups * top_groups
        raise StartupError(f"config.json: {top_k} experts per token cannot be chosen of {found}")
    return top_k
