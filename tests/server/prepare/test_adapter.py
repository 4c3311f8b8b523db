"""An adapter merged into its base: the numbers, the names, what is no LoRA, and what does not belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.hub_server import Repository, running_hub
from tests.fakes.tiny_model import write_tiny_llama
from tgi import hub
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.prepare.adapter import merge_adapter, read_adapter
from tgi.server.prepare.command import prepare
from tgi.server.weights.checkpoint import open_checkpoint

RANK, HIDDEN = 2, 64
QUERY = "model.layers.0.self_attn.q_proj"


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "base")


def adapter(folder: Path, base: object, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A PEFT adapter of one query projection, or with the given tensors."""
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    own = {f"base_model.model.{QUERY}.lora_A.weight": random(RANK, HIDDEN, seed=1)}
    own |= {f"base_model.model.{QUERY}.lora_B.weight": random(64, RANK, seed=2)}
    save_file(own if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def delta() -> torch.Tensor:
    return random(64, RANK, seed=2) @ random(RANK, HIDDEN, seed=1)


@pytest.mark.row("C: PEFT-only repo merge")
@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 2}}, 1.0),
        ({"rank_pattern": {r".*\.self_attn\.q_proj": 4}}, 2.0),
        ({"alpha_pattern": {"k_proj": 2}}, 4.0),
    ],
)
def test_a_weight_gets_scale_times_b_a(tmp_path: Path, base: Path, changes: dict[str, Any], scale: float) -> None:
    folder = adapter(tmp_path / "adapter", base, **changes)
    assert prepare(str(folder), merge=True, source={}) == folder
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    torch.testing.assert_close(after[f"{QUERY}.weight"], before[f"{QUERY}.weight"] + scale * delta())
    assert all(torch.equal(after[name], before[name]) for name in before if name != f"{QUERY}.weight")
    assert read_model_config(folder).hidden_size == HIDDEN
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert set(open_checkpoint(folder).names()) == set(before)  # the adapter's own file is none of the model's


def test_without_the_flag_only_the_files_are_fetched(tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    assert prepare(str(folder), source={}) == folder
    assert not (folder / "model.safetensors").exists()


def test_the_base_is_fetched_from_the_hub(tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "adapter", "org/base")
    with running_hub() as served:
        served.repositories["org/base"] = Repository({file.name: file.read_bytes() for file in base.iterdir()})
        served.repositories["org/tuned"] = Repository({file.name: file.read_bytes() for file in folder.iterdir()})
        source = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": served.address}
        path = prepare("org/tuned", merge=True, source=source)
        asked = len(served.requests)
        assert prepare("org/tuned", merge=True, source=source) == hub.locate("org/tuned", source=source) == path
        assert len(served.requests) == asked
    assert (path / "model.safetensors").is_file()
    assert not (path / "model.safetensors").is_symlink()


def test_replaced_modules_and_a_longer_vocabulary(tmp_path: Path, base: Path) -> None:
    table = random(520, HIDDEN, seed=3)
    tensors = {"base_model.model.model.embed_tokens.weight": table, "base_model.model.lm_head.weight": table + 1}
    folder = adapter(tmp_path / "adapter", base, tensors)
    merge_adapter(folder, base)
    after = load_file(folder / "model.safetensors")
    assert torch.equal(after["model.embed_tokens.weight"], table)
    assert torch.equal(after["lm_head.weight"], table + 1)
    assert read_model_config(folder).vocab_size == 520


def test_an_adapter_of_the_embedding(tmp_path: Path, base: Path) -> None:
    place = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors = {f"{place}A": random(RANK, 512, seed=1), f"{place}B": random(HIDDEN, RANK, seed=2)}
    merge_adapter(adapter(tmp_path / "adapter", base, tensors), base)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "adapter" / "model.safetensors")
    expected = before["model.embed_tokens.weight"] + 4 * (tensors[f"{place}B"] @ tensors[f"{place}A"]).T
    torch.testing.assert_close(after["model.embed_tokens.weight"], expected)


def test_a_base_without_the_outer_prefix(tmp_path: Path, base: Path) -> None:
    file = base / "model.safetensors"
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file)
    folder = adapter(tmp_path / "adapter", base)
    merge_adapter(folder, base)
    name = f"{QUERY}.weight".removeprefix("model.")
    torch.testing.assert_close(load_file(folder / "model.safetensors")[name], bare[name] + 4 * delta())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "adapters of type PREFIX_TUNING cannot be merged, only LORA"),
        ({"peft_type": "IA3"}, "adapters of type IA3 cannot be merged"),
        ({"use_dora": True}, "use_dora = True cannot be merged"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "'pissa_niter_16' changes the base's weights",
        ),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"r": None}, "is no adapter's configuration"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_adapter(adapter(tmp_path / "adapter", "org/base", **changes))


def test_biases_that_were_trained_replace_the_bases(tmp_path: Path, base: Path) -> None:
    file = base / "model.safetensors"
    with_bias = load_file(file) | {f"{QUERY}.bias": random(64, seed=4), "model.norm.bias": random(64, seed=5)}
    save_file(with_bias, file)
    trained = {f"base_model.model.{QUERY}.base_layer.bias": random(64, seed=6)}
    trained |= {"base_model.model.model.norm.bias": random(64, seed=7)}
    folder = adapter(tmp_path / "adapter", base, trained, bias="all")
    merge_adapter(folder, base)
    after = load_file(folder / "model.safetensors")
    assert torch.equal(after[f"{QUERY}.bias"], random(64, seed=6))
    assert torch.equal(after["model.norm.bias"], random(64, seed=7))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_trained_head_of_a_tied_model_is_tied_no_more(tmp_path: Path, base: Path, sharded: bool) -> None:
    tensors = load_file(base / "model.safetensors")
    del tensors["lm_head.weight"]
    (base / "model.safetensors").unlink()
    name = "model-00001-of-00001.safetensors" if sharded else "model.safetensors"
    save_file(tensors, base / name)
    if sharded:
        weight_map = json.dumps({"weight_map": dict.fromkeys(tensors, name)})
        (base / "model.safetensors.index.json").write_text(weight_map)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    head = random(512, HIDDEN, seed=3)
    folder = adapter(tmp_path / "adapter", base, {"base_model.model.lm_head.weight": head})
    merge_adapter(folder, base)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.read("lm_head.weight", (512, HIDDEN)), head)
    assert torch.equal(
        checkpoint.read("model.embed_tokens.weight", (512, HIDDEN)), tensors["model.embed_tokens.weight"]
    )
    assert not read_model_config(folder).tie_word_embeddings


@pytest.mark.parametrize("declared", [False, True])
def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path: Path, declared: bool) -> None:
    """The layer decides, not fan_in_fan_out, which PEFT corrects as it loads."""
    base = tmp_path / "gpt2"
    base.mkdir()
    names = {"transformer.h.0.attn.c_proj.weight": (64, 64), "transformer.h.0.attn.c_attn.weight": (64, 192)}
    before = {name: random(*shape, seed=1) for name, shape in names.items()}
    save_file(before, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tensors = {}
    for name, (inner, outer) in names.items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{place}.lora_A.weight": random(RANK, inner, seed=2)}
        tensors |= {f"{place}.lora_B.weight": random(outer, RANK, seed=3)}
    folder = adapter(tmp_path / "adapter", base, tensors, fan_in_fan_out=declared)
    merge_adapter(folder, base)
    after = load_file(folder / "model.safetensors")
    inputs = random(5, 64, seed=4)
    for name, (inner, outer) in names.items():
        change = inputs @ random(RANK, inner, seed=2).T @ random(outer, RANK, seed=3).T
        torch.testing.assert_close(inputs @ after[name], inputs @ before[name] + 4 * change, atol=1e-3, rtol=1e-4)


def test_an_adapter_whose_base_is_not_there_says_so(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", tmp_path / "trainers-disk")
    with pytest.raises(StartupError, match=r"The base of the adapter .*/adapter: The model path .* does not exist"):
        prepare(str(folder), merge=True, source={})


def test_a_base_that_does_not_fit(tmp_path: Path, base: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", hidden=32)
    with pytest.raises(StartupError, match=r"shape \[64, 64\], the base model's weight \[64, 32\]: it was made for an"):
        merge_adapter(adapter(tmp_path / "a", other), other)
    tensors = {f"base_model.model.model.layers.9.mlp.up_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    with pytest.raises(StartupError, match=r"has no model\.layers\.9\.mlp\.up_proj\.weight, which the adapter changes"):
        merge_adapter(adapter(tmp_path / "b", base, tensors), base)
    with pytest.raises(StartupError, match="only one of lora_A and lora_B"):
        merge_adapter(
            adapter(tmp_path / "c", base, {f"base_model.model.{QUERY}.lora_A.weight": torch.ones(2, 64)}), base
        )
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(StartupError, match=r"is quantised \(bitsandbytes\); an adapter is merged into unquantised"):
        merge_adapter(adapter(tmp_path / "d", base), base)
    assert not list((tmp_path / "d").glob("*model.safetensors.index*")) + list((tmp_path / "d").glob("config.json"))


def test_adapters_that_name_each_other(tmp_path: Path) -> None:
    first = adapter(tmp_path / "a", tmp_path / "b")
    adapter(tmp_path / "b", first)
    with pytest.raises(StartupError, match="name each other as base"):
        prepare(str(first), merge=True, source={})
