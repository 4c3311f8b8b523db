"""Tokenizers of model directories: which file says what, and which wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tokenizer import BOS_ID, EOS_ID, TURN_END_ID, unpacked, write_byte_tokenizer
from tgi.errors import StartupError
from tgi.text.tokenizer import load_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "model", chat_template=None)


def put(directory: Path, name: str, value: Any) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_tokens_in_both_spellings_and_from_both_files(directory: Path) -> None:
    put(directory, "tokenizer_config.json", {"bos_token": {"content": "<s>", "special": True}, "eos_token": None})
    put(directory, "special_tokens_map.json", {"eos_token": "</s>", "bos_token": "ignored", "pad_token": "</s>"})
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.eos_token) == ("<s>", BOS_ID, "</s>")
    assert tokenizer.eos_ids == (EOS_ID,)
    assert tokenizer.named_tokens["pad_token"] == "</s>"
    assert tokenizer.special_ids == {BOS_ID, EOS_ID, TURN_END_ID}


def test_tokens_that_the_makers_named_themselves(directory: Path) -> None:
    config = {"bos_token": "<s>", "image_token": "<image>", "extra_special_tokens": {"audio_token": {"content": "<a>"}}}
    put(directory, "tokenizer_config.json", config | {"add_bos_token": True, "split_special_tokens": False})
    assert load_tokenizer(directory).named_tokens == {
        "bos_token": "<s>",
        "image_token": "<image>",
        "audio_token": "<a>",
    }


@pytest.mark.fault("vllm#4180")
def test_eos_ids_of_all_files_count(directory: Path) -> None:
    put(directory, "generation_config.json", {"eos_token_id": [TURN_END_ID, 7]})
    put(directory, "config.json", {"eos_token_id": 7, "text_config": {"eos_token_id": 9}})
    assert load_tokenizer(directory).eos_ids == (TURN_END_ID, 7, 9, EOS_ID)


def test_tokens_that_only_the_model_config_knows(directory: Path) -> None:
    put(directory, "tokenizer_config.json", {})
    put(directory, "config.json", {"bos_token_id": BOS_ID, "eos_token_id": True})
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_ids) == ("<s>", None, ())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [97]),
        ({"add_bos_token": True}, [BOS_ID, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS_ID, 97, EOS_ID]),
        ({"add_bos_token": None}, [97]),
    ],
)
def test_begin_and_end_flags(directory: Path, config: dict[str, Any], expected: list[int]) -> None:
    put(directory, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"} | config)
    assert unpacked(load_tokenizer(directory).encode("a").ids) == expected


@pytest.mark.fault("sglang#888")
def test_a_flag_never_doubles_what_the_tokenizer_adds_itself(directory: Path) -> None:
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    backend.save(str(directory / "tokenizer.json"))
    for flag, expected in ((True, [BOS_ID, 97]), (False, [97]), (None, [BOS_ID, 97])):
        put(directory, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": flag})
        assert unpacked(load_tokenizer(directory).encode("a").ids) == expected


def test_truncation_and_padding_left_in_the_file_are_ignored(directory: Path) -> None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(directory / "tokenizer.json"))
    assert unpacked(load_tokenizer(directory).encode("abcdefg").ids) == list(b"abcdefg")


def test_tokens_added_later_are_known(directory: Path) -> None:
    added = {
        "260": {"content": "<tool>", "special": False},
        "259": {"content": "<|pad|>", "special": True},
        "999": {"content": "<far>", "special": True},  # the library cannot give it this id
        "256": {"content": "<s>", "special": True},
    }
    put(directory, "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = load_tokenizer(directory)
    assert unpacked(tokenizer.encode("<tool><|pad|>").ids) == [260, 259]
    assert tokenizer.special_ids == {BOS_ID, EOS_ID, TURN_END_ID, 259}


@pytest.mark.fault("TGI#1743")
@pytest.mark.row("B: Chat templates: bos/eos, tools, date function, raise_exception")
def test_chat_templates_of_every_file(directory: Path, tmp_path: Path) -> None:
    assert load_tokenizer(directory).chat_templates == {}
    named = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}, {"name": "bad"}]
    put(directory, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(directory).chat_templates == {"default": "one", "rag": "two"}
    put(directory, "chat_template.json", {"chat_template": "three"})
    assert load_tokenizer(directory).chat_templates == {"default": "three", "rag": "two"}
    put(directory, "chat_template.jinja", "four")
    put(directory, "additional_chat_templates/tool_use.jinja", "five")
    everything = {"default": "four", "rag": "two", "tool_use": "five"}
    assert load_tokenizer(directory).chat_templates == everything
    put(tmp_path, "mine.json", {"chat_template": "six", "bos_token": "</s>"})
    mine = load_tokenizer(directory, tmp_path / "mine.json")
    assert (mine.chat_templates, mine.bos_token) == ({"default": "six"}, "</s>")
    put(tmp_path, "mine.json", {})  # says nothing of templates: the directory's own files still do
    assert load_tokenizer(directory, tmp_path / "mine.json").chat_templates == {"default": "four", "tool_use": "five"}


@pytest.mark.fault("TGI#1743")
def test_a_template_of_the_operators_replaces_all_others(directory: Path, tmp_path: Path) -> None:
    put(directory, "chat_template.jinja", "theirs")
    put(directory, "additional_chat_templates/tool_use.jinja", "theirs too")
    put(tmp_path, "mine.jinja", "mine\n")
    put(
        tmp_path,
        "mine.json",
        {"chat_template": [{"name": "default", "template": "m"}, {"name": "rag", "template": "r"}]},
    )
    put(tmp_path, "config.json", {"chat_template": "the config's", "bos_token": "</s>"})
    for given, expected in (
        (str(tmp_path / "mine.jinja"), {"default": "mine\n"}),
        (str(tmp_path / "mine.json"), {"default": "m", "rag": "r"}),
        ("{{ messages }}", {"default": "{{ messages }}"}),
        ("{% if x %}y{% endif %}", {"default": "{% if x %}y{% endif %}"}),
    ):
        tokenizer = load_tokenizer(directory, tmp_path / "config.json", given)
        assert (tokenizer.chat_templates, tokenizer.bos_token) == (expected, "</s>")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent.jinja", "is neither a file nor a template. Check --chat-template$"),
        ("absent.json", "does not exist. Check --chat-template$"),
        ("empty.json", "has no chat_template. Check --chat-template$"),
        ("bytes.jinja", "cannot be read"),
    ],
)
def test_a_template_that_is_not_there_is_named(directory: Path, tmp_path: Path, given: str, message: str) -> None:
    put(tmp_path, "empty.json", {})
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(StartupError, match=message) as raised:
        load_tokenizer(directory, chat_template=str(tmp_path / given))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("generation_config.json", "[]", "generation_config.json must hold a JSON object"),
    ],
)
def test_broken_files_are_named(directory: Path, name: str, content: str, message: str) -> None:
    put(directory, name, content)
    with pytest.raises(StartupError, match=message) as raised:
        load_tokenizer(directory)
    assert "\n" not in str(raised.value)


def test_absent_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--tokenizer-config-path"):
        load_tokenizer(directory, tmp_path / "absent.json")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_tokenizer(directory)
