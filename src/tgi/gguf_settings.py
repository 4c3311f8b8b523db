"""What a GGUF file says, or its architecture implies, beyond the common facts: under the names of config.json.

Model files read such settings from `ModelConfig.raw`, whatever format the model came in. Knows no weights, but for the
rope factors that the format keeps as tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from tgi.gguf_file import GgufFile

F32 = 0  # ggml's number of the type
# The format has no key for how a model of Gemma scales its queries; only the largest do not use their head's size.
GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
GEMMA3_PATTERN = 6  # every sixth layer sees everything
GEMMA3_LOCAL_THETA = 10_000.0


def settings_of(file: GgufFile) -> dict[str, Any]:
    """The further settings of the file's architecture; {} for one that has none."""
    architecture = file["general.architecture"]
    read = _READERS.get(architecture)
    return {} if read is None else read(file, f"{architecture}.")


def longrope_of(file: GgufFile) -> dict[str, Any]:
    """`long_factor` and `short_factor` of a file that has them, else {}. Raises BadGguf for a truncated file."""
    names = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
    if not all(name in file.tensors and file.tensors[name].ggml_type == F32 for name in names.values()):
        return {}
    return {key: _floats(file, name) for key, name in names.items()}


def _floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    (count,) = tensor.shape
    return list(struct.unpack(f"<{count}f", file.bytes_of(tensor, 4 * count)))


def _gemma2(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = file[prefix + "block_count"]
    return {
        "attn_logit_softcapping": file.get(prefix + "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get(prefix + "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, prefix, layers == GEMMA2_27B_LAYERS),
        "layer_types": _layer_types(layers, 2),
    }


def _gemma3(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = file[prefix + "block_count"]
    pattern = file.get(prefix + "attention.sliding_window_pattern", GEMMA3_PATTERN)
    pattern = pattern if isinstance(pattern, int) and pattern > 0 else GEMMA3_PATTERN
    return {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get(prefix + "final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(file, prefix, layers == GEMMA3_27B_LAYERS),
        "rope_local_base_freq": file.get(prefix + "rope.freq_base_swa", GEMMA3_LOCAL_THETA),
        "sliding_window_pattern": pattern,
        "layer_types": _layer_types(layers, pattern),
    }


def _phi3(file: GgufFile, prefix: str) -> dict[str, Any]:
    heads = file[prefix + "attention.head_count"]
    head_dim = file.get(prefix + "attention.key_length", file[prefix + "embedding_length"] // heads)
    settings: dict[str, Any] = {"partial_rotary_factor": file.get(prefix + "rope.dimension_count", head_dim) / head_dim}
    original = file.get(prefix + "rope.scaling.original_context_length")
    return settings if original is None else settings | {"original_max_position_embeddings": original}


def _query_scalar(file: GgufFile, prefix: str, largest: bool) -> int:
    shared = file[prefix + "embedding_length"] // file[prefix + "attention.head_count"]
    return shared if largest else file.get(prefix + "attention.key_length", shared)


def _layer_types(layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees everything, the others a window."""
    return ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]


_READERS: Mapping[str, Callable[[GgufFile, str], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
