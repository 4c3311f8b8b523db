"""A model directory as llama.cpp's converter would write it: one GGUF file, or several parts.

Knows nothing of `tgi`: names come from the format's own package, reordered rows and shifted norms from the converter's
rules, so that a reader is tested against something that it did not write.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SHIFTED = ("gemma", "gemma2", "gemma3")


def write_gguf_of(directory: Path, file: Path, architecture: str, parts: int = 1) -> Path:
    """The float32 model in `directory` as GGUF; the first of `parts` files is returned."""
    config = json.loads((directory / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", heads)
    names = gguf.get_tensor_name_map(_architecture(architecture), layers)
    tensors: dict[str, np.ndarray] = {}
    for name, values in _read_safetensors(directory / "model.safetensors").items():
        if architecture == "llama" and "q_proj" in name:
            values = _permuted(values, heads)
        if architecture == "llama" and "k_proj" in name:
            values = _permuted(values, kv_heads)
        if architecture in SHIFTED and name.endswith("norm.weight"):
            values = values + 1
        base, _, leaf = name.rpartition(".")
        tensors[f"{names.get_name(base)}.{leaf}"] = values
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key in ("long", "short") if "long_factor" in scaling else ():
        tensors[f"rope_factors_{key}.weight"] = np.array(scaling[f"{key}_factor"], np.float32)
    paths = [file]
    if parts > 1:
        paths = [file.with_name(f"{file.stem}-{part:05d}-of-{parts:05d}.gguf") for part in range(1, parts + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, architecture)
        if number == 0:
            _add_config(writer, config, architecture, scaling)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        for name, values in list(tensors.items())[number::parts]:
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str, scaling: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(_theta(config, scaling))
    if config.get("sliding_window") and architecture != "qwen2":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(head_dim * scaling.get("partial_rotary_factor", 1.0)))
        if original := config.get("original_max_position_embeddings"):
            writer.add_uint32("phi3.rope.scaling.original_context_length", original)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_eos_token_id(1)


def _theta(config: dict[str, Any], scaling: dict[str, Any]) -> float:
    inner = scaling.get("full_attention", scaling)
    return float(inner.get("rope_theta") or config.get("rope_theta", 10000.0))


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == name)


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    return {
        name: np.frombuffer(raw[8 + length :][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
