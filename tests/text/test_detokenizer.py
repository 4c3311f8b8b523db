"""Ids to text: any order of any bytes comes out as decoding them at once would."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.fakes.tokenizer import SPM_TOKENS, byte_tokenizer, ids_of, packed, sentencepiece, write_gguf
from tgi.text.detokenizer import PieceDetokenizer, WindowDetokenizer
from tgi.text.source import TokenizerSource
from tgi.text.tokenizer import Tokenizer, load_tokenizer

BYTES = byte_tokenizer(extra=("👍🏽", "é!", "日本"))


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_in_any_order(ids: list[int]) -> None:
    detokenizer = BYTES.detokenizer()
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == bytes(ids).decode("utf-8", "replace") == BYTES.decode(ids)


@given(st.text(max_size=20))
def test_text_comes_out_whole_and_as_soon_as_it_can(text: str) -> None:
    detokenizer = BYTES.detokenizer()
    seen = ""
    for at, token_id in enumerate(ids_of(text)):
        seen += detokenizer.push(token_id)
        assert seen == text.encode()[: at + 1].decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_given_up_once() -> None:
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.push(byte) for byte in (0xF0, 0x9F)] == ["", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.push(ord("a")) == "a"


def test_ids_without_a_token_give_nothing() -> None:
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.push(token_id) for token_id in (0xC3, -1, 10**9, 0xA9)] == ["", "", "", "é"]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    detokenizer = BYTES.detokenizer(packed([*ids_of("ab"), 0xF0, 0x9F]))
    assert [detokenizer.push(byte) for byte in (0x91, 0x8D)] == ["", "👍"]
    assert BYTES.detokenizer(packed(ids_of("ab"))).push(ord("c")) == "c"


def test_tokens_of_several_characters(tmp_path: Path) -> None:
    first = 259
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.push(token_id) for token_id in (first, first + 1, first + 2)] == ["👍🏽", "é!", "日本"]


@pytest.mark.fault("TGI#1024")
def test_leading_blanks_stay_in_continued_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", sentencepiece()))
    names = {tokenizer.token_text(token_id): token_id for token_id in range(len(SPM_TOKENS), tokenizer.vocab_size)}
    detokenizer = tokenizer.detokenizer(tokenizer.encode("abc").ids)
    assert isinstance(detokenizer, PieceDetokenizer)
    assert [detokenizer.push(names[name]) for name in (" ", " a", "bc")] == [" ", " a", "bc"]
    assert [detokenizer.push(SPM_TOKENS.index(token)) for token in ("<0xE2>", "<0x82>", "<0xAC>")] == ["", "", "€"]


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "the", "cat", "##s", "sat", ".", "�"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[CLS]"])
    return Tokenizer(TokenizerSource(backend))


def test_decoders_that_look_at_neighbours_use_a_window() -> None:
    tokenizer = word_pieces()
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.push(token_id) for token_id in (2, 3, 4, 99, -1, 5, 6)] == [
        "the",
        " cat",
        "s",
        "",
        "",
        " sat",
        ".",
    ]
    assert detokenizer.finish() == ""
    assert tokenizer.detokenizer(packed([2])).push(3) == " cat"  # blanks depend on the prompt
    assert tokenizer.token_text(4) == "##s"


@given(st.lists(st.integers(-1, 8), max_size=12))
def test_a_window_gives_the_whole_text(ids: list[int]) -> None:
    tokenizer = word_pieces()
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)
