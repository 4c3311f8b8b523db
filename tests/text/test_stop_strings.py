"""Stop strings against the plain definition: read one character more until the text ends with one of them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tgi.text.stop_strings import StopMatch, StopMatcher

TEXTS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return end, max(matching, key=len)
    return None


def longest_candidate(text: str, stops: list[str]) -> int:
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    return max(len(prefix) for prefix in prefixes if text.endswith(prefix))


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *borders], [*borders, len(text)], strict=True)]


@given(cut_texts(), STOPS)
@example(["aab", "aaab"], ["aaaab", "b\n"])
@example(["ab"], ["b", "ab"])
@example(["abab", "a", "babb"], ["ababb"])
def test_found_where_the_definition_finds_it_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    wanted = expected("".join(pieces), stops)
    seen = ""
    for piece in pieces:
        match = matcher.feed(piece)
        if match:
            assert (len(seen) + match.end, match.stop) == wanted
            return
        seen += piece
        assert matcher.held == longest_candidate(seen, stops)
    assert wanted is None


@given(cut_texts(), STOPS, st.integers(0, 4))
def test_what_ends_in_a_text_that_is_passed_over_does_not_count(
    pieces: list[str], stops: list[str], num_passed: int
) -> None:
    matcher = StopMatcher(tuple(stops))
    seen = ""
    for piece in pieces[:num_passed]:
        matcher.pass_over(piece)
        seen += piece
        assert matcher.held == longest_candidate(seen, stops)
    for piece in pieces[num_passed:]:
        ends = range(len(seen) + 1, len(seen) + len(piece) + 1)
        found = [(end - len(seen), stop) for end in ends for stop in stops if (seen + piece)[:end].endswith(stop)]
        match = matcher.feed(piece)
        seen += piece
        if found:
            assert match is not None
            assert (match.end, -len(match.stop)) == min((end, -len(stop)) for end, stop in found)
            return
        assert match is None


def test_empty_stop_strings_match_nothing() -> None:
    matcher = StopMatcher(("",))
    assert matcher.feed("abc") is None
    assert matcher.held == 0


def test_a_very_long_stop_string_costs_only_what_was_matched_of_it() -> None:
    stop = "a" * 3_000_000 + "b"
    matcher = StopMatcher((stop,))
    for _ in range(50):
        assert matcher.feed("aaaa") is None
    assert matcher.held == 200
    assert matcher.feed("b") is None
    assert matcher.held == 0
    assert StopMatcher((stop,)).feed(stop) == StopMatch(stop, len(stop))
