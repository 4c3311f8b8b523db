"""Dense architectures in the words of well-known repositories, against transformers on random weights.

`tests/data/hub_configs.jsonl` has a line for each: the keys of its config.json (sizes shrunk, dropout and the like left
out), and how its tensors' names differ from those that transformers gives them today.

    names    beginnings of names [in transformers, in the file]
    beside   constants that the file has too
    copies   tensors that it has twice: name -> name in transformers
    like     a configuration of the same model that today's transformers reads, where it no longer reads the file's
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.fakes.paged_logits import paged_logits
from tests.server.models.families import LOGIT_DEVIATION, redraw, reference_logits
from tgi.errors import StartupError
from tgi.model_config import LEFT_OUT, TEXT_PARTS, ModelConfig, read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

CPU = torch.device("cpu")
ROWS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data" / "hub_configs.jsonl").read_text().splitlines()
]
PROMPT = torch.randint(200, (40,), generator=torch.Generator().manual_seed(5)).tolist()  # longer than any window

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4, "vocab_size": 200}
GPT2_SIZES = {"n_embd": 4096, "n_head": 32, "n_layer": 4, "vocab_size": 200}
OWN_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), GPT2_SIZES),
    "gpt_neo": {"hidden_size": 4096, "num_heads": 32, "num_layers": 24, "vocab_size": 200},
    "mpt": {"d_model": 4096, "n_heads": 32, "n_layers": 4, "vocab_size": 200},
}
# Names in transformers of our facts; the first that a configuration has.
FACTS = {
    "tie_word_embeddings": ("tie_word_embeddings",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "sliding_window": ("sliding_window",),
    "rms_norm_eps": ("rms_norm_eps",),
    "hidden_act": ("hidden_activation", "hidden_act", "activation_function", "activation"),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row["repository"]) for row in ROWS])
def test_a_repository_gives_the_numbers_of_transformers(tmp_path: Path, row: dict[str, Any]) -> None:
    reference = reference_of(tmp_path, row.get("like") or row["config"])
    save_file(tensors_of(row, reference), tmp_path / "model.safetensors")
    logits = logits_of(tmp_path, write(tmp_path, row["config"]))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def write(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


def reference_of(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    (folder / "config.json").write_text(json.dumps(config))
    settings = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    # Eager attention adds Falcon's linear biases twice.
    attention = "sdpa" if getattr(settings, "alibi", False) else "eager"
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention).eval()
    redraw(model, LOGIT_DEVIATION)
    return model


def tensors_of(row: dict[str, Any], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if name not in ("lm_head.weight", "embed_out.weight")}
    found = {_in_file(row, name): tensor for name, tensor in state.items()}
    found |= {name: state[other].clone() for name, other in row.get("copies", {}).items()}
    return found | {name: torch.ones(2) for name in row.get("beside", ())}


def _in_file(row: dict[str, Any], name: str) -> str:
    for theirs, its in row.get("names", ()):
        if name.startswith(theirs):
            return its + name.removeprefix(theirs)
    return name


def logits_of(folder: Path, config: ModelConfig) -> torch.Tensor:
    checkpoint = TrackedCheckpoint(open_checkpoint(folder))
    model = build_model(config, checkpoint, torch.float32, CPU, SingleRank())
    checkpoint.check_all_read()
    checkpoint.close()
    return paged_logits(model, TorchBackend("torch", 16), [PROMPT])[0]


@pytest.mark.parametrize("model_type", sorted({row["config"]["model_type"] for row in ROWS} & set(CONFIG_MAPPING)))
def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    sizes = OWN_SIZES.get(model_type, SIZES)
    if model_type in TEXT_PARTS:
        sizes = {"text_config": SIZES}
    config = write(tmp_path, {"model_type": model_type, **sizes})
    theirs = AutoConfig.for_model(config.text_type, **OWN_SIZES.get(config.text_type, SIZES))
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    for fact, names in FACTS.items():
        given = next((getattr(theirs, name) for name in names if getattr(theirs, name, None) is not None), None)
        assert given is None or getattr(config, fact) == given, fact
    assert config.rope_theta == rope.get("rope_theta", config.rope_theta)
    for name in LEFT_OUT.get(config.text_type, {}):
        if hasattr(theirs, name) and name != "multi_query":
            assert config.fields.get(name) == getattr(theirs, name), name


def test_null_is_no_window_and_no_cap(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("sliding_window", "attn_logit_softcapping", "num_key_value_heads"))
    config = write(tmp_path, {"model_type": "gemma2", **SIZES, **nulls})
    assert (config.sliding_window, config.fields.get("attn_logit_softcapping"), config.num_kv_heads) == (None, None, 32)
    assert config.fields.get("final_logit_softcapping") == 30.0


@pytest.mark.parametrize(
    ("repository", "changes", "message"),
    [
        ("google/gemma-3-270m", {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not"),
        ("google/gemma-3-270m", {"layer_types": ["full_attention"]}, "layer_types lists 1 layers of 6"),
        ("HuggingFaceTB/SmolLM3-3B", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ("HuggingFaceTB/SmolLM-135M", {"rope_interleaved": True}, "rope_interleaved true is not supported, only false"),
        ("meta-llama/Llama-3.1-8B", {"rope_scaling": {"rope_type": "proportional"}}, "of type 'proportional' is not"),
        ("meta-llama/Llama-3.1-8B", {"hidden_act": "gelu_10"}, "hidden_act 'gelu_10' is not supported"),
        ("bigcode/starcoder2-3b", {"norm_type": "rms_norm"}, 'norm_type "rms_norm" is not supported'),
        ("bigcode/starcoder2-3b", {"mlp_type": "gated"}, 'mlp_type "gated" is not supported, only "default"'),
        ("mosaicml/mpt-7b", {"norm_type": "rmsnorm"}, 'norm_type "rmsnorm" is not supported, only "layernorm" and'),
        ("mosaicml/mpt-7b", {"attn_config": {"rope": True}}, "attn_config: rope true is not supported"),
        ("mosaicml/mpt-7b", {"attn_config": {"sliding_window_size": 8}}, "attn_config: sliding_window_size 8 is not"),
        ("stabilityai/stablelm-3b-4e1t, at first", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor 2.0 is not"),
        ("CohereForAI/c4ai-command-r7b-12-2024", {"use_parallel_block": False}, "use_parallel_block false is not"),
        ("CohereForAI/c4ai-command-r7b-12-2024", {"use_gated_activation": False}, "use_gated_activation false is not"),
        ("CohereForAI/c4ai-command-r7b-12-2024", {"position_embedding_type": "rope"}, "position_embedding_type"),
        ("facebook/galactica-125m", {"scale_embeddings": True}, "scale_embeddings true is not supported"),
        (
            "mistralai/Mistral-Small-3.1-24B-Base-2503",
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            r"'llava' is a model of more than text \(vision_config\) and does not say the sizes of its text part",
        ),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(
    tmp_path: Path, repository: str, changes: dict[str, Any], message: str
) -> None:
    (row,) = (row for row in ROWS if row["repository"] == repository)
    with pytest.raises(StartupError, match=message):
        build_model(
            write(tmp_path, {**row["config"], **changes}),
            DummyCheckpoint(torch.float32, CPU),
            torch.float32,
            CPU,
            SingleRank(),
        )
