from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tgi.errors import InvalidRequest
from tgi.router.validation.bad_words import encode_bad_words
from tgi.router.validation.parameters import MAX_BAD_WORD_TOKENS

VOCAB_SIZE = 300
# One token for a word with a blank in front, one for each character else; and in the manner of SentencePiece.
MERGED = {" cat": [250], "cat": [99, 97, 116], " dog": [251], "dog": [252], " x": [32, 120], "x": [120]}


@dataclass(frozen=True)
class Ids:
    ids: bytes


class Vocabulary:
    def __init__(self, known: dict[str, list[int]]) -> None:
        self._known = known

    async def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        assert not add_special_tokens
        if "\ud800" in text:
            raise InvalidRequest("the text holds a lone surrogate", "inputs")
        ids = self._known.get(text, [ord(character) for character in text])
        return Ids(array("I", ids).tobytes())


def encoded(words: Sequence[str], known: dict[str, list[int]] | None = None) -> tuple[tuple[int, ...], ...]:
    return asyncio.run(encode_bad_words(words, Vocabulary(MERGED if known is None else known), VOCAB_SIZE))


@pytest.mark.parametrize("word", ["cat", " cat", "  cat"])
def test_a_word_is_meant_at_the_beginning_and_within_a_text(word: str) -> None:
    assert encoded([word]) == ((99, 97, 116), (250,))


def test_each_sequence_stands_once_and_none_that_ends_with_another() -> None:
    assert encoded(["dog", "x", "dog", " x"]) == ((252,), (251,), (120,))
    assert encoded(["ab", "b"], {" ab": [300], " b": [32, 98]}) == ((98,),)  # "ab" ends with "b"


def test_a_blank_within_and_other_white_space_stay() -> None:
    assert encoded(["a b\n", "\n"], {" \n": [5]}) == ((10,), (5,))


def test_a_word_that_the_model_cannot_write_is_left_out() -> None:
    assert encoded(["cat"], {"cat": [300], " cat": [250]}) == ((250,),)
    assert encoded(["cat"], {"cat": [], " cat": [1, 9999]}) == ()


def test_none_is_none() -> None:
    assert encoded([]) == ()


def test_a_word_of_too_many_tokens_is_refused_with_its_length() -> None:
    assert [len(ids) for ids in encoded(["a" * MAX_BAD_WORD_TOKENS])] == [MAX_BAD_WORD_TOKENS]
    with pytest.raises(InvalidRequest, match=r"words of up to 32 tokens\. Given: 'a+' of 33$") as caught:
        encoded(["b", "a" * (MAX_BAD_WORD_TOKENS + 1)])
    assert caught.value.param == "bad_words"


def test_a_text_that_is_no_unicode_is_blamed_on_the_field() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        encoded(["\ud800"])
    assert caught.value.param == "bad_words"


def test_others_have_their_turn_while_many_words_are_encoded() -> None:
    async def run() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await encode_bad_words([f"w{index}" for index in range(128)], Vocabulary({}), VOCAB_SIZE)
        task.cancel()
        return turns

    assert asyncio.run(run()) >= 7
