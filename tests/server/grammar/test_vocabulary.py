from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.fakes.tiny_model import EOS_ID, IM_END_ID, IM_START_ID, write_tiny_llama
from tests.fakes.tokenizer import sentencepiece, write_gguf
from tgi.errors import StartupError
from tgi.hub import BUNDLED_MODEL, locate
from tgi.server.grammar.vocabulary import Vocabulary, read_beside, read_vocabulary
from tgi.text.tokenizer import load_tokenizer


def allowed(vocabulary: Vocabulary, lark: str, *taken: int) -> set[int]:
    matcher = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_lark(lark))
    assert matcher.consume_tokens(list(taken)), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_every_token_has_the_bytes_that_clients_will_see(tiny: Path, tmp_path: Path) -> None:
    paths = (tiny, write_gguf(tmp_path / "spm.gguf", sentencepiece()))
    for path in paths:
        tokenizer = load_tokenizer(path)
        vocabulary = read_vocabulary(path, tokenizer.vocab_size)
        ordinary = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
        for token in ordinary:
            if tokenizer.token_text(token) != "<unk>" and tokenizer.token_bytes(token) != b"\xff":  # in no UTF-8
                assert vocabulary.tokens.decode_bytes([token]) == tokenizer.token_bytes(token)


@pytest.mark.real_model
def test_the_bundled_models_tokens_have_their_bytes_too() -> None:
    path = locate(BUNDLED_MODEL)
    tokenizer = load_tokenizer(path)
    vocabulary = read_vocabulary(path, tokenizer.vocab_size)
    assert vocabulary.eos_ids == {2}
    for token in range(tokenizer.vocab_size):
        if not tokenizer.is_special(token) and tokenizer.token_bytes(token) != b"\xff":
            assert vocabulary.tokens.decode_bytes([token]) == tokenizer.token_bytes(token)


def test_special_tokens_are_no_text_and_stand_where_a_grammar_names_them(tiny: Path) -> None:
    vocabulary = read_vocabulary(tiny, 512)
    assert allowed(vocabulary, 'start: <|im_start|> "x"') == {IM_START_ID}
    anything = allowed(vocabulary, "start: /(.|\\n)*/")
    assert IM_START_ID not in anything
    assert len(anything) > 100
    assert not vocabulary.tokens.is_special_token(300)


def test_every_end_ends(tiny: Path) -> None:
    vocabulary = read_vocabulary(tiny, 512, (IM_END_ID, EOS_ID, 99_999))
    assert vocabulary.eos_ids == {EOS_ID, IM_END_ID}
    a = vocabulary.tokens.tokenize_str("a")
    assert allowed(vocabulary, 'start: "a"', *a) == {EOS_ID, IM_END_ID}
    assert not allowed(vocabulary, 'start: "ab"', *a) & {EOS_ID, IM_END_ID}


@pytest.mark.parametrize("size", [512, 600, 400])
def test_a_head_may_have_more_rows_than_the_tokenizer_has_tokens_or_fewer(tiny: Path, size: int) -> None:
    vocabulary = read_vocabulary(tiny, size)
    assert vocabulary.size == size
    assert vocabulary.tokens.vocab_size == max(size, 512)
    assert max(allowed(vocabulary, "start: /(.|\\n)*/")) < 512


def test_a_model_without_a_usable_tokenizer_says_so(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        read_beside(bare, 512).result(20)
    (bare / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    with pytest.raises(StartupError, match="names no end-of-sequence token"):
        read_vocabulary(bare, 512)
    assert read_vocabulary(bare, 512, (7,)).eos_ids == {7}
    words = json.loads((tiny / "tokenizer.json").read_text())
    words["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    words |= {"pre_tokenizer": None, "decoder": None, "added_tokens": []}
    (bare / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(StartupError, match="cannot be used for grammars"):
        read_vocabulary(bare, 512, (1,))
