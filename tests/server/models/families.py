"""Every family of models: one row each, and a tiny random model on disk made from a row by transformers.

The table is data: it imports neither torch nor transformers until a model is made. docs/models.md is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

VOCAB_SIZE = 200
# By transformers' common names, which most configurations know; a family with names of its own says `sizes=False`.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Attention sharp enough to tell positions apart, layers that outweigh the embedding, logits that spread: else greedy
# decoding settles on one token and says little.
GAIN = 1.5
LOGIT_DEVIATION = 2.0
NOISE = 0.1  # on norms and biases


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: a shape of model that one file in `tgi.server.models` serves."""

    name: str  # unique: the model_type, then "-" and a word for what is special where a model_type has several rows
    config: str  # transformers' configuration class
    covers: str  # what of the architecture this row has, in a few words
    settings: Mapping[str, Any] = field(default_factory=dict)  # beyond SIZES
    sizes: bool = True  # False: `settings` is all there is
    also: Sequence[str] = ()  # further model types that the same row stands for
    quick: bool = False  # in `make test` too: a few of different kinds
    ranks: int = 2  # 1: the family cannot be split
    tolerance: float = 1e-4  # of a logit
    attention: str = "eager"  # transformers' implementation that is the reference
    deviation: float = LOGIT_DEVIATION  # less where a scaled embedding that is the head too would repeat what it read

    @property
    def model_types(self) -> tuple[str, ...]:
        return (self.name.partition("-")[0], *self.also)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    **_IDS,
}
_FALCON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **_IDS,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **_IDS,
}
_BART = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 512,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
# No two widths alike, so that a mistake about one shows.
_DEEPSEEK = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaConfig",
        "grouped-query attention, gated MLP",
        {"rope_parameters": _LLAMA3},
        also=("smollm", "yi"),
        quick=True,
    ),
    Family(
        "llama-linear",
        "LlamaConfig",
        "linear rope, tied head, biases",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Family(
        "llama-yarn",
        "LlamaConfig",
        "yarn rope, one key-value head",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "num_key_value_heads": 1,
        },
    ),
    Family("mistral", "MistralConfig", "sliding window", {"sliding_window": 24, "head_dim": 16}),
    Family(
        "granite",
        "GraniteConfig",
        "multipliers of embedding, residual, attention and logits",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
        },
    ),
    Family(
        "qwen2",
        "Qwen2Config",
        "biases of queries, keys and values; a window in the last layer",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    Family("qwen3", "Qwen3Config", "norms of queries and keys", {"head_dim": 32}),
    Family(
        "smollm3",
        "SmolLM3Config",
        "a layer without positions, a layer with a window",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family(
        "phi3",
        "Phi3Config",
        "fused projections, part of a head rotated, window",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_window": 24,
        },
    ),
    Family(
        "phi3-longrope",
        "Phi3Config",
        "longrope",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + index / 2 for index in range(8)],
            },
        },
    ),
    Family("gemma", "GemmaConfig", "scaled embedding, offset norms", {"head_dim": 32}, deviation=0.7),
    Family(
        "gemma2",
        "Gemma2Config",
        "norms behind attention and MLP, soft caps, windows in turn",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 5.0,
        },
        deviation=0.3,
        quick=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3TextConfig",
        "rotations of their own for local layers, norms of queries and keys",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
        },
        deviation=0.3,
    ),
    Family(
        "cohere",
        "CohereConfig",
        "attention beside MLP, interleaved rope, norms per head, scaled logits",
        {
            "logit_scale": 0.5,
            "use_qk_norm": True,
        },
        quick=True,
    ),
    Family(
        "cohere2",
        "Cohere2Config",
        "windows; full layers without positions",
        {
            "logit_scale": 0.5,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family("olmo", "OlmoConfig", "norms without weights, clipped queries, keys and values", {"clip_qkv": 1.0}),
    Family("olmo2", "Olmo2Config", "norms behind attention and MLP, queries and keys normed over all heads"),
    Family(
        "olmo3",
        "Olmo3Config",
        "windows, a scaling for full layers alone",
        {
            "sliding_window": 24,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    Family(
        "stablelm",
        "StableLmConfig",
        "a quarter of a head rotated, biases of queries, keys and values",
        {
            "use_qkv_bias": True,
        },
    ),
    Family(
        "stablelm-parallel",
        "StableLmConfig",
        "attention beside MLP, a norm for each head",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
        },
        also=("stablelm_epoch",),
    ),
    Family(
        "gpt2",
        "GPT2Config",
        "learned positions, weights kept [in, out], scores scaled by layer",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
        sizes=False,
    ),
    Family("gpt_bigcode", "GPTBigCodeConfig", "one key-value head", _GPT2, sizes=False),
    Family(
        "gpt_bigcode-heads",
        "GPTBigCodeConfig",
        "a key-value head for each head",
        {**_GPT2, "multi_query": False},
        sizes=False,
    ),
    Family(
        "gpt_neo",
        "GPTNeoConfig",
        "windows in turn with full attention, scores not scaled",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 2,
            "num_heads": 8,
            "max_position_embeddings": 512,
            **_IDS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 24,
        },
        sizes=False,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXConfig",
        "attention beside MLP with a norm each, queries, keys and values together, a quarter of a head rotated",
        {"num_key_value_heads": 4},
    ),
    Family(
        "gpt_neox-sequential",
        "GPTNeoXConfig",
        "MLP behind attention, no biases in attention",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False},
    ),
    Family(
        "gptj",
        "GPTJConfig",
        "attention beside MLP, interleaved rope of half a head, a head with biases",
        {**_GPT2, "rotary_dim": 8},
        sizes=False,
    ),
    Family(
        "starcoder2",
        "Starcoder2Config",
        "grouped-query attention, window, biases, plain MLP",
        {"sliding_window": 24},
    ),
    Family(
        "falcon",
        "FalconConfig",
        "one key-value head, attention beside MLP on one norm",
        _FALCON,
        also=("RefinedWebModel",),
        sizes=False,
    ),
    Family(
        "falcon-new",
        "FalconConfig",
        "new architecture: groups of heads, two norms, biases",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        also=("RefinedWeb",),
        sizes=False,
    ),
    Family(
        "falcon-one_norm",
        "FalconConfig",
        "new architecture with one norm and a head of its own",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        sizes=False,
    ),
    Family(
        "falcon-alibi",
        "FalconConfig",
        "linear biases, MLP behind attention, a key-value head for each head",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        sizes=False,
        attention="sdpa",  # eager attention adds the biases twice
    ),
    Family(
        "bloom",
        "BloomConfig",
        "linear biases, a norm behind the embedding, a head of its own",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "tie_word_embeddings": False,
            **_IDS,
        },
        sizes=False,
        quick=True,
    ),
    Family(
        "bloom-heads",
        "BloomConfig",
        "six heads, a tied head, the residual taken behind the norm",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "n_layer": 2,
            "n_head": 6,
            "apply_residual_connection_post_layernorm": True,
            **_IDS,
        },
        sizes=False,
    ),
    Family(
        "mpt",
        "MptConfig",
        "linear biases, no others, queries, keys and values clipped",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 512,
            "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.4},
            **_IDS,
        },
        sizes=False,
    ),
    Family("opt", "OPTConfig", "learned positions from the third row on", _OPT, sizes=False),
    Family(
        "opt-narrow",
        "OPTConfig",
        "norms behind attention and MLP, an embedding narrower than the layers",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        sizes=False,
    ),
    Family(
        "opt-plain",
        "OPTConfig",
        "no biases, norms without weights, no last norm",
        {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True},
        sizes=False,
    ),
    Family(
        "phi",
        "PhiConfig",
        "attention beside MLP, half of a head rotated, biases, the head's too",
        also=("phi-msft",),
    ),
    Family(
        "phi-norms",
        "PhiConfig",
        "norms of queries and keys, a head for each key-value head",
        {"qk_layernorm": True, "num_key_value_heads": 4},
    ),
    Family(
        "mixtral",
        "MixtralConfig",
        "a mixture of experts in every layer, two for a token",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        quick=True,
    ),
    Family(
        "phimoe",
        "PhimoeConfig",
        "experts chosen by SparseMixer, norms with biases, longrope with a magnitude of its own, a head with a bias",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
                "factor": 16.0,
                # One list twice: transformers takes the short one whatever the length.
                "short_factor": [1.0 + index / 2 for index in range(8)],
                "long_factor": [1.0 + index / 2 for index in range(8)],
                "short_mscale": 1.1,
                "long_mscale": 1.25,
            },
        },
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "experts beside a shared one with a gate, a layer without, windows",
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "many small experts, their weights normalised; norms of queries and keys; every other layer without",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    Family(
        "dbrx",
        "DbrxConfig",
        "experts in three tensors, queries, keys and values clipped, norms without biases",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **_IDS,
        },
        sizes=False,
    ),
    Family(
        "gpt_oss",
        "GptOssConfig",
        "attention sinks, windows in turn, experts with biases and a clamped SwiGLU, yarn rope not truncated",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2Config",
        "latent attention, experts by groups, shared experts, a dense layer first, yarn rope with sharper scores",
        {
            **_DEEPSEEK,
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
        quick=True,
    ),
    Family(
        "deepseek_v2-lite",
        "DeepseekV2Config",
        "queries without a latent, experts without groups, biases",
        {**_DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "experts by sigmoid scores with a correction, their weights normalised and scaled",
        {**_DEEPSEEK, "q_lora_rank": 48, "routed_scaling_factor": 2.0},
        also=("kimi_k2",),
    ),
)

# With a file, and a state for each row in the place of keys and values: no prefix to share.
RECURRENT: tuple[Family, ...] = (
    Family(
        "mamba",
        "MambaConfig",
        "selective state spaces",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        sizes=False,
        ranks=1,
        quick=True,
    ),
    Family(
        "falcon_mamba",
        "FalconMambaConfig",
        "norms over what steers the state, a head of its own",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "time_step_rank": 6,
            "mixer_rms_eps": 1e-2,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        sizes=False,
        ranks=1,
    ),
)
# Without a file of their own: transformers' code over our KV cache. Whatever else it has, it is served the same way.
THROUGH_TRANSFORMERS: tuple[Family, ...] = (
    Family("olmoe", "OlmoeConfig", "experts", {"num_experts": 4, "num_experts_per_tok": 2}, ranks=1),
    Family("granitemoe", "GraniteMoeConfig", "experts, multipliers", {"logits_scaling": 1.5}, ranks=1),
    Family(
        "exaone4",
        "Exaone4Config",
        "windows, full layers without positions",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        ranks=1,
        quick=True,
    ),
    Family(
        "arcee",
        "ArceeConfig",
        "dynamic rope",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
        ranks=1,
    ),
    Family("nemotron", "NemotronConfig", "LayerNorms with offsets", ranks=1),
)
# Over caches of transformers.
PADDED: tuple[Family, ...] = (
    Family("biogpt", "BioGptConfig", "a decoder that takes no attention function", deviation=0.3, ranks=1),
    Family(
        "lfm2",
        "Lfm2Config",
        "convolutions beside attention",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96},
        ranks=1,
    ),
    Family(
        "jamba",
        "JambaConfig",
        "states in turn with attention, experts",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        ranks=1,
    ),
    Family(
        "bamba",
        "BambaConfig",
        "states in turn with attention, whose positions have to be told",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
        ranks=1,
        quick=True,
    ),
    Family(
        "falcon_h1",
        "FalconH1Config",
        "states beside attention in every layer, a multiplier of the logits that the body keeps",
        {
            "lm_head_multiplier": 0.5,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        ranks=1,
    ),
    Family(
        "minimax",
        "MiniMaxConfig",
        "linear attention behind a layer of attention",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        ranks=1,
        quick=True,
    ),
    Family(
        "xglm",
        "XGLMConfig",
        "positions from a formula",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 512,
        },
        sizes=False,
        ranks=1,
    ),
    Family(
        "mamba2",
        "Mamba2Config",
        "state spaces by heads",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        sizes=False,
        ranks=1,
    ),
    Family(
        "t5",
        "T5Config",
        "encoder and decoder, gated MLP",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "d_kv": 12,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        sizes=False,
        ranks=1,
        quick=True,
    ),
    Family(
        "bart",
        "BartConfig",
        "encoder and decoder, learned positions",
        _BART,
        sizes=False,
        ranks=1,
    ),
    Family(
        "mbart",
        "MBartConfig",
        "encoder and decoder, norms before attention and MLP",
        {**_BART, "scale_embedding": True},
        sizes=False,
        ranks=1,
    ),
    Family(
        "mt5",
        "MT5Config",
        "encoder and decoder, gated MLP, a head of its own (mT5, mT0)",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "d_kv": 12,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        sizes=False,
        ranks=1,
    ),
)


def family(name: str) -> Family:
    return next(row for row in FAMILIES if row.name == name)


def write_model(row: Family, directory: Path) -> PreTrainedModel:
    """Writes the row's random model, as transformers saves it, and returns it: the reference, in float32."""
    import torch
    import transformers

    settings = {**(SIZES if row.sizes else {}), **row.settings}
    config = getattr(transformers, row.config)(**settings)
    torch.manual_seed(0)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=row.attention)
    model.eval()
    redraw(model, row.deviation)
    model.save_pretrained(directory)
    return model


def redraw(model: PreTrainedModel, deviation: float) -> None:
    """Gives the model weights under which it says something."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _redraw(name, parameter, deviation)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                _redraw(name, buffer, deviation)


def reference_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] of one sequence, by transformers, in one go without a cache."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def _redraw(name: str, parameter: torch.Tensor, deviation: float) -> None:
    if parameter.dim() < 2 or name.endswith("A_log"):
        parameter.add_(parameter.new_empty(parameter.shape).normal_(std=NOISE))
    elif "embed" in name or name.endswith(("wte.weight", "wpe.weight", "lm_head.weight", "embed_out.weight")):
        parameter.normal_(std=deviation / parameter.shape[-1] ** 0.5)
    else:
        parameter.normal_(std=GAIN / parameter.shape[-1] ** 0.5)
