"""Experts as the hub's files have them, one by one, and as transformers has them in memory, in stacks; settings as the
hub spells them; forms that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.paged_logits import paged_logits
from tgi.errors import StartupError
from tgi.model_config import ModelConfig, read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.context import CacheShape
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import Checkpoint, open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint
from tgi.server.weights.region import Region
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

CPU = torch.device("cpu")
PROMPT = [3, 17, 250, 42, 42, 9, 130, 8]
Tensors = dict[str, torch.Tensor]
_COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
# As they stand on the hub, but for the sizes.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_COMMON, "num_local_experts": 4, "sliding_window": None, "rope_theta": 1000000.0},
    "phimoe": {**_COMMON, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {
        **_COMMON,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "norm_topk_prob": False,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "qwen3_moe": {**_COMMON, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True},
    "deepseek_v2": {
        **_COMMON,
        **_LATENT,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v3": {
        **_COMMON,
        **_LATENT,
        "q_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
    },
    "dbrx": {
        "vocab_size": 320,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 24, "model_type": "", "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_oss": {
        **_COMMON,
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ONE_BY_ONE = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


class Recorder(DummyCheckpoint):
    """Random weights, each tensor kept by its name."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.tensors: Tensors = {}

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self.tensors:
            generator = torch.Generator().manual_seed(len(self.tensors))
            self.tensors[name] = torch.empty(shape).normal_(std=0.3, generator=generator)
        return self.tensors[name][region]


def read(folder: Path, model_type: str, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
    return read_model_config(folder)


def logits_of(config: ModelConfig, checkpoint: Checkpoint) -> torch.Tensor:
    """[tokens, vocab] of the prompt."""
    model = build_model(config, checkpoint, torch.float32, CPU, SingleRank())
    return paged_logits(model, TorchBackend("torch", 16), [PROMPT])[0]


def loaded(folder: Path, config: ModelConfig, tensors: Tensors) -> torch.Tensor:
    """The same from a file, which has nothing that is not read."""
    save_file(tensors, folder / "model.safetensors")
    checkpoint = TrackedCheckpoint(open_checkpoint(folder))
    logits = logits_of(config, checkpoint)
    checkpoint.check_all_read()
    checkpoint.close()
    return logits


def on_the_hub(model_type: str, tensors: Tensors) -> Tensors:
    """One by one, as they were first published: Mixtral's and Phi-MoE's under names of their own."""
    if model_type not in ("mixtral", "phimoe"):
        return tensors
    return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}


def in_stacks(model_type: str, tensors: Tensors) -> Tensors:
    """As transformers 5 has them in memory; some tools save them so."""
    kept: Tensors = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            kept[name.replace("mlp.gate.", "mlp.router.") if model_type == "phimoe" else name] = tensor
    gate, up, down = (
        ("w1", "w3", "w2") if model_type in ("mixtral", "phimoe") else ("gate_proj", "up_proj", "down_proj")
    )
    for place, of in experts.items():
        numbers = range(len(of) // 3)
        kept[f"{place}.gate_up_proj"] = torch.stack([torch.cat((of[n, gate], of[n, up])) for n in numbers])
        kept[f"{place}.down_proj"] = torch.stack([of[n, down] for n in numbers])
    assert experts
    return kept


@pytest.mark.parametrize("layout", [on_the_hub, in_stacks])
@pytest.mark.parametrize("model_type", ONE_BY_ONE)
def test_both_layouts_of_experts_are_the_same_model(
    tmp_path: Path, model_type: str, layout: Callable[[str, Tensors], Tensors]
) -> None:
    config = read(tmp_path, model_type)
    checkpoint = Recorder()
    expected = logits_of(config, checkpoint)
    assert expected.std() > 0.1
    assert torch.equal(loaded(tmp_path, config, layout(model_type, checkpoint.tensors)), expected)


def test_mixtrals_files_have_the_hubs_names(tmp_path: Path) -> None:
    config = read(tmp_path, "mixtral", num_hidden_layers=1, num_local_experts=2)
    checkpoint = Recorder()
    logits_of(config, checkpoint)
    layer = "model.layers.0."
    assert set(on_the_hub("mixtral", checkpoint.tensors)) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight",
        layer + "block_sparse_moe.gate.weight",
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}block_sparse_moe.experts.{n}.w{w}.weight" for n in (0, 1) for w in (1, 2, 3)),
    }


def test_dbrx_says_in_parts_what_others_say_at_once(tmp_path: Path) -> None:
    config = read(tmp_path, "dbrx")
    assert (config.num_kv_heads, config.intermediate_size, config.rope_theta) == (2, 24, 500000)
    assert logits_of(config, Recorder()).isfinite().all()


def test_gpt_oss_takes_its_tensors_as_transformers_has_them(tmp_path: Path) -> None:
    config = read(tmp_path, "gpt_oss", num_hidden_layers=1, layer_types=["sliding_attention"])
    checkpoint = Recorder()
    logits_of(config, checkpoint)
    place = "model.layers.0.mlp."
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items() if ".mlp." in name} == {
        place + "router.weight": (4, 32),
        place + "router.bias": (4,),
        place + "experts.gate_up_proj": (4, 32, 96),
        place + "experts.gate_up_proj_bias": (4, 96),
        place + "experts.down_proj": (4, 48, 32),
        place + "experts.down_proj_bias": (4, 32),
    }


@pytest.mark.parametrize(("model_type", "rank"), [("deepseek_v2", None), ("deepseek_v3", 16)])
def test_the_cache_keeps_latents_and_not_what_they_expand_to(tmp_path: Path, model_type: str, rank: int | None) -> None:
    config = read(tmp_path, model_type, q_lora_rank=rank)
    model = build_model(config, Recorder(), torch.float32, CPU, SingleRank())
    assert model.cache_shape == CacheShape(2, 1, 4, 16 + 4, 16, frozenset({"value_dim"}))


@pytest.mark.parametrize(("model_type", "method"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_published_quantisations_are_refused_by_name(tmp_path: Path, model_type: str, method: str) -> None:
    config = read(tmp_path, model_type, quantization_config={"quant_method": method})
    with pytest.raises(StartupError, match=f"quantised with '{method}', which is not supported"):
        logits_of(config, Recorder())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "5 experts per token cannot be chosen of 4"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok of a phimoe model must be 2, not 3"),
        ("deepseek_v3", {"topk_method": "random"}, "topk_method 'random' is not supported; greedy"),
        ("deepseek_v3", {"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported; softmax, sigmoid"),
        ("deepseek_v3", {"n_group": 3}, "4 experts make no 3 groups"),
        ("deepseek_v2", {"rope_scaling": {"type": "yarn", "factor": "4", "mscale_all_dim": 1}}, "factor must be a pos"),
        ("deepseek_v2", {"first_k_dense_replace": "1"}, "first_k_dense_replace must be a positive whole number"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers, not 1"),
        ("dbrx", {"moe_normalize_expert_weights": 2}, "moe_normalize_expert_weights must be 1 or null, not 2"),
        ("dbrx", {"moe_num_experts": 1}, "2 experts per token cannot be chosen of 1"),
        ("qwen3_moe", {"num_experts": None}, "does not say num_experts"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        logits_of(read(tmp_path, model_type, **changes), Recorder())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"sliding_window": 3}),
        ("phimoe", {"router_jitter_noise": 0.3}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3}),
        ("deepseek_v2", {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"routed_scaling_factor": 16.0}),
        ("deepseek_v2", {"n_group": 2, "topk_method": "group_limited_greedy"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"n_group": 1}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("dbrx", {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 1}}),
        ("dbrx", {"attn_config": {"clip_qkv": 0.1, "kv_n_heads": 2, "rope_theta": 500000}}),
        ("dbrx", {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000}}),
        ("gpt_oss", {"swiglu_limit": 0.1}),
        ("gpt_oss", {"experts_per_token": 1, "num_experts_per_tok": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_no_setting_that_changes_numbers_is_ignored(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    checkpoint = Recorder()
    as_it_stands = logits_of(read(tmp_path, model_type), checkpoint)
    changed = logits_of(read(tmp_path, model_type, **changes), checkpoint)
    assert float((changed - as_it_stands).abs().max()) > 1e-4


def test_windows_are_in_every_other_layer_of_the_first_where_qwen2_moe_does_not_list_them(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 3, "num_hidden_layers": 4}
    listed = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    checkpoint = Recorder()
    for first, kinds in ((28, listed), (1, ["sliding_attention", *["full_attention"] * 3])):
        told = logits_of(read(tmp_path, "qwen2_moe", layer_types=kinds, **windows), checkpoint)
        derived = logits_of(read(tmp_path, "qwen2_moe", max_window_layers=first, **windows), checkpoint)
        torch.testing.assert_close(derived, told, rtol=0, atol=0)


def test_a_layer_that_drafts_is_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 has one behind its last layer, and its copies in bfloat16 may."""
    config = read(tmp_path, "deepseek_v3")
    checkpoint = Recorder()
    expected = logits_of(config, checkpoint)
    draft = {f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight")}
    save_file({**checkpoint.tensors, **draft}, tmp_path / "model.safetensors")
    stored = TrackedCheckpoint(open_checkpoint(tmp_path))
    torch.testing.assert_close(logits_of(config, stored), expected, rtol=0, atol=0)
    stored.check_all_read(draft_layers_from=config.num_layers)
    stored.close()
