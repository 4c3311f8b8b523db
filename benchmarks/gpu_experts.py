"""Experts on a CUDA device: milliseconds of one layer's mixture, bfloat16, in a CUDA graph, by number of tokens.

Random weights in the shapes of two models; several layers in turn, so that none is still in the device's cache. Beside
what is chosen stands each way that it is chosen from (`tgi.server.kernels.cuda.experts`). Needs a GPU; no server is
started.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.record import Figure, argument_parser, report

if TYPE_CHECKING:
    import torch

    from tgi.server.kernels.cuda.experts import StackedExperts

# name: experts, chosen by a token, hidden size, inner size, layers
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768, 4), "Mixtral 8x7B": (8, 2, 4096, 14336, 2)}
TOKENS = (1, 4, 16, 64, 512, 4096)
WAYS = {"__call__": "as chosen", "grouped": "grouped", "every": "every expert", "copied": "copied"}
MOST_COPIED = 4  # tokens; above it copies take many times as long
REPLAYS = 20


def layers_of(shape: tuple[int, int, int, int, int]) -> list[StackedExperts]:
    import torch

    from tgi.server.kernels.cuda.experts import grouped_experts
    from tgi.server.ops.activation import silu_and_mul

    experts, _, hidden, inner, layers = shape

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5

    return [
        grouped_experts(
            experts,
            ((random(2 * inner, hidden), None) for _ in range(experts)),
            ((random(hidden, inner), None) for _ in range(experts)),
            silu_and_mul,
            None,
        )
        for _ in range(layers)
    ]


def graph_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one run, captured once and replayed."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def run_all(layers: list[StackedExperts], way: str, *arguments: torch.Tensor) -> None:
    for layer in layers:
        getattr(layer, way)(*arguments)


def measure(name: str) -> list[Figure]:
    import torch

    shape = SHAPES[name]
    layers = layers_of(shape)
    figures: list[Figure] = []
    for tokens in TOKENS:
        hidden = torch.randn(tokens, shape[2], device="cuda", dtype=torch.bfloat16)
        weights, ids = torch.rand(tokens, shape[0], device="cuda").topk(shape[1])
        for way, label in WAYS.items():
            if way != "copied" or tokens <= MOST_COPIED:
                took = graph_ms(partial(run_all, layers, way, hidden, ids, weights)) / len(layers)
                figures.append(Figure(f"{name}, {tokens} tokens, {label}", round(took, 3), "ms a layer"))
    return figures


def main() -> None:
    arguments = argument_parser(__doc__, "gpu_experts").parse_args()
    import torch

    with torch.inference_mode():
        figures = [figure for name in SHAPES for figure in measure(name)]
    report(arguments, "gpu_experts", "Mixtures of experts on a GPU", figures)


if __name__ == "__main__":
    main()
