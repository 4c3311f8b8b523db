"""What a GGUF file says, or its architecture implies, beyond the common facts: under the names of config.json.

Model files read such settings from `ModelConfig.raw`, whatever format the model came in. Knows no weights, but for the
rope factors that the format keeps as tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tgi.errors import StartupError
from tgi.gguf_file import BadGguf, GgufFile

F32 = 0  # ggml's number of the type
# The format has no key for how a model of Gemma scales its queries; only the largest do not use their head's size.
GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
GEMMA3_PATTERN = 6  # every sixth layer sees everything
GEMMA3_LOCAL_THETA = 10_000.0
COHERE2_PATTERN = OLMO3_PATTERN = 4
MOST_LAYERS = 1 << 12  # what a list with an entry for each may be made for
MOST_UNGROUPED = 64  # experts that DeepSeek has made a model of without groups
GATING = {1: "softmax", 2: "sigmoid"}  # the format's numbers
_WITH_EXPERTS = ("deepseek2", "gpt-oss", "qwen2moe", "qwen3moe")
_EPS_NAMES = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")  # of one number, in config.json's spellings


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the name of an architecture stands for, in words of config.json."""

    model_type: str
    class_name: str
    hidden_act: str = "silu"


ARCHITECTURES: Mapping[str, Architecture] = {
    "bloom": Architecture("bloom", "BloomForCausalLM", "gelu_pytorch_tanh"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM"),
    "command-r": Architecture("cohere", "CohereForCausalLM"),
    "deepseek2": Architecture("deepseek_v2", "DeepseekV2ForCausalLM"),
    "falcon": Architecture("falcon", "FalconForCausalLM", "gelu"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", "gelu_pytorch_tanh"),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", "gelu_pytorch_tanh"),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", "gelu_pytorch_tanh"),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM"),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", "gelu_new"),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", "gelu"),
    "granite": Architecture("granite", "GraniteForCausalLM"),
    "llama": Architecture("llama", "LlamaForCausalLM"),
    "mistral3": Architecture("mistral", "MistralForCausalLM"),
    "mpt": Architecture("mpt", "MptForCausalLM", "gelu"),
    "olmo": Architecture("olmo", "OlmoForCausalLM"),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
    "phi2": Architecture("phi", "PhiForCausalLM", "gelu_new"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM"),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM"),
    "starcoder": Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", "gelu_pytorch_tanh"),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", "gelu_pytorch_tanh"),
}
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM")
_DEEPSEEK_V3 = Architecture("deepseek_v3", "DeepseekV3ForCausalLM")
_OLMO3 = Architecture("olmo3", "Olmo3ForCausalLM")


def architecture_of(file: GgufFile) -> Architecture:
    """What the file's architecture stands for, beyond its name for what only its settings tell apart. Raises
    StartupError naming one that is not supported."""
    name = file.get("general.architecture")
    if not isinstance(name, str):
        raise StartupError(f"{file.path} does not say general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise StartupError(f"{file.path}: GGUF files of architecture {name!r} are not supported ({known} are)")
    if file.get(f"{name}.attention.temperature_scale"):
        raise StartupError(f"{file.path}: attention with a temperature by position is not supported")
    has_experts = bool(file.get(f"{name}.expert_count"))
    if has_experts and name not in ("llama", *_WITH_EXPERTS):
        raise StartupError(f"{file.path}: experts in a file of architecture {name!r} are not supported")
    if name == "llama" and has_experts:
        return _MIXTRAL
    if name == "deepseek2" and _has_corrections(file):
        return _DEEPSEEK_V3
    if name == "olmo2" and file.get("olmo2.attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES[name]


def settings_of(file: GgufFile) -> dict[str, Any]:
    """The further settings of the file's architecture; {} for one that has none. Raises StartupError where one is
    missing or makes no sense."""
    architecture = file["general.architecture"]
    prefix = f"{architecture}."
    read = _READERS.get(architecture)
    try:
        settings = {} if read is None else read(file, prefix)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise StartupError(
            f"{file.path}: its settings of a {architecture} model are missing or make no sense ({error}); "
            "fetch it again"
        ) from error
    eps = file.get(prefix + "attention.layer_norm_epsilon")
    return settings if eps is None else dict.fromkeys(_EPS_NAMES, eps) | settings


def longrope_of(file: GgufFile) -> dict[str, Any]:
    """`long_factor` and `short_factor` of a file that has them, else {}. Raises StartupError where they are no lists of
    numbers."""
    names = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
    if not any(name in file.tensors for name in names.values()):
        return {}
    return {key: _floats(file, name) for key, name in names.items()}


def _floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.ggml_type != F32 or len(tensor.shape) != 1:
        raise StartupError(f"{file.path} holds no list {name} in float32; fetch it again")
    try:
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.bytes_of(tensor, 4 * tensor.shape[0])))
    except BadGguf as error:
        raise StartupError(str(error)) from error


def _llama(file: GgufFile, prefix: str) -> dict[str, Any]:
    return _experts(file, prefix) if file.get(prefix + "expert_count") else {}


def _experts(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Under every name that a model's configuration has for them."""
    count, chosen = file[prefix + "expert_count"], file[prefix + "expert_used_count"]
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen}


def _qwen_moe(file: GgufFile, prefix: str) -> dict[str, Any]:
    shared = file.get(prefix + "expert_shared_feed_forward_length")
    return _experts(file, prefix) | {
        "moe_intermediate_size": file.get(prefix + "expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
        # Qwen2's weights of experts are likelihoods among all, Qwen3's among those chosen.
        "norm_topk_prob": bool(file.get(prefix + "expert_weights_norm", prefix == "qwen3moe.")),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _deepseek2(file: GgufFile, prefix: str) -> dict[str, Any]:
    count, groups = file[prefix + "expert_count"], file.get(prefix + "expert_group_count")
    if groups is None and count > MOST_UNGROUPED:
        raise ValueError(f"{count} experts in no groups, as in files made before late 2025")
    # Newer files have key_length for what is cached, and these for a head.
    key, value = (
        file.get(f"{prefix}attention.{name}_length_mla") or file[f"{prefix}attention.{name}_length"]
        for name in ("key", "value")
    )
    rotated = file[prefix + "rope.dimension_count"]
    has_corrections = _has_corrections(file)
    return _experts(file, prefix) | {
        "n_routed_experts": count,
        "n_shared_experts": file.get(prefix + "expert_shared_count"),
        "moe_intermediate_size": file[prefix + "expert_feed_forward_length"],
        "first_k_dense_replace": file.get(prefix + "leading_dense_block_count", 0),
        "kv_lora_rank": file[prefix + "attention.kv_lora_rank"],
        "q_lora_rank": file.get(prefix + "attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_group": groups or 1,
        "topk_group": file.get(prefix + "expert_group_used_count") or 1,
        "topk_method": "noaux_tc" if has_corrections else "group_limited_greedy",
        "scoring_func": GATING[file.get(prefix + "expert_gating_func") or 1],
        "norm_topk_prob": bool(file.get(prefix + "expert_weights_norm", False)),
        "routed_scaling_factor": file.get(prefix + "expert_weights_scale") or 1.0,
    }


def _has_corrections(file: GgufFile) -> bool:
    return any(name.endswith(".exp_probs_b.bias") for name in file.tensors)


def _gemma2(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = _layers(file, prefix)
    return {
        "attn_logit_softcapping": file.get(prefix + "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get(prefix + "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, prefix, layers == GEMMA2_27B_LAYERS),
        "layer_types": _layer_types(layers, 2),
    }


def _gemma3(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = _layers(file, prefix)
    return {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get(prefix + "final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(file, prefix, layers == GEMMA3_27B_LAYERS),
        "rope_local_base_freq": file.get(prefix + "rope.freq_base_swa", GEMMA3_LOCAL_THETA),
        "layer_types": _windows(file, prefix, GEMMA3_PATTERN),
    }


def _command_r(file: GgufFile, prefix: str) -> dict[str, Any]:
    settings = {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    scale = file.get(prefix + "logit_scale")
    return settings if scale is None else settings | {"logit_scale": scale}


def _cohere2(file: GgufFile, prefix: str) -> dict[str, Any]:
    return _command_r(file, prefix) | {"layer_types": _windows(file, prefix, COHERE2_PATTERN)}


def _olmo(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {"clip_qkv": file.get(prefix + "attention.clamp_kqv")}


def _olmo2(file: GgufFile, prefix: str) -> dict[str, Any]:
    has_windows = bool(file.get(prefix + "attention.sliding_window"))
    return {"layer_types": _windows(file, prefix, OLMO3_PATTERN)} if has_windows else {}


def _granite(file: GgufFile, prefix: str) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: file[prefix + key] for name, key in keys.items() if prefix + key in file}


def _falcon(file: GgufFile, prefix: str) -> dict[str, Any]:
    kv_heads = file.get(prefix + "attention.head_count_kv", 1)
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    return {
        "new_decoder_architecture": has_two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _mpt(file: GgufFile, prefix: str) -> dict[str, Any]:
    slope = file.get(prefix + "attention.max_alibi_bias", 0.0)
    options = {"alibi": slope > 0, "alibi_bias_max": slope or None}
    return {"attn_config": options | {"clip_qkv": file.get(prefix + "attention.clamp_kqv")}}


def _gptneox(file: GgufFile, prefix: str) -> dict[str, Any]:
    return _rotated(file, prefix) | {
        "use_parallel_residual": file.get(prefix + "use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _stablelm(file: GgufFile, prefix: str) -> dict[str, Any]:
    return _rotated(file, prefix) | {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt2(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {"n_positions": file[prefix + "context_length"]}  # rows of a table


def _starcoder(file: GgufFile, prefix: str) -> dict[str, Any]:
    return _gpt2(file, prefix) | {"multi_query": file.get(prefix + "attention.head_count_kv", 1) == 1}


def _starcoder2(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors}


def _rotated(file: GgufFile, prefix: str) -> dict[str, Any]:
    """The share of a head that is rotated."""
    heads = file[prefix + "attention.head_count"]
    head_dim = file.get(prefix + "attention.key_length") or file[prefix + "embedding_length"] // heads
    return {"partial_rotary_factor": file.get(prefix + "rope.dimension_count", head_dim) / head_dim}


def _phi3(file: GgufFile, prefix: str) -> dict[str, Any]:
    original = file.get(prefix + "rope.scaling.original_context_length")
    settings = _rotated(file, prefix)
    return settings if original is None else settings | {"original_max_position_embeddings": original}


def _layers(file: GgufFile, prefix: str) -> int:
    layers = file[prefix + "block_count"]
    if not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    return layers


def _query_scalar(file: GgufFile, prefix: str, largest: bool) -> int:
    shared = file[prefix + "embedding_length"] // file[prefix + "attention.head_count"]
    return shared if largest else file.get(prefix + "attention.key_length", shared)


def _layer_types(layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees everything, the others a window."""
    return ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]


def _windows(file: GgufFile, prefix: str, usual: int) -> list[str]:
    """By the key that says which layers have a window, one flag each or the number of the first without; else every
    `usual`-th has none."""
    layers = _layers(file, prefix)
    pattern = file.get(prefix + "attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) >= layers:
        return ["sliding_attention" if has_window else "full_attention" for has_window in pattern[:layers]]
    return _layer_types(layers, pattern if isinstance(pattern, int) and pattern > 0 else usual)


_READERS: Mapping[str, Callable[[GgufFile, str], dict[str, Any]]] = {
    "cohere2": _cohere2,
    "command-r": _command_r,
    "deepseek2": _deepseek2,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _experts,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "granite": _granite,
    "llama": _llama,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "phi2": _rotated,
    "phi3": _phi3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
    "starcoder2": _starcoder2,
}
