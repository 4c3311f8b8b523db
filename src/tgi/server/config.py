"""ShardConfig: every decision of `text-generation-server serve`, taken before the model is built. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi.enums import Dtype


@dataclass(frozen=True, slots=True)
class ShardConfig:
    model_id: str
    model_path: Path  # a directory with config.json, or a .gguf file
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    uds_path: str  # prefix; rank r binds f"{uds_path}-{r}"
    dtype: Dtype
    device: str  # "cpu", "cuda:0"
    attention: str
    block_size: int
    prefix_caching: bool
    prefill_chunking: bool
    prompt_logprobs: bool
    watermark_gamma: float  # share of the vocabulary
    watermark_delta: float
    wiggle_room: float  # fraction of the free memory that the KV cache may use
    cuda_memory_fraction: float
    max_batch_size: int | None
    max_total_tokens: int | None = None  # of one request; None: found at warm-up
    rope: tuple[str, float] | None = None  # kind and factor, in the place of what the model says
    load_format: str = "auto"  # "dummy": random weights made on the device
    hung_after: float = 30.0  # seconds: a running step that takes less is never hung
    budget_scale: float = 1.0  # of the prefill budget
    model_plugins: Path | None = None  # a folder whose <model_type>.py come before the server's own
    otlp_endpoint: str | None = None
    otlp_service_name: str = "text-generation-inference.server"
