"""Loading half a gigabyte of weights needs little memory beyond them, whatever the file's format and dtype."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.server.distributed.test_group import free_port

ROOT = Path(__file__).parents[3]
HIDDEN, INNER, LAYERS, VOCABULARY, KV = 1024, 4096, 15, 32000, 256
TILE = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32) * np.float32(0.02)
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV, HIDDEN),
            "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items()
    },
}


def write_safetensors(directory: Path, dtype: str, files: int) -> Path:
    """Random numbers, a tile of them again and again."""
    directory.mkdir()
    names = list(SHAPES)
    weight_map: dict[str, str] = {}
    for number in range(files):
        own = names[number::files]
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        write_file(directory / file, own, dtype)
        weight_map |= dict.fromkeys(own, file)
    if files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": KV // 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_file(path: Path, names: list[str], dtype: str) -> None:
    size = {"F32": 4, "BF16": 2}[dtype]
    tile = TILE.tobytes() if dtype == "F32" else (TILE.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header, offset = {}, 0
    for name in names:
        end = offset + math.prod(SHAPES[name]) * size
        header[name] = {"dtype": dtype, "shape": SHAPES[name], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            whole, rest = divmod(math.prod(SHAPES[name]) * size, len(tile))
            for _ in range(whole):
                file.write(tile)
            file.write(tile[:rest])


def write_gguf(path: Path) -> Path:
    q8 = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quantize(TILE.reshape(-1, 1024), q8)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(16)
    writer.add_head_count_kv(KV // 64)
    for name, shape in SHAPES.items():
        spelled = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if len(shape) == 1:
            writer.add_tensor(spelled, np.ones(shape, np.float32))
        else:
            row_bytes = shape[1] // 32 * 34
            rows = np.resize(blocks.reshape(-1), (shape[0], row_bytes))
            writer.add_tensor(spelled, rows, raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "files"), [("BF16", 1), ("F32", 1), ("F32", 3), ("GGUF", 1)])
def test_the_peak_of_loading_is_near_the_weights(tmp_path: Path, kind: str, files: int, ranks: int) -> None:
    path = write_gguf(tmp_path / "m.gguf") if kind == "GGUF" else write_safetensors(tmp_path / "m", kind, files)
    program = [sys.executable, str(ROOT / "tests/fakes/load_program.py"), str(path), "bfloat16"]
    port = free_port()
    places = [[str(rank), str(ranks), str(port)] for rank in range(ranks)]
    started = [
        subprocess.Popen([*program, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for place in places
    ]
    own_weights = 2 * sum(math.prod(shape) for shape in SHAPES.values()) / ranks
    assert own_weights > 500e6 / ranks
    for process in started:
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        assert own_weights <= int(said) <= 1.2 * own_weights + 300e6
