"""Tokenizers built from GGUF metadata: cuts by name, SentencePiece by scores, begin and end tokens, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tokenizer import byte_alphabet, sentencepiece, unpacked, write_gguf
from tgi.errors import StartupError
from tgi.text.tokenizer import Tokenizer, load_tokenizer

Load = Callable[..., Tokenizer]
ALPHABET = byte_alphabet()


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(**changes: Any) -> Tokenizer:
        return load_tokenizer(write_gguf(tmp_path / "model.gguf", byte_level(**changes)))

    return load


def byte_level(words: tuple[str, ...] = (), special: tuple[str, ...] = ("<s>", "</s>"), **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: the 256 bytes, `words` with their merges, then the special tokens."""
    tokens, merges = list(ALPHABET), []
    for word in words:
        spelled = "".join(ALPHABET[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *special],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(special),
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    if merges:
        metadata["tokenizer.ggml.merges"] = merges
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in unpacked(tokenizer.encode(text, False).ids)]


# What a merge may join shows where the text was cut.
WORDS = (" 12", " Hi", "1234", "a1", "'T", "Hi", "!\n", "\n\n", ".a", "..", "===", "..===", "===a")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234 12a1", ["1234", " 12", "a", "1"]),
        ("gpt-2", "Hi Hi!\n\n", ["Hi", " Hi", "!", "\n\n"]),
        ("smollm", "1234 12a1", ["1", "2", "3", "4", " ", "1", "2", "a", "1"]),
        ("starcoder", "a123", ["a", "1", "2", "3"]),
        ("llama-bpe", "1234 12", ["123", "4", " ", "12"]),
        ("llama-bpe", "Hi!\n.a ..", ["Hi", "!\n", ".a", " ", ".."]),
        ("llama-bpe", "a'T", ["a", "'T"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "Hi!\n.a", ["Hi", "!\n", ".a"]),
        ("tekken", "1234 12", ["1", "2", "3", "4", " ", "1", "2"]),
        ("tekken", "Hi!\n.a ..", ["Hi", "!\n", ".a", " ", ".."]),
        ("gpt-4o", "1234 12", ["123", "4", " ", "12"]),
        ("gpt-4o", "HiHi", ["Hi", "Hi"]),
        ("falcon3", "1234", ["123", "4"]),
        ("default", "1234 12", ["123", "4", " ", "12"]),
        ("default", "Hi..===a1", ["Hi", "..", "===", "a", "1"]),
    ],
)
def test_text_is_cut_as_the_name_says(load: Load, pre: str, text: str, expected: list[str]) -> None:
    assert pieces(load(words=WORDS, pre=pre), text) == expected


def test_a_whole_piece_wins_over_merges_only_where_the_model_says_so(load: Load) -> None:
    def make(pre: str) -> Tokenizer:
        metadata = byte_level(words=("ab",), pre=pre)
        metadata["tokenizer.ggml.tokens"].insert(257, "xyz")  # a token that no merge makes
        metadata["tokenizer.ggml.token_type"].insert(257, 1)
        return load(**{key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()})

    assert pieces(make("llama-bpe"), "xyz") == ["xyz"]
    assert pieces(make("gpt-2"), "xyz") == ["x", "y", "z"]


def test_qwen2_composes_characters_first(load: Load) -> None:
    assert load(pre="qwen2").encode("e\u0301", False).ids == load(pre="qwen2").encode("é", False).ids
    assert load(pre="gpt-2").encode("e\u0301", False).ids != load(pre="gpt-2").encode("é", False).ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "some-new-one"}, "pre-tokenizer 'some-new-one' is not supported"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"token_type": [1, 1]}, "258 tokens but 2 token types"),
        ({"merges": ["a z9"]}, "do not fit"),
    ],
)
def test_what_is_unknown_or_broken_is_refused_by_name(load: Load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load(**changes)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has no tokenizer"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}))


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, False, False),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": True, "bos_token_id": -1}, False, False),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(load: Load, changes: dict[str, Any], begins: bool, ends: bool) -> None:
    tokenizer = load(**changes)
    ids = unpacked(tokenizer.encode("a").ids)
    assert ids == [256] * begins + [ord("a")] + [257] * ends
    assert unpacked(tokenizer.encode("a", add_special_tokens=False).ids) == [ord("a")]


@pytest.mark.fault("vllm#4180")
def test_every_kind_of_end_counts(load: Load) -> None:
    special = ("<s>", "</s>", "<|eot_id|>", "<|other|>")
    assert load(special=special).eos_ids == (257, 258)  # found by its text: older files have no key for it
    assert load(special=special, eot_token_id=259).eos_ids == (257, 259)
    assert load(special=special, eos_token_id=258, eom_token_id=259).eos_ids == (258, 259)


def test_user_defined_tokens_are_found_in_text_but_are_not_special(load: Load) -> None:
    types = [1] * 256 + [3, 3, 4]
    tokenizer = load(special=("<s>", "</s>", "<think>"), token_type=types)
    assert pieces(tokenizer, "a<think></s>") == ["a", "<think>", "</s>"]
    assert tokenizer.special_ids == {256, 257}


def test_templates_have_names(tmp_path: Path) -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.fault("TGI#1743")
def test_the_operators_config_overrides_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level() | {"tokenizer.chat_template": "theirs"})
    config = tmp_path / "mine.json"
    config.write_text(json.dumps({"chat_template": "mine", "eos_token": "<s>"}))
    tokenizer = load_tokenizer(path, config)
    assert tokenizer.chat_templates == {"default": "mine"}
    assert (tokenizer.eos_token, tokenizer.eos_ids) == ("<s>", (257, 256))
    with pytest.raises(StartupError, match="--tokenizer-config-path"):
        load_tokenizer(path, tmp_path / "absent.json")


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def test_sentencepiece_merges_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", sentencepiece()))

    def spelled(text: str) -> list[str]:
        return [tokenizer.token_text(token_id) for token_id in unpacked(tokenizer.encode(text).ids)]

    assert spelled("ab") == ["<s>", " a", "b"]  # "▁a" (-1) before "ab" (-2)
    assert spelled("abc") == ["<s>", " abc"]  # "▁a", then "bc", then the two together
    assert spelled("é") == ["<s>", " ", "\ufffd", "\ufffd"]  # unknown: its bytes
    assert tokenizer.decode(unpacked(tokenizer.encode("abc é").ids)) == "abc é"


def test_sentencepiece_without_the_leading_blank(tmp_path: Path) -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert [tokenizer.token_text(token_id) for token_id in unpacked(tokenizer.encode("abc a").ids)] == ["abc", " a"]


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(StartupError, match="score"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
