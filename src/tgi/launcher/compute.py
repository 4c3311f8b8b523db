"""How many prompt tokens one step should compute: the card's speed and memory against the model's size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tgi.model_config import ModelConfig

BASE_PREFILL_TOKENS = 4096
BASE_PREFILL_TOKENS_BY_TYPE = {"qwen2_vl": 10000, "qwen2_5_vl": 10000, "gemma3": 8000}
FEWEST_OPTIMAL_TOKENS = 100

# Dense float16 operations per second, from the makers' data sheets.
CARD_FLOPS = {
    "nvidia-4090": 82e12,
    "nvidia-geforce-rtx-4090": 82e12,
    "nvidia-t4": 65e12,
    "tesla-t4": 65e12,
    "nvidia-l4": 121e12,
    "nvidia-l40": 181e12,
    "nvidia-l40s": 363e12,
    "nvidia-a10g": 125e12,
    "nvidia-a40": 149e12,
    "nvidia-a100": 312e12,
    "nvidia-a100-sxm4-80gb": 312e12,
    "nvidia-a100-sxm4-40gb": 312e12,
    "nvidia-a100-80gb-pcie": 312e12,
    "nvidia-h100": 900e12,
    "nvidia-h100-80gb-hbm3": 900e12,
    "nvidia-h100-nvl": 900e12,
    "nvidia-h200": 989e12,
}


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts per layer: how many there are, how many a token meets, and how many every token meets besides."""

    total: int = 1
    per_token: int = 1
    shared: int = 0


def read_experts(model: ModelConfig) -> Experts:
    return Experts(
        total=_count(model.raw, ("num_local_experts", "n_routed_experts", "num_experts"), 1),
        per_token=_count(model.raw, ("num_experts_per_tok", "num_experts_per_token"), 1),
        shared=_count(model.raw, ("n_shared_experts",), 0),
    )


def model_flops_per_token(model: ModelConfig) -> int | None:
    """Operations of one token through the layers; None for models that see images, whose cost is another."""
    if "vision_config" in model.raw:
        return None
    experts = read_experts(model)
    # Query and output projection and the attention itself count once per head, keys and values once per shared head.
    attention = 2 * model.hidden_size * model.head_dim * (3 * model.num_heads + 2 * model.num_kv_heads)
    feed_forward = 6 * model.hidden_size * model.intermediate_size * (experts.per_token + experts.shared)
    return model.num_layers * (attention + feed_forward)


def model_bytes(model: ModelConfig) -> int:
    """Weights in 16 bit: layers, embedding and head."""
    experts = read_experts(model)
    feed_forward = 3 * model.intermediate_size * experts.total * model.hidden_size
    heads = 2 * model.num_heads + 2 * model.num_kv_heads  # query and output, key and value
    attention = heads * model.head_dim * model.hidden_size
    return 2 * (model.num_layers * (feed_forward + attention) + 2 * model.hidden_size * model.vocab_size)


def prefill_bytes_per_token(model: ModelConfig) -> float:
    """Memory that one prompt token needs in a step: its cache entries and the layers' temporaries."""
    cache = model.num_kv_heads * 2 * model.head_dim * 2 * model.num_layers
    return cache + 1.5 * model.intermediate_size * read_experts(model).total * 2 * 3


def default_prefill_tokens(
    model: ModelConfig,
    card: str | None,
    memory: int | None,
    num_shard: int,
    memory_fraction: float,
) -> tuple[int, str | None]:
    """(`max_batch_prefill_tokens` where the user leaves it open, a warning or None).

    As many as the card computes in a second, within the model's context and what its memory holds beside the weights.
    `memory` is the first GPU's, bytes; `memory_fraction` what of it may be used.
    """
    tokens = BASE_PREFILL_TOKENS_BY_TYPE.get(model.model_type, BASE_PREFILL_TOKENS)
    card_flops, flops = CARD_FLOPS.get(card or ""), model_flops_per_token(model)
    if card_flops and flops:
        optimal = int(card_flops * num_shard / flops)
        if optimal > FEWEST_OPTIMAL_TOKENS:
            tokens = optimal
    if model.max_position_embeddings is not None:
        tokens = min(tokens, model.max_position_embeddings)
    if memory is None or model.quant_method is not None:
        return tokens, None
    left = memory * num_shard * memory_fraction - model_bytes(model)
    fitting = int(left / prefill_bytes_per_token(model))
    if fitting <= 0:
        gib = 1 << 30
        return tokens, (
            f"The weights need about {model_bytes(model) / gib:.1f} GiB, more than the "
            f"{memory * num_shard * memory_fraction / gib:.1f} GiB that {num_shard} GPU(s) of this kind offer: "
            "loading may fail. Use more GPUs (--num-shard) or a smaller model"
        )
    return min(tokens, fitting), None


def _count(raw: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default
