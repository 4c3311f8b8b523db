"""A model directory as llama.cpp's converter would write it: one GGUF file, or several parts.

Knows nothing of `tgi`: names come from the format's own package, reordered rows, stacks and shifted norms from the
converter's rules, so that a reader is tested against something that it did not write.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PERMUTED = ("granite", "llama", "mistral3", "olmo", "smollm3")
SHIFTED = ("gemma", "gemma2", "gemma3")
EXPERT = re.compile(r"(?P<place>.*\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")
HEAD_NORM = re.compile(r"(?P<place>.*\.[qk]_layernorm)\.norms\.(?P<number>\d+)\.weight")
FFN = {"w1": "gate", "w2": "down", "w3": "up"}

Tensors = dict[str, np.ndarray]


def write_gguf_of(
    directory: Path,
    file: Path,
    architecture: str,
    parts: int = 1,
    *,
    stacked: bool = True,
    quantised: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """The float32 model in `directory` as GGUF; the first of `parts` files is returned. `stacked`: experts lie in one
    tensor, as they have since early 2024. `quantised`: the type of the matrices of the layers."""
    config = json.loads((directory / "config.json").read_text())
    tensors = _tensors(directory, config, architecture, stacked)
    paths = [file]
    if parts > 1:
        paths = [file.with_name(f"{file.stem}-{part:05d}-of-{parts:05d}.gguf") for part in range(1, parts + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, architecture)
        if number == 0:
            _add_config(writer, config, architecture)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        for name, values in list(tensors.items())[number::parts]:
            if quantised is not None and name.startswith("blk.") and values.ndim > 1:
                writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _tensors(directory: Path, config: Mapping[str, Any], architecture: str, stacked: bool) -> Tensors:
    names = gguf.get_tensor_name_map(
        _architecture(architecture), _first(config, "num_hidden_layers", "n_layer", "n_layers")
    )
    stacks: dict[str, dict[int, np.ndarray]] = {}
    plain: Tensors = {}
    for name, values in _read_safetensors(directory / "model.safetensors").items():
        if found := EXPERT.fullmatch(name):
            place, module = found["place"], found["module"]
            if not stacked:
                layer = re.findall(r"\d+", place)[0]
                plain[f"blk.{layer}.ffn_{FFN[module]}.{found['number']}.weight"] = values
                continue
            place = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", place)
            stacks.setdefault(f"{place}.{module}", {})[int(found["number"])] = values
        elif found := HEAD_NORM.fullmatch(name):
            stacks.setdefault(found["place"], {})[int(found["number"])] = values
        else:
            plain |= _converted(name, values, config, architecture)
    for name, members in stacks.items():
        plain[f"{name}.weight"] = np.stack([members[number] for number in sorted(members)])
    tensors: Tensors = {}
    for name, values in plain.items():
        base, _, leaf = name.rpartition(".")
        own = base if name.startswith("blk.") else names.get_name(base)
        assert own is not None, f"{architecture} has no {name}"
        tensors[f"{own}.{leaf}"] = np.ascontiguousarray(values)
    return tensors | _rope_tensors(config)


def _converted(name: str, values: np.ndarray, config: Mapping[str, Any], architecture: str) -> Tensors:
    """What becomes of one tensor: names that the format's package knows."""
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    if architecture in PERMUTED and "q_proj" in name:
        values = _permuted(values, heads)
    if architecture in PERMUTED and "k_proj" in name:
        values = _permuted(values, kv_heads)
    if architecture in SHIFTED and name.endswith("norm.weight"):
        values = values + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        values = values.T
    if architecture == "falcon" and "query_key_value" in name:
        groups = 1
        if config.get("new_decoder_architecture") or not config.get("multi_query", True):
            groups = config.get("num_kv_heads") or heads
        values = _ungrouped(values, heads, groups)
    if architecture in ("bloom", "gptneox") and "query_key_value" in name:
        values = _ungrouped(values, heads, heads)
    if architecture == "bloom":
        name = name.removeprefix("transformer.")
    if name.endswith("shared_expert_gate.weight"):
        values = values.squeeze()
    if name.endswith("kv_b_proj.weight"):
        heads_own = values.reshape(heads, -1, values.shape[-1])
        keys, more = np.split(heads_own, [config["qk_nope_head_dim"]], axis=1)
        base = name.replace("kv_b_proj", "{}_b_proj")
        return {base.format("k"): keys.swapaxes(1, 2), base.format("v"): more}
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    if name.endswith("sinks"):
        name += ".weight"
    if architecture == "gpt-oss" and ".experts." in name:
        return _gpt_oss_experts(name, values)
    return {name: values}


def _gpt_oss_experts(name: str, values: np.ndarray) -> Tensors:
    base, _, module = name.rpartition(".")
    leaf = "bias" if module.endswith("_bias") else "weight"
    module = module.removesuffix("_bias")
    if leaf == "weight":
        values = values.swapaxes(-1, -2)
    if module == "gate_up_proj":
        return {f"{base}.gate_proj.{leaf}": values[:, ::2], f"{base}.up_proj.{leaf}": values[:, 1::2]}
    return {f"{base}.{module}.{leaf}": values}


def _rope_tensors(config: Mapping[str, Any]) -> Tensors:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "long_factor" in scaling:
        return {
            f"rope_factors_{key}.weight": np.array(scaling[f"{key}_factor"], np.float32) for key in ("long", "short")
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = (scaling["original_max_position_embeddings"] / scaling[f"{key}_freq_factor"] for key in ("low", "high"))
    factors: list[float] = []
    for index in range(0, dim, 2):
        length = 2 * math.pi * scaling["rope_theta"] ** (index / dim)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    writer.add_context_length(
        _first(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", None) or hidden
    )
    writer.add_embedding_length(hidden)
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer", "n_layers"))
    inner = _first(config, "intermediate_size", "n_inner", "ffn_hidden_size", None)
    writer.add_feed_forward_length(inner or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_eos_token_id(1)
    if eps := _first(config, "rms_norm_eps", None):
        writer.add_layer_norm_rms_eps(eps)
    eps = _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", None)
    if eps or architecture == "mpt":
        writer.add_layer_norm_eps(eps or 1e-5)
    if architecture in ("gpt2", "starcoder", "mpt", "bloom", "gptneox"):
        if architecture == "starcoder":
            writer.add_head_count_kv(1)
        if architecture == "mpt":
            writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
            writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
        if architecture == "gptneox":
            writer.add_parallel_residual(config["use_parallel_residual"])
            share = config["rope_parameters"]["partial_rotary_factor"]
            writer.add_rope_dimension_count(int(share * (hidden // heads)))
        return
    if architecture == "falcon":
        writer.add_tensor_data_layout("jploski")
        writer.add_head_count_kv((config["new_decoder_architecture"] and config["num_kv_heads"]) or 1)
        return
    if architecture == "deepseek2":
        _add_latent_attention(writer, config)
        return
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner_scaling = scaling.get("full_attention", scaling)
    writer.add_rope_freq_base(float(inner_scaling.get("rope_theta") or config.get("rope_theta", 10000.0)))
    share = inner_scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if architecture in PERMUTED:
        writer.add_rope_dimension_count(head_dim)
    elif share:
        writer.add_rope_dimension_count(int(head_dim * share))
    _add_scaling(writer, inner_scaling)
    if architecture in ("cohere2", "gemma2", "gemma3", "gpt-oss", "olmo2", "phi3") and "sliding_window" in config:
        # Phi-4, of the architecture of a model with windows, says that it has none.
        writer.add_sliding_window(config["sliding_window"] or 0)
    if architecture in ("olmo2", "gemma3", "cohere2") and "layer_types" in config and "sliding_window" in config:
        flags = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(flags if architecture == "olmo2" else flags.index(False) + 1)
    if architecture == "phi3" and (original := config.get("original_max_position_embeddings")):
        writer.add_rope_scaling_orig_ctx_len(original)
    _add_experts(writer, config, architecture)
    _add_multipliers(writer, config, architecture)


def _add_latent_attention(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    scaling = config["rope_parameters"]
    writer.add_rope_freq_base(scaling["rope_theta"])
    _add_scaling(writer, scaling)
    if measure := scaling.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * measure)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("topk_method") != "greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_scaling(writer: gguf.GGUFWriter, scaling: Mapping[str, Any]) -> None:
    if scaling.get("rope_type") not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(scaling["factor"])
    if "original_max_position_embeddings" in scaling:
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    if count := _first(config, "num_local_experts", "num_experts", None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)


def _add_multipliers(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
        writer.add_clamp_kqv(config["clip_qkv"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _first(config: Mapping[str, Any], *names: str | None) -> Any:
    """The first that is there and says something; a last name of None: else None."""
    for name in names:
        if name is None or config.get(name) is not None:
            return None if name is None else config[name]
    raise KeyError(names)


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _ungrouped(rows: np.ndarray, heads: int, groups: int) -> np.ndarray:
    """Queries, keys and values of a group beside each other -> all queries, all keys, all values."""
    grouped = rows.reshape(groups, heads // groups + 2, -1, *rows.shape[1:])
    return np.concatenate(
        [part.reshape(-1, *rows.shape[1:]) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]
    )


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == name)


def _read_safetensors(file: Path) -> Tensors:
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    return {
        name: np.frombuffer(raw[8 + length :][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
