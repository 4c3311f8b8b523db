"""Facts of a model from config.json and from GGUF metadata; nonsense is one line that names file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tgi import hub
from tgi.errors import StartupError
from tgi.model_config import ModelConfig, read_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
}


def read(folder: Path, config: Any, generation: Any = None) -> ModelConfig:
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return read_model_config(folder)


def changed(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**LLAMA, **changes}.items() if value != "drop"}


def test_llama(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA) == ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        hidden_size=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=128,
        vocab_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="gelu",
        eos_ids=(2,),
        bos_id=1,
        torch_dtype="bfloat16",
        quant_method=None,
        sliding_window=None,
        raw=LLAMA,
    )


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"num_key_value_heads": "drop"}, "num_kv_heads", 8),
        ({"num_key_value_heads": None}, "num_kv_heads", 8),
        ({"num_key_value_heads": "drop", "multi_query": True}, "num_kv_heads", 1),
        ({"head_dim": 32}, "head_dim", 32),
        ({"head_dim": None}, "head_dim", 8),
        ({"hidden_size": 65, "head_dim": 32}, "hidden_size", 65),
        ({"intermediate_size": "drop"}, "intermediate_size", 256),
        ({"max_position_embeddings": "drop"}, "max_position_embeddings", None),
        ({"max_position_embeddings": "drop", "max_seq_len": 9}, "max_position_embeddings", 9),
        ({"max_position_embeddings": "drop", "n_positions": 8}, "max_position_embeddings", 8),
        ({"tie_word_embeddings": "drop"}, "tie_word_embeddings", False),
        ({"rope_theta": "drop"}, "rope_theta", 10000.0),
        ({"rope_theta": 1000000}, "rope_theta", 1000000.0),
        ({"rms_norm_eps": "drop"}, "rms_norm_eps", 1e-6),
        ({"attention_bias": True}, "attention_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"hidden_act": "drop"}, "hidden_act", "silu"),
        ({"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}, "hidden_act", "gelu_pytorch_tanh"),
        ({"torch_dtype": "drop"}, "torch_dtype", None),
        ({"torch_dtype": "drop", "dtype": "float16"}, "torch_dtype", "float16"),
        ({"torch_dtype": "torch.float32"}, "torch_dtype", "float32"),
        ({"architectures": "drop"}, "architectures", ()),
        ({"architectures": None}, "architectures", ()),
        ({"bos_token_id": None}, "bos_id", None),
        ({"eos_token_id": None}, "eos_ids", ()),
        ({"eos_token_id": [2, 3]}, "eos_ids", (2, 3)),
        ({"eos_token_id": 0}, "eos_ids", (0,)),
        ({"sliding_window": 128}, "sliding_window", 128),
        ({"sliding_window": None}, "sliding_window", None),
        ({"sliding_window": 128, "use_sliding_window": False}, "sliding_window", None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method", "gptq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quant_method", "compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "quant_method", "unknown"),
        ({"quantization_config": None}, "quant_method", None),
    ],
)
def test_fields(tmp_path: Path, changes: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(read(tmp_path, changed(**changes)), field) == expected


def test_spellings_of_older_architectures(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 320, "n_positions": 128}
    config = read(tmp_path, gpt2)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.max_position_embeddings) == (64, 2, 8, 128)


def test_a_composite_model_shows_its_text_part(tmp_path: Path) -> None:
    text = {name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures")}
    config = read(
        tmp_path,
        {"model_type": "llava", "architectures": ["X"], "text_config": text, "vision_config": {"hidden_size": 9}},
    )
    assert (config.model_type, config.architectures, config.hidden_size) == ("llava", ("X",), 64)
    assert "vision_config" in config.raw


@pytest.mark.fault("vllm#4180")
@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, {"eos_token_id": [2, 5, 7]}, (2, 5, 7)),
        ([3, 2], {"eos_token_id": 2}, (3, 2)),
        (None, {"eos_token_id": [5]}, (5,)),
        (2, {}, (2,)),
        (2, None, (2,)),
        (2, {"eos_token_id": None}, (2,)),
    ],
)
def test_every_end_of_text_id_counts(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, changed(eos_token_id=in_config), in_generation).eos_ids == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.fault("vllm#6689")
@pytest.mark.row("E: Rope variants")
@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 500000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 500000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 500000.0, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_scaling": {"type": "x", "rope_type": "llama3", **LLAMA3}}, 500000.0, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_scaling": {"rope_type": "default"}}, 500000.0, None),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [1]}},
            5e5,
            {"rope_type": "default", "mrope_section": [1]},
        ),
        ({"rope_scaling": {}}, 500000.0, None),
        ({"rope_theta": "drop", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_theta": "drop", "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}},
            7.0,
            {"rope_type": "linear", "factor": 4.0},
        ),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None) -> None:
    config = read(tmp_path, changed(**changes))
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{broken", "config.json cannot be read: "),
        ("[1]", "config.json does not hold a JSON object"),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "config.json cannot be read: "),
        (changed(model_type="drop"), "config.json does not say model_type"),
        (changed(model_type=3), "model_type must be a text, not 3"),
        (changed(hidden_size="drop"), "config.json does not say hidden_size"),
        (changed(vocab_size="drop"), "config.json does not say vocab_size"),
        (changed(num_hidden_layers=0), "num_hidden_layers must be a positive whole number, not 0"),
        (changed(num_hidden_layers=-2), "num_hidden_layers must be a positive whole number, not -2"),
        (changed(num_hidden_layers="two"), "num_hidden_layers must be a positive whole number, not 'two'"),
        (changed(num_hidden_layers=True), "num_hidden_layers must be a positive whole number, not True"),
        (changed(hidden_size=65), "hidden size 65 is no multiple of 8 heads"),
        (changed(num_key_value_heads=3), "8 query heads cannot share 3 key-value heads evenly"),
        (changed(rope_theta=float("inf")), "rope_theta must be a positive number, not inf"),
        (changed(rope_theta=float("nan")), "rope_theta must be a positive number, not nan"),
        (changed(rope_theta=-1), "rope_theta must be a positive number, not -1"),
        (changed(rope_theta="much"), "rope_theta must be a positive number, not 'much'"),
        (changed(rope_scaling="linear"), "rope_scaling must be an object, not 'linear'"),
        (changed(rope_scaling={"factor": 2}), "rope_scaling does not say its rope_type"),
        (changed(eos_token_id="</s>"), "eos_token_id must be a token id or a list of them, not '</s>'"),
        (changed(eos_token_id=[-1]), "eos_token_id must be a token id or a list of them"),
        (changed(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, not 'yes'"),
        (changed(quantization_config="gptq"), "quantization_config must be an object, not 'gptq'"),
        (changed(architectures="Llama"), "architectures must be a list of class names"),
    ],
)
def test_nonsense_is_one_line(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(StartupError) as raised:
        read(tmp_path, config)
    assert message in str(raised.value)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nonsense_in_generation_config_names_that_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"generation_config\.json: eos_token_id must be"):
        read(tmp_path, LLAMA, {"eos_token_id": "x"})


@pytest.mark.parametrize(
    ("settings", "files", "expected"),
    [
        *(
            ({"quantization_config": {"quant_method": method}}, {}, method)
            for method in ("awq", "gptq", "exl2", "marlin", "eetq", "bitsandbytes", "fp8", "fbgemm_fp8", "mxfp4")
        ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, {}, "compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, {}, "unknown"),
        ({}, {"quantize_config.json": {"bits": 4, "group_size": 128}}, "gptq"),
        ({}, {"quant_config.json": {"w_bit": 4}}, "awq"),
        ({}, {"quantize_config.json": {"quant_method": "marlin"}}, "marlin"),
        ({"quantization_config": None}, {}, None),
    ],
)
def test_a_quantisation_is_known_however_it_is_said(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any], expected: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read(tmp_path, {**LLAMA, **settings}).quant_method == expected


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json: it is not a model directory$"):
        read_model_config(tmp_path)


def write_gguf(path: Path, *, drop: tuple[str, ...] = (), head: bool = False, **keys: Any) -> Path:
    """A Llama without layers' weights: metadata as llama.cpp's converter writes it."""
    numbers = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
    }
    architecture = keys.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**numbers, **keys}.items():
        if name in drop:
            continue
        full = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    if "token_embd" not in drop:
        writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    if head:
        writer.add_tensor("output.weight", np.zeros((320, 64), np.float32))
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.eos_token_id": 2, "rope.freq_base": 5e5})
    config = read_model_config(path)
    assert (config.model_type, config.architectures) == ("llama", ("LlamaForCausalLM",))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (64, 2, 8, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (8, 128, 320)
    assert (config.max_position_embeddings, config.rope_theta, config.rope_scaling) == (512, 5e5, None)
    assert (config.tie_word_embeddings, config.attention_bias, config.hidden_act) == (True, False, "silu")
    assert (config.eos_ids, config.bos_id, config.raw) == ((2,), None, {})


def test_gguf_options(tmp_path: Path) -> None:
    keys = {
        "attention.key_length": 16,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 256,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.bos_token_id": 1,
        "attention.sliding_window": 99,
    }
    config = read_model_config(write_gguf(tmp_path / "m.gguf", head=True, architecture="qwen2", **keys))
    assert config.model_type == "qwen2"
    assert config.head_dim == 16
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 256}
    assert (config.eos_ids, config.bos_id, config.sliding_window) == ((2, 3), 1, 99)
    assert (config.tie_word_embeddings, config.attention_bias) == (False, False)


def test_a_gguf_gpt_oss_goes_on_after_a_part_of_its_answer(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 3}
    experts: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
    assert read_model_config(write_gguf(tmp_path / "m.gguf", **keys)).eos_ids == (2, 3)
    path = write_gguf(tmp_path / "m.gguf", architecture="gpt-oss", **keys, **experts)
    assert read_model_config(path).eos_ids == (2,)


def test_gguf_heads_need_not_divide_the_width_where_their_size_is_given(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"attention.head_count": 6, "attention.key_length": 16}
    assert read_model_config(write_gguf(tmp_path / "m.gguf", **keys)).head_dim == 16


def test_a_gguf_window_of_no_tokens_is_none(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"architecture": "phi3", "attention.sliding_window": 0}
    config = read_model_config(write_gguf(tmp_path / "m.gguf", **keys))
    assert config.sliding_window is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": True},
        ),
    ],
)
def test_gguf_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert read_model_config(write_gguf(tmp_path / "m.gguf", **keys)).rope_scaling == expected


def test_a_gguf_llama_with_experts_is_a_mixtral(tmp_path: Path) -> None:
    config = read_model_config(write_gguf(tmp_path / "m.gguf", expert_count=8, expert_used_count=2))
    assert (config.model_type, config.architectures) == ("mixtral", ("MixtralForCausalLM",))
    assert (config.fields.count("num_local_experts"), config.fields.count("num_experts_per_tok")) == (8, 2)
    assert read_model_config(write_gguf(tmp_path / "m.gguf", expert_count=0)).model_type == "llama"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mystery"}, "architecture 'mystery' are not supported (bloom, cohere2, command-r,"),
        ({"drop": ("embedding_length",)}, "does not say llama.embedding_length"),
        ({"drop": ("token_embd",)}, "has no table token_embd.weight: the file is no whole model"),
        ({"block_count": 0}, "llama.block_count must be a positive whole number, not 0"),
        ({"embedding_length": 65}, "hidden size 65 is no multiple of 8 heads"),
        ({"attention.head_count_kv": 3}, "8 query heads cannot share 3 key-value heads evenly"),
        ({"expert_count": 4}, "its settings of a llama model are missing or make no sense ('llama.expert_used_count')"),
        ({"architecture": "deepseek2", "expert_count": 256, "expert_used_count": 8}, "256 experts in no groups"),
        ({"architecture": "gemma", "expert_count": 4}, "experts in a file of architecture 'gemma' are not supported"),
        ({"architecture": "gemma3", "block_count": 2**32 - 1}, "make no sense (4294967295 layers)"),
        (
            {"architecture": "mistral3", "attention.temperature_scale": 0.1},
            "attention with a temperature by position is not supported",
        ),
    ],
)
def test_gguf_nonsense_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(StartupError) as raised:
        read_model_config(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all, but long enough", b"GGUF\x03\0\0\0" + b"\xff" * 99]
)
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"m\.gguf"):
        read_model_config(path)


def test_a_gguf_that_is_cut_off(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(8, 200, 16):
        path.write_bytes(whole[:length])
        with pytest.raises(StartupError, match=r"cut\.gguf is not a valid GGUF file"):
            read_model_config(path)


@pytest.mark.real_model
def test_the_bundled_model() -> None:
    config = read_model_config(hub.locate(hub.BUNDLED_MODEL))
    assert (config.model_type, config.hidden_size, config.num_layers) == ("llama", 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (1536, 49152, 8192)
    assert (config.tie_word_embeddings, config.rope_theta, config.eos_ids) == (True, 100000.0, (2,))
    assert config.rms_norm_eps == pytest.approx(1e-5)
