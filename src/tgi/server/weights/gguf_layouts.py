"""What each architecture's GGUF file calls its tensors and how it keeps them, against the model's safetensors files.

Data alone: `gguf_checkpoint.py` reads by it. Names of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

# "blk.0.ffn_gate.3.weight": older files keep the tensors of experts one by one.
BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+?)(?:\.(?P<index>\d+))?\.(?P<leaf>\w+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys are the file's parts ("attn_q"), values the safetensors files' modules ("self_attn.q_proj"). A key with its
    leaf ("attn_sinks.weight") comes before one without and gives the whole name. "{}" in a value: the file stacks what
    the others keep one by one, numbered from zero."""

    top: Mapping[str, str]
    block: Mapping[str, str]
    layers: str = "model.layers"
    permuted: bool = False  # rows of queries and keys lie as for a rotation of neighbours instead of halves
    grouped: bool = (
        False  # attn_qkv: safetensors files keep each key head behind its queries, the file all queries first
    )
    shifted_norms: bool = False  # the file's weights of norms have one added, which the model would otherwise do
    transposed: frozenset[str] = frozenset()  # parts whose matrices safetensors files keep [in, out]
    in_turn: Mapping[str, str] | None = None  # part -> the part whose rows take turns with its own in safetensors files
    joined: Mapping[str, str] | None = None  # part, with rows as columns -> the part whose rows follow, head by head

    def name(self, name: str) -> str:
        """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight". A name outside the tables stays as it is.
        Of a stack the result has "{}" where the number of one of it belongs."""
        block = BLOCK_NAME.fullmatch(name)
        if block is None:
            return _named(self.top, *_split(name)) or name
        part, index = block["part"], block["index"]
        own = _named(self.block, part if index is None else f"{part}_exps", block["leaf"])
        if own is None:
            return name
        return f"{self.layers}.{block['layer']}.{own if index is None else own.format(index)}"


def part_of(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "attn_q", "output.weight" -> "output"."""
    block = BLOCK_NAME.fullmatch(name)
    return _split(name)[0] if block is None else block["part"]


def layout_of(architecture: str, names: Collection[str]) -> Layout:
    """The layout of a file with tensors of these names; that of llama for an architecture that is not known."""
    layout = LAYOUTS.get(architecture, LAYOUTS["llama"])
    if architecture == "falcon" and "blk.0.attn_norm_2.weight" in names:
        # Two norms beside each other: the first is the MLP's.
        return replace(layout, block={**layout.block, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
    return layout


def _split(name: str) -> tuple[str, str]:
    part, _, leaf = name.rpartition(".")
    return part, leaf


def _named(table: Mapping[str, str], part: str, leaf: str) -> str | None:
    whole = table.get(f"{part}.{leaf}")
    if whole is not None:
        return whole
    return f"{table[part]}.{leaf}" if part in table else None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_LLAMA = _ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL = _LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_QWEN_MOE = _LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DEEPSEEK = _LLAMA | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GPT_OSS = _ATTENTION | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
# Gemma norms the output of a sublayer too, and names the norms for where they stand.
_GEMMA = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NEOX_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM = _NEOX_MLP | {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
}
_NEOX_TOP = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_NEOX = _BLOOM | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
_MPT_TOP = {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_PHI = _ATTENTION | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_STABLELM = _LLAMA | {
    "attn_q_norm": "self_attn.q_layernorm.norms.{}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}
_OLMO2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

LAYOUTS: Mapping[str, Layout] = {
    "bloom": Layout(_BLOOM_TOP, _BLOOM, "transformer.h", grouped=True),
    "cohere2": Layout(_TOP, _LLAMA),
    "command-r": Layout(_TOP, _LLAMA),
    "deepseek2": Layout(_TOP, _DEEPSEEK, joined={"attn_k_b": "attn_v_b"}),
    "falcon": Layout(_BLOOM_TOP, _BLOOM, "transformer.h", grouped=True),
    "gemma": Layout(_TOP, _LLAMA, shifted_norms=True),
    "gemma2": Layout(_TOP, _GEMMA, shifted_norms=True),
    "gemma3": Layout(_TOP, _GEMMA, shifted_norms=True),
    "gpt-oss": Layout(
        _TOP,
        _GPT_OSS,
        transposed=frozenset({"ffn_gate_exps", "ffn_down_exps"}),
        in_turn={"ffn_gate_exps": "ffn_up_exps"},
    ),
    "gpt2": Layout(
        _GPT2_TOP,
        _GPT2,
        "transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "gptneox": Layout(_NEOX_TOP, _NEOX, "gpt_neox.layers", grouped=True),
    "granite": Layout(_TOP, _LLAMA, permuted=True),
    "llama": Layout(_TOP, _MIXTRAL, permuted=True),
    "mistral3": Layout(_TOP, _LLAMA, permuted=True),
    "mpt": Layout(_MPT_TOP, _MPT, "transformer.blocks"),
    "olmo": Layout(_TOP, _LLAMA, permuted=True),
    "olmo2": Layout(_TOP, _OLMO2),
    "phi2": Layout(_TOP | {"output_norm": "model.final_layernorm"}, _PHI),
    "phi3": Layout(_TOP, _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Layout(_TOP, _LLAMA),
    "qwen2moe": Layout(_TOP, _QWEN_MOE),
    "qwen3": Layout(_TOP, _LLAMA),
    "qwen3moe": Layout(_TOP, _QWEN_MOE),
    "smollm3": Layout(_TOP, _LLAMA, permuted=True),
    "stablelm": Layout(_TOP, _STABLELM),
    "starcoder": Layout(_GPT2_TOP, _GPT2, "transformer.h"),
    "starcoder2": Layout(_TOP, _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
