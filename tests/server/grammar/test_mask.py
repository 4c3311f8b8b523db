from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLParserLimits

from tests.fakes.masks import HANG_S, GatedCompiler, known
from tests.fakes.tiny_model import EOS_ID, IM_END_ID, write_tiny_llama
from tgi.server.grammar import compiler as compiling
from tgi.server.grammar import mask as room
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.mask import Masks
from tgi.server.grammar.vocabulary import Vocabulary, read_vocabulary
from tgi.shard_client.messages import Admit, Grammar, Sampling, Stopping

SIZE = 500  # fewer than the tokenizer's 512, and no multiple of 32


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return read_vocabulary(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), SIZE, (IM_END_ID,))


def make(vocabulary: Vocabulary) -> Masks:
    return Masks(Compiler(known(vocabulary)), lambda: None)


def admit(
    source: str,
    generated: Sequence[int] = (),
    begins_at: int = 0,
    eos_ids: tuple[int, ...] = (EOS_ID,),
    ignore_eos: bool = False,
) -> Admit:
    stopping = Stopping(50, eos_ids=eos_ids, ignore_eos=ignore_eos)
    packed = array("I", generated).tobytes()
    return Admit(1, b"\5\0\0\0", packed, 0, b"", Sampling(), stopping, grammar=Grammar("regex", source, begins_at))


def allowed(masks: Masks, row: int) -> set[int]:
    assert masks.wait([row], HANG_S)
    assert not masks.faults()
    mask = masks.mask(row)
    assert mask is not None
    assert mask.shape == (-(-SIZE // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def texts(vocabulary: Vocabulary, ids: set[int]) -> set[str]:
    return {vocabulary.tokens.decode_str([token]) for token in ids}


def spelled(vocabulary: Vocabulary, text: str) -> list[int]:
    return [vocabulary.tokens.tokenize_str(character)[0] for character in text]


def test_masks_follow_the_ids(vocabulary: Vocabulary) -> None:
    masks = make(vocabulary)
    masks.add(3, admit("ab[cd]"))
    for text, step in (("a", {"a"}), ("b", {"b"}), ("c", {"c", "d"})):
        assert texts(vocabulary, allowed(masks, 3)) == step
        masks.advance([(3, spelled(vocabulary, text)[0])])
    assert allowed(masks, 3) == {EOS_ID, IM_END_ID}


def test_a_row_whose_matcher_breaks_takes_no_other_along(vocabulary: Vocabulary) -> None:
    class Panic(BaseException):
        """As the library's own: no Exception."""

    class Broken:
        def consume_token(self, token: int) -> bool:
            raise Panic("index out of bounds")

    masks = make(vocabulary)
    for row in (1, 2, 3):
        masks.add(row, admit("ab[cd]"))
        allowed(masks, row)
    masks._rows[2].matcher = Broken()  # type: ignore[assignment]
    a = spelled(vocabulary, "a")[0]
    masks.advance([(row, a) for row in (1, 2, 3)])
    assert masks.wait([1, 2, 3], HANG_S)
    assert masks.faults() == [(2, "grammar failed: Panic: index out of bounds")]
    masks.remove(2)
    assert texts(vocabulary, allowed(masks, 1) & allowed(masks, 3)) == {"b"}


def test_replayed_ids_give_the_same_masks(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "REPLAY_IDS", 2)
    masks = make(vocabulary)
    ids = spelled(vocabulary, "abcabca")
    masks.add(1, admit("(abc)*"))
    for token in ids:
        assert token in allowed(masks, 1)
        masks.advance([(1, token)])
    masks.add(2, admit("(abc)*", ids))
    masks.add(3, admit("(abc)*", [9, 9, *ids], begins_at=2))
    assert allowed(masks, 1) == allowed(masks, 2) == allowed(masks, 3)


def test_no_id_beyond_the_models_is_allowed(vocabulary: Vocabulary) -> None:
    masks = make(vocabulary)
    masks.add(1, admit("(.|\n)*"))
    masks.add(2, admit("a", begins_at=9))  # anything, for now
    assert max(allowed(masks, 1)) < SIZE
    assert allowed(masks, 2) == set(range(SIZE))


def test_the_end_is_allowed_exactly_when_the_grammar_may_end(vocabulary: Vocabulary) -> None:
    masks = make(vocabulary)
    own = spelled(vocabulary, "b")[0]  # a request whose EOS is an ordinary token
    masks.add(1, admit("a+b?c", eos_ids=(own,)))
    masks.advance([(1, next(iter(spelled(vocabulary, "a") if allowed(masks, 1) else [])))])
    assert own not in allowed(masks, 1)
    masks.advance([(1, spelled(vocabulary, "c")[0])])
    assert allowed(masks, 1) == {EOS_ID, IM_END_ID, own}
    assert masks.is_end(1, own)
    assert masks.is_end(1, IM_END_ID)
    assert not masks.is_end(1, 77)


def test_an_ignored_end_is_left_for_when_nothing_else_is(vocabulary: Vocabulary) -> None:
    masks = make(vocabulary)
    masks.add(1, admit("a{1,2}", ignore_eos=True))
    a = spelled(vocabulary, "a")[0]
    assert allowed(masks, 1) >= {a}
    masks.advance([(1, a)])
    assert allowed(masks, 1) == {a}
    masks.advance([(1, a)])
    assert allowed(masks, 1) == {EOS_ID, IM_END_ID}


@pytest.mark.parametrize(("parallel", "slow_s"), [(1_000, 10.0), (2, 10.0), (2, -1.0), (1_000, -1.0)])
def test_masks_are_the_same_however_they_are_made(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, parallel: int, slow_s: float
) -> None:
    monkeypatch.setattr(room, "PARALLEL_ROWS", parallel)
    monkeypatch.setattr(room, "SLOW_S", slow_s)
    masks = make(vocabulary)
    words = ["abcd", "bcda", "cdab", "dabc", "aaaa", "abab"]
    for row, word in enumerate(words):
        masks.add(row, admit(f"{word}|x", begins_at=row % 2))
    masks.add(99, admit("[ab]+"))
    for index in range(4):
        for row, word in enumerate(words):
            if index >= row % 2:
                first = index - row % 2
                assert texts(vocabulary, allowed(masks, row)) >= {word[first]}
                assert len(allowed(masks, row)) < 8
        assert masks.wait(range(len(words)), HANG_S)
        masks.advance(
            [(row, spelled(vocabulary, (" " * (row % 2) + word)[index])[0]) for row, word in enumerate(words)]
        )


def test_a_grammar_whose_step_costs_too_much_fails_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "limits", lambda: LLParserLimits(max_lexer_states=1_000))
    masks = make(vocabulary)
    masks.add(1, admit("(.*[a-m].{10}){3}"))
    masks.add(2, admit("[a-z]*"))
    z = spelled(vocabulary, "a")[0]
    for _ in range(60):
        assert masks.wait([1, 2], HANG_S)
        if masks.faults():
            break
        masks.advance([(1, z), (2, z)])
    ((row, message),) = masks.faults()
    assert row == 1
    assert message.startswith("grammar cannot go on: ")
    assert "\n" not in message
    assert "<" not in message
    masks.remove(1)
    assert not masks.faults()
    assert allowed(masks, 2)


def test_ids_that_a_grammar_does_not_take_are_a_fault(vocabulary: Vocabulary) -> None:
    masks = make(vocabulary)
    masks.add(1, admit("abc", spelled(vocabulary, "az")))
    assert masks.wait([1], HANG_S)
    assert masks.faults() == [(1, "grammar does not take what was generated so far")]


def test_a_grammar_whose_tokens_the_model_lacks_is_a_fault(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    small = read_vocabulary(path, 60)
    masks = make(small)
    missing = next(chr(byte) for byte in range(33, 127) if small.tokens.tokenize_str(chr(byte))[0] >= 60)
    masks.add(1, admit(f"[{missing}]"))
    assert masks.wait([1], HANG_S)
    assert masks.faults() == [(1, "grammar leaves no token of the model's vocabulary")]


def test_who_waits_is_woken_once_and_a_row_that_is_gone_wakes_nobody(vocabulary: Vocabulary) -> None:
    compiler = GatedCompiler(vocabulary)
    woken = threading.Semaphore(0)
    masks = Masks(compiler, woken.release)
    for row in (1, 2, 3):
        masks.add(row, admit("abc"))
    masks.call_when_settled(1)
    masks.call_when_settled(2)
    masks.remove(2)
    assert not masks.wait([1], 0.0)
    assert masks.mask(1) is None
    assert masks.wait([2], 0.0), "nobody waits for a row that is gone"
    assert 0 < masks.next_due_s <= room.PATIENCE_S
    compiler.gate.set()
    assert masks.wait([1, 3], HANG_S)
    assert woken.acquire(timeout=HANG_S)
    assert not woken.acquire(blocking=False)


def test_a_row_number_may_be_given_away_while_its_grammar_is_compiled(vocabulary: Vocabulary) -> None:
    compiler = GatedCompiler(vocabulary)
    masks = Masks(compiler, lambda: None)
    masks.add(1, admit("abc"))
    masks.remove(1)
    masks.add(1, admit("xyz"))
    compiler.gate.set()
    assert texts(vocabulary, allowed(masks, 1)) == {"x"}
