"""Tokenizers built from GGUF metadata: cuts by name, SentencePiece by scores, begin and end tokens, refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tokenizer import SPM_TOKENS, byte_alphabet, sentencepiece, unpacked, write_gguf
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
        ("falcon", "1234 12", ["123", "4", " 12"]),
        ("deepseek-llm", "1234 12", ["1234", " ", "12"]),
        ("deepseek-llm", "Hi Hi!\n", ["Hi", " Hi", "!", "\n"]),
        ("deepseek-coder", "1234 12", ["1", "2", "3", "4", " ", "1", "2"]),
        ("deepseek-coder", "Hi Hi!\n\n", ["Hi", " Hi", "!", "\n", "\n"]),
        ("deepseek-v3", "1234 12", ["123", "4", " ", "12"]),
        ("deepseek-v3", "Hi!\n.a ..", ["Hi", "!\n", ".a", " ", ".."]),
        ("seed-coder", "Hi!\n.a1234", ["Hi", "!", "\n", ".a", "1", "2", "3", "4"]),
        ("stablelm2", "1234", ["1", "2", "3", "4"]),
        ("bloom", "a1 Hi.a\u2026.", ["a1", " Hi", ".", "a", "\ufffd", "\ufffd", "\ufffd", "."]),
        ("viking", "a1 Hi.a", ["a", "1", " Hi", ".", "a"]),
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


@pytest.mark.parametrize(
    ("pre", "composes"),
    [
        *((pre, True) for pre in ("qwen2", "stablelm2", "command-r", "mpt", "olmo")),
        *((pre, False) for pre in ("gpt-2", "smollm", "llama-bpe", "deepseek-v3", "falcon")),
    ],
)
def test_some_compose_characters_first(load: Load, pre: str, composes: bool) -> None:
    tokenizer = load(pre=pre)
    assert (tokenizer.encode("e\u0301", False).ids == tokenizer.encode("é", False).ids) == composes


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


def test_a_file_that_does_not_name_its_cut_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = byte_level()
    load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert not caplog.records
    del metadata["tokenizer.ggml.pre"]
    load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert "does not name its pre-tokenizer" in caplog.text


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


def test_the_end_of_a_text_counts_beside_that_of_a_turn(load: Load) -> None:
    special = ("<s>", "</s>", "<|eot_id|>", "<|end_of_text|>")
    assert load(special=special).eos_ids == load(special=special, eot_token_id=258).eos_ids == (257, 258, 259)


def test_what_ends_a_part_of_an_answer_of_gpt_oss_does_not_end_it(load: Load) -> None:
    special = ("<s>", "<|return|>", "<|call|>", "<|end|>")
    assert load(special=special).eos_ids == (257, 258)
    assert load(special=special, eot_token_id=259).eos_ids == (257, 258)


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


def test_of_equal_scores_the_earlier_piece_wins(tmp_path: Path) -> None:
    """Converters that have no scores write the same one everywhere; pieces lie in the order that they were learnt."""
    metadata = sentencepiece(add_space_prefix=False)
    tokens = [*SPM_TOKENS, "a", "b", "c", "bc", "ab"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(tokens)
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [6] * 256 + [1] * 5
    assert pieces(load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata)), "abc") == ["a", "bc"]


@pytest.mark.parametrize("seed", range(8))
def test_sentencepiece_splits_as_its_definition_says(tmp_path: Path, seed: int) -> None:
    """Random vocabularies: again and again the adjacent pair whose joint piece has the best score is joined."""
    chance = random.Random(seed)
    words = list("▁ab=-")
    while len(words) < 90:
        word = chance.choice(words) + chance.choice(words)
        if len(word) <= 8 and word not in words:
            words.append(word)
    scores = dict(zip(words, chance.sample(range(-len(words), 0), len(words))))
    metadata = sentencepiece(add_space_prefix=seed % 2 == 0)
    metadata["tokenizer.ggml.tokens"] = [*SPM_TOKENS, *words]
    metadata["tokenizer.ggml.scores"] = [0.0] * len(SPM_TOKENS) + [float(scores[word]) for word in words]
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [6] * 256 + [1] * len(words)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    for _ in range(200):
        text = "".join(chance.choices("ab =-é", (9, 9, 9, 9, 9, 1), k=chance.randrange(1, 40)))
        ids = unpacked(tokenizer.encode(text, add_special_tokens=False).ids)
        assert [metadata["tokenizer.ggml.tokens"][token_id] for token_id in ids] == merged(text, scores, seed % 2 == 0)
        assert tokenizer.decode(ids) == text


def merged(text: str, scores: dict[str, int], prefix: bool) -> list[str]:
    parts = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    while True:
        joint = [
            (scores[left + right], -at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in scores
        ]
        if not joint:
            break
        at = -max(joint)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    spelled = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in spelled for token in tokens]


@pytest.mark.parametrize(
    ("architecture", "text", "expected"),
    [
        ("phi3", "<|user|>\n a", ["<|user|>", " a"]),
        ("phi3", "<s>\na", ["<s>", " ", "\n", "a"]),
        ("llama", "<|user|>\na", ["<|user|>", " ", "\n", "a"]),
    ],
)
def test_blanks_behind_the_marks_of_phi3_are_no_text(
    tmp_path: Path, architecture: str, text: str, expected: list[str]
) -> None:
    metadata: dict[str, Any] = {"general.architecture": architecture, **sentencepiece()}
    for name, value in (("tokens", "<|user|>"), ("scores", -1000.0), ("token_type", 4)):
        metadata[f"tokenizer.ggml.{name}"].append(value)
    assert pieces(load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata)), text) == expected


@pytest.mark.timeout(60)
def test_a_piece_beyond_all_bounds_does_not_stop_the_start(tmp_path: Path) -> None:
    """All its splits would take hours."""
    metadata = sentencepiece()
    for name, value in (("tokens", "a" * 2_000_000), ("scores", -1000.0), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{name}"].append(value)
    assert pieces(load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata)), "abc") == [" abc"]


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(StartupError, match="score"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
