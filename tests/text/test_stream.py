"""TextStream: streamed equals plain, stop strings at every border, special tokens, nothing held back for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.tokenizer import BOS_ID, EOS_ID, TURN_END_ID, byte_tokenizer, ids_of
from tgi.text.stream import Piece, TextStream
from tgi.text.tokenizer import Tokenizer

# Tokens of one byte to several characters; many begin or end inside a character or a stop string.
EXTRA = ("STOP", "ST", "OP", "TOP x", "👍🏽", " 日本", "語.", "\n\n", "é", " b")
TOKENIZER = byte_tokenizer(extra=EXTRA)
FIRST_EXTRA = 259
IDS = st.lists(
    st.sampled_from([*ids_of("STOP é👍日\n ab"), *range(FIRST_EXTRA, FIRST_EXTRA + len(EXTRA))]), max_size=30
)
WITH_SPECIAL = st.lists(
    st.one_of(st.sampled_from([*ids_of("STOPé\n"), FIRST_EXTRA]), st.sampled_from([256, 258])), max_size=20
)


def run(
    ids: list[int], stops: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
) -> tuple[str, list[Piece]]:
    """The plain text, checked against the stream, and the pieces."""
    stream = TextStream(TOKENIZER, b"", stops, include_stop, min_tokens)
    pieces: list[Piece] = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if pieces[-1].stop is not None:
            break
    streamed = "".join(piece.text for piece in pieces if not piece.special)
    if not pieces or pieces[-1].stop is None:
        streamed += stream.finish()
    assert stream.text == streamed
    return streamed, pieces


def id_of(text: str) -> int:
    return FIRST_EXTRA + EXTRA.index(text)


@pytest.mark.fault("TGI#1024")
@given(IDS)
def test_streamed_equals_plain(ids: list[int]) -> None:
    assert run(ids)[0] == TOKENIZER.decode(ids)


@given(
    IDS,
    st.lists(st.sampled_from(["STOP", "TOP", "OPS", "\n\n", "日本", "é👍", "P x", "ab", " "]), min_size=1),
    st.booleans(),
    st.integers(0, 6),
)
def test_a_stop_string_cuts_the_text_wherever_tokens_begin(
    ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    whole = TOKENIZER.decode(ids)
    early = sum(len(piece.text) for piece in run(ids[:min_tokens])[1])
    found = [
        (end, -len(stop), stop)
        for end in range(early + 1, len(whole) + 1)
        for stop in stops
        if whole[:end].endswith(stop)
    ]
    text, pieces = run(ids, tuple(stops), include, min_tokens)
    if not found:
        assert text == whole
        assert all(piece.stop is None for piece in pieces)
        return
    end, _, stop = min(found)
    assert pieces[-1].stop == stop
    assert text == (whole[:end] if include else whole[: end - len(stop)])


@pytest.mark.fault("TGI#1724")
@pytest.mark.fault("vllm#1973")
@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aSTOP")])
def test_the_stop_string_is_kept_or_not_as_asked(include: bool, text: str) -> None:
    for cut in (["STOP"], ["ST", "OP"], ["S", "T", "O", "P"], ["ST", "O", "P"]):
        ids = ids_of("a") + [token for part in cut for token in ([id_of(part)] if part in EXTRA else ids_of(part))]
        assert run(ids, ("STOP",), include)[0] == text
    inside = [*ids_of("aS"), id_of("TOP x")]  # ends inside a token
    assert run(inside, ("STOP",), include)[0] == text


@pytest.mark.fault("vllm#11089")
def test_only_a_possible_beginning_is_held_back() -> None:
    stop = "STOP" + "x" * 300
    pieces = run([*ids_of("abS"), id_of("ST"), *ids_of("Oaé")], (stop,))[1]
    assert [piece.text for piece in pieces] == ["a", "b", "", "S", "", "STOa", "", "é"]


def test_nothing_is_held_back_when_the_stop_string_stays_in_the_text() -> None:
    pieces = run(ids_of("aSTOP"), ("STOP",), True)[1]
    assert [piece.text for piece in pieces] == list("aSTOP")
    assert pieces[-1].stop == "STOP"


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(TOKENIZER, b"", ("STOP",), False)
    assert [stream.push(token_id).text for token_id in (*ids_of("aST"), EOS_ID, 0xC3)] == ["a", "", "", "</s>", ""]
    assert stream.finish() == "ST\ufffd"
    assert stream.text == "aST\ufffd"


def test_special_tokens_are_marked_and_not_part_of_the_text() -> None:
    text, pieces = run([BOS_ID, 0xC3, BOS_ID, 0xA9, EOS_ID])
    assert pieces == [
        Piece("<s>", True, None),
        Piece("", False, None),
        Piece("<s>", True, None),
        Piece("é", False, None),
        Piece("</s>", True, None),
    ]
    assert text == "é"


@pytest.mark.fault("lmdeploy#1047")
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_special_token_stops(include: bool) -> None:
    text, pieces = run([*ids_of("hi"), TURN_END_ID, *ids_of("x")], ("STOP", "<|im_end|>"), include)
    assert text == "hi"
    assert pieces[-1] == Piece("<|im_end|>", True, "<|im_end|>")


@pytest.mark.fault("lmdeploy#1047")
def test_it_stops_also_when_the_model_spells_it_in_plain_tokens() -> None:
    text, pieces = run(ids_of("hi<|im_end|>x"), ("<|im_end|>",))
    assert text == "hi"
    assert pieces[-1].stop == "<|im_end|>"


@pytest.mark.fault("lmdeploy#3131")
def test_the_answer_names_the_stop_string_that_matched() -> None:
    for ids, stop in ((ids_of("abc\n\n"), "\n\n"), (ids_of("abSTOP"), "STOP"), (ids_of("ab, STO"), "STO")):
        assert run(ids, ("\n\n", "STO" if stop == "STO" else "STOP"))[1][-1].stop == stop


def test_stop_strings_count_behind_the_least_length() -> None:
    assert run(ids_of("aSTOPbSTOP"), ("STOP",), False, 4)[0] == "a"
    text, pieces = run(ids_of("aSTOPbSTOP"), ("STOP",), False, 5)
    assert text == "aSTOPb"
    assert [piece.text for piece in pieces] == ["a", "", "", "", "STOP", "b", "", "", "", ""]
    assert run(ids_of("xxx"), ("xx",), False, 2)[0] == "x"  # it begins within, and ends behind


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (1, "hi"), (3, "hi"), (4, "hiyo")])
def test_the_text_of_a_special_token_counts_behind_the_least_length(min_tokens: int, expected: str) -> None:
    ids = [TURN_END_ID, *ids_of("hi"), TURN_END_ID, *ids_of("yo"), TURN_END_ID]
    text, pieces = run(ids, ("<|im_end|>",), False, min_tokens)
    assert text == expected
    assert pieces[-1] == Piece("<|im_end|>", True, "<|im_end|>")


@given(
    WITH_SPECIAL,
    st.lists(
        st.sampled_from(["P<s>", "\n<|im_end|>", "<s>ST", "<s><s>", "OP", "S", "<|im_end|>é"]), min_size=1, max_size=3
    ),
    st.booleans(),
)
def test_stop_strings_with_special_tokens_inside(ids: list[int], stops: list[str], include: bool) -> None:
    text, pieces = run(ids, tuple(stops), include)
    # By definition: plain stop strings in the visible text, the others where special tokens are spelled out.
    taken = ids[: len(pieces)]
    visible = TOKENIZER.decode(taken)
    spelled = TOKENIZER.decode(taken, skip_special_tokens=False)
    stop = pieces[-1].stop if pieces else None
    if stop is None:
        assert not any(one in (spelled if "<" in one else visible) for one in stops)
        assert text == visible
        return
    assert stop in (spelled if "<" in stop else visible)
    before = ids[: len(pieces) - 1]
    for one in stops:
        whole = TOKENIZER.decode(before, skip_special_tokens="<" not in one)
        assert one not in whole.removesuffix("\ufffd")
    assert visible.startswith(text)
    if include:
        assert visible.removesuffix(text) == visible[len(text) :]
        assert "<" in stop or text.endswith(stop)
    else:
        assert not any(one in text for one in stops)


def test_text_held_for_one_stop_string_goes_out_when_a_special_token_stops() -> None:
    stream = TextStream(TOKENIZER, b"", ("STOP", "<|im_end|>"), False)
    assert [stream.push(token_id).text for token_id in ids_of("aST")] == ["a", "", ""]
    assert stream.push(TURN_END_ID) == Piece("ST", False, "<|im_end|>")
    assert stream.text == "aST"


def test_a_token_of_one_stop_string_that_runs_into_a_special_token() -> None:
    stream = TextStream(TOKENIZER, b"", ("\n<|im_end|>",), False)
    assert [stream.push(token_id).text for token_id in ids_of("a\n")] == ["a", ""]
    assert stream.push(TURN_END_ID) == Piece("<|im_end|>", True, "\n<|im_end|>")
    assert stream.text == "a"
    stream = TextStream(TOKENIZER, b"", ("\n<|im_end|>",), False)
    texts = [stream.push(token_id).text for token_id in (*ids_of("a\n"), EOS_ID, *ids_of("b"))]
    assert texts == ["a", "", "</s>", "\nb"]


def test_the_text_continues_the_prompt() -> None:
    tokenizer: Tokenizer = TOKENIZER
    prompt = bytes(memoryview(tokenizer.encode("a👍").ids)[:-4])  # cut within the emoji
    stream = TextStream(tokenizer, prompt, (), False)
    assert [stream.push(token_id).text for token_id in (0x8D, *ids_of(" b"))] == ["👍", " ", "b"]
