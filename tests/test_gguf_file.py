"""A GGUF file that lies is one line, whatever reads it: the parser alone, with bytes made by hand, and every reader of
it with bytes that chance has changed."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.tokenizer import byte_alphabet
from tgi.errors import StartupError, TgiError
from tgi.gguf_file import BadGguf, GgufFile
from tgi.model_config import read_model_config
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.text.tokenizer import load_tokenizer

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
MOST_BYTES = 100 << 20
MOST_CHARACTERS = 2000  # of a message


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, value: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + value


def tensor(name: bytes, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def write(path: Path, keys: list[bytes], tensors: list[bytes] | None = None, data: bytes = b"") -> Path:
    tensors = tensors or []
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    path.write_bytes(raw + bytes(-len(raw) % 32) + data if data else raw)
    return path


def test_every_kind_of_value_is_read(path: Path) -> None:
    keys = [
        entry(b"a", U8, b"\x07"),
        entry(b"b", F32, struct.pack("<f", 0.5)),
        entry(b"c", BOOL, b"\x01"),
        entry(b"d", STRING, text("é".encode())),
        entry(b"e", ARRAY, array(U32, 2, struct.pack("<II", 3, 4))),
        entry(b"f", ARRAY, array(STRING, 2, text(b"x") + text(b"\xff"))),
        entry(b"g", ARRAY, array(BOOL, 2, b"\x00\x01")),
        entry(b"h", U64, struct.pack("<Q", 2**64 - 1)),
    ]
    file = GgufFile(write(path, keys, [tensor(b"t", (2, 3), offset=0)], struct.pack("<6f", *range(6))))
    values = {"a": 7, "b": 0.5, "c": True, "d": "é", "e": [3, 4], "f": ["x", "�"], "g": [False, True], "h": 2**64 - 1}
    assert dict(file) == values
    assert file.tensors["t"].shape == (3, 2)  # the innermost dimension comes first in the file
    assert bytes(file.bytes_of(file.tensors["t"], 24)) == struct.pack("<6f", *range(6))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([entry(b"a", 13, b"")], [], "truncated or corrupt: metadata of type 13"),
        ([entry(b"a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0")))], [], "an array of arrays"),
        ([entry(b"a", ARRAY, array(77, 1, b"\0"))], [], "metadata of type 77"),
        ([entry(b"a", ARRAY, array(U32, 2**62, b""))], [], "an array ends behind the end"),
        ([entry(b"a", ARRAY, array(STRING, 1, struct.pack("<Q", 2**40)))], [], "an array ends behind the end"),
        ([entry(b"a", ARRAY, array(STRING, 2**63, text(b"x")))], [], "truncated or corrupt"),
        ([entry(b"a", STRING, struct.pack("<Q", 2**63))], [], "a string ends behind the end"),
        ([entry(b"a", U8, b"\0"), entry(b"a", U8, b"\1")], [], "truncated or corrupt: the key 'a' twice"),
        (
            [entry(b"a", ARRAY, array(U8, 0, b"")), entry(b"a", U8, b"\1")],
            [],
            "truncated or corrupt: the key 'a' twice",
        ),
        ([entry(b"\xff", U8, b"\0")], [], "truncated or corrupt: 'utf-8'"),
        ([entry(b"general.alignment", U32, bytes(4))], [tensor(b"t")], "an alignment of 0"),
        ([entry(b"general.alignment", STRING, text(b"x"))], [tensor(b"t")], "truncated or corrupt: invalid literal"),
        ([], [tensor(b"t", (1,) * 5)], "has 5 dimensions (at most 4)"),
        ([], [tensor(b"t", (4, 0))], "tensor 't' has no elements"),
        ([], [tensor(b"t"), tensor(b"t")], "names a tensor twice"),
        ([entry(b"split.count", STRING, text(b"x"))], [], "truncated or corrupt"),
    ],
)
def test_what_makes_no_sense_is_one_line(path: Path, keys: list[bytes], tensors: list[bytes], message: str) -> None:
    with pytest.raises(BadGguf) as raised:
        GgufFile(write(path, keys, tensors, bytes(16)))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_last_array_that_is_cut_off_is_refused_when_the_file_is_opened(path: Path) -> None:
    """Not when somebody asks for its values."""
    with pytest.raises(BadGguf, match="an array ends behind the end"):
        GgufFile(write(path, [entry(b"a", ARRAY, array(STRING, 1, struct.pack("<Q", 5) + b"abc"))]))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "GGUF version 1 is not supported"),
        (struct.pack("<I", 4), "GGUF version 4 is not supported"),
        (struct.pack(">I", 3), "is a big-endian GGUF file, which is not supported"),
    ],
)
def test_other_versions_are_refused_by_number(path: Path, version: bytes, message: str) -> None:
    path.write_bytes(b"GGUF" + version + bytes(64))
    with pytest.raises(BadGguf, match=message):
        GgufFile(path)


@pytest.mark.parametrize("offset", [2**40, 2**64 - 1])
def test_a_tensor_outside_the_file_is_named(path: Path, offset: int) -> None:
    file = GgufFile(write(path, [], [tensor(b"t", offset=offset)], bytes(16)))
    with pytest.raises(BadGguf, match=r"is truncated: tensor 't' needs \d+ bytes more"):
        file.bytes_of(file.tensors["t"], 16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor(b"rope_factors_long.weight")], "holds no list rope_factors_short.weight"),
        ([tensor(b"rope_factors_long.weight", (2, 2))], "holds no list rope_factors_long.weight"),
        ([tensor(b"rope_factors_long.weight", kind=1)], "holds no list rope_factors_long.weight"),
        ([tensor(b"rope_factors_long.weight", offset=2**40)], "is truncated: tensor 'rope_factors_long.weight'"),
    ],
)
def test_rope_factors_that_are_no_lists_are_refused(path: Path, tensors: list[bytes], message: str) -> None:
    """A model without them would answer long prompts with nonsense."""
    numbers = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length")
    keys = [entry(b"general.architecture", STRING, text(b"phi3"))]
    keys += [entry(f"phi3.{name}".encode(), U32, struct.pack("<I", 2)) for name in numbers]
    write(path, keys, [tensor(b"token_embd.weight", (2, 2)), *tensors], bytes(16))
    with pytest.raises(StartupError) as raised:
        read_model_config(path)
    assert message in str(raised.value)


# --- Chance ----------------------------------------------------------------------------------------------------------


def write_model(path: Path, architecture: str, tokenizer: str) -> int:
    """A tiny model with its tokenizer. Returns where the table of tensors ends."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(8)
    writer.add_kv_lora_rank(32)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(4)
    writer.add_uint16("split.count", 1)
    writer.add_uint32("general.alignment", 32)
    tokens = [*byte_alphabet()[:20], "<s>", "</s>"]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 20 + [3, 3])
    writer.add_token_scores([-float(index) for index in range(22)])
    writer.add_bos_token_id(20)
    writer.add_eos_token_id(21)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((22, 32), np.float32))
    for part in ("gate", "up"):
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.zeros((2, 8, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float32))
    writer.add_tensor("blk.0.attn_k_b.weight", np.zeros((4, 32, 4), np.float32))
    writer.add_tensor("blk.0.attn_v_b.weight", np.zeros((4, 8, 32), np.float32))
    writer.add_tensor("last.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes().index(b"last.weight") + len(b"last.weight") + 4 + 16 + 12


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name, checkpoint.shape(name))


def refusal(read: Callable[[Path], object], path: Path) -> str:
    try:
        read(path)
    except TgiError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[tuple[bytes, int]]]]:
    folder = tmp_path_factory.mktemp("models")
    path = folder / "m.gguf"
    seeds: list[tuple[bytes, int]] = []
    for architecture, tokenizer in SEEDS:
        end = write_model(path, architecture, tokenizer)
        seeds.append((path.read_bytes(), end))
        for read in (read_model_config, load_tokenizer, read_all):
            read(path)
    tracemalloc.start()
    yield path, seeds
    tracemalloc.stop()


SEEDS = [("llama", "gpt2"), ("llama", "llama"), ("gpt-oss", "gpt2"), ("deepseek2", "llama")]
WORDS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 999)
CHANGES = st.one_of(
    st.tuples(st.just("<B"), st.integers(0, 255)),
    st.tuples(st.just("<I"), WORDS.map(lambda word: word & 0xFFFFFFFF)),
    st.tuples(st.just("<Q"), WORDS),
)


@given(
    which=st.integers(0, 3),
    changes=st.lists(st.tuples(st.integers(4, 1 << 16), CHANGES), max_size=3),
    cut=st.booleans(),
)
def test_changed_bytes_are_read_or_refused_in_one_line(
    models: tuple[Path, list[tuple[bytes, int]]],
    which: int,
    changes: list[tuple[int, tuple[str, int]]],
    cut: bool,
) -> None:
    """Whatever a header says, no reader of the file fails in another way, or takes memory for what is not there."""
    path, seeds = models
    raw, end = bytearray(seeds[which][0]), seeds[which][1]
    for place, (code, value) in changes:
        struct.pack_into(code, raw, 4 + place % (end - 12), value)
    if cut and changes:
        del raw[changes[0][0] % len(raw) :]
    path.write_bytes(raw)
    for read in (read_model_config, load_tokenizer, read_all):
        tracemalloc.reset_peak()
        message = refusal(read, path)
        assert "\n" not in message
        assert len(message) < MOST_CHARACTERS
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
