"""Older architectures as the hub has them: names of settings, names of tensors, what their files leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.paged_logits import paged_logits
from tgi.errors import StartupError
from tgi.model_config import ModelConfig, read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.models.model import CausalLM
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint
from tgi.server.weights.region import Region
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

CPU = torch.device("cpu")
PROMPT = [3, 17, 250, 42, 42, 9, 130, 8]
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4}
# As they stand on the hub, but for the sizes.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "n_ctx": 512, "n_positions": 512},
    "gpt_bigcode": {**GPT2, "n_positions": 512, "n_inner": 128, "activation_function": "gelu", "multi_query": True},
    "gpt_neo": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": None,
        "max_position_embeddings": 512,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {**GPT2, "n_positions": 512, "n_inner": None, "rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neox": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
    },
    "bloom": {"vocab_size": 320, "n_embed": 64, "n_layer": 2, "num_attention_heads": 4, "seq_length": 512},
    "RefinedWebModel": {
        "vocab_size": 320,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    },
    "RefinedWeb": {
        "vocab_size": 320,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_head_kv": 2,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    },
    "falcon": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 4,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "mpt": {
        "vocab_size": 320,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 512,
        "expansion_ratio": 2,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "clip_qkv": None},
    },
    "opt": {
        "vocab_size": 320,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "phi": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
    },
    "phi-msft": {**GPT2, "n_positions": 512, "n_inner": None, "n_head_kv": None, "rotary_dim": 8},
    "starcoder2": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "norm_epsilon": 1e-5,
    },
}
PREFIXES = {
    **dict.fromkeys(CONFIGS, "transformer."),
    "gpt_neox": "gpt_neox.",
    "opt": "model.decoder.",
    "phi": "model.",
    "starcoder2": "model.",
}


class Recorder(DummyCheckpoint):
    """Random weights, each tensor kept by its name."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.tensors: dict[str, torch.Tensor] = {}

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self.tensors:
            # Larger than those of a benchmark: every part of the model is to be seen in the logits.
            generator = torch.Generator().manual_seed(len(self.tensors))
            self.tensors[name] = torch.empty(shape).normal_(std=0.3, generator=generator)
        return self.tensors[name][region]


def read(folder: Path, model_type: str, **changes: Any) -> ModelConfig:
    config = {"model_type": model_type, **CONFIGS[model_type], **changes}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "drop"}))
    return read_model_config(folder)


def recorded(config: ModelConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights that fit, and the logits of a prompt."""
    checkpoint = Recorder()
    model = build_model(config, checkpoint, torch.float32, CPU, SingleRank())
    return checkpoint.tensors, logits_of(model)


def logits_of(model: CausalLM) -> torch.Tensor:
    """[tokens, vocab] of the prompt."""
    return paged_logits(model, TorchBackend("torch", 16), [PROMPT])[0]


def loaded(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> CausalLM:
    save_file(tensors, folder / "model.safetensors")
    checkpoint = TrackedCheckpoint(open_checkpoint(folder))
    model = build_model(config, checkpoint, torch.float32, CPU, SingleRank())
    checkpoint.check_all_read()
    checkpoint.close()
    return model


@pytest.mark.fault("TGI#1057")
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_checkpoint_saved_from_an_inner_module_is_the_same_model(tmp_path: Path, model_type: str) -> None:
    """Every prefix of modules that may be there is left out in turn: model.decoder.layers, decoder.layers, layers."""
    config = read(tmp_path, model_type)
    tensors, expected = recorded(config)
    assert expected.std() > 0.1
    prefix = PREFIXES[model_type]
    assert sum(name.startswith(prefix) for name in tensors) > 10
    outer = prefix
    while outer:
        _, _, rest = outer.partition(".")
        renamed = {
            rest + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
            for name, tensor in tensors.items()
        }
        torch.testing.assert_close(logits_of(loaded(tmp_path, config, renamed)), expected)
        outer = rest


def test_a_head_under_its_newer_name_is_found(tmp_path: Path) -> None:
    config = read(tmp_path, "gpt_neox")
    tensors, expected = recorded(config)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    torch.testing.assert_close(logits_of(loaded(tmp_path, config, tensors)), expected)


@pytest.mark.parametrize(
    ("old", "changes"),
    [
        ("RefinedWebModel", {}),
        ("RefinedWeb", {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": True}),
    ],
)
def test_falcon_under_its_older_names_is_the_same_model(tmp_path: Path, old: str, changes: dict[str, Any]) -> None:
    tensors, expected = recorded(read(tmp_path, old))
    newer = read(tmp_path, "falcon", **changes)
    torch.testing.assert_close(logits_of(loaded(tmp_path, newer, tensors)), expected)


def test_phi_under_its_first_name_is_the_same_model(tmp_path: Path) -> None:
    newer = read(tmp_path, "phi", intermediate_size=256)
    tensors, expected = recorded(newer)
    for index in range(newer.num_layers):
        place = f"model.layers.{index}.self_attn"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{place}.{name}.{kind}") for name in ("q_proj", "k_proj", "v_proj")]
            tensors[f"{place}.Wqkv.{kind}"] = torch.cat(parts)
    renamed = {_first_name(name): tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(logits_of(loaded(tmp_path, read(tmp_path, "phi-msft"), renamed)), expected)


def _first_name(name: str) -> str:
    for newer, first in (
        ("model.final_layernorm", "lm_head.ln"),
        ("lm_head.weight", "lm_head.linear.weight"),
        ("model.embed_tokens", "transformer.embd.wte"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln"),
        ("self_attn", "mixer"),
        ("dense", "out_proj"),
    ):
        name = name.replace(newer, first)
    return name


def test_the_first_santacoder_goes_by_the_name_of_gpt2(tmp_path: Path) -> None:
    """Queries apart from the keys and values of the one head that they share; GPT-BigCode has them together."""
    newer = read(tmp_path, "gpt_bigcode", activation_function="gelu_pytorch_tanh")
    tensors, expected = recorded(newer)
    for name in [name for name in tensors if name.endswith(("c_attn.weight", "c_attn.bias"))]:
        both = tensors.pop(name)
        tensors[name.replace("c_attn", "q_attn")] = both[:64].clone()
        tensors[name.replace("c_attn", "kv_attn")] = both[64:].clone()
    transposed = {
        name: tensor.T.contiguous() if tensor.dim() == 2 and ".h." in name else tensor
        for name, tensor in tensors.items()
    }
    first = read(tmp_path, "gpt2", n_inner=128, activation_function="gelu_fast", attention_head_type="multiquery")
    torch.testing.assert_close(logits_of(loaded(tmp_path, first, transposed)), expected)


@pytest.mark.parametrize(
    ("attention", "kv_heads"),
    [
        ({"attn_type": "multiquery_attention"}, 1),
        ({"attn_type": "grouped_query_attention", "kv_n_heads": 2}, 2),
    ],
)
def test_heads_of_mpt_that_share_keys_are_heads_with_the_same_keys(
    tmp_path: Path, attention: dict[str, Any], kv_heads: int
) -> None:
    tensors, expected = recorded(read(tmp_path, "mpt", attn_config=attention))
    for name in [name for name in tensors if name.endswith("Wqkv.weight")]:
        query, *shared = tensors[name].split([64, 16 * kv_heads, 16 * kv_heads])
        repeated = [part.view(kv_heads, 16, 64).repeat_interleave(4 // kv_heads, 0).view(64, 64) for part in shared]
        tensors[name] = torch.cat([query, *repeated])
    torch.testing.assert_close(logits_of(loaded(tmp_path, read(tmp_path, "mpt"), tensors)), expected)


@pytest.mark.parametrize(
    ("model_type", "facts"),
    [
        # heads of keys and values, size of the MLP, positions, activation, tied
        ("gpt2", (4, 256, 512, "gelu_new", True)),
        ("gpt_bigcode", (1, 128, 512, "gelu", True)),
        ("gpt_neo", (4, 256, 512, "gelu_new", True)),
        ("gptj", (4, 256, 512, "gelu_new", False)),
        ("gpt_neox", (4, 128, 512, "gelu", False)),
        ("bloom", (4, 256, None, "gelu_pytorch_tanh", True)),  # linear biases have no end
        ("RefinedWebModel", (1, 256, 2048, "gelu", True)),
        ("RefinedWeb", (2, 256, 2048, "gelu", True)),
        ("falcon", (1, 256, 2048, "gelu", True)),
        ("mpt", (4, 128, 512, "silu", True)),
        ("opt", (4, 128, 512, "relu", True)),
        ("phi", (4, 128, 512, "gelu_new", False)),
        ("phi-msft", (4, 256, 512, "gelu_new", False)),
        ("starcoder2", (2, 128, 512, "gelu_pytorch_tanh", True)),
    ],
)
def test_facts(tmp_path: Path, model_type: str, facts: tuple[object, ...]) -> None:
    config = read(tmp_path, model_type)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.head_dim) == (64, 2, 4, 16)
    assert facts == (
        config.num_kv_heads,
        config.intermediate_size,
        config.max_position_embeddings,
        config.hidden_act,
        config.tie_word_embeddings,
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "field", "expected"),
    [
        ("gpt2", {"n_positions": "drop"}, "max_position_embeddings", 1024),
        ("gpt2", {"n_positions": None, "n_inner": 100}, "intermediate_size", 100),
        ("gpt_bigcode", {"multi_query": "drop"}, "num_kv_heads", 1),
        ("gpt_bigcode", {"multi_query": False}, "num_kv_heads", 4),
        ("falcon", {"multi_query": False}, "num_kv_heads", 4),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "num_kv_heads", 2),
        ("falcon", {"ffn_hidden_size": 96, "activation": "relu"}, "hidden_act", "relu"),
        ("falcon", {"ffn_hidden_size": 96}, "intermediate_size", 96),
        ("falcon", {"tie_word_embeddings": False}, "tie_word_embeddings", False),
        ("mpt", {"expansion_ratio": "drop"}, "intermediate_size", 256),
        ("mpt", {"max_seq_len": "drop"}, "max_position_embeddings", 2048),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "num_kv_heads", 1),
        ("mpt", {"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}, "num_kv_heads", 2),
        ("gpt2", {"attention_head_type": "multiquery"}, "num_kv_heads", 1),
        ("gpt2", {"attention_head_type": "multihead"}, "num_kv_heads", 4),
        ("starcoder2", {"num_key_value_heads": "drop"}, "num_kv_heads", 2),
    ],
)
def test_what_a_file_says_and_what_it_leaves_out(
    tmp_path: Path, model_type: str, changes: dict[str, Any], field: str, expected: object
) -> None:
    assert getattr(read(tmp_path, model_type, **changes), field) == expected


@pytest.mark.parametrize(
    ("model_type", "longest"), [("gpt2", 512), ("gpt_neo", 512), ("opt", 512), ("bloom", None), ("gptj", None)]
)
def test_learned_positions_come_to_an_end(tmp_path: Path, model_type: str, longest: int | None) -> None:
    model = build_model(read(tmp_path, model_type), Recorder(), torch.float32, CPU, SingleRank())
    assert model.cache_shape.max_positions == longest


@pytest.mark.parametrize(("given", "factor"), [(0.5, 0.5), ("inv_sqrt_d_model", 0.125), (None, 1.0)])
def test_logits_of_mpt_are_scaled(tmp_path: Path, given: object, factor: float) -> None:
    tensors, expected = recorded(read(tmp_path, "mpt"))
    logits = logits_of(loaded(tmp_path, read(tmp_path, "mpt", logit_scale=given), tensors))
    torch.testing.assert_close(logits, expected * factor)


def test_biases_of_mpt_are_read_where_there_are_some(tmp_path: Path) -> None:
    config = read(tmp_path, "mpt", no_bias=False)
    tensors, expected = recorded(config)
    zeros = {
        f"{name.removesuffix('weight')}bias": torch.zeros(tensor.shape[0])
        for name, tensor in tensors.items()
        if "wte" not in name
    }
    torch.testing.assert_close(logits_of(loaded(tmp_path, config, tensors | zeros)), expected)
    ones = {name: bias + 1 for name, bias in zeros.items()}
    assert not torch.allclose(logits_of(loaded(tmp_path, config, tensors | ones)), expected, atol=0.1)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln true is not supported"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config: prefix_lm true is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "MPT models without alibi are not supported"),
        ("mpt", {"attn_config": {"attn_type": "linear_attention"}}, 'attn_type "linear_attention" is not supported'),
        ("mpt", {"attn_config": 3}, "attn_config must be an object, not 3"),
        ("gptj", {"rotary_dim": 32}, "rotary_dim 32 is more than a head's 16"),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, "does not fit the layers"),
        ("gpt_neo", {"attention_types": [[["sideways"], 2]]}, "does not fit the layers"),
        ("gpt_neo", {"attention_types": 4}, "does not fit the layers"),
        ("opt", {"activation_function": "swoosh"}, "hidden_act 'swoosh' is not supported"),
        ("mpt", {"expansion_ratio": -1}, "expansion_ratio must be a positive number, not -1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        build_model(read(tmp_path, model_type, **changes), Recorder(), torch.float32, CPU, SingleRank())
