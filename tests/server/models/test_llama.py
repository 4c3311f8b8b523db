"""Llama against transformers on tiny random weights, and against recorded answers of the bundled model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.contiguous_attention import ContiguousAttention, greedy_ids, prompt_logits
from tests.fakes.tiny_model import write_tiny_llama
from tgi.errors import StartupError
from tgi.hub import BUNDLED_MODEL, locate
from tgi.model_config import read_model_config
from tgi.server.context import ForwardContext
from tgi.server.distributed.group import SingleRank
from tgi.server.models.llama import Llama
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint

CPU = torch.device("cpu")
PROMPT = [5, 77, 300, 12, 511, 42, 42, 9, 130, 8, 61, 200]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Llama:
    config = dataclasses.replace(read_model_config(path), **changes)
    checkpoint = open_checkpoint(path)
    model = build_model(config, checkpoint, dtype, CPU, SingleRank())
    checkpoint.close()
    assert isinstance(model, Llama)
    return model


@torch.inference_mode()
def transformers_logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie": True},
        {"bias": True},
        {"heads": 4, "kv_heads": 4},
        {"heads": 8, "kv_heads": 2, "head_dim": 32},
        {"rope_scaling": LLAMA3, "max_position": 512},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
        {"sliding_window": 4},  # left over from a Mistral: Llama has none
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_tiny_llama(tmp_path, **changes)
    expected = transformers_logits(path, PROMPT)
    logits = prompt_logits(load(path), PROMPT)
    assert logits.dtype == torch.float32
    assert expected.std() > 1  # weights that say something
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_formats_follow_float32(tmp_path: Path, dtype: str) -> None:
    path = write_tiny_llama(tmp_path, dtype=dtype)  # pyright: ignore[reportArgumentType]
    exact = prompt_logits(load(path, torch.float32), PROMPT)
    rounded = prompt_logits(load(path, getattr(torch, dtype)), PROMPT)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().mean() / exact.std()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.005)


@pytest.mark.fault("TGI#2270", "TGI#2373", "TGI#555", "TGI#1038")
def test_a_checkpoint_without_a_head_takes_the_embeddings(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, tie=True)
    assert "lm_head.weight" not in open_checkpoint(path).names()
    tied = prompt_logits(load(path), PROMPT)
    # Some files say that nothing is tied and still come without a head.
    assert torch.equal(prompt_logits(load(path, tie_word_embeddings=False), PROMPT), tied)


@pytest.mark.fault("TGI#1057")
def test_names_without_the_outer_prefix(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "with", tie=True)
    bare = write_tiny_llama(tmp_path / "without", tie=True)
    weights = (bare / "model.safetensors").read_bytes()
    header = int.from_bytes(weights[:8], "little")
    # The same length, so that nothing moves: JSON allows blanks after the quote.
    text = weights[8 : 8 + header].replace(b'"model.', b'"').ljust(header)
    (bare / "model.safetensors").write_bytes(weights[:8] + text + weights[8 + header :])
    assert "embed_tokens.weight" in open_checkpoint(bare).names()
    assert torch.equal(prompt_logits(load(bare), PROMPT), prompt_logits(load(path), PROMPT))


def test_a_prompt_in_chunks_gives_the_same(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path))
    whole = prompt_logits(model, PROMPT)
    context = ForwardContext(ContiguousAttention())
    ids = torch.tensor(PROMPT)
    with torch.inference_mode():
        parts = [
            model.logits(model.forward(ids[start : start + 5], torch.arange(start, min(start + 5, 12)), context))
            for start in range(0, 12, 5)
        ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-4)


def test_window_and_shapes_reach_the_backend(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path, model_type="mistral", sliding_window=16, layers=3))
    attention = ContiguousAttention()
    with torch.inference_mode():
        model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), ForwardContext(attention))
    assert attention.windows == [16, 16, 16]
    shape = model.cache_shape
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 4, 2, 16)
    assert model.vocab_size == 512


def test_inputs_are_left_as_they_are(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path))
    first = prompt_logits(model, PROMPT)
    assert torch.equal(prompt_logits(model, PROMPT), first)


@pytest.mark.parametrize("alias", ["mistral", "smollm", "yi"])
def test_aliases_are_the_same_model(tmp_path: Path, alias: str) -> None:
    path = write_tiny_llama(tmp_path)
    assert torch.equal(prompt_logits(load(path, model_type=alias), PROMPT), prompt_logits(load(path), PROMPT))


def test_an_unknown_model_type_is_named_with_what_there_is(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    with pytest.raises(StartupError, match=r"model_type 'mystery' is not supported; .*llama, .*mistral"):
        load(path, model_type="mystery")


def test_a_quantised_checkpoint_is_refused_by_its_method(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(StartupError, match="quantised with 'gptq'"):
        load(path)


def test_configuration_and_weights_that_do_not_belong_together(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    with pytest.raises(StartupError, match=r"q_proj\.weight has shape \[64, 64\].*asks for \[96, 64\]"):
        load(path, num_heads=6)
    with pytest.raises(StartupError, match=r"holds no tensor model\.layers\.2\."):
        load(path, num_layers=3)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_llama(tmp_path))
    checkpoint = DummyCheckpoint(torch.bfloat16, CPU)
    model = build_model(config, checkpoint, torch.bfloat16, CPU, SingleRank())
    logits = prompt_logits(model, PROMPT)
    assert logits.shape == (len(PROMPT), 512)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.real_model
@pytest.mark.parametrize("index", range(2))
def test_bundled_model_says_what_is_recorded(bundled: Llama, index: int) -> None:
    recorded = json.loads((Path(__file__).parents[2] / "data" / "smollm2_greedy.json").read_text())
    prompt = recorded["prompts"][index]
    expected, margins = prompt["fp32"]["ids"][:16], prompt["fp32"]["margin"]
    answer = greedy_ids(bundled, prompt["input_ids"], len(expected))
    split = next((at for at, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]), None)
    assert split is None or margins[split] < 0.01, f"token {split} of {prompt['prompt']!r}: {answer} {expected}"


@pytest.fixture(scope="module")
def bundled() -> Llama:
    return load(locate(BUNDLED_MODEL))


@pytest.mark.slow
@pytest.mark.real_model
def test_bundled_model_costs_what_it_must() -> None:
    # Peak memory beyond start, of a process that loads it: the parameters, a second form of the shared embedding, and
    # little else. The file's own pages (95 MB) may count on top, they can be dropped.
    script = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from tgi.model_config import read_model_config\n"
        "from tgi.server.distributed.group import SingleRank\n"
        "from tgi.server.models import llama, registry\n"
        "from tgi.server.weights.checkpoint import open_checkpoint\n"
        "path = Path(sys.argv[1])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "from tgi.server.kernels.cpu import pointwise\n"
        "before = peak()\n"
        "model = registry.build_model(read_model_config(path), open_checkpoint(path), torch.float32,\n"
        "                             torch.device('cpu'), SingleRank())\n"
        "print(model.weight_bytes, peak() - before)\n"
        "loaded = [name for name in sys.modules if name.startswith(('transformers', 'torch._dynamo'))]\n"
        "assert not loaded, loaded\n"
    )
    command = [sys.executable, "-c", script, str(locate(BUNDLED_MODEL))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weights, peak = map(int, output.split())
    assert weights == pytest.approx(4 * (134_515_008 + 49_152 * 576), rel=0.001)
    assert peak < weights + 200e6
