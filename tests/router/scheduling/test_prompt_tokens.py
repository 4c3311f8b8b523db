from __future__ import annotations

import math
from array import array

import pytest

from tests.fakes.scheduling import TOKENIZER
from tests.fakes.scripted_shard import pack
from tests.fakes.tokenizer import EOS_ID
from tgi.router.backend import PromptToken, TopToken
from tgi.router.scheduling.prompt_tokens import PromptTokens, Tops

IDS = [ord("a"), ord("b"), EOS_ID]
LOGPROBS = array("f", [math.nan, -0.5, -0.25])


class CountingVocabulary:
    num_asked = 0

    def token_text(self, token_id: int) -> str:
        self.num_asked += 1
        return TOKENIZER.token_text(token_id)

    def is_special(self, token_id: int) -> bool:
        return TOKENIZER.is_special(token_id)


def test_a_token_is_made_when_somebody_looks() -> None:
    vocabulary = CountingVocabulary()
    tokens = PromptTokens(pack(IDS), LOGPROBS, None, vocabulary)
    assert len(tokens) == 3
    assert vocabulary.num_asked == 0
    assert tokens[1] == PromptToken(ord("b"), "b", -0.5)
    assert vocabulary.num_asked == 1


def test_it_is_a_sequence() -> None:
    tokens = PromptTokens(pack(IDS), LOGPROBS, None, TOKENIZER)
    whole = [PromptToken(ord("a"), "a", None), PromptToken(ord("b"), "b", -0.5), PromptToken(EOS_ID, "</s>", -0.25)]
    assert list(tokens) == whole
    assert tokens[1:] == whole[1:]
    assert tokens[-1] == whole[-1]
    with pytest.raises(IndexError):
        tokens[3]
    assert not PromptTokens(b"", array("f"), None, TOKENIZER)


def test_each_position_has_its_own_best_tokens() -> None:
    minus_inf = -math.inf
    tops = Tops(
        array("I", [0, 0, ord("b"), ord("c"), EOS_ID, ord("d")]),
        array("f", [math.nan, math.nan, -0.5, -1.5, -0.25, minus_inf]),
    )
    tokens = PromptTokens(pack(IDS), LOGPROBS, tops, TOKENIZER)
    assert [token.top_tokens for token in tokens] == [
        (),
        (TopToken(ord("b"), "b", -0.5, False), TopToken(ord("c"), "c", -1.5, False)),
        (TopToken(EOS_ID, "</s>", -0.25, True),),
    ]
