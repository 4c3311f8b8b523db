"""Models without a file: what is refused and in which words, and what of an attention call is understood.

That the answers are right is tested with the families' (test_families.py, test_row_keepers.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.models.families import SIZES, THROUGH_TRANSFORMERS, Family, write_model
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import MODULES, build_model
from tgi.server.models.transformers_attention import NotPaged, Visible, attend, attending, visible
from tgi.server.models.transformers_model import freeze_rope
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exaone4")
    write_model(next(row for row in THROUGH_TRANSFORMERS if row.name == "exaone4"), path)
    return path


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def build(path: Path, **others: Any) -> Any:
    checkpoint = others.pop("checkpoint", None) or open_checkpoint(path)
    group = others.pop("group", SingleRank())
    return build_model(read_model_config(path), checkpoint, torch.float32, CPU, group, path=path)


def configure(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def tamper(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.slow
def test_two_ranks_are_refused_by_name(made: Path) -> None:
    group = SingleRank()
    group.world_size = 2
    with pytest.raises(StartupError, match=r"model_type 'exaone4' is served through transformers.*--num-shard 1"):
        build(made, group=group)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", None, "lacks model.norm.weight, which the model's configuration asks for"),
        ("model.norm.weight", torch.ones(63), "has model.norm.weight in another shape than"),
        ("model.more.weight", torch.ones(64), "holds model.more.weight, for which the model's configuration"),
        ("model.norm.weight", torch.full((64,), torch.nan), "model.norm.weight hold values that are no finite numbers"),
    ],
    ids=["missing", "shape", "extra", "nan"],
)
def test_weights_that_do_not_belong_are_refused_in_one_line(
    copied: Path, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    tamper(copied, name, tensor)
    with pytest.raises(StartupError, match=words) as refused:
        build(copied)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_code_of_a_checkpoint_is_not_run(copied: Path, tmp_path: Path) -> None:
    (copied / "novel.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    configure(copied, model_type="novel", auto_map={"AutoConfig": "novel.C", "AutoModelForCausalLM": "novel.M"})
    words = r"'novel' is not supported, neither here nor by transformers: it brings code of its own .* never run"
    with pytest.raises(StartupError, match=words):
        build(copied)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_model_of_more_than_text_is_refused_by_name(copied: Path) -> None:
    configure(copied, vision_config={"hidden_size": 48})
    assert build(copied).cache_shape.num_layers == 2  # its text part may be there alone
    tamper(copied, "vision_tower.weight", torch.ones(3))
    with pytest.raises(StartupError, match=r"'exaone4' is not supported: it takes more than text \(vision_config\)"):
        build(copied)
    configure(copied, model_type="clip")
    with pytest.raises(StartupError, match="'clip' is not supported: transformers has no model of it that makes text"):
        build(copied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Family("bert", "BertConfig", "an encoder alone"), "BertModel .* cannot be served: .* it says something else"),
        (
            Family("recurrent_gemma", "RecurrentGemmaConfig", "states in its modules", {"lru_width": 64}),
            "RecurrentGemmaModel .* cannot be served: a token at a time, with its own cache, it fails with",
        ),
        (
            Family("openai-gpt", "OpenAIGPTConfig", "no cache", {"n_positions": 64}),
            "cannot be served: it keeps no cache",
        ),
        (
            Family("cpmant", "CpmAntConfig", "a prompt of its own before the text", {"dim_head": 16, "dim_ff": 96}),
            "CpmAntModel .* cannot be served: .* it says something else",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else None,
)
def test_what_cannot_answer_a_token_at_a_time_is_refused_in_one_line(row: Family, words: str, tmp_path: Path) -> None:
    write_model(row, tmp_path)
    with pytest.raises(StartupError, match=words) as refused:
        build(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_quantised_weights_are_refused_by_name(copied: Path) -> None:
    configure(copied, quantization_config={"quant_method": "awq"})
    with pytest.raises(StartupError, match="awq"):
        build(copied)


@pytest.mark.slow
def test_random_weights_need_no_files(copied: Path) -> None:
    (copied / WEIGHTS).unlink()
    assert build(copied, checkpoint=DummyCheckpoint(torch.float32, CPU)).cache_shape.num_layers == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_do_not_turn_with_the_longest_text_also_where_layers_have_their_own(kind: str) -> None:
    import transformers

    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "head_dim": 16, "max_position_embeddings": 32},
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": plain, "full_attention": rope},
    )
    model: Any = transformers.AutoModel.from_config(config).eval()
    freeze_rope(model, 256)
    positions = torch.arange(200).unsqueeze(0)
    turned = model.rotary_emb(torch.zeros(1, 200, 64), positions, "full_attention")[0]
    assert torch.equal(model.rotary_emb(torch.zeros(1, 9, 64), positions[:, :9], "full_attention")[0], turned[:, :9])
    usual = model.rotary_emb(torch.zeros(1, 200, 64), positions, "sliding_attention")[0]
    assert not torch.equal(turned, usual)


class Noted:
    """An AttentionStep that says what it was asked."""

    def __call__(self, layer: int, query: torch.Tensor, *_: object, **options: object) -> torch.Tensor:
        self.layer, self.options = layer, options
        return query


def ask(mask: object = None, layer: int | None = 3, **options: object) -> Noted:
    step = Noted()
    module: Any = SimpleNamespace(layer_idx=layer, is_causal=True)
    tokens = torch.zeros(1, 2, 5, 4)
    with attending(step):
        attended, _ = attend(module, tokens, tokens, tokens, mask, **options)  # type: ignore[arg-type]
    assert attended.shape == (1, 5, 2, 4)
    return step


@pytest.mark.row("E: Transformers fallback")
def test_options_are_passed_on() -> None:
    sinks = torch.ones(2)
    asked = ask(sliding_window=24, softcap=5.0, s_aux=sinks, use_cache=False, position_ids=torch.arange(5))
    assert asked.layer == 3
    assert asked.options == {"window": 24, "softcap": 5.0, "sinks": sinks}


def test_the_mask_says_what_is_visible_whatever_a_keyword_says() -> None:
    assert ask(Visible(None), sliding_window=24).options["window"] is None
    assert ask(Visible(16)).options["window"] == 16


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"position_bias": torch.ones(1)}, "wants position_bias"),
        ({"mask": torch.ones(1, 1, 5, 5)}, "adds a mask of its own"),
        ({"is_causal": False}, "is not causal"),
        ({"layer": None}, "does not know its layer"),
    ],
)
def test_what_is_not_known_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(NotPaged, match=words):
        ask(**asked)


def test_masks_are_recognised_by_what_they_hide() -> None:
    def causal(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query

    def windowed(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key > query - 24)

    def chunked(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 24 == query // 24)

    def everything(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key >= 0

    assert visible(mask_function=causal) == Visible(None)
    assert visible(mask_function=windowed, local_size=24) == Visible(24)
    for function, size in ((chunked, 24), (everything, None), (everything, 24), (windowed, None), (causal, 24)):
        with pytest.raises(NotPaged):
            visible(mask_function=function, local_size=size)
    with pytest.raises(NotPaged, match="more than positions"):
        visible(mask_function=causal, use_vmap=True)


def test_rows_of_the_table_are_no_families_with_a_file() -> None:
    assert not {row.model_types[0] for row in THROUGH_TRANSFORMERS} & set(MODULES)
    assert all(row.ranks == 1 for row in THROUGH_TRANSFORMERS)
