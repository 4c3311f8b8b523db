"""GGUF under safetensors names and order: whole, in slices that cut blocks, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tgi.errors import StartupError
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.gguf_checkpoint import row_order
from tgi.server.weights.gguf_layouts import layout_of

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64
Q4_1, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "Q4_0"))
Tensors = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]]


def permute_as_the_converter_does(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write_gguf(path: Path, tensors: Tensors, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    for name, (values, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_norm.weight", "model.layers.12.input_layernorm.weight"),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk.0.ffn_gate_exps.weight", "model.layers.0.block_sparse_moe.experts.{}.w1.weight"),
        ("blk.0.ffn_down.3.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("blk.0.attn_new.weight", "blk.0.attn_new.weight"),
        ("mm.{}.weight", "mm.{}.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert layout_of("llama", ()).name(name) == expected


def test_query_and_key_rows_come_back_in_order(tmp_path: Path) -> None:
    query, key = random(HEADS * HEAD_DIM, HIDDEN, seed=1), random(KV_HEADS * HEAD_DIM, HIDDEN, seed=2)
    bias, value = random(HEADS * HEAD_DIM, seed=3), random(KV_HEADS * HEAD_DIM, HIDDEN, seed=4)
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "blk.0.attn_q.weight": (permute_as_the_converter_does(query, HEADS), Q8_0),
            "blk.0.attn_q.bias": (permute_as_the_converter_does(bias, HEADS), None),
            "blk.0.attn_k.weight": (permute_as_the_converter_does(key, KV_HEADS), None),
            "blk.0.attn_v.weight": (value, None),
        },
    )
    checkpoint = open_checkpoint(path)
    place = "model.layers.0.self_attn."
    assert torch.equal(checkpoint.read(place + "q_proj.weight", query.shape), rounded(query, Q8_0))
    assert torch.equal(checkpoint.read(place + "q_proj.bias", bias.shape), torch.from_numpy(bias))
    assert torch.equal(checkpoint.read(place + "k_proj.weight", key.shape), torch.from_numpy(key))
    assert torch.equal(checkpoint.read(place + "v_proj.weight", value.shape), torch.from_numpy(value))
    # A rank's heads, and a slice that respects no head.
    for rows in (slice(8, 24), slice(3, 13)):
        part = checkpoint.read(place + "q_proj.weight", query.shape, (rows,))
        assert torch.equal(part, rounded(query, Q8_0)[rows])
        assert torch.equal(checkpoint.read(place + "q_proj.bias", bias.shape, (rows,)), torch.from_numpy(bias)[rows])


def test_row_order_is_a_permutation_within_heads() -> None:
    order = row_order(16, 2)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
@pytest.mark.parametrize(
    "region", [(slice(0, 0),), (slice(2, 5),), (slice(0, 6), slice(32, 96)), (slice(1, 2), slice(40, 70))]
)
def test_slices_equal_slices_of_the_whole(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, region: tuple[slice, ...]
) -> None:
    values = random(6, 128)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (values, kind)})
    part = open_checkpoint(path).read("model.layers.0.mlp.down_proj.weight", (6, 128), region)
    assert torch.equal(part, rounded(values, kind)[region])


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K  # no file of a model has it, no reader takes it
    path = write_gguf(tmp_path / "m.gguf", {"output_norm.weight": (random(8), None)})
    checkpoint = open_checkpoint(path)
    with pytest.raises(StartupError, match=r"holds no tensor lm_head\.weight"):
        checkpoint.read("lm_head.weight", (8, 8))
    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \[8\].*asks for \[16\]"):
        checkpoint.read("model.norm.weight", (16,))

    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((1, 292), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match=r"output\.weight has block type 15, which is not supported"):
        open_checkpoint(tmp_path / "k.gguf").read("lm_head.weight", (1, 256))


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "message"),
    [
        ("llama", "blk.0.ffn_gate_exps.weight", (8,), r"ffn_gate_exps\.weight of shape \[8\] is no stack of tensors"),
        ("llama", "blk.0.ffn_gate_exps.weight", (1 << 15, 1), r"of shape \[32768, 1\] is no stack of tensors"),
        (
            "gpt-oss",
            "blk.0.ffn_gate_exps.weight",
            (2, 8, 8),
            r"has no blk\.0\.ffn_up_exps\.weight of a shape that fits",
        ),
        ("deepseek2", "blk.0.attn_k_b.weight", (2, 8, 8), r"has no blk\.0\.attn_v_b\.weight of a shape that fits"),
    ],
)
def test_a_stack_that_is_none_is_refused(
    tmp_path: Path, architecture: str, name: str, shape: tuple[int, ...], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {name: (random(*shape), None)}, architecture)
    with pytest.raises(StartupError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("architecture", "first", "second", "shapes"),
    [
        ("gpt-oss", "ffn_gate_exps", "ffn_up_exps", ((2, 8, 8), (2, 8, 4))),
        ("deepseek2", "attn_k_b", "attn_v_b", ((2, 8, 4), (2, 8, 4))),
    ],
)
def test_two_tensors_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, architecture: str, first: str, second: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    names = [f"blk.0.{part}.weight" for part in (first, second)]
    tensors: Tensors = {name: (random(*shape), None) for name, shape in zip(names, shapes)}
    with pytest.raises(StartupError, match=rf"has no blk\.0\.{second}\.weight of a shape that fits"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, architecture))


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (random(64, 64), None)})
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(StartupError, match=r"truncated: tensor 'output\.weight' needs \d+ bytes more"):
        open_checkpoint(path).read("lm_head.weight", (64, 64))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(StartupError, match="is not a GGUF file"):
        open_checkpoint(tmp_path / "m.gguf")


def test_names_of_architectures() -> None:
    assert layout_of("gemma3", ()).name("blk.0.ffn_norm.weight") == "model.layers.0.pre_feedforward_layernorm.weight"
    assert layout_of("phi3", ()).name("blk.1.attn_qkv.weight") == "model.layers.1.self_attn.qkv_proj.weight"
    assert layout_of("phi3", ()).name("blk.1.ffn_up.weight") == "model.layers.1.mlp.gate_up_proj.weight"


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", {"output.weight": (random(8, 8), None), "output_norm.weight": (random(8), None)}
    )
    raw = path.read_bytes()
    # The second tensor's offset, the last entry of the table, is made to lie inside the first.
    place = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    assert struct.unpack_from("<Q", raw, place) == (256,)
    path.write_bytes(raw[:place] + struct.pack("<Q", 64) + raw[place + 8 :])
    with pytest.raises(StartupError, match=r"tensors output\.weight and output_norm\.weight overlap"):
        open_checkpoint(path)


def test_a_tensor_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (random(8), None), "outpux.weight": (random(8), None)})
    path.write_bytes(path.read_bytes().replace(b"outpux", b"output"))
    with pytest.raises(StartupError, match="names a tensor twice"):
        open_checkpoint(path)


@pytest.mark.parametrize("place", [8, 16, 24])
@pytest.mark.parametrize("value", [2**62, 2**64 - 1])
def test_absurd_counts_and_lengths_are_one_line(tmp_path: Path, place: int, value: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (random(8), None)})
    raw = path.read_bytes()  # 8: number of tensors, 16: number of keys, 24: length of the first key
    path.write_bytes(raw[:place] + struct.pack("<Q", value) + raw[place + 8 :])
    with pytest.raises(StartupError, match="is not a valid GGUF file") as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value)
