"""A family of one's own is one file in a folder: `--model-plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.contiguous_attention import prompt_logits
from tests.fakes.tiny_model import write_tiny_llama
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.distributed.group import SingleRank
from tgi.server.models.model import CausalLM
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
PROMPT = [5, 77, 300, 12, 42]
# A whole architecture in one file: Llama's shape, its MLP counted SIGN times.
FAMILY = '''
"""Pre-norm decoder."""

from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, Decoder, entered, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import rotary_of

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Layer:
    def __init__(self, config, source, index):
        size, eps = config.hidden_size, config.rms_norm_eps
        heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        self.attention = Attention(source.at("self_attn"), index, hidden_size=size, **heads)
        self.mlp = GatedMLP(source.at("mlp"), size, config.intermediate_size, config.hidden_act)
        self.first = RMSNorm(source.at("input_layernorm"), size, eps)
        self.second = RMSNorm(source.at("post_attention_layernorm"), size, eps)

    def __call__(self, update, residual, rotations, context):
        attended = self.attention(entered(self.first, update, residual), rotations[FULL], context)
        return self.mlp(self.second.add(attended, residual)) * SIGN


def Model(config, source, longest=None):
    body = source.at("model")
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [Layer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )
'''


def load(path: Path, plugins: Path | None) -> CausalLM:
    checkpoint = open_checkpoint(path)
    return build_model(read_model_config(path), checkpoint, torch.float32, CPU, SingleRank(), plugins=plugins)


def test_a_file_in_the_folder_is_a_family(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "novel.py").write_text(FAMILY.replace("SIGN", "1.0"))
    path = write_tiny_llama(tmp_path / "model", model_type="novel")
    same = write_tiny_llama(tmp_path / "same")
    assert torch.equal(prompt_logits(load(path, plugins), PROMPT), prompt_logits(load(same, None), PROMPT))
    with pytest.raises(StartupError):
        load(path, None)


def test_it_comes_before_the_servers_own_and_leaves_others_alone(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    path = write_tiny_llama(tmp_path / "model")
    own = prompt_logits(load(path, None), PROMPT)
    assert torch.equal(prompt_logits(load(path, plugins), PROMPT), own)
    (plugins / "llama.py").write_text(FAMILY.replace("SIGN", "-1.0"))
    assert not torch.equal(prompt_logits(load(path, plugins), PROMPT), own)


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    with pytest.raises(StartupError, match=r"--model-plugins .*nowhere is no folder"):
        load(path, tmp_path / "nowhere")
    (tmp_path / "llama.py").write_text("import missing_package\n")
    with pytest.raises(StartupError, match=r"llama\.py cannot be loaded: ModuleNotFoundError: No module named"):
        load(path, tmp_path)
    (tmp_path / "llama.py").write_text("PACKED = {}\n")
    with pytest.raises(StartupError, match=r"llama\.py has no Model: it is no model"):
        load(path, tmp_path)


def test_a_model_type_names_no_file_elsewhere(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (tmp_path / "outside.py").write_text(FAMILY.replace("SIGN", "1.0"))
    path = write_tiny_llama(tmp_path / "model", model_type="../outside")
    with pytest.raises(StartupError, match="is not supported"):
        load(path, plugins)
