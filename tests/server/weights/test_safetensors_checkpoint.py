"""Directories of safetensors: one file, an index, slices, and what is wrong with a directory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.tiny_model import write_safetensors
from tgi.errors import StartupError
from tgi.server.weights.checkpoint import open_checkpoint

MATRIX = np.arange(48, dtype=np.float32).reshape(6, 8)


def test_reads_whole_and_sliced_in_the_files_dtype(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": MATRIX, "b": MATRIX[0]}, "bfloat16")
    checkpoint = open_checkpoint(tmp_path)
    whole = torch.from_numpy(MATRIX).bfloat16()
    assert set(checkpoint.names()) == {"a.weight", "b"}
    assert checkpoint.shape("a.weight") == (6, 8)
    assert torch.equal(checkpoint.read("a.weight", (6, 8)), whole)
    assert torch.equal(checkpoint.read("a.weight", (6, 8), (slice(2, 4),)), whole[2:4])
    assert torch.equal(checkpoint.read("a.weight", (6, 8), (slice(0, 6), slice(3, 7))), whole[:, 3:7])
    assert torch.equal(checkpoint.read("b", (8,), (slice(5, 8),)), whole[0, 5:])


def test_what_was_read_outlives_the_checkpoint(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": MATRIX})
    checkpoint = open_checkpoint(tmp_path)
    tensor = checkpoint.read("a", (6, 8))
    checkpoint.close()
    assert torch.equal(tensor, torch.from_numpy(MATRIX))


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_says_which_file_has_what(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": MATRIX, "b": MATRIX + 1})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": MATRIX + 2})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(tmp_path, {"a": first, "b": first, "c": second})
    checkpoint = open_checkpoint(tmp_path)
    for name, offset in (("c", 2), ("a", 0), ("b", 1)):  # there and back between the files
        assert torch.equal(checkpoint.read(name, (6, 8)), torch.from_numpy(MATRIX + offset))


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": MATRIX})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": MATRIX})
    assert set(open_checkpoint(tmp_path).names()) == {"a", "b"}


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_files_beside_the_model_are_no_weights(tmp_path: Path, beside: str) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": MATRIX})
    write_safetensors(tmp_path / beside, {"layers.0.other_name": MATRIX})
    assert set(open_checkpoint(tmp_path).names()) == {"a"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    with pytest.raises(StartupError, match=r"lacks model-00001-of-00002\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"weight_map": 3}', "[" * 100_000])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StartupError, match="is not an index of weights"):
        open_checkpoint(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": MATRIX})
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(StartupError, match=r"x\.safetensors holds no tensor b"):
        open_checkpoint(tmp_path).read("b", (6, 8))


def test_a_truncated_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": MATRIX})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read \(.*\); fetch it again"):
        open_checkpoint(tmp_path).read("a", (6, 8))


def test_what_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    os.mkfifo(file)  # to open it would wait for ever
    for _ in range(2):
        with pytest.raises(StartupError, match=r"model\.safetensors is no file; fetch it again"):
            open_checkpoint(tmp_path)
        file.unlink()
        file.symlink_to("nowhere")


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": MATRIX})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(StartupError, match=r"holds no tensor model\.norm\.weight"):
        checkpoint.read("model.norm.weight", (8,))
    with pytest.raises(StartupError, match=r"tensor a has shape \[6, 8\].*asks for \[8, 6\]"):
        checkpoint.read("a", (8, 6))


def test_directories_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"holds no \*\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        StartupError, match=r"\.bin files only; convert them with: .*download-weights .* --trust-remote-code"
    ):
        open_checkpoint(tmp_path)


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file.pt").write_bytes(b"")
    with pytest.raises(StartupError, match="neither a directory"):
        open_checkpoint(tmp_path / "file.pt")


def raw_file(path: Path, header: object, size: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def entry(start: int, stop: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": entry(0, 32), "b": entry(16, 48)}, 48),  # overlap
        ({"a": entry(0, 32), "b": entry(0, 32)}, 32),  # the same bytes
        ({"a": entry(0, 16), "b": entry(32, 48)}, 48),  # a gap
        ({"a": entry(0, 1 << 40)}, 32),  # beyond the end
        ({"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 32]}}, 32),
        ({"a": entry(0, 32, "F99")}, 32),
        (b"[]", 0),
        (b"\xff\xfe", 0),
    ],
)
def test_what_a_header_may_not_say(tmp_path: Path, header: object, size: int) -> None:
    raw_file(tmp_path / "model.safetensors", header, size)
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read \(.*\); fetch it again") as raised:
        open_checkpoint(tmp_path).read("a", (8,))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("length", [0, 1 << 40, 2**64 - 1])
def test_a_header_of_absurd_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + bytes(64))
    with pytest.raises(StartupError, match="cannot be read"):
        open_checkpoint(tmp_path).read("a", (8,))


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "first.safetensors", {"a": MATRIX})
    write_safetensors(tmp_path / "second.safetensors", {"a": MATRIX})
    with pytest.raises(StartupError, match=r"a stands in both .*first\.safetensors and second\.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "secret.safetensors", {"a": MATRIX})
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), ".."):
        write_index(folder, {"a": name})
        with pytest.raises(StartupError, match="which is no file beside it"):
            open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "I32", "U8"])
def test_codes_of_a_quantisation_are_no_weights(tmp_path: Path, dtype: str) -> None:
    size = 4 if dtype == "I32" else 1
    raw_file(
        tmp_path / "model.safetensors", {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8 * size]}}, 8 * size
    )
    with pytest.raises(StartupError, match=f"tensor a is stored as {dtype}, as quantised weights are"):
        open_checkpoint(tmp_path).read("a", (8,))
