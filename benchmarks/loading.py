"""Reading weights on a CPU: seconds from open files to a model that could run, and bytes of it in memory per second.

A random Llama of 0.26 billion parameters from safetensors of two formats, the bundled model from its GGUF file, and
random weights without files. The files lie in the page cache; no server is started.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.record import Figure, argument_parser, report

if TYPE_CHECKING:
    import torch

    from tgi.server.weights.checkpoint import Checkpoint

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 1024, 4096, 15, 16, 4, 32000
ROUNDS = 5


def shapes() -> dict[str, tuple[int, ...]]:
    narrow = KV_HEADS * HIDDEN // HEADS
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (narrow, HIDDEN),
        "self_attn.v_proj": (narrow, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    places = {f"layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    return {f"model.{name}.weight": shape for name, shape in places.items()} | {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }


def write_model(directory: Path, dtype: torch.dtype) -> Path:
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: (torch.randn(shape) * 0.02).to(dtype) for name, shape in shapes().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    os.sync()  # else it is written while it is read
    return directory


def measure(path: Path, opened: Callable[[], Checkpoint]) -> tuple[float, float]:
    """(median seconds, gigabytes of weights in memory per second), in bfloat16."""
    import torch

    from tgi.model_config import read_model_config
    from tgi.server.distributed.group import SingleRank
    from tgi.server.models.registry import build_model
    from tgi.server.weights import allocation

    config, took, size = read_model_config(path), [], 0
    for _ in range(ROUNDS + 1):  # the first reads the files into the page cache and compiles kernels
        started = time.perf_counter()
        checkpoint = opened()
        with allocation.apart():
            model = build_model(config, checkpoint, torch.bfloat16, torch.device("cpu"), SingleRank())
        checkpoint.close()
        took.append(time.perf_counter() - started)
        size = model.weight_bytes
        del model
    seconds = statistics.median(took[1:])
    return seconds, size / seconds / 1e9


def main() -> None:
    arguments = argument_parser(__doc__, "loading").parse_args()
    import torch

    from tgi.hub import BUNDLED_MODEL, locate
    from tgi.server.weights.checkpoint import open_checkpoint
    from tgi.server.weights.dummy_checkpoint import DummyCheckpoint

    figures: list[Figure] = []

    def add(name: str, path: Path, opened: Callable[[], Checkpoint]) -> None:
        seconds, rate = measure(path, opened)
        figures.append(Figure(f"{name}: time", round(seconds, 3), "s"))
        figures.append(Figure(f"{name}: rate", round(rate, 2), "GB/s", note="of weights in memory, bfloat16"))

    with tempfile.TemporaryDirectory() as directory:
        for dtype in (torch.bfloat16, torch.float32):
            path = write_model(Path(directory, str(dtype)), dtype)
            add(f"safetensors in {str(dtype).removeprefix('torch.')}", path, lambda path=path: open_checkpoint(path))
        add("no files (--load-format dummy)", path, lambda: DummyCheckpoint(torch.bfloat16, torch.device("cpu")))
    bundled = locate(BUNDLED_MODEL)
    add("bundled model, GGUF", bundled, lambda: open_checkpoint(bundled))
    report(arguments, "loading", "Reading weights", figures)


if __name__ == "__main__":
    main()
